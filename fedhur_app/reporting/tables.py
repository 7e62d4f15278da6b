"""Tables of texts as Markdown, LaTeX and CSV."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table of texts, for Markdown and LaTeX.

    Attributes:
        title: One line above it.
        head: Names of the columns.
        rows: Cells, as many a row as the head has.
        left: Number of columns, from the first, that are aligned to the left.
        bold: (row, column) of cells in bold.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    left: int
    bold: set[tuple[int, int]]


def to_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with numbers in full; empty for NaN and None."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row])
    return text.getvalue()


def number_text(value: float, digits: int) -> str:
    """A number with so many digits behind the point, `-` for NaN."""
    return "-" if math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: never -0.0000


def p_text(value: float) -> str:
    """A p value with two digits, `-` for a test that was not made."""
    return "-" if math.isnan(value) else f"{value:.2g}"


def to_markdown(title: str, tables: list[Table], notes: list[str]) -> str:
    """The tables with padded columns, which also read well as plain text."""
    parts = [f"# {title}\n", *map(table_markdown, tables)]
    return "\n".join([*parts, *(f"- {note}" for note in notes)]) + "\n"


def table_markdown(table: Table) -> str:
    """A table with its title above it."""
    grid = [table.head, *table.rows]
    texts = [[_markdown(cell, (i - 1, j) in table.bold) for j, cell in enumerate(row)] for i, row in enumerate(grid)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        [text.ljust(width) if j < table.left else text.rjust(width) for j, (text, width) in enumerate(pairs)]
        for pairs in (list(zip(row, widths, strict=True)) for row in texts)
    ]
    rule = ["-" * width if j < table.left else "-" * (width - 1) + ":" for j, width in enumerate(widths)]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))
    return f"{table.title}:\n\n{text}\n"


def _markdown(text: str, bold: bool) -> str:
    text = text.replace("|", "\\|")
    return f"**{text}**" if bold else text


def to_latex(title: str, tables: list[Table], notes: list[str]) -> str:
    r"""The tables as plain `tabular`, to \input into any document; no package is needed."""
    parts = [f"% {title}"]
    for table in tables:
        columns = "".join("l" if j < table.left else "r" for j in range(len(table.head)))
        lines = [
            " & ".join(
                rf"\textbf{{{latex_text(cell)}}}" if (i, j) in table.bold else latex_text(cell)
                for j, cell in enumerate(row)
            )
            + r" \\"
            for i, row in enumerate([table.head, *table.rows], -1)
        ]
        parts += [
            rf"\noindent {latex_text(table.title)}\par\smallskip",
            rf"\noindent\begin{{tabular}}{{{columns}}}",
            *(r"\hline", lines[0], r"\hline", *lines[1:], r"\hline"),
            r"\end{tabular}\par\bigskip",
        ]
    parts += [rf"\noindent {{\footnotesize {latex_text(note)}\par}}" for note in notes]
    return "\n".join(parts) + "\n"


_LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "`": "'",
        "±": r"$\pm$",
    }
)


def latex_text(text: str) -> str:
    """Text with all of LaTeX's special characters escaped, and real minus signs.

    Letters beyond Latin ones, and signs that no standard font has, become question marks: they would be errors.
    """
    escaped = re.sub(r"(?<!\w)-(?=\d)", "$-$", text.translate(_LATEX))
    return "".join(c if c.isascii() or (c.isalpha() and c < "\u0180") else "?" for c in escaped)
