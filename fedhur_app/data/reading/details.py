"""What is known about items and users: title files, catalogues, files of users."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fedhur_app.data.errors import DataError
from fedhur_app.data.reading.columns import NAMES, names_columns, plain_name
from fedhur_app.data.reading.dialect import SEPARATORS, Dialect, find_dialect, records
from fedhur_app.data.reading.others import json_keys, json_object
from fedhur_app.data.reading.rows import frames
from fedhur_app.data.reading.sources import Source, open_text
from fedhur_app.data.reading.tally import Tally

# The 19 genre flags of GroupLens' u.item, in the order of its columns.
ML_100K_GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War"),
    "Western",
)
_TITLES = ("movietitle", "title", "booktitle", "itemname", "artistname", "productname", "name")
_GENRES = ("genres", "genre", "class", "categories", "category")
# Column of a file of users, and what it is called in a data set.
_OF_USERS = {
    **{"age": "age", "gender": "gender", "sex": "gender", "occupation": "occupation", "location": "location"},
    **{"zipcode": "zip_code", "zip": "zip_code", "postalcode": "zip_code", "country": "country"},
}
_UNKNOWN = ("null", "nan", "none", "\\n", "na", "n/a")


@dataclass(frozen=True)
class Layout:
    """How a file is written; what is None is found.

    Attributes:
        separator: Between cells.
        quote: Around cells, "" for none.
        escape: Whether a backslash escapes quotes.
        header: Whether there is a header.
        names: Names of the columns of a file that has no header.
        recbole: The file is one of RecBole: UTF-8, typed names, genres with blanks between, the year beside the title.
    """

    separator: str | None = None
    quote: str | None = None
    escape: bool | None = None
    header: bool | None = None
    names: tuple[str, ...] = ()
    recbole: bool = False


@dataclass(frozen=True)
class Items:
    """What is known about items, by original id.

    Attributes:
        ids: The catalogue.
        titles: Title, None if the file has none.
        genres: Genres, None if the file has none.
    """

    ids: tuple[str, ...] = ()
    titles: Mapping[str, str] | None = None
    genres: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True)
class Users:
    """What is known about users, by original id.

    Attributes:
        ids: All users of the file.
        columns: By name of the column.
        markets: Market, None if the file has none.
    """

    ids: tuple[str, ...] = ()
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    markets: Mapping[str, str] | None = None


def read_items(source: Source, layout: Layout, on_bad_line: Literal["error", "skip"]) -> tuple[Items, Tally]:
    """Read a file of items: ids, and titles and genres where it has them; or just one id a line.

    Raises:
        DataError: The file cannot be read, or has no column of ids.
    """
    tally = Tally(str(source), on_bad_line)
    names, rows = _table(source, layout, tally)
    ids: dict[str, None] = {}
    titles: dict[str, str] = {}
    genres: dict[str, list[str]] = {}
    flags = names[5:] == ML_100K_GENRES
    plain = [plain_name(name) for name in names]
    identifier = _first(plain, (*NAMES["item"], "id"))
    if identifier is None:
        raise DataError(f"{source}, line 1: there is no column 'item_id' (found: {', '.join(names)})")
    title, genre = _first(plain, _TITLES), _first(plain, _GENRES)
    year = _first(plain, ("releaseyear",)) if layout.recbole else None
    problems = []
    for line, cells in rows:
        if not cells[identifier]:
            problems.append((line, names[identifier], "the id is empty"))
            continue
        ids[cells[identifier]] = None
        if title is not None:
            titles[cells[identifier]] = (
                f"{cells[title]} ({cells[year]})" if year is not None and cells[year] else cells[title]
            )
        if flags:
            flagged = zip(ML_100K_GENRES, cells[5:], strict=True)
            genres[cells[identifier]] = [name for name, flag in flagged if flag == "1"]
        elif genre is not None:
            genres[cells[identifier]] = cells[genre].split() if layout.recbole else _genres(cells[genre])
        tally.rows += 1
    tally.note(problems)
    tally.settle()
    tally.finish()
    with_genres = flags or genre is not None
    return Items(tuple(ids), titles if title is not None else None, genres if with_genres else None), tally


def _genres(cell: str) -> list[str]:
    listed = cell.split("|") if "|" in cell else re.split(r"[,;]", cell)
    return [name for name in (each.strip() for each in listed) if name and name != "(no genres listed)"]


def read_users(
    source: Source, layout: Layout, on_bad_line: Literal["error", "skip"], market: str | None = None
) -> tuple[Users, Tally]:
    """Read a file of users: zip code, age, gender, occupation, location, country and market, where it has them.

    Args:
        source: The file.
        layout: Its form.
        on_bad_line: What to do with damaged lines.
        market: Name of the column of the market, by default market or market_id.

    Raises:
        DataError: The file cannot be read, has no column of ids, or gives one user two markets.
    """
    tally = Tally(str(source), on_bad_line)
    names, rows = _table(source, layout, tally)
    plain = [plain_name(name) for name in names]
    identifier = _first(plain, (*NAMES["user"], "id"))
    if identifier is None:
        raise DataError(f"{source}, line 1: there is no column 'user_id' (found: {', '.join(names)})")
    place = _first(plain, NAMES["market"] if market is None else (plain_name(market),))
    if market is not None and place is None:
        raise DataError(f"{source}, line 1: there is no column '{market}' (found: {', '.join(names)})")
    known = {number: _OF_USERS[name] for number, name in enumerate(plain) if name in _OF_USERS and number != place}
    columns: dict[str, dict[str, str]] = {name: {} for name in known.values()}
    ids: dict[str, None] = {}
    markets: dict[str, str] = {}
    problems = []
    for line, cells in rows:
        user = cells[identifier]
        if not user or (place is not None and not cells[place]):
            column = names[identifier] if not user else names[place or 0]
            problems.append((line, column.split(":")[0], "the id is empty" if not user else "the name is empty"))
            continue
        if place is not None and markets.setdefault(user, cells[place]) != cells[place]:
            raise DataError(
                f"{source}, line {line}: the same user has another market in a line above, so that of a row is "
                "unknown; give the file of interactions a column 'market'"
            )
        ids[user] = None
        for number, name in known.items():
            columns[name][user] = "" if cells[number].lower() in _UNKNOWN else cells[number]
        tally.rows += 1
    tally.note(problems)
    tally.settle()
    tally.finish()
    return Users(tuple(ids), columns, markets if place is not None else None), tally


def _first(plain: Sequence[str], names: Sequence[str]) -> int | None:
    return next((plain.index(name) for name in names if name in plain), None)


def _table(source: Source, layout: Layout, tally: Tally) -> tuple[tuple[str, ...], Iterator[tuple[int, list[str]]]]:
    """Names of the columns, and line and cells of each row."""
    text = open_text(source, only_utf_8=layout.recbole)
    sample = text.sample()
    if sample and sample[0].lstrip().startswith("{"):
        keys = json_keys(sample)
        return tuple(keys), _objects(text.batches, text.line_end, keys, tally)
    if layout.separator is None and not any(mark in line for line in sample for mark in SEPARATORS):
        layout = replace(layout, separator="\t")  # one id a line
    dialect = layout_dialect(source, sample, layout)
    names = (
        layout.names or dialect.header or _GUESSED.get(dialect.columns) or _GUESSED[3] + ("",) * (dialect.columns - 3)
    )
    wanted = {str(number): number for number in range(dialect.columns)}
    parts = frames(text, dialect, wanted, tally)
    return names, ((row[0], list(row[1:])) for frame in parts for row in frame.iter_rows())


_GUESSED: dict[int, tuple[str, ...]] = {1: ("id",), 2: ("id", "title"), 3: ("id", "title", "genres")}


def layout_dialect(source: Source, sample: Sequence[str], layout: Layout, wanted: Sequence[str] = ()) -> Dialect:
    """The dialect of a file of which some is known beforehand.

    Raises:
        DataError: No separator fits, or the header is not what it has to be, or one of the first lines holds names of
            columns but is no header: its names would become ids.
    """
    dialect = find_dialect(
        str(source),
        sample,
        separator=layout.separator,
        quote=layout.quote,
        escape=layout.escape,
        header=layout.header,
        wanted=wanted,
    )
    if layout.recbole and not all(":" in name for name in dialect.header or ()):
        raise DataError(f"{source}, line 1: not the header of a RecBole file (such as user_id:token)")
    if layout.names:
        return Dialect(dialect.separator, len(layout.names), dialect.quote, dialect.escape)
    if dialect.header is None:
        lost = next((cells for cells in records(dialect, sample[:_HEAD]) if names_columns(cells)), None)
        if lost is not None:
            raise DataError(
                f"{source}: one of the first lines names columns ({', '.join(lost[:20])}), but cannot be the header. A "
                f"header is the first line, has as many cells as the others ({dialect.columns}), and its names differ "
                "and are no numbers: correct that line, and delete those above it"
            )
    return dialect


# So many comments may stand above a header.
_HEAD = 20


def _objects(
    batches: Callable[[], Iterator[str]], line_end: str, keys: list[str], tally: Tally
) -> Iterator[tuple[int, list[str]]]:
    """Rows of JSON lines; lists become texts with | between."""
    number = 0
    for batch in batches():
        for line in batch.split(line_end):
            number += 1
            tally.read += 1
            if not line.strip():
                tally.blank += 1
                continue
            content = json_object(line)
            if content is None:
                tally.note([(number, "", "not an object in JSON")])
                continue
            yield number, [_flat(content.get(key)) for key in keys]


def _flat(value: object) -> str:
    if isinstance(value, list):
        return "|".join(filter(None, map(_flat, value)))
    return "" if value is None or isinstance(value, dict) else str(value).strip()
