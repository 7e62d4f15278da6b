"""Which column is the user, item, rating, time, market or split: by name, else by position and content."""

import re
from collections.abc import Mapping, Sequence

from fedhur_app.data.errors import DataError

ROLES = ("user", "item", "rating", "time", "market", "split")
# Names without capital letters, blanks, dashes and underscores. Where two of them are there the earlier one counts.
NAMES: dict[str, tuple[str, ...]] = {
    "user": (
        *(
            "userid",
            "user",
            "uid",
            "userno",
            "useridx",
            "userindex",
            "reviewerid",
            "customerid",
            "customer",
            "memberid",
        ),
        *("visitorid", "username", "reviewer", "usersha1", "profileid", "playerid", "accountid", "usermboxsha1"),
    ),
    "item": (
        *(
            "itemid",
            "item",
            "iid",
            "itemno",
            "itemidx",
            "itemindex",
            "movieid",
            "movie",
            "filmid",
            "film",
            "parentasin",
        ),
        *("asin", "isbn", "bookid", "artistid", "productid", "product", "trackid", "songid", "gameid", "businessid"),
        *(
            "animeid",
            "recipeid",
            "newsid",
            "articleid",
            "poiid",
            "venueid",
            "locationid",
            "gmapid",
            "appid",
            "courseid",
        ),
        *("book", "artist", "track", "song", "game", "business", "anime", "recipe", "article"),
    ),
    "rating": (
        *(
            "rating",
            "ratings",
            "score",
            "stars",
            "star",
            "overall",
            "bookrating",
            "userrating",
            "reviewscore",
            "weight",
        ),
        *("plays", "playcount", "listencount", "count", "preference", "value"),
    ),
    "time": (
        *("timestamp", "unixreviewtime", "time", "ts", "unixtime", "timestamps", "datetime", "date", "createdat"),
        *("reviewtime", "ratedat", "tstamp"),
    ),
    "market": ("market", "marketid"),
    "split": ("split",),
}
# How parts of a split are called; small letters.
PARTS = {"train": 0, "training": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}
# Names that say that a line is a header, though the columns are not used here.
_OTHER_NAMES = {
    *("title", "movietitle", "booktitle", "genres", "genre", "categories", "class", "name", "id", "url", "pictureurl"),
    *("age", "gender", "occupation", "zipcode", "zip", "location", "country", "review", "reviewtext", "comment"),
}
_ID_NAMES = {*NAMES["user"], *NAMES["item"], "id"}
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
# 1973; no rating is as large, and no count of plays of one artist by one user.
_FIRST_TIME = 1e8


def plain_name(name: str) -> str:
    """A column's name in small letters and digits only, without the type that RecBole adds (`user_id:token`)."""
    return re.sub(r"[^a-z0-9]", "", name.split(":")[0].lower())


def is_known(name: str) -> bool:
    """Whether a text is a usual name of a column."""
    plain = plain_name(name)
    return plain in _OTHER_NAMES or any(plain in names for names in NAMES.values())


def names_columns(cells: Sequence[str]) -> bool:
    """Whether a line holds names of columns beyond doubt: of users and of items, or of an id and of something else.

    One known name does not do: a title may be `Book`, a user may be called `user`.
    """
    plain = {plain_name(cell) for cell in cells}
    if all(plain & set(NAMES[role]) for role in ("user", "item")):
        return True
    ids = {name for name in plain & _ID_NAMES if name.endswith("id") or name in ("asin", "isbn")}
    return bool(ids and plain & _OTHER_NAMES - ids)


