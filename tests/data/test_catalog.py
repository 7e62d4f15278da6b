import hashlib
import io
import zipfile

import numpy as np
import pytest

from fedhur_app.config import OWN_DATA, available
from fedhur_app.data import movielens
from fedhur_app.data.catalog import DATASETS, data_home, fetch, load_dataset
from fedhur_app.data.errors import DataError
from fedhur_app.data.formats import read_recbole
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.partition import market_names
from tests.data.test_formats import write_grouplens, write_recbole
from tests.data.web import everything, offer, unreachable


@pytest.fixture
def sources(tmp_path, web, monkeypatch):
    """Both sources of MovieLens 100K with made-up rows, a server and a file; nothing uses the network."""
    files = tmp_path / "files"
    files.mkdir()
    write_grouplens(files)
    write_recbole(files)
    archive, wheel = io.BytesIO(), tmp_path / "recbole.whl"
    with zipfile.ZipFile(archive, "w") as members:
        for name in ("u.data", "u.item", "u.user"):
            members.write(files / name, f"ml-100k/{name}")
    with zipfile.ZipFile(wheel, "w") as members:
        for name in movielens.PACKAGE_SHA256:
            members.write(files / name, f"{movielens.PACKAGE_FOLDER}/{name}")
    checksums = {name: hashlib.sha256((files / name).read_bytes()).hexdigest() for name in movielens.PACKAGE_SHA256}
    content = movielens.content_sha256(read_recbole(files, "ml-100k"))
    offer(web, monkeypatch, "ml-100k", archive.getvalue())
    monkeypatch.setattr(movielens, "PACKAGE_SHA256", checksums)
    monkeypatch.setattr(movielens, "CONTENT_SHA256", content)
    monkeypatch.setattr(movielens, "_download_package", lambda workspace: wheel)
    return tmp_path


def no_package(monkeypatch):
    def fail(workspace):
        raise DataError("`pip download` failed")

    monkeypatch.setattr(movielens, "_download_package", fail)


def same(one, two):
    arrays = ("users", "items", "ratings", "timestamps", "user_ids", "item_ids", "item_titles", "user_markets")
    return (
        all(np.array_equal(getattr(one, key), getattr(two, key)) for key in arrays)
        and np.array_equal(one.user_columns["zip_code"], two.user_columns["zip_code"])
        and one.item_genres == two.item_genres
        and (one.name, one.notes) == (two.name, two.notes)
    )


def test_publisher_and_package_give_the_same_data(sources, monkeypatch):
    said = []
    fetch("ml-100k", sources / "a", said.append)
    assert not any("not reachable" in line for line in said)
    unreachable(monkeypatch)
    fetch("ml-100k", sources / "b", said.append)
    assert any("not reachable (Connection refused)" in line for line in said)
    assert any("taking the copy inside the package recbole" in line for line in said)
    one, two = load_dataset("ml-100k", sources / "a"), load_dataset("ml-100k", sources / "b")
    assert same(one, two)
    assert one.item_titles.tolist() == ["Café, Le (1991)", "unknown"]
    assert one.item_genres == (("Comedy", "Drama"), ("unknown",))


def test_the_licence_is_shown_once_and_the_network_used_once(sources, monkeypatch):
    said = []
    folder = fetch("ml-100k", sources / "home", said.append)
    assert sum("GroupLens" in line and "redistribution" in line for line in said) == 1
    unreachable(monkeypatch)
    no_package(monkeypatch)
    said.clear()
    assert fetch("ml-100k", sources / "home", said.append) == folder
    assert said == []
    assert len(load_dataset("ml-100k", sources / "home")) == 4


def test_what_the_publisher_sends_is_not_believed_without_its_checksum(sources, web, monkeypatch):
    web.files["/ml-100k.zip"] = web.files["/ml-100k.zip"][::-1]
    said = []
    fetch("ml-100k", sources / "a", said.append)
    assert any("sent a wrong file: wrong checksum" in line for line in said)
    assert len(load_dataset("ml-100k", sources / "a")) == 4
    no_package(monkeypatch)
    with pytest.raises(
        DataError, match=r"could not be downloaded:\n.*wrong checksum.*\n`pip download` failed\n.*--file"
    ):
        fetch("ml-100k", sources / "home", said.append)
    assert list((sources / "home").iterdir()) == []


def test_other_rows_than_published_are_no_data_set(sources, monkeypatch):
    monkeypatch.setattr(movielens, "CONTENT_SHA256", "0" * 64)
    with pytest.raises(DataError, match="rows of MovieLens 100K are not the published ones"):
        fetch("ml-100k", sources / "home", lambda line: None)
    assert everything(sources / "home") == ["downloads", "downloads/ml-100k.zip"], "the archive itself was right"


