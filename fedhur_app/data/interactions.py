"""Interactions of users with items: one data set with dense ids, however it was written on disk."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedhur_app.data.errors import DataError

# Which of several rows of a (user, item) pair stays.
Which = Literal["last", "first", "max"]

_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, eq=False)
class Interactions:
    """One data set: each row says that a user had to do with an item. No (user, item) pair occurs twice.

    Attributes:
        name: Name of the data set.
        users: int64 (n,), values 0..n_users-1, in the order of the file.
        items: int64 (n,), values 0..n_items-1.
        ratings: float32 (n,), or None when the data has none.
        timestamps: int64 (n,), or None. Never a float: float32 cannot tell two neighbouring seconds apart.
        user_ids: The original id of each user as text, (n_users,).
        item_ids: The original id of each item as text, (n_items,).
        item_titles: Title of each item as text, "" where unknown, (n_items,); None without a title file.
        item_genres: Genres of each item, () where unknown; None without such a file.
        user_columns: What is known about users, by name, such as "zip_code": text (n_users,), "" where unknown.
        user_markets: Name of the market of each user as text, (n_users,); None where the data set has no markets.
        labels: int8 (n,), the split that the data were published with: 0 train, 1 validation, 2 test; None without one.
        owner: int64 (n_users,), the client 0..K-1 of each user as published; None if not known.
        notes: What the loader dropped, counted, in words for people.
    """

    name: str
    users: np.ndarray
    items: np.ndarray
    ratings: np.ndarray | None
    timestamps: np.ndarray | None
    user_ids: np.ndarray
    item_ids: np.ndarray
    item_titles: np.ndarray | None = None
    item_genres: tuple[tuple[str, ...], ...] | None = None
    user_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    user_markets: np.ndarray | None = None
    labels: np.ndarray | None = None
    owner: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @property
    def n_users(self) -> int:
        """Number of users."""
        return len(self.user_ids)

    @property
    def n_items(self) -> int:
        """Number of items of the catalogue, also those nobody has touched."""
        return len(self.item_ids)

    def __len__(self) -> int:
        """Number of interactions."""
        return len(self.users)

    def fingerprint(self) -> str:
        """16 hex digits that change when users, items, timestamps, their order, the ids or the markets change.

        So do the published split and clients. Ratings, titles, genres and other columns of users do not count. The
        same on every machine.
        """
        digest = hashlib.sha256()
        for part in (self.users, self.items, self.timestamps):
            digest.update(b"none" if part is None else np.ascontiguousarray(part, "<i8").tobytes())
            digest.update(b"|")
        for ids in (self.user_ids, self.item_ids):
            digest.update(json.dumps(ids.tolist()).encode())
        if self.user_markets is not None:  # data without markets keep the fingerprint they always had
            digest.update(b"|" + json.dumps(self.user_markets.tolist()).encode())
        for name, published in (("labels", self.labels), ("owner", self.owner)):
            if published is not None:
                digest.update(f"|{name}".encode() + np.ascontiguousarray(published, "<i8").tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Coded:
    """Ids as numbers: a column of n texts takes the room of n integers.

    Attributes:
        codes: Integers (n,), places in `texts`.
        texts: The distinct ids, each in one row at least.
    """

    codes: np.ndarray
    texts: Sequence[str]


def _id_array(raw: npt.ArrayLike, what: str) -> np.ndarray:
    """Ids as an integer or a text array, or an error that names the row."""
    array = np.asarray(raw)
    if array.ndim != 1:
        raise DataError(f"{what} ids must be a flat list, not an array of shape {array.shape}")
    if array.dtype.kind == "O":
        for row, value in enumerate(array):
            if isinstance(value, bool) or not isinstance(value, str | int | np.integer):
                raise DataError(f"row {row}: the {what} id is a {type(value).__name__}; ids must be integers or text")
        array = array.astype(str)
    if len(array) and array.dtype.kind not in "iuU":
        raise DataError(f"{what} ids must be integers or text, not {array.dtype}")
    if array.dtype.kind == "U" and (empty := np.flatnonzero(np.char.strip(array) == "")).size:
        raise DataError(f"row {empty[0]}: the {what} id is empty")
    return array


def in_order(ids: Iterable[str]) -> list[str]:
    """Distinct ids sorted by value when all are integers, else as text."""
    texts = sorted(ids)
    if all(map(_INTEGER.fullmatch, texts)):
        # "01" and "1" are two ids with one value: the text decides between them.
        texts.sort(key=lambda text: (int(text), text))
    return texts


def _dense(coded: Coded, more: Iterable[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct ids 0, 1, ...: by value when all are integers, else by text.

    Args:
        coded: Ids of rows (n,).
        more: Ids to number as well.

    Returns:
        Numbers int64 (n,) and the distinct ids as text, in that order.
    """
    ordered = in_order({*coded.texts, *more})
    number = {text: place for place, text in enumerate(ordered)}
    places = np.fromiter((number[text] for text in coded.texts), dtype=np.int64, count=len(coded.texts))
    return places[coded.codes], np.array(ordered)


