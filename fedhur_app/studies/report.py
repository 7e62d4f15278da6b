"""The report of a study: report.md, the tables behind it as CSV, figures, study.json."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from fedhur_app.data.catalog import DATASETS
from fedhur_app.evaluation.statistics import Summary, summarise
from fedhur_app.files import read_json, write_json, write_text
from fedhur_app.reporting.comparison import KIB, P_VALUES, SENT, interval_text, notes_on_runs, spread_text
from fedhur_app.reporting.outcomes import Outcome
from fedhur_app.reporting.tables import Table, number_text, p_text, table_markdown, to_csv
from fedhur_app.studies import figures, traffic
from fedhur_app.studies.definition import Arm, Definition, Metric
from fedhur_app.studies.results import Measured, Results, Tested, key_of

_EMPTY = summarise([])
_NAMES = {"ndcg": "NDCG", "recall": "Recall", "mrr": "MRR"}
Special = Callable[[list[Any], Path], str]


def write_study(definition: Definition, about: dict[str, Any], outcomes: Sequence[Outcome], folder: Path) -> str:
    """Write all that is made of a study's runs; returns the text of report.md.

    Args:
        definition: The study.
        about: The beginning of study.json.
        outcomes: Of all runs, in the order of `plan`.
        folder: Of the study.
    """
    # What an earlier report of more arms or other tables left would look like a part of this one.
    for old in (entry for kind in ("figures", "tables") for entry in read_json(folder / "study.json").get(kind, [])):
        (folder / Path(str(old["file"])).name).unlink(missing_ok=True)
    results = Results(definition, outcomes)
    tables = _csv_files(results, outcomes, folder)
    special = special_report(about["study"])
    if special is not None and any(outcome.status == "completed" for outcome in outcomes):
        body = special([outcome.run for outcome in outcomes if outcome.status == "completed"], folder)
        drawn = [figures.Drawn(path.name, path.stem, "") for path in sorted(folder.glob("*.png"))]
        tables |= {path.name: path.stem for path in sorted(folder.glob("*.csv")) if path.name not in tables}
    else:
        drawn = figures.draw(results, folder)
        parts = [table_markdown(table) for data in results.data for table in _tables(results, data)]
        parts += [f"![{each.title}]({each.file})\n\n{each.title}. {each.says}\n" for each in drawn]
        body = "\n".join(parts)
    text = "\n".join([_head(definition, about, outcomes), body, *(f"- {note}" for note in _notes(results, outcomes))])
    write_text(folder / "report.md", text + "\n")
    write_json(
        folder / "study.json",
        about
        | {"figures": [asdict(each) for each in drawn]}
        | {"tables": [{"file": file, "title": title} for file, title in tables.items()]},
    )
    return text


def special_report(study: str) -> Special | None:
    """The function `report` of fedhur_app/studies/<study>.py; None where there is none."""
    name = study.replace("-", "_")
    module = f"fedhur_app.studies.{name}"
    if not name.isidentifier() or importlib.util.find_spec(module) is None:
        return None
    found: Special | None = getattr(importlib.import_module(module), "report", None)
    return found


# --- CSV ------------------------------------------------------------------------------------------------------------


def _csv_files(results: Results, outcomes: Sequence[Outcome], folder: Path) -> dict[str, str]:
    """Write the tables as CSV; returns their titles by file."""
    columns = results.columns
    files: dict[str, tuple[str, list[str], list[list[Any]]]] = {
        "results.csv": (
            "Every run",
            ["data", "arm", "seed", "status", "reason", *columns],
            [
                [*key_of(o), o.run.seed, o.status, o.reason, *(o.values.get(column) for column in columns)]
                for o in outcomes
            ],
        ),
        "summary.csv": (
            "Every value over the seeds",
            ["data", "arm", "metric", *_SUMMARY],
            [
                [*key, column, *_numbers(summary)]
                for key, by_column in results.summaries.items()
                for column, summary in by_column.items()
                if summary.n
            ],
        ),
    }
    if results.definition.against:
        files["tests.csv"] = (
            "Paired tests",
            ["data", "metric", "pairs", "arm", "against", "n", "difference", *P_VALUES],
            [
                [*(t.data, t.metric, t.level, t.arm, t.against), t.test.n, t.test.difference, *_p_values(t)]
                for t in results.tests
            ],
        )
    if "gain" in results.definition.tables:
        files["gain.csv"] = (
            "Who gains and who loses",
            ["data", "arm", "over", "measure", *_SUMMARY],
            _rows(results.gains),
        )
        files["gain-clients.csv"] = (
            "Gain of every client",
            ["data", "arm", "over", "seed", "client", "users", "gain"],
            [
                [data, arm, over, seed, *row]
                for data, arm in results.cells
                for over in results.definition.gain
                for seed, gain in results.seed_gains(data, arm, over)
                for row in zip(gain.clients.tolist(), gain.sizes.tolist(), gain.of_clients.tolist(), strict=True)
            ],
        )
    if "fairness" in results.definition.tables:
        files["fairness.csv"] = (
            "How evenly quality is spread",
            ["data", "arm", "over", "measure", *_SUMMARY],
            _rows(results.fairness),
        )
    if "traffic" in results.definition.tables:
        files["traffic.csv"] = (
            "Bytes by stage and record",
            ["data", "arm", "stage", "direction", "record", "bytes_per_client_round"],
            [
                [*key, *record, size]
                for key, histories in results.histories.items()
                for record, size in traffic.by_record(histories).items()
            ],
        )
        files["budgets.csv"] = (
            "Best validation within a budget of bytes",
            ["data", "arm", "mib", *_SUMMARY],
            [
                [data, arm, budget, *_numbers(results.within(data, arm, budget))]
                for data, arm in results.cells
                for budget in results.budgets_on(data)
            ],
        )
    for file, (_, head, rows) in files.items():
        write_text(folder / file, to_csv(head, rows))
    return {file: title for file, (title, _, _) in files.items()}


def _p_values(tested: Tested) -> tuple[float, ...]:
    """In the order of :data:`P_VALUES`."""
    return tested.test.t_p, tested.t_holm, tested.test.wilcoxon_p, tested.wilcoxon_holm


_SUMMARY = ("n", "mean", "sd", "ci_low", "ci_high")


def _numbers(summary: Summary) -> list[float]:
    return [summary.n, summary.mean, summary.sd, summary.low, summary.high]


def _rows(measured: list[Measured]) -> list[list[Any]]:
    return [[m.data, m.arm, m.over, m.name, *_numbers(m.summary)] for m in measured]


# --- tables of the report -------------------------------------------------------------------------------------------


def _tables(results: Results, data: str) -> list[Table]:
    tables = [_test_table(results, data), *_against_table(results, data), _cost_table(results, data)]
    wanted = results.definition.tables
    if "gain" in wanted:
        tables += [_measured(results.gains, data, over, f"Gain over {over}") for over in results.definition.gain]
    if "fairness" in wanted:
        tables.append(_measured(results.fairness, data, "", f"How evenly {results.metric} is spread"))
        tables += [_measured(results.fairness, data, over, f"Users against {over}") for over in results.definition.gain]
    if "traffic" in wanted:
        tables += [_traffic_table(results, data), _budget_table(results, data)]
    return [replace(table, title=f"{table.title}; data: {data}") for table in tables if table.rows]


def _test_table(results: Results, data: str) -> Table:
    """Test metrics of every arm, the paper's beside them."""
    arms, first = results.definition.arms_on(data), data == results.data[0]
    metrics: list[Metric] = [
        results.definition.metric,
        *(name for name in get_args(Metric) if name != results.definition.metric),
    ]
    swept = any(arm.x is not None for arm in arms)
    told = [name for name in metrics if first and any(name in arm.paper for arm in arms)]
    head = ["arm", *([_axis_label(results)] if swept else []), "seeds"]
    head += [f"{_NAMES[metrics[0]]}@{results.k}", "95 % interval", *(f"{_NAMES[m]}@{results.k}" for m in metrics[1:])]
    head += [f"paper: {_NAMES[name]}" for name in told]
    found = {arm.name: [_value(results, data, arm, f"test_{name}@{results.k}") for name in metrics] for arm in arms}
    rows = [
        [arm.name]
        + ([_axis_text(arm)] if swept else [])
        + [str(values[0].n), spread_text(values[0]), interval_text(values[0]), *map(spread_text, values[1:])]
        + [number_text(arm.paper.get(name, math.nan), 4) for name in told]
        for arm in arms
        for values in (found[arm.name],)
    ]
    bold = set()
    places = [2 + swept, *range(4 + swept, 4 + swept + len(metrics) - 1)]
    for number, place in enumerate(places):
        means = [values[number].mean for values in found.values()]
        known = [mean for mean in means if not math.isnan(mean)]
        if len(known) > 1:
            bold |= {(i, place) for i, mean in enumerate(means) if mean == max(known)}
    return Table("Test, mean ± standard deviation over seeds", head, rows, 1, bold)


