import json

import numpy as np
import pytest

from fedhur_app.data.describe import Distribution, as_dict, describe, describe_prepared, render
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.partition import assign_clients
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
    return data, split_labels(data, "leave-one-out"), np.array([0, 1, 1])


def test_counts_of_a_small_data_set():
    d = describe(*small())
    assert (d.dataset, d.users, d.items, d.interactions, d.clients) == ("small", 3, 4, 6, 2)
    assert d.density == 6 / 12
    assert d.split_sizes == (3, 1, 2)
    assert d.users_per_client == Distribution(1, 1.25, 1.5, 1.75, 2)
    assert d.train_per_client == Distribution(1, 1.25, 1.5, 1.75, 2)
    assert (d.users_without_train, d.users_without_valid, d.users_without_test) == (0, 2, 1)
    # Item 1 alone is trained on.
    assert d.items_never_in_training == 3
    assert d.notes == ("1 repeated (user, item) pair: the last was kept",)


def test_the_text_shows_every_count_and_the_notes():
    text = render(describe(*small()))
    lines = {line[:32].strip(): line[32:].split() for line in text.splitlines()}
    assert lines["users without validation items"] == ["2"]
    assert lines["users without test items"] == ["1"]
    assert lines["items never in training"] == ["3"]
    assert lines["train / valid / test"] == ["3", "/", "1", "/", "2"]
    assert lines["interactions"] == ["6", "(density", "50.0000%)"]
    assert lines["training interactions"] == ["1", "1.25", "1.5", "1.75", "2"]
    assert "note: 1 repeated (user, item) pair: the last was kept" in text


def test_plain_values_survive_json():
    description = describe(*small())
    values = json.loads(json.dumps(as_dict(description)))
    assert values["users_per_client"]["median"] == 1.5
    assert values["split_sizes"] == [3, 1, 2]


@pytest.mark.parametrize("partition", ["id", "random", "one-user"])
def test_a_prepared_folder_tells_the_same(tmp_path, partition):
    data = generate(25, 30, 6, seed=4)
    ratios = (0.6, 0.1, 0.3)
    prepared = prepare(data, "random", ratios, partition, 6, 3, tmp_path)
    labels = split_labels(data, "random", ratios, 3)
    assert describe_prepared(prepared.folder) == describe(data, labels, assign_clients(data, labels, partition, 6, 3))


@pytest.mark.parametrize(("partition", "clients"), [("market", 3), ("id", 1)])
def test_counts_of_markets_do_not_depend_on_the_clients(tmp_path, partition, clients):
    data = from_raw("x", [1, 1, 2, 3, 3, 3, 4], [1, 2, 1, 1, 2, 3, 1], markets=[10, 10, "other", 9, 9, 9, 10])
    prepared = prepare(data, "random", (0.6, 0.1, 0.3), partition, 1, 3, tmp_path)
    described = describe_prepared(prepared.folder)
    assert described.clients == clients
    assert described.markets == (("9", 1, 3), ("10", 2, 3), ("other", 1, 1))
    lines = [line.split() for line in render(described).splitlines()]
    start = lines.index(["market", "users", "interactions"])
    assert lines[start + 1 :] == [["9", "1", "3"], ["10", "2", "3"], ["other", "1", "1"]]


def test_without_markets_no_table_of_them_is_shown():
    described = describe(*small())
    assert described.markets == ()
    assert "market" not in render(described)


def test_notes_reach_the_prepared_folder(tmp_path):
    prepared = prepare(small()[0], "leave-one-out", (0.8, 0.1, 0.1), "id", 2, 1, tmp_path)
    assert describe_prepared(prepared.folder).notes == small()[0].notes


def test_a_damaged_shard_is_named(tmp_path):
    prepared = prepare(generate(25, 30, 6), "random", (0.6, 0.1, 0.3), "id", 6, 3, tmp_path)
    shard_path(prepared.folder, 4).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"client-00004\.npz"):
        describe_prepared(prepared.folder)
