import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhur_app.data import markets as markets_data
from fedhur_app.data import store
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.partition import market_names
from fedhur_app.data.shards import (
    Shard,
    UserItems,
    load_prepared,
    load_shard,
    make_shards,
    prepare,
    save_shard,
    shard_path,
)
from fedhur_app.data.synthetic import generate

PARTS = ("train", "valid", "test")
RATIOS = (0.72, 0.08, 0.2)


def tiny():
    """Users a, b, c own items; b belongs to client 0, a and c to client 1."""
    data = from_raw("tiny", ["a", "b", "a", "c", "a", "b"], [9, 9, 4, 4, 7, 1])
    return data, np.array([0, 0, 0, 2, 1, 0], dtype=np.int8), np.array([1, 0, 1])


def shards_equal(one, two):
    return (
        (one.client, one.n_items) == (two.client, two.n_items)
        and np.array_equal(one.users, two.users)
        and (one.markets is None) == (two.markets is None)
        and (one.markets is None or np.array_equal(one.markets, two.markets))
        and all(
            np.array_equal(getattr(getattr(one, part), key), getattr(getattr(two, part), key))
            for part in PARTS
            for key in ("indptr", "items")
        )
    )


def test_shards_of_a_tiny_data_set():
    # Items 1, 4, 7, 9 are 0, 1, 2, 3.
    zero, one = make_shards(*tiny())
    assert (zero.client, zero.n_users, zero.n_items, zero.users.tolist()) == (0, 1, 4, [1])
    assert (one.client, one.n_users, one.n_items, one.users.tolist()) == (1, 2, 4, [0, 2])
    assert zero.train.of(0).tolist() == [0, 3]
    assert [one.train.of(user).tolist() for user in (0, 1)] == [[1, 3], []]
    assert [one.valid.of(user).tolist() for user in (0, 1)] == [[2], []]
    assert [one.test.of(user).tolist() for user in (0, 1)] == [[], [1]]
    assert one.train.counts.tolist() == [2, 0]
    assert (len(zero.valid), len(zero.test), len(one.train)) == (0, 0, 2)
    users, items = one.test.pairs()
    assert (users.tolist(), items.tolist()) == ([1], [1])
    assert all(getattr(one, part).items.dtype == np.int64 for part in PARTS)
    assert all(getattr(zero, part).indptr.dtype == np.int64 for part in PARTS)


@pytest.mark.parametrize(
    ("labels", "owner", "message"),
    [
        ([0, 0], [1, 0, 1], "6 labels"),
        ([0, 0, 0, 0, 0, 3], [1, 0, 1], "6 labels of 0, 1 or 2"),
        ([0] * 6, [0, 1], "3 client numbers"),
        ([0] * 6, [0, -1, 1], "3 client numbers >= 0"),
        ([0] * 6, [0, 3, 3], "client 1 owns no user"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(labels, owner, message):
    with pytest.raises(DataError, match=message):
        make_shards(tiny()[0], np.array(labels), np.array(owner))


@st.composite
def shared_out(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=60))
    users, items = (list(column) for column in zip(*rows, strict=True))
    markets = [user % 3 for user in users] if draw(st.booleans()) else None
    data = from_raw("any", users, items, markets=markets)
    labels = draw(st.lists(st.integers(0, 2), min_size=len(data), max_size=len(data)))
    clients = draw(st.integers(1, data.n_users))
    extra = draw(
        st.lists(st.integers(0, clients - 1), min_size=data.n_users - clients, max_size=data.n_users - clients)
    )
    owner = draw(st.permutations([*range(clients), *extra]))
    return data, np.array(labels, dtype=np.int8), np.array(owner)


@settings(max_examples=60, deadline=None)
@given(shared_out())
def test_all_shards_together_are_exactly_the_data(case):
    data, labels, owner = case
    shards = make_shards(data, labels, owner)
    all_users = np.concatenate([shard.users for shard in shards])
    assert sorted(all_users.tolist()) == list(range(data.n_users))
    for shard in shards:
        assert (owner[shard.users] == shard.client).all()
        assert (np.diff(shard.users) > 0).all()
        if data.user_markets is None:
            assert shard.markets is None
        else:
            assert [market_names(data)[m] for m in shard.markets] == data.user_markets[shard.users].tolist()
        for part in PARTS:
            items = getattr(shard, part)
            assert all((np.diff(items.of(user)) > 0).all() for user in range(shard.n_users))
    for label, part in enumerate(PARTS):
        got = [
            (int(shard.users[user]), int(item))
            for shard in shards
            for user, item in zip(*getattr(shard, part).pairs(), strict=True)
        ]
        rows = labels == label
        assert sorted(got) == sorted(zip(data.users[rows].tolist(), data.items[rows].tolist(), strict=True))


@settings(max_examples=15, deadline=None)
@given(case=shared_out())
def test_save_and_load_round_trip(tmp_path_factory, case):
    folder = tmp_path_factory.mktemp("shards")
    for shard in make_shards(*case):
        save_shard(shard_path(folder, shard.client), shard)
        assert shards_equal(load_shard(shard_path(folder, shard.client)), shard)


@pytest.fixture
def saved(tmp_path):
    path = shard_path(tmp_path, 1)
    save_shard(path, make_shards(*tiny())[1])
    return path


def test_saving_leaves_one_file_and_it_is_private(saved):
    assert [path.name for path in saved.parent.iterdir()] == ["client-00001.npz"]
    assert saved.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-10],
        lambda content: content.replace(b"\x93NUMPY", b"\x93NUMPX", 1),
        lambda content: b"user,item\n1,2\n",
        lambda content: bytes(1000),
    ],
)
def test_a_damaged_shard_is_named(saved, damage):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(DataError, match=r"client-00001\.npz is damaged or is not a fedhur-shard file"):
        load_shard(saved)


