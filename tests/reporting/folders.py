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


def federated_run(
    folder: Path, strategy: str, seed: int, validation: list[float], ndcg: float, changes: str = "", **result: Any
) -> Path:
    """A run of some strategy on ml-100k: validation NDCG by round, test NDCG, recall half of it, 2 MiB both ways."""
    settings = load_settings("ml-100k", strategy, seed, changes)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"settings": settings.model_dump()}))
    lines = [
        {"round": number, "validation": {"recall@10": value / 2, "ndcg@10": value}, "bytes_up_per_client": 1024.0}
        for number, value in enumerate(validation, 1)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    best = max(range(len(validation)), key=validation.__getitem__)
    found = RESULT | {
        "dataset": "ml-100k", "strategy": strategy, "seed": seed, "rounds": len(validation), "best_round": best + 1,
        "validation": {"recall@10": validation[best] / 2, "ndcg@10": validation[best]},
        "test": {"recall@10": ndcg / 2, "ndcg@10": ndcg}, "bytes_up": 2**20, "bytes_down": 2**20,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(found | result))
    return folder


# One grey pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6368000000820081770ccf880000000049454e44ae426082"
)


def study(folder: Path) -> Path:
    """A study with two arms on two data sets; its title and texts try to leave their place in the page."""
    for data, kind in (("id", "id"), ("taste", "taste")):
        for arm, strategy, test in (("none", "fedcia", 0.2), ("utility", "fedhur", 0.3)):
            for seed in (1, 2):
                federated_run(
                    folder / "runs" / data / arm / f"seed-{seed}", strategy, seed, [0.1, 0.2], test + seed / 100,
                    f"dataset.clients.kind={kind}",
                )  # fmt: skip
    (folder / "study.json").write_text(
        json.dumps(
            {
                "study": "relations", "title": "Relations </title><script>alert(1)</script>",
                "question": "<b>Which?</b>",
                "command": "fedhur study relations", "made": "2026-11-30", "machine": "Linux x86_64, 2 cores",
                "arms": [
                    {"name": "utility", "data": "id", "strategy": "fedhur", "set": [], "x": None},
                    {"name": "none", "data": "id", "strategy": "fedcia", "set": ["a.b=\"<i>\""], "x": None},
                ],
                "seeds": [1, 2],
                "figures": [
                    {"file": "sweep.png", "title": "Sweep <1>", "says": "\"quoted\""},
                    {"file": "../outside.png", "title": "x"},
                ],
                "tables": [{"file": "summary.csv", "title": "Means"}],
            }
        )
    )  # fmt: skip
    (folder / "report.md").write_text(
        "# Relations\n\nSee <img src=x onerror=alert(2)> and\n\n![Sweep](sweep.png)\n\n"
        "| arm | ndcg |\n| --- | ---: |\n| none | 0.2 |\n| utility | **0.3** |\n"
    )
    for place in (folder / "sweep.png", folder.parent / "outside.png"):
        place.write_bytes(PNG)
    (folder / "curve.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><script>alert(3)</script></svg>')
    (folder / "summary.csv").write_text("arm,mean\nnone,0.215\n<script>,0.315\n")
    return folder
