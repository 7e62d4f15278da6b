"""From text to cells: frames of some columns with their line numbers. Lines of another form are counted as damaged."""

import re
from collections.abc import Iterator, Mapping

import polars as pl

from fedhur_app.data.reading.dialect import Dialect, record
from fedhur_app.data.reading.sources import Text
from fedhur_app.data.reading.tally import Tally

_ANYTHING = re.compile(r"\S")

Problem = tuple[int, str, str]


def frames(text: Text, dialect: Dialect, wanted: Mapping[str, int], tally: Tally) -> Iterator[pl.DataFrame]:
    """Read a delimited text.

    Lines without quotes are split by polars, many at once; a batch with quotes goes through Python's csv module, record
    by record. A record that does not fit (quotes, number of cells) counts as one damaged line, and reading goes on with
    the line after its first one, so that a quote too many costs one line.

    Args:
        text: What to read.
        dialect: Its form.
        wanted: Columns to return: name and number from 0 on.
        tally: Takes the counts of lines; `rows` is left to whoever looks into the cells.

    Yields:
        `line` (Int64, from 1 on) and the wanted columns (String), without blanks around the cells.
    """
    before, header = 0, dialect.header is not None
    rest: list[str] = []
    batches = text.batches()
    following = next(batches, None)
    while (batch := following) is not None:
        following = next(batches, None)
        if rest:
            batch, rest = text.line_end.join([*rest, batch]), []
        if header and (first := _ANYTHING.search(batch)):
            # The header is the first line that is not blank.
            end = batch.find(text.line_end, first.start())
            skipped = batch.count(text.line_end, 0, first.start()) + 1
            tally.header, tally.blank = 1, tally.blank + skipped - 1
            tally.read += skipped
            before, header = before + skipped, False
            if end < 0:
                continue
            batch = batch[end + len(text.line_end) :]
        if dialect.quote and dialect.quote in batch:
            lines = [line.removesuffix("\r") for line in batch.split(text.line_end)]
            frame, used = _quoted(lines, before, dialect, wanted, tally, following is None)
            rest = lines[used:]
        else:
            frame, used = _plain(batch, text.line_end, before, dialect, wanted, tally)
        before += used
        tally.read += used
        yield frame


def _plain(
    batch: str, line_end: str, before: int, dialect: Dialect, wanted: Mapping[str, int], tally: Tally
) -> tuple[pl.DataFrame, int]:
    lines = pl.Series("text", [batch]).str.split(line_end).explode(empty_as_null=False)
    frame = lines.to_frame().with_columns(
        pl.int_range(before + 1, before + 1 + len(lines), dtype=pl.Int64).alias("line"),
        pl.col("text").str.strip_suffix("\r"),
    )
    full = frame.filter(pl.col("text").str.contains(r"\S"))
    tally.blank += len(frame) - len(full)
    cells = pl.col("text")
    if dialect.separator == " ":
        full = full.with_columns(cells.str.strip_chars(" ").str.replace_all(" +", " "))
    found = cells.str.count_matches(dialect.separator, literal=True).cast(pl.Int64) + 1
    right = full.select(found == dialect.columns).to_series()
    if not right.all():
        wrong = full.filter(~right).select("line", found.alias("found"))
        tally.note((line, "", _cell_count(dialect, cells_found)) for line, cells_found in wrong.iter_rows())
        full = full.filter(right)
    if dialect.columns == 1:
        parts = full.select("line", pl.struct(cells.alias("field_0")).alias("cells"))
    else:
        parts = full.select("line", cells.str.split_exact(dialect.separator, dialect.columns - 1).alias("cells"))
    chosen = [
        pl.col("cells").struct.field(f"field_{number}").str.strip_chars().alias(name) for name, number in wanted.items()
    ]
    return parts.select("line", *chosen), len(frame)


def _quoted(
    lines: list[str], before: int, dialect: Dialect, wanted: Mapping[str, int], tally: Tally, last: bool
) -> tuple[pl.DataFrame, int]:
    """The same by the csv module; also how many of the lines were used: a record may go on in the next batch."""
    numbers: list[int] = []
    columns: list[list[str]] = [[] for _ in wanted]
    problems: list[Problem] = []
    places = list(wanted.values())
    position = 0
    while position < len(lines):
        line, number = lines[position], before + position + 1
        if not _ANYTHING.search(line):
            tally.blank += 1
            position += 1
            continue
        cells, used, cut = record(dialect, lines, position)
        if cut and not last:
            break
        problem = "" if cells else "the quotes do not fit"
        if not problem and len(cells) != dialect.columns:
            problem = "the quotes do not fit" if used > 1 else _cell_count(dialect, len(cells))
        if not problem and used > 1 and any("\n" in cells[place] for place in places):
            problem = "a cell goes over the end of the line"
        if problem:
            problems.append((number, "", problem))
            position += 1
            continue
        numbers.append(number)
        for column, place in zip(columns, places, strict=True):
            column.append(cells[place])
        tally.continued += used - 1
        position += used
    tally.note(problems)
    content = {name: pl.Series(column, dtype=pl.String) for name, column in zip(wanted, columns, strict=True)}
    frame = pl.DataFrame({"line": pl.Series(numbers, dtype=pl.Int64), **content})
    return frame.with_columns(pl.col(pl.String).str.strip_chars()), position


def _cell_count(dialect: Dialect, found: int) -> str:
    return f"{dialect.columns} columns expected, {found} found"
