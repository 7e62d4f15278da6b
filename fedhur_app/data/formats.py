"""The forms in which data sets are published, how a file tells its form, and reading a data set in one of them."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Coded, Interactions, Which, from_codes
from fedhur_app.data.published import read_matrix_folders, read_npz_rows
from fedhur_app.data.reading.columns import find_columns, plain_name
from fedhur_app.data.reading.details import (
    ML_100K_GENRES,
    Items,
    Layout,
    Users,
    layout_dialect,
    read_items,
    read_users,
)
from fedhur_app.data.reading.dialect import SEPARATOR_NAMES, records
from fedhur_app.data.reading.others import json_keys, read_json_lines, read_parquet, read_sequences
from fedhur_app.data.reading.rows import frames
from fedhur_app.data.reading.sources import Source, Text, find_source, open_text
from fedhur_app.data.reading.tally import Tally
from fedhur_app.data.reading.values import Collector, Columns

Format = Literal[
    "auto", "movielens", "csv", "inter", "amazon", "bookcrossing", "lastfm", "sequence", "parquet", "npz", "matrices"
]


@dataclass(frozen=True)
class ReadOptions:
    """What people may say about a file; what they leave out is found.

    Attributes:
        format: Form of the file.
        user_col: Name of the column of users, or its number from 1 on.
        item_col: Of items.
        rating_col: Of ratings.
        time_col: Of times.
        market_col: Of markets, in the file of interactions or in that of users.
        split_col: Of the parts of a split (train, valid, test) that the data come with.
        implicit_zeros: Whether rows with rating 0 (in Book-Crossing: no rating was given) are kept or left out.
        dedupe: Which row of a repeated (user, item) pair stays.
        items: File of the catalogue, with titles and genres where it has them.
        users: File of users.
        on_bad_line: Whether a damaged line is an error, or is left out and counted.
        keep_catalogue: Keep the catalogue that an npz file or matrices publish, also items nobody has touched.
    """

    format: Format = "auto"
    user_col: str | None = None
    item_col: str | None = None
    rating_col: str | None = None
    time_col: str | None = None
    market_col: str | None = None
    split_col: str | None = None
    implicit_zeros: Literal["keep", "drop"] = "keep"
    dedupe: Which = "last"
    items: Path | None = None
    users: Path | None = None
    on_bad_line: Literal["error", "skip"] = "error"
    keep_catalogue: bool = False

    @property
    def given(self) -> dict[str, str | None]:
        """The column that people named, by role."""
        return {
            "user": self.user_col,
            "item": self.item_col,
            "rating": self.rating_col,
            "time": self.time_col,
            "market": self.market_col,
            "split": self.split_col,
        }


@dataclass
class Taken:
    """What was found in the files, and what each column was taken for.

    Attributes:
        format: Form of the file.
        place: Name of the file.
        files: All files that were read.
        form: Encoding, separator, quotes and header, in words.
        columns: Name of the column of each role.
        unused: Names of the other columns.
        tallies: Counts of lines of each file; first that of the interactions.
        rows: Number of interactions that were read.
        dropped: Number of interactions that were left out, by reason.
        heads: Roles of the columns of `sample`.
        sample: The first rows.
        catalogue: Ids of the items file, which stay in the catalogue.
        beside: The files of items and of users that were read, by these words.
        known: How many of the items or users such a file knows, in words, by its name.
    """

    format: str
    place: str
    files: list[Path]
    form: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    sample: list[tuple[Any, ...]] = field(default_factory=list)
    catalogue: tuple[str, ...] = ()
    beside: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Known:
    """A file of interactions that is known by its name, and the files that lie beside it."""

    format: Format
    pattern: str
    layout: Layout
    items: tuple[tuple[str, Layout], ...] = ()
    users: tuple[tuple[str, Layout], ...] = ()


_U_ITEM = Layout("|", "", False, False, ("item_id", "title", "date", "video_date", "url", *ML_100K_GENRES))
_U_USER = Layout("|", "", False, False, ("user_id", "age", "gender", "occupation", "zip_code"))
_RATING_NAMES = ("user", "item", "rating", "timestamp")
_MOVIES_DAT = Layout("::", "", False, False, ("item_id", "title", "genres"))
_USERS_DAT = Layout("::", "", False, False, ("user_id", "gender", "age", "occupation", "zip_code"))
_RECBOLE = Layout("\t", "", False, True, recbole=True)
_BOOKS = Layout(escape=True, header=True)
_TABS = Layout("\t", "", False)
# Those that are told by their names alone come first.
_KNOWN = (
    _Known(
        "movielens",
        "u.data",
        Layout("\t", "", False, False, _RATING_NAMES),
        (("u.item", _U_ITEM),),
        (("u.user", _U_USER),),
    ),
    _Known(
        "movielens",
        "ratings.dat",
        Layout("::", "", False, False, _RATING_NAMES),
        (("movies.dat", _MOVIES_DAT),),
        (("users.dat", _USERS_DAT),),
    ),
    _Known("lastfm", "user_artists.dat", _TABS, (("artists.dat", _TABS),)),
    _Known(
        "lastfm",
        "usersha1-artmbid-artname-plays.tsv",
        Layout("\t", "", False, False, ("user", "artist_mbid", "artist", "plays")),
        (),
        (("usersha1-profile.tsv", Layout("\t", "", False, False, ("user", "gender", "age", "country", "signup"))),),
    ),
    _Known("bookcrossing", "bx-book-ratings.csv", _BOOKS, (("bx-books.csv", _BOOKS),), (("bx-users.csv", _BOOKS),)),
    _Known("inter", "*.inter", _RECBOLE, (("{stem}.item", _RECBOLE),), (("{stem}.user", _RECBOLE),)),
    _Known("movielens", "ratings.csv", Layout(), (("movies.csv", Layout()),), (("users.csv", Layout()),)),
)
# Of a format, for files of other names.
_LAYOUTS = {"inter": _RECBOLE, "bookcrossing": _BOOKS, "lastfm": _TABS}
_PATTERNS = tuple(known.pattern for known in _KNOWN)
_USER_OF_AMAZON = re.compile(r"A[0-9A-Z]{11,20}")
_ITEM_OF_AMAZON = re.compile(r"[0-9B][0-9A-Z]{9}")
_SPLIT_FILES = {"train.txt": 0, "valid.txt": 1, "test.txt": 2}


def read_grouplens_100k(folder: Path, name: str = "ml-100k") -> Interactions:
    """Read a data set in the form of MovieLens 100K.

    Args:
        folder: Holds `u.data` (user, item, rating, time; tabs) and, if they are there, `u.item`
            (Latin-1, `|`: id, title, date, date, address, 19 genre flags) and `u.user`
            (`|`: id, age, gender, occupation, zip code).
        name: Name of the data set.

    Raises:
        DataError: A file cannot be read; the text names file, line and column.
    """
    return read_data(Path(folder) / "u.data", name, ReadOptions("movielens"))[0]


def read_recbole(folder: Path, name: str) -> Interactions:
    """Read a data set in RecBole's atomic files, which start with a header such as `user_id:token`.

    Args:
        folder: Holds `<name>.inter` (user_id, item_id, and rating, timestamp and market if there) and, if they are
            there, `<name>.item` (movie_title, release_year, class or genre) and `<name>.user` (zip_code, market).
            The market may be called market or market_id; that of a row goes before that of its user.
        name: Name of the files and of the data set.

    Raises:
        DataError: A file cannot be read; the text names file, line and column.
    """
    return read_data(Path(folder) / f"{name}.inter", name, ReadOptions("inter"))[0]


def read_data(path: Path, name: str, options: ReadOptions) -> tuple[Interactions, Taken]:
    """Read a data set from a file, or from a folder that holds known files or a single file.

    Args:
        path: The file or folder.
        name: Name of the data set.
        options: What is known about it.

    Raises:
        DataError: The files cannot be read; the text names file, line and column and says what to do.
    """
    path = _only_file(path) or path
    if path.is_dir():
        if _wants(options, "matrices") and (path / "0" / "train_dataset.npy").is_file():
            _only_as_published(path, options)
            return _published(read_matrix_folders(path, name, options.keep_catalogue), "matrices", path)
        if _wants(options, "sequence") and (path / "train.txt").is_file() and (path / "test.txt").is_file():
            return _read_folder_of_sequences(path, name, options)
        source = _main_file(path, options)
    elif (_wants(options, "npz") and path.suffix == ".npz") or options.format == "npz":
        _only_as_published(path, options)
        return _published(read_npz_rows(path, name, options.keep_catalogue, options.dedupe), "npz", path)
    else:
        source = find_source(path, _PATTERNS)
    if _wants(options, "parquet") and (options.format == "parquet" or _is_parquet(source)):
        tally = Tally(str(source), options.on_bad_line, unit="row")
        collector, columns, names = read_parquet(source.path, options.given, tally, options.implicit_zeros)
        taken = Taken("parquet", str(source), [source.path], columns=columns, tallies=[tally])
        taken.unused = [each for each in names if each not in columns.values()]
        return _assemble(
            name,
            collector.finish(),
            taken,
            *_details(source, _Known("parquet", "*", Layout()), options, taken),
            options,
        )
    return _read_text(source, name, options)


def read_item_file(path: Path) -> Items:
    """Read a file of items alone: ids, and titles and genres where it has them; or just one id a line.

    Raises:
        DataError: The file cannot be read, or has no column of ids; the text names file and line.
    """
    found = _companion(Source(path), (), path)
    assert found is not None
    return read_items(*found, "error")[0]


def _wants(options: ReadOptions, what: Format) -> bool:
    return options.format in ("auto", what)


def _only_as_published(path: Path, options: ReadOptions) -> None:
    """Arrays are taken as they are: an option that changes nothing would promise something.

    Raises:
        DataError: An option was given that only tables have.
    """
    given: dict[str, str | Path | None] = {f"--{role}-col": name for role, name in options.given.items()}
    given |= {"--items": options.items, "--users": options.users}
    without = [option for option, value in given.items() if value is not None]
    if without:
        raise DataError(
            f"{path} holds arrays of known names, for which {', '.join(without)} cannot be used; leave it out"
        )


def _published(data: Interactions, form: str, path: Path) -> tuple[Interactions, Taken]:
    files = sorted(each for each in path.rglob("*.npy")) if path.is_dir() else [path]
    catalogue = tuple(data.item_ids.tolist())
    return data, Taken(form, str(path), files, rows=len(data), catalogue=catalogue)


def _is_parquet(source: Source) -> bool:
    if source.member:
        return False
    with source.path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _only_file(folder: Path) -> Path | None:
    """The file of a folder that holds nothing else but hidden files; None for any other path."""
    if not folder.is_dir():
        return None
    entries = [each for each in folder.iterdir() if not each.name.startswith(".")]
    return entries[0] if len(entries) == 1 and entries[0].is_file() else None


def _main_file(folder: Path, options: ReadOptions) -> Source:
    """The known file of interactions in a folder, or one folder below."""
    patterns = [known.pattern for known in _KNOWN if _wants(options, known.format)]
    for within in (folder, *sorted(each for each in folder.iterdir() if each.is_dir())):
        names = sorted(each for each in within.iterdir() if each.is_file())
        for pattern in patterns:
            found = [each for each in names if fnmatch.fnmatchcase(Source(each).name.lower(), pattern)]
            if len(found) == 1:
                return Source(found[0])
            if found:
                shown = ", ".join(each.name for each in found[:5])
                raise DataError(f"{folder} is a folder that holds several data sets ({shown}): give one of the files")
    present = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    if not present:
        raise DataError(
            f"{folder} is a folder with nothing in it: put a file of interactions there, or give the file itself"
        )
    known = ", ".join([*_PATTERNS, "train.txt with test.txt", "0/train_dataset.npy"])
    raise DataError(
        f"{folder} is a folder without a known file of interactions ({known}): give one of its files "
        f"({', '.join(present[:5])}) itself"
    )


def _known(source: Source, options: ReadOptions, sample: Sequence[str]) -> _Known:
    """What is known about a file by its name, else by the format that people gave, else by its first lines."""
    for known in _KNOWN:
        if _wants(options, known.format) and fnmatch.fnmatchcase(source.name.lower(), known.pattern):
            return known
    if options.format != "auto":
        same = next((known for known in _KNOWN if known.format == options.format), None)
        items, users = (same.items, same.users) if same else ((), ())
        return _Known(options.format, "*", _LAYOUTS.get(options.format, Layout()), items, users)
    if sample[0].lstrip().startswith("{"):
        return _Known("amazon", "*", Layout())
    first = sample[0].split("\t")
    if len(first) > 1 and all(re.fullmatch(r"\w+:(token|float|token_seq|float_seq)", cell.strip()) for cell in first):
        return _Known("inter", "*", _RECBOLE, _KNOWN[5].items, _KNOWN[5].users)
    if {"userid", "isbn", "bookrating"} <= {plain_name(cell) for cell in re.split("[;,]", sample[0])}:
        return _Known("bookcrossing", "*", _BOOKS, _KNOWN[4].items, _KNOWN[4].users)
    if re.match(r"\s*\[\s*(\{|$)", sample[0]):
        raise DataError(f"{source} is one JSON array; write one object a line (JSON lines)")
    if _sequence_separator(sample, surely=True):
        return _Known("sequence", "*", Layout())
    return _Known("csv", "*", Layout())


def _read_text(source: Source, name: str, options: ReadOptions) -> tuple[Interactions, Taken]:
    text = open_text(source, only_utf_8=options.format == "inter" or source.name.endswith(".inter"))
    sample = text.sample()
    if not sample:
        raise DataError(f"{source}: its first line is too long for a table; choose the format with --format")
    known = _known(source, options, sample)
    taken = Taken(known.format, str(source), [source.path])
    taken.form["encoding"] = {"utf-8-sig": "UTF-8", "utf-16": "UTF-16", "latin-1": "Latin-1"}[text.encoding]
    tally = Tally(str(source), options.on_bad_line)
    taken.tallies.append(tally)
    if known.format == "sequence":
        return _read_sequences({text: None}, sample, name, options, taken)
    items, users = _details(source, known, options, taken)
    given = options.given
    if known.format == "amazon" and sample[0].lstrip().startswith("{"):
        keys = json_keys(list(sample))
        if not keys:
            raise DataError(
                f"{source}: its first lines begin with {{ but are no objects in JSON (names and texts need double "
                "quotes, and an object stands on one line)"
            )
        numbers = find_columns(str(source), keys, [], given, len(keys))
        taken.columns = {role: keys[number] for role, number in numbers.items()}
        taken.form["form"] = "one JSON object a line"
        taken.unused = [key for key in keys if key not in taken.columns.values()]
        collector = Collector(taken.columns, tally, options.implicit_zeros)
        read_json_lines(text, taken.columns, collector)
        return _assemble(name, collector.finish(), taken, items, users, options)
    if users.markets is not None and options.market_col is not None:
        given = given | {"market": None}
    wanted = [each for each in given.values() if each is not None]
    dialect = layout_dialect(source, sample, known.layout, wanted)
    names = known.layout.names or dialect.header
    rows = records(dialect, sample)[dialect.header is not None :]
    rows = [cells for cells in rows if len(cells) == dialect.columns]
    if names is None and known.format in ("csv", "amazon"):
        given = _of_amazon(given, rows)
    numbers = find_columns(str(source), names, rows, given, dialect.columns)
    heads = [
        (names[number].split(":")[0] if names else "") or str(number + 1)  # pandas gives its index no name
        for number in range(dialect.columns)
    ]
    taken.columns = {role: heads[number] for role, number in numbers.items()}
    taken.unused = [head for number, head in enumerate(heads) if number not in numbers.values()]
    taken.form |= {
        "separator": SEPARATOR_NAMES.get(dialect.separator, dialect.separator),
        "header": "no header" if dialect.header is None else ", ".join(dialect.header),
    }
    collector = Collector(taken.columns, tally, options.implicit_zeros)
    for frame in frames(text, dialect, numbers, tally):
        collector.add(_without_headers(frame, dialect.header, numbers, tally))
    return _assemble(name, collector.finish(), taken, items, users, options)


def _without_headers(
    frame: pl.DataFrame, header: Sequence[str] | None, numbers: Mapping[str, int], tally: Tally
) -> pl.DataFrame:
    """Files that were put together one after the other repeat their header, which is no user and no item."""
    if header is None:
        return frame
    again = (pl.col("user") == header[numbers["user"]]) & (pl.col("item") == header[numbers["item"]])
    found = frame.filter(again)["line"].to_list()
    tally.note((line, "", "the header again") for line in found)
    return frame.filter(~again) if found else frame


def _of_amazon(given: Mapping[str, str | None], rows: Sequence[Sequence[str]]) -> dict[str, str | None]:
    """Amazon's ratings without a header name the user first (2014) or the item first (2018): their ids tell."""
    changed = dict(given)
    if given["user"] is None and given["item"] is None and rows and len(rows[0]) >= 2:
        users = [[bool(_USER_OF_AMAZON.fullmatch(row[place])) for row in rows] for place in (0, 1)]
        items = [[bool(_ITEM_OF_AMAZON.fullmatch(row[place])) for row in rows] for place in (0, 1)]
        half = len(rows) / 2
        if sum(items[0]) > half and sum(users[1]) > half and sum(users[0]) <= half:
            changed |= {"user": "2", "item": "1"}
    return changed


