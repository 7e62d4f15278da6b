"""`fedhur markets` as a command; its numbers are tested in tests/reporting/test_markets.py."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fedhur_app import compare, markets
from fedhur_app.cli import app
from fedhur_app.files import read_arrays
from fedhur_app.runtime import run_local
from fedhur_app.sweep import OUTPUT_LOG

OPTIONS = (
    "dataset.markets.users=[40,15]",
    "dataset.markets.interactions_per_user=[12,6]",
    "dataset.markets.items=60",
    "model.dim=8",
    "rounds=2",
    "min_rounds=1",
)


def invoke(output: Path, strategies: str, dataset: str = "markets-synthetic") -> Result:
    words = ["--dataset", dataset, "--strategies", strategies, "--seeds", "1", "--output", str(output)]
    return CliRunner().invoke(app, ["markets", *words, *(word for change in OPTIONS for word in ("--set", change))])


def test_the_command_writes_the_report_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy in ("independent", "joint", "fecosr"):
        folder = tmp_path / "runs" / strategy / "seed-1"
        overrides = shlex.join([*OPTIONS, *markets.CHANGES])
        run_local(
            {"dataset": "markets-synthetic", "strategy": strategy, "output-dir": str(folder), "overrides": overrides}
        )
        (folder / OUTPUT_LOG).touch()
    monkeypatch.setattr(compare, "command_of", lambda *_: pytest.fail("nothing is to be run"))
    shown = invoke(tmp_path, "independent,joint,fecosr")
    assert shown.exit_code == 0, shown.output
    assert "3 of 3 runs are completed already" in shown.output
    assert (tmp_path / "report.md").read_text() in shown.output
    for strategy in ("independent", "joint", "fecosr"):
        users = read_arrays(tmp_path / "runs" / strategy / "seed-1" / "users.npz")
        for market in (0, 1):
            assert f"{np.mean(users['ndcg'][users['market'] == market]):.4f}" in shown.output
    names = ("report.tex", "markets.csv", "changes.csv", "history.csv", "curves.png", "curves.pdf", "tables.png")
    assert all((tmp_path / name).is_file() for name in names)
    history = (tmp_path / "history.csv").read_text()
    assert all(f"{method},1,{market},2,ndcg@10," in history for method in ("joint", "fecosr") for market in (0, 1))


def test_a_data_set_without_markets_is_refused_before_anything_runs(tmp_path: Path) -> None:
    shown = invoke(tmp_path / "out", "independent,fecosr", "synthetic")
    assert shown.exit_code == 2
    assert "data set synthetic has no markets" in shown.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("strategies", "text"),
    [("fedavg,joint", "none of fedavg, joint is one"), ("local,fedavg,independent", "local, independent are 2")],
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
