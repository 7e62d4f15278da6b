"""Figures of a study: convergence, sweeps, quality against bytes, gain of single clients. A panel for each data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhur_app.reporting.figures import COLOURS, save
from fedhur_app.reporting.outcomes import TESTED
from fedhur_app.studies import traffic
from fedhur_app.studies.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# With seven colours 28 arms look different.
_LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Drawn:
    """A figure that was written.

    Attributes:
        file: Its name in the study's folder.
        title: What it shows.
        says: How to read it.
    """

    file: str
    title: str
    says: str


def draw(results: Results, folder: Path) -> list[Drawn]:
    """Write the figures that the study names; one that has nothing to show is left out.

    Args:
        results: Of the completed runs.
        folder: Of the study.
    """
    drawn: list[Drawn] = []
    for name in results.definition.figures:
        if name == "convergence":
            drawn += _convergence(results, folder)
        elif name == "bytes":
            drawn += _bytes(results, folder)
        elif name == "sweep":
            drawn += _sweep(results, folder)
        else:
            drawn += [each for over in results.definition.gain for each in _gain(results, over, folder)]
    return drawn


def by_round(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Mean, smallest and largest value of every round over the runs that have it: (rounds, 3).

    Args:
        rows: One a run, a value a round; the lengths may differ.
    """
    padded = np.full((len(rows), max(map(len, rows))), np.nan)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    columns = [column[~np.isnan(column)] for column in padded.T]
    return np.array([(c.mean(), c.min(), c.max()) if len(c) else (np.nan,) * 3 for c in columns])


def _convergence(results: Results, folder: Path) -> list[Drawn]:
    from matplotlib.ticker import MaxNLocator

    figure, panels = _panels(results.data)
    for data, panel in zip(results.data, panels, strict=True):
        for arm, style, histories in _arms(results, data):
            mean, low, high = by_round([_validation(history, results.metric) for history in histories]).T
            rounds = np.arange(1, len(mean) + 1)
            panel.plot(rounds, mean, label=arm, marker="o" if len(mean) == 1 else None, **style)
            panel.fill_between(rounds, low, high, color=style["color"], alpha=0.12, linewidth=0)
        panel.set(title=data, xlabel="round", ylabel=f"validation {results.metric}")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not _legend(figure, panels):
        return []
    save(figure, folder, "convergence", ("png",))
    says = "Mean over the seeds that reached the round, band from the smallest to the largest."
    return [Drawn("convergence.png", "Validation after every round", says)]


def _bytes(results: Results, folder: Path) -> list[Drawn]:
    figure, panels = _panels(results.data)
    for data, panel in zip(results.data, panels, strict=True):
        for arm, style, histories in _arms(results, data):
            # A run that stopped early keeps its best model and spends nothing more.
            rounds = max(map(len, histories))
            best = [_held(traffic.best_so_far(history, results.metric), rounds) for history in histories]
            cost = np.mean([_held(traffic.spent(history), rounds) for history in histories], axis=0)
            mean, low, high = by_round(best).T
            panel.plot(cost, mean, label=arm, marker=".", drawstyle="steps-post", **style)
            panel.fill_between(cost, low, high, color=style["color"], alpha=0.12, linewidth=0, step="post")
        panel.set(
            title=data, xlabel="MiB sent both ways, all clients", ylabel=f"best validation {results.metric} so far"
        )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(_plain_number)
    if not _legend(figure, panels):
        return []
    save(figure, folder, "bytes", ("png",))
    says = "Best validation up to each round against what had travelled by then; a point a round, band over the seeds."
    return [Drawn("bytes.png", "Quality against bytes", says)]


