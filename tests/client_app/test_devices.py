"""Nodes that bring their own files: names, numbers, catalogues, rows."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from client_app import device
from client_app.app import app as client_app
from client_app.device import Device
from client_app.device_folder import DeviceFolder, NodeError
from client_app.state import ClientState
from fedhur_app.config import load_settings
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.interactions import from_raw, subset
from fedhur_app.data.item_catalogue import Catalogue, catalogue_of, read_catalogue
from fedhur_app.data.own_rows import match_rows
from fedhur_app.data.shards import make_shards, save_shard, shard_path
from fedhur_app.data.store import load_interactions, save_interactions
from fedhur_app.fingerprint import code_fingerprint
from fedhur_app.protocol import Content, Stage, decode, encode
from fedhur_app.runtime import LocalGrid, run_local
from server_app.stages import RunError
from tests.devices import ITEMS, OPTIONS, federation, start, write_catalogue
from tests.running import SMALL, history, result, run


def messages(grid):
    """Record (type, client) of all messages of a grid, as the client apps get them."""
    seen = []

    def fault(message, client):
        seen.append((message.metadata.message_type, client, decode(message.content)))

    grid.fault = fault
    return seen


def test_files_become_clients_by_name_and_learn_their_numbers(tmp_path):
    grid = federation(tmp_path)
    # The last node has the first name.
    for context, name in zip(grid.contexts.values(), ("zoe", "mia", "ann"), strict=True):
        context.node_config["client"] = name
    seen = messages(grid)
    start(tmp_path / "run", grid)
    assert result(tmp_path / "run")["status"] == "completed"
    assert json.loads((tmp_path / "run" / "clients.json").read_text())["clients"] == {"ann": 0, "mia": 1, "zoe": 2}
    told = {node: content.fields["client"] for kind, node, content in seen if kind == Stage.JOIN}
    assert told == {0: 2, 1: 1, 2: 0}
    kinds = [kind for kind, _, _ in seen]
    assert kinds[:6] == [Stage.HELLO] * 3 + [Stage.JOIN] * 3
    membership = DeviceFolder(tmp_path / "device-2").runs()[0].membership()
    assert (membership.client, membership.clients, membership.name) == (0, 3, "ann")


def test_nothing_but_counts_goes_to_the_server_in_the_handshake(tmp_path):
    grid = federation(tmp_path, 2)
    replies = []
    whole = grid._answer
    grid._answer = lambda *arguments: replies.append(whole(*arguments)) or replies[-1]
    start(tmp_path / "run", grid, overrides="rounds=1 min_rounds=1")
    for reply in replies[:4]:
        content = decode(reply.content)
        assert content.arrays == {}
        texts = {key: value for key, value in content.fields.items() if isinstance(value, str)}
        assert set(texts) <= {"code", "name", "catalogue", "stage", "restored"}
    joined = decode(replies[2].content).fields
    assert (joined["users"], joined["n_items"], joined["unknown_items"]) == (5, len(ITEMS), 0)


def test_no_node_is_told_where_files_lie_on_the_server(tmp_path):
    grid = federation(tmp_path, 2)
    seen = messages(grid)
    start(tmp_path / "run", grid, overrides="rounds=1 min_rounds=1")
    told = [json.loads(str(content.fields["settings"])) for _, _, content in seen if "settings" in content.fields]
    assert len(told) == 2 * 4  # join, items, personalize, rank
    assert all(settings["dataset"]["catalogue"] is None for settings in told)
    assert not any(str(tmp_path) in str(content.fields) for _, _, content in seen)


def test_the_catalogue_travels_once(tmp_path):
    grid = federation(tmp_path, 2)
    seen = messages(grid)
    start(tmp_path / "one", grid, overrides="rounds=1 min_rounds=1")
    assert ["catalogue" in content.arrays for kind, _, content in seen if kind == Stage.JOIN] == [True, True]
    for client in range(2):
        assert DeviceFolder(tmp_path / f"device-{client}").catalogue() == read_catalogue(tmp_path / "items.csv")
    (tmp_path / "device-1" / "catalogue.json").write_bytes(b'{"ids": ["x"]')
    seen.clear()
    start(tmp_path / "two", federation_again(grid), overrides="rounds=1 min_rounds=1")
    assert ["catalogue" in content.arrays for kind, _, content in seen if kind == Stage.JOIN] == [False, True]


def federation_again(grid):
    """The same nodes in a new run: Flower gives each a new, empty memory."""
    for context in grid.contexts.values():
        context.state, context.live = RecordDict(), None
    return grid


def test_rows_are_matched_with_the_catalogue_by_id_and_unknown_items_stay(tmp_path):
    users, items = ["u", "u", "u", "v", "v", "w"], ["b", "x", "c", "c", "a", "y"]
    data = from_raw("d", users, items, timestamps=np.arange(6))
    settings = load_settings("own-data", overrides="dataset.split.kind=leave-one-out").dataset.split
    rows = match_rows(data, Catalogue(("c", "a", "z", "b")), settings, 1)
    assert rows.users == ("u", "v")  # nothing is left of w
    assert (rows.unknown_items, rows.unknown_interactions) == (2, 2)
    # In order of time u has b, c and v has c, a: the last one tests.
    assert [rows.shard.train.of(user).tolist() for user in (0, 1)] == [[3], [0]]
    assert [rows.shard.test.of(user).tolist() for user in (0, 1)] == [[0], [1]]
    assert rows.shard.n_items == 4


def test_a_node_with_unknown_items_takes_part_and_is_named(tmp_path, caplog):
    grid = federation(tmp_path, 2)
    with (tmp_path / "rows-1.csv").open("a") as file:
        file.write("u10,never heard of\nu11,never heard of\nu11,other\n")
    start(tmp_path / "run", grid, overrides="rounds=1 min_rounds=1")
    assert "client 1 (b): 2 of its items (3 interactions) are not in the catalogue and stay with it" in caplog.text


def test_a_node_without_any_known_item_is_refused_without_a_word_of_its_rows(tmp_path, caplog):
    grid = federation(tmp_path, 2)
    (tmp_path / "rows-1.csv").write_text("user_id,item_id\nsecret,thing\n")
    with pytest.raises(RunError, match=r"client 1 \(b\): its data cannot be used \(DataError\); its own log says why"):
        start(tmp_path / "run", grid)
    assert "none of the 1 items of the node's rows" in caplog.text
    assert "secret" not in result(tmp_path / "run")["traceback"]


def test_all_nodes_whose_rows_cannot_be_used_are_named_at_once(tmp_path):
    grid = federation(tmp_path, 3)
    for number in (0, 2):
        (tmp_path / f"rows-{number}.csv").write_text("user_id,item_id\n")
    with pytest.raises(RunError, match=r"client 0 \(a\): its data cannot be used .*; client 2 \(c\): its data"):
        start(tmp_path / "run", grid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client": "same"}, r"two nodes \(1000 and 1001\) both claim to be 'same'"),
        ({"client": "no blanks"}, "node 1000: its node config cannot be used"),
        ({"data-path": "/nowhere/rows.csv"}, "node 1000: its data cannot be used"),
        ({"min-rating": "much"}, "node 1000: its data cannot be used"),
    ],
)
def test_impossible_nodes_are_named(change, message, tmp_path):
    with pytest.raises(RunError, match=message):
        start(tmp_path / "run", federation(tmp_path, 2, **change))


def test_a_file_needs_a_catalogue_on_the_server(tmp_path):
    with pytest.raises(RunError, match=r"node a reads its rows from a file, .* set dataset.catalogue"):
        start(tmp_path / "run", federation(tmp_path, 2), overrides="dataset.catalogue=null")


def test_a_node_without_rows_is_told_what_to_set(tmp_path):
    grid = LocalGrid(client_app, 2, {})
    write_catalogue(tmp_path)
    with pytest.raises(RunError, match="data-path"):
        start(tmp_path / "run", grid)


def test_a_name_is_drawn_once_and_kept(tmp_path):
    def name(node=7, **config):
        return Device(Context(1, node, {"data-path": "x", **config}, RecordDict(), {})).name()

    drawn = name(**{"state-dir": str(tmp_path / "one")})
    assert drawn == name(node=8, **{"state-dir": str(tmp_path / "one")})
    assert drawn == (tmp_path / "one" / "client-name").read_text().strip()
    assert drawn != name(**{"state-dir": str(tmp_path / "two")})
    assert name() == "node-7"
    assert name(client="shop-1", **{"state-dir": str(tmp_path / "one")}) == "shop-1"
    (tmp_path / "one" / "client-name").write_bytes(b"\xff\n\n")
    with pytest.raises(NodeError, match="client-name does not hold a name"):
        name(**{"state-dir": str(tmp_path / "one")})


def test_a_shard_of_another_catalogue_is_refused(tmp_path):
    prepared = prepare_data(load_settings("synthetic", "fedavg", overrides=SMALL))
    grid = federation(tmp_path, 2)
    list(grid.contexts.values())[1].node_config["data-path"] = str(shard_path(prepared.folder, 1))
    with pytest.raises(RunError, match=r"client 1 \(b\): its data cannot be used"):
        start(tmp_path / "run", grid)


def test_shards_keep_their_numbers_and_files_take_those_that_are_free(tmp_path):
    data = from_raw("d", ["p", "p", "p", "q", "q", "q"], [*ITEMS[:3], *ITEMS[2:5]])
    shard = make_shards(data, np.array([0, 0, 2, 0, 0, 2]), np.array([0, 0]))[0]
    save_shard(tmp_path / "own.npz", replace(shard, client=1, n_items=len(ITEMS)))
    grid = federation(tmp_path, 3)
    next(iter(grid.contexts.values())).node_config["data-path"] = str(tmp_path / "own.npz")
    start(tmp_path / "run", grid, overrides="rounds=1 min_rounds=1")
    assert json.loads((tmp_path / "run" / "clients.json").read_text())["clients"] == {"a": 1, "b": 0, "c": 2}


def test_two_shards_of_one_number_are_refused_by_name(tmp_path):
    prepared = prepare_data(load_settings("synthetic", "fedavg", overrides=SMALL))
    grid = federation(tmp_path, 2, **{"data-path": str(shard_path(prepared.folder, 1))})
    with pytest.raises(RunError, match=r"two nodes \(a: 1000; b: 1001\) both claim to be client 1"):
        start(tmp_path / "run", grid, overrides="dataset.catalogue=null")


@pytest.mark.parametrize("strategy", ["fedavg", "fedhur"])
def test_files_of_the_clients_give_the_run_of_their_simulation(strategy, tmp_path, data_home):
    """The whole data set is cut by users; each node has the published labels, so all splits are equal."""
    generator = np.random.default_rng(5)
    rows = [(user, item) for user in range(12) for item in generator.choice(16, 8, replace=False)]
    users, items = np.array(rows).T
    data = replace(
        from_raw("d", [f"{user}" for user in users], [ITEMS[item] for item in items]),
        labels=np.tile(np.array([0, 0, 0, 0, 0, 1, 2, 2], dtype=np.int8), 12),
        item_titles=np.array(ITEMS),
    )
    whole = tmp_path / "whole"
    whole.mkdir()
    save_interactions(whole, replace(data, owner=np.repeat(np.arange(3), 4)[data.user_ids.astype(int)]))
    name = f"cut-{strategy}"
    shutil.copytree(whole, data_home / name)
    options = f"{OPTIONS} dataset.split.kind=published"
    simulated = tmp_path / "simulated"
    run_local(
        {
            "dataset": name,
            "strategy": strategy,
            "output-dir": str(simulated),
            "overrides": f"{options} dataset.clients.kind=published",
        }
    )
    complete = load_interactions(whole)
    for node in range(3):
        folder = tmp_path / f"part-{node}"
        folder.mkdir()
        part = subset(complete, complete.owner[complete.users] == node)
        save_interactions(folder, replace(part, owner=None))
    grid = federation(tmp_path, 3, **{"seed-secret": 0})
    for node, context in enumerate(grid.contexts.values()):
        context.node_config["data-path"] = str(tmp_path / f"part-{node}")
    start(tmp_path / "run", grid, strategy, f"dataset.split.kind=published dataset.catalogue={whole}")
    assert result(tmp_path / "run")["test"] == result(simulated)["test"]
    of = [[line["validation"] for line in history(folder)] for folder in (tmp_path / "run", simulated)]
    assert of[0] == of[1]
    assert catalogue_of(complete).ids == tuple(ITEMS)


def test_rows_are_read_again_only_when_file_catalogue_or_split_change(tmp_path, monkeypatch):
    read = []
    whole = device.read_own
    monkeypatch.setattr(device, "read_own", lambda path, options: read.append(path.name) or whole(path, options))
    grid = federation(tmp_path, 2)
    once = "rounds=1 min_rounds=1"
    start(tmp_path / "one", grid, overrides=once)
    assert sorted(read) == ["rows-0.csv", "rows-1.csv"]
    start(tmp_path / "two", federation_again(grid), overrides=once)
    assert len(read) == 2
    with (tmp_path / "rows-0.csv").open("a") as file:
        file.write(f"u00,{ITEMS[0]}\nnew user,{ITEMS[1]}\n")
    start(tmp_path / "three", federation_again(grid), overrides=once)
    assert read[2:] == ["rows-0.csv"]
    assert len(list((tmp_path / "device-0").glob("rows-*"))) == 1
    write_catalogue(tmp_path, ITEMS[:-1])
    start(tmp_path / "four", federation_again(grid), overrides=once)
    assert sorted(read[3:]) == ["rows-0.csv", "rows-1.csv"]


def test_without_a_state_dir_everything_works_as_long_as_the_memory_lasts(tmp_path):
    start(tmp_path / "with" / "run", federation(tmp_path / "with", 2))
    start(tmp_path / "without" / "run", federation(tmp_path / "without", 2, **{"state-dir": None}))
    assert result(tmp_path / "with" / "run")["test"] == result(tmp_path / "without" / "run")["test"]
    assert not list((tmp_path / "without").glob("device-*"))


def test_a_simulation_has_the_messages_it_always_had(tmp_path):
    seen = []
    run(tmp_path, "fedavg", "rounds=1 min_rounds=1", lambda message, client: seen.append(message.metadata.message_type))
    assert [seen.count(kind) for kind in (Stage.HELLO, Stage.JOIN, Stage.ITEMS, Stage.PERSONALIZE, Stage.RANK)] == [
        *(6, 0, 6, 6, 6)
    ]
    assert "joined" not in history(tmp_path)[0]
    assert not (tmp_path / "clients.json").exists()


def test_a_simulated_node_does_not_join_a_run_of_own_data(tmp_path):
    LocalGrid(client_app, 1, {})
    request = Content({"client": 0, "round": 0, "code": code_fingerprint()})
    with pytest.raises(NodeError, match="brings no data"):
        client_app(Message(encode(request), 1, Stage.JOIN), Context(1, 1, {}, RecordDict(), {}))


def test_own_state_is_drawn_with_the_node_s_secret(tmp_path):
    grid = federation(tmp_path, 2)
    start(tmp_path / "run", grid, overrides="rounds=1 min_rounds=1")
    first, second = (ClientState.from_context(context) for context in grid.contexts.values())
    assert (first.numbers["secret"], second.numbers["secret"]) == (0, 1)
    assert not torch.equal(first.arrays["model"]["users"], second.arrays["model"]["users"])
