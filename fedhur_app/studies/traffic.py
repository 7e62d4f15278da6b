"""What travelled, by stage and record, and how good a model was within a budget of bytes."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedhur_app.reporting.comparison import MIB

History = list[dict[str, Any]]  # lines of a run's history.jsonl


def by_record(histories: Sequence[History]) -> dict[tuple[str, str, str], float]:
    """Mean bytes of a client and round, by (stage, `up` or `down`, record); a client counts that took part.

    Args:
        histories: Of runs with the same settings; every round of every run weighs the same.
    """
    sums: dict[tuple[str, str, str], float] = defaultdict(float)
    rounds = sum(len(history) for history in histories)
    for line in (line for history in histories for line in history):
        for stage, told in line["stages"].items():
            for direction in ("up", "down"):
                for record, size in told[f"bytes_{direction}"].items():
                    sums[stage, direction, record] += size / line["clients"] / rounds
    return dict(sums)


def spent(history: History) -> np.ndarray:
    """MiB of all clients together, both ways, up to the end of each round (rounds,)."""
    both = [
        sum(sum(told[f"bytes_{way}"].values()) for told in line["stages"].values() for way in ("up", "down"))
        for line in history
    ]
    return np.cumsum(both) / MIB


def best_so_far(history: History, metric: str) -> np.ndarray:
    """Best validation up to the end of each round (rounds,); NaN before there is any."""
    values = [line["validation"].get(metric) for line in history]
    return np.fmax.accumulate([math.nan if value is None else float(value) for value in values])


def within(history: History, metric: str, budget: float) -> float:
    """Best validation of the rounds that ended within a budget of MiB; NaN if none did."""
    done = int(np.searchsorted(spent(history), budget, side="right"))
    return float(best_so_far(history, metric)[done - 1]) if done else math.nan


def budgets(histories: Sequence[History]) -> list[float]:
    """Budgets in MiB to compare runs at: powers of two from the cheapest first round to the dearest whole run."""
    totals = [spent(history) for history in histories if history]
    totals = [total for total in totals if total[-1] > 0]
    if not totals:
        return []
    low = math.ceil(math.log2(min(total[0] for total in totals)))
    high = math.ceil(math.log2(max(total[-1] for total in totals)))
    return [2.0**power for power in range(low, high + 1)]
