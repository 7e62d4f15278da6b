import csv
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats
from typer.testing import CliRunner, Result

from fedhur_app import compare
from fedhur_app.cli import app
from fedhur_app.compare import plan
from fedhur_app.config import ConfigError, load_settings
from fedhur_app.reporting.outcomes import Run
from fedhur_app.sweep import OUTPUT_LOG, SweepError, locked
from tests import running

CHANGES = [*running.SMALL.split(), "rounds=2", "min_rounds=1"]
SET = [word for change in CHANGES for word in ("--set", change)]


def invoke(output: Path, strategies: str = "local,fedavg", seeds: str = "1,2", *options: str) -> Result:
    arguments = ["--dataset", "synthetic", "--strategies", strategies, "--seeds", seeds, "--output", str(output)]
    return CliRunner().invoke(app, ["compare", *arguments, *SET, *options])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A comparison of two strategies with two seeds, and what it printed.

    The last of the four runs is made by the comparison. The others lie there already, made in this process: a process
    of its own spends seconds on imports.
    """
    folder = tmp_path_factory.mktemp("compare") / "out"
    for strategy, seed in (("local", 1), ("fedavg", 1), ("local", 2)):
        made = folder / "runs" / strategy / f"seed-{seed}"
        running.run(made, strategy, shlex.join([*CHANGES, *compare.CHANGES]), seed=seed)
        (made / OUTPUT_LOG).touch()
    shown = invoke(folder)
    assert shown.exit_code == 0, shown.output
    return folder, shown.output


@pytest.fixture
def earlier(compared: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of that comparison's folder."""
    return Path(shutil.copytree(compared[0], tmp_path / "out"))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Stand-ins for `fedhur run`: set their Python code, get the list of the runs that were started."""

    def play(code: str) -> list[str]:
        started: list[str] = []

        def command(run: Run, runtime: str, changes: Any) -> list[str]:
            started.append(run.label)
            return [sys.executable, "-c", code, str(run.folder)]

        monkeypatch.setattr(compare, "command_of", command)
        return started

    return play


# --- real runs ------------------------------------------------------------------------------------------------------


def test_every_run_is_a_row(compared: tuple[Path, str]) -> None:
    folder, shown = compared
    rows = rows_of(folder / "results.csv")
    assert [(row["strategy"], row["seed"]) for row in rows] == [
        ("local", "1"), ("fedavg", "1"), ("local", "2"), ("fedavg", "2"),
    ]  # fmt: skip
    for row in rows:
        run = folder / "runs" / row["strategy"] / f"seed-{row['seed']}"
        result = json.loads((run / "result.json").read_text())
        assert (row["status"], row["reason"]) == ("completed", "")
        for part in ("validation", "test"):
            for name, value in result[part].items():
                assert float(row[f"{part}_{name}"]) == value
        for name in ("best_round", "rounds", "bytes_up", "bytes_down", "seconds"):
            assert float(row[name]) == result[name]
        # Six clients, two rounds.
        assert float(row["bytes_up_per_client_round"]) == pytest.approx(result["bytes_up"] / 12)
        settings = yaml.safe_load((run / "config.yaml").read_text())["settings"]
        assert settings["server"] | {"threads": 1, "checkpoint_every": 0} == settings["server"]
        assert not (run / "checkpoint").exists()
    assert "\n3 of 4 runs are completed already\n" in shown
    line = rf"^\[4/4\] fedavg seed 2: test ndcg@10 {float(rows[-1]['test_ndcg@10']):.4f}, \d+ s$"
    assert re.findall(r"^\[.*", shown, re.MULTILINE) == re.findall(line, shown, re.MULTILINE)


def test_the_summary_is_over_seeds(compared: tuple[Path, str]) -> None:
    folder, shown = compared
    results = rows_of(folder / "results.csv")
    summary = {(row["strategy"], row["metric"]): row for row in rows_of(folder / "summary.csv")}
    for strategy in ("local", "fedavg"):
        for metric in ("test_ndcg@10", "validation_hit@10", "bytes_down", "seconds"):
            first, second = (float(row[metric]) for row in results if row["strategy"] == strategy)
            row = {name: float(summary[strategy, metric][name]) for name in ("n", "mean", "sd", "ci_low", "ci_high")}
            mean, sd = (first + second) / 2, abs(first - second) / math.sqrt(2)
            half = math.tan(0.475 * math.pi) * sd / math.sqrt(2)  # Student's t with one degree of freedom is Cauchy's
            expected = {"n": 2, "mean": mean, "sd": sd, "ci_low": mean - half, "ci_high": mean + half}
            assert row == pytest.approx(expected, rel=1e-9, abs=1e-12)
    text = (folder / "table.md").read_text()
    assert text in shown
    entry = summary["fedavg", "test_recall@10"]
    assert f"{float(entry['mean']):.4f} ± {float(entry['sd']):.4f}" in text
    assert "2^(1-2) = 0.5" in text
    assert "independent" in text


def test_users_are_paired_by_their_number(compared: tuple[Path, str]) -> None:
    folder, _ = compared
    tests = {(row["metric"], row["pairs"], row["strategy"]): row for row in rows_of(folder / "tests.csv")}
    for name in ("ndcg", "recall", "mrr"):
        differences: dict[int, list[float]] = {}
        for seed in (1, 2):
            tables = []
            for strategy in ("local", "fedavg"):
                run = folder / "runs" / strategy / f"seed-{seed}"
                with np.load(run / "users.npz") as users:
                    tables.append(dict(zip(users["user"].tolist(), users[name].tolist(), strict=True)))
                mean = json.loads((run / "result.json").read_text())["test"][f"{name}@10"]
                assert np.mean(list(tables[-1].values())) == pytest.approx(mean, rel=1e-12)
            for user in tables[0].keys() & tables[1].keys():
                differences.setdefault(user, []).append(tables[0][user] - tables[1][user])
        values = [sum(found) / len(found) for found in differences.values()]
        row = tests[f"{name}@10", "users", "local"]
        assert (row["against"], int(row["n"])) == ("fedavg", len(values))
        assert float(row["difference"]) == pytest.approx(np.mean(values), rel=1e-9)
        assert float(row["t_p"]) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)
        # One pair of strategies is one test, whichever way round: nothing to correct.
        back = tests[f"{name}@10", "users", "fedavg"]
        assert float(back["difference"]) == -float(row["difference"])
        assert row["t_p"] == row["t_p_holm"] == back["t_p_holm"]


def test_the_same_command_again_runs_nothing(earlier: Path, processes: Callable[[str], list[str]]) -> None:
    started = processes("raise SystemExit('nothing is to be run')")
    tables = {name: (earlier / name).read_bytes() for name in ("results.csv", "summary.csv", "tests.csv", "table.tex")}
    for name in tables:
        (earlier / name).unlink()
    shown = invoke(earlier)
    assert shown.exit_code == 0, shown.output
    assert "4 of 4 runs are completed already" in shown.output
    assert started == []
    assert {name: (earlier / name).read_bytes() for name in tables} == tables


def test_a_run_that_fails_does_not_lose_the_others(earlier: Path, processes: Callable[[str], list[str]]) -> None:
    kept = (earlier / "runs" / "local" / "seed-1" / "result.json").read_bytes()
    content = {"status": "failed", "reason": "client 0: the loss is not finite\nTraceback"}
    processes(f"import sys; open(sys.argv[1] + '/result.json', 'w').write({json.dumps(content)!r}); sys.exit(1)")
    shown = invoke(earlier, "local,fedcia-paper", "1")
    assert shown.exit_code == 1
    assert "\n[2/2] fedcia-paper seed 1 failed: client 0: the loss is not finite\n" in shown.output
    rows = rows_of(earlier / "results.csv")
    assert [row["status"] for row in rows] == ["completed", "failed"]
    assert rows[1]["reason"] == "client 0: the loss is not finite"
    assert "- fedcia-paper seed 1 failed and is left out: client 0" in (earlier / "table.md").read_text()
    assert "fedcia-paper seed 1 failed" in (earlier / "table.tex").read_text()
    assert (earlier / "runs" / "local" / "seed-1" / "result.json").read_bytes() == kept
    assert rows_of(earlier / "tests.csv") == []  # nobody is left to compare with


# --- folders that are there already ---------------------------------------------------------------------------------


def test_other_settings_than_those_of_a_completed_run_are_refused(
    earlier: Path, processes: Callable[[str], list[str]]
) -> None:
    started = processes("pass")
    shutil.rmtree(earlier / "runs" / "fedavg" / "seed-2")
    shown = invoke(earlier, "local,fedavg", "1,2", "--set", "train.lr=0.25")
    assert shown.exit_code == 2
    assert f"{earlier / 'runs' / 'local' / 'seed-1'} has train.lr=0.1, wanted now is 0.25" in shown.output
    assert started == []
    assert not (earlier / "runs" / "fedavg" / "seed-2").exists()


def test_a_run_on_cpu_for_want_of_a_gpu_share_is_kept(earlier: Path, processes: Callable[[str], list[str]]) -> None:
    processes("raise SystemExit('nothing is to be run')")
    path = earlier / "runs" / "local" / "seed-1" / "config.yaml"
    path.write_text(path.read_text().replace("device: auto", "device: cpu"))
    assert invoke(earlier).exit_code == 0
    assert invoke(earlier, "local", "1", "--set", "device=cuda").exit_code == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", None),
        ("result.json", '{"status": "compl'),
        ("result.json", '{"status": "completed"}'),
        ("result.json", '{"status": "failed", "reason": "no luck"}'),
        ("history.jsonl", ""),
        ("users.npz", None),
        ("users.npz", "PK"),
    ],
)
def test_unfinished_and_damaged_runs_are_run_again(
    earlier: Path, processes: Callable[[str], list[str]], name: str, content: str | None
) -> None:
    started = processes("print('the log'); print('error: no such luck\\n')\nraise SystemExit(2)")
    folder = earlier / "runs" / "fedavg" / "seed-1"
    (folder / "left over").write_text("")
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    shown = invoke(earlier)
    assert started == ["fedavg seed 1"]
    assert shown.exit_code == 1
    assert sorted(path.name for path in folder.iterdir()) == [OUTPUT_LOG]
    assert "3 of 4 runs are completed already" in shown.output
    assert f"[4/4] fedavg seed 1 failed: error: no such luck (see {folder / OUTPUT_LOG})" in shown.output
    summary = {(row["strategy"], row["metric"]): row for row in rows_of(earlier / "summary.csv")}
    assert summary["local", "test_ndcg@10"]["n"] == "2"
    assert summary["fedavg", "test_ndcg@10"]["n"] == "1"
    assert summary["fedavg", "test_ndcg@10"]["sd"] == ""
    seeds = [row for row in rows_of(earlier / "tests.csv") if row["pairs"] == "seeds"]
    assert {(row["n"], row["t_p"], row["wilcoxon_p_holm"]) for row in seeds} == {("1", "", "")}
    assert all(row["t_p"] for row in rows_of(earlier / "tests.csv") if row["pairs"] == "users")


def test_a_run_without_the_metrics_of_its_users_failed(earlier: Path, processes: Callable[[str], list[str]]) -> None:
    source = earlier / "runs" / "local" / "seed-1"
    names = ["result.json", "history.jsonl"]
    processes(f"import shutil, sys\nfor name in {names}: shutil.copy(f'{source}/{{name}}', sys.argv[1])")
    shown = invoke(earlier, "local", "1,3")
    assert shown.exit_code == 1
    assert "local seed 3 failed: there is no users.npz in" in shown.output


def test_a_killed_process_is_named(tmp_path: Path, processes: Callable[[str], list[str]]) -> None:
    processes("import os; os.kill(os.getpid(), 9)")
    shown = invoke(tmp_path / "out", "local", "1")
    assert shown.exit_code == 1
    assert "local seed 1 failed: its process was ended by SIGKILL" in shown.output
    assert "|" not in shown.output  # no tables of nothing
    assert rows_of(tmp_path / "out" / "summary.csv") == []


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, processes: Callable[[str], list[str]]) -> None:
    started = processes("pass")
    folder = tmp_path / "out" / "runs" / "local" / "seed-1"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    shown = invoke(tmp_path / "out", "local", "1")
    assert shown.exit_code == 2
    assert f"{folder} is in the way" in shown.output
    assert (folder / "thesis.txt").read_text() == "years of work"
    assert started == []


def test_outputs_that_do_not_fit_are_refused(tmp_path: Path, processes: Callable[[str], list[str]]) -> None:
    started = processes("pass")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for name, text in (("run", "holds a single run"), ("file", "cannot write to"), ("file/sub", "cannot write to")):
        shown = invoke(tmp_path / name)
        assert shown.exit_code == 2
        assert text in shown.output
    assert started == []


def test_two_comparisons_in_one_folder_are_refused(tmp_path: Path, processes: Callable[[str], list[str]]) -> None:
    started = processes("pass")
    with locked(tmp_path, "compare"):
        shown = invoke(tmp_path)
    assert shown.exit_code == 2
    assert f"another `fedhur compare`, or a run that one left behind, is at work in {tmp_path}" in shown.output
    assert started == []


# --- stopping -------------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def signals_once(files: list[Path], *numbers: int) -> threading.Thread:
    """Send this process signals, once the files are there."""

    def send() -> None:
        deadline = time.monotonic() + 30
        while not all(file.is_file() for file in files) and time.monotonic() < deadline:
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


SLEEP = (
    "import os, signal, sys, time\n"
    "{}\n"
    "open(sys.argv[1] + '/new', 'w').write(str(os.getpid())); os.rename(sys.argv[1] + '/new', sys.argv[1] + '/pid')\n"
    "time.sleep(120)"
)


@pytest.mark.parametrize(
    ("code", "numbers"),
    [
        (SLEEP.format(""), [signal.SIGINT]),
        (SLEEP.format(""), [signal.SIGTERM]),
        # A run that does not listen is killed after a second Ctrl-C.
        (SLEEP.format("signal.signal(signal.SIGINT, signal.SIG_IGN)"), [signal.SIGINT, signal.SIGINT]),
    ],
)
def test_a_signal_stops_the_runs_and_keeps_what_is_finished(
    earlier: Path, processes: Callable[[str], list[str]], code: str, numbers: list[int]
) -> None:
    started = processes(code)
    files = [earlier / "runs" / name / "seed-3" / "pid" for name in ("local", "fedavg")]
    before = signal.getsignal(signal.SIGINT)
    sender = signals_once(files, *numbers)
    shown = invoke(earlier, "local,fedavg", "1,2,3,4", "--jobs", "2")
    sender.join()
    assert shown.exit_code == 130, shown.output
    assert signal.getsignal(signal.SIGINT) is before
    assert started == ["local seed 3", "fedavg seed 3"]
    assert not any(alive(int(file.read_text())) for file in files)
    statuses = [row["status"] for row in rows_of(earlier / "results.csv")]
    assert statuses == ["completed"] * 4 + ["not run"] * 4
    assert "failed" not in shown.output
    assert "local seed 3, fedavg seed 3, local seed 4, fedavg seed 4." in (earlier / "table.md").read_text()


# --- planning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--strategies", "local,fedavgg"], "unknown strategy 'fedavgg'; did you mean 'fedavg'?"),
        (["--strategies", "local", "--dataset", "ml-10k"], "unknown dataset 'ml-10k'"),
        (["--strategies", "local", "--set", "train.lrr=1"], "unknown setting 'train.lrr'"),
        (["--strategies", "local", "--set", "seed=3"], "override seed=3"),
        (["--strategies", "local,local"], "strategy local is named twice"),
        (["--strategies", "local", "--seeds", "1,2,1"], "seed 1 is named twice"),
        (["--strategies", "local", "--seeds", "1,x"], "--seeds 1,x: seeds are whole numbers"),
        (["--strategies", "local", "--seeds", "-1"], "seed -1 is not between 0 and 4294967295"),
        (["--strategies", ","], "name at least one strategy"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(
    options: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["compare", *options])
    assert shown.exit_code == 2
    assert shown.output.startswith("error: ")
    assert text in shown.output
    assert list(tmp_path.iterdir()) == []


def test_strategies_that_are_tested_differently_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(dataset: str, strategy: str, seed: int, overrides: str) -> Any:
        more = {"a": "", "b": "dataset.clients.number=3", "c": "evaluation.k=5", "d": "dataset.split.kind=temporal"}
        more["e"] = "dataset.markets.shift=0.25"
        return load_settings(dataset, "local", seed, f"{overrides} {more.get(strategy, '')}")

    monkeypatch.setattr(compare, "load_settings", load)
    assert len(plan("synthetic", ["a", "b"], [1, 2], [], tmp_path)) == 4  # the same rows, shared out differently
    with pytest.raises(SweepError, match=r"a and c cannot be compared: evaluation\.k is 10 in one and 5"):
        plan("synthetic", ["a", "c"], [1], [], tmp_path)
    with pytest.raises(SweepError, match=r"dataset\.split is kind='random'"):
        plan("synthetic", ["a", "d"], [1], [], tmp_path)
    with pytest.raises(SweepError, match=r"dataset\.markets is .*shift=0\.5.*shift=0\.25"):
        plan("synthetic", ["a", "e"], [1], [], tmp_path)
    runs = plan("synthetic", ["x/y/a"], [7], [], tmp_path)
    assert [run.folder for run in runs] == [tmp_path / "runs" / "x-y-a" / "seed-7"]
    with pytest.raises(SweepError, match="would both be kept in a folder named x-a"):
        plan("synthetic", ["x/a", "x-a"], [1], [], tmp_path)


def test_runs_get_the_settings_of_their_seed_and_the_callers_changes_last(tmp_path: Path) -> None:
    runs = plan("synthetic", ["local", "fedavg"], [3, 5], ["server.threads=2", "rounds=9"], tmp_path)
    assert [run.label for run in runs] == ["local seed 3", "fedavg seed 3", "local seed 5", "fedavg seed 5"]
    overrides = " ".join([*compare.CHANGES, "server.threads=2", "rounds=9"])
    for run in runs:
        assert run.settings == load_settings("synthetic", run.strategy, run.seed, overrides)
        assert run.settings.server.threads == 2
    command = compare.command_of(runs[0], "flower", [*compare.CHANGES, "server.threads=2"])
    assert command[command.index("--runtime") + 1] == "flower"
    assert command[-6:] == ["--set", compare.CHANGES[1], "--set", compare.CHANGES[2], "--set", "server.threads=2"]


def test_own_data_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="own-data"):
        plan("own-data", ["local"], [1], [], tmp_path)


def test_the_default_output_names_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Callable[[str], list[str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    processes("raise SystemExit(3)")
    shown = CliRunner().invoke(app, ["compare", "--dataset", "synthetic", "--strategies", "local", "--seeds", "4"])
    assert shown.exit_code == 1
    assert "local seed 4 failed: its process ended with status 3" in shown.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"compare-synthetic-\d{8}T\d{6}Z", folder.name)
    assert (folder / "table.md").is_file()