def _against_table(results: Results, data: str) -> list[Table]:
    """Differences from the arm `against` in the study's metric, the paper's beside them."""
    against, metric = results.definition.against, results.definition.metric
    if against is None:
        return []
    paper = {arm.name: arm.paper[metric] for arm in results.definition.arms if metric in arm.paper}
    told = data == results.data[0] and against in paper and len(paper) > 1
    found = {(t.level, t.arm): t for t in results.tests if t.data == data and t.metric == results.metric}
    head = ["arm", "seeds", "difference", "95 % interval", "t p (Holm)", "users", "difference", "W p (Holm)"]
    rows = []
    for arm in (arm for arm in results.arms_on(data) if ("seeds", arm) in found):
        seeds, users = found["seeds", arm], found["users", arm]
        cells = [arm, str(seeds.test.n), number_text(seeds.test.difference, 4), interval_text(seeds.spread)]
        cells += [p_text(seeds.t_holm), str(users.test.n), number_text(users.test.difference, 4)]
        cells.append(p_text(users.wilcoxon_holm))
        if told:
            cells.append(number_text(paper[arm] - paper[against], 4) if arm in paper else "-")
        rows.append(cells)
    title = f"{_NAMES[metric]}@{results.k} minus that of {against}"
    return [Table(title, head + (["paper: difference"] if told else []), rows, 1, set())] if rows else []


