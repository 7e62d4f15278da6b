"""Clients that the data or a file tell: one a user, one a value of a column, those of a list, those published."""

import csv
import difflib
import re
from pathlib import Path

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions, in_order
from fedhur_app.data.partition.clients import Clients

# Clients of users whose column is empty, and of values that too few users have.
UNKNOWN, OTHER = "unknown", "other"
_LISTED = 5


def one_user(data: Interactions) -> Clients:
    """A client for each user."""
    return Clients(np.arange(data.n_users, dtype=np.int64))


def by_column(data: Interactions, column: str, column_prefix: int = 0, min_users: int = 1) -> Clients:
    """A client for each value of a column of the users, such as their zip code.

    Users without a value are in a client named "unknown". Clients with fewer than `min_users` users ("unknown" too)
    become one named "other", which may still be small. Clients are in the order of their values (by number if all
    are integers, else as text), then "other", then "unknown".

    Args:
        data: The interactions.
        column: A key of `data.user_columns`.
        column_prefix: How many characters of a value count, 0: all.
        min_users: Users that a client needs to stay one.
    """
    if column not in data.user_columns:
        known = sorted(data.user_columns)
        near = difflib.get_close_matches(column, known, n=1, cutoff=0.5)
        guess = f" (did you mean '{near[0]}'?)" if near else ""
        there = f"there is {', '.join(known)}" if known else "there are none; choose another dataset.clients.kind"
        raise DataError(f"dataset.clients.column: users of {data.name} have no column '{column}'{guess}; {there}")
    values = [value[: column_prefix or None] or UNKNOWN for value in np.char.strip(data.user_columns[column]).tolist()]
    found, users = np.unique(values, return_counts=True)
    small = set(found[users < min_users].tolist())
    return _named([OTHER if value in small else value for value in values], last=(OTHER, UNKNOWN))


def by_file(data: Interactions, file: str) -> Clients:
    """The client of each user as a file says: a line a user with its id and the name of its client.

    The two are separated by a tab or a comma (as the first line has it), quoted or not; a first line such as
    `user,client` is left out. Clients are in the order of their names (by number if all are integers, else as text).

    Args:
        data: The interactions.
        file: Path of the file, UTF-8.
    """
    path = Path(file).expanduser()
    number = {user: place for place, user in enumerate(data.user_ids.tolist())}
    names = [""] * data.n_users
    line_of: dict[str, int] = {}
    for place, (line, cells) in enumerate(_lines(path)):
        if len(cells) != 2 or not all(cells):
            raise DataError(
                f"{path}, line {line}: a user id and the name of a client are needed, with a tab or a comma "
                f"between, not {cells}"
            )
        user, name = cells
        if place == 0 and user not in number and re.match("user", user, re.I) and re.match("client", name, re.I):
            continue
        if user not in number:
            near = difflib.get_close_matches(user, number, n=1, cutoff=0.6)
            guess = f"; did you mean '{near[0]}'?" if near else ""
            raise DataError(f"{path}, line {line}: {data.name} has no user '{user}'{guess}")
        if user in line_of:
            raise DataError(f"{path}, line {line}: user '{user}' has a client already, in line {line_of[user]}")
        line_of[user] = line
        names[number[user]] = name
    if missing := [user for user in number if user not in line_of]:
        listed = ", ".join(missing[:_LISTED]) + (", ..." if len(missing) > _LISTED else "")
        raise DataError(f"{path}: {len(missing)} of {data.n_users} users of {data.name} have no client: {listed}")
    return _named(names)


def published(data: Interactions) -> Clients:
    """The clients that the data were published with."""
    if data.owner is None:
        raise DataError(f"{data.name} came without clients; choose another dataset.clients.kind")
    return Clients(data.owner)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and cells of each line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise DataError(f"dataset.clients.file: {path} cannot be read ({error.strerror})") from error
    if "\0" in "".join(lines[:1]):
        raise DataError(f"{path} is not a text file")
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    rows = ((line, next(csv.reader([text], delimiter=delimiter))) for line, text in enumerate(lines, 1) if text.strip())
    return [(line, [cell.strip() for cell in cells]) for line, cells in rows]


def _named(names: list[str], last: tuple[str, ...] = ()) -> Clients:
    """Clients from the name of each user's client; some names come last."""
    distinct = set(names)
    ordered = (*in_order(distinct - {*last}), *(name for name in last if name in distinct))
    place = {name: number for number, name in enumerate(ordered)}
    return Clients(np.array([place[name] for name in names], dtype=np.int64), ordered)
