import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from fedhur_app.data import markets
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.store import is_data_set, load_interactions, read_card, read_npz, save_interactions, write_npz

ARRAYS = ("users", "items", "ratings", "timestamps", "user_ids", "item_ids", "item_titles", "user_markets")


def whole():
    """Every part that a data set may have; users 1 and 01 are two, item ids are text."""
    return from_raw(
        "x",
        ["1", "01", "1", "2"],
        ["034545104X", "b", "b", "b"],
        [5, 3.5, 1, 0],
        [881250951, 881250950, 881250949, 2**40],
        labels=[0, 1, 2, 0],
        owners=["b", "a", "b", "b"],
        catalogue=["never"],
        item_titles={"b": "Überraschung", "never": 'a "quoted", one'},
        item_genres={"b": ["Drama", "War"]},
        user_columns={"zip_code": {"01": "05201"}, "age": {"1": "33", "2": "7"}},
        notes=["one", "two"],
    )


def same(one, two):
    pairs = [(getattr(one, name), getattr(two, name)) for name in (*ARRAYS, "labels", "owner")]
    pairs += [(one.user_columns[name], two.user_columns[name]) for name in one.user_columns]
    for first, second in pairs:
        assert (first is None) == (second is None)
        if first is not None:
            assert np.array_equal(first, second)
            assert first.dtype.kind == second.dtype.kind
    assert list(one.user_columns) == list(two.user_columns)
    assert (one.name, one.notes, one.item_genres) == (two.name, two.notes, two.item_genres)
    return one.fingerprint() == two.fingerprint()


@pytest.mark.parametrize(
    "data",
    [
        whole(),
        markets.generate((5, 3), (4, 2), 12, seed=1),
        from_raw("bare", [3], [9]),
        from_raw("no genre at all", [3], [9], item_genres={}),
    ],
    ids=lambda data: data.name,
)
def test_what_was_saved_comes_back(tmp_path, data):
    save_interactions(tmp_path, data)
    assert is_data_set(tmp_path)
    assert same(data, load_interactions(tmp_path))


def test_the_card_says_where_the_data_come_from(tmp_path):
    data = whole()
    save_interactions(tmp_path, data, {"source": "somewhere", "licence": "free"})
    card = read_card(tmp_path)
    assert (card["name"], card["source"], card["licence"], card["notes"]) == ("x", "somewhere", "free", ["one", "two"])
    assert card["statistics"] == {"users": 3, "items": 3, "interactions": 4}
    assert card["fingerprint"] == data.fingerprint()


def test_a_column_of_users_cannot_take_a_name_of_the_table(tmp_path):
    data = replace(whole(), user_columns={"id": np.array(["a", "b", "c"])})
    with pytest.raises(DataError, match="column of users cannot be called 'id'"):
        save_interactions(tmp_path, data)


@pytest.mark.parametrize("name", ["interactions.parquet", "users.parquet", "items.parquet", "card.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_damage_is_named(tmp_path, name, damage):
    save_interactions(tmp_path, whole())
    path = tmp_path / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:60])
    elif damage == "gone":
        path.unlink()
        assert not is_data_set(tmp_path)
    else:
        path.write_text("{}")
    with pytest.raises(DataError, match=rf"{name}.*(fetch|import)"):
        load_interactions(tmp_path)


def test_a_table_that_was_changed_is_refused(tmp_path):
    save_interactions(tmp_path, whole())
    rows = pl.read_parquet(tmp_path / "interactions.parquet")
    rows.with_columns(pl.col("item").reverse()).write_parquet(tmp_path / "interactions.parquet")
    with pytest.raises(DataError, match="changed or damaged"):
        load_interactions(tmp_path)
    rows.drop("item").write_parquet(tmp_path / "interactions.parquet")
    with pytest.raises(DataError, match="incomplete"):
        load_interactions(tmp_path)


def test_a_card_of_another_form_is_refused(tmp_path):
    save_interactions(tmp_path, whole())
    card = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps(card | {"form": "fedhur-dataset 99"}))
    with pytest.raises(DataError, match="this version"):
        load_interactions(tmp_path)


NPZ = {
    "numbers": np.arange(1000),
    "text": np.array(["é", "two"]),
    "empty": np.zeros((0, 3), dtype=np.float32),
    "one": np.float64(2.5),
    "turned": np.arange(6).reshape(2, 3).T,
}


def test_an_npz_file_is_mapped_and_numpy_reads_it_too(tmp_path):
    path = tmp_path / "x.npz"
    write_npz(path, "test 1", NPZ)
    found = read_npz(path, "test 1")
    with np.load(path) as plain:
        for name, value in NPZ.items():
            assert np.array_equal(found[name], value)
            assert np.array_equal(plain[name], value)
            assert found[name].ctypes.data % 64 == 0
    # A change stays in this process.
    found["numbers"][0] = 7
    assert read_npz(path, "test 1")["numbers"][0] == 0


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_flipped_bit_is_found(tmp_path, place):
    path = tmp_path / "x.npz"
    write_npz(path, "test 1", {"numbers": np.arange(1000)})
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.npz is damaged"):
        read_npz(path, "test 1")


def test_only_plain_arrays_are_read(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, form=np.array("test 1"), numbers=np.arange(9))
    with pytest.raises(DataError, match="is damaged or is not a test file"):
        read_npz(path, "test 1")
    np.savez(path, form=np.array("test 1"), numbers=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="is damaged or is not a test file"):
        read_npz(path, "test 1")