def _cost_table(results: Results, data: str) -> Table:
    columns = [
        (f"validation_{results.metric}", f"validation {results.metric}", 1, 4),
        *SENT,
        ("best_round", "best round", 1, 1),
        ("rounds", "rounds", 1, 1),
        ("seconds", "seconds", 1, 0),
    ]
    rows = [
        [
            arm.name,
            *(spread_text(_value(results, data, arm, column), unit, digits) for column, _, unit, digits in columns),
        ]
        for arm in results.definition.arms_on(data)
    ]
    return Table(
        "Cost, mean ± standard deviation over seeds", ["arm", *(name for _, name, _, _ in columns)], rows, 1, set()
    )


def _measured(measured: list[Measured], data: str, over: str, title: str) -> Table:
    """Measures as columns, shares in per cent."""
    chosen = [m for m in measured if (m.data, m.over) == (data, over)]
    names = list(dict.fromkeys(m.name for m in chosen))
    cells = {(m.arm, m.name): m.summary for m in chosen}

    shares = {name for name in names if "lose" in name or name in ("users better", "users worse")}

    def cell(arm: str, name: str) -> str:
        unit, digits = (0.01, 1) if name in shares else (1, 4)
        return spread_text(cells.get((arm, name), _EMPTY), unit, digits)

    heads = [f"{name}, %" if name in shares else name for name in names]
    rows = [[arm, *(cell(arm, name) for name in names)] for arm in dict.fromkeys(m.arm for m in chosen)]
    return Table(title, ["arm", *heads], rows, 1, set())


