import json

import numpy as np
import pytest

from fedhur_app.data.describe import ClientSize, Distribution, as_dict, describe, render
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.partition import Clients, assign_clients
from fedhur_app.data.profile import COMPARED_CLIENTS, profile, profile_prepared
from fedhur_app.data.shards import prepare, shard_path
from fedhur_app.data.split import split_labels
from fedhur_app.data.synthetic import generate


def small():
    """Users with 1, 2 and 3 interactions; the third item occurs only in a test row, the fourth nowhere."""
    data = from_raw(
        "small",
        [1, 2, 2, 3, 3, 3, 3],
        [1, 1, 2, 1, 2, 3, 3],
        timestamps=[1, 1, 2, 1, 2, 3, 4],
        catalogue=["4"],
    )
    return data, split_labels(data, "leave-one-out"), Clients(np.array([0, 1, 1]))


def test_counts_of_a_small_data_set():
    d = describe(profile(*small()))
    assert (d.dataset, d.users, d.items, d.interactions, d.clients) == ("small", 3, 4, 6, 2)
    assert d.density == 6 / 12
    assert d.split_sizes == (3, 1, 2)
    assert d.users_per_client == Distribution(1, 1.25, 1.5, 1.75, 2)
    assert d.train_per_client == Distribution(1, 1.25, 1.5, 1.75, 2)
    assert (d.users_without_train, d.users_without_valid, d.users_without_test) == (0, 2, 1)
    # Item 1 alone is trained on.
    assert d.items_never_in_training == 3
    assert d.per_user == Distribution(1, 1.5, 2, 2.5, 3)
    # Items have 3, 2, 1 and 0 rows; one is 1 % and 10 % and 20 % of four, rounded up.
    assert d.popularity == ((0.01, 0.5), (0.1, 0.5), (0.2, 0.5))
    assert d.client_sizes == (ClientSize("0", 1, 1, 0, 0), ClientSize("1", 2, 2, 1, 2))
    assert d.clients_without_train == 0
    assert d.gini_users == d.gini_train == pytest.approx(1 / 6)
    # Both train on item 1 alone.
    assert (d.overlap, d.overlap_pairs, d.overlap_exact) == (1.0, 1, True)
    assert d.divergence == 0.0
    assert d.notes == ("1 repeated (user, item) pair: the last was kept",)


def test_the_text_shows_every_count_and_the_notes():
    text = render(describe(profile(*small())))
    lines = {line[:34].strip(): line[34:].split() for line in text.splitlines()}
    assert lines["users without validation items"] == ["2"]
    assert lines["users without test items"] == ["1"]
    assert lines["items never in training"] == ["3"]
    assert lines["train / valid / test"] == ["3", "/", "1", "/", "2"]
    assert lines["interactions"] == ["6", "(density", "50.0000%)"]
    assert lines["training interactions of a client"] == ["1", "1.25", "1.5", "1.75", "2"]
    assert lines["interactions of top 10% items"] == ["50.0%"]
    assert lines["inequality of clients (Gini)"] == ["users", "0.167,", "training", "interactions", "0.167"]
    assert lines["items shared by two clients"][:2] == ["1.000", "(mean"]
    assert lines["clients differ from the whole"][0] == "0.000"
    assert "note: 1 repeated (user, item) pair: the last was kept" in text


def test_plain_values_survive_json():
    description = describe(profile(*small()))
    values = json.loads(json.dumps(as_dict(description)))
    assert values["users_per_client"]["median"] == 1.5
    assert values["split_sizes"] == [3, 1, 2]


@pytest.mark.parametrize("partition", ["id", "random", "taste", "one-user"])
def test_a_prepared_folder_tells_the_same(tmp_path, partition):
    data = generate(25, 30, 6, seed=4)
    ratios = (0.6, 0.1, 0.3)
    prepared = prepare(data, "random", ratios, partition, 6, 3, tmp_path)
    labels = split_labels(data, "random", ratios, 3)
    assert describe(profile_prepared(prepared.folder)) == describe(
        profile(data, labels, assign_clients(data, labels, partition, 6, 3))
    )


