"""What methods do to single markets: metrics, changes against training alone, tests over users, rounds.

A run's folder tells it: `users.npz` (with the market of every user), `history.jsonl` (validation of every market after
every round) and `config.yaml` (names of the markets).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhur_app.config import ConfigError, parse_yaml, read_market_names
from fedhur_app.data.shards import load_shard, shard_path
from fedhur_app.evaluation.ranking import METRICS
from fedhur_app.evaluation.statistics import PairedTest, Summary, holm, paired_test, summarise, user_differences
from fedhur_app.reporting.outcomes import Outcome

# A user's mean difference is a mean of floats: what is below this is no difference.
_NO_DIFFERENCE = 1e-12


@dataclass(frozen=True)
class MarketChange:
    """One method against training alone, in one market, by NDCG.

    Attributes:
        method: The method.
        market: Number of the market.
        relative: Change of the mean over users in %, over the seeds that both completed.
        test: Of the users' differences, method minus training alone.
        t_holm: p value of the t test after Holm's correction over the methods of the market.
        wilcoxon_holm: p value of the signed-rank test, corrected likewise.
        lose: Share of users with a lower NDCG.
        win: Share of users with a higher one.
    """

    method: str
    market: int
    relative: Summary
    test: PairedTest
    t_holm: float
    wilcoxon_holm: float
    lose: float
    win: float


class MarketStudy:
    """Completed runs, seen by market.

    Args:
        outcomes: Of all runs; only completed ones count.
        reference: The method that trains every market alone.

    Raises:
        ConfigError: A run's users have no market.
    """

    def __init__(self, outcomes: list[Outcome], reference: str) -> None:
        self.reference = reference
        self.methods = list(dict.fromkeys(outcome.run.strategy for outcome in outcomes))
        self.seeds = list(dict.fromkeys(outcome.run.seed for outcome in outcomes))
        self.runs = {(o.run.strategy, o.run.seed): o for o in outcomes if o.status == "completed"}
        for outcome in self.runs.values():
            if "market" not in outcome.users:
                raise ConfigError(
                    f"data set {outcome.run.dataset} has no markets (users.npz in {outcome.run.folder} has no column "
                    "market): choose one that has, or use `fedhur compare`"
                )
        configs = [outcome.run.folder / "config.yaml" for outcome in self.runs.values()]
        self._names = max((read_market_names(path) for path in configs), key=len, default=[])
        self.anew = _drawn_anew(outcomes[0].run.dataset, configs)
        self.markets = sorted({int(m) for o in self.runs.values() for m in np.unique(o.users["market"])})
        self.test_users = {market: self._test_users(market) for market in self.markets}
        self.training_interactions = {market: self._training_interactions(market) for market in self.markets}
        sizes = {market: (self.training_interactions[market] or 0, self.test_users[market]) for market in self.markets}
        self.rich = max(self.markets, key=lambda market: sizes[market], default=None)

    def name(self, market: int) -> str:
        """Name of a market, or its number."""
        return self._names[market] if market < len(self._names) else str(market)

    def _test_users(self, market: int) -> int:
        return max(int((outcome.users["market"] == market).sum()) for outcome in self.runs.values())

    def users(self, method: str, seed: int, market: int, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """(n,) numbers of the market's users and (n,) their values; empty where the run did not complete."""
        outcome = self.runs.get((method, seed))
        if outcome is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        inside = outcome.users["market"] == market
        return outcome.users["user"][inside], outcome.users[metric][inside]

    def mean(self, method: str, seed: int, market: int, metric: str) -> float:
        """Mean over the market's users; NaN over nobody."""
        _, values = self.users(method, seed, market, metric)
        return float(values.mean()) if len(values) else math.nan

    def summary(self, method: str, market: int, metric: str) -> Summary:
        """The mean over users, over seeds."""
        return _summary([self.mean(method, seed, market, metric) for seed in self.seeds])

    def rows(self) -> Iterator[tuple[str, str, int, str, float]]:
        """Market, method, seed, metric, value: means over users, and the number of users."""
        for market in self.markets:
            for method, seed in self.runs:
                users, _ = self.users(method, seed, market, "ndcg")
                if len(users):
                    for metric in METRICS:
                        yield self.name(market), method, seed, metric, self.mean(method, seed, market, metric)
                    yield self.name(market), method, seed, "users", float(len(users))

    def changes(self, market: int) -> list[MarketChange]:
        """Every method but the reference against it."""
        methods = [method for method in self.methods if method != self.reference]
        differences = [self._differences(method, market) for method in methods]
        tests = [paired_test(values) for values in differences]
        t_holm, wilcoxon_holm = (holm([getattr(t, name) for t in tests]).tolist() for name in ("t_p", "wilcoxon_p"))
        return [
            MarketChange(
                method,
                market,
                self._relative(method, market),
                test,
                t_p,
                wilcoxon_p,
                float((values < -_NO_DIFFERENCE).mean()) if len(values) else math.nan,
                float((values > _NO_DIFFERENCE).mean()) if len(values) else math.nan,
            )
            for method, values, test, t_p, wilcoxon_p in zip(
                methods, differences, tests, t_holm, wilcoxon_holm, strict=True
            )
        ]

    def _relative(self, method: str, market: int) -> Summary:
        changes = []
        for seed in self.seeds:
            alone = self.mean(self.reference, seed, market, "ndcg")
            if alone > 0:
                changes.append(100 * (self.mean(method, seed, market, "ndcg") / alone - 1))
        return _summary(changes)

    def _differences(self, method: str, market: int) -> np.ndarray:
        """One value a user; one a user and seed where data are drawn anew."""
        pairs = []
        for number, seed in enumerate(self.seeds):
            two = [self.users(name, seed, market, "ndcg") for name in (method, self.reference)]
            one, other = ((users + self.anew * number * 2**40, values) for users, values in two)
            pairs.append((one, other))
        return user_differences(pairs)

    def history(self) -> list[tuple[str, int, str, int, str, float]]:
        """Method, seed, market, round, metric, value: validation of every market after every round."""
        return [
            (method, seed, self.name(int(market)), int(line["round"]), metric, float(value))
            for (method, seed), outcome in self.runs.items()
            for line in _history(outcome.run.folder)
            for market, metrics in line.get("markets", {}).items()
            for metric, value in metrics.items()
            if value is not None
        ]

    def _training_interactions(self, market: int) -> int | None:
        """Training rows of a market in the first completed run; None where its shards are not on this machine."""
        for outcome in self.runs.values():
            data = parse_yaml((outcome.run.folder / "config.yaml").read_text(encoding="utf-8")).get("data")
            path = shard_path(Path(data["folder"]), market) if isinstance(data, dict) and "folder" in data else None
            # Users of all markets in one place are one client: then shards are no markets.
            if path and path.is_file() and not outcome.run.settings.centralised:
                return len(load_shard(path).train)
        return None


def _summary(values: list[float]) -> Summary:
    return summarise([value for value in values if not math.isnan(value)])


def _history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]


def _drawn_anew(dataset: str, configs: list[Path]) -> bool:
    """Whether another seed means other data, so that a user number is another user there."""
    data = [parse_yaml(path.read_text(encoding="utf-8")).get("data") for path in configs]
    prints = {entry.get("fingerprint") for entry in data if isinstance(entry, dict)}
    return dataset == "synthetic" or len(prints) > 1
