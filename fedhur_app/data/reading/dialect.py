"""How a delimited text is written: separator, quotes, whether the first line is a header. Found from a sample."""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fedhur_app.data.errors import DataError
from fedhur_app.data.reading.columns import is_known, names_columns

# Of separators that divide (nearly) all lines alike the first is taken: blanks also stand in dates and titles, and
# commas in numbers.
SEPARATORS = ("\t", "::", ";", ",", "|", " ")
SEPARATOR_NAMES = {"\t": "tab", "::": "::", ";": "semicolon", ",": "comma", "|": "|", " ": "blank"}
_ALIKE = 0.8
# A quote that is not closed within so many lines is damage, not a long cell.
MOST_LINES = 200
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


def record(dialect: Dialect, lines: Sequence[str], position: int) -> tuple[list[str], int, bool]:
    """The record that begins in a line; with quotes it may go on in the next ones.

    Args:
        dialect: The form of the text.
        lines: Lines without their ends.
        position: Of the first line of the record.

    Returns:
        Its cells, [] if its quotes do not fit; the number of lines it takes; whether it would fit if more lines came.
    """
    line = lines[position]
    if dialect.separator == " ":
        line = line.strip(" ")
    if not dialect.quote or dialect.quote not in line:
        return re.split(" +", line) if dialect.separator == " " else line.split(dialect.separator), 1, False
    end = min(position + MOST_LINES, len(lines))
    reader = csv.reader(
        # By number: islice would walk from the first line to this one, for every record.
        itertools.chain([line + "\n"], (lines[each] + "\n" for each in range(position + 1, end))),
        delimiter=dialect.separator,
        quotechar=dialect.quote,
        escapechar="\\" if dialect.escape else None,
        skipinitialspace=dialect.separator == " ",
        strict=True,
    )
    try:
        return next(reader), reader.line_num, False
    except csv.Error:
        return [], 1, reader.line_num == end - position < MOST_LINES


def records(dialect: Dialect, lines: Sequence[str]) -> list[list[str]]:
    """The cells of all records of a sample, without blanks around them; [] where quotes do not fit."""
    found, position = [], 0
    while position < len(lines):
        cells, used, _ = record(dialect, lines, position)
        found.append([cell.strip() for cell in cells])
        position += used
    return found


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

    Cells may be empty beside the names of an id and of something else: pandas writes no name above its index, and
    spreadsheets end every line with a separator.

    So a first line of data is never taken for a header as long as it holds a number or looks like its column. Ids that
    look like those below them (letters and digits in the same places) are data in any case. A header of unknown names
    above columns of text only cannot be told from data, and counts as data; so does a line with an unknown name that
    is digits for the greater part.

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
        counts = Counter(map(len, records(dialect, sample)))
        # Of counts that are equally frequent the one of the earlier line.
        cells, lines = counts.most_common(1)[0]
        if cells >= 2 or separator is not None:
            found.append((lines / counts.total(), max(cells, 1), each))
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
    first, *below = records(dialect, sample)
    rows = [cells for cells in below if len(cells) == columns]
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
    named = [cell for cell in first if cell] if names_columns(first) else first
    if len(set(named)) < len(named) or any(map(_is_number, named)):
        return False
    if any(cell in wanted for cell in first) or all(":" in cell for cell in first):
        return True
    if any(is_known(cell) for cell in first):
        return True
    if any(2 * sum(map(str.isdigit, cell)) >= len(cell) for cell in first):
        return False
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
