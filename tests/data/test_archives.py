"""Public archives from the address to the folder of the data set, on tiny archives of the right form."""

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedhur_app.cli import app
from fedhur_app.data import archives, catalog, importing, movielens, public, store
from fedhur_app.data.archives import Archive, Counts, Reading, obtain
from fedhur_app.data.catalog import DATASETS, fetch, load_dataset
from fedhur_app.data.download import DownloadError
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.listing import imported, known
from fedhur_app.data.store import read_card, save_interactions
from tests.data.web import everything, offer, unreachable


def zipped(**members):
    """A zip archive of texts and bytes by name."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text if isinstance(text, bytes) else text.encode())
    return content.getvalue()


# Three users and four films, one of them without a rating; rows are not in the order of time.
ROWS = [("1", "30", 5, 978300760), ("1", "7", 3, 978302109), ("2", "30", 4, 978301968), ("10", "500", 1, 978300275)]
FILMS = {"7": "Sabrina (1995)", "30": "Café, Le (1991)", "500": "Mrs. Doubtfire (1993)", "9": "Never, The (1990)"}


def ml_1m():
    return zipped(
        **{
            "ml-1m/README": "text",
            "ml-1m/movies.dat": "".join(f"{i}::{t}::Comedy|Drama\n" for i, t in FILMS.items()).encode("latin-1"),
            "ml-1m/ratings.dat": "".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in ROWS),
            "ml-1m/users.dat": "1::F::1::10::48067\n2::M::56::16::70072\n10::M::25::15::55117\n",
        }
    )


def ml_csv(folder):
    return zipped(
        **{
            f"{folder}/README.txt": "text",
            f"{folder}/links.csv": "movieId,imdbId,tmdbId\n7,1,2\n",
            f"{folder}/movies.csv": "movieId,title,genres\n"
            + "".join(f'{i},"{t}",Comedy|Drama\n' for i, t in FILMS.items()),
            f"{folder}/ratings.csv": "userId,movieId,rating,timestamp\n"
            + "".join(f"{u},{i},{r}.0,{t}\n" for u, i, r, t in ROWS),
            f"{folder}/tags.csv": "userId,movieId,tag,timestamp\n1,7,funny,978302109\n",
        }
    )


def book_crossing():
    """Twelve users who all read ten books, some of them without a rating, and what the 10-core leaves out."""
    rows = [(user, f"034545{book:03}X", (user + book) % 3) for user in range(1, 13) for book in range(10)]
    rows += [(99, "0345450000", 0), (1, "3257229535", 8)]
    lines = [f'"{user}";"{book}";"{rating}"' for user, book, rating in rows]
    books = [f'"{book}";"L\xe9gende";"Author";"1999"' for book in sorted({row[1] for row in rows})]
    return zipped(
        **{
            "BX-Book-Ratings.csv": "\r\n".join(['"User-ID";"ISBN";"Book-Rating"', *lines, ""]),
            "BX-Books.csv": "\r\n".join(['"ISBN";"Book-Title";"Book-Author";"Year-Of-Publication"', *books, ""]).encode(
                "latin-1"
            ),
            "BX-Users.csv": '"User-ID";"Location";"Age"\r\n"1";"nyc, new york, usa";NULL\r\n',
        }
    ), rows


def amazon():
    reviews = [
        {"reviewerID": f"A{u}", "asin": f"B00{i}", "reviewText": 'fine, "really"', "overall": r, "unixReviewTime": t}
        for u, i, r, t in ROWS
    ]
    return gzip.compress("".join(json.dumps(review) + "\n" for review in reviews).encode())


def lastfm():
    return zipped(
        **{
            "artists.dat": "id\tname\turl\tpictureURL\n30\tCafé\thttp://a\thttp://b\n7\tX\thttp://a\thttp://b\n",
            "user_artists.dat": "userID\tartistID\tweight\n" + "".join(f"{u}\t{i}\t{t}\n" for u, i, _, t in ROWS),
            "user_friends.dat": "userID\tfriendID\n1\t2\n",
        }
    )


FORMS = {
    "ml-1m": ml_1m,
    "ml-25m": lambda: ml_csv("ml-25m"),
    "ml-latest-small": lambda: ml_csv("ml-latest-small"),
    "amazon-beauty": amazon,
    "lastfm": lastfm,
}
TINY = Counts(3, 3, 4)


@pytest.mark.parametrize("name", FORMS)
def test_an_archive_becomes_the_data_set_that_is_in_it(web, monkeypatch, tmp_path, name):
    content = FORMS[name]()
    archive = offer(web, monkeypatch, name, content, replace(DATASETS[name].reading, counts=TINY))
    said = []
    folder = fetch(name, tmp_path, said.append)
    data = load_dataset(name, tmp_path)
    ids = ("A", "B00") if name == "amazon-beauty" else ("", "")
    rows = list(zip(data.user_ids[data.users], data.item_ids[data.items], strict=True))
    assert rows == [(ids[0] + user, ids[1] + item) for user, item, _, _ in ROWS]
    if name == "lastfm":
        assert data.timestamps is None
        assert data.ratings.tolist() == [np.float32(row[3]) for row in ROWS]
    else:
        assert data.ratings.tolist() == [row[2] for row in ROWS]
        assert data.timestamps.tolist() == [row[3] for row in ROWS]
    if name.startswith("ml-"):
        titles = dict(zip(data.item_ids.tolist(), data.item_titles.tolist(), strict=True))
        assert titles == {number: title for number, title in FILMS.items() if number != "9"}
        assert data.notes == ("1 items of the catalogue without interactions left out",)
    assert (data.n_users, data.n_items) == (3, 3)
    assert everything(tmp_path) == [name, *(f"{name}/{file}" for file in sorted(store._FILES))]
    assert DATASETS[name].licence in said
    card = read_card(folder)
    assert (card["name"], card["source"], card["licence"]) == (name, archive.addresses[0], DATASETS[name].licence)
    assert card["files"] == {archive.file: hashlib.sha256(content).hexdigest()}
    assert card["published"] == {"users": 3, "items": 3, "interactions": 4}
    assert card["statistics"]["interactions"] == 4


def test_both_readings_of_book_crossing(web, monkeypatch, tmp_path):
    content, rows = book_crossing()
    explicit = [row for row in rows if row[2]]
    for name, counts in (
        ("book-crossing", Counts(13, 12, len(rows))),
        ("book-crossing-explicit", Counts(None, None, len(explicit))),
    ):
        offer(web, monkeypatch, name, content, replace(DATASETS[name].reading, counts=counts))
        fetch(name, tmp_path, lambda line: None)
    both = load_dataset("book-crossing", tmp_path)
    # The user with one book and the books with one reader are not in the 10-core; the rest has 12 users and 10 books.
    assert (both.n_users, both.n_items, len(both)) == (12, 10, 120)
    assert both.item_titles.tolist() == ["L\xe9gende"] * 10
    assert sorted(set(both.ratings.tolist())) == [0.0, 1.0, 2.0]
    rated = load_dataset("book-crossing-explicit", tmp_path)
    # Of the ten books of a user three or four have (user + book) % 3 == 0; at least six ratings are left to each.
    assert (rated.n_users, rated.n_items, len(rated)) == (12, 10, len(explicit) - 1)
    assert sorted(set(rated.ratings.tolist())) == [1.0, 2.0]


def test_what_lies_beside_an_archive_by_chance_is_not_read(web, monkeypatch, tmp_path):
    content = amazon()
    archive = offer(web, monkeypatch, "amazon-beauty", content, Reading(counts=TINY))
    (tmp_path / archive.file).write_bytes(content)
    (tmp_path / "meta_Beauty.json").write_text('{"asin": "B00999", "title": "Soap"}\n')
    fetch("amazon-beauty", tmp_path / "home", lambda line: None, tmp_path / archive.file)
    data = load_dataset("amazon-beauty", tmp_path / "home")
    assert data.item_ids.tolist() == ["B0030", "B00500", "B007"]
    assert data.item_titles is None


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (Counts(4, 3, 4), "3 users where 4 are published"),
        (Counts(3, 4, 3), "3 items where 4 are published, 4 interactions where 3 are published"),
    ],
)
def test_other_numbers_than_published_are_an_error_that_says_so(web, monkeypatch, tmp_path, counts, message):
    offer(web, monkeypatch, "ml-1m", ml_1m(), Reading(counts=counts))
    with pytest.raises(DataError, match=f"ml-1m: {message}"):
        fetch("ml-1m", tmp_path, lambda line: None)
    assert everything(tmp_path) == ["downloads", "downloads/ml-1m.zip"]


def test_counts_may_be_short_by_a_share_but_never_above():
    data = from_raw("x", [1, 1, 2], [5, 6, 5])
    assert Counts(2, 2, 3).difference(data) == Counts(None, None, 3).difference(data) == ""
    assert Counts(2, 2, 4).difference(data) == "3 interactions where 4 are published"
    assert Counts(2, 2, 4, missing=0.25).difference(data) == ""
    assert Counts(2, 2, 4, missing=0.24).difference(data) != ""
    assert Counts(2, 2, 2, missing=0.25).difference(data) == "3 interactions where 2 are published"
    # Items of the catalogue that nobody touched do not count.
    assert Counts(2, 2, 3).difference(from_raw("x", [1, 1, 2], [5, 6, 5], catalogue=["7"])) == ""


def test_mirrors_are_tried_in_turn_and_the_card_names_the_one(web, monkeypatch, tmp_path):
    content = ml_1m()
    first = (f"{web.address}/gone/ml-1m.zip", f"{web.address}/other/ml-1m.zip", f"{web.address}/ml-1m.zip")
    web.files["/other/ml-1m.zip"] = content[::-1]
    offer(web, monkeypatch, "ml-1m", content, Reading(counts=TINY), addresses=first)
    fetch("ml-1m", tmp_path, lambda line: None)
    assert [path for path, _ in web.asked] == ["/gone/ml-1m.zip", "/other/ml-1m.zip", "/ml-1m.zip"]
    assert read_card(tmp_path / "ml-1m")["source"] == first[2]
    web.files.pop("/ml-1m.zip")
    with pytest.raises(DataError) as caught:
        fetch("ml-1m", tmp_path / "b", lambda line: None)
    lines = str(caught.value).splitlines()
    assert ["404" in line for line in lines] == [False, True, False, True, False]
    assert "other/ml-1m.zip sent a wrong file: wrong checksum" in lines[2]
    assert "fedhur data fetch ml-1m --file" in lines[4]
    assert everything(tmp_path / "b") == []


def test_a_broken_download_goes_on_at_the_next_fetch(web, monkeypatch, tmp_path):
    content = ml_1m()
    offer(web, monkeypatch, "ml-1m", content, Reading(counts=TINY))
    monkeypatch.setattr(archives.download, "__defaults__", ("", None, print, None, ()))
    web.cut, web.cuts = 300, 1
    with pytest.raises(DataError, match="connection was lost"):
        fetch("ml-1m", tmp_path, lambda line: None)
    assert everything(tmp_path) == ["downloads", "downloads/ml-1m.zip.part", "downloads/ml-1m.zip.part.json"]
    assert {each.name: each.state for each in known(tmp_path)}["ml-1m"] == "partly downloaded"
    fetch("ml-1m", tmp_path, lambda line: None)
    assert web.asked[-1] == ("/ml-1m.zip", "bytes=300-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ml-1m"]


def test_an_archive_from_the_disk_is_verified_alike_and_stays(web, monkeypatch, tmp_path):
    content = ml_1m()
    offer(web, monkeypatch, "ml-1m", content, Reading(counts=TINY))
    own = tmp_path / "own.zip"
    for wrong, message in ((content + b"x", r"own.zip is not ml-1m.zip as published: it has"), (b"<html>", "web page")):
        own.write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            fetch("ml-1m", tmp_path / "home", lambda line: None, own)
    own.write_bytes(content[::-1])
    with pytest.raises(DataError, match="wrong checksum"):
        fetch("ml-1m", tmp_path / "home", lambda line: None, own)
    for path, message in ((tmp_path, "a folder"), (tmp_path / "none", "not there")):
        with pytest.raises(DataError, match=message):
            fetch("ml-1m", tmp_path / "home", lambda line: None, path)
    assert everything(tmp_path / "home") == []
    own.write_bytes(content)
    fetch("ml-1m", tmp_path / "home", lambda line: None, own)
    assert len(load_dataset("ml-1m", tmp_path / "home")) == 4
    assert own.read_bytes() == content
    assert web.asked == []
    with pytest.raises(DataError, match="synthetic is generated"):
        fetch("synthetic", tmp_path / "home", lambda line: None, own)


def test_an_archive_that_changes_is_compared_with_its_published_checksum(web, monkeypatch, tmp_path):
    old, new = ml_csv("old"), ml_csv("new") + b""
    assert old != new
    archive = Archive((f"{web.address}/s.zip",), f"sha256:{hashlib.sha256(old).hexdigest()}", len(old), changes=True)
    web.files |= {"/s.zip": old, "/s.zip.md5": f"MD5 (s.zip) = {hashlib.md5(old).hexdigest()}".encode()}
    said = []
    assert obtain(archive, tmp_path / "a", said.append).expected
    assert said == []
    web.files["/s.zip"], web.etag = new, '"2"'
    with pytest.raises(DownloadError, match="wrong checksum"):
        obtain(archive, tmp_path / "b", said.append)
    web.files["/s.zip.md5"] = f"MD5 (s.zip) = {hashlib.md5(new).hexdigest()}".encode()
    assert not obtain(archive, tmp_path / "b", said.append).expected
    assert any("the publisher has changed s.zip" in line for line in said)
    assert not obtain(archive, tmp_path, said.append, tmp_path / "b" / "s.zip").expected
    assert obtain(archive, tmp_path, said.append, tmp_path / "a" / "s.zip").expected
    # Without the published checksum only the version that is known is believed.
    del web.files["/s.zip.md5"]
    with pytest.raises(DownloadError, match="wrong checksum"):
        obtain(archive, tmp_path / "c", said.append)


def test_the_numbers_of_another_version_are_not_compared(web, monkeypatch, tmp_path):
    content = ml_csv("new")
    known_version = {"checksum": "sha256:" + "0" * 64, "changes": True}
    offer(web, monkeypatch, "ml-latest-small", content, **known_version)
    web.files["/ml-latest-small.zip.md5"] = hashlib.md5(content).hexdigest().encode()
    fetch("ml-latest-small", tmp_path, lambda line: None)
    assert len(load_dataset("ml-latest-small", tmp_path)) == 4
    assert "published" not in read_card(tmp_path / "ml-latest-small")


STEPS = {
    "download": (catalog, "obtain"),
    "verify": (archives, "_is_expected"),
    "read": (importing, "import_file"),
    "compare": (Counts, "difference"),
    "save": (catalog, "save_interactions"),
    "publish": (catalog, "publish"),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), DataError("x")])
@pytest.mark.parametrize("step", STEPS)
def test_whatever_breaks_there_is_no_half_data_set(web, monkeypatch, tmp_path, step, error):
    offer(web, monkeypatch, "ml-1m", ml_1m(), Reading(counts=TINY))
    where, what = STEPS[step]
    function = getattr(where, what)

    def breaking(*arguments, **more):
        if step == "save":
            function(*arguments, **more)
            (arguments[0] / "items.parquet").unlink()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, what, breaking)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else DataError):
            fetch("ml-1m", tmp_path, lambda line: None)
    assert set(everything(tmp_path)) <= {"downloads", "downloads/ml-1m.zip"}
    assert len(load_dataset("ml-1m", tmp_path)) == 4
    assert len(web.asked) == 1, "an archive that is there and right is not downloaded again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ml-1m"]


KILLED = """
import sys, time
from dataclasses import replace
from pathlib import Path
from fedhur_app.data import catalog
from fedhur_app.data.archives import Archive, Reading

