"""Results on one data set, as HTML: charts and tables of its arms."""

import json
import math

from fedhur_app.evaluation.statistics import summarise
from fedhur_app.reporting.comparison import MIB, SENT, spread_text
from fedhur_app.reporting.page import Arm, Page, Results
from fedhur_app.reporting.page_charts import Line, Mark, dot_chart, key, line_chart, scatter_chart, series_class
from fedhur_app.reporting.page_settings import different_settings
from fedhur_app.reporting.page_tables import Cell, Head, count_cell, safe, spread_cell, table

MOST_POINTS = 120  # of a line
SHOWN_LINES = 8  # of a chart at first
MOST_DOTTED = 40  # arms, seed by seed

COST = (
    *SENT,
    ("seconds", "seconds", 1, 1),
    ("rounds", "rounds", 1, 1),
    ("best_round", "best round", 1, 1),
)
_NOT_JUDGED = {"rounds", "best_round"}


def results_html(results: Results, page: Page, name: str, level: int) -> str:
    """Charts and tables of arms.

    Args:
        results: The arms.
        page: For the settings that all its runs share.
        name: Beginning of the ids.
        level: Of the headings.
    """
    shown = [arm for arm in results.arms if arm.completed]
    parts = []
    if shown:
        parts.append(_charts(results, name, level))
        for part, title in (("test_", "Test"), ("validation_", "Validation, best round")):
            columns = [(column, column.removeprefix(part), 1.0, 4) for column in results.columns(part)]
            if columns:
                parts.append(_arm_table(f"{title}: mean ± standard deviation over seeds", results, columns))
        present = set(results.columns())
        cost = [(column, title, float(unit), digits) for column, title, unit, digits in COST if column in present]
        if cost:
            parts.append(_arm_table("Cost: mean ± standard deviation over seeds", results, cost, lowest=True))
    else:
        parts.append("<p>No run completed.</p>")
    notes = _notes(results)
    if notes:
        parts.append(f'<ul class="quiet">{"".join(f"<li>{note}</li>" for note in notes)}</ul>')
    parts.append(different_settings(results, page))
    return "".join(parts)


def _notes(results: Results) -> list[str]:
    notes = []
    for arm in results.arms:
        for run in arm.runs:
            if run.status != "completed":
                notes.append(f"<code>{safe(run.name)}</code> {safe(run.status)} and is left out: {safe(run.reason)}")
    if results.repeated:
        names = ", ".join(f"<code>{safe(name)}</code>" for name in results.repeated)
        notes.append(f"Not counted, as another run has the same settings and the same seed: {names}.")
    if len({run.code for run in results.runs if run.code}) > 1:
        notes.append("These runs were not all made by the same version of the code.")
    if len({tuple(run.seed for run in arm.completed) for arm in results.arms if arm.completed}) > 1:
        notes.append("Not all arms have the same seeds: their means are over different splits and beginnings.")
    return notes


def _arm_table(title: str, results: Results, columns: list[tuple[str, str, float, int]], lowest: bool = False) -> str:
    """A row an arm; the best mean of each column in bold."""
    summaries = {
        column: [summarise([value / unit for value in arm.values(column)]) for arm in results.arms]
        for column, _, unit, _ in columns
    }
    rows = []
    for number, arm in enumerate(results.arms):
        cells = [Cell(safe(arm.name), classes=f"swatch {series_class(arm.number)}"), count_cell(len(arm.completed))]
        for column, _, _, digits in columns:
            means = [each.mean for each in summaries[column] if each.n]
            best = bool(means) and summaries[column][number].mean == (min(means) if lowest else max(means))
            judged = best and len(means) > 1 and column not in _NOT_JUDGED
            cells.append(spread_cell(summaries[column][number], digits, judged))
        rows.append(cells)
    head = [Head("arm", False), Head("seeds"), *(Head(text) for _, text, _, _ in columns)]
    return table(title, head, rows)


