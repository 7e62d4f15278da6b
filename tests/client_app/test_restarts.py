"""Nodes that lose their memory in a run, states that are damaged, stale or of another run, late nodes."""

import json
import os
import shutil

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from client_app.device_folder import DeviceFolder
from client_app.state import ClientState, StateError, StateFolder
from fedhur_app.config import DEFAULT_RUN_CONFIG, ConfigError, load_settings
from fedhur_app.files import read_arrays, write_arrays
from fedhur_app.protocol import Content, Stage, decode, encode
from server_app import handshake
from server_app.app import app as server_app
from server_app.stages import RunError
from tests.devices import federation, forget, restarting, start
from tests.running import history, result


def states_of(folder, client):
    """Files of a device's newest run, oldest first."""
    return sorted(DeviceFolder(folder / f"device-{client}").runs()[0].folder.glob("client-*/round-*.npz"))


def federation_again(grid):
    for client in range(len(grid.contexts)):
        forget(grid, client)
    return grid


def numbers(output):
    """What a run without restarts has as well."""
    lines = history(output)
    for line in lines:
        line.pop("restored", None)
        for name in ("bytes_up_per_client", "bytes_down_per_client"):
            line.pop(name)
        for stage in line["stages"].values():
            stage["bytes_up"].pop("fields")
            stage["bytes_down"].pop("fields")  # the settings hold the path of the catalogue
    return lines, result(output)["test"], result(output)["best_round"]


