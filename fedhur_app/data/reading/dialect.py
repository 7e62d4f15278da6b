"""How a delimited text is written: separator, quotes, whether the first line is a header. Found from a sample."""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedhur_app.data.errors import DataError
from fedhur_app.data.reading.columns import is_known

# Of separators that divide (nearly) all lines alike the first is taken: blanks also stand in dates and titles, and
# commas in numbers.
SEPARATORS = ("\t", "::", ";", ",", "|", " ")
SEPARATOR_NAMES = {"\t": "tab", "::": "::", ";": "semicolon", ",": "comma", "|": "|", " ": "blank"}
_ALIKE = 0.8
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_NO_NAME = {"", "nan", "inf", "-inf", "+inf", "infinity", "-infinity", "null", "none", "na", "n/a", "\\n"}


@dataclass(frozen=True)
class Dialect:
    """The form of a delimited text.

    Attributes:
        separator: Between cells; a blank means one or more.
        columns: Number of cells of a line.
        quote: The character that encloses cells, "" if none does.
        escape: Also a backslash before a quote makes it part of the cell.
        header: Names of the columns as written, None where the first line is data.
    """

    separator: str
    columns: int
    quote: str = '"'
    escape: bool = False
    header: tuple[str, ...] | None = None

    def cells(self, line: str) -> list[str]:
        """The cells of a line that stands alone.

        Raises:
            csv.Error: Quotes in the line do not fit.
        """
        if self.quote and self.quote in line:
            return next(reader(self, [line.strip(" ") if self.separator == " " else line]))
        if self.separator == " ":
            return re.split(" +", line.strip(" "))
        return line.split(self.separator)

    def cell_name(self, column: int) -> str:
        """How to call a column in a message."""
        return self.header[column] if self.header is not None else str(column + 1)


def reader(dialect: Dialect, lines: Iterable[str]) -> "csv._reader":  # type: ignore[name-defined]
    """Python's CSV reader of a dialect with quotes."""
    return csv.reader(
        lines,
        delimiter=dialect.separator,
        quotechar=dialect.quote,
        escapechar="\\" if dialect.escape else None,
        skipinitialspace=dialect.separator == " ",
        strict=True,
    )


def _without_quotes(separator: str) -> bool:
    return len(separator) > 1  # `::` is used by GroupLens only, which quotes nothing


def find_dialect(
    name: str,
    sample: Sequence[str],
    *,
    separator: str | None = None,
    quote: str | None = None,
    escape: bool | None = None,
    header: bool | None = None,
    wanted: Sequence[str] = (),
) -> Dialect:
    """Find the form of a text from its first lines. What is given is not guessed.

    The first line is a header if

    - its cells are distinct and none of them is a number, empty or `nan`, and
    - one of them is a known name of a column (or in `wanted`), or ends with a type of RecBole (`:token`),
      or stands above a column that holds numbers (nearly) everywhere.

    So a first line of data is never taken for a header as long as it holds a number or looks like its column. Ids that
    look like those below them (letters and digits in the same places) are data in any case. A header of unknown names
    above columns of text only cannot be told from data, and counts as data.

    Args:
        name: Of the file, for messages.
        sample: Lines without blank ones, at least one.
        separator: Between cells.
        quote: Character around cells, "" for none.
        escape: Whether a backslash escapes quotes.
        header: Whether there is a header.
        wanted: Names of columns that people asked for.

    Raises:
        DataError: No separator divides the lines alike.
    """
    if escape is None:
        escape = any(re.search(r'\\"[^",;\t|\s]', line) for line in sample)
    found: list[tuple[float, int, str]] = []
    for each in SEPARATORS if separator is None else (separator,):
        dialect = Dialect(each, 0, "" if _without_quotes(each) else '"' if quote is None else quote, escape)
        counts = Counter(map(_count(dialect), sample))
        # Of counts that are equally frequent the one of the earlier line.
        cells, lines = counts.most_common(1)[0]
        if cells >= 2 or separator is not None:
            found.append((lines / len(sample), max(cells, 1), each))
    if not found:
        raise DataError(
            f"{name}: no separator found (tab, comma, semicolon, ::, | or blank); is this a table with one interaction "
            "a line? Choose the format with --format"
        )
    share, columns, separator = next((each for each in found if each[0] >= _ALIKE), None) or max(
        found, key=lambda each: each[0]
    )
    if share < 0.5:
        raise DataError(
            f"{name}: no separator divides most lines into the same number of cells; is this a table with one "
            "interaction a line? Choose the format with --format (sequence: a line is a user and then items)"
        )
    dialect = Dialect(separator, columns, "" if _without_quotes(separator) else '"' if quote is None else quote, escape)
    first = sample_cells(dialect, sample[0])
    rows = [cells for cells in (sample_cells(dialect, line) for line in sample[1:]) if len(cells) == columns]
    if header is None:
        header = len(first) == columns and is_header(first, rows, wanted)
    if not header:
        return dialect
    return Dialect(separator, len(first), dialect.quote, escape, tuple(first))


def is_header(first: Sequence[str], rows: Sequence[Sequence[str]], wanted: Sequence[str] = ()) -> bool:
    """Whether the first line names the columns, by the rule of :func:`find_dialect`.

    Args:
        first: Its cells.
        rows: Cells of the lines below, each as many.
        wanted: Names of columns that people asked for.
    """
    if len(set(first)) < len(first) or any(map(_is_number, first)):
        return False
    if any(cell in wanted for cell in first) or all(":" in cell for cell in first):
        return True
    if any(is_known(cell) for cell in first):
        return True
    below = list(zip(*rows, strict=True))
    if any(_looks_alike(cell, column) for cell, column in zip(first, below, strict=False)):
        return False
    return any(sum(map(_is_number, column)) >= _ALIKE * len(column) for column in below)


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, or empty or another word for a number that is missing: no name of a column."""
    return bool(_NUMBER.fullmatch(cell)) or cell.lower() in _NO_NAME


def _looks_alike(cell: str, column: Sequence[str]) -> bool:
    """Whether most cells of a column have the form of `cell`, and that form has digits in it."""
    form = _form(cell)
    return "9" in form and sum(_form(other) == form for other in column) > len(column) / 2


def _form(cell: str) -> str:
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "9", cell))


def _count(dialect: Dialect) -> Callable[[str], int]:
    return lambda line: len(sample_cells(dialect, line))


def sample_cells(dialect: Dialect, line: str) -> list[str]:
    """The cells of a line without blanks around them; none where quotes do not fit."""
    try:
        return [cell.strip() for cell in dialect.cells(line)]
    except (csv.Error, StopIteration):
        return []
