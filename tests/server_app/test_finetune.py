"""Fine-tuning across markets: who trains when, what the source is left with, and which rounds decide."""

import pytest
import torch

from client_app.algorithms.finetune import Client
from fedhur_app.config import ConfigError, load_settings
from server_app.stages import RunError
from tests.running import history, killed_and_resumed, numbers, run

OPTIONS = "rounds=6 min_rounds=6 finetune.source=2 finetune.source_rounds=3"


@pytest.fixture
def trained(monkeypatch):
    """(round, client) -> whether it trained, and its model afterwards."""
    seen = {}
    honest = Client.train

    def train(self):
        fields = honest(self)
        seen[self.round, self.shard.client] = (self.trains, self.state.arrays["model"])
        return fields

    monkeypatch.setattr(Client, "train", train)
    return seen


def test_the_source_trains_first_and_then_the_others(trained, tmp_path):
    run(tmp_path, "finetune", OPTIONS)
    for round_ in range(1, 7):
        active = {client for client in range(6) if trained[round_, client][0]}
        assert active == ({2} if round_ <= 3 else {0, 1, 3, 4, 5})
    assert [line["phase"] for line in history(tmp_path)] == ["source"] * 3 + ["others"] * 3


def test_all_end_with_one_item_table_and_the_source_with_its_old_users(trained, tmp_path):
    grid = run(tmp_path, "finetune", OPTIONS)
    models = [context.live.arrays["model"] for context in grid.contexts.values()]
    assert all(torch.equal(model["items"], models[0]["items"]) for model in models)
    best_of_source = min(line["best_round"] for line in history(tmp_path) if line["round"] == 3)
    assert torch.equal(models[2]["users"], trained[best_of_source, 2][1]["users"])


def test_the_others_begin_with_the_source_s_best_table(trained, tmp_path):
    run(tmp_path, "finetune", OPTIONS)
    best = history(tmp_path)[2]["best_round"]
    assert torch.equal(trained[4, 2][1]["items"], trained[best, 2][1]["items"])


def test_an_exhausted_patience_ends_the_first_phase_early(trained, tmp_path):
    options = "rounds=12 min_rounds=1 patience=1 finetune.source=2 finetune.source_rounds=11 train.lr=1e-9"
    run(tmp_path, "finetune", options)
    phases = [line["phase"] for line in history(tmp_path)]
    # Nothing is learned: round 1 is the best, round 2 is no better.
    assert phases[:3] == ["source", "source", "others"]


def test_validation_is_that_of_who_trains(tmp_path):
    run(tmp_path, "finetune", f"{OPTIONS} evaluation.per_client=true")
    lines = history(tmp_path)
    assert lines[0]["validation"]["ndcg@10"] == lines[0]["markets"]["2"]["ndcg@10"]
    others = [value for market, value in lines[-1]["markets"].items() if market != "2"]
    users = sum(value["users"] for value in others)
    mean = sum(value["ndcg@10"] * value["users"] for value in others if value["users"]) / users
    assert lines[-1]["validation"]["ndcg@10"] == pytest.approx(mean)


def test_a_source_that_misses_the_switch_goes_back_later(trained, tmp_path):
    def away(message, client):
        return "drop" if client == 2 and message.metadata.group_id == "round-4" else None

    grid = run(tmp_path, "finetune", OPTIONS, away)
    best = history(tmp_path)[2]["best_round"]
    source = next(c for c in grid.contexts.values() if c.node_config["partition-id"] == 2)
    assert torch.equal(source.live.arrays["model"]["users"], trained[best, 2][1]["users"])


@pytest.mark.parametrize("killed_in", [3, 4, 5])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(killed_in, tmp_path):
    run(tmp_path / "whole", "finetune", OPTIONS)
    killed_and_resumed(tmp_path / "killed", "finetune", OPTIONS, killed_in)
    assert history(tmp_path / "killed") == history(tmp_path / "whole")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


def test_impossible_settings(tmp_path):
    with pytest.raises(ConfigError, match="leaves no round of 5"):
        load_settings("synthetic", "finetune", overrides="rounds=5 finetune.source_rounds=5")
    for change in ("rounds=1 min_rounds=1", "fraction_train=0.5"):
        with pytest.raises(ConfigError, match="it needs fraction_train=1 and two rounds"):
            load_settings("synthetic", "finetune", overrides=change)
    with pytest.raises(ConfigError, match="selection=pooled"):
        load_settings("synthetic", "finetune", overrides="evaluation.selection=client")
    with pytest.raises(RunError, match="source is market 9"):
        run(tmp_path, "finetune", "finetune.source=9")
