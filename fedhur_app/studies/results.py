"""What the completed runs of a study say: summaries, paired tests, gains, fairness, traffic."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedhur_app.evaluation.statistics import PairedTest, Summary, holm, paired_test, summarise
from fedhur_app.reporting.comparison import seed_differences, shared_seeds, user_differences_of
from fedhur_app.reporting.outcomes import TESTED, Outcome
from fedhur_app.studies import fairness, traffic
from fedhur_app.studies.definition import Definition
from fedhur_app.studies.plan import StudyRun


@dataclass(frozen=True)
class Tested:
    """One arm against the arm that all are tested against, in one metric on one data.

    Attributes:
        data: Label of the data.
        metric: Such as `ndcg@10`.
        level: What is paired, `seeds` or `users`.
        arm: The arm.
        against: The other one.
        test: Differences are `arm` minus `against`.
        spread: Of the differences over seeds; without values for users.
        t_holm: p value of the t test after Holm's correction over the arms of this data, metric and level.
        wilcoxon_holm: Likewise of the signed-rank test.
    """

    data: str
    metric: str
    level: Literal["seeds", "users"]
    arm: str
    against: str
    test: PairedTest
    spread: Summary
    t_holm: float
    wilcoxon_holm: float


@dataclass(frozen=True)
class Measured:
    """A number of an arm on one data over the seeds.

    Attributes:
        data: Label of the data.
        arm: The arm.
        over: The arm it is relative to, or "".
        name: What is measured.
        summary: Its values, one a seed.
    """

    data: str
    arm: str
    over: str
    name: str
    summary: Summary


class Results:
    """The outcomes of a study by data and arm.

    Args:
        definition: The study.
        outcomes: Of all its runs.
    """

    def __init__(self, definition: Definition, outcomes: Sequence[Outcome]) -> None:
        self.definition = definition
        self.data = list(definition.datasets)
        self.cells: dict[tuple[str, str], list[Outcome]] = {
            (data, arm): [] for data in self.data for arm in self.arms_on(data)
        }
        for outcome in outcomes:
            if outcome.status == "completed":
                self.cells[key_of(outcome)].append(outcome)
        self.k = outcomes[0].run.settings.evaluation.k

    def arms_on(self, data: str) -> list[str]:
        """Names of the arms that run on the data of a label."""
        return [arm.name for arm in self.definition.arms_on(data)]

    @property
    def metric(self) -> str:
        """The study's metric with its list length, such as `ndcg@10`."""
        return f"{self.definition.metric}@{self.k}"

    @cached_property
    def columns(self) -> list[str]:
        """All columns of results.csv that some run has."""
        return list(dict.fromkeys(column for done in self.cells.values() for each in done for column in each.values))

    @cached_property
    def summaries(self) -> dict[tuple[str, str], dict[str, Summary]]:
        """Over the completed seeds of every value, by data and arm, then by column of results.csv."""
        return {
            key: {
                column: summarise([outcome.values[column] for outcome in done if column in outcome.values])
                for column in self.columns
            }
            for key, done in self.cells.items()
        }

    @cached_property
    def histories(self) -> dict[tuple[str, str], list[traffic.History]]:
        """Lines of history.jsonl of every completed run that has them."""
        return {
            key: [
                [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                for outcome in done
                if (path := outcome.run.folder / "history.jsonl").is_file()
            ]
            for key, done in self.cells.items()
        }

    @cached_property
    def tests(self) -> list[Tested]:
        """Every arm against `against`, by seeds and by users."""
        against = self.definition.against
        return [] if against is None else [each for data in self.data for each in self._tests_on(data, against)]

    def _tests_on(self, data: str, against: str) -> Iterator[Tested]:
        arms = self.arms_on(data)
        others = [arm for arm in arms if arm != against] if against in arms else []
        pairs = {arm: shared_seeds(self.cells[data, arm], self.cells[data, against]) for arm in others}
        levels: tuple[Literal["seeds", "users"], ...] = ("seeds", "users")
        for base in TESTED:
            metric = f"{base}@{self.k}"
            for level in levels:
                differences = {
                    arm: seed_differences(shared, f"test_{metric}")
                    if level == "seeds"
                    else user_differences_of(shared, base)
                    for arm, shared in pairs.items()
                }
                tests = [paired_test(differences[arm]) for arm in others]
                t_holm, wilcoxon_holm = holm([t.t_p for t in tests]), holm([t.wilcoxon_p for t in tests])
                for number, (arm, test) in enumerate(zip(others, tests, strict=True)):
                    spread = summarise(differences[arm] if level == "seeds" else [])
                    p_values = float(t_holm[number]), float(wilcoxon_holm[number])
                    yield Tested(data, metric, level, arm, against, test, spread, *p_values)

    def seed_gains(self, data: str, arm: str, over: str) -> list[tuple[int, fairness.Gain]]:
        """Seed and gain of each pair of runs with users; none of an arm over itself."""
        if arm == over or (data, over) not in self.cells:
            return []
        shared = shared_seeds(self.cells[data, arm], self.cells[data, over])
        metric = self.definition.metric
        return [
            (one.run.seed, fairness.gain(one.users, two.users, metric))
            for one, two in shared
            if one.users and two.users
        ]

    @cached_property
    def gains(self) -> list[Measured]:
        """Over each arm of `gain`: who loses, and how much those lose who gain least."""
        found = []
        for data, arm in self.cells:
            for over in self.definition.gain:
                gains = [each for _, each in self.seed_gains(data, arm, over)]
                for who in ("clients", "users"):
                    values = [getattr(each, f"of_{who}") for each in gains]
                    for name, of in (
                        (f"{who} that lose", fairness.losing),
                        (f"mean gain of {who}", lambda v: float(v.mean()) if len(v) else math.nan),
                        (f"gain of the worst 10 % of {who}", fairness.worst_mean),
                    ):
                        if gains:
                            found.append(Measured(data, arm, over, name, _summary([of(v) for v in values])))
        return found

    @cached_property
    def fairness(self) -> list[Measured]:
        """How evenly the metric is spread over users and clients."""
        found = []
        for (data, arm), done in self.cells.items():
            by_name: dict[str, list[float]] = {}
            for outcome in (each for each in done if each.users):
                values = outcome.users[self.definition.metric]
                _, of_clients, _ = fairness.client_means(outcome.users["client"], values)
                parts = fairness.activity_means(outcome.users["interactions"], values)
                numbers = {f"activity {place} of {len(parts)}": value for place, value in enumerate(parts, 1)}
                for who, each in (("users", values), ("clients", of_clients)):
                    numbers |= {f"worst 10 % of {who}": fairness.worst_mean(each), f"Gini, {who}": fairness.gini(each)}
                for name, value in numbers.items():
                    by_name.setdefault(name, []).append(value)
            found += [Measured(data, arm, "", name, _summary(values)) for name, values in by_name.items()]
            for over in self.definition.gain:
                gains = [each.of_users for _, each in self.seed_gains(data, arm, over)]
                if gains:
                    # Two numbers, since many users have the same value in both.
                    better, worse = (
                        [fairness.losing(-each) for each in gains],
                        [fairness.losing(each) for each in gains],
                    )
                    found.append(Measured(data, arm, over, "users better", _summary(better)))
                    found.append(Measured(data, arm, over, "users worse", _summary(worse)))
        return found

    def budgets_on(self, data: str) -> list[float]:
        """Budgets in MiB at which the arms are compared on one data."""
        return traffic.budgets([history for arm in self.arms_on(data) for history in self.histories[data, arm]])

    def within(self, data: str, arm: str, budget: float) -> Summary:
        """Best validation within a budget of MiB over seeds; without values where a seed has none."""
        values = [traffic.within(history, self.metric, budget) for history in self.histories[data, arm]]
        return summarise([] if any(map(math.isnan, values)) else values)


def key_of(outcome: Outcome) -> tuple[str, str]:
    """Data and arm of a study's outcome."""
    run = outcome.run
    assert isinstance(run, StudyRun)
    return run.data, run.arm.name


def _summary(values: Sequence[float]) -> Summary:
    return summarise([value for value in values if not math.isnan(value)])
