import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw


def test_neighbouring_seconds_stay_apart_and_in_order():
    data = from_raw("x", [1, 1, 1], [30, 10, 20], timestamps=[881250951, 881250949, 881250950])
    assert data.timestamps.dtype == np.int64
    assert data.timestamps.tolist() == [881250951, 881250949, 881250950]
    assert data.item_ids[data.items].tolist() == ["30", "10", "20"]


def test_float32_times_are_refused():
    with pytest.raises(DataError, match="float32"):
        from_raw("x", [1], [1], timestamps=np.array([881250949], dtype=np.float32))


def test_float64_times_are_taken_only_when_whole():
    data = from_raw("x", [1, 2], [1, 1], timestamps=np.array([881250949.0, 881250950.0]))
    assert data.timestamps.tolist() == [881250949, 881250950]
    with pytest.raises(DataError, match="row 1"):
        from_raw("x", [1, 2], [1, 1], timestamps=np.array([881250949.0, 881250950.5]))


@pytest.mark.parametrize("kind", [int, str])
def test_integer_ids_are_numbered_by_value(kind):
    data = from_raw("x", [kind(v) for v in (9, 10, 9)], [kind(v) for v in (500, 7, 1)])
    assert data.user_ids.tolist() == ["9", "10"]
    assert data.item_ids.tolist() == ["1", "7", "500"]
    assert data.users.tolist() == [0, 1, 0]
    assert data.items.tolist() == [2, 1, 0]
    assert (data.n_users, data.n_items, len(data)) == (2, 3, 3)


def test_ids_beyond_64_bits_and_with_leading_zeros_stay_apart():
    big = str(2**70)
    data = from_raw("x", ["1", "1", "1", "1"], [big, "2", "01", "1"])
    assert data.item_ids.tolist() == ["01", "1", "2", big]
    assert data.items.tolist() == [3, 2, 0, 1]


def test_isbns_are_numbered_as_text():
    data = from_raw("x", [2, 2, 2], ["0440234743", "034545104X", "1"])
    assert data.item_ids.tolist() == ["034545104X", "0440234743", "1"]
    assert data.items.tolist() == [1, 0, 2]


def test_repeats_keep_the_latest_and_are_counted():
    data = from_raw("x", ["u1", "u2", "u1", "u1"], ["i1", "i1", "i1", "i1"], [1, 2, 5, 4], [10, 20, 40, 30])
    assert data.user_ids[data.users].tolist() == ["u2", "u1"]
    assert data.ratings.tolist() == [2, 5]
    assert data.timestamps.tolist() == [20, 40]
    assert data.notes == ("2 repeated (user, item) pairs: the last was kept",)


@pytest.mark.parametrize("times", [None, [7, 7, 7]])
def test_repeats_without_times_or_with_ties_keep_the_last_row_in_its_place(times):
    data = from_raw("x", [1, 1, 1], [5, 6, 5], [1, 2, 3], times, notes=["1 damaged line"])
    assert data.item_ids[data.items].tolist() == ["6", "5"]
    assert data.ratings.tolist() == [2, 3]
    assert data.notes == ("1 damaged line", "1 repeated (user, item) pair: the last was kept")


def test_catalogue_titles_genres_and_zip_codes_follow_the_dense_ids():
    data = from_raw(
        "x",
        [3, 1],
        [7, 500],
        catalogue=["500", "12"],
        item_titles={"7": "Seven", "12": "Twelve", "8": "not in the catalogue"},
        item_genres={"500": ["Drama", "War"]},
        user_columns={"zip_code": {"3": "T8H1N"}},
    )
    assert data.item_ids.tolist() == ["7", "12", "500"]
    assert data.item_titles.tolist() == ["Seven", "Twelve", ""]
    assert data.item_genres == ((), (), ("Drama", "War"))
    assert data.user_columns["zip_code"].tolist() == ["", "T8H1N"]
    assert data.items.tolist() == [0, 2]


def test_without_extras_there_are_none():
    data = from_raw("x", [1], [1])
    assert (data.ratings, data.timestamps, data.item_titles, data.item_genres, data.user_markets) == ((None,) * 5)
    assert (data.labels, data.owner, data.user_columns) == (None, None, {})
    assert data.notes == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "no interactions"),
        (([1, 2], [1]), "unequal lengths.*users: 2, items: 1"),
        (([1], [1], [1.0, 2.0]), "ratings: 2"),
        (([1], [1], None, [1, 2]), "timestamps: 2"),
        (([1, 2], [1, 1], [3.0, float("nan")]), "row 1: the rating"),
        (([1], [1], ["five"]), "ratings must be numbers"),
        (([1.0], [1]), "user ids must be integers or text"),
        (([1], ["a", None]), "row 1: the item id is a NoneType"),
        ((["a", " "], [1, 2]), "row 1: the user id is empty"),
        (([[1]], [1]), "flat list"),
        (([1], [1], None, ["noon"]), "whole numbers"),
    ],
)
def test_unusable_columns_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        from_raw("x", *arguments)


