"""A study from its file to its report, on runs of a second."""

import csv
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedhur_app.cli import app
from fedhur_app.runtime import run_local
from fedhur_app.studies import definition as definition_module
from fedhur_app.studies import report, runner
from fedhur_app.studies.definition import TINY, Definition, load_study, read_study
from fedhur_app.studies.plan import StudyRun, command_of, plan
from fedhur_app.sweep import OUTPUT_LOG, SweepError

STUDY = f"""
title: A small study
question: Does it work?
datasets:
  even: {{dataset: synthetic}}
  tastes: {{dataset: synthetic, set: [dataset.clients.kind=taste]}}
seeds: [1, 2]
set: {json.dumps(list(TINY))}
axis: {{label: width, scale: log2}}
against: shared
gain: [alone]
tables: [traffic, gain, fairness]
figures: [convergence, sweep, bytes, gain]
notes: [A note of the study.]
arms:
  - {{name: shared, strategy: fedavg, x: 8, series: mean, paper: {{ndcg: 0.25, mrr: 0.5}}}}
  - {{name: narrow, strategy: fedavg, x: 4, series: mean, set: [model.dim=4], paper: {{ndcg: 0.2}}, only: [even]}}
  - {{name: alone, strategy: local}}
"""
# Figures take seconds; they are drawn where they are looked at.
PLAIN = re.sub("tables: .*", "tables: []", re.sub("figures: .*", "figures: []", STUDY))
MAKING = runner.Making("small", "fedhur study small", False)
SAMPLE = ("ndcg", "recall", "mrr")


def make(run: StudyRun) -> None:
    """In this process: one of its own spends seconds on imports."""
    run_local(
        {
            "dataset": run.dataset,
            "strategy": run.strategy,
            "seed": run.seed,
            "output-dir": str(run.folder),
            "overrides": shlex.join(run.changes),
        }
    )
    (run.folder / OUTPUT_LOG).touch()


def small(folder: Path, text: str = STUDY) -> Definition:
    (folder / "small.yaml").write_text(text)
    return read_study(folder / "small.yaml")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A study's folder and what was said; its last run is made by the study, as every run is where none is there."""
    folder = tmp_path_factory.mktemp("study") / "out"
    definition = small(folder.parent)
    *first, _ = plan(definition, folder)
    for run in first:
        make(run)
    said: list[str] = []
    assert runner.study(definition, MAKING, folder, 2, said.append) == 0
    return folder, said


