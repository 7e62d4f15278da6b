"""Tiny and odd data from interactions to shards and their description: field case 6."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedhur_app.data.describe import as_dict, describe, render
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.partition import PARTITIONS, Clients
from fedhur_app.data.profile import profile, profile_prepared
from fedhur_app.data.shards import load_shard, prepare, shard_path
from fedhur_app.data.split import SPLITS, split_labels

RATIOS = (0.6, 0.2, 0.2)
# Which users have rows in training, validation and test, for users with 1, 2, 3 and 5 rows in order of time.
OF_USERS = {
    "user-ratio": [(1, 0, 0), (2, 0, 0), (2, 0, 1), (3, 1, 1)],
    "leave-one-out": [(1, 0, 0), (1, 0, 1), (1, 1, 1), (3, 1, 1)],
    "temporal": [(1, 0, 0), (2, 0, 0), (2, 0, 1), (3, 1, 1)],
    # 11 rows: round(6.6) train, round(8.8) - 7 validate; the user with 5 rows has the last.
    "temporal-global": [(1, 0, 0), (2, 0, 0), (3, 0, 0), (1, 2, 2)],
}


def few_rows():
    """Users a, b, c, d with 1, 2, 3 and 5 rows; item 9 is in the last row only."""
    users = np.repeat(np.array(["a", "b", "c", "d"]), [1, 2, 3, 5])
    return from_raw("few", users, [1, 1, 2, 1, 2, 3, 1, 2, 3, 4, 9], timestamps=np.arange(11))


def honest(described):
    """No number of a description is NaN or infinite, and its counts add up."""
    values = json.loads(json.dumps(as_dict(described), allow_nan=False))
    assert sum(values["split_sizes"]) == values["interactions"]
    assert sum(client["users"] for client in values["client_sizes"]) == values["users"]
    for place, part in enumerate(("train", "valid", "test")):
        assert sum(client[part] for client in values["client_sizes"]) == values["split_sizes"][place]
    assert "nan" not in render(described).lower()
    return described


@pytest.mark.parametrize("kind", sorted(OF_USERS))
def test_users_with_one_two_and_three_interactions(kind):
    data = few_rows()
    labels = split_labels(data, kind, RATIOS)
    parts = [tuple(np.bincount(labels[data.users == user], minlength=3).tolist()) for user in range(4)]
    assert parts == OF_USERS[kind]
    described = honest(describe(profile(data, labels, Clients(np.arange(4)))))
    without = np.array(parts) == 0
    found = (described.users_without_train, described.users_without_valid, described.users_without_test)
    assert found == tuple(without.sum(axis=0))
    # Item 9 is tested and never trained on, and one more in the cut in time.
    assert described.items_never_in_training == len(set(data.items) - set(data.items[labels == 0])) >= 1


def odd(labels=None):
    """Five users, of whom the last has no row at all and is alone at the last of three clients."""
    data = from_raw("odd", [0, 0, 0, 1, 2, 2, 3], [0, 1, 2, 0, 1, 2, 2], timestamps=np.arange(7))
    ids = np.array(["0", "1", "2", "3", "4"])
    return replace(data, user_ids=ids, owner=np.array([0, 0, 0, 1, 2]), labels=labels)


@pytest.mark.parametrize("split", sorted(set(SPLITS) - {"published"}))
@pytest.mark.parametrize("partition", sorted(set(PARTITIONS) - {"market", "column", "file"}))
def test_a_user_without_any_row_is_carried_along(split, partition, tmp_path):
    data = odd()
    prepared = prepare(data, split, RATIOS, partition, 2, 1, tmp_path, options={"alpha": 0.1})
    described = honest(describe(profile_prepared(prepared.folder)))
    assert (described.users, described.interactions) == (5, 7)
    assert described.users_without_train >= 1
    shards = [load_shard(shard_path(prepared.folder, client)) for client in range(prepared.clients)]
    assert sorted(np.concatenate([shard.users for shard in shards]).tolist()) == [0, 1, 2, 3, 4]


def test_a_client_whose_users_have_no_rows(tmp_path):
    file = tmp_path / "clients.tsv"
    file.write_text("".join(f"{user}\t{'empty' if user == 4 else 'full'}\n" for user in range(5)))
    prepared = prepare(odd(), "random", RATIOS, "file", 1, 1, tmp_path, options={"file": str(file)})
    assert prepared.client_names == ("empty", "full")
    described = honest(describe(profile_prepared(prepared.folder)))
    assert described.clients_without_train == 1
    # The empty client shares nothing, and it does not count among those that differ.
    assert (described.overlap, described.divergence) == (0.0, 0.0)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_all_rows_in_one_part(part, tmp_path):
    data = odd(np.full(7, part, dtype=np.int8))
    described = honest(describe(profile(data, data.labels, Clients(data.owner))))
    without = [described.users_without_train, described.users_without_valid, described.users_without_test]
    assert without == [1 if label == part else 5 for label in range(3)]
    assert (described.divergence is None) == (part != 0)
    for partition in ("taste", "dirichlet"):
        assert prepare(data, "published", RATIOS, partition, 5, 1, tmp_path, options={"alpha": 1.0}).clients == 5


def test_one_giant_client_beside_tiny_ones():
    users = np.concatenate([np.repeat(np.arange(90), 10), np.arange(90, 100)])
    items = np.concatenate([np.tile(np.arange(10), 90), np.arange(10)])
    data = from_raw("giant", users, items)
    owner = np.concatenate([np.zeros(90, dtype=int), np.arange(1, 11)])
    described = honest(describe(profile(data, np.zeros(len(data), dtype=np.int8), Clients(owner))))
    assert described.users_per_client.max == 90
    # Sizes 90, 1 x 10: 11 clients, sum 100; (11 - 1) / 11 if the giant had all.
    assert described.gini_users == pytest.approx((10 * 90 - 10 * 1) / (11 * 100))
    # The giant shares one of ten items with each tiny one (10 pairs), the tiny ones nothing (45 pairs).
    assert described.overlap == pytest.approx(10 * 0.1 / 55)


def test_one_user_and_one_row(tmp_path):
    data = from_raw("one", ["a"], ["b"], timestamps=[3])
    for split in sorted(set(SPLITS) - {"published"}):
        for partition in ("id", "random", "taste", "dirichlet", "one-user"):
            prepared = prepare(data, split, RATIOS, partition, 1, 1, tmp_path, options={"alpha": 1.0})
            described = honest(describe(profile_prepared(prepared.folder)))
            assert (described.split_sizes, described.overlap, described.gini_train) == ((1, 0, 0), None, 0.0)


def test_a_prepared_folder_follows_the_file_and_the_column(tmp_path):
    data, file = odd(), tmp_path / "clients.csv"
    folders = set()
    for last in ("a", "b"):
        file.write_text("".join(f"{user},{last if user == 4 else 'a'}\n" for user in range(5)))
        folders.add(prepare(data, "random", RATIOS, "file", 1, 1, tmp_path, options={"file": str(file)}).folder)
    for towns in (["x"] * 5, ["x"] * 4 + ["y"]):
        known = replace(data, user_columns={"town": np.array(towns)})
        folders.add(prepare(known, "random", RATIOS, "column", 1, 1, tmp_path, options={"column": "town"}).folder)
    for alpha in (0.1, 1.0):
        folders.add(prepare(data, "random", RATIOS, "dirichlet", 2, 1, tmp_path, options={"alpha": alpha}).folder)
    assert len(folders) == 6
    # What a kind does not use does not count.
    plain = prepare(data, "random", RATIOS, "id", 2, 1, tmp_path)
    assert prepare(data, "random", RATIOS, "id", 2, 1, tmp_path, options={"alpha": 3.0, "file": "x"}) == plain