def _whole_numbers(raw: npt.ArrayLike, what: str) -> np.ndarray:
    array = np.asarray(raw)
    if array.dtype.kind == "f":
        if array.dtype.itemsize < 8:
            raise DataError(f"{what} are {array.dtype}, which cannot hold seconds exactly; give int64")
        if (bad := np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))).size:
            raise DataError(f"row {bad[0]}: the timestamp is not a whole number")
    elif array.dtype.kind not in "iu":
        raise DataError(f"{what} must be whole numbers, not {array.dtype}")
    return array.astype(np.int64)


def _one_of_each_pair(
    users: np.ndarray,
    items: np.ndarray,
    n_items: int,
    timestamps: np.ndarray | None,
    ratings: np.ndarray | None,
    which: Which,
) -> np.ndarray:
    """True for the rows to keep (n,): one of each (user, item), by the rule of :func:`from_codes`."""
    pair = users * n_items + items
    found = np.sort(pair)
    if not (found[1:] == found[:-1]).any():  # spares sorting by several keys
        return np.ones(len(pair), dtype=bool)
    if which == "max" and ratings is None:
        raise DataError("of repeated (user, item) pairs the highest rating cannot be kept: there are no ratings")
    keys = [key for key in (timestamps, ratings if which == "max" else None, pair) if key is not None]
    # Stable: where all keys are equal the order of the file stays.
    order = np.lexsort(keys)
    found = pair[order]
    ends = found[1:] != found[:-1]
    keep = np.zeros(len(pair), dtype=bool)
    keep[order[np.append(True, ends) if which == "first" else np.append(ends, True)]] = True
    return keep


def from_raw(
    name: str,
    raw_users: npt.ArrayLike,
    raw_items: npt.ArrayLike,
    ratings: npt.ArrayLike | None = None,
    timestamps: npt.ArrayLike | None = None,
    *,
    markets: npt.ArrayLike | None = None,
    labels: npt.ArrayLike | None = None,
    owners: npt.ArrayLike | None = None,
    catalogue: Iterable[str] | None = None,
    item_titles: Mapping[str, str] | None = None,
    item_genres: Mapping[str, Sequence[str]] | None = None,
    user_columns: Mapping[str, Mapping[str, str]] | None = None,
    which: Which = "last",
    notes: Sequence[str] = (),
) -> Interactions:
    """Build a data set from the columns of a file.

    Ids become dense numbers, sorted by value if all are integers, else as text. The catalogue is the items
    seen in the rows and those of `catalogue`. Of rows that repeat a (user, item) pair only the last is kept:
    the latest by time, the last in the file where times tie or are absent; it keeps its place in the order.

    A user belongs to one market: an id that occurs in two markets means two users. If there is such an id, ids say
    nothing across markets, and every user's id becomes `<market>/<user>`; if there is none, ids stay as they are.

    Args:
        name: Name of the data set.
        raw_users: User ids, integers or text, (n,).
        raw_items: Item ids, integers or text, (n,).
        ratings: Numbers (n,), or None.
        timestamps: Whole numbers (n,), or None; float64 is taken if every value is whole.
        markets: Market of each row, integers or text without `/`, (n,); None for data without markets.
        labels: 0 (train), 1 (validation) or 2 (test) of each row (n,), where the data come with a split.
        owners: Client of each row's user (n,), integers or text, where the data come with clients. Clients are numbered
            by value if all are integers, else as text.
        catalogue: Ids of items that belong to the catalogue even if no row names them.
        item_titles: Title by original item id (as text); ids that do not occur are ignored.
        item_genres: Genres by original item id.
        user_columns: By name, such as "zip_code": a text by original user id (without the market).
        which: Of rows that repeat a pair, see :func:`from_codes`.
        notes: What the reader dropped before, in words.

    Raises:
        DataError: No rows, columns of unequal length, an id that is empty or neither integer nor text, a
            rating that is not a finite number, a timestamp that is not a whole number, a market that is empty or
            holds a `/`, another label, a user at two clients.
    """
    ids = {"user": raw_users, "item": raw_items, "market": markets, "client": owners}
    coded = {what: None if raw is None else _coded(raw, what) for what, raw in ids.items()}
    assert coded["user"] is not None
    assert coded["item"] is not None
    return from_codes(
        name,
        coded["user"],
        coded["item"],
        None if ratings is None else np.asarray(ratings),
        None if timestamps is None else np.asarray(timestamps),
        markets=coded["market"],
        labels=None if labels is None else np.asarray(labels),
        owners=coded["client"],
        catalogue=catalogue,
        item_titles=item_titles,
        item_genres=item_genres,
        user_columns=user_columns,
        which=which,
        notes=notes,
    )