@pytest.fixture
def earlier(made: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A copy of that study's folder."""
    return Path(shutil.copytree(made[0], tmp_path / "out"))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Stand-ins for the processes of runs: set their Python code, get the list of the runs that were started."""

    def play(code: str) -> list[str]:
        started: list[str] = []

        def command(run: StudyRun) -> list[str]:
            started.append(run.label)
            return [sys.executable, "-c", code, str(run.folder)]

        monkeypatch.setattr(runner, "command_of", command)
        return started

    return play


def users_of(folder: Path, data: str, arm: str, seed: int) -> dict[str, np.ndarray]:
    with np.load(folder / "runs" / data / arm / f"seed-{seed}" / "users.npz") as stored:
        return dict(stored)


# --- what is written ------------------------------------------------------------------------------------------------


def test_every_run_is_a_row_with_what_its_folder_says(made: tuple[Path, list[str]]) -> None:
    folder, said = made
    assert "9 of 10 runs are completed already" in said
    assert [
        line for line in said if re.fullmatch(r"\[10/10\] tastes, alone, seed 2: test ndcg@10 \d\.\d{4}, \d+ s", line)
    ]
    rows = rows_of(folder / "results.csv")
    assert len(rows) == 10
    assert [(row["data"], row["arm"]) for row in rows if row["seed"] == "1"] == [
        ("even", "shared"), ("even", "narrow"), ("even", "alone"), ("tastes", "shared"), ("tastes", "alone"),
    ]  # fmt: skip
    for row in rows:
        result = json.loads(
            (folder / "runs" / row["data"] / row["arm"] / f"seed-{row['seed']}" / "result.json").read_text()
        )
        assert row["status"] == "completed"
        for name, value in result["test"].items():
            assert float(row[f"test_{name}"]) == value
        assert float(row["bytes_down"]) == result["bytes_down"]


def test_summary_and_tests_are_over_seeds_and_users(made: tuple[Path, list[str]]) -> None:
    folder, _ = made
    results = rows_of(folder / "results.csv")
    summary = {(row["data"], row["arm"], row["metric"]): row for row in rows_of(folder / "summary.csv")}
    tests = {(row["data"], row["metric"], row["pairs"], row["arm"]): row for row in rows_of(folder / "tests.csv")}
    assert len(tests) == 3 * 2 * 3
    p_values: dict[str, list[float]] = {}
    for data, arms in (("even", ("narrow", "alone")), ("tastes", ("alone",))):
        for arm in arms:
            values = {
                name: [float(row["test_ndcg@10"]) for row in results if (row["data"], row["arm"]) == (data, name)]
                for name in (arm, "shared")
            }
            entry = summary[data, arm, "test_ndcg@10"]
            assert float(entry["mean"]) == pytest.approx(np.mean(values[arm]))
            assert float(entry["sd"]) == pytest.approx(np.std(values[arm], ddof=1))
            seeds = tests[data, "ndcg@10", "seeds", arm]
            assert (seeds["against"], seeds["n"]) == ("shared", "2")
            assert float(seeds["difference"]) == pytest.approx(np.mean(values[arm]) - np.mean(values["shared"]))
            found: dict[int, list[float]] = {}
            for seed in (1, 2):
                one, two = (users_of(folder, data, name, seed) for name in (arm, "shared"))
                second = dict(zip(two["user"].tolist(), two["ndcg"].tolist(), strict=True))
                for user, value in zip(one["user"].tolist(), one["ndcg"].tolist(), strict=True):
                    found.setdefault(user, []).append(value - second[user])
            differences = [np.mean(each) for each in found.values()]
            users = tests[data, "ndcg@10", "users", arm]
            assert int(users["n"]) == len(differences)
            assert float(users["difference"]) == pytest.approx(np.mean(differences))
            assert float(users["t_p"]) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
            p_values.setdefault(data, []).append(float(users["t_p"]))
    # Holm over the arms of one data: the smallest of two counts twice, one alone counts once.
    low = min(p_values["even"])
    corrected = [min(1, 2 * p) if p == low else max(min(1, 2 * low), p) for p in p_values["even"]]
    assert [float(tests["even", "ndcg@10", "users", arm]["t_p_holm"]) for arm in ("narrow", "alone")] == pytest.approx(
        corrected
    )
    alone = tests["tastes", "ndcg@10", "users", "alone"]
    assert alone["t_p"] == alone["t_p_holm"]


def test_gain_and_fairness_are_those_of_the_runs(made: tuple[Path, list[str]]) -> None:
    folder, _ = made
    gain = {(row["data"], row["arm"], row["measure"]): float(row["mean"]) for row in rows_of(folder / "gain.csv")}
    fair = {
        (row["data"], row["arm"], row["over"], row["measure"]): float(row["mean"])
        for row in rows_of(folder / "fairness.csv")
    }
    clients = rows_of(folder / "gain-clients.csv")
    for data in ("even", "tastes"):
        losing: dict[str, list[float]] = {"users": [], "clients": [], "worst": [], "active": [], "better": []}
        for seed in (1, 2):
            one, two = (users_of(folder, data, name, seed) for name in ("shared", "alone"))
            assert one["user"].tolist() == two["user"].tolist()
            assert one["client"].tolist() == two["client"].tolist()
            difference = one["ndcg"] - two["ndcg"]
            means = [difference[one["client"] == client].mean() for client in np.unique(one["client"])]
            told = [
                float(row["gain"])
                for row in clients
                if (row["data"], row["arm"], row["seed"]) == (data, "shared", str(seed))
            ]
            assert told == pytest.approx(means)
            losing["users"].append((difference < 0).mean())
            losing["better"].append((difference > 0).mean())
            losing["clients"].append(np.mean(np.array(means) < 0))
            losing["worst"].append(np.sort(difference)[: -(-len(difference) // 10)].mean())
            active = np.argsort(one["interactions"], kind="stable")[-(len(difference) // 5) :]
            losing["active"].append(one["ndcg"][active].mean())
        assert gain[data, "shared", "users that lose"] == pytest.approx(np.mean(losing["users"]))
        assert gain[data, "shared", "clients that lose"] == pytest.approx(np.mean(losing["clients"]))
        assert gain[data, "shared", "gain of the worst 10 % of users"] == pytest.approx(np.mean(losing["worst"]))
        assert fair[data, "shared", "alone", "users better"] == pytest.approx(np.mean(losing["better"]))
        assert fair[data, "shared", "alone", "users worse"] == pytest.approx(np.mean(losing["users"]))
        assert fair[data, "shared", "", "activity 5 of 5"] == pytest.approx(np.mean(losing["active"]))
    assert not any(arm == "alone" for _, arm, _ in gain)


def test_traffic_adds_up_to_the_bytes_of_the_runs(made: tuple[Path, list[str]]) -> None:
    folder, _ = made
    summary = {(row["data"], row["arm"], row["metric"]): float(row["mean"]) for row in rows_of(folder / "summary.csv")}
    sums: dict[tuple[str, str, str], float] = {}
    for row in rows_of(folder / "traffic.csv"):
        key = row["data"], row["arm"], f"bytes_{row['direction']}_per_client_round"
        sums[key] = sums.get(key, 0) + float(row["bytes_per_client_round"])
    assert len(sums) == 10
    for key, size in sums.items():
        assert size == pytest.approx(summary[key])
    best = [row for row in rows_of(folder / "budgets.csv") if (row["data"], row["arm"]) == ("even", "narrow")][-1]
    assert float(best["mean"]) == pytest.approx(summary["even", "narrow", "validation_ndcg@10"])


def test_the_report_has_the_paper_beside_ours_and_all_figures(made: tuple[Path, list[str]]) -> None:
    folder, said = made
    text = (folder / "report.md").read_text()
    assert any(text.strip() == line.strip() for line in said)
    about = json.loads((folder / "study.json").read_text())
    assert (about["study"], about["quick"], about["seeds"]) == ("small", False, [1, 2])
    assert [(arm["data"], arm["name"], arm["x"]) for arm in about["arms"]][:3] == [
        ("even", "shared", 8), ("even", "narrow", 4), ("even", "alone", None),
    ]  # fmt: skip
    assert about["arms"][1]["set"][-1] == "model.dim=4"
    assert [figure["file"] for figure in about["figures"]] == [
        "convergence.png",
        "sweep.png",
        "bytes.png",
        "gain-alone.png",
    ]
    for figure in about["figures"]:
        assert (folder / figure["file"]).read_bytes().startswith(b"\x89PNG")
        assert f"]({figure['file']})" in text
    assert all((folder / table["file"]).is_file() for table in about["tables"])

    def cells(title: str) -> dict[str, list[str]]:
        lines = text.partition(f"{title}; data: even:\n\n")[2].partition("\n\n")[0].splitlines()
        return {row[1]: row for line in lines if (row := [cell.strip() for cell in line.split("|")])}

    assert cells("Test, mean ± standard deviation over seeds")["shared"][-3:-1] == ["0.2500", "0.5000"]
    assert cells("NDCG@10 minus that of shared")["narrow"][-2] == "-0.0500"
    assert cells("NDCG@10 minus that of shared")["alone"][-2] == "-"
    assert "paper" not in text.partition("data: tastes:")[2].partition("KiB a client")[0]
    for part in ("A note of the study.", "arXiv 2609.11632", "`fedhur study small`", "KiB a client and round"):
        assert part in text


# --- going on -------------------------------------------------------------------------------------------------------


def test_finished_runs_are_not_repeated_and_a_failed_one_stops_nothing(
    earlier: Path, processes: Callable[[str], list[str]]
) -> None:
    definition = small(earlier.parent, PLAIN)
    started = processes("print('error: no such luck'); raise SystemExit(2)")
    assert runner.study(definition, MAKING, earlier, 1, lambda _: None) == 0
    assert started == []
    shutil.rmtree(earlier / "runs" / "even" / "narrow" / "seed-2")
    said: list[str] = []
    assert runner.study(definition, MAKING, earlier, 1, said.append) == 1
    assert started == ["even, narrow, seed 2"]
    assert "- even, narrow, seed 2 failed and is left out: error: no such luck" in (earlier / "report.md").read_text()
    rows = {(row["data"], row["arm"], row["seed"]): row for row in rows_of(earlier / "results.csv")}
    assert rows["even", "narrow", "2"]["status"] == "failed"
    assert rows["even", "narrow", "1"]["status"] == "completed"


def test_only_the_report_makes_no_runs(earlier: Path, processes: Callable[[str], list[str]]) -> None:
    started = processes("raise SystemExit(1)")
    shutil.rmtree(earlier / "runs" / "tastes" / "alone")
    assert runner.study(small(earlier.parent, PLAIN), MAKING, earlier, 1, lambda _: None, report_only=True) == 1
    assert started == []
    assert (
        "These runs have not been made: tastes, alone, seed 1, tastes, alone, seed 2"
        in (earlier / "report.md").read_text()
    )
    with pytest.raises(SweepError, match="holds none of these runs: run the study first"):
        runner.study(small(earlier.parent, PLAIN), MAKING, earlier / "absent", 1, lambda _: None, report_only=True)


def test_only_the_report_refuses_runs_of_other_settings_and_folders_of_other_studies(earlier: Path) -> None:
    before = (earlier / "report.md").read_bytes()
    other = small(earlier.parent, PLAIN.replace("model.dim=4]", "model.dim=6]"))
    with pytest.raises(SweepError, match=r"narrow/seed-1 has model\.dim=4, wanted now is 6"):
        runner.study(other, MAKING, earlier, 1, lambda _: None, report_only=True)
    same = small(earlier.parent, PLAIN)
    with pytest.raises(SweepError, match="holds the study small: choose another --output"):
        runner.study(same, runner.Making("wide", "", False), earlier, 1, lambda _: None, report_only=True)
    seeds = same.model_copy(update={"seeds": [5]})
    with pytest.raises(SweepError, match="holds none of these runs"):
        runner.study(seeds, MAKING, earlier, 1, lambda _: None, report_only=True)
    assert (earlier / "report.md").read_bytes() == before
    with pytest.raises(SweepError, match="is a file: choose another"):
        runner.study(same, MAKING, earlier / "report.md", 1, lambda _: None)


def test_a_report_removes_what_only_the_one_before_had(earlier: Path) -> None:
    assert (earlier / "gain.csv").is_file()
    assert list(earlier.glob("*.png"))
    (earlier / "notes.csv").write_text("mine")
    assert runner.study(small(earlier.parent, PLAIN), MAKING, earlier, 1, lambda _: None) == 0
    assert not (earlier / "gain.csv").exists()
    assert not list(earlier.glob("*.png"))
    assert (earlier / "tests.csv").is_file()
    assert (earlier / "notes.csv").read_text() == "mine"


def test_an_arm_for_other_data_alone_leaves_only_these_data(tmp_path: Path) -> None:
    definition = small(tmp_path).with_arms(["narrow"])
    assert [run.label for run in plan(definition, tmp_path)] == ["even, narrow, seed 1", "even, narrow, seed 2"]
    assert list(definition.datasets) == ["even"]


def test_runs_of_equal_settings_are_taken_over_from_another_study(
    earlier: Path, tmp_path: Path, processes: Callable[[str], list[str]]
) -> None:
    """Another study with two of its arms under other names, and one that nobody has made; nothing else is taken."""
    text = PLAIN.replace("name: shared", "name: averaged").replace("against: shared", "against: averaged")
    text = text.replace("strategy: local", "strategy: local, set: [rounds=1]")
    (earlier / "runs/tastes/shared/seed-2/result.json").write_text('{"status": "failed"}')
    old = earlier / "runs/tastes/shared/seed-1/users.npz"
    with np.load(old) as stored:
        np.savez(old, **{name: stored[name] for name in stored.files if name != "client"})
    started = processes("pass")
    said: list[str] = []
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "out"
    assert runner.study(small(tmp_path / "other", text), MAKING, other, 1, said.append, reuse=[earlier]) == 1
    assert said[0] == "4 runs taken over from other studies"
    # The arm alone with one round, on two data and seeds, the one that had failed, and one of an older version.
    assert len(started) == 6
    for new, old in (("even/averaged", "even/shared"), ("even/narrow", "even/narrow")):
        for seed in (1, 2):
            copy, source = other / "runs" / new / f"seed-{seed}", earlier / "runs" / old / f"seed-{seed}"
            assert (copy / "result.json").read_bytes() == (source / "result.json").read_bytes()
            assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in source.iterdir())
    with pytest.raises(SweepError, match="there are no runs in this folder"):
        runner.study(small(tmp_path / "other", text), MAKING, other, 1, said.append, reuse=[tmp_path / "none"])


def test_completed_runs_with_other_settings_are_refused(earlier: Path) -> None:
    other = small(earlier.parent, PLAIN.replace("model.dim=4]", "model.dim=6]"))
    with pytest.raises(SweepError, match=r"narrow/seed-1 has model\.dim=4, wanted now is 6"):
        runner.study(other, MAKING, earlier, 1, lambda _: None)


def test_the_same_seed_gives_the_same_numbers(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = made
    run = plan(small(tmp_path, PLAIN), tmp_path)[-1]
    make(run)
    for name in ("result.json", "users.npz"):
        one, two = (base / run.folder.relative_to(tmp_path) / name for base in (folder, tmp_path))
        if name == "users.npz":
            with np.load(one) as first, np.load(two) as second:
                assert all(np.array_equal(first[key], second[key]) for key in first.files)
        else:
            first, second = (json.loads(path.read_text()) for path in (one, two))
            keys = ("test", "validation", "best_round", "bytes_up", "bytes_down")
            assert [first[key] for key in keys] == [second[key] for key in keys]


# --- workers and reports of their own -------------------------------------------------------------------------------

WORKED = """
title: With a worker
question: Who makes the runs?
figures: []
datasets: {data: {dataset: synthetic}}
seeds: [3]
arms:
  - {name: one, worker: counting, options: ["--to", "7"], set: [model.dim=4]}
"""


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's name; its module is never started."""
    monkeypatch.setattr(definition_module, "_workers", lambda: ["counting"])


@pytest.mark.usefixtures("counting")
def test_a_worker_makes_the_runs_of_its_arm(tmp_path: Path, processes: Callable[[str], list[str]]) -> None:
    definition = small(tmp_path, WORKED)
    folder = tmp_path / "out"
    (run,) = plan(definition, folder)
    words = command_of(run)
    assert words[1:4] == ["-P", "-m", "fedhur_app.studies.workers.counting"]
    assert words[4:12] == [
        "--dataset", "synthetic", "--strategy", "fedhur", "--seed", "3", "--output", str(run.folder),
    ]  # fmt: skip
    assert words[-4:] == ["--set", "model.dim=4", "--to", "7"]
    config = json.dumps({"settings": run.settings.model_dump(mode="json")})
    started = processes(
        f"import json, sys; open(sys.argv[1] + '/config.yaml', 'w').write({config!r}); "
        "open(sys.argv[1] + '/result.json', 'w').write(json.dumps({'status': 'completed', 'counted': 7}))"
    )
    assert runner.study(definition, MAKING, folder, 1, lambda _: None) == 0
    assert rows_of(folder / "results.csv")[0]["counted"] == "7"
    assert runner.study(definition, MAKING, folder, 1, lambda _: None) == 0
    assert started == ["data, one, seed 3"]
    other = small(tmp_path, WORKED.replace('"7"', '"8"'))
    with pytest.raises(
        SweepError, match=r'made by \["counting", "--to", "7"\], wanted now is \["counting", "--to", "8"\]'
    ):
        runner.study(other, MAKING, folder, 1, lambda _: None)
    # Also where the last report was one without this arm, or there is none.
    (folder / "study.json").unlink()
    with pytest.raises(SweepError, match="wanted now is"):
        runner.study(other, MAKING, folder, 1, lambda _: None, report_only=True)


@pytest.mark.usefixtures("counting")
def test_a_study_may_write_its_own_report(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, processes: Callable[[str], list[str]]
) -> None:
    processes("raise SystemExit(1)")
    seen: list[Any] = []

    def special(runs: list[Any], folder: Path) -> str:
        seen.extend(runs)
        (folder / "own.csv").write_text("a,b\n")
        return f"So many runs: {len(runs)}.\n"

    monkeypatch.setattr(report, "special_report", lambda study: special if study == "small" else None)
    assert runner.study(small(earlier.parent, PLAIN), MAKING, earlier, 1, lambda _: None) == 0
    assert "So many runs: 10." in (earlier / "report.md").read_text()
    assert {(run.data, run.arm.name, run.seed) for run in seen} >= {("even", "narrow", 1), ("tastes", "alone", 2)}
    assert all((run.folder / "result.json").is_file() for run in seen)
    about = json.loads((earlier / "study.json").read_text())
    assert {"file": "own.csv", "title": "own"} in about["tables"]


def test_a_report_of_its_own_is_found_by_the_name_of_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.special_report("no-such-study") is None
    assert report.special_report("width.v2") is None
    assert report.special_report("fairness") is None  # a module of numbers, without a report

    def of_its_own(runs: list[Any], folder: Path) -> str:
        return ""

    monkeypatch.setattr("fedhur_app.studies.fairness.report", of_its_own, raising=False)
    assert report.special_report("fairness") is of_its_own


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_lists_runs_and_reports(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["study"], env={"COLUMNS": "300"})
    assert listed.exit_code == 0
    assert re.search(r"^relations +Does it matter how peers are found", listed.output, re.MULTILINE)
    folder = tmp_path / "out"
    for run in plan(load_study("queries").smaller(), folder):
        make(run)
    words = ["study", "queries", "--quick", "--output", str(folder), "--jobs", "1"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "# Form of the query" in shown.output
    assert "it shows that the study runs, its numbers mean nothing" in shown.output
    about = json.loads((folder / "study.json").read_text())
    assert (about["command"], about["quick"]) == ("fedhur study queries --quick", True)
    fewer = CliRunner().invoke(app, [*words, "--seeds", "2", "--report-only"])
    assert fewer.exit_code == 0, fewer.output
    assert {row["seed"] for row in rows_of(folder / "results.csv")} == {"2"}
    nameless = CliRunner().invoke(app, ["study", "--quick"])
    assert nameless.exit_code == 2
    assert "name a study before its options: " in nameless.output
    unknown = CliRunner().invoke(app, ["study", "querys"])
    assert unknown.exit_code == 2
    assert "unknown study 'querys'; did you mean 'queries'" in unknown.output
