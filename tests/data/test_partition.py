from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhur_app.config import KINDS_OF_DATA, ClientsSettings
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.partition import (
    PARTITIONS,
    assign_clients,
    decided_by_data,
    item_groups,
    market_names,
    market_numbers,
    taste_clusters,
)
from fedhur_app.data.synthetic import generate


def of_users(n):
    return from_raw("made-up", np.arange(n), np.arange(n) % 3)


def assign(data, kind, clients=1, seed=1, **options):
    return assign_clients(data, np.zeros(len(data), dtype=np.int8), kind, clients, seed, **options).owner


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
    by_taste = assign_clients(data, labels, "taste", 20).owner
    assert np.bincount(by_taste).tolist() == [10] * 20
    assert purity(by_taste) > 0.85
    assert purity(assign_clients(data, labels, "id", 20).owner) < 0.6
    assert np.array_equal(by_taste, assign_clients(data, labels, "taste", 20).owner)


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
    assert sorted(assign_clients(data, labels, "taste", users).owner.tolist()) == list(range(users))


@pytest.mark.parametrize(
    ("kind", "clients", "message"),
    [
        ("id", 0, "at least 1, not 0"),
        ("random", -3, "at least 1, not -3"),
        ("taste", 6, "6 clients cannot share 5 users; ask for at most 5"),
        ("dirichlet", 6, "6 clients cannot share 5 users"),
        ("iid", 2, "no partition 'iid'.*one-user, market"),
        ("colum", 2, "did you mean 'column'"),
    ],
)
def test_impossible_requests_are_refused(kind, clients, message):
    with pytest.raises(DataError, match=message):
        assign(of_users(5), kind, clients)


@settings(max_examples=50, deadline=None)
@given(
    users=st.integers(1, 40),
    data=st.data(),
    kind=st.sampled_from(["id", "random", "taste", "one-user"]),
    seed=st.integers(0, 2),
)
def test_every_user_has_one_client_and_every_client_a_user(users, data, kind, seed):
    clients = data.draw(st.integers(1, users))
    owner = assign(of_users(users), kind, clients, seed)
    clients = users if kind == "one-user" else clients
    assert owner.shape == (users,)
    counts = np.bincount(owner, minlength=clients)
    assert counts.tolist() == [users // clients] * (clients - 1) + [users - users // clients * (clients - 1)]


def test_the_settings_know_every_kind_and_which_ones_the_data_decide():
    assert get_args(ClientsSettings.model_fields["kind"].annotation) == tuple(PARTITIONS)
    assert tuple(kind for kind in PARTITIONS if decided_by_data(kind)) == KINDS_OF_DATA


def test_items_that_go_together_are_in_one_group():
    data = generate(200, 64, 20, branching=(4,), concentration=0.02, noise=0.0, seed=3)
    leaf = np.array([int(path[0]) for path in data.item_genres])
    groups = item_groups(data.users, data.items, data.n_users, data.n_items)
    # Up to 8 groups for 4 leaves: a group does not mix leaves.
    table = np.zeros((groups.max() + 1, leaf.max() + 1))
    np.add.at(table, (groups, leaf), 1)
    assert table.max(axis=1).sum() >= 0.9 * data.n_items


def test_items_without_training_rows_are_a_group_of_their_own():
    groups = item_groups(np.array([0, 0, 1]), np.array([3, 1, 1]), 3, 5)
    assert groups[[0, 2, 4]].tolist() == [groups.max()] * 3
    assert not set(groups[[1, 3]]) & {groups.max()}
    assert item_groups(np.array([], dtype=int), np.array([], dtype=int), 2, 3).tolist() == [0, 0, 0]


def test_groups_of_items_do_not_depend_on_the_order_of_rows():
    data = generate(50, 40, 10, seed=5)
    order = np.random.default_rng(0).permutation(len(data))
    groups = item_groups(data.users, data.items, data.n_users, data.n_items)
    assert np.array_equal(groups, item_groups(data.users[order], data.items[order], data.n_users, data.n_items))


@pytest.fixture(scope="module")
def tasteful():
    """400 users, nearly each with one favourite of four groups of items; their favourites."""
    data = generate(400, 64, 20, branching=(4,), concentration=0.02, noise=0.0, seed=3)
    leaf = np.array([int(path[0]) for path in data.item_genres]) - 1
    taste = np.zeros((data.n_users, leaf.max() + 1))
    np.add.at(taste, (data.users, leaf[data.items]), 1)
    return data, taste.argmax(axis=1)


def mixtures(owner, favourite):
    """Share of each favourite among the users of each client."""
    counts = np.zeros((owner.max() + 1, favourite.max() + 1))
    np.add.at(counts, (owner, favourite), 1)
    return counts / counts.sum(axis=1, keepdims=True)


def test_dirichlet_goes_from_one_taste_a_client_to_the_mixture_of_all(tasteful):
    data, favourite = tasteful
    whole = np.bincount(favourite) / len(favourite)
    distance = {}
    for alpha in (0.001, 1.0, 1e6):
        owners = [assign(data, "dirichlet", 20, seed, alpha=alpha) for seed in (1, 2, 3)]
        distance[alpha] = np.mean([abs(mixtures(owner, favourite) - whole).sum(axis=1).mean() / 2 for owner in owners])
    # One taste in each: the distance is 1 - the mean square of the shares, 0.75 for four equal ones.
    apart = 1 - (whole**2).sum()
    assert distance[0.001] > 0.75 * apart
    # Nearer to the whole than clients of random users.
    assert distance[1e6] < abs(mixtures(assign(data, "random", 20), favourite) - whole).sum(axis=1).mean() / 2
    assert distance[1e6] < distance[1.0] - 0.1 < distance[0.001] - 0.2


def test_dirichlet_is_seeded_and_gives_equal_sizes(tasteful):
    data, _ = tasteful
    owner = assign(data, "dirichlet", 30, alpha=0.3)
    assert sorted(np.bincount(owner).tolist()) == [13] * 20 + [14] * 10
    assert np.array_equal(owner, assign(data, "dirichlet", 30, alpha=0.3))
    assert not np.array_equal(owner, assign(data, "dirichlet", 30, seed=2, alpha=0.3))


def test_dirichlet_looks_at_training_rows_only(tasteful):
    data, _ = tasteful
    labels = np.where(np.arange(len(data)) % 3 == 0, 2, 0).astype(np.int8)
    shared = assign_clients(data, labels, "dirichlet", 20, alpha=0.1)
    moved = replace(data, items=np.where(labels == 2, (data.items + 7) % data.n_items, data.items))
    assert np.array_equal(shared.owner, assign_clients(moved, labels, "dirichlet", 20, alpha=0.1).owner)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=25).filter(any),
    data=st.data(),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 3),
)
def test_dirichlet_gives_each_client_its_number_of_users(counts, data, alpha, seed):
    clients = data.draw(st.integers(1, len(counts)))
    users = np.repeat(np.arange(len(counts)), counts)
    items = np.random.default_rng(seed).permutation(len(users)) % 7
    made_up = replace(of_users(len(counts)), users=users, items=items, item_ids=np.arange(7).astype(str))
    sizes = np.bincount(assign(made_up, "dirichlet", clients, seed, alpha=alpha), minlength=clients)
    assert sizes.sum() == len(counts)
    assert sizes.max() - sizes.min() <= 1
    assert sizes.min() >= 1