home, address, checksum = sys.argv[1:]

def hang(*_, **__):
    print("at it", flush=True)
    time.sleep(60)

catalog.publish = hang
entry = catalog.DATASETS["ml-1m"]
catalog.DATASETS["ml-1m"] = replace(entry, archive=Archive((address,), checksum), reading=Reading())
catalog.fetch("ml-1m", Path(home), lambda line: None)
"""


def test_a_killed_process_leaves_nothing_that_is_in_the_way(web, monkeypatch, tmp_path):
    archive = offer(web, monkeypatch, "ml-1m", ml_1m(), Reading(counts=TINY))
    words = [sys.executable, "-c", KILLED, str(tmp_path), archive.addresses[0], archive.checksum]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"at it\n"
        assert "downloads/ml-1m.zip.work/finished/card.json" in everything(tmp_path)
        process.kill()
    assert not (tmp_path / "ml-1m").exists()
    said = []
    fetch("ml-1m", tmp_path, said.append)
    assert not any("waiting" in line for line in said)
    assert everything(tmp_path)[0] == "ml-1m", "the rest of the killed one is gone"
    assert len(load_dataset("ml-1m", tmp_path)) == 4


def test_the_list_tells_what_is_there(web, monkeypatch, tmp_path):
    states = {each.name: each.state for each in known(tmp_path)}
    assert list(states) == list(DATASETS)
    assert states["ml-1m"] == states["markets-ml-100k"] == "not fetched"
    assert states["synthetic"] == "generated"
    assert imported(tmp_path) == imported(tmp_path / "none") == []
    offer(web, monkeypatch, "ml-1m", ml_1m(), Reading(counts=TINY))
    fetch("ml-1m", tmp_path, lambda line: None)
    for name in ("mine", "ml-100k", "torn", "odd"):
        (tmp_path / name).mkdir()
        save_interactions(tmp_path / name, from_raw(name, [1, 1, 2], [5, 6, 5]))
    (tmp_path / "torn" / "users.parquet").unlink()
    (tmp_path / "odd" / "card.json").write_text("{}")
    (tmp_path / "prepared").mkdir()
    states = {each.name: each.state for each in known(tmp_path)}
    assert states["ml-1m"] == "fetched"
    assert states["markets-ml-100k"] == "made of ml-100k, fetched"
    shown = {each.name: (each.about, each.state.split(";")[0]) for each in imported(tmp_path)}
    assert shown == {
        "mine": ("2 users, 2 items, 3 interactions", "imported"),
        "odd": ("", "damaged"),
        "torn": ("", "incomplete"),
    }
    sizes = {each.name: each.download for each in known(tmp_path)}
    assert (sizes["ml-25m"], sizes["lastfm"], sizes["synthetic"]) == ("249.8 MiB", "", "")


def test_entries_say_where_from_and_how_verified():
    assert DATASETS["ml-1m"].archive is movielens.ML_1M
    assert DATASETS["book-crossing"].archive is DATASETS["book-crossing-explicit"].archive is public.BOOK_CROSSING
    for entry in DATASETS.values():
        if entry.archive is None:
            continue
        algorithm, _, digest = entry.archive.checksum.partition(":")
        assert len(digest) == {"md5": 32, "sha256": 64}[algorithm]
        assert int(digest, 16)
        # A checksum from the same place protects only as far as the connection does.
        assert not entry.archive.changes or all(each.startswith("https://") for each in entry.archive.addresses)
        assert "cite" in entry.licence or "reference" in entry.licence


def test_nobody_answers(monkeypatch, tmp_path):
    unreachable(monkeypatch, "lastfm")
    with pytest.raises(DataError) as caught:
        fetch("lastfm", tmp_path, lambda line: None)
    assert str(caught.value).splitlines() == [
        "lastfm could not be downloaded:",
        "http://127.0.0.1:1/hetrec2011-lastfm-2k.zip: not reachable (Connection refused)",
        "Check the network and try again; or get hetrec2011-lastfm-2k.zip in another way, and run: fedhur data fetch "
        "lastfm --file PATH/hetrec2011-lastfm-2k.zip",
    ]
    assert everything(tmp_path) == []


def test_the_commands_fetch_from_the_disk_and_list(web, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDHUR_DATA", str(tmp_path / "home"))
    offer(web, monkeypatch, "ml-1m", ml_1m(), Reading(counts=TINY))
    (tmp_path / "a.zip").write_bytes(ml_1m())
    shown = CliRunner().invoke(app, ["data", "fetch", "ml-1m", "--file", str(tmp_path / "a.zip")])
    assert shown.exit_code == 0, shown.output
    assert f"ml-1m: {tmp_path / 'home' / 'ml-1m'}" in shown.output
    assert web.asked == []
    shown = CliRunner().invoke(app, ["data", "list"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[0]: line for line in shown.output.splitlines()}
    assert re.search(r"MovieLens 1M.* fetched *$", lines["ml-1m"])
    assert re.search(r" 249.8 MiB +not fetched *$", lines["ml-25m"])
    assert str(tmp_path / "home") in shown.output
