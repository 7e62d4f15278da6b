"""Rounds with everybody there: determinism, best model, early stop, participation, bytes, resume."""

import numpy as np
import pytest
import yaml

from client_app.state import ClientState
from fedhur_app import runtime
from fedhur_app.config import load_settings
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.shards import load_shard, shard_path
from fedhur_app.evaluation.ranking import RankSums, rank_sums
from fedhur_app.memory import peak_memory_mib
from fedhur_app.protocol import bytes_by_record
from server_app.checkpoint import CheckpointError
from tests.running import SMALL, STRATEGIES, history, killed_and_resumed, numbers, result, resume, run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_and_repeats_to_the_last_bit(strategy, tmp_path):
    run(tmp_path / "a", strategy, "rounds=3 min_rounds=1")
    run(tmp_path / "b", strategy, "rounds=3 min_rounds=1")
    assert history(tmp_path / "a") == history(tmp_path / "b")
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    outcome = result(tmp_path / "a")
    assert outcome["status"] == "completed"
    assert outcome["rounds"] == 3
    assert all(0 <= value <= 1 for value in outcome["test"].values())
    assert set(outcome["test"]) == {"recall@10", "precision@10", "f1@10", "mrr@10", "ndcg@10", "hit@10", "auc"}


@pytest.mark.parametrize("strategy", ["local", "fedavg", "fedcia", "fedhur", "gfcf"])
def test_another_seed_gives_another_run(strategy, tmp_path):
    run(tmp_path / "a", strategy, "rounds=1 min_rounds=1", seed=1)
    run(tmp_path / "b", strategy, "rounds=1 min_rounds=1", seed=2)
    assert history(tmp_path / "a") != history(tmp_path / "b")


def test_evaluation_batch_size_does_not_change_a_bit(tmp_path):
    # 0.001 MiB is one user of this catalogue at a time; both settings have the same length in a message.
    for name, mib in (("a", "0.001"), ("b", "9.125")):
        run(tmp_path / name, "fedhur", f"rounds=3 min_rounds=1 evaluation.batch_mib={mib}")
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


