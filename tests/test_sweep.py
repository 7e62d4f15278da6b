import sys
from pathlib import Path

import numpy as np
import pytest

import fedhur_app
from fedhur_app.sweep import OUTPUT_LOG, Ended, collected_signals, locked, run_all


def sweep(output: Path, code: str, number: int, jobs: int) -> list[Ended]:
    """Run Python code in so many folders."""
    ended: list[Ended] = []
    folders = [output / str(i) for i in range(number)]
    with locked(output, "test") as lock, collected_signals() as signals:
        stopped = run_all(
            folders, lambda _: [sys.executable, "-P", "-c", code], jobs, ended.append, lock, signals, lambda line: None
        )
    assert not stopped
    return ended


def test_jobs_bounds_the_runs_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"import time\nfor mark in '+-': open({str(log)!r}, 'a').write(mark); time.sleep(0.2 * (mark == '+'))"
    assert [run.status for run in sweep(tmp_path / "out", code, 4, 2)] == [0] * 4
    counts = np.cumsum([1 if mark == "+" else -1 for mark in log.read_text()])
    assert (counts.max(), counts[-1], len(counts)) == (2, 0, 8)


def test_runs_use_the_code_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("working", "path"):
        (tmp_path / name / "fedhur_app").mkdir(parents=True)
        (tmp_path / name / "fedhur_app" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path / "working")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    (run,) = sweep(tmp_path / "out", "import fedhur_app; print(fedhur_app.__file__)", 1, 1)
    assert (run.folder / OUTPUT_LOG).read_text().strip() == str(Path(str(fedhur_app.__file__)).resolve())