def with_codes(*codes):
    return replace(
        of_users(len(codes)), user_columns={"zip_code": np.array(codes), "age": np.array(["1"] * len(codes))}
    )


@pytest.mark.parametrize(
    ("options", "names", "owner"),
    [
        ({}, ("10115", "90", "9021", "90210", "T8H1N", "unknown"), [3, 0, 5, 2, 4, 3, 1]),
        ({"column_prefix": 2}, ("10", "90", "T8", "unknown"), [1, 0, 3, 1, 2, 1, 1]),
        ({"min_users": 2}, ("90210", "other"), [0, 1, 1, 1, 1, 0, 1]),
        ({"min_users": 2, "column_prefix": 2}, ("90", "other"), [0, 1, 1, 0, 1, 0, 0]),
        ({"min_users": 9}, ("other",), [0] * 7),
    ],
)
def test_a_client_for_each_value_of_a_column(options, names, owner):
    data = with_codes("90210", "10115", " ", "9021", "T8H1N", "90210", "90")
    shared = assign_clients(data, None, "column", column="zip_code", **options)
    assert shared.names == names
    assert shared.owner.tolist() == owner
    assert shared.number == len(names)


def test_values_that_are_numbers_are_in_their_order_before_other_and_unknown():
    shared = assign_clients(
        with_codes("10", "9", "", "", "10", "9", "7"), None, "column", column="zip_code", min_users=2
    )
    assert shared.names == ("9", "10", "other", "unknown")


def test_unknown_columns_are_refused_with_those_there_are():
    with pytest.raises(
        DataError, match=r"dataset\.clients\.column: .*'zipcode' \(did you mean 'zip_code'\?\).*age, zip_code"
    ):
        assign(with_codes("1"), "column", column="zipcode")
    with pytest.raises(DataError, match=r"no column 'zip_code'; there are none; choose another dataset\.clients\.kind"):
        assign(of_users(2), "column", column="zip_code")


@pytest.mark.parametrize(
    "text",
    [
        "0,b\n2,10\n1,9\n",
        "user_id,client\n0,b\n1,9\n\n2,10\n",
        'User\tClient name\r\n1\t9\r\n"0"\t b \r\n2\t10\r\n',
        "\ufeffuser,client\n0,b\n1,9\n2,10",
    ],
)
def test_clients_from_a_file(tmp_path, text):
    file = tmp_path / "shares.csv"
    file.write_text(text, encoding="utf-8")
    shared = assign_clients(of_users(3), None, "file", file=str(file))
    # Not all names are integers, so they are in the order of text.
    assert shared.names == ("10", "9", "b")
    assert shared.owner.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0,a\n1\n",
            r"line 2: a user id and the name of a client are needed, with a tab or a comma between, not \['1'\]",
        ),
        ("0,a\n1,\n", "line 2: a user id and the name"),
        ("0,a\n\n7,b\n", "line 3: made-up has no user '7'"),
        ("0,a\n1,a\n0,b\n", "line 3: user '0' has a client already, in line 1"),
        ("0,a\n", "2 of 3 users of made-up have no client: 1, 2"),
        ("user,client\nuser,client\n", "line 2: made-up has no user 'user'"),
        ("", "3 of 3 users"),
        ("\0\1", "not a text file"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path, text, message):
    file = tmp_path / "shares.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message) as error:
        assign(of_users(3), "file", file=str(file))
    assert str(file) in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"dataset\.clients\.file: .*absent\.csv cannot be read \(No such file"):
        assign(of_users(3), "file", file=str(tmp_path / "absent.csv"))
    with pytest.raises(DataError, match="cannot be read"):
        assign(of_users(3), "file", file=str(tmp_path))
    (tmp_path / "latin").write_bytes(b"0,Caf\xe9\n")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        assign(of_users(3), "file", file=str(tmp_path / "latin"))


def test_published_clients_may_own_users_without_rows():
    data = replace(of_users(3), user_ids=np.array(["0", "1", "2", "3"]), owner=np.array([0, 0, 0, 1]))
    assert assign(data, "published").tolist() == [0, 0, 0, 1]