def _traffic_table(results: Results, data: str) -> Table:
    arms = results.arms_on(data)
    sizes = {arm: traffic.by_record(results.histories[data, arm]) for arm in arms}
    records = list(dict.fromkeys(record for by_record in sizes.values() for record in by_record))
    rows = [[*record, *(number_text(sizes[arm].get(record, math.nan) / KIB, 2) for arm in arms)] for record in records]
    for direction in ("up", "down"):
        totals = [sum(size for (_, way, _), size in sizes[arm].items() if way == direction) for arm in arms]
        rows.append(["all", direction, "all", *(number_text(total / KIB, 2) for total in totals)])
    return Table("KiB a client and round", ["stage", "way", "record", *arms], rows if records else [], 3, set())


def _budget_table(results: Results, data: str) -> Table:
    budgets = results.budgets_on(data)
    rows = [
        [arm, *(spread_text(results.within(data, arm, budget)) for budget in budgets)] for arm in results.arms_on(data)
    ]
    title = f"Best validation {results.metric} within a budget (MiB, both ways, all clients)"
    return Table(title, ["arm", *(f"{budget:g}" for budget in budgets)], rows if budgets else [], 1, set())


def _value(results: Results, data: str, arm: Arm, column: str) -> Summary:
    return results.summaries[data, arm.name].get(column, _EMPTY)


def _axis_label(results: Results) -> str:
    return results.definition.axis.label if results.definition.axis else "x"


def _axis_text(arm: Arm) -> str:
    return "-" if arm.x is None else f"{arm.x:g}"


# --- words ----------------------------------------------------------------------------------------------------------


def _head(definition: Definition, about: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    codes = sorted({outcome.code for outcome in outcomes if outcome.code})
    data = [
        f"{label} ({each.dataset}{''.join(f', {change}' for change in each.changes)})"
        for label, each in definition.datasets.items()
    ]
    lines = [
        f"# {definition.title}\n",
        f"{definition.question}\n",
        f"- command: `{about['command']}`",
        f"- seeds: {', '.join(map(str, definition.seeds))}",
        f"- data: {'; '.join(data)}",
        f"- settings of all runs: {' '.join(definition.changes) or 'those of the strategies'}",
        f"- made on {about['made']}, {about['machine']}, code {', '.join(codes) or 'unknown'}",
    ]
    if about["quick"]:
        lines.append("- small version (`--quick`): it shows that the study runs, its numbers mean nothing")
    return "\n".join(lines) + "\n"


def _notes(results: Results, outcomes: Sequence[Outcome]) -> list[str]:
    definition = results.definition
    notes = notes_on_runs(list(outcomes)) + definition.notes
    notes.append(
        "Test rows are ranked once, with the model of the best validation round. Intervals are 95 %, Student's t over "
        "seeds. Bold: the best mean of a column. Seconds are wall time, longer where several runs share the machine."
    )
    if definition.against:
        notes.append(
            "Tests are paired: the same seeds (t test), and users, one value a user, its difference averaged over the "
            "seeds (W: Wilcoxon's signed ranks). Holm's correction is over the arms on one data and in one metric. "
            "Users share the seeds and the models trained on each other's data: tests over users tell about more users,"
            " not about more seeds. All metrics: tests.csv."
        )
    if any((entry := DATASETS.get(data.dataset)) and entry.generate for data in definition.datasets.values()):
        notes.append("Synthetic data are drawn anew for every seed: a user number is another user in each of them.")
    if any(arm.paper for arm in definition.arms):
        notes.append(
            "Paper: arXiv 2609.11632, ML-100K, its own split and frame, no seeds or intervals given; it stands beside "
            f"the data {results.data[0]}."
        )
    if {"gain", "fairness"} & set(definition.tables):
        notes.append(
            "Gains are differences of single users of one run from those of the other run with the same seed, and "
            "means of them over the users of a client. The worst 10 % are those with the smallest values, whoever they "
            "are in each seed. Activity 1 of 5: the fifth of the tested users with the fewest training rows."
        )
    return notes