MARKETS = "model.same_init=true evaluation.selection=client"
UNBROKEN = {}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Numbers of a run by strategy and options, made once."""

    def of(strategy, options=""):
        if (strategy, options) not in UNBROKEN:
            folder = tmp_path_factory.mktemp("unbroken")
            start(folder / "run", federation(folder), strategy, options)
            UNBROKEN[strategy, options] = numbers(folder / "run")
        return UNBROKEN[strategy, options]

    return of


@pytest.mark.parametrize(
    ("strategy", "stage", "round_", "options"),
    [
        ("fedavg", Stage.ITEMS, 1, ""),
        ("fedavg", Stage.PERSONALIZE, 2, ""),
        ("fedavg", Stage.ITEMS, 3, "fraction_train=0.5"),
        ("fedavg", Stage.RANK, 3, "server.checkpoint_every=0"),
        ("fedhur", Stage.UTILITY, 2, ""),
        ("gpfedrec", Stage.ITEMS, 3, "model.kind=mf gpfedrec.neighbours=2"),
        ("fecosr", Stage.REGULARIZED, 3, MARKETS),
    ],
)
def test_a_restarted_node_goes_on_as_if_nothing_had_happened(strategy, stage, round_, options, unbroken, tmp_path):
    expected = unbroken(strategy, options)
    grid = federation(tmp_path)
    restarts = [restarting(grid, client, stage, round_) for client in range(3)]
    grid.fault = lambda message, client: restarts[client](message, client)
    start(tmp_path / "run", grid, strategy, options)
    assert numbers(tmp_path / "run") == expected
    lines = history(tmp_path / "run")
    assert not any("joined" in line for line in lines)
    if stage != Stage.RANK and round_ > 1 and not options.startswith("fraction"):
        assert set(lines[round_ - 1]["restored"]) == {"0", "1", "2"}


def test_without_a_state_dir_a_restarted_node_is_left_out_and_joins_again_as_new(tmp_path, caplog):
    grid = federation(tmp_path, **{"state-dir": None})
    seen = []

    def fault(message, client):
        content = decode(message.content)
        seen.append((message.metadata.message_type, message.metadata.group_id, client, "table" in content.arrays))
        restarting(grid, 1, Stage.ITEMS, 2)(message, client)

    grid.fault = fault
    start(tmp_path / "run", grid, overrides="rounds=4 min_rounds=4")
    lines = history(tmp_path / "run")
    assert "was restarted and has no state-dir" in lines[1]["stages"]["train.items"]["absent"]["1"]
    assert lines[1]["stages"]["train.items"]["replies"] == 2
    assert lines[2]["joined"] == {"1": "new"}
    assert lines[2]["stages"]["train.items"]["absent"] == {}
    assert "client 1 (b) starts as new (it has no state-dir)" in caplog.text
    # Once all hold the mean, only who joined gets it with the call to train.
    assert [
        client for kind, group, client, table in seen if (kind, group, table) == (Stage.ITEMS, "round-3", True)
    ] == [1]
    assert [client for kind, _, client, _ in seen if kind == Stage.JOIN] == [0, 1, 2, 1]


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def damage_gone(path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_flip, damage_gone])
def test_a_node_whose_newest_state_is_damaged_goes_on_from_the_one_before_and_says_so(damage, tmp_path, caplog):
    grid = federation(tmp_path)
    restart = restarting(grid, 2, Stage.ITEMS, 3)

    def fault(message, client):
        if (message.metadata.message_type, message.metadata.group_id, client) == (Stage.ITEMS, "round-3", 2):
            damage(states_of(tmp_path, 2)[-1])
        restart(message, client)

    grid.fault = fault
    start(tmp_path / "run", grid, overrides="rounds=4 min_rounds=4")
    lines = history(tmp_path / "run")
    why = lines[2]["stages"]["train.items"]["absent"]["2"]
    assert "newest usable state is of round 1, and it last trained in round 2" in why
    assert ("a newer one is damaged" in why) == (damage is not damage_gone)
    assert lines[3]["joined"] == {"2": "1"}
    assert "client 2 (c) goes on with its state of round 1, it last trained in round 2" in caplog.text
    assert ClientState.from_context(list(grid.contexts.values())[2]).numbers["trained_round"] == 4


def test_a_node_all_of_whose_states_are_damaged_joins_as_new_and_does_not_pass_off_another_model(tmp_path):
    grid = federation(tmp_path)
    restart = restarting(grid, 2, Stage.ITEMS, 3)

    def fault(message, client):
        if (message.metadata.message_type, message.metadata.group_id, client) == (Stage.ITEMS, "round-3", 2):
            for path in states_of(tmp_path, 2):
                damage_flip(path)
        restart(message, client)

    grid.fault = fault
    # Rounds after the first hardly learn, so the best model is that of an early round, which this client has lost.
    start(tmp_path / "run", grid, overrides="rounds=4 min_rounds=4 train.lr_decay=1e-6 train.lr=0.3")
    lines, outcome = history(tmp_path / "run"), result(tmp_path / "run")
    assert "it has no usable state, and it last trained in round 2" in lines[2]["stages"]["train.items"]["absent"]["2"]
    assert lines[3]["joined"] == {"2": "new"}
    if outcome["best_round"] <= 2:
        assert "this client lost what it had learnt after round 0" in outcome["absent_at_test"]["2"]


def test_a_later_stage_is_refused_with_the_state_of_the_round_before(tmp_path):
    stage = Stage.PERSONALIZE
    grid = federation(tmp_path)
    restart = restarting(grid, 0, stage, 2)

    def fault(message, client):
        if (message.metadata.message_type, message.metadata.group_id, client) == (stage, "round-2", 0):
            states_of(tmp_path, 0)[-1].unlink()
        restart(message, client)

    grid.fault = fault
    start(tmp_path / "run", grid)
    lines = history(tmp_path / "run")
    assert "last trained in round 1" in lines[1]["stages"][stage]["absent"]["0"]
    # The server knows that it trained in round 2, its disk does not: called to save, it said that it was lost.
    assert lines[2]["joined"] == {"0": "1"}


def test_states_of_another_run_are_not_taken_for_those_of_this_one(finished, tmp_path):
    grid = after_a_run(finished, tmp_path)
    earlier = states_of(tmp_path, 1)[-1].read_bytes()
    restart = restarting(grid, 1, Stage.ITEMS, 2)

    def fault(message, client):
        if (message.metadata.message_type, message.metadata.group_id, client) == (Stage.ITEMS, "round-2", 1):
            for path in states_of(tmp_path, 1):
                path.write_bytes(earlier)
        restart(message, client)

    grid.fault = fault
    start(tmp_path / "two", grid, seed=2)
    lines = history(tmp_path / "two")
    assert "belongs to another run" in lines[1]["stages"]["train.items"]["absent"]["1"]
    assert lines[2]["joined"] == {"1": "new"}


def test_an_old_copy_of_the_state_dir_is_noticed(tmp_path):
    grid = federation(tmp_path)
    restart = restarting(grid, 1, Stage.ITEMS, 4)

    def fault(message, client):
        at = (message.metadata.message_type, message.metadata.group_id, client)
        if at == (Stage.ITEMS, "round-2", 1):
            shutil.copytree(tmp_path / "device-1", tmp_path / "backup")
        if at == (Stage.ITEMS, "round-4", 1):
            shutil.rmtree(tmp_path / "device-1")
            shutil.copytree(tmp_path / "backup", tmp_path / "device-1")
        restart(message, client)

    grid.fault = fault
    start(tmp_path / "run", grid, overrides="rounds=5 min_rounds=5")
    lines = history(tmp_path / "run")
    assert (
        "usable state is of round 1, and it last trained in round 3" in lines[3]["stages"]["train.items"]["absent"]["1"]
    )
    assert lines[4]["joined"] == {"1": "1"}


def test_a_crash_in_the_middle_of_a_stage_leaves_the_state_of_before(tmp_path, monkeypatch, unbroken):
    """The node dies while it writes its state: the file of before stays, and the next round goes on from it."""
    grid = federation(tmp_path)
    whole = os.replace

    def fault(message, client):
        at = (message.metadata.message_type, message.metadata.group_id, client)
        if at == (Stage.PERSONALIZE, "round-2", 1):
            monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("no power")))
        elif at[1] == "round-3":
            monkeypatch.setattr("pathlib.Path.replace", lambda old, new: whole(old, new))
            restarting(grid, 1, Stage.ITEMS, 3)(message, client)
        elif at[2] == 2:
            monkeypatch.setattr("pathlib.Path.replace", lambda old, new: whole(old, new))

    grid.fault = fault
    start(tmp_path / "run", grid)
    lines = history(tmp_path / "run")
    assert "no power" in lines[1]["stages"]["train.personalize"]["absent"]["1"]
    # It had trained in round 2 and saved that.
    assert lines[2]["restored"] == {"1": 2}
    assert lines[2]["stages"]["train.items"]["absent"] == {}
    assert not list((tmp_path / "device-1").rglob(".*"))


def kill_and_resume(tmp_path, prepare=lambda grid: None, overrides=""):
    """A run whose server is killed in round 3 and resumed: Flower then gives the nodes new memories."""
    grid = federation(tmp_path)

    def kill(message, client):
        if (message.metadata.message_type, message.metadata.group_id, client) == (Stage.PERSONALIZE, "round-3", 1):
            raise KeyboardInterrupt

    grid.fault = kill
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", grid, overrides=overrides)
    prepare(grid)
    federation_again(grid).fault = None
    output = str(tmp_path / "run")
    config = {**DEFAULT_RUN_CONFIG, "output-dir": output, "resume": output}
    server_app(grid, Context(2, 1, {}, RecordDict(), config))


@pytest.mark.parametrize("options", ["", "server.checkpoint_every=2"])
def test_a_resumed_run_goes_on_from_the_states_on_the_devices(options, unbroken, tmp_path):
    kill_and_resume(tmp_path, overrides=options)
    assert numbers(tmp_path / "run") == unbroken("fedavg", options)


def test_a_resume_names_who_lost_its_state_and_who_is_another(tmp_path, caplog):
    kill_and_resume(tmp_path, lambda grid: shutil.rmtree(tmp_path / "device-1"))
    assert "client 1 (b) starts as new" in caplog.text
    assert result(tmp_path / "run")["status"] == "completed"


def test_a_resume_with_other_names_is_refused(tmp_path):
    def rename(grid):
        list(grid.contexts.values())[2].node_config["client"] = "d"

    with pytest.raises(RunError, match=r"has 3 clients .* these are 4 names: a, b, c, d"):
        kill_and_resume(tmp_path, rename)


# --- continuing from an earlier run -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A federation after its first run, and the states that it ended with."""
    folder = tmp_path_factory.mktemp("finished")
    grid = federation(folder)
    start(folder / "one", grid)
    return folder, [ClientState.from_context(context) for context in grid.contexts.values()]


