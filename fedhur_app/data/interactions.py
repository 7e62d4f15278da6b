"""Interactions of users with items: one data set with dense ids, however it was written on disk."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedhur_app.data.errors import DataError

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


def _dense(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct ids 0, 1, ...: by value when all are integers, else by text.

    Returns:
        Numbers int64 (n,) and the distinct ids as text, in that order.
    """
    distinct, codes = np.unique(array, return_inverse=True)
    if array.dtype.kind == "U":
        ordered = in_order(distinct.tolist())
        number = {text: place for place, text in enumerate(ordered)}
        codes = np.array([number[text] for text in distinct.tolist()])[codes]
        distinct = np.array(ordered)
    return codes.astype(np.int64), distinct.astype(str)


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


def _last_of_each_pair(users: np.ndarray, items: np.ndarray, n_items: int, timestamps: np.ndarray | None) -> np.ndarray:
    """True for the rows to keep (n,): of each (user, item) the latest; ties and no times: the last row."""
    pair = users * n_items + items
    # Both sorts are stable: within a pair, and within a time, the order of the file stays.
    order = np.argsort(pair, kind="stable") if timestamps is None else np.lexsort((timestamps, pair))
    keep = np.zeros(len(pair), dtype=bool)
    in_order = pair[order]
    keep[order[np.append(in_order[1:] != in_order[:-1], True)]] = True
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
        notes: What the reader dropped before, in words.

    Raises:
        DataError: No rows, columns of unequal length, an id that is empty or neither integer nor text, a
            rating that is not a finite number, a timestamp that is not a whole number, a market that is empty or
            holds a `/`, another label, a user at two clients.
    """
    users_raw, items_raw = _id_array(raw_users, "user"), _id_array(raw_items, "item")
    n = len(users_raw)
    columns = {"users": n, "items": len(items_raw)}
    if ratings is not None:
        ratings = np.asarray(ratings)
        columns["ratings"] = len(ratings)
    if timestamps is not None:
        timestamps = np.asarray(timestamps)
        columns["timestamps"] = len(timestamps)
    if markets is not None:
        markets = _id_array(markets, "market").astype(str)
        columns["markets"] = len(markets)
    if labels is not None:
        labels = np.asarray(labels)
        columns["labels"] = len(labels)
    if owners is not None:
        owners = _id_array(owners, "client")
        columns["owners"] = len(owners)
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
        ratings = ratings.astype(np.float32)
    if timestamps is not None:
        timestamps = _whole_numbers(timestamps, f"{name}: timestamps")
    if labels is not None and (bad := np.flatnonzero(~np.isin(labels, (0, 1, 2)))).size:
        raise DataError(f"{name}: row {bad[0]}: the split is {labels[bad[0]]}; 0 (train), 1 (validation) or 2 (test)")

    if catalogue is not None:
        items_raw = np.concatenate([items_raw.astype(str), np.array(list(catalogue), dtype=str)])
    original_ids = users_raw.astype(str)
    if markets is not None:
        users_raw = _ids_of_users(name, users_raw, markets)
    users, user_ids = _dense(users_raw)
    first_row = np.unique(users, return_index=True)[1]
    items, item_ids = _dense(items_raw)
    items = items[:n]

    keep = _last_of_each_pair(users, items, len(item_ids), timestamps)
    dropped = n - int(keep.sum())
    notes = tuple(notes)
    if dropped:
        notes += (f"{dropped} repeated (user, item) pair{'s' * (dropped > 1)}: the last was kept",)

    return Interactions(
        name=name,
        users=users[keep],
        items=items[keep],
        ratings=None if ratings is None else ratings[keep],
        timestamps=None if timestamps is None else timestamps[keep],
        user_ids=user_ids,
        item_ids=item_ids,
        item_titles=None if item_titles is None else _looked_up(item_titles, item_ids),
        item_genres=None if item_genres is None else tuple(tuple(item_genres.get(i, ())) for i in item_ids),
        user_columns={
            column: _looked_up(values, original_ids[first_row]) for column, values in (user_columns or {}).items()
        },
        user_markets=None if markets is None else markets[first_row],
        labels=None if labels is None else labels[keep].astype(np.int8),
        owner=None if owners is None else _owner(name, users, user_ids, owners),
        notes=notes,
    )


def _ids_of_users(name: str, ids: np.ndarray, markets: np.ndarray) -> np.ndarray:
    """The id of each row's user: as given, or with the market where an id occurs in two of them, (n,)."""
    if (bad := np.flatnonzero(np.char.find(markets, "/") >= 0)).size:
        raise DataError(f"{name}: row {bad[0]}: the name of the market holds a '/', which is kept for user ids")
    users, market = _dense(ids)[0], _dense(markets)[0]
    if len(np.unique(users * (market.max() + 1) + market)) == users.max() + 1:
        return ids
    return np.array([f"{where}/{user}" for where, user in zip(markets, ids, strict=True)])


def _owner(name: str, users: np.ndarray, user_ids: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """The client of each user, (n_users,)."""
    clients = _dense(owners)[0]
    owner = np.empty(len(user_ids), dtype=np.int64)
    owner[users] = clients
    if (bad := np.flatnonzero(owner[users] != clients)).size:
        raise DataError(f"{name}: row {bad[0]}: user {user_ids[users[bad[0]]]} is at two clients; a user has one")
    return owner


def _looked_up(values: Mapping[str, str], ids: np.ndarray) -> np.ndarray:
    return np.array([values.get(i, "") for i in ids], dtype=str)