def _charts(results: Results, name: str, level: int) -> str:
    column, metric = f"test_{results.metric}", results.metric
    arms = [arm for arm in results.arms if arm.completed]
    tested = [arm for arm in arms if arm.values(column)]
    lines = [Line(arm.number, arm.name, points) for arm in arms if (points := _band(arm, metric))]
    figures = []
    if tested:
        best = sorted(tested, key=lambda arm: -summarise(arm.values(column)).mean)[:MOST_DOTTED]
        dotted = [arm for arm in tested if arm in best]
        marks = [Mark(arm.number, arm.name, arm.values(column), [], _note(arm, column)) for arm in dotted]
        says = "; ".join(mark.note for mark in marks)
        drawn = dot_chart(f"{name}-dots", marks, f"test {metric}", f"Test {metric} of every arm", says)
        caption = "A dot is a run, the bar the mean of an arm."
        if len(dotted) < len(tested):
            caption += f" These are the {MOST_DOTTED} best of {len(tested)} arms."
        figures.append(_figure("Test, seed by seed", drawn, caption, level + 1))
    if lines:
        figures.append(_convergence(lines, arms, column, metric, name, level + 1))
    sent = [arm for arm in tested if _total_bytes(arm)]
    if len(sent) > 1:
        marks = [
            Mark(
                arm.number,
                arm.name,
                _total_bytes(arm),
                arm.values(column),
                f"{_note(arm, column)}, {sum(_total_bytes(arm)) / len(_total_bytes(arm)):.2f} MiB",
            )
            for arm in sent
        ]
        says = "; ".join(mark.note for mark in marks)
        drawn = scatter_chart(
            f"{name}-bytes", marks, "MiB both ways in all", f"test {metric}", f"Test {metric} against bytes", says
        )
        legend = "".join(f"<li>{key(mark.number, line=False)}<span>{safe(mark.name)}</span></li>" for mark in marks)
        caption = "All that was sent in a run, both ways, all rounds. Bars go from the lowest to the highest seed."
        figures.append(_figure("Quality against bytes", drawn + _legend(legend, len(marks)), caption, level + 1))
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _legend(items: str, count: int) -> str:
    """A list that scrolls where it would be long; then the keyboard must reach it."""
    return (
        f'<ul class="legend long" tabindex="0">{items}</ul>'
        if count > SHOWN_LINES
        else f'<ul class="legend">{items}</ul>'
    )


def _total_bytes(arm: Arm) -> list[float]:
    both = ("bytes_up", "bytes_down")
    return [sum(run.values[name] for name in both) / MIB for run in arm.completed if set(both) <= set(run.values)]


def _note(arm: Arm, column: str) -> str:
    return f"{arm.name}: {spread_text(summarise(arm.values(column)))}"


def _band(arm: Arm, metric: str) -> list[tuple[int, float, float, float]]:
    """Round, mean, lowest and highest validation over the seeds that reached it."""
    by_round: dict[int, list[float]] = {}
    for run in arm.completed:
        for round_, value in run.curve if run.metric == metric else []:
            by_round.setdefault(round_, []).append(value)
    return thinned([(round_, sum(v) / len(v), min(v), max(v)) for round_, v in sorted(by_round.items())])


def thinned(points: list[tuple[int, float, float, float]]) -> list[tuple[int, float, float, float]]:
    """At most :data:`MOST_POINTS` points of a line: every so many, the last, and the one with the highest mean."""
    if len(points) <= MOST_POINTS:
        return points
    kept = {round(i * (len(points) - 1) / (MOST_POINTS - 2)) for i in range(MOST_POINTS - 1)}
    kept.add(max(range(len(points)), key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def _convergence(lines: list[Line], arms: list[Arm], column: str, metric: str, name: str, level: int) -> str:
    means = {arm.number: summarise(arm.values(column)).mean for arm in arms}
    best = sorted(lines, key=lambda line: -_known(means[line.number]))[:SHOWN_LINES]
    lines = [Line(line.number, line.name, line.points, line in best) for line in lines]
    says = "; ".join(
        f"{line.name}: from {line.points[0][1]:.4f} in round {line.points[0][0]} to {line.points[-1][1]:.4f} in round "
        f"{line.points[-1][0]}"
        for line in lines
    )
    drawn = line_chart(f"{name}-rounds", lines, "round", f"validation {metric}", f"Validation {metric} by round", says)
    legend = "".join(
        f'<li><button type="button" data-series="{line.number}" aria-pressed="{str(line.shown).lower()}">'
        f"{key(line.number, line=True)}<span>{safe(line.name)}</span><output></output></button></li>"
        for line in lines
    )
    rounds = [point[0] for line in lines for point in line.points]
    low, high = min(rounds), max(rounds)
    slider = ""
    if high > low:
        slider = (
            f'<label>Round <output data-round>-</output><input type="range" min="{low}" max="{high}" value="{high}" '
            'step="1" aria-label="Round to read values at"></label>'
        )
    buttons = '<button type="button" data-all="1">Show all</button><button type="button" data-all="0">Hide all</button>'
    numbers = {
        line.number: {"x": [point[0] for point in line.points], "y": [round(point[1], 5) for point in line.points]}
        for line in lines
    }
    caption = "Mean over the seeds that reached the round; the band goes from the lowest to the highest of them."
    if len(lines) > SHOWN_LINES:
        caption += f" The {SHOWN_LINES} best arms are shown at first."
    inside = (
        f'{drawn}{_legend(legend, len(lines))}<div class="buttons">{buttons}{slider}</div>'
        f'<script type="application/json">{script_json(numbers)}</script>'
    )
    return _figure("Convergence", inside, caption + " A name shows or hides its line.", level, " data-lines")


def _known(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def script_json(content: object) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _figure(title: str, inside: str, caption: str, level: int, more: str = "") -> str:
    return f"<figure{more}><h{level}>{safe(title)}</h{level}>{inside}<figcaption>{safe(caption)}</figcaption></figure>"
