"""What a run's folder tells a report page; damage is named and never raised."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhur_app.config import flatten, parse_yaml

RUN_FILES = ("result.json", "config.yaml", "history.jsonl")
_DAMAGE = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Problem:
    """Something that could not be read, or was left out.

    Attributes:
        where: Folder or file, as people named it.
        what: What is wrong, one line.
    """

    where: str
    what: str


@dataclass(frozen=True, eq=False)
class PageRun:
    """What one run's folder tells.

    Attributes:
        folder: The folder.
        name: Its path as shown, below the folder that was asked for.
        collection: The comparison or study it belongs to, else the folder that was asked for.
        arm: Name of the strategy, or of the arm of a study.
        dataset: Name of the data set; empty where it is unknown.
        strategy: Name of the strategy; empty where it is unknown.
        seed: Seed; -1 where it is unknown.
        status: `completed`, `failed`, `not finished` or `damaged`.
        reason: Why it is not completed, one line.
        values: What it measured: `test_<metric>`, `validation_<metric>`, bytes, seconds, rounds.
        curve: (round, validation of the main metric), in order.
        metric: Name of the main metric, such as `ndcg@10`.
        settings: All settings by dotted key; empty where config.yaml cannot be read.
        code: Fingerprint of the code that ran.
        machine: Such as `Linux x86_64, 2 cores`.
    """

    folder: Path
    name: str
    collection: Path
    arm: str
    dataset: str
    strategy: str
    seed: int
    status: str
    reason: str
    values: dict[str, float]
    curve: list[tuple[int, float]]
    metric: str
    settings: dict[str, Any]
    code: str
    machine: str


def read_run(folder: Path, root: Path, problems: list[Problem]) -> PageRun:
    """What the folder tells; damaged files are problems, and leave out what they would have told.

    Args:
        folder: The run's folder.
        root: The folder that was asked for, at or above it.
        problems: Gets what cannot be read.
    """
    before = len(problems)
    config = read(folder / "config.yaml", parse_yaml, problems)
    settings: dict[str, Any] = {}
    if isinstance(config, dict) and isinstance(config.get("settings"), dict):
        settings = {str(key): value for key, value in flatten(config["settings"]).items()}
    elif config is not None:
        problems.append(Problem(str(folder / "config.yaml"), "holds no settings"))
    result = read(folder / "result.json", json.loads, problems)
    if result is not None and not isinstance(result, dict):
        problems.append(Problem(str(folder / "result.json"), "is damaged: it must hold an object"))
        result = None
    history = _read_history(folder / "history.jsonl", problems)
    found = result or {}
    status, reason = _status(found, len(problems) > before, problems[before:])
    versions = found.get("versions") or (config or {}).get("versions") if isinstance(config, dict) else {}
    versions = versions if isinstance(versions, dict) else {}
    strategy = str(settings.get("strategy") or found.get("strategy") or "")
    seed = settings.get("seed", found.get("seed", folder.name.removeprefix("seed-")))
    collection, arm = _place(folder, root, strategy)
    metric, curve = _curve(history)
    return PageRun(
        folder,
        shown(folder, root),
        collection,
        arm,
        str(settings.get("dataset.name") or found.get("dataset") or ""),
        strategy,
        int(seed) if str(seed).isdecimal() else -1,
        status,
        reason,
        _values(found, history) if status == "completed" else {},
        curve,
        metric,
        settings,
        str(versions.get("code", "")),
        str(versions.get("machine", "")),
    )


def _status(result: dict[str, Any], damaged: bool, problems: list[Problem]) -> tuple[str, str]:
    if result.get("status") == "completed":
        return "completed", ""
    if damaged:
        return "damaged", problems[0].what
    if result:
        return "failed", str(result.get("reason", "it does not say why")).strip().partition("\n")[0]
    return "not finished", "there is no result.json"


def read(path: Path, parse: Callable[[str], Any], problems: list[Problem]) -> Any:
    """Content of a file, None if there is none; one that cannot be read is a problem, too."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except Exception as error:  # a YAML error is of no common kind
        problems.append(Problem(str(path), f"cannot be read ({type(error).__name__}: {_one_line(error)})"))
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _read_history(path: Path, problems: list[Problem]) -> list[dict[str, Any]]:
    """The rounds; from a damaged line on they are left out."""
    lines = (read(path, str.splitlines, problems)) or []
    history = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            int(entry["round"])
        except _DAMAGE:
            problems.append(Problem(str(path), f"line {number} is damaged; rounds from there on are left out"))
            break
        history.append(entry)
    return history


def _place(folder: Path, root: Path, strategy: str) -> tuple[Path, str]:
    """The folder of the study or comparison (above `runs/`), and the arm: a study names it in the path."""
    for above in folder.parents:
        if above.name == "runs" and (above.parent / "study.json").is_file():
            return above.parent, folder.parent.name
        if above.name == "runs" and any((above.parent / name).is_file() for name in (".lock", "summary.csv")):
            return above.parent, strategy
    return root, strategy


def shown(folder: Path, root: Path) -> str:
    """A folder's path for people: from the folder that was asked for on, as the path above it is of one machine."""
    inside = folder.relative_to(root).as_posix()
    name = root.name or root.resolve().name
    return name if inside == "." else f"{name}/{inside}"


def _curve(history: list[dict[str, Any]]) -> tuple[str, list[tuple[int, float]]]:
    """Main validation metric by round: NDCG, or the first metric there is."""
    validation = [(int(line["round"]), line.get("validation")) for line in history]
    names = [name for _, metrics in validation if isinstance(metrics, dict) for name in metrics]
    metric = next((name for name in names if name.startswith("ndcg")), names[0] if names else "")
    return metric, [
        (round_, float(metrics[metric]))
        for round_, metrics in validation
        if isinstance(metrics, dict) and _is_number(metrics.get(metric))
    ]


def _values(result: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, float]:
    """All numbers of a completed run. Special workers write fewer of them."""
    values: dict[str, float] = {}
    for part in ("test", "validation"):
        metrics = result.get(part)
        if isinstance(metrics, dict):
            values |= {f"{part}_{name}": float(value) for name, value in metrics.items() if _is_number(value)}
    for name in ("bytes_up", "bytes_down", "seconds", "rounds", "best_round", "users_evaluated"):
        if _is_number(result.get(name)):
            values[name] = float(result[name])
    for name in ("bytes_up_per_client", "bytes_down_per_client"):
        found = [float(line[name]) for line in history if _is_number(line.get(name))]
        if found:
            values[f"{name}_round"] = sum(found) / len(found)
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def value_text(value: Any) -> str:
    """A setting's value as it is written after `--set`."""
    if isinstance(value, list):
        return f"[{','.join(value_text(part) for part in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