def after_a_run(finished, folder):
    """The same federation somewhere else, its devices as they were after the first run."""
    for client in range(3):
        shutil.copytree(finished[0] / f"device-{client}", folder / f"device-{client}")
    return federation(folder)


def test_the_next_run_continues_from_the_model_of_the_last(finished, tmp_path, caplog):
    grid, ended = after_a_run(finished, tmp_path), finished[1]
    begun = {}

    def fault(message, client):
        if message.metadata.message_type == Stage.ITEMS and message.metadata.group_id == "round-1":
            begun[client] = ClientState.from_context(list(grid.contexts.values())[client])

    grid.fault = fault
    start(tmp_path / "two", grid, overrides="client.continue=true")
    for client, state in enumerate(ended):
        for record in ("model", "optimizer"):
            for name, tensor in state.arrays[record].items():
                assert torch.equal(begun[client].arrays[record][name], tensor)
        assert begun[client].numbers["trained_round"] == begun[client].numbers["best_round"] == 0
        assert "best" not in begun[client].arrays
    assert caplog.text.count("goes on from the model of its last run") == 3
    assert len(DeviceFolder(tmp_path / "device-0").runs()) == 2


def test_a_restart_before_the_first_round_does_not_undo_the_continuation(finished, tmp_path):
    for name, stage in (("plain", None), ("restarted", Stage.ITEMS)):
        grid = after_a_run(finished, tmp_path / name)
        if stage:
            grid.fault = restarting(grid, 1, stage, 1)
        start(tmp_path / name / "two", grid, overrides="client.continue=true")
    assert numbers(tmp_path / "plain" / "two") == numbers(tmp_path / "restarted" / "two")


