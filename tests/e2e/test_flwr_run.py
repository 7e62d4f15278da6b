"""One real `flwr run` (Ray, FAB, SuperLink) of the application: the same numbers as in one process."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedhur_app.flower_runner import run_flower
from tests.running import SMALL, history, numbers, result, run

ROUNDS = "rounds=3 min_rounds=3"


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("local")
    run(output, "fedhur", ROUNDS)
    return output


@pytest.mark.e2e
def test_the_command_runs_under_flower_with_the_numbers_of_the_local_runtime(local, tmp_path):
    options = [f"--set={item}" for item in f"{SMALL} {ROUNDS}".split()]
    command = [str(Path(sys.executable).parent / "fedhur"), "run", "--dataset", "synthetic", "--strategy", "fedhur"]
    done = subprocess.run(
        [*command, *options, "--output", str(tmp_path / "run")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(tmp_path / "run") == numbers(local)
    assert history(tmp_path / "run") == history(local)
    assert "round 3/3" in done.stdout
    assert f"{result(local)['test']['ndcg@10']:.4f}" in done.stdout


@pytest.mark.e2e
def test_another_number_of_actors_changes_nothing(local, tmp_path):
    config = {
        "dataset": "synthetic",
        "strategy": "fedhur",
        "seed": 1,
        "overrides": f"{SMALL} {ROUNDS}",
        "output-dir": str(tmp_path / "run"),
        "resume": "",
    }
    outcome = run_flower(config, 6, cpus_per_client=2, on_line=lambda line: None)
    assert outcome.completed, outcome
    assert numbers(tmp_path / "run") == numbers(local)
    assert history(tmp_path / "run") == history(local)
