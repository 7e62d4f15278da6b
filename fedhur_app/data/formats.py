"""Readers of the file formats in which data sets are published."""

import math
from collections.abc import Iterator
from pathlib import Path

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions, from_raw

# The 19 genre flags of GroupLens' u.item, in the order of its columns.
ML_100K_GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War"),
    "Western",
)


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
    users, items, ratings, times = [], [], [], []
    path = folder / "u.data"
    for line, cells in _rows(path, "\t", 4):
        users.append(_identifier(cells[0], path, line, "user"))
        items.append(_identifier(cells[1], path, line, "item"))
        ratings.append(_number(cells[2], path, line, "rating"))
        times.append(_whole(cells[3], path, line, "timestamp"))

    titles, genres = None, None
    if (path := folder / "u.item").exists():
        titles, genres = {}, {}
        for _, cells in _rows(path, "|", 5 + len(ML_100K_GENRES), encoding="latin-1"):
            titles[cells[0]] = cells[1]
            flagged = zip(ML_100K_GENRES, cells[5:], strict=True)
            genres[cells[0]] = [genre for genre, flag in flagged if flag == "1"]
    columns_of_users = {}
    if (path := folder / "u.user").exists():
        columns_of_users["zip_code"] = {cells[0]: cells[4] for _, cells in _rows(path, "|", 5)}
    return from_raw(
        name,
        users,
        items,
        ratings,
        times,
        catalogue=titles,
        item_titles=titles,
        item_genres=genres,
        user_columns=columns_of_users,
    )


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
    path = folder / f"{name}.inter"
    columns, rows = _atomic(path, ("user_id", "item_id"))
    user, item = columns["user_id"], columns["item_id"]
    rating, time, market = columns.get("rating"), columns.get("timestamp"), _market_column(columns)
    users, items, ratings, times = [], [], [], []
    markets: list[str] | None = None if market is None else []
    for line, cells in rows:
        users.append(_identifier(cells[user], path, line, "user_id"))
        items.append(_identifier(cells[item], path, line, "item_id"))
        if rating is not None:
            ratings.append(_number(cells[rating], path, line, "rating"))
        if time is not None:
            times.append(_whole(cells[time], path, line, "timestamp"))
        if market is not None and markets is not None:
            markets.append(_identifier(cells[market], path, line, "market", "name"))

    titles: dict[str, str] | None = None
    genres: dict[str, list[str]] | None = None
    if (path := folder / f"{name}.item").exists():
        columns, rows = _atomic(path, ("item_id", "movie_title"))
        year, genre = columns.get("release_year"), columns.get("class", columns.get("genre"))
        titles, genres = {}, {}
        for _, cells in rows:
            identifier, title = cells[columns["item_id"]], cells[columns["movie_title"]]
            titles[identifier] = f"{title} ({cells[year]})" if year is not None and cells[year] else title
            genres[identifier] = [] if genre is None else cells[genre].split()
    columns_of_users = {}
    if (path := folder / f"{name}.user").exists():
        columns, rows = _atomic(path, ("user_id",))
        listed = list(rows)
        if "zip_code" in columns:
            columns_of_users["zip_code"] = {
                cells[columns["user_id"]]: cells[columns["zip_code"]] for _, cells in listed
            }
        market = _market_column(columns)
        if markets is None and market is not None:
            market_of: dict[str, str] = {}
            for line, cells in listed:
                found = _identifier(cells[market], path, line, "market", "name")
                if market_of.setdefault(cells[columns["user_id"]], found) != found:
                    raise DataError(
                        f"{path}, line {line}: the same user has another market in a line above, so that of a row "
                        f"is unknown; give {name}.inter a column 'market'"
                    )
            if missing := len(set(users) - set(market_of)):
                raise DataError(f"{path}: {missing} users of {name}.inter are not there, so their market is unknown")
            markets = [market_of[user] for user in users]
    return from_raw(
        name,
        users,
        items,
        ratings if rating is not None else None,
        times if time is not None else None,
        markets=markets,
        catalogue=titles,
        item_titles=titles,
        item_genres=genres,
        user_columns=columns_of_users,
    )


def _text(path: Path, encoding: str) -> str:
    """The content of a text file, or an error that says why it is none."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; a file is needed")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not content.strip():
        raise DataError(f"{path} is empty")
    if b"\0" in content:
        raise DataError(f"{path} is not a text file (it holds zero bytes)")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not {encoding} text; is it Latin-1?") from error


def _rows(
    path: Path, delimiter: str, columns: int, encoding: str = "utf-8-sig", first_line: int = 1
) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each line from `first_line` on; blank lines are passed over."""
    # Not splitlines(): in Latin-1 text it would also split at bytes 0x85 and 0x1C.
    for line, row in enumerate(_text(path, encoding).split("\n"), start=1):
        row = row.removesuffix("\r")
        if line < first_line or not row:
            continue
        cells = row.split(delimiter)
        if len(cells) != columns:
            raise DataError(f"{path}, line {line}: {columns} columns expected, {len(cells)} found")
        yield line, cells


def _atomic(path: Path, needed: tuple[str, ...]) -> tuple[dict[str, int], Iterator[tuple[int, list[str]]]]:
    """Position of each column of an atomic file, by name without its type, and the rows below the header."""
    header = _text(path, "utf-8-sig").split("\n", 1)[0].removesuffix("\r").split("\t")
    if not all(":" in cell for cell in header):
        raise DataError(f"{path}, line 1: not the header of a RecBole file (such as user_id:token)")
    columns = {cell.split(":")[0]: place for place, cell in enumerate(header)}
    for column in needed:
        if column not in columns:
            raise DataError(f"{path}, line 1: there is no column '{column}' (found: {', '.join(columns)})")
    return columns, _rows(path, "\t", len(header), first_line=2)


def _market_column(columns: dict[str, int]) -> int | None:
    return columns.get("market", columns.get("market_id"))


def _identifier(cell: str, path: Path, line: int, column: str, what: str = "id") -> str:
    if not cell.strip():
        raise DataError(f"{path}, line {line}, column '{column}': the {what} is empty")
    return cell


def _number(cell: str, path: Path, line: int, column: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}, line {line}, column '{column}': not a finite number: {cell!r}")
    return value


def _whole(cell: str, path: Path, line: int, column: str) -> int:
    try:
        return int(cell)
    except ValueError:
        # RecBole declares times as floats, so 8.8e8 is legal there.
        value = _number(cell, path, line, column)
        if value != int(value):
            raise DataError(f"{path}, line {line}, column '{column}': not a whole number: {cell!r}") from None
        return int(value)