def _sequence_separator(sample: Sequence[str], surely: bool) -> str | None:
    """The separator of lines that are a user and then items.

    Args:
        sample: Some lines.
        surely: Only if the lines hold whole numbers, of differing count, and cannot be a table.
    """
    for separator in ("\t", ",", ";", " "):
        lines = [re.split(" +", line.strip()) if separator == " " else line.strip().split(separator) for line in sample]
        if sum(len(cells) > 1 for cells in lines) > len(lines) / 2:
            if not surely:
                return separator
            lengths = {len(cells) for cells in lines}
            most = max(sum(len(cells) == length for cells in lines) for length in lengths)
            whole = all(cell.strip().isdecimal() for cells in lines for cell in cells if cell)
            return separator if whole and most < 0.5 * len(lines) else None
    return None


def _read_folder_of_sequences(folder: Path, name: str, options: ReadOptions) -> tuple[Interactions, Taken]:
    paths = {folder / file: label for file, label in _SPLIT_FILES.items() if (folder / file).is_file()}
    texts: dict[Text, int | None] = {open_text(find_source(path)): label for path, label in paths.items()}
    taken = Taken("sequence", f"{folder} ({', '.join(path.name for path in paths)})", list(paths))
    taken.tallies.append(Tally(taken.place, options.on_bad_line))
    return _read_sequences(texts, next(iter(texts)).sample(), name, options, taken)