def find_columns(
    place: str,
    header: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    given: Mapping[str, str | None],
    columns: int,
) -> dict[str, int]:
    """Number of the column of each role that is there; user and item always are.

    Args:
        place: Name of the file, for messages.
        header: Names of the columns, None if they have none.
        rows: Some rows of cells, to tell ratings from times where there is no header, and splits from other columns.
        given: Name, or number from 1 on, of the column of a role, where people named it.
        columns: Number of columns.

    Raises:
        DataError: A column that was asked for is not there; no column for user or item is known; one column was given
            two roles.
    """
    found: dict[str, int] = {}
    for role, name in given.items():
        if name is not None:
            found[role] = _given(place, role, name, header, columns)
    if len(set(found.values())) < len(found):
        raise DataError(f"{place}: one column was given two roles ({', '.join(found)})")
    taken = set(found.values())
    if header is not None:
        plain = [plain_name(name) for name in header]
        for role, names in NAMES.items():
            number = next(
                (plain.index(name) for name in names if name in plain and plain.index(name) not in taken), None
            )
            # A column of that name may number folds: only one with the names of the parts is a split.
            if role == "split" and number is not None and not _holds_parts(rows, number):
                continue
            if role not in found and number is not None:
                found[role] = number
                taken.add(number)
    else:
        _by_position(found, rows, columns)
        _refuse_dates(place, found, rows, given)
    for role in ("user", "item"):
        if role not in found:
            shown = f"found: {', '.join(header)}" if header is not None else f"there are {columns} columns"
            where = ", line 1" if header is not None else ""
            raise DataError(f"{place}{where}: there is no column for the {role} ({shown}); name it with --{role}-col")
    return {role: found[role] for role in ROLES if role in found}


def _holds_parts(rows: Sequence[Sequence[str]], number: int) -> bool:
    return bool(rows) and all(row[number].strip().lower() in PARTS for row in rows)


def _given(place: str, role: str, name: str, header: Sequence[str] | None, columns: int) -> int:
    names = list(header or ())
    for candidates in (names, [each.split(":")[0] for each in names], [each.lower() for each in names]):
        if name in candidates:
            return candidates.index(name)
    if name.isdecimal() and 1 <= int(name) <= columns:
        return int(name) - 1
    shown = f"found: {', '.join(names)}" if names else f"no header; give a number from 1 to {columns}"
    raise DataError(f"{place}, line 1: there is no column '{name}' for --{role}-col ({shown})")


def _by_position(found: dict[str, int], rows: Sequence[Sequence[str]], columns: int) -> None:
    """User, item, rating, time in that order; rating and time change places where their content says so."""
    free = [number for number in range(columns) if number not in found.values()]
    for role in ("user", "item"):
        if role not in found and free:
            found[role] = free.pop(0)
    kinds = {number: _kind([row[number] for row in rows if len(row) == columns]) for number in free}
    if "time" not in found:
        number = next((number for number in free if kinds[number] == "time"), None)
        if number is None:
            # Times need not be seconds: after a rating whole numbers are taken for times.
            numbers = [number for number in free if kinds[number] in ("whole", "number")]
            number = next((number for number in numbers[1:] if kinds[number] == "whole"), None)
        if number is not None:
            found["time"] = number
            free.remove(number)
    if "rating" not in found:
        number = next((number for number in free if kinds[number] in ("whole", "number")), None)
        if number is not None:
            found["rating"] = number


def _refuse_dates(
    place: str, found: Mapping[str, int], rows: Sequence[Sequence[str]], given: Mapping[str, str | None]
) -> None:
    """Dates are nobody's ids: a file of check-ins, such as user, time, latitude, longitude, place, needs to be told."""
    for role in ("user", "item"):
        if role in found and given.get(role) is None:
            dates = sum(bool(_DATE.fullmatch(row[found[role]])) for row in rows)
            if 2 * dates > len(rows):
                raise DataError(
                    f"{place}: by its place column {found[role] + 1} would be the {role}, but it holds dates; name the "
                    f"right one with --{role}-col (a number from 1 on)"
                )


def _kind(cells: Sequence[str]) -> str:
    """What most cells are: time, whole, number or text."""
    if not cells:
        return "text"

    def most(test: "re.Pattern[str]") -> list[str]:
        fitting = [cell for cell in cells if test.fullmatch(cell)]
        return fitting if 2 * len(fitting) > len(cells) else []

    if most(_DATE):
        return "time"
    if whole := most(_WHOLE):
        late = sum(abs(float(cell)) >= _FIRST_TIME for cell in whole)
        return "time" if 2 * late > len(whole) else "whole"
    return "number" if most(_NUMBER) else "text"
