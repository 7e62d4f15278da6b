"""Clients that fail, vanish, answer late or wrongly, diverge; nodes that do not belong."""

import re
import shlex
import tomllib

import numpy as np
import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.app import app as client_app
from client_app.state import ClientState
from fedhur_app.config import DEFAULT_RUN_CONFIG, ConfigError, load_settings
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.shards import shard_path
from fedhur_app.evaluation.ranking import METRICS
from fedhur_app.fingerprint import code_fingerprint
from fedhur_app.protocol import Content, Stage, decode, encode
from fedhur_app.runtime import LocalGrid, run_local
from server_app.app import app as server_app
from server_app.checkpoint import CheckpointError
from server_app.stages import DeadWorkerError, DivergedRunError, QuorumError, RunError, StageRunner
from tests.running import SMALL, history, result, resume, run


def failing(stage, clients, rounds, kind):
    """A fault: `clients` fail in `stage` of `rounds`."""

    def fault(message, client):
        hit = message.metadata.message_type == stage and client in clients
        return kind if hit and message.metadata.group_id in {f"round-{r}" for r in rounds} else None

    return fault


@pytest.mark.parametrize("stage", ["train.items", "query.utility", "train.personalize"])
@pytest.mark.parametrize("kind", ["raise", "drop"])
def test_the_round_goes_on_without_a_client_and_names_it(stage, kind, tmp_path):
    run(tmp_path, "fedhur", "rounds=3 min_rounds=3", failing(stage, {2}, {2}, kind))
    lines = history(tmp_path)
    reason = lines[1]["stages"][stage]["absent"]["2"]
    assert ("injected fault" if kind == "raise" else "no answer") in reason
    assert lines[1]["stages"][stage]["replies"] == 5
    for index in (0, 2):
        assert all(details["absent"] == {} for details in lines[index]["stages"].values())
    assert result(tmp_path)["status"] == "completed"


@pytest.mark.parametrize("strategy", ["fedavg", "fedhur"])
def test_resume_after_a_round_with_a_client_that_missed_its_last_stage(strategy, tmp_path):
    fault = failing("train.personalize", {1}, {2}, "raise")
    options = "rounds=4 min_rounds=4"
    run(tmp_path / "whole", strategy, options, fault)

    def fault_and_kill(message, client):
        if message.metadata.group_id == "round-3":
            raise KeyboardInterrupt
        return fault(message, client)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", strategy, options, fault_and_kill)
    resume(tmp_path / "killed")
    assert history(tmp_path / "killed") == history(tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["fedavg", "fedhur"])
def test_a_client_that_misses_last_stages_is_tested_with_its_last_whole_model(strategy, tmp_path):
    """And not with the table that local training left: from round 2 on it trains and gets no answer."""
    run(
        tmp_path / "missed",
        strategy,
        "rounds=4 min_rounds=4 evaluation.per_user=true",
        failing("train.personalize", {2}, {2, 3, 4}, "drop"),
    )
    run(tmp_path / "first", strategy, "rounds=1 min_rounds=1 evaluation.per_user=true")
    missed, first = (dict(np.load(tmp_path / name / "users.npz")) for name in ("missed", "first"))
    assert result(tmp_path / "missed")["best_round"] > 1
    of_client = missed["client"] == 2
    assert of_client.any()
    for metric in METRICS:
        assert np.array_equal(missed[metric][of_client], first[metric][of_client])
    assert not np.array_equal(missed["auc"][~of_client], first["auc"][~of_client])


def test_a_client_whose_last_state_was_not_saved_is_named_on_a_resume(tmp_path, caplog):
    """It missed the last stage of round 3 and the call to save: the resume has round 2 of it only."""

    def fault(message, client):
        if message.metadata.group_id == "round-4":
            raise KeyboardInterrupt
        lost = client == 2 and message.metadata.group_id == "round-3"
        return "drop" if lost and message.metadata.message_type != "train.items" else None

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "fedavg", "rounds=4 min_rounds=4", fault)
    caplog.clear()
    resume(tmp_path)
    assert "client 2 goes on with its state of round 2, it last trained in round 3" in caplog.text
    assert result(tmp_path)["status"] == "completed"


