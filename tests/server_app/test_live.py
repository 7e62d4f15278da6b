"""The live view: what TensorBoard reads is the history."""

import sys

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedhur_app.config import ConfigError
from server_app.live import scalars
from tests.running import history, killed_and_resumed, result, run

LIVE = "server.tensorboard=true min_rounds=1"


def shown(folder):
    """Tag -> [(round, value)]."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_shows_the_history(folder):
    lines = history(folder)
    found = shown(folder)
    expected = {"loss", "bytes/up_per_client", "bytes/down_per_client", "seconds/round"}
    assert set(found) == expected | {f"validation/{name}" for name in lines[0]["validation"]}
    assert [step for step, _ in found["seconds/round"]] == [line["round"] for line in lines]
    for tag, value_of in {
        "loss": lambda line: line["loss"],
        "validation/ndcg@10": lambda line: line["validation"]["ndcg@10"],
        "validation/auc": lambda line: line["validation"]["auc"],
        "bytes/up_per_client": lambda line: line["bytes_up_per_client"],
    }.items():
        assert found[tag] == [(line["round"], pytest.approx(value_of(line), rel=1e-6)) for line in lines]


def test_every_round_is_shown(tmp_path):
    run(tmp_path, "fedavg", f"{LIVE} rounds=3")
    assert len(history(tmp_path)) == 3
    assert_shows_the_history(tmp_path)


def test_a_resumed_run_shows_no_round_twice(tmp_path):
    # The checkpoint is that of round 2; round 3 was shown, is taken back and made again.
    killed_and_resumed(tmp_path, "fedavg", f"{LIVE} rounds=4 server.checkpoint_every=2", 4)
    assert len(history(tmp_path)) == 4
    assert_shows_the_history(tmp_path)


def test_nothing_is_written_unless_asked_for(tmp_path):
    run(tmp_path, "fedavg", "rounds=1 min_rounds=1")
    assert not (tmp_path / "tensorboard").exists()


def test_a_missing_package_is_named_before_the_first_round(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedhur\[live\]'"):
        run(tmp_path, "fedavg", f"{LIVE} rounds=1")
    assert result(tmp_path)["status"] == "failed"
    assert not (tmp_path / "history.jsonl").exists()
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["settings"]["server"]["tensorboard"]


def test_markets_are_shown_by_name():
    line = {
        "round": 2, "loss": 0.5, "validation": {"ndcg@10": None}, "bytes_up_per_client": 3, "bytes_down_per_client": 4,
        "seconds": {"round": 1.5}, "markets": {"1": {"auc": 0.75, "users": 7}, "2": {"ndcg@10": None, "auc": 0.5}},
    }  # fmt: skip
    assert dict(scalars(line, ["us", "de"])) == {
        "loss": 0.5,
        "bytes/up_per_client": 3.0,
        "bytes/down_per_client": 4.0,
        "seconds/round": 1.5,
        "markets/de/auc": 0.75,
        "markets/de/users": 7.0,
        "markets/2/auc": 0.5,
    }