@pytest.mark.parametrize(("partition", "clients"), [("market", 3), ("id", 1)])
def test_counts_of_markets_do_not_depend_on_the_clients(tmp_path, partition, clients):
    data = from_raw("x", [1, 1, 2, 3, 3, 3, 4], [1, 2, 1, 1, 2, 3, 1], markets=[10, 10, "other", 9, 9, 9, 10])
    prepared = prepare(data, "random", (0.6, 0.1, 0.3), partition, 1, 3, tmp_path)
    described = describe(profile_prepared(prepared.folder))
    assert described.clients == clients
    assert described.markets == (("9", 1, 3), ("10", 2, 3), ("other", 1, 1))
    lines = [line.split() for line in render(described).splitlines()]
    start = lines.index(["market", "users", "interactions"])
    assert lines[start + 1 :] == [["9", "1", "3"], ["10", "2", "3"], ["other", "1", "1"]]


def test_without_markets_no_table_of_them_is_shown():
    described = describe(profile(*small()))
    assert described.markets == ()
    assert "market" not in render(described)


def test_notes_reach_the_prepared_folder(tmp_path):
    prepared = prepare(small()[0], "leave-one-out", (0.8, 0.1, 0.1), "id", 2, 1, tmp_path)
    assert describe(profile_prepared(prepared.folder)).notes == small()[0].notes


def test_a_damaged_shard_is_named(tmp_path):
    prepared = prepare(generate(25, 30, 6), "random", (0.6, 0.1, 0.3), "id", 6, 3, tmp_path)
    shard_path(prepared.folder, 4).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"client-00004\.npz"):
        describe(profile_prepared(prepared.folder))


def test_clients_of_a_kind_differ_more_than_clients_of_all_kinds():
    # Two groups of items, which two groups of users keep to.
    generator = np.random.default_rng(1)
    rows = [(user, item + 10 * (user % 2)) for user in range(40) for item in generator.choice(10, 6, replace=False)]
    data = from_raw("x", *np.array(rows).T)
    labels = np.zeros(len(data), dtype=np.int8)
    apart = describe(profile(data, labels, Clients(np.arange(40) % 2)))
    mixed = describe(profile(data, labels, Clients(np.arange(40) // 20)))
    assert apart.overlap == 0.0
    assert mixed.overlap == 1.0
    assert mixed.divergence < 0.01
    # Each client holds half of the groups: (1, 0) against (1/2, 1/2).
    assert apart.divergence == pytest.approx(0.3113, abs=0.001)


def test_of_many_clients_a_sample_is_compared_and_that_is_said():
    clients = COMPARED_CLIENTS + 50
    data = generate(clients, 30, 6, seed=4)
    described = describe(profile(data, split_labels(data, "random"), Clients(np.arange(clients))))
    pairs = COMPARED_CLIENTS * (COMPARED_CLIENTS - 1) // 2
    assert (described.overlap_pairs, described.overlap_exact) == (pairs, False)
    assert f"of {pairs} pairs, a sample" in render(described)
    sets = [set(data.items[(data.users == user) & (split_labels(data, "random") == 0)]) for user in range(clients)]
    every = [len(one & two) / max(1, len(one | two)) for i, one in enumerate(sets) for two in sets[:i]]
    assert described.overlap == pytest.approx(np.mean(every), rel=0.1)


def test_named_clients_are_listed_unless_they_are_the_markets_or_many(tmp_path):
    data = from_raw(
        "x", [1, 2, 3], [1, 1, 2], markets=["a", "a", "b"], user_columns={"town": {"1": "Ulm", "3": "Bonn"}}
    )
    prepared = prepare(data, "random", (1, 0, 0), "column", 1, 3, tmp_path, options={"column": "town"})
    described = describe(profile_prepared(prepared.folder))
    assert [(c.name, c.users, c.train) for c in described.client_sizes] == [
        ("Bonn", 1, 1),
        ("Ulm", 1, 1),
        ("unknown", 1, 1),
    ]
    assert ["Ulm", "1", "1", "0", "0"] in [line.split() for line in render(described).splitlines()]
    labels = split_labels(data, "random", (1, 0, 0))
    by_market = render(describe(profile(data, labels, assign_clients(data, labels, "market"))))
    assert "client" not in [line.split()[0] for line in by_market.splitlines() if line]
