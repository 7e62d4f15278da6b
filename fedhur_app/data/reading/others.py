"""Interactions that are not one delimited line each: JSON lines, sequences of a user's items, Parquet."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import polars as pl

from fedhur_app.data.errors import DataError
from fedhur_app.data.reading.columns import find_columns
from fedhur_app.data.reading.sources import Text
from fedhur_app.data.reading.tally import Tally
from fedhur_app.data.reading.values import Collector

_ROWS = 1 << 20
_ANYTHING = re.compile(r"\S")


def json_object(line: str) -> dict[str, Any] | None:
    """The object that a line of JSON holds, None if it holds none."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def json_keys(sample: list[str]) -> list[str]:
    """The keys of the objects of some lines, in the order of their first appearance."""
    keys: dict[str, None] = {}
    for line in sample:
        keys |= dict.fromkeys(json_object(line) or ())
    return list(keys)


def read_json_lines(text: Text, columns: Mapping[str, str], collector: Collector) -> None:
    """Read one JSON object a line.

    Args:
        text: What to read.
        columns: The key of each role.
        collector: Takes the rows.

    Raises:
        DataError: A damaged line, where those are errors.
    """
    tally, before = collector.tally, 0
    for batch in text.batches():
        numbers: list[int] = []
        cells: dict[str, list[str | None]] = {role: [] for role in columns}
        problems = []
        lines = batch.split(text.line_end)
        for number, line in enumerate(lines, start=before + 1):
            if not _ANYTHING.search(line):
                tally.blank += 1
                continue
            content = json_object(line)
            if content is None:
                problems.append((number, "", "not an object in JSON"))
                continue
            numbers.append(number)
            for role, key in columns.items():
                cells[role].append(_cell(content.get(key)))
        tally.note(problems)
        tally.read += len(lines)
        before += len(lines)
        content_of = {role: pl.Series(column, dtype=pl.String).str.strip_chars() for role, column in cells.items()}
        collector.add(pl.DataFrame({"line": pl.Series(numbers, dtype=pl.Int64), **content_of}))


def _cell(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    # JSON can spell half of a pair of UTF-16 units, which no text can hold.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else str(value)


def read_sequences(texts: Mapping[Text, int | None], separator: str, collector: Collector) -> None:
    """Read one user a line: the user, then items in the order of time; the time of an item is its position.

    A user who has several lines, also in several files, goes on counting.

    Args:
        texts: What to read, and the part of the split (0, 1, 2) that it is, None for no split.
        separator: Between cells; a blank means one or more.
        collector: Takes the rows.

    Raises:
        DataError: A damaged line, where those are errors.
    """
    tally = collector.tally
    counts: dict[str, int] = {}
    for text, label in texts.items():
        before = 0
        for batch in text.batches():
            lines = pl.Series("text", [batch]).str.split(text.line_end).explode(empty_as_null=False)
            frame = lines.str.strip_chars().to_frame().with_row_index("line", offset=before + 1)
            before += len(lines)
            tally.read += len(lines)
            full = frame.filter(pl.col("text") != "")
            tally.blank += len(frame) - len(full)
            cells = pl.col("text").str.replace_all(" +", " ") if separator == " " else pl.col("text")
            listed = full.select(pl.col("line").cast(pl.Int64), cells.str.split(separator).alias("cells")).select(
                "line",
                pl.col("cells").list.first().str.strip_chars().alias("user"),
                pl.col("cells").list.slice(1).alias("item"),
            )
            tally.without += int((listed["item"].list.len() == 0).sum())
            listed = listed.filter(pl.col("item").list.len() > 0)
            starts = []
            for user, items in zip(listed["user"].to_list(), listed["item"].list.len().to_list(), strict=True):
                starts.append(counts.get(user, 0))
                counts[user] = starts[-1] + items
            start = pl.Series("start", starts, dtype=pl.Int64)
            rows = (
                listed.with_columns(start)
                .with_columns(pl.int_ranges("start", pl.col("start") + pl.col("item").list.len()).alias("time"))
                .drop("start")
                .explode("item", "time")
            )
            collector.add(rows.with_columns(pl.col("item").str.strip_chars()), label, several=True)


def read_parquet(
    path: Path, given: Mapping[str, str | None], tally: Tally, zeros: Literal["keep", "drop"]
) -> tuple[Collector, dict[str, str], list[str]]:
    """Read a Parquet file with one interaction a row.

    Args:
        path: The file.
        given: The column of a role, where people named it.
        tally: Takes the counts.
        zeros: What to do with rows of rating 0.

    Returns:
        The rows, the column of each role, and the names of all columns.

    Raises:
        DataError: The file cannot be read, a column is missing or of the wrong type; a damaged row.
    """
    try:
        table = pl.scan_parquet(path)
        schema = table.collect_schema()
        names = list(schema)
        columns = {
            role: names[number] for role, number in find_columns(str(path), names, [], given, len(names)).items()
        }
        for role in ("user", "item", "market"):
            if role in columns and not (schema[columns[role]].is_integer() or schema[columns[role]] in _TEXT):
                raise DataError(
                    f"{path}, column '{columns[role]}': ids must be integers or text, not {schema[columns[role]]}"
                )
        for role in ("rating", "time", "split"):
            if role in columns and schema[columns[role]].is_nested():
                raise DataError(f"{path}, column '{columns[role]}': numbers are needed, not {schema[columns[role]]}")
        rows = table.select(pl.col(name).alias(role) for role, name in columns.items()).collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} is damaged or is not a Parquet file; write it again") from error
    collector = Collector(columns, tally, zeros)
    text = [role for role in ("user", "item", "market") if role in columns]
    for start in range(0, len(rows), _ROWS):
        part = rows.slice(start, _ROWS).with_columns(pl.col(text).cast(pl.String).str.strip_chars())
        number = pl.int_range(start + 1, start + 1 + len(part), dtype=pl.Int64, eager=True).alias("line")
        tally.read += len(part)
        collector.add(part.with_columns(number))
    return collector, columns, names


_TEXT = (pl.String, pl.Categorical, pl.Enum)