def test_one_flipped_bit_of_content_is_found(saved):
    content = bytearray(saved.read_bytes())
    # The last array ends right before the zip directory; flip a bit in the middle of its bytes.
    content[content.index(b"PK\x01\x02") - 4] ^= 1
    saved.write_bytes(content)
    with pytest.raises(DataError, match=r"client-00001\.npz is damaged"):
        load_shard(saved)


def test_foreign_missing_and_contradictory_files_are_named(saved, tmp_path):
    with pytest.raises(DataError, match=r"client-00009\.npz does not exist"):
        load_shard(shard_path(tmp_path, 9))
    with pytest.raises(DataError, match="is a folder"):
        load_shard(tmp_path)
    np.savez(saved, users=np.arange(3))
    with pytest.raises(DataError, match=r"client-00001\.npz is not a 'fedhur-shard 1' file .*no mark"):
        load_shard(saved)
    np.save(tmp_path / "array.npy", np.arange(3))
    with pytest.raises(DataError, match=r"array\.npy is damaged or is not"):
        load_shard(tmp_path / "array.npy")
    store.write_npz(saved, "fedhur-shard 1", {"users": np.arange(3)})
    with pytest.raises(DataError, match=r"client-00001\.npz is incomplete"):
        load_shard(saved)


@pytest.mark.parametrize(
    ("indptr", "items"),
    [
        ([0, 1], [3]),
        ([0, 2, 1], [3]),
        ([0, 0, 2], [3]),
        ([1, 1, 1], [3]),
        ([0, 0, 1], [4]),
        ([0, 0, 1], [-1]),
    ],
)
def test_a_shard_that_contradicts_itself_is_refused(saved, indptr, items):
    good = load_shard(saved)
    wrong = UserItems(np.array(indptr), np.array(items))
    save_shard(saved, Shard(1, 4, good.users, good.train, wrong, good.test))
    with pytest.raises(DataError, match=r"client-00001\.npz contradicts itself \(valid\)"):
        load_shard(saved)


@pytest.fixture(scope="module")
def data():
    return generate(30, 40, 8, seed=2)


def test_prepare_writes_all_shards_and_reuses_the_folder(data, tmp_path):
    prepared = prepare(data, "random", RATIOS, "id", 7, 1, tmp_path)
    assert prepared.folder.parent == tmp_path / "prepared"
    assert (prepared.dataset, prepared.fingerprint) == ("synthetic", data.fingerprint())
    assert (prepared.clients, prepared.n_users, prepared.n_items) == (7, 30, 40)
    assert sum(prepared.n_interactions) == len(data)
    shards = [load_shard(shard_path(prepared.folder, client)) for client in range(7)]
    assert [shard.n_users for shard in shards] == [4] * 6 + [6]
    assert tuple(sum(len(getattr(s, part)) for s in shards) for part in PARTS) == prepared.n_interactions
    written = {path.name: path.stat().st_mtime_ns for path in prepared.folder.iterdir()}
    assert set(written) == {"meta.json", "attributes.npz", *(f"client-{client:05d}.npz" for client in range(7))}
    assert prepare(data, "random", list(RATIOS), "id", 7, 1, tmp_path) == prepared
    assert load_prepared(prepared.folder) == prepared
    assert {path.name: path.stat().st_mtime_ns for path in prepared.folder.iterdir()} == written
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == [prepared.folder.name]


def test_everything_that_decides_the_content_decides_the_folder(data, tmp_path):
    base = (data, "random", RATIOS, "id", 7, 1)
    changes = [(0, generate(30, 40, 8, seed=3)), (1, "user-ratio"), (2, (0.8, 0.1, 0.1)), (3, "random")]
    changes += [(4, 6), (5, 2)]
    folders = {prepare(*base, tmp_path).folder}
    for place, value in changes:
        folders.add(prepare(*base[:place], value, *base[place + 1 :], tmp_path).folder)
    assert len(folders) == 7
    folders.add(prepare(replace(data, item_genres=None), *base[1:], tmp_path).folder)
    folders.add(prepare(replace(data, user_markets=np.array(["a"] * 30)), *base[1:], tmp_path).folder)
    assert len(folders) == 9
    one = prepare(data, "random", RATIOS, "one-user", 7, 1, tmp_path)
    assert prepare(data, "random", RATIOS, "one-user", 8, 1, tmp_path) == one
    assert one.clients == 30