def _sweep(results: Results, folder: Path) -> list[Drawn]:
    axis, arms = results.definition.axis, results.definition.arms
    assert axis is not None
    figure, panels = _panels(
        [f"{data}, test {name}@{results.k}" for data in results.data for name in TESTED], columns=3
    )
    lines = list(dict.fromkeys(arm.series for arm in arms if arm.x is not None))
    level = [arm for arm in arms if arm.x is None]
    styles = _styles([*lines, *(arm.name for arm in level)])
    titles = [(data, name) for data in results.data for name in TESTED]
    for (data, name), panel in zip(titles, panels, strict=True):
        column = f"test_{name}@{results.k}"
        found = {arm.name: results.summaries.get((data, arm.name), {}).get(column) for arm in arms}
        for line in lines:
            points = sorted(
                (arm.x, summary)
                for arm in arms
                if arm.x is not None and arm.series == line and (summary := found[arm.name]) and summary.n
            )
            if not points:
                continue
            x, mean = [x for x, _ in points], np.array([s.mean for _, s in points])
            # One seed has no interval: the bar is then as long as the point.
            below = np.array([0 if s.n < 2 else s.mean - s.low for _, s in points])
            panel.errorbar(x, mean, below, marker="o", capsize=3, label=line or None, **styles[line])
        for arm in level:
            if (summary := found[arm.name]) and summary.n:
                panel.axhline(summary.mean, label=arm.name, **{**styles[arm.name], "linestyle": "--"})
        panel.set(xlabel=axis.label, ylabel=f"test {name}@{results.k}")
        if axis.scale != "linear":
            panel.set_xscale("log", base=2 if axis.scale == "log2" else 10)
            panel.xaxis.set_major_formatter(_plain_number)
    if not any(panel.has_data() for panel in panels):
        return []
    _legend(figure, panels)
    save(figure, folder, "sweep", ("png",))
    says = "Mean over seeds with 95 % intervals (Student's t); level dashed lines are the arms without a value."
    return [Drawn("sweep.png", f"Test metrics by {axis.label}", says)]


def _gain(results: Results, over: str, folder: Path) -> list[Drawn]:
    cells = {
        (data, arm): np.sort(np.concatenate([gain.of_clients for _, gain in found]))
        for data, arm in results.cells
        if (found := results.seed_gains(data, arm, over))
    }
    if not cells:
        return []
    figure, panels = _panels([f"{data}, {arm}" for data, arm in cells], columns=4, size=(3.2, 2.4))
    limit = 1.05 * max(float(np.abs(values).max()) for values in cells.values()) or 1.0
    for values, panel in zip(cells.values(), panels, strict=True):
        colours = [COLOURS[1] if value < 0 else COLOURS[0] for value in values]
        panel.bar(np.arange(1, len(values) + 1), values, width=1.0, color=colours)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(ylim=(-limit, limit), xlabel="clients of all seeds, sorted", ylabel=f"gain in {results.metric}")
    name = f"gain-{over}"
    save(figure, folder, name, ("png",))
    says = f"A bar for each client and seed: mean over its users of the test {results.metric} minus that of {over}."
    return [Drawn(f"{name}.png", f"Gain of every client over {over}", says)]


def _arms(results: Results, data: str) -> Iterator[tuple[str, dict[str, Any], list[traffic.History]]]:
    """Name, style (the same on all data) and histories of the arms that have any on some data."""
    for arm, style in _styles([arm.name for arm in results.definition.arms]).items():
        histories = [history for history in results.histories.get((data, arm), []) if history]
        if histories:
            yield arm, style, histories


def _validation(history: traffic.History, metric: str) -> np.ndarray:
    values = [line["validation"].get(metric) for line in history]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _held(values: np.ndarray, length: int) -> np.ndarray:
    """Values, the last one repeated up to a length."""
    return np.concatenate([values, np.full(length - len(values), values[-1])])


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "linestyle": _LINES[i // len(COLOURS) % len(_LINES)]}
        for i, name in enumerate(names)
    }


def _panels(
    titles: Sequence[str], columns: int = 2, size: tuple[float, float] = (5.2, 3.8)
) -> "tuple[Any, list[Axes]]":
    """A figure with a titled panel each."""
    from matplotlib.figure import Figure

    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(size[0] * columns + 1.8, size[1] * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).ravel())
    for panel in panels[len(titles) :]:
        panel.set_axis_off()
    for title, panel in zip(titles, panels, strict=False):
        panel.set_title(title, fontsize="medium")
    return figure, panels[: len(titles)]


def _legend(figure: Any, panels: "Sequence[Axes]") -> bool:
    """One legend for all panels; false where there is nothing to name."""
    named = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if named:
        figure.legend(named.values(), named.keys(), loc="outside right upper", fontsize="small")
    return bool(named)


def _plain_number(value: float, _: float) -> str:
    return f"{value:g}"
