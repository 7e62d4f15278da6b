"""Run folders written by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedhur_app.config import load_settings
from fedhur_app.evaluation.ranking import METRICS
from fedhur_app.files import write_arrays
from fedhur_app.reporting.outcomes import Outcome, Run, read_outcome

NAMES = ["us", "de"]
RESULT = {
    "status": "completed", "rounds": 2, "best_round": 2, "validation": {}, "test": {}, "users_evaluated": 0,
    "bytes_up": 0, "bytes_down": 0, "seconds": 1.0, "versions": {"code": "x"},
}  # fmt: skip


def market_run(
    root: Path,
    method: str,
    seed: int,
    ndcg: dict[int, list[float]],
    dataset: str = "ml-100k",
    fingerprint: str = "same",
    algorithm: str = "",
) -> Outcome:
    """A completed run: NDCG of the users of every market, numbered through; the other metrics are twice as high."""
    folder = root / method / f"seed-{seed}"
    folder.mkdir(parents=True)
    settings = load_settings(dataset, method, seed, "evaluation.per_user=true")
    settings = settings.model_copy(update={"algorithm": algorithm or settings.algorithm})
    values = np.array([value for users in ndcg.values() for value in users])
    market = np.array([number for number, users in ndcg.items() for _ in users])
    columns = {name: values if name == "ndcg" else 2 * values for name in METRICS}
    write_arrays(folder / "users.npz", {"user": np.arange(len(values)), "market": market, **columns})
    (folder / "result.json").write_text(json.dumps(RESULT))
    means = {number: float(np.mean(users)) for number, users in ndcg.items()}
    (folder / "history.jsonl").write_text("".join(json.dumps(_line(round_, means)) + "\n" for round_ in (1, 2)))
    data = {"fingerprint": fingerprint, "markets": NAMES}
    (folder / "config.yaml").write_text(yaml.safe_dump({"settings": settings.model_dump(), "data": data}))
    return read_outcome(Run(dataset, method, seed, settings, folder))


def _line(round_: int, means: dict[int, float]) -> dict[str, Any]:
    """Validation of the market is its test mean times the round; market 1 is missing in round 1."""
    markets = {
        str(number): {"ndcg@10": round_ * mean, "auc": None}
        for number, mean in means.items()
        if round_ > 1 or not number
    }
    return {"round": round_, "bytes_up_per_client": 0, "bytes_down_per_client": 0, "markets": markets}


def item_tables(folder: Path, tables: dict[int, np.ndarray], shared: np.ndarray) -> None:
    """Checkpoints of a run with a global item table; an older one of every client lies beside the last."""
    write_arrays(folder / "checkpoint" / "server.npz", {"_progress": np.array("{}"), "global/items": shared})
    for number, table in tables.items():
        for round_, arrays in ((1, table + 5), (2, table)):
            path = folder / "checkpoint" / "clients" / f"client-{number:05d}" / f"round-{round_:05d}.npz"
            write_arrays(path, {"numbers": np.array("{}"), "model|items": arrays})