@pytest.mark.parametrize("file", ["ml-100k.inter", "ml-100k.item", "ml-100k.user"])
def test_a_wrong_checksum_in_the_package_leaves_nothing_behind(sources, monkeypatch, file):
    unreachable(monkeypatch)
    monkeypatch.setitem(movielens.PACKAGE_SHA256, file, "0" * 64)
    with pytest.raises(DataError, match=f"{file}.*wrong checksum"):
        fetch("ml-100k", sources / "home", lambda line: None)
    assert list((sources / "home").iterdir()) == []


def test_when_pip_fails_too_the_error_says_what_to_do(tmp_path, monkeypatch):
    unreachable(monkeypatch)
    monkeypatch.setattr(movielens, "PACKAGE", "no==such==version")
    with pytest.raises(
        DataError, match=r"pip download no==such==version.*Check the network(.|\n)*--file PATH/ml-100k.zip"
    ):
        fetch("ml-100k", tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["interactions.parquet", "card.json"])
def test_a_damaged_store_is_named(sources, file):
    folder = fetch("ml-100k", sources / "home", lambda line: None)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=file):
        load_dataset("ml-100k", sources / "home")


def test_a_store_with_a_missing_file_is_fetched_again(sources, capsys):
    folder = fetch("ml-100k", sources / "home", lambda line: None)
    (folder / "card.json").unlink()
    assert len(load_dataset("ml-100k", sources / "home")) == 4
    assert "GroupLens" in capsys.readouterr().out
    assert [path.name for path in (sources / "home").iterdir()] == ["ml-100k"]


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(DataError, match="no data set 'ml100k'; did you mean ml-100k"):
        load_dataset("ml100k")
    with pytest.raises(DataError, match=r"no data set .zzzz.; there are .*synthetic"):
        fetch("zzzz")


def test_synthetic_data_needs_no_fetch(tmp_path):
    said = []
    fetch("synthetic", tmp_path, said.append)
    assert "nothing to fetch" in said[0]
    data = load_dataset("synthetic", tmp_path, {"users": 7, "items": 16, "interactions_per_user": 3})
    assert (data.n_users, data.n_items) == (7, 16)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="no setting 'user'; did you mean users"):
        load_dataset("synthetic", tmp_path, {"user": 7})


def test_markets_synthetic_is_generated_from_settings(tmp_path):
    said = []
    fetch("markets-synthetic", tmp_path, said.append)
    assert "nothing to fetch" in said[0]
    data = load_dataset("markets-synthetic", tmp_path, {"users": 9}, {"users": [7, 4], "items": 16})
    assert (data.name, data.n_users, data.n_items) == ("markets-synthetic", 11, 16)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="no setting 'shfit'; did you mean shift"):
        load_dataset("markets-synthetic", tmp_path, markets={"shfit": 0.1})


def test_markets_ml_100k_is_ml_100k_with_markets(sources, monkeypatch):
    said = []
    folder = fetch("markets-ml-100k", sources / "home", said.append)
    assert folder == sources / "home" / "ml-100k"
    assert any("GroupLens" in line for line in said)
    unreachable(monkeypatch)
    no_package(monkeypatch)
    plain, data = (load_dataset(name, sources / "home") for name in ("ml-100k", "markets-ml-100k"))
    assert [path.name for path in (sources / "home").iterdir()] == ["ml-100k"]
    assert data.name == "markets-ml-100k"
    # Users 1, 3 and 10 live at 85711, T8H1N and 05201.
    assert data.user_markets.tolist() == ["8", "other", "0"]
    assert plain.user_markets is None
    assert data.fingerprint() != plain.fingerprint()
    assert np.array_equal(data.items, plain.items)


def test_the_first_digit_of_a_zip_code_is_the_market():
    codes = {"1": "05201", "2": "98765", "3": "T8H1N", "4": "", "5": "V3N4P", "6": "\u0663123", "7": "9"}
    data = from_raw("x", list(codes), [1] * 7, user_columns={"zip_code": codes})
    markets = movielens.with_zip_code_markets(data, "y")
    assert markets.user_markets.tolist() == ["0", "9", "other", "other", "other", "other", "9"]
    assert market_names(markets) == ("0", "9", "other")
    with pytest.raises(DataError, match="x has no zip codes"):
        movielens.with_zip_code_markets(from_raw("x", [1], [1]), "y")


def test_every_data_set_has_settings_and_every_settings_file_a_data_set():
    assert set(available("dataset")) == {*DATASETS, OWN_DATA}
    for entry in DATASETS.values():
        assert [bool(entry.archive), bool(entry.generate), bool(entry.base and entry.derive)].count(True) == 1


def test_every_entry_says_its_terms_and_the_home_can_be_set(monkeypatch, tmp_path):
    assert all(name == entry.name and entry.licence and entry.source for name, entry in DATASETS.items())
    monkeypatch.setenv("FEDHUR_DATA", str(tmp_path / "d"))
    assert data_home() == tmp_path / "d"
    monkeypatch.delenv("FEDHUR_DATA")
    assert data_home().name == "fedhur"