@pytest.mark.parametrize(
    ("options", "change", "why"),
    [
        ("model.dim=5", None, "the model of its earlier run has other tables"),
        ("", "user", "the state of its earlier run has another list of users"),
        ("", "gone", "it has no state of an earlier run"),
        ("", "damaged", "its state of the earlier run is damaged"),
        ("dataset.split.kind=random", None, ""),
    ],
)
def test_what_does_not_fit_is_not_continued_and_that_is_said(options, change, why, finished, tmp_path, caplog):
    grid = after_a_run(finished, tmp_path)
    if change == "user":
        path = tmp_path / "rows-1.csv"
        path.write_text(path.read_text().replace("u10", "other"))
    elif change == "gone":
        shutil.rmtree(tmp_path / "device-1" / "runs")
    elif change == "damaged":
        for path in states_of(tmp_path, 1):
            damage_cut(path)
    start(tmp_path / "two", grid, overrides=f"client.continue=true rounds=1 min_rounds=1 {options}")
    if why:
        assert f"client 1 (b) starts as new ({why}" in caplog.text
    else:
        assert "client 1 (b) goes on from the model of its last run" in caplog.text


def test_only_nodes_continue():
    with pytest.raises(ConfigError, match=r"client.continue is for nodes that bring their own data"):
        load_settings("synthetic", overrides="client.continue=true")


# --- nodes that come and go ---------------------------------------------------------------------------------------


def with_nodes(grid, present):
    """Let only some nodes be connected: `present` gives their places among all."""
    everybody = list(grid.contexts)
    grid.get_node_ids = lambda: [everybody[place] for place in present()]
    return grid


