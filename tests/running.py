"""Runs on small synthetic data in the local runtime, and what tests read from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedhur_app.config import available, load_settings
from fedhur_app.runtime import LocalGrid, run_local

# Tuned copies of these lie in subfolders.
STRATEGIES = [name for name in available("strategy") if "/" not in name]
FEDERATED = [name for name in STRATEGIES if not load_settings("synthetic", name).centralised]

# Small enough for a run of a few rounds to take about a second.
SMALL = (
    "dataset.synthetic.users=60 dataset.synthetic.items=80 dataset.synthetic.interactions_per_user=12 "
    "dataset.clients.number=6 model.dim=8 relation.query_width=3 score.steps=3"
)


def run(output: Path, strategy: str, overrides: str = "", fault: Any = None, **config: Any) -> LocalGrid:
    """One run into `output`; later overrides win."""
    return run_local(
        {
            "dataset": "synthetic",
            "strategy": strategy,
            "output-dir": str(output),
            "overrides": f"{SMALL} {overrides}",
            **config,
        },
        fault,
    )


def resume(output: Path, overrides: str = "", fault: Any = None) -> LocalGrid:
    """Continue the run in `output`."""
    return run_local({"output-dir": str(output), "resume": str(output), "overrides": overrides}, fault)


def killed_and_resumed(output: Path, strategy: str, options: str, round_: int) -> None:
    """A run that is killed at the start of a round, and continued."""

    def kill(message: Any, client: int) -> None:
        if message.metadata.group_id == f"round-{round_}":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(output, strategy, options, kill)
    resume(output)


def result(output: Path) -> dict[str, Any]:
    """result.json."""
    return json.loads((output / "result.json").read_text())


def history(output: Path) -> list[dict[str, Any]]:
    """history.jsonl without wall times, which never repeat."""
    lines = [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def numbers(output: Path) -> dict[str, Any]:
    """What must be equal in two runs with the same seed."""
    keys = ("rounds", "best_round", "validation", "test", "users_evaluated", "bytes_up", "bytes_down")
    return {key: result(output)[key] for key in keys}
