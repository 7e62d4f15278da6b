"""What lambda does to each market, and what a market gains that joins late: the figures of docs/cross-market.md.

    python -m benchmarks.cross_market lambda --dataset markets-synthetic --seeds 1,2,3
    python -m benchmarks.cross_market join --dataset markets-synthetic --seeds 1,2,3,4,5

Runs of the local runtime, one after the other; prints Markdown. Validation rows only, except for the last column of
`join`, which is not used to choose anything.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhur_app.evaluation.statistics import summarise
from fedhur_app.reporting.comparison import spread_text
from fedhur_app.runtime import run_local

STRENGTHS = (0.0, 0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0)
AFTER = (1, 2, 4, 8, 12)


def outcome(dataset: str, strategy: str, seed: int, *options: str) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Lines of the history, and test NDCG by market."""
    fixed = ("evaluation.per_user=true", "evaluation.per_client=true", "server.checkpoint_every=0")
    with tempfile.TemporaryDirectory() as folder:
        config = {"dataset": dataset, "strategy": strategy, "seed": seed, "output-dir": folder}
        run_local({**config, "overrides": " ".join((*fixed, *options))})
        lines = [json.loads(line) for line in (Path(folder) / "history.jsonl").read_text().splitlines()]
        with np.load(Path(folder) / "users.npz") as users:
            ndcg, market = users["ndcg"], users["market"]
    return lines, {int(m): float(ndcg[market == m].mean()) for m in np.unique(market)}


def best_by_market(lines: list[dict[str, Any]]) -> dict[int, float]:
    """Validation NDCG of each market in its own best round."""
    markets = {int(name) for line in lines for name in line["markets"]}
    curves = {m: [line["markets"][str(m)]["ndcg@10"] for line in lines if str(m) in line["markets"]] for m in markets}
    return {m: max(value for value in curve if value is not None) for m, curve in sorted(curves.items())}


def strengths(dataset: str, seeds: list[int], options: list[str]) -> None:
    """Validation NDCG of the largest market and of the others for each lambda, and the markets' distance from G."""
    print("| lambda | rich market | other markets, mean | distance from G |")
    print("|---|---|---|---|")
    rich = None
    for strength in STRENGTHS:
        found, distances = [], []
        for seed in seeds:
            lines, _ = outcome(dataset, "fecosr", seed, *options, f"fecosr.strength={strength}")
            if rich is None:
                users = {int(m): told["users"] for m, told in lines[0]["markets"].items()}
                rich = max(users, key=lambda m: users[m])
            found.append(best_by_market(lines))
            distances.append(np.mean(list(lines[-1]["consensus"]["distance"].values())))
        assert rich is not None
        others = [float(np.mean([v for m, v in markets.items() if m != rich])) for markets in found]
        rich_text = spread([markets[rich] for markets in found])
        print(f"| {strength:g} | {rich_text} | {spread(others)} | {np.mean(distances):.2f} |", flush=True)


def joining(dataset: str, seeds: list[int], options: list[str], market: int, round_: int) -> None:
    """Validation NDCG of a market after n rounds of its own: alone, joined from its own start, joined from G."""
    cases = {
        "alone": ("independent", []),
        "joins from its own random start": (
            "fecosr",
            [f"'fecosr.join={{market: {market}, round: {round_}, warm: false}}'"],
        ),
        "joins from G": ("fecosr", [f"'fecosr.join={{market: {market}, round: {round_}}}'"]),
    }
    print(f"| market {market} | {' | '.join(f'after {n}' for n in AFTER)} | test |")
    print(f"|---|{'---|' * (len(AFTER) + 1)}")
    for name, (strategy, more) in cases.items():
        curves, tests = [], []
        for seed in seeds:
            rounds = max(AFTER) + (round_ - 1 if strategy == "fecosr" else 0)
            length = [f"rounds={rounds}", f"min_rounds={rounds}"]
            lines, test = outcome(dataset, strategy, seed, *length, *options, *more)
            own = [line["markets"][str(market)]["ndcg@10"] for line in lines if str(market) in line["markets"]]
            curves.append([own[n - 1] for n in AFTER])
            tests.append(test[market])
        cells = [spread(column) for column in np.transpose(curves)]
        print(f"| {name} | {' | '.join(cells)} | {spread(tests)} |", flush=True)


def spread(values: Sequence[float] | np.ndarray) -> str:
    """Mean and standard deviation over seeds."""
    return spread_text(summarise(values))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("lambda", "join"))
    parser.add_argument("--dataset", default="markets-synthetic")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--market", type=int, default=1)
    parser.add_argument("--round", type=int, default=15)
    parser.add_argument("--set", action="append", default=[], dest="options")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.what == "lambda":
        strengths(arguments.dataset, seeds, arguments.options)
    else:
        joining(arguments.dataset, seeds, arguments.options, arguments.market, arguments.round)


if __name__ == "__main__":
    main()