def test_a_run_starts_without_the_late_and_lets_them_in(tmp_path, caplog):
    grid = federation(tmp_path)
    rounds = {"now": 0}

    def fault(message, client):
        rounds["now"] = int(message.metadata.group_id.partition("-")[2])

    grid.fault = fault
    with_nodes(grid, lambda: [0, 2] if rounds["now"] < 2 else [0, 1, 2])
    start(tmp_path / "run", grid, overrides="rounds=4 min_rounds=4 server.min_clients=2")
    lines = history(tmp_path / "run")
    assert [line["clients"] for line in lines] == [2, 2, 3, 3]
    assert lines[2]["joined"] == {"2": "new"}  # a and c have the first numbers
    assert "2 of 3 clients are there; others may join before any round" in caplog.text
    assert "client 2 (b) joined before round 3: new" in caplog.text
    assert json.loads((tmp_path / "run" / "clients.json").read_text())["clients"] == {"a": 0, "c": 1, "b": 2}
    assert result(tmp_path / "run")["absent_at_test"] == {} or result(tmp_path / "run")["best_round"] < 3


def test_too_few_nodes_are_an_error(tmp_path):
    grid = with_nodes(federation(tmp_path), lambda: [0])
    with pytest.raises(RunError, match=r"3 clients are expected .*, 2 at least .*, 1 SuperNodes are connected"):
        start(tmp_path / "run", grid, overrides="server.min_clients=2")
    with pytest.raises(RunError, match=r"3 clients are expected \(dataset.clients.number\), 1 SuperNodes"):
        start(tmp_path / "other", federation_again(grid))


def test_a_node_that_comes_back_under_another_number_of_flower_is_the_same_client(tmp_path, unbroken):
    grid = federation(tmp_path)
    ids = list(grid.contexts)
    moved = {"done": False}

    def fault(message, client):
        at = (message.metadata.message_type, message.metadata.group_id)
        if at == (Stage.PERSONALIZE, "round-1") and client == 2 and not moved["done"]:
            moved["done"] = True
            context = grid.contexts.pop(ids[1])
            context.state, context.live = RecordDict(), None
            grid.contexts[7777] = context

    grid.fault = fault
    start(tmp_path / "run", grid)
    lines = history(tmp_path / "run")
    assert lines[1]["joined"] == {"1": "1"}
    # It held all, and gets the mean once more: nothing else changes.
    expected = unbroken("fedavg")
    assert [line["validation"] for line in lines] == [line["validation"] for line in expected[0]]
    assert result(tmp_path / "run")["test"] == expected[1]


def test_a_late_node_with_a_name_that_is_taken_or_without_room_is_refused(tmp_path, caplog):
    grid = federation(tmp_path)
    list(grid.contexts.values())[2].node_config["client"] = "b"
    rounds = {"now": 0}

    def fault(message, client):
        rounds["now"] = int(message.metadata.group_id.partition("-")[2])

    grid.fault = fault
    with_nodes(grid, lambda: [0, 1] if rounds["now"] < 1 else [0, 1, 2])
    start(tmp_path / "run", grid, overrides="dataset.clients.number=2")
    assert "node 1002 is refused: another node, 1001, is 'b' already" in caplog.text
    assert caplog.text.count("is refused") == 1  # not asked again
    rounds["now"] = 0
    list(federation_again(grid).contexts.values())[2].node_config["client"] = "z"
    start(tmp_path / "two", grid, overrides="dataset.clients.number=2")
    assert "there is no room for 'z'" in caplog.text
    assert all(line["clients"] == 2 for line in history(tmp_path / "two"))


