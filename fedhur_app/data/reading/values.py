"""From cells to numbers: dense codes of ids, ratings, times. Arrays only, never a Python object a row."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Literal

import numpy as np
import polars as pl

from fedhur_app.data.interactions import Coded
from fedhur_app.data.reading.columns import PARTS
from fedhur_app.data.reading.rows import Problem
from fedhur_app.data.reading.tally import Tally

_LARGEST = float(np.finfo(np.float32).max)
# Longer ones are damage; Python also refuses to read integers of several thousand digits.
_LONGEST = 1000
_DATES = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d")
_NOT_FINITE = ("nan", "inf", "infinity", "null", "none", "na", "n/a", "\\n")


class Numbering:
    """Numbers texts 0, 1, ... in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def codes(self, texts: pl.Series) -> np.ndarray:
        """The number of each text, int32 (n,)."""
        distinct = texts.unique()
        numbers = self._numbers
        known = [numbers.setdefault(text, len(numbers)) for text in distinct.to_list()]
        if not known:
            return np.empty(0, dtype=np.int32)
        return texts.replace_strict(distinct, pl.Series(known, dtype=pl.Int32), return_dtype=pl.Int32).to_numpy()

    def texts(self) -> list[str]:
        """The texts by number."""
        return list(self._numbers)


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a file of interactions, in the order of the file.

    Attributes:
        users: Ids of the users (n,).
        items: Ids of the items (n,).
        ratings: float32 (n,), or None.
        times: int64 (n,), or None.
        markets: Market of each row (n,), or None.
        labels: int8 (n,): 0 train, 1 validation, 2 test, or None.
        sample: The first rows, as text.
        zeros: Number of rows of rating 0 that were left out.
    """

    users: Coded
    items: Coded
    ratings: np.ndarray | None
    times: np.ndarray | None
    markets: Coded | None
    labels: np.ndarray | None
    sample: pl.DataFrame
    zeros: int = 0


class Collector:
    """Takes frames with the columns line, user, item and, if there are any, rating, time, market and split.

    Args:
        names: How each column is called in messages.
        tally: Takes rows and damaged lines.
        zeros: Whether rows of rating 0 are kept or left out.
    """

    def __init__(self, names: dict[str, str], tally: Tally, zeros: Literal["keep", "drop"] = "keep") -> None:
        self._names = names
        self.tally = tally
        self._drop_zeros, self._zeros = zeros == "drop", 0
        self._numberings = {role: Numbering() for role in ("user", "item", "market")}
        self._parts: dict[str, list[np.ndarray]] = {}
        self._sample: pl.DataFrame | None = None

    def add(self, frame: pl.DataFrame, label: int | None = None, several: bool = False) -> None:
        """Take the rows of a frame; cells may be text or, from Parquet, numbers and dates.

        Args:
            frame: Columns line (Int64) and one a role.
            label: Part of the split that these rows belong to.
            several: Whether a line may give several rows.

        Raises:
            DataError: A damaged row, where those are errors.
        """
        problems: list[Problem] = []
        for role in ("user", "item", "market"):
            if role in frame.columns:
                problems += _bad_ids(frame, role, self._names[role])
        numbers: dict[str, pl.Series] = {}
        for role, read in (("rating", _ratings), ("time", _times), ("split", _parts)):
            if role in frame.columns:
                numbers[role] = read(frame[role])
                problems += _unreadable(frame, role, numbers[role], self._names[role])
        if numbers:
            frame = frame.with_columns(**numbers)
        self.tally.note(problems)
        self.tally.settle()
        if problems:
            bad = pl.Series(sorted({line for line, _, _ in problems}), dtype=pl.Int64)
            frame = frame.filter(~pl.col("line").is_in(bad.implode()))
        self.tally.rows += frame["line"].n_unique() if several else len(frame)
        if self._drop_zeros and "rating" in numbers:
            rated = frame.filter(pl.col("rating") != 0)
            self._zeros += len(frame) - len(rated)
            frame = rated
        for role, numbering in self._numberings.items():
            if role in frame.columns:
                self._parts.setdefault(role, []).append(numbering.codes(frame[role]))
        for role in numbers:
            self._parts.setdefault(role, []).append(frame[role].to_numpy())
        if label is not None:
            self._parts.setdefault("label", []).append(np.full(len(frame), label, dtype=np.int8))
        if self._sample is None or len(self._sample) < 3:
            kept = frame.head(3).drop("line").with_columns(pl.all().cast(pl.String))
            self._sample = kept if self._sample is None else pl.concat([self._sample, kept]).head(3)

    def finish(self) -> Columns:
        """All rows. The collector is empty afterwards."""
        self.tally.finish()
        arrays = {}
        for role in list(self._parts):
            # One column after the other, so that only one is there twice.
            arrays[role] = np.concatenate(self._parts.pop(role))
        coded = {
            role: Coded(arrays[role], numbering.texts())
            for role, numbering in self._numberings.items()
            if role in arrays
        }
        none = Coded(np.empty(0, dtype=np.int32), [])
        return Columns(
            users=coded.get("user", none),
            items=coded.get("item", none),
            ratings=arrays.get("rating"),
            times=arrays.get("time"),
            markets=coded.get("market"),
            labels=arrays.get("split", arrays.get("label")),
            sample=pl.DataFrame() if self._sample is None else self._sample,
            zeros=self._zeros,
        )


def _bad_ids(frame: pl.DataFrame, role: str, name: str) -> list[Problem]:
    """Ids that are empty or hold control characters; looked at once each."""
    texts = frame[role]
    distinct = texts.unique()
    bad = distinct.filter(
        distinct.is_null()
        | (distinct == "")
        | (distinct.str.len_bytes() > _LONGEST)
        | distinct.str.contains(r"[\x00-\x1f\x7f]")
    )
    if role == "market":
        bad = bad.append(distinct.filter(distinct.str.contains("/", literal=True)))
    if not len(bad):
        return []
    what = "name" if role == "market" else "id"
    found = frame.filter(texts.is_in(bad.implode(), nulls_equal=True)).select("line", role)
    return [(line, name, _wrong_id(text, what)) for line, text in found.iter_rows()]


def _wrong_id(text: str | None, what: str) -> str:
    if not text:
        return f"the {what} is empty"
    if len(text.encode()) > _LONGEST:
        return f"the {what} is longer than {_LONGEST} bytes"
    if what == "name" and "/" in text:
        return "the name holds a '/', which is kept for user ids"
    return f"the {what} holds a zero byte or another control character"


def _unreadable(frame: pl.DataFrame, role: str, values: pl.Series, name: str) -> list[Problem]:
    if not values.null_count():
        return []
    found = frame.filter(values.is_null()).select("line", pl.col(role).cast(pl.String))
    return [(line, name, _wrong_number(text, role)) for line, text in found.iter_rows()]


def _wrong_number(text: str | None, role: str) -> str:
    if not text:
        return f"the {role} is empty"
    if role == "split":
        return f"no part of a split; they are called {', '.join(PARTS)}"
    if text.lower().lstrip("+-") in _NOT_FINITE:
        return f"the {role} is not a finite number"
    if role == "rating":
        return "not a finite number" + (" (2,5 has to be 2.5)" if re.fullmatch(r"[+-]?\d+,\d+", text) else "")
    return "not a whole number of seconds (or another unit), nor a date such as 2026-11-30 or 2026-11-30T09:30:00Z"


def _parts(cells: pl.Series) -> pl.Series:
    """Int8: 0 train, 1 validation, 2 test; null where a cell is none of these."""
    names = cells.cast(pl.String).str.strip_chars().str.to_lowercase()
    return names.replace_strict(PARTS, default=None, return_dtype=pl.Int8)


def _ratings(cells: pl.Series) -> pl.Series:
    """Float32, null where a cell is no finite number."""
    values = cells.cast(pl.Float64, strict=False)
    fits = values.is_finite() & (values.abs() <= _LARGEST)
    return values.set(~fits.fill_null(value=False), None).cast(pl.Float32)


def _times(cells: pl.Series) -> pl.Series:
    """Int64, null where a cell is no time. Text never goes through a float; dates become seconds since 1970 (UTC)."""
    if cells.dtype in (pl.Datetime, pl.Date):
        return _seconds(cells)
    if cells.dtype.is_float():
        whole = cells.is_finite() & (cells == cells.floor()) & (cells.abs() < 2.0**63)
        return cells.set(~whole.fill_null(value=False), None).cast(pl.Int64)
    values = cells.cast(pl.Int64, strict=False)
    for form in _DATES:
        if not (values.is_null() & cells.is_not_null()).any():
            return values
        values = values.fill_null(_seconds(cells.str.to_datetime(form, strict=False)))
    rare = cells.filter(values.is_null() & cells.is_not_null()).unique()
    if not len(rare):
        return values
    known = pl.Series([_time(text) for text in rare.to_list()], dtype=pl.Int64)
    return values.fill_null(cells.replace_strict(rare, known, default=None, return_dtype=pl.Int64))


def _seconds(dates: pl.Series) -> pl.Series:
    return dates.cast(pl.Datetime("us")).dt.epoch("us") // 1_000_000


def _time(text: str) -> int | None:
    """A time written in another way: `8.8e8`, `881250949.0` or a date of ISO 8601 with a time zone."""
    try:
        number = Decimal(text)
        # Bounded before int(), which would write out 1e999999999.
        if number.is_finite() and abs(number.adjusted()) < 19 and number == number.to_integral_value():
            return value if -(2**63) <= (value := int(number)) < 2**63 else None
        return None
    except (InvalidOperation, ValueError):
        pass
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return None
    return int((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() // 1)
