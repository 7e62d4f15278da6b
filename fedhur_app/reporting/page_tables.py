"""Tables of a report page: cells, heads that sort, numbers with a spread."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedhur_app.evaluation.statistics import Summary
from fedhur_app.reporting.comparison import spread_text
from fedhur_app.reporting.tables import number_text


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        inside: HTML.
        value: What it is sorted by; None for a text, and where there is none.
        classes: Classes of the element.
    """

    inside: str
    value: float | None = None
    classes: str = ""


@dataclass(frozen=True)
class Head:
    """Head of a column.

    Attributes:
        text: Its name.
        number: Whether its cells are numbers.
    """

    text: str
    number: bool = True


def safe(value: object) -> str:
    """A value as text that HTML cannot take for anything else."""
    return html.escape(str(value))


def few(texts: list[str]) -> str:
    """The first six of some texts, and how many more there are."""
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")


def count_cell(value: int) -> Cell:
    """A whole number."""
    return Cell(str(value), value)


def number_cell(value: float, digits: int) -> Cell:
    """A number with so many digits behind the point; `-` for NaN, which is sorted last."""
    return Cell(number_text(value, digits), None if math.isnan(value) else value)


def spread_cell(summary: Summary, digits: int, best: bool = False) -> Cell:
    """Mean ± standard deviation, sorted by the mean."""
    mean, plus, sd = spread_text(summary, 1, digits).partition(" ± ")
    inside = f'{mean} <span class="sd">± {sd}</span>' if plus else mean
    return Cell(inside, None if math.isnan(summary.mean) else summary.mean, "best" if best else "")


def table(
    caption: str, head: Sequence[Head], rows: Iterable[Sequence[Cell]], tall: bool = False, name: str = ""
) -> str:
    """A table that sorts by its heads and scrolls in a box of its own; the first column names the row."""
    heads = "".join(
        f'<th scope="col" aria-sort="none"{_classes("n" if each.number else "")}>'
        f'<button type="button">{safe(each.text).replace(".", ".<wbr>")}</button></th>'
        for each in head
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, each, not i) for i, (cell, each) in enumerate(zip(row, head, strict=True)))}</tr>"
        for row in rows
    )
    label, place = caption or "Table", f' id="{name}"' if name else ""
    return (
        f'<div class="scroll{" tall" if tall else ""}" tabindex="0" role="region" aria-label="{safe(label)}">'
        f'<table class="first"{place}>'
        + (f"<caption><span>{safe(caption)}</span></caption>" if caption else "")
        + f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell, head: Head, first: bool) -> str:
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    value = f' data-v="{cell.value!r}"' if cell.value is not None and head.number else ""
    return f"<{tag}{scope}{_classes(('n ' if head.number else '') + cell.classes)}{value}>{cell.inside}</{tag}>"


def _classes(text: str) -> str:
    return f' class="{text.strip()}"' if text.strip() else ""


def as_number(text: str) -> float | None:
    """The finite number that a text is, None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None
