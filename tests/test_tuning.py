import csv
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from typer.testing import CliRunner, Result

from fedhur_app import config, search_space, sweep, tuning
from fedhur_app.cli import app
from fedhur_app.config import ConfigError, load_settings, read_config_file
from fedhur_app.search_space import Range, load_space
from fedhur_app.tuning import Search, Study
from tests.running import SMALL, result, run

CONF = config.conf_folder()
FEW = [*SMALL.split(), "rounds=2", "min_rounds=1"]
SPACE = "train.lr: {low: 0.001, high: 1.0, log: true}\ntrain.epochs: [1, 2, 3]\n"
# Stands for a run: a value that is best at lr 0.03, failure above 0.5, and test metrics that nobody may look at.
FAKE_RUN = """
import json, math, os, pathlib, sys, time
values, folder, home = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
with open(home / "started", "a") as file:
    file.write(f"{folder.name} {os.getpid()}\\n")
if (home / f"slow-{folder.name}").exists():
    time.sleep(60)
lr = values.get("train.lr", 0.1)
if lr > 0.5:
    found = {"status": "failed", "reason": "the model has diverged"}
else:
    value = 1 / (1 + abs(math.log(lr / 0.03))) + 0.001 * values.get("train.epochs", 1)
    metrics = {"validation": {"ndcg@10": value}, "test": {"ndcg@10": 0.98765}}
    found = {"status": "completed", "best_round": 2, **metrics}
(folder / "result.json").write_text(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that tests may change; an empty working directory."""
    folder = tmp_path / "conf"
    shutil.copytree(CONF, folder)
    for module in (config, search_space, tuning):
        monkeypatch.setattr(module, "conf_folder", lambda: folder)
    (folder / "search" / "fedavg.yaml").write_text(SPACE)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def fake_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trials are short scripts instead of runs; the folder where they note that they started."""
    home = tmp_path / "fake"
    home.mkdir()
    script = home / "run.py"
    script.write_text(FAKE_RUN)

    def command(search: Search, values: Mapping[str, Any], folder: Path) -> list[str]:
        return [sys.executable, "-I", "-S", str(script), json.dumps(values), str(folder), str(home)]

    monkeypatch.setattr(tuning, "trial_command", command)
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)
    return home


def search(**changes: Any) -> Search:
    return replace(Search("synthetic", "fedavg", jobs=2, changes=tuple(FEW)), **changes)


def tune(folder: Path, trials: int, say: Callable[[str], None] = lambda line: None, **changes: Any) -> Study:
    return tuning.tune(search(**changes), trials, folder, say)


def invoke(*arguments: str, sets: list[str] = FEW) -> Result:
    words = ["tune", "--dataset", "synthetic", "--strategy", "fedavg", "--jobs", "2", *arguments]
    for item in sets:
        words += ["--set", item]
    return CliRunner().invoke(app, words)


def rows(folder: Path) -> list[dict[str, str]]:
    """trials.csv without wall times, which never repeat."""
    with (folder / "trials.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


def test_a_search_with_real_runs(conf: Path, tmp_path: Path) -> None:
    (conf / "search" / "fedavg.yaml").write_text("train.lr: [0.1, 1e30]\ntrain.epochs: [1, 2]\n")
    shown = invoke("--trials", "2", "--seed", "5", "--output", "out", "--save", "tuned/synthetic/fedavg")
    assert shown.exit_code == 0, shown.output
    folder = tmp_path / "out"
    trials = rows(folder)
    assert [row["number"] for row in trials] == ["0", "1"]
    assert [row["state"] for row in trials] == ["COMPLETE", "FAIL"]

    # The first trial is the strategy itself, and its value that of a run with these settings.
    assert (trials[0]["train.lr"], trials[0]["train.epochs"]) == ("0.1", "1")
    run(tmp_path / "same", "fedavg", "rounds=2 min_rounds=1 server.threads=1", seed=5)
    assert float(trials[0]["value"]) == result(tmp_path / "same")["validation"]["ndcg@10"]
    assert int(trials[0]["best_round"]) == result(tmp_path / "same")["best_round"]

    for row in trials:
        diverged = row["train.lr"] == "1e+30"
        assert row["state"] == ("FAIL" if diverged else "COMPLETE")
        assert ("not finite" in row["reason"]) is diverged
        assert (row["value"] == "") is diverged
    assert shown.output.count(": failed (") == sum(row["state"] == "FAIL" for row in trials)

    # The best values as a strategy give the settings of the best trial.
    best = max((row for row in trials if row["value"]), key=lambda row: float(row["value"]))
    ran = read_config_file(folder / "trials" / f"{int(best['number']):05d}" / "config.yaml")
    saved = load_settings("synthetic", "tuned/synthetic/fedavg", 5)
    assert saved.model_dump(exclude={"strategy", "server"}) == ran.model_dump(exclude={"strategy", "server"})
    assert saved.server == load_settings("synthetic", "fedavg").server
    text = (folder / "best.yaml").read_text()
    assert (conf / "strategy" / "tuned" / "synthetic" / "fedavg.yaml").read_text() == text
    value = float(best["value"])
    head = f"# fedavg tuned on synthetic: 2 trials (tpe, seed 5), validation ndcg@10 {value:.4f}"
    assert text.splitlines()[:2] == [head, "algorithm: fedavg"]

    # Nothing shows test metrics.
    tests = {result(path)["test"]["ndcg@10"] for path in (folder / "trials").iterdir() if "test" in result(path)}
    written = [shown.output, *((folder / name).read_text() for name in ("trials.csv", "summary.md", "study.log"))]
    for content in [*written, text]:
        assert "recall" not in content
        assert not [value for value in tests if f"{value:.4f}"[1:] in content]


def test_an_interrupted_search_goes_on_as_if_it_never_stopped(fake_runs: Path, tmp_path: Path) -> None:
    unbroken = tune(tmp_path / "unbroken", 14)
    assert [trial.number for trial in unbroken.trials] == list(range(14))
    (fake_runs / "started").unlink()

    # Trials 8 and 9 are a batch; the search is stopped when 8 has ended and 9 still runs.
    slow = fake_runs / "slow-00009"
    slow.touch()

    def stop(line: str) -> None:
        if "trial 8:" in line:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "broken", 14, stop)
    slow.unlink()
    starts = [line.split() for line in (fake_runs / "started").read_text().splitlines()]
    for _, pid in starts:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert len(rows(tmp_path / "broken")) == 8

    # The processor's number of cores, the default of --jobs, may be another one: the study keeps its own.
    lines: list[str] = []
    resumed = tune(tmp_path / "broken", 14, lines.append, jobs=None)
    assert rows(tmp_path / "broken") == rows(tmp_path / "unbroken")
    assert resumed.search.jobs == 2
    assert lines[0] == "going on after 8 finished trials"
    assert lines[1].startswith("[10/14] trial 9: ")
    names = [line.split()[0] for line in (fake_runs / "started").read_text().splitlines()]
    again = [name for name in names if names.count(name) > 1]
    assert set(again) <= {"00009"}  # it may have been stopped before it could note its start
    assert (tmp_path / "broken" / "best.yaml").read_text() == (tmp_path / "unbroken" / "best.yaml").read_text()


def test_more_trials_later_are_the_same_as_all_at_once(fake_runs: Path, tmp_path: Path) -> None:
    tune(tmp_path / "once", 9)
    tune(tmp_path / "twice", 5)
    tune(tmp_path / "twice", 9)
    assert rows(tmp_path / "twice") == rows(tmp_path / "once")
    # Fewer than there are: nothing runs, all are kept.
    (fake_runs / "started").unlink()
    assert len(tune(tmp_path / "twice", 3).trials) == 9
    assert not (fake_runs / "started").exists()


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_draws_depend_on_the_seed_and_never_repeat(sampler: str) -> None:
    space: search_space.Space = {"train.lr": Range(0.001, 1.0, log=True)}
    seen: set[float] = set()
    for seed in (1, 2):
        history: list[optuna.trial.FrozenTrial] = []
        for start in (0, 3, 6, 9):
            batch = [
                tuning.draw(space, history, tuning._sampler(search(seed=seed, sampler=sampler), 5, start), 3, None)
                for _ in range(2)
            ]
            drawn = [[trial.params["train.lr"] for trial in trials] for trials in batch]
            assert drawn[0] == drawn[1]
            seen |= set(drawn[0])
            history += [
                optuna.trial.create_trial(value=lr, params={"train.lr": lr}, distributions=trial.distributions)
                for lr, trial in zip(drawn[0], batch[0], strict=True)
            ]
    assert len(seen) == 2 * 12


def test_the_best_trial_is_the_highest_and_never_below_the_strategy(fake_runs: Path, tmp_path: Path) -> None:
    study = tune(tmp_path / "out", 6)
    own = study.trials[0]
    assert own.values == {"train.epochs": 1, "train.lr": 0.1}
    assert own.value is not None
    assert study.best is not None
    assert study.best.value == max(trial.value for trial in study.trials if trial.value is not None)
    assert study.best.value >= own.value
    # Of equal values the first counts: the strategy itself, if nothing is better.
    equal = replace(study, trials=[replace(trial, value=0.5) for trial in study.trials])
    assert equal.best == equal.trials[0]


def test_lists_nulls_and_steps_reach_the_runs_and_the_best_yaml(fake_runs: Path, conf: Path, tmp_path: Path) -> None:
    (conf / "search" / "fedhur.yaml").write_text(
        "hierarchy.branching: [[3, 2], [12, 12]]\n"
        "residual.peers: [null, 2]\n"
        "residual.center: [true, false]\n"
        "relation.kind: [utility, both]\n"
        "residual.gamma: {low: 0.0, high: 0.6, step: 0.1}\n"
        "score.hidden: {low: 8, high: 32, step: 8}\n"
    )
    study = tune(tmp_path / "out", 12, strategy="fedhur")
    assert study.trials[0].values == {
        "hierarchy.branching": [12, 12],
        "relation.kind": "utility",
        "residual.center": True,
        "residual.gamma": 0.3,
        "residual.peers": None,
        "score.hidden": 32,
    }
    for key, allowed in {
        "hierarchy.branching": [[3, 2], [12, 12]],
        "score.hidden": [8, 16, 24, 32],
        "residual.center": [True, False],
        "residual.peers": [None, 2],
    }.items():
        drawn = [trial.values[key] for trial in study.trials]
        assert all(value in allowed for value in drawn)
        assert len(set(map(str, drawn))) > 1
    assert all(round(trial.values["residual.gamma"] * 10, 9) in range(7) for trial in study.trials)
    assert study.best is not None
    shutil.copy(tmp_path / "out" / "best.yaml", conf / "strategy" / "best.yaml")
    saved = load_settings("synthetic", "best")
    assert saved == study.search.settings(study.best.values).model_copy(update={"strategy": "best"})
    assert rows(tmp_path / "out")[0]["residual.peers"] == "null"


def test_the_command_of_a_trial_leads_to_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fedhur_app.cli import new_settings

    values = {"hierarchy.branching": [3, 2], "residual.peers": None, "train.loss": "bce", "train.lr": 1.5e-7}
    one = search(strategy="fedhur", seed=4, changes=("train.lr=3", "hierarchy.flat=false"))
    command = tuning.trial_command(one, values, tmp_path / "a folder")
    assert command[:6] == [sys.executable, "-P", "-m", "fedhur_app.cli", "run", "--runtime"]
    assert command[6:15] == (
        ["local", "--dataset", "synthetic", "--strategy", "fedhur", "--seed", "4", "--output", f"{tmp_path}/a folder"]
    )
    assert command[15::2] == ["--set"] * (len(command[15:]) // 2)
    settings, _ = new_settings("synthetic", "fedhur", 4, None, command[16::2])
    expected = load_settings("synthetic", "fedhur", 4, {"train": {"lr": 1.5e-7, "loss": "bce"}})
    assert settings.train == expected.train
    assert (settings.hierarchy.branching, settings.residual.peers) == ([3, 2], None)
    assert (settings.server.threads, settings.server.checkpoint_every) == (1, 0)


def test_own_values_outside_the_space_are_not_tried(fake_runs: Path, conf: Path, tmp_path: Path) -> None:
    (conf / "search" / "fedavg.yaml").write_text("train.lr: {low: 0.2, high: 0.4}\ntrain.epochs: [1, 2]\n")
    lines: list[str] = []
    study = tune(tmp_path / "out", 2, lines.append)
    assert study.outside == ["train.lr"]
    assert lines[0] == "the strategy's own values are not tried: train.lr=0.1 lies outside the search space"
    assert all(0.2 <= trial.values["train.lr"] <= 0.4 for trial in study.trials)
    assert "The strategy's own values were not tried: train.lr=0.1 lies" in (tmp_path / "out/summary.md").read_text()


def test_settings_given_by_set_are_not_searched(fake_runs: Path, tmp_path: Path) -> None:
    study = tune(tmp_path / "out", 4, changes=(*FEW, "train.epochs=3"))
    assert list(study.space) == ["train.lr"]
    assert "epochs: 3" in (tmp_path / "out" / "best.yaml").read_text()
    with pytest.raises(ConfigError, match="nothing is left to search"):
        load_space("fedavg", "synthetic", ["train.epochs=3", "train.lr=0.1"])


def test_values_that_are_impossible_together_fail_without_a_run(fake_runs: Path, conf: Path, tmp_path: Path) -> None:
    (conf / "search" / "fedavg.yaml").write_text("train.loss: [bpr, mse]\nmodel.kind: [mf, ncf]\n")
    study = tune(tmp_path / "out", 8)
    for trial in study.trials:
        together = trial.values == {"model.kind": "ncf", "train.loss": "mse"}
        assert ("has bpr and bce only" in trial.reason) is together
        assert trial.state == ("FAIL" if together else "COMPLETE")
    assert {trial.state for trial in study.trials} == {"COMPLETE", "FAIL"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; print('oh', file=sys.stderr); sys.exit('no luck\\n')", "no luck"),
        ("raise SystemExit(3)", "its process ended with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "its process was ended by SIGKILL"),
    ],
)
def test_a_run_without_a_result_fails_and_all_failing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, reason: str
) -> None:
    monkeypatch.setattr(tuning, "trial_command", lambda *_: [sys.executable, "-I", "-S", "-c", code])
    shown = invoke("--trials", "2", "--output", "out")
    assert shown.exit_code == 1
    assert f"all 2 trials failed, the last one because: {reason}" in shown.output
    assert [row["reason"] for row in rows(tmp_path / "out")] == [reason, reason]
    assert not (tmp_path / "out" / "best.yaml").exists()


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ("train.lrr: [1]", "train.lrr=1: unknown setting 'train.lrr'; did you mean 'train.lr'?"),
        ("train.loss: [bpr, hinge]", "train.loss=\"hinge\": setting 'train.loss' is 'hinge'"),
        ("train.lr: {low: 0.0, high: 1.0}", "train.lr=0.0: setting 'train.lr' is 0.0: Input should be greater than 0"),
        ("residual.gamma: {low: 0.1, high: 1.1}", "residual.gamma=1.1: setting 'residual.gamma' is 1.1"),
        ("train.epochs: {low: 1.0, high: 3.0}", "train.epochs=1.0: setting 'train.epochs' is 1.0"),
        ("train.lr: {low: 1, high: 3}", "train.lr is a real number"),
        ("train.lr: {low: 1, high: .nan}", "train.lr: high is nan, it must be a number"),
        ("train.lr: {low: 0.3, high: 0.1}", "low (0.3) is above high (0.1)"),
        ("train.lr: {low: 0.1, high: 0.3, log: 1}", "log is 1, it must be true or false"),
        ("privacy.laplace_scale: {low: 0.0, high: 0.3, log: true}", "needs low above 0, not 0.0"),
        ("train.lr: {low: 0.1, high: 0.35, step: 0.1}", "train.lr: step must be above 0"),
        ("train.lr: {low: 0.1, up: 0.35}", "train.lr must have a list of choices, or a range"),
        ("train.lr: 0.1", "train.lr must have a list of choices, or a range"),
        ("train.lr: []", "train.lr must have a list of choices, or a range"),
        ("train.lr: [1, 1.0]", "train.lr has a choice twice"),
        ("train: [{lr: 0.1}]", "train is a section"),
        ("evaluation.k: [5, 10]", "evaluation.k cannot be searched, its values are not judged by the same measure"),
        ("server.threads: [1, 2]", "server.threads cannot be searched, it is 1 in every trial"),
        ("seed: [1, 2]", "override seed=1: give the seed itself"),
        ("- train.lr", "must hold a mapping"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_space_is_refused_before_the_first_trial(conf: Path, tmp_path: Path, space: str, text: str) -> None:
    (conf / "search" / "fedavg.yaml").write_text(space)
    shown = invoke("--trials", "2", "--output", "out")
    assert shown.exit_code == 2
    assert f"error: {conf / 'search' / 'fedavg.yaml'}" in shown.output
    assert text in shown.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sets", "text"),
    [
        (["--strategy", "fedavgg"], [], "unknown strategy 'fedavgg'; did you mean 'fedavg'?"),
        (["--strategy", "fedcia-paper"], [], "strategy 'fedcia-paper' has no search space"),
        (["--dataset", "own-data"], [], "own-data lies on the devices"),
        ([], ["train.lrr=1"], "unknown setting 'train.lrr'"),
        ([], ["server.threads=2"], "--set server.threads has no effect here: it is 1 in every trial"),
        (["--save", "fedavg"], [], "which no search has written: choose another name"),
        (["--save", "../fedavg"], [], "--save '../fedavg' is no name of a strategy"),
    ],
)
def test_what_cannot_be_searched_is_refused(tmp_path: Path, options: list[str], sets: list[str], text: str) -> None:
    shown = invoke("--trials", "2", "--output", "out", *options, sets=sets)
    assert shown.exit_code == 2
    assert text in shown.output
    assert not (tmp_path / "out").exists()


def test_another_search_in_the_same_folder_is_refused_by_name(fake_runs: Path, conf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    tune(folder, 2)
    before = rows(folder)
    for changes, text in [
        ({"seed": 2}, "seed 1, not 2"),
        ({"sampler": "random"}, "sampler tpe, not random"),
        ({"jobs": 3}, "jobs 2, not 3"),
        ({"strategy": "local"}, "strategy fedavg, not local"),
        ({"dataset": "ml-100k"}, "dataset synthetic, not ml-100k"),
        ({"changes": (*FEW, "train.negatives=2")}, "--set train.negatives=2"),
    ]:
        with pytest.raises(ConfigError) as caught:
            tune(folder, 4, **changes)
        assert text in str(caught.value)
        assert f"{folder} holds a study with " in str(caught.value)
    (conf / "search" / "fedavg.yaml").write_text(SPACE.replace("[1, 2, 3]", "[1, 2]"))
    with pytest.raises(ConfigError, match=r"another search space: train.epochs had \[1, 2, 3\], now has \[1, 2\]"):
        tune(folder, 4)
    (conf / "search" / "fedavg.yaml").write_text(SPACE)
    (conf / "strategy" / "fedavg.yaml").write_text("algorithm: fedavg\ntrain: {batch_size: 64}\n")
    with pytest.raises(ConfigError, match=r"train.batch_size=4096, which conf/ now has as 64"):
        tune(folder, 4)
    (conf / "strategy" / "fedavg.yaml").write_text("algorithm: fedavg\n")
    assert rows(folder) == before
    # The order of --set and a file that lists the same space in another order make no other study.
    (conf / "search" / "fedavg.yaml").write_text("\n".join(reversed(SPACE.splitlines())))
    assert len(tune(folder, 3, changes=tuple(reversed(FEW))).trials) == 3


def test_two_searches_never_share_a_folder(tmp_path: Path) -> None:
    with (
        sweep.locked(tmp_path / "out", "tune"),
        pytest.raises(ConfigError, match="another `fedhur tune`, or a run that one left behind, is at work"),
    ):
        tune(tmp_path / "out", 4)


def test_a_half_written_line_of_the_journal_is_dropped(fake_runs: Path, tmp_path: Path) -> None:
    tune(tmp_path / "whole", 6)
    tune(tmp_path / "cut", 4)
    journal = tmp_path / "cut" / "study.log"
    journal.write_bytes(journal.read_bytes()[:-20])
    assert [trial.number for trial in tune(tmp_path / "cut", 6).trials] == list(range(6))
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


def test_the_output_of_a_search(fake_runs: Path, conf: Path, tmp_path: Path) -> None:
    shown = invoke("--trials", "12", "--save", "tuned/fedavg")
    assert shown.exit_code == 0, shown.output
    folder = tmp_path / "runs" / "tune-synthetic-fedavg-seed1"
    lines = shown.output.splitlines()
    assert lines[0] == lines[-1] == f"output: {folder}"
    assert sum(line.startswith("[") for line in lines) == 12
    assert "Warning" not in shown.output
    assert "98765" not in shown.output
    trials = rows(folder)
    assert list(trials[0]) == ["number", "state", "value", "best_round", "train.epochs", "train.lr", "reason"]
    values = [float(row["value"]) for row in trials if row["value"]]
    summary = (folder / "summary.md").read_text()
    assert summary.startswith("# fedavg tuned on synthetic: 12 trials (tpe, seed 1)\n")
    assert f"The strategy's own values (trial 0): {values[0]:.4f}, train.epochs=1 train.lr=0.1." in summary
    table = [line.split(" | ")[1].strip() for line in summary.splitlines() if line.startswith("| ")][2:]
    assert table == [f"{value:.4f}" for value in sorted(values, reverse=True)[:10]]
    listed = CliRunner().invoke(app, ["strategies"]).output
    assert "tuned/fedavg" in listed
    assert "fedavg tuned on synthetic: 12 trials" in listed
    # What a search has written, a search may replace.
    assert invoke("--trials", "13", "--save", "tuned/fedavg").exit_code == 0
    assert "13 trials" in (conf / "strategy" / "tuned" / "fedavg.yaml").read_text()


def test_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("{}")
    shown = invoke("--trials", "2", "--output", "out")
    assert shown.exit_code == 2
    assert "already holds a run (result.json)" in shown.output


def test_ctrl_c_is_status_130_and_tells_how_to_continue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", stopped)
    shown = invoke("--trials", "3", "--output", "an out", sets=["residual.beta=[1, 1]", "hierarchy.branching=[3, 2]"])
    assert shown.exit_code == 130
    assert (
        "continue with: fedhur tune --dataset synthetic --strategy fedavg --trials 3 --seed 1 --sampler tpe --jobs 2 "
        f"--output '{tmp_path / 'an out'}' --set 'residual.beta=[1, 1]' --set 'hierarchy.branching=[3, 2]'\n"
    ) in shown.output