def test_a_resume_takes_its_own_folder_and_data(tmp_path):
    run(tmp_path / "a", "fedavg", "rounds=2 min_rounds=2", seed=1)
    run(tmp_path / "b", "fedavg", "rounds=2 min_rounds=2", seed=7)
    before = (tmp_path / "b" / "result.json").read_text()
    with pytest.raises(ConfigError, match="goes on in its own folder"):
        run_local({"output-dir": str(tmp_path / "b"), "resume": str(tmp_path / "a"), "overrides": "rounds=4"})
    assert (tmp_path / "b" / "result.json").read_text() == before
    config = tmp_path / "a" / "config.yaml"
    config.write_text(config.read_text().replace("fingerprint: ", "fingerprint: x"))
    with pytest.raises(CheckpointError, match="data set has changed"):
        resume(tmp_path / "a", "rounds=4")


def test_huge_finite_tables_name_client_and_round(tmp_path):
    with pytest.raises(DivergedRunError, match=r"client \d+, round 1: its item table has grown too large"):
        run(tmp_path, "fedcia", "rounds=2 min_rounds=1 train.lr=1e25 train.epochs=1")


@pytest.mark.parametrize(("quorum", "asked", "needed"), [(0.56, 25, 14), (0.55, 100, 55), (0.5, 5, 3), (1.0, 3, 3)])
def test_a_quorum_is_a_whole_number_of_clients(quorum, asked, needed):
    def answering(count):
        grid = LocalGrid(
            replying(lambda client, _: {"client": client, "stage": Stage.ITEMS, "round": 1}),
            asked,
            {},
            lambda message, client: None if client < count else "drop",
        )
        runner = StageRunner(grid, dict(enumerate(grid.get_node_ids())), quorum, 5.0)
        return runner.call(Stage.ITEMS, 1, {c: Content({"round": 1}) for c in range(asked)}, "round 1")

    assert len(answering(needed).replies) == needed
    with pytest.raises(QuorumError):
        answering(needed - 1)


def test_below_quorum_the_run_stops_with_the_reason(tmp_path):
    fault = failing("train.personalize", {0, 1, 2, 3}, {2}, "raise")
    with pytest.raises(QuorumError, match=r"round 2/3, train.personalize: 2 of 6 clients .* client 0"):
        run(tmp_path, "fedavg", "rounds=3 min_rounds=3", fault)
    outcome = result(tmp_path)
    assert outcome["status"] == "failed"
    assert "2 of 6 clients answered, 3 are needed" in outcome["reason"]
    assert len(history(tmp_path)) == 1
    resume(tmp_path)
    assert result(tmp_path)["status"] == "completed"


@pytest.mark.parametrize("strategy", ["fedavg", "fedhur", "local"])
def test_divergence_names_client_and_round_and_keeps_the_checkpoint(strategy, tmp_path):
    run(tmp_path, strategy, "rounds=2 min_rounds=2 train.loss=mse train.optimizer=sgd train.lr=0.1")
    before = (tmp_path / "checkpoint" / "server.npz").read_bytes()
    with pytest.raises(DivergedRunError, match=r"client \d+, round \d+, .*"):
        resume(tmp_path, "rounds=200 min_rounds=200 train.lr=1e3")
    assert result(tmp_path)["status"] == "failed"
    assert len(before) > 0
    assert (tmp_path / "checkpoint" / "server.npz").is_file()
    last = history(tmp_path)[-1]
    assert last["loss"] == last["loss"]


def test_a_damaged_checkpoint_is_named_and_the_finished_result_stays(tmp_path):
    run(tmp_path, "fedavg", "rounds=2 min_rounds=2")
    before = (tmp_path / "result.json").read_text()
    (tmp_path / "checkpoint" / "server.npz").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"server.npz is damaged .* cannot be resumed; start it anew"):
        resume(tmp_path, "rounds=4")
    assert (tmp_path / "result.json").read_text() == before


@pytest.mark.parametrize("damage", [b"{", b"[1, 2]", b"\xff\xfe"])
def test_a_damaged_history_loses_no_round_silently(damage, tmp_path):
    run(tmp_path, "fedavg", "rounds=3 min_rounds=3")
    path = tmp_path / "history.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, lines[2]]) + b"\n")
    with pytest.raises(CheckpointError, match=r"history.jsonl, line 2 is damaged"):
        resume(tmp_path, "rounds=4")
    path.write_bytes(b"\n".join([*lines, damage]))
    resume(tmp_path, "rounds=4")
    assert [line["round"] for line in history(tmp_path)] == [1, 2, 3, 4]


