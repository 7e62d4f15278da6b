"""The report of a comparison: means with intervals, paired tests, and tables of both."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedhur_app.data.catalog import DATASETS
from fedhur_app.evaluation.statistics import (
    PairedTest,
    Summary,
    holm,
    paired_test,
    summarise,
    user_differences,
)
from fedhur_app.files import write_text
from fedhur_app.reporting.outcomes import TESTED, Outcome
from fedhur_app.reporting.tables import Table, number_text, p_text, to_csv, to_latex, to_markdown

P_VALUES = ("t_p", "t_p_holm", "wilcoxon_p", "wilcoxon_p_holm")
KIB, MIB = 2**10, 2**20
# Columns of what travelled: name in results.csv, for people, unit, digits.
SENT = (
    ("bytes_up", "MiB up", MIB, 2),
    ("bytes_down", "MiB down", MIB, 2),
    ("bytes_up_per_client_round", "KiB up a client and round", KIB, 1),
    ("bytes_down_per_client_round", "KiB down a client and round", KIB, 1),
)


@dataclass(frozen=True)
class Comparison:
    """One strategy against the best of the others in one metric.

    Attributes:
        metric: Such as `ndcg@10`.
        level: What is paired, `seeds` or `users`.
        strategy: The strategy.
        against: The other strategy with the highest mean of the metric.
        test: Differences are `strategy` minus `against`.
        t_holm: p value of the t test after Holm's correction.
        wilcoxon_holm: p value of the signed-rank test after Holm's correction.
    """

    metric: str
    level: Literal["seeds", "users"]
    strategy: str
    against: str
    test: PairedTest
    t_holm: float
    wilcoxon_holm: float


def summaries(outcomes: list[Outcome]) -> dict[str, dict[str, Summary]]:
    """Summary over the completed seeds of every value, by strategy and column of results.csv."""
    columns = _columns(outcomes)
    return {
        strategy: {
            column: summarise([outcome.values[column] for outcome in completed if column in outcome.values])
            for column in columns
        }
        for strategy, completed in _completed(outcomes).items()
    }


def paired_tests(outcomes: list[Outcome]) -> list[Comparison]:
    """Every strategy against the best of the others, in each tested metric, paired by seeds and by users.

    Means that decide who is best are over each strategy's completed seeds; a test uses the seeds that both completed.
    Holm's correction is over the comparisons of one metric, level and kind of test. Best against second best is one
    comparison, though it stands in two rows.
    """
    found = []
    means = {name: {c: s.mean for c, s in columns.items()} for name, columns in summaries(outcomes).items()}
    completed = _completed(outcomes)
    for base in TESTED:
        metric = f"{base}@{outcomes[0].run.settings.evaluation.k}"
        column = f"test_{metric}"
        mean = {name: values[column] for name, values in means.items() if not math.isnan(values.get(column, math.nan))}
        best = {
            name: max((other for other in mean if other != name), key=mean.__getitem__, default="") for name in mean
        }
        pairs = [(name, other) for name, other in best.items() if other]
        levels: tuple[Literal["seeds", "users"], ...] = ("seeds", "users")
        for level in levels:
            tests = []
            for name, other in pairs:
                shared = shared_seeds(completed[name], completed[other])
                differences = (
                    seed_differences(shared, column) if level == "seeds" else user_differences_of(shared, base)
                )
                tests.append(paired_test(differences))
            t_holm = _holm_of_pairs(pairs, [test.t_p for test in tests])
            wilcoxon_holm = _holm_of_pairs(pairs, [test.wilcoxon_p for test in tests])
            found += [
                Comparison(metric, level, *pair, test, t_p, wilcoxon_p)
                for pair, test, t_p, wilcoxon_p in zip(pairs, tests, t_holm, wilcoxon_holm, strict=True)
            ]
    return found


def _completed(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """The completed runs of every strategy, also of one that has none."""
    by_strategy: dict[str, list[Outcome]] = {outcome.run.strategy: [] for outcome in outcomes}
    for outcome in outcomes:
        if outcome.status == "completed":
            by_strategy[outcome.run.strategy].append(outcome)
    return by_strategy


def _columns(outcomes: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(column for outcome in outcomes for column in outcome.values))


def shared_seeds(first: list[Outcome], second: list[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Pairs of completed runs with the same seed."""
    by_seed = {outcome.run.seed: outcome for outcome in second}
    return [(outcome, by_seed[outcome.run.seed]) for outcome in first if outcome.run.seed in by_seed]


def seed_differences(shared: list[tuple[Outcome, Outcome]], column: str) -> list[float]:
    """Differences of a column of results.csv in pairs of runs."""
    return [
        first.values[column] - second.values[column]
        for first, second in shared
        if column in first.values and column in second.values
    ]