def test_a_late_node_that_was_refused_is_asked_again_once_its_fault_is_mended(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(handshake, "REFUSED_ROUNDS", 2)
    grid = federation(tmp_path)
    config = list(grid.contexts.values())[2].node_config
    config["data-path"] = "/nowhere/rows.csv"
    rounds = {"now": 0}

    def fault(message, client):
        rounds["now"] = int(message.metadata.group_id.partition("-")[2])
        if rounds["now"] == 3:
            config["data-path"] = str(tmp_path / "rows-2.csv")

    grid.fault = fault
    with_nodes(grid, lambda: [0, 1] if rounds["now"] < 1 else [0, 1, 2])
    start(tmp_path / "run", grid, overrides="rounds=4 min_rounds=4 server.min_clients=2")
    assert [line["clients"] for line in history(tmp_path / "run")] == [2, 2, 2, 3]
    assert caplog.text.count("is refused: node 1002: its data cannot be used") == 1  # before round 2, not before 3


def test_other_code_of_one_late_node_does_not_shut_out_the_next(tmp_path, caplog):
    grid = federation(tmp_path)
    rounds = {"now": 0}

    def fault(message, client):
        rounds["now"] = int(message.metadata.group_id.partition("-")[2])

    whole = grid._answer

    def answer(message, *rest):
        reply = whole(message, *rest)
        if message.metadata.message_type == Stage.HELLO and message.metadata.dst_node_id == 1001:
            foreign = Content(decode(reply.content).fields | {"code": "0" * 16})
            return Message(encode(foreign), reply_to=message)
        return reply

    grid.fault, grid._answer = fault, answer
    with_nodes(grid, lambda: [0] if rounds["now"] < 1 else [0, 1, 2])
    start(tmp_path / "run", grid, overrides="server.min_clients=1")
    assert [line["clients"] for line in history(tmp_path / "run")] == [1, 2, 2]
    assert "node 1001 is refused: clients run other code (0000000000000000)" in caplog.text


@pytest.mark.parametrize("strategy", ["fecosr", "finetune"])
def test_strategies_that_must_know_all_markets_take_no_late_ones(strategy):
    with pytest.raises(ConfigError, match="must know all markets"):
        load_settings("own-data", strategy, overrides="server.min_clients=1")


# --- files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "client-00000" / "round-00001.npz"
    generator = torch.Generator().manual_seed(1)
    arrays = {"model": {"items": torch.randn(5, 3, generator=generator)}, "best": {}}
    state = ClientState(arrays, {"trained_round": 4})
    state.save(path, True, {"run": "abc"})
    return path, path.read_bytes(), state


def test_a_state_comes_back_as_it_was(stored):
    path, _, state = stored
    found, about = ClientState.read(path)
    assert about == {"run": "abc"}
    assert found.numbers == state.numbers
    assert found.arrays["best"] == {}
    assert torch.equal(found.arrays["model"]["items"], state.arrays["model"]["items"])


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_changed_bit_is_noticed_or_changes_nothing(stored, place, bit):
    path, content, state = stored
    changed = bytearray(content)
    changed[place % len(content)] ^= 1 << bit
    damaged = path.with_name("damaged.npz")
    damaged.write_bytes(bytes(changed))
    try:
        found, about = ClientState.read(damaged)
    except StateError:
        return
    assert (about, found.numbers) == ({"run": "abc"}, state.numbers)
    assert torch.equal(found.arrays["model"]["items"], state.arrays["model"]["items"])


@given(length=st.integers(0, 10**6))
def test_a_cut_file_is_noticed(stored, length):
    path, content, _ = stored
    damaged = path.with_name("cut.npz")
    damaged.write_bytes(content[: length % len(content)])
    with pytest.raises(StateError):
        ClientState.read(damaged)


def test_a_content_of_right_form_with_another_checksum_is_noticed(stored, tmp_path):
    """As after a program that wrote the archive anew, so that its own sums are right."""
    arrays = read_arrays(stored[0])
    arrays["model|items"] = arrays["model|items"] + 1
    write_arrays(tmp_path / "x.npz", arrays)
    with pytest.raises(StateError, match="checksum"):
        ClientState.read(tmp_path / "x.npz")


@pytest.mark.parametrize(("every", "kept"), [(1, [6, 7]), (3, [3, 6, 7]), (0, [6, 7]), (5, [5, 6, 7])])
def test_files_that_somebody_may_ask_for_are_kept(every, kept, tmp_path):
    folder = StateFolder(tmp_path, durable=False)
    for round_ in range(1, 8):
        folder.save(ClientState(numbers={"trained_round": round_}), 0, round_, every=every)
    assert [int(file.stem[-5:]) for file in sorted(tmp_path.rglob("*.npz"))] == kept
    folder.forget_after(0, 6)
    assert [int(file.stem[-5:]) for file in sorted(tmp_path.rglob("*.npz"))] == kept[:-1]
    assert folder.load(0, 99).numbers == {"trained_round": 6}