def _coded(raw: npt.ArrayLike, what: str) -> Coded:
    distinct, codes = np.unique(_id_array(raw, what), return_inverse=True)
    return Coded(codes, distinct.astype(str).tolist())


def from_codes(
    name: str,
    users: Coded,
    items: Coded,
    ratings: np.ndarray | None = None,
    timestamps: np.ndarray | None = None,
    *,
    markets: Coded | None = None,
    labels: np.ndarray | None = None,
    owners: Coded | None = None,
    catalogue: Iterable[str] | None = None,
    item_titles: Mapping[str, str] | None = None,
    item_genres: Mapping[str, Sequence[str]] | None = None,
    user_columns: Mapping[str, Mapping[str, str]] | None = None,
    which: Which = "last",
    notes: Sequence[str] = (),
) -> Interactions:
    """Build a data set from columns whose ids are numbered already: the way for large files.

    All as :func:`from_raw`, except:

    Args:
        name: Name of the data set.
        users: User ids (n,), each of the texts in a row at least.
        items: Item ids (n,).
        ratings: Numbers (n,), or None.
        timestamps: Whole numbers (n,), or None.
        markets: Market of each row (n,), or None.
        labels: Part of the split of each row (n,), or None.
        owners: Client of each row's user (n,), or None.
        catalogue: Ids of further items.
        item_titles: Title by original item id.
        item_genres: Genres by original item id.
        user_columns: By name: a text by original user id.
        which: Of rows that repeat a (user, item) pair the latest is kept (`last`; ties and no times: the last in the
            file), the earliest (`first`; likewise the first), or the one with the highest rating (`max`; ties: the
            last).
        notes: What the reader dropped before, in words.

    Raises:
        DataError: As :func:`from_raw`; repeated pairs without ratings and `which` is `max`.
    """
    n = len(users.codes)
    columns = {"users": n, "items": len(items.codes)}
    others = {"ratings": ratings, "timestamps": timestamps, "labels": labels}
    columns |= {key: len(value) for key, value in others.items() if value is not None}
    coded = {"markets": markets, "owners": owners}
    columns |= {key: len(value.codes) for key, value in coded.items() if value is not None}
    if len(set(columns.values())) > 1:
        listed = ", ".join(f"{column}: {length}" for column, length in columns.items())
        raise DataError(f"{name}: the columns have unequal lengths ({listed})")
    if n == 0:
        raise DataError(f"{name}: there are no interactions")
    if ratings is not None:
        if ratings.dtype.kind not in "iuf":
            raise DataError(f"{name}: ratings must be numbers, not {ratings.dtype}")
        if (bad := np.flatnonzero(~np.isfinite(ratings))).size:
            raise DataError(f"{name}: row {bad[0]}: the rating is not a finite number")
        ratings = ratings.astype(np.float32, copy=False)
    if timestamps is not None:
        timestamps = _whole_numbers(timestamps, f"{name}: timestamps")
    if labels is not None and (bad := np.flatnonzero(~np.isin(labels, (0, 1, 2)))).size:
        raise DataError(f"{name}: row {bad[0]}: the split is {labels[bad[0]]}; 0 (train), 1 (validation) or 2 (test)")

    named = users if markets is None else _ids_of_users(name, users, markets)
    user_numbers, user_ids = _dense(named)
    item_numbers, item_ids = _dense(items, () if catalogue is None else map(str, catalogue))
    a_row = np.empty(len(user_ids), dtype=np.int64)  # of each user: any will do
    a_row[user_numbers] = np.arange(n)

    keep = _one_of_each_pair(user_numbers, item_numbers, len(item_ids), timestamps, ratings, which)
    dropped = n - int(keep.sum())
    notes = tuple(notes)
    if dropped:
        kept = {"last": "the last", "first": "the first", "max": "the highest rating"}[which]
        notes += (f"{dropped} repeated (user, item) pair{'s' * (dropped > 1)}: {kept} was kept",)

    def kept_rows(column: np.ndarray | None) -> np.ndarray | None:
        return column if column is None or not dropped else column[keep]

    return Interactions(
        name=name,
        users=user_numbers[keep] if dropped else user_numbers,
        items=item_numbers[keep] if dropped else item_numbers,
        ratings=kept_rows(ratings),
        timestamps=kept_rows(timestamps),
        user_ids=user_ids,
        item_ids=item_ids,
        item_titles=None if item_titles is None else _looked_up(item_titles, item_ids),
        item_genres=None if item_genres is None else tuple(tuple(item_genres.get(i, ())) for i in item_ids.tolist()),
        user_columns={
            column: _looked_up(values, np.array(users.texts)[users.codes[a_row]])
            for column, values in (user_columns or {}).items()
        },
        user_markets=None if markets is None else np.array(markets.texts)[markets.codes[a_row]],
        labels=None if labels is None else kept_rows(labels.astype(np.int8)),
        owner=None if owners is None else _owner(name, user_numbers, user_ids, owners),
        notes=notes,
    )


