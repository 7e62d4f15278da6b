import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.partition import PARTITION_KINDS, assign_clients, market_names, market_numbers, taste_clusters
from fedhur_app.data.synthetic import generate


def of_users(n):
    return from_raw("made-up", np.arange(n), np.arange(n) % 3)


def assign(data, kind, clients, seed=1):
    return assign_clients(data, np.zeros(len(data), dtype=np.int8), kind, clients, seed)


def test_id_gives_equal_shares_and_the_remainder_to_the_last():
    # The published split of ML-100K: 99 clients of 9 users and one of 52.
    owner = assign(of_users(943), "id", 100)
    assert owner.dtype == np.int64
    assert np.bincount(owner).tolist() == [9] * 99 + [52]
    assert (np.diff(owner) >= 0).all()
    assert assign(of_users(7), "id", 3).tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_random_has_the_same_sizes_in_another_order():
    data = of_users(943)
    owner = assign(data, "random", 100)
    assert np.bincount(owner).tolist() == [9] * 99 + [52]
    assert (np.diff(owner) < 0).sum() > 300
    assert np.array_equal(owner, assign(data, "random", 100))
    assert not np.array_equal(owner, assign(data, "random", 100, seed=2))


def test_one_user_a_client_ignores_their_number():
    assert assign(of_users(5), "one-user", 2).tolist() == [0, 1, 2, 3, 4]


def of_markets(*names):
    return from_raw("made-up", np.arange(len(names)), np.zeros(len(names), dtype=int), markets=names)


def test_one_client_a_market_in_the_order_of_their_names():
    data = of_markets("us", "de", "other", "us", "Fr", "other")
    assert market_names(data) == ("Fr", "de", "us", "other")
    owner = assign(data, "market", 99)
    assert owner.tolist() == market_numbers(data).tolist() == [2, 1, 3, 2, 0, 3]
    assert owner.dtype == np.int64


@pytest.mark.parametrize(
    ("markets", "names"),
    [
        (("10", "9", "other", "-1"), ("-1", "9", "10", "other")),
        (("10", "9", "9a"), ("10", "9", "9a")),
        (("other", "other"), ("other",)),
        (("other", "zz"), ("zz", "other")),
    ],
)
def test_markets_with_integer_names_are_in_their_order_and_the_catch_all_is_last(markets, names):
    assert market_names(of_markets(*markets)) == names


def test_without_markets_there_are_no_clients_by_market():
    data = of_users(5)
    assert (market_names(data), market_numbers(data)) == ((), None)
    with pytest.raises(DataError, match=r"made-up has no markets to make clients of; choose another dataset\.clients"):
        assign(data, "market", 2)


def test_taste_brings_like_users_together():
    data = generate(200, 64, 20, branching=(4,), concentration=0.02, noise=0.0, seed=3)
    leaf = np.array([int(path[0]) for path in data.item_genres])
    taste = np.zeros((data.n_users, 5))
    np.add.at(taste, (data.users, leaf[data.items]), 1)
    favourite = taste.argmax(axis=1)

    def purity(owner):
        return np.mean([np.bincount(favourite[owner == k]).max() for k in range(20)]) / 10

    labels = np.zeros(len(data), dtype=np.int8)
    by_taste = assign_clients(data, labels, "taste", 20)
    assert np.bincount(by_taste).tolist() == [10] * 20
    assert purity(by_taste) > 0.85
    assert purity(assign_clients(data, labels, "id", 20)) < 0.6
    assert np.array_equal(by_taste, assign_clients(data, labels, "taste", 20))


def test_taste_looks_at_training_rows_only():
    data = generate(60, 40, 12, seed=3)
    labels = np.where(np.arange(len(data)) % 4 == 0, 2, 0).astype(np.int8)
    # The same data with other test rows: each user's test items are moved by one.
    items = data.items.copy()
    items[labels == 2] = (items[labels == 2] + 1) % data.n_items
    keys = data.users * data.n_items + items
    fresh = (labels == 0) | (np.isin(keys, keys[labels == 0], invert=True))
    moved = from_raw(
        "moved", data.users[fresh], items[fresh], timestamps=np.arange(fresh.sum()), catalogue=data.item_ids
    )
    assert len(moved) == fresh.sum()
    assert np.array_equal(taste_clusters(data, labels), taste_clusters(moved, labels[fresh]))


@pytest.mark.parametrize("users", [1, 2, 5])
def test_taste_of_few_users_and_of_users_without_training_rows(users):
    data = of_users(users)
    labels = np.full(len(data), 2, dtype=np.int8)
    assert sorted(assign_clients(data, labels, "taste", users).tolist()) == list(range(users))


@pytest.mark.parametrize(
    ("kind", "clients", "message"),
    [
        ("id", 0, "at least 1, not 0"),
        ("random", -3, "at least 1, not -3"),
        ("taste", 6, "6 clients cannot share 5 users; ask for at most 5"),
        ("iid", 2, "no partition 'iid'.*one-user, market"),
    ],
)
def test_impossible_requests_are_refused(kind, clients, message):
    with pytest.raises(DataError, match=message):
        assign(of_users(5), kind, clients)


@settings(max_examples=50, deadline=None)
@given(
    users=st.integers(1, 40),
    data=st.data(),
    kind=st.sampled_from(sorted({*PARTITION_KINDS} - {"market", "published"})),
    seed=st.integers(0, 2),
)
def test_every_user_has_one_client_and_every_client_a_user(users, data, kind, seed):
    clients = data.draw(st.integers(1, users))
    owner = assign(of_users(users), kind, clients, seed)
    clients = users if kind == "one-user" else clients
    assert owner.shape == (users,)
    counts = np.bincount(owner, minlength=clients)
    assert counts.tolist() == [users // clients] * (clients - 1) + [users - users // clients * (clients - 1)]
