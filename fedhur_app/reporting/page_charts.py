"""Charts of a report page as inline SVG: no library, no script needed to see them.

Colours are classes (`s0`, `s1`, ... in page.css), so that they follow a dark background; beyond the seven colours
lines are dashed and points have other shapes. Text is sized by page.css, larger where the page is narrow and the chart
shrinks.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COLOURS = 7
DASHES = ("", "7 4", "2 3", "10 3 2 3")
WIDTH, HEIGHT = 680, 380
LEFT, RIGHT, TOP, BOTTOM = 84, 36, 44, 64
ROW = 54  # height of a row of a dot chart


@dataclass(frozen=True)
class Line:
    """One line of a line chart.

    Attributes:
        number: Decides colour and dash.
        name: For people.
        points: (x, mean, low, high), by x.
        shown: Whether it is seen at first.
    """

    number: int
    name: str
    points: list[tuple[int, float, float, float]]
    shown: bool = True


@dataclass(frozen=True)
class Mark:
    """One point with its spread, or one row of dots.

    Attributes:
        number: Decides colour and shape.
        name: For people.
        x: The means and all values across.
        y: The same upwards; empty in a dot chart.
        note: What a pointer sees.
    """

    number: int
    name: str
    x: list[float]
    y: list[float]
    note: str


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at or below `low` to at or above `high`."""
    if not high > low:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten (powers alone over more than three of them) around positive numbers."""
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    every = [factor * 10.0**power for power in powers for factor in factors]
    first = max(value for value in every if value <= low * (1 + 1e-9))
    last = min(value for value in every if value >= high * (1 - 1e-9))
    return [value for value in every if first <= value <= last]


def series_class(number: int) -> str:
    """The class that colours a series."""
    return f"s{number % COLOURS}"


def key(number: int, line: bool) -> str:
    """A small sample of a series for legends."""
    inside = f'<line x1="1" y1="7" x2="27" y2="7"{_dash(number)}/>' if line else _shape(number, 14, 7)
    return f'<svg class="key {series_class(number)}" viewBox="0 0 28 14" aria-hidden="true">{inside}</svg>'


def line_chart(name: str, lines: Sequence[Line], x_label: str, y_label: str, title: str, says: str) -> str:
    """Lines with bands.

    Args:
        name: Id of the element, unlike any other on the page.
        lines: At least one, each with at least one point.
        x_label: Below the axis.
        y_label: Above the axis.
        title: Name of the picture for those who do not see it.
        says: What they should know of it.
    """
    xs = [point[0] for line in lines for point in line.points]
    whole = [tick for tick in ticks(min(xs), max(xs), 8) if tick == int(tick) and min(xs) <= tick <= max(xs)]
    low, high = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    y_ticks = ticks(min(p[2] for line in lines for p in line.points), max(p[3] for line in lines for p in line.points))

    def place_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - low) / (high - low)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    drawn = []
    for line in lines:
        places = [(place_x(x), place_y(mean), place_y(a), place_y(b)) for x, mean, a, b in line.points]
        hidden = "" if line.shown else " off"
        parts = [f"<title>{html.escape(line.name)}</title>"]
        if any(a != b for _, _, a, b in line.points):
            outline = [(x, b) for x, _, _, b in places] + [(x, a) for x, _, a, _ in reversed(places)]
            parts.append(f'<polygon class="band" points="{_points(outline)}"/>')
        if len(places) > 1:
            outline = [(x, y) for x, y, _, _ in places]
            parts.append(f'<polyline class="line" points="{_points(outline)}"{_dash(line.number)}/>')
        else:
            parts.append(_shape(line.number, places[0][0], places[0][1]))
        drawn.append(
            f'<g class="series {series_class(line.number)}{hidden}" data-series="{line.number}">{"".join(parts)}</g>'
        )
    rule = f'<line class="rule off" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    axes = _axes([(place_x(x), _plain(x)) for x in whole], _labels(y_ticks, place_y), x_label, y_label)
    edges = f'data-low="{low}" data-high="{high}" data-left="{LEFT}" data-right="{WIDTH - RIGHT}"'
    return _svg(name, HEIGHT, title, says, axes + "".join(drawn) + rule, edges)


def scatter_chart(name: str, marks: Sequence[Mark], x_label: str, y_label: str, title: str, says: str) -> str:
    """One point a series at the means, with bars from the smallest to the largest value both ways.

    Args:
        name: Id of the element.
        marks: At least one.
        x_label: Below the axis, which is logarithmic where values differ much.
        y_label: Above the axis.
        title: Name of the picture.
        says: What it shows.
    """
    xs, ys = ([value for mark in marks for value in getattr(mark, of)] for of in "xy")
    log = min(xs) > 0 and max(xs) / min(xs) > 20
    x_ticks = log_ticks(min(xs), max(xs)) if log else ticks(min(xs), max(xs), 5)
    y_ticks = ticks(min(ys), max(ys))
    scale = math.log10 if log else float

    def place_x(x: float) -> float:
        low, high = scale(x_ticks[0]), scale(x_ticks[-1])
        return LEFT + (WIDTH - LEFT - RIGHT) * (scale(x) - low) / ((high - low) or 1)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    drawn = []
    for mark in marks:
        x, y = place_x(_mean(mark.x)), place_y(_mean(mark.y))
        (left, right), (low, high) = (
            (place(min(values)), place(max(values))) for place, values in ((place_x, mark.x), (place_y, mark.y))
        )
        bars = (
            f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            f'<line class="bar" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        drawn.append(
            f'<g class="series {series_class(mark.number)}" data-series="{mark.number}">'
            f"<title>{html.escape(mark.note)}</title>{bars}{_shape(mark.number, x, y)}</g>"
        )
    kept = _thinned([(place_x(x), _plain(x)) for x in x_ticks])
    axes = _axes(kept, _labels(y_ticks, place_y), x_label + (", logarithmic" if log else ""), y_label)
    return _svg(name, HEIGHT, title, says, axes + "".join(drawn))


def dot_chart(name: str, marks: Sequence[Mark], x_label: str, title: str, says: str) -> str:
    """A row a series: a dot a value, a bar at their mean.

    Args:
        name: Id of the element.
        marks: At least one, from top to bottom.
        x_label: Below the axis.
        title: Name of the picture.
        says: What it shows.
    """
    values = [value for mark in marks for value in mark.x]
    x_ticks = ticks(min(values), max(values))
    left, height = 36, 16 + ROW * len(marks) + BOTTOM

    def place(x: float) -> float:
        return left + (WIDTH - left - RIGHT) * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

    drawn = [
        f'<line class="grid" x1="{place(x):.1f}" x2="{place(x):.1f}" y1="10" y2="{height - BOTTOM}"/>'
        f'<text class="tick" x="{place(x):.1f}" y="{height - BOTTOM + 24}" text-anchor="middle">{text}</text>'
        for x, text in zip(x_ticks, _texts(x_ticks), strict=True)
    ]
    for row, mark in enumerate(marks):
        y = 16 + ROW * row + 40
        mean = place(_mean(mark.x))
        dots = "".join(f'<circle class="dot" cx="{place(x):.1f}" cy="{y}" r="4.5"/>' for x in mark.x)
        drawn.append(
            f'<g class="series {series_class(mark.number)}"><title>{html.escape(mark.note)}</title>'
            f'<text class="row" x="{left}" y="{y - 17}">{html.escape(_short(mark.name))}</text>'
            f'<line class="grid" x1="{left}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
            f'{dots}<line class="mean" x1="{mean:.1f}" x2="{mean:.1f}" y1="{y - 10}" y2="{y + 10}"/></g>'
        )
    middle = (left + WIDTH - RIGHT) / 2
    label = f'<text class="label" x="{middle}" y="{height - 10}" text-anchor="middle">{html.escape(x_label)}</text>'
    return _svg(name, height, title, says, "".join(drawn) + label)


def _svg(name: str, height: int, title: str, says: str, inside: str, more: str = "") -> str:
    return (
        f'<svg class="chart" id="{name}" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{name}-t {name}-d" {more}>'
        f'<title id="{name}-t">{html.escape(title)}</title><desc id="{name}-d">{html.escape(says)}</desc>{inside}</svg>'
    )


def _axes(xs: list[tuple[float, str]], ys: list[tuple[float, str]], x_label: str, y_label: str) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 10}" y="{y:.1f}" dy="0.35em" text-anchor="end">{text}</text>'
        for y, text in ys
    ]
    parts += [
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        f'<text class="tick" x="{x:.1f}" y="{bottom + 26}" text-anchor="middle">{text}</text>'
        for x, text in xs
    ]
    middle = (LEFT + right) / 2
    return (
        "".join(parts)
        + f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        + f'<text class="label" x="8" y="22">{html.escape(y_label)}</text>'
        + f'<text class="label" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(x_label)}</text>'
    )


def _labels(values: list[float], place: Callable[[float], float]) -> list[tuple[float, str]]:
    return [(place(value), text) for value, text in zip(values, _texts(values), strict=True)]


def _texts(values: list[float]) -> list[str]:
    """Numbers an equal step apart, all with the digits that tell them apart."""
    step = values[1] - values[0]
    if max(map(abs, values)) >= 1e6 or step < 1e-5:
        return [f"{value:g}" for value in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value + 0.0:.{digits}f}" for value in values]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _thinned(labels: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Labels that keep a distance from the one before."""
    kept: list[tuple[float, str]] = []
    for x, text in labels:
        if not kept or x - kept[-1][0] >= 62:
            kept.append((x, text))
    return kept


def _points(places: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _dash(number: int) -> str:
    dash = DASHES[number // COLOURS % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


_CORNERS: dict[int, list[tuple[float, float]]] = {
    1: [(-5, -5), (5, -5), (5, 5), (-5, 5)],
    2: [(0, -6.5), (6.5, 5), (-6.5, 5)],
    3: [(0, -7), (7, 0), (0, 7), (-7, 0)],
}


def _shape(number: int, x: float, y: float) -> str:
    """A circle, square, triangle or diamond around a place."""
    kind = number // COLOURS % 4
    if kind == 0:
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'
    return f'<polygon class="mark" points="{_points([(x + dx, y + dy) for dx, dy in _CORNERS[kind]])}"/>'


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:59]}…"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