@pytest.fixture(scope="module")
def markets():
    return markets_data.generate((20, 8, 5), (9, 4, 4), 40, seed=2)


def test_one_shard_a_market(markets, tmp_path):
    prepared = prepare(markets, "random", RATIOS, "market", 99, 1, tmp_path)
    assert (prepared.clients, prepared.markets) == (3, ("0", "1", "2"))
    assert load_prepared(prepared.folder) == prepared
    assert prepare(markets, "random", RATIOS, "market", 3, 1, tmp_path) == prepared
    for client, (first, n) in enumerate([(0, 20), (20, 8), (28, 5)]):
        shard = load_shard(shard_path(prepared.folder, client))
        assert shard.users.tolist() == list(range(first, first + n))
        assert shard.markets.tolist() == [client] * n


def test_a_client_that_owns_all_users_knows_their_markets(markets, tmp_path):
    prepared = prepare(markets, "random", RATIOS, "id", 1, 1, tmp_path)
    assert (prepared.clients, prepared.markets) == (1, ("0", "1", "2"))
    assert load_shard(shard_path(prepared.folder, 0)).markets.tolist() == [0] * 20 + [1] * 8 + [2] * 5


def test_data_without_markets_say_so(data, tmp_path):
    prepared = prepare(data, "random", RATIOS, "id", 7, 1, tmp_path)
    assert prepared.markets == ()
    assert load_shard(shard_path(prepared.folder, 0)).markets is None
    with pytest.raises(DataError, match="has no markets"):
        prepare(data, "random", RATIOS, "market", 7, 1, tmp_path)


@pytest.mark.parametrize("wrong", [[0], [0, -1], [0.0, 1.0], [[0], [1]]])
def test_markets_that_do_not_fit_the_users_are_refused(saved, wrong):
    save_shard(saved, replace(load_shard(saved), markets=np.array(wrong)))
    with pytest.raises(DataError, match=r"client-00001\.npz contradicts itself \(markets\)"):
        load_shard(saved)


@pytest.mark.parametrize("missing", ["meta.json", "client-00003.npz", "attributes.npz"])
def test_an_incomplete_folder_is_written_again(data, tmp_path, missing):
    prepared = prepare(data, "random", RATIOS, "id", 7, 1, tmp_path)
    (prepared.folder / missing).unlink()
    assert prepare(data, "random", RATIOS, "id", 7, 1, tmp_path) == prepared
    assert (prepared.folder / missing).is_file()
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == [prepared.folder.name]


def test_many_at_once_agree_on_one_complete_folder(data, tmp_path):
    barrier, results = threading.Barrier(4), []

    def work():
        barrier.wait()
        results.append(prepare(data, "random", RATIOS, "random", 7, 1, tmp_path))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len([load_shard(shard_path(results[0].folder, client)) for client in range(7)]) == 7
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == [results[0].folder.name]


def test_the_first_finished_folder_stays(tmp_path):
    final = tmp_path / "final"
    for content in ("first", "second"):
        with store.temporary_folder(tmp_path) as workspace:
            (workspace / "file").write_text(content)
            store.publish(workspace, final, lambda folder: True)
    assert (final / "file").read_text() == "first"
    with store.temporary_folder(tmp_path) as workspace:
        (workspace / "file").write_text("third")
        store.publish(workspace, final, lambda folder: False)
    assert (final / "file").read_text() == "third"
    assert list(tmp_path.iterdir()) == [final]


def test_a_failure_while_writing_leaves_nothing_behind(data, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="disk full"):
        prepare(data, "random", RATIOS, "id", 7, 1, tmp_path)
    assert list((tmp_path / "prepared").iterdir()) == []


def test_a_folder_of_something_else_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no prepared data"):
        load_prepared(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"dataset": "x"}))
    with pytest.raises(DataError, match="holds no prepared data"):
        load_prepared(tmp_path)


def test_a_name_that_is_no_file_name_stays_inside_the_home(tmp_path):
    data = from_raw("../my data/ä", [1, 2, 1], [1, 1, 2])
    prepared = prepare(data, "random", RATIOS, "id", 2, 1, tmp_path)
    assert prepared.folder.parent == tmp_path / "prepared"
    assert load_prepared(prepared.folder).dataset == "../my data/ä"


def test_clients_and_users_with_almost_nothing(tmp_path):
    # Users with 1, 2 and 3 interactions, one client each: no crash, parts may be empty.
    data = from_raw("small", [1, 2, 2, 3, 3, 3], [1, 1, 2, 1, 2, 3], timestamps=[1, 1, 2, 1, 2, 3])
    prepared = prepare(data, "leave-one-out", RATIOS, "one-user", 1, 1, tmp_path)
    shards = [load_shard(shard_path(prepared.folder, client)) for client in range(3)]
    sizes = [[len(getattr(shard, part)) for part in PARTS] for shard in shards]
    assert sizes == [[1, 0, 0], [1, 0, 1], [1, 1, 1]]
    assert shards[0].test.of(0).tolist() == []