def test_error_texts_hold_no_ids():
    with pytest.raises(DataError) as caught:
        from_raw("x", ["secret-user", "other"], ["secret-item", ""])
    assert "secret" not in str(caught.value)


def test_fingerprint_is_the_same_everywhere_and_sees_every_part():
    base = from_raw("x", [1, 2], [7, 9], timestamps=[5, 6])
    spelled_out = b"|".join(struct.pack("<2q", *column) for column in ((0, 1), (0, 1), (5, 6)))
    spelled_out += b'|["1", "2"]["7", "9"]'
    assert base.fingerprint() == hashlib.sha256(spelled_out).hexdigest()[:16] == "0662e85d8d3cea83"
    others = [
        from_raw("x", [2, 1], [7, 9], timestamps=[5, 6]),
        from_raw("x", [1, 2], [9, 7], timestamps=[5, 6]),
        from_raw("x", [1, 2], [7, 9], timestamps=[5, 7]),
        from_raw("x", [1, 2], [7, 9]),
        from_raw("x", [1, 3], [7, 9], timestamps=[5, 6]),
        from_raw("x", [1, 2], [7, 9], timestamps=[5, 6], catalogue=["10"]),
    ]
    assert len({data.fingerprint() for data in [base, *others]}) == 7
    same = from_raw("y", ["1", "2"], ["7", "9"], [1, 2], [5, 6], item_titles={"7": "t"})
    assert same.fingerprint() == base.fingerprint()


def test_markets_follow_the_users():
    data = from_raw("x", [30, 4, 30, 5], [1, 1, 2, 2], markets=["us", "de", "us", "us"])
    assert data.user_ids.tolist() == ["4", "5", "30"]
    assert data.user_markets.tolist() == ["de", "us", "us"]
    assert from_raw("x", [1, 2], [1, 1], markets=[7, 10]).user_markets.tolist() == ["7", "10"]
    assert from_raw("x", [1], [1]).user_markets is None


def test_an_id_in_two_markets_means_two_users():
    # Then ids belong to their markets, also those that occur in one market only.
    data = from_raw(
        "x",
        ["1", "1", "2", "1"],
        ["a", "a", "a", "b"],
        markets=["us", "de", "us", "us"],
        user_columns={"zip_code": {"1": "10115", "2": "85711"}},
    )
    assert data.user_ids.tolist() == ["de/1", "us/1", "us/2"]
    assert data.user_markets.tolist() == ["de", "us", "us"]
    assert data.user_columns["zip_code"].tolist() == ["10115", "10115", "85711"]
    assert data.users.tolist() == [1, 0, 2, 1]
    assert data.notes == ()  # the pairs (1, a) of two markets are no repeats


@pytest.mark.parametrize(
    ("markets", "message"),
    [
        (["us"], "unequal lengths.*markets: 1"),
        (["us", ""], "row 1: the market id is empty"),
        (["us", "a/b"], "row 1: the name of the market holds a '/'"),
        ([1.0, 2.0], "market ids must be integers or text"),
    ],
)
def test_unusable_markets_are_refused(markets, message):
    with pytest.raises(DataError, match=message):
        from_raw("x", [1, 2], [1, 1], markets=markets)


def test_the_fingerprint_sees_the_markets():
    def with_markets(markets):
        return from_raw("x", [1, 2], [7, 9], timestamps=[5, 6], markets=markets).fingerprint()

    assert with_markets(None) == "0662e85d8d3cea83"  # as above, before there were markets
    assert len({with_markets(markets) for markets in (None, ["a", "a"], ["a", "b"], ["b", "a"])}) == 4


_rows = st.lists(
    st.tuples(st.integers(-5, 5), st.sampled_from(["a", "b", "c"]), st.integers(0, 3)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(_rows, st.booleans())
def test_what_remains_is_what_a_dictionary_would_keep(rows, timed):
    users, items, times = zip(*rows, strict=True)
    best = {}
    for row, (user, item, time) in enumerate(rows):
        rank = (time if timed else 0, row)
        best[user, item] = max(best.get((user, item), rank), rank)
    kept = sorted(row for _, row in best.values())
    data = from_raw("x", users, items, timestamps=times if timed else None)
    assert data.user_ids[data.users].tolist() == [str(users[row]) for row in kept]
    assert data.item_ids[data.items].tolist() == [items[row] for row in kept]
    assert data.user_ids.tolist() == [str(user) for user in sorted(set(users))]