def test_a_damaged_client_state_is_named(tmp_path):
    run(tmp_path, "fedavg", "rounds=2 min_rounds=2")
    damaged = tmp_path / "checkpoint" / "clients" / "client-00003" / "round-00002.npz"
    damaged.write_bytes(b"")
    with pytest.raises(RunError, match=r"client-00003/round-00002.npz is not a readable client state"):
        resume(tmp_path, "rounds=4")


def test_scores_of_ten_thousands_are_no_reason_to_stop(tmp_path):
    run(tmp_path, "fedavg", "rounds=3 min_rounds=3 train.lr=100")
    assert result(tmp_path)["status"] == "completed"


def grid_and_runner(client, nodes=3, timeout=5.0, quorum=1.0):
    grid = LocalGrid(client, nodes, {})
    return grid, StageRunner(grid, dict(enumerate(grid.get_node_ids())), quorum, timeout)


def replying(fields):
    app = ClientApp()

    @app.train("items")
    def items(message, context):
        client = context.node_config["partition-id"]
        return Message(encode(Content(fields(client, decode(message.content)))), reply_to=message)

    return app


def test_stale_answers_are_refused_by_round():
    def fields(client, request):
        return {"client": client, "stage": Stage.ITEMS, "round": request.fields["round"] - (client == 1)}

    _, runner = grid_and_runner(replying(fields), quorum=0.5)
    outcome = runner.call(Stage.ITEMS, 4, {c: Content({"round": 4}) for c in range(3)}, "round 4")
    assert list(outcome.replies) == [0, 2]
    assert "stale answer refused: it belongs to round 3" in outcome.absent[1]


def test_an_answer_in_another_clients_name_is_refused():
    _, runner = grid_and_runner(replying(lambda client, _: {"client": 0, "stage": Stage.ITEMS, "round": 1}), quorum=0.1)
    outcome = runner.call(Stage.ITEMS, 1, {c: Content({"round": 1}) for c in range(3)}, "round 1")
    assert list(outcome.replies) == [0]
    assert "names client 0" in outcome.absent[2]


def test_nan_in_an_answer_stops_the_run():
    def fields(client, _):
        return {"client": client, "stage": Stage.ITEMS, "round": 1, "loss_sum": float("nan") if client else 0.0}

    _, runner = grid_and_runner(replying(fields))
    with pytest.raises(DivergedRunError, match=r"client 1, round 1, train.items: loss_sum is not finite"):
        runner.call(Stage.ITEMS, 1, {c: Content({"round": 1}) for c in range(3)}, "round 1")


def test_a_dead_ray_worker_ends_the_run():
    class DeadGrid(LocalGrid):
        def _answer(self, message, context, fault):
            return Message(Error(0, "<class 'ray.exceptions.ActorDiedError'>: The actor died"), reply_to=message)

    grid = DeadGrid(client_app, 2, {})
    runner = StageRunner(grid, dict(enumerate(grid.get_node_ids())), 0.0, 5.0)
    with pytest.raises(DeadWorkerError, match="Ray worker process died"):
        runner.call(Stage.ITEMS, 1, {0: Content(), 1: Content()}, "round 1")


def start(tmp_path, grid, overrides=""):
    config = {
        **DEFAULT_RUN_CONFIG,
        "dataset": "synthetic",
        "strategy": "fedavg",
        "output-dir": str(tmp_path),
        "overrides": f"{SMALL} rounds=1 min_rounds=1 {overrides}",
    }
    server_app(grid, Context(1, 1, {}, RecordDict(), config))


@pytest.mark.parametrize("nodes", [2, 9])
def test_the_wrong_number_of_nodes_fails_with_the_command_that_works(nodes, tmp_path):
    with pytest.raises(RunError, match=f"has 6 clients, but there are {nodes} SuperNodes") as error:
        start(tmp_path, LocalGrid(client_app, nodes, {}))
    # With everything that was asked for, so that the printed command does the same run.
    command = shlex.split(str(error.value).partition("Run: ")[2])
    assert command[:4] == ["flwr", "run", ".", "--stream"]
    given = tomllib.loads("\n".join(re.findall(r'\S+="(?:[^"])*"', command[command.index("--run-config") + 1])))
    assert given["dataset"] == "synthetic"
    assert given["strategy"] == "fedavg"
    assert SMALL in given["overrides"]
    assert given["output-dir"] == str(tmp_path)
    assert '--federation-config "num-supernodes=6 client-resources-num-cpus=1"' in str(error.value)
    assert result(tmp_path)["status"] == "failed"


