"""The report on markets: who gains and who loses against training alone."""

import math
from pathlib import Path

from fedhur_app.config import Settings
from fedhur_app.evaluation.ranking import metric_label
from fedhur_app.evaluation.statistics import Summary
from fedhur_app.files import write_text
from fedhur_app.reporting.comparison import notes_on_runs, spread_text
from fedhur_app.reporting.figures import Picture, draw_curves, draw_tables
from fedhur_app.reporting.item_tables import ItemTables, distances_to_others, distances_to_shared, read_item_tables
from fedhur_app.reporting.market_numbers import MarketChange, MarketStudy
from fedhur_app.reporting.outcomes import Outcome
from fedhur_app.reporting.tables import Table, number_text, p_text, to_csv, to_latex, to_markdown

SHOWN = ("recall", "ndcg", "mrr", "auc")
LEVEL = 0.05  # of a test that counts as significant
WITH_SHARED_TABLE = "fecosr"  # the algorithm that has a global item table


def trains_alone(settings: Settings) -> bool:
    """Whether every market trains for itself: the reference that changes are measured against."""
    return settings.algorithm == "local" and not settings.centralised


def write_market_report(outcomes: list[Outcome], folder: Path, picture: Picture = "pca") -> str:
    """Write report.md, report.tex, three CSV files and the figures; returns the text of report.md.

    Args:
        outcomes: Of all runs, in the order of `compare.plan`; exactly one strategy trains every market alone.
        folder: Where to write.
        picture: How item tables come into the plane.

    Raises:
        ConfigError: The data set has no markets.
    """
    reference = next(o.run.strategy for o in outcomes if trains_alone(o.run.settings))
    study = MarketStudy(outcomes, reference)
    changes = {market: study.changes(market) for market in study.markets}
    history = study.history()
    write_text(folder / "markets.csv", to_csv(["market", "method", "seed", "metric", "value"], study.rows()))
    write_text(folder / "changes.csv", _changes_csv(study, changes))
    write_text(folder / "history.csv", to_csv(["method", "seed", "market", "round", "metric", "value"], history))
    k = outcomes[0].run.settings.evaluation.k
    tables = [_market_table(study, market, changes[market], k) for market in study.markets]
    notes = [*notes_on_runs(outcomes), *_notes(study)]
    if study.markets:
        tables.append(_summary_table(study, changes))
    if history:
        draw_curves(history, metric_label("ndcg", k), folder)
        notes.append("curves.png, curves.pdf: validation NDCG of every market after every round.")
    picture_table, picture_notes = _item_tables(study, outcomes, folder, picture)
    tables += picture_table
    title = _title(study, outcomes)
    markdown = to_markdown(title, tables, notes + picture_notes)
    write_text(folder / "report.md", markdown)
    write_text(folder / "report.tex", to_latex(title, tables, notes + picture_notes))
    return markdown


def _title(study: MarketStudy, outcomes: list[Outcome]) -> str:
    seeds = ", ".join(map(str, study.seeds))
    name = "seed" if len(study.seeds) == 1 else "seeds"
    return f"Markets of {outcomes[0].run.dataset}, {name} {seeds}"


def _changes_csv(study: MarketStudy, changes: dict[int, list[MarketChange]]) -> str:
    head = [*("market", "rich", "method", "seeds", "change_percent", "ci_low", "ci_high", "pairs", "difference")]
    head += ["t_p", "t_p_holm", "wilcoxon_p", "wilcoxon_p_holm", "lose", "win"]
    rows = [
        [
            *(study.name(market), int(market == study.rich), c.method),
            *(c.relative.n, c.relative.mean, c.relative.low, c.relative.high, c.test.n, c.test.difference),
            *(c.test.t_p, c.t_holm, c.test.wilcoxon_p, c.wilcoxon_holm, c.lose, c.win),
        ]
        for market, found in changes.items()
        for c in found
    ]
    return to_csv(head, rows)


def _market_table(study: MarketStudy, market: int, changes: list[MarketChange], k: int) -> Table:
    """One row a method."""
    by_method = {change.method: change for change in changes}
    head = ["method", "seeds", *(_heading(name, k) for name in SHOWN), "change, %", "95 % interval"]
    head += ["t p (Holm)", "W p (Holm)", "lose, %", "win, %"]
    summaries = {name: [study.summary(method, market, name) for method in study.methods] for name in SHOWN}
    rows = [
        [
            *(method, str(summaries["ndcg"][i].n)),
            *(spread_text(summaries[name][i]) for name in SHOWN),
            *_change_cells(by_method.get(method)),
        ]
        for i, method in enumerate(study.methods)
    ]
    bold = {place for j, name in enumerate(SHOWN, 2) for place in _best(summaries[name], j)}
    return Table(_market_title(study, market), head, rows, 1, bold)


def _heading(name: str, k: int) -> str:
    return metric_label({"recall": "Recall"}.get(name, name.upper()), k) if name != "auc" else "AUC"


def _market_title(study: MarketStudy, market: int) -> str:
    count = study.training_interactions[market]
    facts = f"{study.test_users[market]} test users" + (f", {count} training interactions" if count else "")
    if market == study.rich:
        return f"Market {study.name(market)} ({facts}), the rich market: a loss here is source degradation"
    return f"Market {study.name(market)} ({facts}): a loss here is negative transfer"


