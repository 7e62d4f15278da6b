"""`fedhur markets` as a command; its numbers are tested in tests/reporting/test_markets.py."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from fedhur_app import compare, markets
from fedhur_app.cli import app
from fedhur_app.files import read_arrays, write_arrays
from fedhur_app.sweep import OUTPUT_LOG, SweepError
from tests import running

OPTIONS = [*running.SMALL.split(), "rounds=2", "min_rounds=1"]


def invoke(output: Path, strategies: str) -> Result:
    words = ["--dataset", "synthetic", "--strategies", strategies, "--seeds", "1", "--output", str(output)]
    return CliRunner().invoke(app, ["markets", *words, *(word for change in OPTIONS for word in ("--set", change))])


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two completed runs; no process may be started any more."""
    for strategy in ("local", "fedavg"):
        folder = tmp_path / "runs" / strategy / "seed-1"
        running.run(folder, strategy, shlex.join([*OPTIONS, *markets.CHANGES]))
        (folder / OUTPUT_LOG).touch()
    monkeypatch.setattr(compare, "command_of", lambda *_: pytest.fail("nothing is to be run"))
    return tmp_path


def give_markets(folder: Path) -> None:
    """Users by number become those of two markets."""
    users = read_arrays(folder / "users.npz")
    write_arrays(folder / "users.npz", users | {"market": users["user"] % 2})
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"]["markets"] = ["even", "odd"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    lines = [line | {"markets": {"0": line["validation"], "1": line["validation"]}} for line in lines]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_command_writes_the_report_of_its_runs(made: Path) -> None:
    for strategy in ("local", "fedavg"):
        give_markets(made / "runs" / strategy / "seed-1")
    shown = invoke(made, "local,fedavg")
    assert shown.exit_code == 0, shown.output
    assert "2 of 2 runs are completed already" in shown.output
    assert (made / "report.md").read_text() in shown.output
    users = read_arrays(made / "runs" / "fedavg" / "seed-1" / "users.npz")
    assert f"{np.mean(users['ndcg'][users['market'] == 1]):.4f}" in shown.output
    names = ("report.tex", "markets.csv", "changes.csv", "history.csv", "curves.png", "curves.pdf")
    assert all((made / name).is_file() for name in names)
    settings = yaml.safe_load((made / "runs" / "local" / "seed-1" / "config.yaml").read_text())["settings"]
    assert settings["evaluation"]["per_user"]
    assert settings["server"]["checkpoint_every"] == 1


def test_a_data_set_without_markets_is_named(made: Path) -> None:
    for strategy in ("local", "fedavg"):
        users = read_arrays(made / "runs" / strategy / "seed-1" / "users.npz")
        users.pop("market", None)
        write_arrays(made / "runs" / strategy / "seed-1" / "users.npz", users)
    shown = invoke(made, "local,fedavg")
    assert shown.exit_code == 2
    assert "data set synthetic has no markets" in shown.output


@pytest.mark.parametrize(
    ("strategies", "text"),
    [("fedavg", "none of fedavg is one"), ("local,fedavg,lightgcn-local", "local, lightgcn-local are 2")],
)
def test_there_must_be_one_reference(strategies: str, text: str, tmp_path: Path) -> None:
    shown = invoke(tmp_path / "out", strategies)
    assert shown.exit_code == 2
    assert text in shown.output
    assert not (tmp_path / "out").exists()


def test_tuned_strategies_are_used_where_there_are_some() -> None:
    said: list[str] = []
    assert markets.tuned("ml-100k", ["local", "fedhur-paper", "fedavg"], said.append) == [
        "tuned/ml-100k/local",
        "fedhur-paper",
        "tuned/ml-100k/fedavg",
    ]
    assert said == ["not tuned on ml-100k, with their own settings: fedhur-paper"]
    runs = markets.plan("ml-100k", ["tuned/ml-100k/local"], [1], [], Path("x"), markets.command("pca"))
    assert runs[0].settings.evaluation.per_client
    with pytest.raises(SweepError, match="name exactly one"):
        markets.plan("ml-100k", ["tuned/ml-100k/fedavg"], [1], [], Path("x"), markets.command("pca"))