@pytest.mark.parametrize("strategy", ["local", "fedavg", "fedhur"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_resumed_run_has_the_history_of_an_unbroken_one(strategy, fraction, tmp_path):
    options = f"rounds=5 min_rounds=1 patience=5 fraction_train={fraction}"
    run(tmp_path / "whole", strategy, options)
    for killed_in in (2, 4):
        output = tmp_path / f"killed-{killed_in}"
        seen = set()

        def kill(message, client, killed_in=killed_in, seen=seen):
            # Killed in the middle of the last stage of a round: some clients have finished it, some have not.
            if message.metadata.group_id == f"round-{killed_in}" and message.metadata.message_type.startswith("train."):
                seen.add((message.metadata.message_type, client))
                stages = {stage for stage, _ in seen}
                last = "train.items" if strategy == "local" else "train.personalize"
                if last in stages and len([1 for stage, _ in seen if stage == last]) == 2:
                    raise KeyboardInterrupt
            return None

        with pytest.raises(KeyboardInterrupt):
            run(output, strategy, options, kill)
        assert result(output)["status"] == "failed"
        assert len(history(output)) == killed_in - 1
        resume(output)
        assert history(output) == history(tmp_path / "whole")
        assert numbers(output) == numbers(tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["fedavg", "fedhur"])
def test_resume_from_a_checkpoint_of_every_third_round_with_half_of_the_clients(strategy, tmp_path):
    """Clients that were not sampled in the checkpoint's round must have saved what they trained before it."""
    options = "rounds=8 min_rounds=8 fraction_train=0.34 server.checkpoint_every=3"
    run(tmp_path / "whole", strategy, options)
    killed_and_resumed(tmp_path / "killed", strategy, options, 8)
    assert history(tmp_path / "killed") == history(tmp_path / "whole")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


def test_an_output_that_holds_a_run_is_refused_and_left_alone(tmp_path):
    run(tmp_path, "fedavg", "rounds=1 min_rounds=1")
    before = (tmp_path / "result.json").read_text()
    with pytest.raises(CheckpointError, match="already holds a run"):
        run(tmp_path, "fedavg", "rounds=1 min_rounds=1")
    assert (tmp_path / "result.json").read_text() == before


def test_the_result_says_how_much_memory_was_needed(tmp_path):
    """In one process server and clients are the same; the server's figure is read a moment later.

    The kernel counts pages on each core and adds them up now and then: a later figure may be some pages lower.
    """
    run(tmp_path, "fedavg", "rounds=1 min_rounds=1")
    peaks = result(tmp_path)["peak_memory_mib"]
    assert 50 < peaks["client"] <= peaks["server"] + 1 <= peak_memory_mib() + 2


def test_a_finished_run_can_be_given_more_rounds(tmp_path):
    run(tmp_path / "long", "fedavg", "rounds=6 min_rounds=6")
    run(tmp_path / "short", "fedavg", "rounds=3 min_rounds=3")
    resume(tmp_path / "short", "rounds=6 min_rounds=6")
    assert numbers(tmp_path / "short") == numbers(tmp_path / "long")


def test_the_model_tested_is_that_of_the_best_validation_round(tmp_path):
    """Ranking the test rows by hand with the clients' kept models gives result.json's figures."""
    options = "rounds=40 min_rounds=1 patience=3 train.lr=0.3"
    grid = run(tmp_path, "fedavg", options)
    outcome = result(tmp_path)
    assert outcome["best_round"] < outcome["rounds"] < 40, "this run must stop early to be of use here"
    assert outcome["rounds"] - outcome["best_round"] == 3
    values = [line["validation"]["ndcg@10"] for line in history(tmp_path)]
    assert outcome["best_round"] == 1 + int(np.argmax(values))
    settings = load_settings("synthetic", "fedavg", overrides=f"{SMALL} {options}")
    folder = prepare_data(settings).folder
    pooled = RankSums.zero(10)
    for client, context in enumerate(grid.contexts.values()):
        shard = load_shard(shard_path(folder, client))
        best = ClientState.from_context(context).arrays["best"]
        users, items = (best[name].double() for name in ("users", "items"))
        pooled += rank_sums(
            lambda rows, users=users, items=items: users[rows] @ items.T,
            [shard.train, shard.valid],
            shard.test,
            n_items=shard.n_items,
        )
    assert pooled.means() == pytest.approx(outcome["test"], abs=1e-12)


def test_partial_participation_samples_that_share_each_round(tmp_path):
    asked = []

    def note(message, client):
        if message.metadata.message_type == "train.items":
            asked.append((message.metadata.group_id, client))

    run(tmp_path, "fedavg", "rounds=8 min_rounds=8 fraction_train=0.5", note)
    by_round = [{client for group, client in asked if group == f"round-{r}"} for r in range(1, 9)]
    assert all(len(clients) == 3 for clients in by_round)
    assert set.union(*by_round) == set(range(6))
    assert len({frozenset(clients) for clients in by_round}) > 1
    folder = prepare_data(load_settings("synthetic", "fedavg", overrides=SMALL)).folder
    shards = [load_shard(shard_path(folder, client)) for client in range(6)]
    with_test_items = sum(int((shard.test.counts > 0).sum()) for shard in shards)
    assert result(tmp_path)["users_evaluated"] == with_test_items


@pytest.mark.parametrize("strategy", ["fedavg", "fedhur"])
def test_bytes_in_the_history_are_those_of_the_records_sent(strategy, tmp_path, monkeypatch):
    sent = {"up": {}, "down": {}}
    answer = runtime.LocalGrid._answer

    def spy(grid, message, context, fault):
        reply = answer(grid, message, context, fault)
        for way, records in (("down", message.content), ("up", reply.content)):
            total = sum(bytes_by_record(records).values())
            key = message.metadata.group_id
            if message.metadata.message_type not in ("query.hello", "evaluate.rank"):
                sent[way][key] = sent[way].get(key, 0) + total
        return reply

    monkeypatch.setattr(runtime.LocalGrid, "_answer", spy)
    run(tmp_path, strategy, "rounds=2 min_rounds=1")
    for line in history(tmp_path):
        for way in ("up", "down"):
            counted = sum(sum(stage[f"bytes_{way}"].values()) for stage in line["stages"].values())
            assert counted == sent[way][f"round-{line['round']}"]
            assert line[f"bytes_{way}_per_client"] == counted / 6
    assert result(tmp_path)["bytes_up"] == sum(sent["up"].values())


def test_output_folder_says_everything_about_the_run(tmp_path):
    run(tmp_path, "fedhur", "rounds=2 min_rounds=1", seed=7)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config["settings"]["seed"] == 7
    assert config["data"]["fingerprint"]
    assert {"fedhur", "flwr", "torch", "numpy", "python"} <= set(config["versions"])
    outcome = result(tmp_path)
    assert (outcome["dataset"], outcome["strategy"], outcome["seed"]) == ("synthetic", "fedhur", 7)
    assert (tmp_path / "checkpoint" / "server.npz").is_file()


def test_checkpoints_can_be_switched_off(tmp_path):
    run(tmp_path, "fedavg", "rounds=2 min_rounds=1 server.checkpoint_every=0")
    assert not (tmp_path / "checkpoint").exists()
    with pytest.raises(Exception, match="no checkpoint"):
        resume(tmp_path)


def test_untrained_models_rank_near_chance(tmp_path):
    """No method may score near 1 without federation, and none above chance without learning."""
    run(tmp_path, "local", "rounds=1 min_rounds=1 train.lr=1e-9")
    assert result(tmp_path)["test"]["recall@10"] == pytest.approx(10 / 80, abs=0.08)