def _change_cells(change: MarketChange | None) -> list[str]:
    """From the change to the share of winners; the reference has none."""
    if change is None:
        return ["-"] * 6
    relative = change.relative
    interval = "-" if relative.n < 2 else f"[{_percent(relative.low)}, {_percent(relative.high)}]"
    ps = [p_text(change.t_holm), p_text(change.wilcoxon_holm)]
    return [_percent(relative.mean), interval, *ps, *(number_text(100 * s, 1) for s in (change.lose, change.win))]


def _percent(value: float) -> str:
    text = number_text(value, 2)
    return f"+{text}" if value > 0 and float(text) else text


def _best(column: list[Summary], j: int) -> set[tuple[int, int]]:
    means = [summary.mean for summary in column]
    present = [mean for mean in means if not math.isnan(mean)]
    return {(i, j) for i, mean in enumerate(means) if len(present) > 1 and mean == max(present)}


def _summary_table(study: MarketStudy, changes: dict[int, list[MarketChange]]) -> Table:
    """All markets in one row a method."""
    head = ["method", "rich market, %", "significant", "others, mean %", "negative transfer", "of these significant"]
    rows = []
    for method in (method for method in study.methods if method != study.reference):
        found = {market: next(c for c in list_ if c.method == method) for market, list_ in changes.items()}
        rich = found.pop(study.rich) if study.rich is not None else None
        means = [c.relative.mean for c in found.values() if c.relative.n]
        worse = [c for c in found.values() if c.relative.mean < 0]
        rows.append(
            [
                method,
                _percent(rich.relative.mean) if rich else "-",
                _significant(rich) if rich else "-",
                _percent(sum(means) / len(means)) if means else "-",
                f"{len(worse)} of {len(means)}",
                str(sum(c.t_holm < LEVEL and c.test.difference < 0 for c in worse)),
            ]
        )
    return Table(f"All markets: change of NDCG against {study.reference}", head, rows, 1, set())


def _significant(change: MarketChange) -> str:
    return "-" if math.isnan(change.t_holm) else "yes" if change.t_holm < LEVEL else "no"


def _notes(study: MarketStudy) -> list[str]:
    if not study.markets:
        return []
    notes = [
        "Metrics are means over a market's test users, then mean ± standard deviation (n - 1) over seeds. Bold: the "
        "best mean. The rich market is the one with the most training interactions (test users, where these are "
        "not known).",
        f"Change: NDCG relative to {study.reference}, which trains every market alone, in %; mean over the seeds that "
        "both completed, interval: Student's t over seeds. A seed in which training alone scores 0 has no "
        "relative change "
        "and is left out of it, not of the tests.",
    ]
    if study.anew:
        notes.append(
            "The data are drawn anew for every seed, so a user number is another user in each of them: the tests pair "
            "users within a seed and pool these pairs of all seeds. Pairs of one seed share their models."
        )
    else:
        notes.append(
            "Tests are paired by user: one value a user, the difference averaged over the seeds in which both methods "
            "tested that user. Users share seeds and models: the tests tell about more users, not about more seeds."
        )
    notes.append(
        f"t: paired t test, W: Wilcoxon's signed ranks, both after Holm's correction over the methods of a market. "
        f"Significant: the corrected p of the t test is below {LEVEL}. Lose, win: share of these pairs with a lower, a "
        "higher NDCG than training alone."
    )
    notes.append(
        "Negative transfer: markets other than the rich one whose mean change is below 0; how many of these are "
        "significant is not corrected for the number of markets. A p value of - is a test that cannot be made."
    )
    return notes


def _item_tables(
    study: MarketStudy, outcomes: list[Outcome], folder: Path, picture: Picture
) -> tuple[list[Table], list[str]]:
    """Picture and distances of the item tables, for the first completed run that has a global table."""
    runs = [o for o in outcomes if o.run.settings.algorithm == WITH_SHARED_TABLE and o.status == "completed"]
    if not runs:
        return [], []
    moved = runs[0].run.settings.fecosr.regulariser == "relation"
    tables = read_item_tables(runs[0].run.folder, moved)
    if tables is None:
        return [], []
    label = runs[0].run.label
    if not tables.comparable:
        widths = ", ".join(f"{study.name(m)} {table.shape[1]}" for m, table in tables.markets.items())
        return [], [
            f"Item tables of {label} have different widths ({widths}, global {tables.shared.shape[1]}): they lie in "
            "different spaces, so there is no picture and no distance between them."
        ]
    notes = ["Distances are Euclidean, between the rows of one item, at the end of the last round; means over items."]
    if moved:
        notes.append(
            "The regulariser compares relations between items, so every table was first brought into the coordinates "
            "of G, as uploads are (a rotation, and for other widths the best low-rank map)."
        )
    if tables.shared.shape[1] > 1:
        draw_tables(tables, {market: study.name(market) for market in tables.markets}, picture, folder)
        notes.append(f"tables.png, tables.pdf: these tables in the plane ({picture}), one fit for all, G in black.")
    return [_distance_table(study, tables, label)], notes


def _distance_table(study: MarketStudy, tables: ItemTables, label: str) -> Table:
    to_shared, to_others = distances_to_shared(tables), distances_to_others(tables)
    rows = [
        [
            study.name(market),
            number_text(to_shared[market], 4),
            number_text(to_others[market], 4),
            number_text(to_shared[market] / to_others[market] if to_others[market] else math.nan, 3),
        ]
        for market in tables.markets
    ]
    head = ["market", "to G", "to the other markets", "ratio"]
    return Table(f"How far the global item table G lies from those of the markets, {label}", head, rows, 1, set())