def test_two_nodes_with_the_same_data_are_refused_by_name(tmp_path):
    grid = LocalGrid(client_app, 6, {}, node_config=lambda i: {"partition-id": 0 if i == 5 else i})
    with pytest.raises(RunError, match=r"two nodes \(1000 and 1005\) both claim to be client 0"):
        start(tmp_path, grid)


def test_foreign_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("client_app.app.code_fingerprint", lambda: "0123456789ab")
    with pytest.raises(RunError, match=r"other code \(0123456789ab\).*Stop it, start it again"):
        start(tmp_path, LocalGrid(client_app, 6, {}))


def test_a_client_app_of_another_project_is_refused(tmp_path):
    foreign = ClientApp()
    foreign.train()(lambda message, context: message)
    with pytest.raises(RunError, match=r"handshake failed.*they run another app"):
        start(tmp_path, LocalGrid(foreign, 6, {}))


def test_clients_may_bring_their_own_data(tmp_path):
    """The same run with shards that the clients read from their own paths gives the same result."""
    settings = load_settings("synthetic", "fedhur", overrides=f"{SMALL} rounds=3 min_rounds=3")
    folder = prepare_data(settings).folder
    run(tmp_path / "simulated", "fedhur", "rounds=3 min_rounds=3")
    grid = LocalGrid(
        client_app,
        6,
        {},
        node_config=lambda i: {
            "data-path": str(shard_path(folder, i)),
            "state-dir": str(tmp_path / f"device-{i}"),
            "seed-secret": 0,
        },
    )
    small = SMALL.replace("dataset.clients.number=6", "")
    config = {
        **DEFAULT_RUN_CONFIG,
        "dataset": "own-data",
        "strategy": "fedhur",
        "output-dir": str(tmp_path / "deployed"),
        "overrides": f"{small} rounds=3 min_rounds=3 dataset.clients.number=6",
    }
    server_app(grid, Context(1, 1, {}, RecordDict(), config))
    assert result(tmp_path / "deployed")["test"] == result(tmp_path / "simulated")["test"]
    assert not (tmp_path / "deployed" / "checkpoint" / "clients").exists()
    assert list((tmp_path / "device-0").rglob("round-*.npz"))


def test_a_device_draws_what_the_server_cannot_draw_again(tmp_path):
    """Who knows the run's seed must not know a device's first tables, or an upload tells its interactions."""
    settings = load_settings("synthetic", "fedavg", overrides=SMALL)
    path = str(shard_path(prepare_data(settings).folder, 0))
    LocalGrid(client_app, 1, {})

    def first_users(**node_config):
        context = Context(1, 1, {"data-path": path, **node_config}, RecordDict(), {})
        request = Content({"settings": settings.to_json(), "round": 1})
        client_app(Message(encode(request), 1, Stage.ITEMS), context)
        return ClientState.from_context(context)

    known, own, other = first_users(**{"seed-secret": 0}), first_users(), first_users()
    tables = [state.arrays["model"]["users"] for state in (known, own, other)]
    assert not any(torch.equal(tables[a], tables[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert own.numbers["secret"] != other.numbers["secret"]
    assert torch.equal(first_users(**{"seed-secret": own.numbers["secret"]}).arrays["model"]["users"], tables[1])


def test_a_device_ignores_paths_that_the_server_names(tmp_path):
    settings = load_settings("synthetic", "local", overrides=SMALL)
    prepared = prepare_data(settings)
    context = Context(1, 1, {"data-path": str(shard_path(prepared.folder, 0))}, RecordDict(), {})
    request = Content(
        {
            "code": code_fingerprint(),
            "checkpoint": str(tmp_path / "planted"),
            "data": str(tmp_path / "elsewhere"),
        }
    )
    LocalGrid(client_app, 1, {})
    client_app(Message(encode(request), 1, Stage.HELLO), context)
    request = Content({"settings": settings.to_json(), "round": 1, "finish": True, "save": True})
    client_app(Message(encode(request), 1, Stage.ITEMS), context)
    assert not (tmp_path / "planted").exists()