def _read_sequences(
    texts: Mapping[Text, int | None], sample: Sequence[str], name: str, options: ReadOptions, taken: Taken
) -> tuple[Interactions, Taken]:
    separator = _sequence_separator(sample, surely=False)
    if separator is None:
        raise DataError(f"{taken.place}: no line holds a user and items with tab, comma, semicolon or blank between")
    taken.form |= {"separator": SEPARATOR_NAMES[separator], "header": "no header"}
    taken.columns = {"user": "the first of a line", "item": "the others", "time": "place in the line"}
    source = next(iter(texts)).source
    items, users = _details(source, _Known("sequence", "*", Layout()), options, taken)
    collector = Collector({role: role for role in taken.columns}, taken.tallies[0])
    read_sequences(texts, separator, collector)
    return _assemble(name, collector.finish(), taken, items, users, options)


def _details(source: Source, known: _Known, options: ReadOptions, taken: Taken) -> tuple[Items, Users]:
    """Items and users from the files that people named, else from those beside the file of interactions."""
    items, users = Items(), Users()
    found = _companion(source, known.items, options.items)
    if found is not None:
        items, tally = read_items(*found, options.on_bad_line)
        _note(taken, found[0], tally)
        taken.catalogue = items.ids
        taken.beside["items"] = tally.place
    found = _companion(source, known.users, options.users)
    if found is not None:
        named = options.market_col if options.users is not None else None
        users, tally = read_users(*found, options.on_bad_line, named)
        _note(taken, found[0], tally)
        taken.beside["users"] = tally.place
    return items, users