def subset(data: Interactions, keep: np.ndarray, catalogue: Iterable[str] = ()) -> Interactions:
    """The data set of some of the rows. Users without a row are left out, and items that `catalogue` does not name.

    Args:
        data: A data set.
        keep: True for the rows to keep (n,).
        catalogue: Ids of items that stay without a row, where the data set has them.
    """
    users, items = data.users[keep], data.items[keep]
    has_row, of_catalogue = np.zeros(data.n_users, dtype=bool), np.isin(data.item_ids, np.array(list(catalogue), str))
    has_row[users] = True
    of_catalogue[items] = True
    user_places, item_places = (
        _places(ids, kept) for ids, kept in ((data.user_ids, has_row), (data.item_ids, of_catalogue))
    )
    user_number, item_number = _inverse(user_places, data.n_users), _inverse(item_places, data.n_items)

    def of(column: np.ndarray | None, where: np.ndarray) -> np.ndarray | None:
        return None if column is None else column[where]

    owner = of(data.owner, user_places)
    return replace(
        data,
        users=user_number[users],
        items=item_number[items],
        ratings=of(data.ratings, keep),
        timestamps=of(data.timestamps, keep),
        labels=of(data.labels, keep),
        user_ids=data.user_ids[user_places],
        item_ids=data.item_ids[item_places],
        item_titles=of(data.item_titles, item_places),
        item_genres=None if data.item_genres is None else tuple(data.item_genres[place] for place in item_places),
        user_columns={name: column[user_places] for name, column in data.user_columns.items()},
        user_markets=of(data.user_markets, user_places),
        # A client all of whose users are gone has no number.
        owner=None if owner is None else np.unique(owner, return_inverse=True)[1].astype(np.int64),
    )


def _places(ids: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Where the ids that are kept stand, in their order: without the others all may be integers."""
    place = {text: number for number, text in zip(np.flatnonzero(kept).tolist(), ids[kept].tolist(), strict=True)}
    return np.array([place[text] for text in in_order(place)], dtype=np.int64)


def _inverse(places: np.ndarray, n: int) -> np.ndarray:
    number = np.full(n, -1, dtype=np.int64)
    number[places] = np.arange(len(places))
    return number


def _ids_of_users(name: str, users: Coded, markets: Coded) -> Coded:
    """The id of each row's user: as given, or with the market where an id occurs in two of them, (n,)."""
    if bad := [number for number, text in enumerate(markets.texts) if "/" in text]:
        row = np.flatnonzero(np.isin(markets.codes, bad))[0]
        raise DataError(f"{name}: row {row}: the name of the market holds a '/', which is kept for user ids")
    count = len(markets.texts)
    pairs, codes = np.unique(users.codes.astype(np.int64) * count + markets.codes, return_inverse=True)
    if len(pairs) == len(users.texts):
        return users
    return Coded(codes, [f"{markets.texts[pair % count]}/{users.texts[pair // count]}" for pair in pairs.tolist()])


def _owner(name: str, users: np.ndarray, user_ids: np.ndarray, owners: Coded) -> np.ndarray:
    """The client of each user, (n_users,)."""
    clients = _dense(owners)[0]
    owner = np.empty(len(user_ids), dtype=np.int64)
    owner[users] = clients
    if (bad := np.flatnonzero(owner[users] != clients)).size:
        raise DataError(f"{name}: row {bad[0]}: its user is at two clients; a user has one")
    return owner


def _looked_up(values: Mapping[str, str], ids: np.ndarray) -> np.ndarray:
    return np.array([values.get(i, "") for i in ids.tolist()], dtype=str)
