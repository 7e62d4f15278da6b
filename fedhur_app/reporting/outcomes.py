"""What a run's folder tells about the run."""

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from fedhur_app.config import Settings
from fedhur_app.files import read_arrays

TESTED = ("ndcg", "recall", "mrr")  # metrics of single users in users.npz
# Ways in which a folder that somebody edited, or that was half copied, cannot be read.
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a comparison.

    Attributes:
        dataset: Name of a file in conf/dataset/.
        strategy: Name of a file in conf/strategy/.
        seed: Seed of the run.
        settings: What these and the changes resolve to.
        folder: Its output folder.
    """

    dataset: str
    strategy: str
    seed: int
    settings: Settings
    folder: Path

    @property
    def label(self) -> str:
        """Name for people."""
        return f"{self.strategy} seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        run: The run.
        status: `completed`, `failed`, or `not run` (the comparison was stopped before it ended).
        reason: Why it failed, one line.
        values: What it measured, by column of results.csv; empty unless completed.
        users: Arrays of users.npz; empty unless completed with `evaluation.per_user`.
        code: Fingerprint of the code that ran.
        absent: Clients that did not answer at the test.
    """

    run: Run
    status: Literal["completed", "failed", "not run"]
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)
    users: dict[str, np.ndarray] = field(default_factory=dict)
    code: str = ""
    absent: int = 0


def read_outcome(run: Run) -> Outcome:
    """What the run's folder tells; a run without a result, or with damaged files, is a failed one."""
    try:
        result = json.loads((run.folder / "result.json").read_text(encoding="utf-8"))
        if result["status"] != "completed":
            return Outcome(run, "failed", str(result["reason"]).strip().partition("\n")[0])
        users = _read_users(run.folder / "users.npz") if run.settings.evaluation.per_user else {}
        lines = (run.folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        values = _values(result, [json.loads(line) for line in lines])
        absent = len(result.get("absent_at_test", {}))
        return Outcome(run, "completed", "", values, users, str(result["versions"]["code"]), absent)
    except FileNotFoundError as error:
        return Outcome(run, "failed", f"there is no {Path(str(error.filename)).name} in {run.folder}")
    except _DAMAGE as error:
        return Outcome(run, "failed", f"files in {run.folder} are damaged ({type(error).__name__}: {error})")


def _values(result: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, float]:
    """Columns of results.csv. A metric over nobody (null in JSON) has none."""
    values: dict[str, float] = {name: int(result[name]) for name in ("best_round", "rounds")}
    for part in ("validation", "test"):
        values |= {f"{part}_{name}": float(value) for name, value in result[part].items() if value is not None}
    for direction in ("bytes_up", "bytes_down"):
        values[direction] = int(result[direction])
        values[f"{direction}_per_client_round"] = fmean(float(line[f"{direction}_per_client"]) for line in history)
    return values | {"users_tested": int(result["users_evaluated"]), "seconds": float(result["seconds"])}


def _read_users(path: Path) -> dict[str, np.ndarray]:
    users = read_arrays(path)
    numbers = users["user"]
    if any(users[name].shape != numbers.shape for name in TESTED) or np.any(np.diff(numbers) <= 0):
        raise ValueError("users.npz must hold every user once, in rising order")
    return users