def user_differences_of(shared: list[tuple[Outcome, Outcome]], name: str) -> np.ndarray:
    """One difference a user in a metric, the mean over pairs of runs of one seed."""

    def values_of(outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
        return outcome.users["user"], outcome.users[name]

    return user_differences([(values_of(one), values_of(two)) for one, two in shared if one.users and two.users])


def _holm_of_pairs(pairs: list[tuple[str, str]], p_values: list[float]) -> list[float]:
    """Holm's correction over distinct pairs: the same two strategies the other way round have the same p value."""
    distinct = dict(zip(map(frozenset, pairs), p_values, strict=True))
    corrected = dict(zip(distinct, holm(list(distinct.values())).tolist(), strict=True))
    return [corrected[frozenset(pair)] for pair in pairs]


def write_report(outcomes: list[Outcome], folder: Path) -> str:
    """Write results.csv, summary.csv, tests.csv, table.md and table.tex; returns the text of table.md.

    Args:
        outcomes: Of all runs, in the order of :func:`plan`.
        folder: Where to write.
    """
    summary, tests = summaries(outcomes), paired_tests(outcomes)
    columns = _columns(outcomes)
    write_text(
        folder / "results.csv",
        to_csv(
            ["strategy", "seed", "status", "reason", *columns],
            [
                [o.run.strategy, o.run.seed, o.status, o.reason, *(o.values.get(column) for column in columns)]
                for o in outcomes
            ],
        ),
    )
    write_text(
        folder / "summary.csv",
        to_csv(
            ["strategy", "metric", "n", "mean", "sd", "ci_low", "ci_high"],
            [
                [strategy, column, s.n, s.mean, s.sd, s.low, s.high]
                for strategy, by_column in summary.items()
                for column, s in by_column.items()
            ],
        ),
    )
    write_text(
        folder / "tests.csv",
        to_csv(
            [*("metric", "pairs", "strategy", "against", "n", "difference"), *P_VALUES],
            [[c.metric, c.level, c.strategy, c.against, c.test.n, c.test.difference, *_p_values(c)] for c in tests],
        ),
    )
    title, tables, notes = _title(outcomes), _tables(summary, tests), _notes(outcomes, tests)
    markdown = to_markdown(title, tables, notes)
    write_text(folder / "table.md", markdown)
    write_text(folder / "table.tex", to_latex(title, tables, notes))
    return markdown


def _title(outcomes: list[Outcome]) -> str:
    strategies = dict.fromkeys(outcome.run.strategy for outcome in outcomes)
    seeds = dict.fromkeys(str(outcome.run.seed) for outcome in outcomes)
    name = "seed" if len(seeds) == 1 else "seeds"
    return f"{', '.join(strategies)} on {outcomes[0].run.settings.dataset.name}, {name} {', '.join(seeds)}"


def _tables(summary: dict[str, dict[str, Summary]], tests: list[Comparison]) -> list[Table]:
    columns = list(next(iter(summary.values())))  # the same of all strategies
    if not columns:
        return []  # no run completed

    def metrics_of(part: str) -> list[tuple[str, str]]:
        return [(column, column.removeprefix(part)) for column in columns if column.startswith(part)]

    cost = [
        *SENT,
        ("rounds", "rounds", 1, 1),
        ("best_round", "best round", 1, 1),
        ("seconds", "seconds", 1, 1),
    ]
    tables = [
        _table("Test, mean ± standard deviation", summary, metrics_of("test_"), lambda s, _: spread_text(s)),
        _table(
            "Test, 95 % confidence interval of the mean", summary, metrics_of("test_"), lambda s, _: interval_text(s)
        ),
        _table(
            "Validation (best round), mean ± standard deviation",
            summary,
            metrics_of("validation_"),
            lambda s, _: spread_text(s),
        ),
        _table(
            "Cost, mean ± standard deviation",
            summary,
            [(column, name) for column, name, _, _ in cost],
            lambda s, j: spread_text(s, cost[j][2], cost[j][3]),
            lowest=True,
            plain=("rounds", "best_round"),
        ),
    ]
    if tests:
        tables.append(_test_table(tests))
    return tables


def _table(
    title: str,
    summary: dict[str, dict[str, Summary]],
    columns: list[tuple[str, str]],
    cell: Callable[[Summary, int], str],
    lowest: bool = False,
    plain: tuple[str, ...] = (),
) -> Table:
    """One row a strategy, one column a value, the best mean in bold (not in the columns `plain`)."""
    empty = summarise([])
    rows, bold = [], set()
    for strategy, by_column in summary.items():
        found = [by_column.get(column, empty) for column, _ in columns]
        seeds = max((s.n for s in by_column.values()), default=0)
        rows.append([strategy, str(seeds), *(cell(s, j) for j, s in enumerate(found))])
    for j, (column, _) in enumerate(columns):
        means = [by_column.get(column, empty).mean for by_column in summary.values()]
        present = [mean for mean in means if not math.isnan(mean)]
        if len(present) > 1 and column not in plain:
            best = min(present) if lowest else max(present)
            bold |= {(i, j + 2) for i, mean in enumerate(means) if mean == best and rows[i][j + 2] != "-"}
    return Table(title, ["strategy", "seeds", *(name for _, name in columns)], rows, 1, bold)


def _test_table(tests: list[Comparison]) -> Table:
    head = ["metric", "pairs", "strategy", "against", "n", "difference", "t p", "t p (Holm)", "W p", "W p (Holm)"]
    rows = [
        [c.metric, c.level, c.strategy, c.against, str(c.test.n), number_text(c.test.difference, 4)]
        + [p_text(p) for p in _p_values(c)]
        for c in tests
    ]
    return Table("Paired tests (t test, and W: Wilcoxon's signed ranks)", head, rows, 4, set())


def _p_values(comparison: Comparison) -> tuple[float, ...]:
    """In the order of :data:`P_VALUES`."""
    test = comparison.test
    return test.t_p, comparison.t_holm, test.wilcoxon_p, comparison.wilcoxon_holm


def spread_text(summary: Summary, unit: float = 1, digits: int = 4) -> str:
    """Mean ± standard deviation of a value divided by `unit`; the mean alone of one value."""
    mean = number_text(summary.mean / unit, digits)
    return mean if summary.n < 2 else f"{mean} ± {number_text(summary.sd / unit, digits)}"


def interval_text(summary: Summary, digits: int = 4) -> str:
    """The 95 % confidence interval of a mean."""
    return "-" if summary.n < 2 else f"[{number_text(summary.low, digits)}, {number_text(summary.high, digits)}]"


def _notes(outcomes: list[Outcome], tests: list[Comparison]) -> list[str]:
    """What a reader of the tables must know, failed runs first."""
    notes = notes_on_runs(outcomes)
    notes.append(
        "Mean and standard deviation (n - 1) are over seeds, intervals are Student's t over seeds. Bold: the best mean "
        "of a column. Seconds are wall time, longer where several runs share the machine."
    )
    if not tests:
        return notes
    notes.append(
        "Every strategy is tested against the one with the best mean among the others; the difference is strategy "
        "minus against. Holm's correction is over the comparisons of one metric, one kind of pairs and one kind of "
        "test; best against second best stands in two rows and counts once. It does not cover that the opponent was "
        "chosen by the same runs."
    )
    if any(math.isnan(c.test.t_p) or math.isnan(c.test.wilcoxon_p) for c in tests):
        notes.append(
            "A p value of - is a test that cannot be made: fewer than two pairs, or differences that are all the same."
        )
    notes += [
        f"Pairs of seeds: with {n} seeds the smallest possible two-sided p of Wilcoxon's test is 2^(1-{n}) = "
        f"{2.0 ** (1 - n):.2g}, however clear the difference."
        for n in sorted({c.test.n for c in tests if c.level == "seeds" and c.test.n > 1})
    ]
    notes.append(
        "Pairs of users: one value a user, its difference averaged over the seeds in which both strategies tested it. "
        "These tests treat users as independent, but all users share the same seeds (splits and initialisations) and "
        "the models trained on each other's data: they tell about more users, not about more seeds."
    )
    entry = DATASETS.get(outcomes[0].run.settings.dataset.name)
    if entry is not None and entry.generate is not None:
        notes.append("Synthetic data are drawn anew for every seed: a user number is another user in each of them.")
    return notes


def notes_on_runs(outcomes: list[Outcome]) -> list[str]:
    """Runs that failed, are missing, lack clients, or were made by other code."""
    notes = [f"{o.run.label} failed and is left out: {o.reason}" for o in outcomes if o.status == "failed"]
    missing = [outcome.run.label for outcome in outcomes if outcome.status == "not run"]
    if missing:
        notes.append(f"These runs have not been made: {', '.join(missing)}.")
    notes += [f"{o.run.label}: {o.absent} clients did not answer at the test." for o in outcomes if o.absent]
    if len({outcome.code for outcome in outcomes if outcome.code}) > 1:
        notes.append("The runs were not all made by the same version of the code (versions in each config.yaml).")
    return notes