def _note(taken: Taken, source: Source, tally: Tally) -> None:
    taken.tallies.append(tally)
    if source.path not in taken.files:
        taken.files.append(source.path)


def _companion(
    source: Source, beside: tuple[tuple[str, Layout], ...], given: Path | None
) -> tuple[Source, Layout] | None:
    stem = source.name.rsplit(".", 1)[0]
    if given is not None:
        found = find_source(given)
        layouts = [
            layout for known in _KNOWN for pattern, layout in (*known.items, *known.users) if pattern == found.name
        ]
        return found, layouts[0] if layouts else _RECBOLE if found.name.endswith((".item", ".user")) else Layout()
    for pattern, layout in beside:
        near = source.beside(pattern.replace("{stem}", stem))
        if near is not None:
            return near, layout
    return None


def _assemble(
    name: str, columns: Columns, taken: Taken, items: Items, users: Users, options: ReadOptions
) -> tuple[Interactions, Taken]:
    taken.rows = len(columns.users.codes) + columns.zeros
    if columns.zeros:
        taken.dropped["rating 0: implicit"] = columns.zeros
    taken.heads, taken.sample = columns.sample.columns, columns.sample.rows()
    if not len(columns.users.codes):
        raise DataError(
            f"{taken.place}: there are no interactions" + (" but those of rating 0" if columns.zeros else "")
        )
    for what, texts, ids in (("items", columns.items.texts, items.ids), ("users", columns.users.texts, users.ids)):
        if what in taken.beside:
            _compare(what, texts, frozenset(ids), taken)
    markets = columns.markets
    if markets is None and users.markets is not None:
        markets = _markets_of_users(columns.users, users.markets, taken)
    data = from_codes(
        name,
        columns.users,
        columns.items,
        columns.ratings,
        columns.times,
        markets=markets,
        labels=columns.labels,
        catalogue=items.ids,
        item_titles=items.titles,
        item_genres=items.genres,
        user_columns=users.columns,
        which=options.dedupe,
    )
    if repeated := len(columns.users.codes) - len(data):
        taken.dropped["repeated (user, item) pairs"] = repeated
    return data, taken


def _compare(what: str, texts: Sequence[str], ids: frozenset[str], taken: Taken) -> None:
    """Say how many ids a file of items or users shares with the interactions. None: they are written otherwise.

    Raises:
        DataError: It shares none.
    """
    place, shared = taken.beside[what], sum(text in ids for text in texts)
    if not shared:
        raise DataError(
            f"{place}: none of the {len(texts)} {what} of {taken.place} is there; ids have to be written alike in both "
            "(01 is not 1)"
        )
    taken.known[place] = f"{shared} of {len(texts)} {what} are there"


def _markets_of_users(users: Coded, market_of: Mapping[str, str], taken: Taken) -> Coded:
    if missing := sum(user not in market_of for user in users.texts):
        raise DataError(
            f"{taken.tallies[-1].place}: {missing} users of {Path(taken.place).name} are not there, so their market is "
            "unknown"
        )
    names = sorted({market_of[user] for user in users.texts})
    number = {market: place for place, market in enumerate(names)}
    of_user = np.array([number[market_of[user]] for user in users.texts])
    return Coded(of_user[users.codes], names)
