"""Client shards: what one client holds, on disk and in memory. Raw interactions are here and nowhere else."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhur_app.data.attributes import attributes_path, save_attributes
from fedhur_app.data.catalog import data_home
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition import assign_clients, market_names, market_numbers
from fedhur_app.data.split import split_labels
from fedhur_app.data.store import publish, read_npz, temporary_folder, write_npz

_FORM = "fedhur-shard 1"
_PARTS = ("train", "valid", "test")
# Raise it when the same settings give other content: prepared folders of before are then not found any more.
_CONTENT_VERSION = 2


@dataclass(frozen=True, eq=False)
class UserItems:
    """The items of each user of a shard in one part of the split (compressed rows).

    Attributes:
        indptr: int64 (U + 1,): the items of local user u are `items[indptr[u] : indptr[u + 1]]`.
        items: int64 (n,), ascending within each user, without repeats.
    """

    indptr: np.ndarray
    items: np.ndarray

    def of(self, user: int) -> np.ndarray:
        """Items of a local user, ascending; a view."""
        return self.items[self.indptr[user] : self.indptr[user + 1]]

    @property
    def counts(self) -> np.ndarray:
        """Number of items of each local user, int64 (U,)."""
        return np.diff(self.indptr)

    def __len__(self) -> int:
        """Number of interactions."""
        return len(self.items)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Local user and item of each interaction, both int64 (n,)."""
        return np.repeat(np.arange(len(self.indptr) - 1), self.counts), self.items


@dataclass(frozen=True, eq=False)
class Shard:
    """The data of one client.

    Attributes:
        client: Number of the client.
        n_items: Size of the catalogue, the same for all clients.
        users: int64 (U,), ascending: number in the whole data set of local user 0..U-1. Private.
        train: Training items of the local users.
        valid: Validation items.
        test: Test items.
        markets: int64 (U,): number of the market of each local user, the same numbers at all clients (see
            `PreparedData.markets`); None where the data set has no markets. Private.
    """

    client: int
    n_items: int
    users: np.ndarray
    train: UserItems
    valid: UserItems
    test: UserItems
    markets: np.ndarray | None = None

    @property
    def n_users(self) -> int:
        """Number of users of the client."""
        return len(self.users)


def make_shards(data: Interactions, labels: np.ndarray, owner: np.ndarray) -> list[Shard]:
    """Cut a data set into the shards of its clients.

    Args:
        data: The interactions.
        labels: 0 train, 1 validation, 2 test, (n,).
        owner: Client of each user, (n_users,); every number up to the largest must occur.

    Returns:
        One shard for each client, in the order of their numbers.

    Raises:
        DataError: Arguments that do not fit the data; a client without users.
    """
    if len(labels) != len(data) or not np.isin(labels, (0, 1, 2)).all():
        raise DataError(f"{len(data)} labels of 0, 1 or 2 are needed, one for each interaction")
    if len(owner) != data.n_users or owner.min() < 0:
        raise DataError(f"{data.n_users} client numbers >= 0 are needed, one for each user")
    users_of = np.bincount(owner)
    if (empty := np.flatnonzero(users_of == 0)).size:
        raise DataError(f"client {empty[0]} owns no user ({len(empty)} such clients)")

    # Lay the users of all clients out one after the other: then each shard is a slice.
    user_order = np.argsort(owner, kind="stable")
    slot = np.empty(data.n_users, dtype=np.int64)
    slot[user_order] = np.arange(data.n_users)
    ends = np.concatenate([[0], np.cumsum(users_of)])

    users_by_client = [user_order[ends[k] : ends[k + 1]] for k in range(len(users_of))]
    markets = market_numbers(data)
    parts = []
    for label in range(len(_PARTS)):
        rows = labels == label
        slots, items = slot[data.users[rows]], data.items[rows]
        items = items[np.lexsort((items, slots))]
        counts = np.bincount(slots, minlength=data.n_users)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        parts.append([_slice(indptr, items, ends[k], ends[k + 1]) for k in range(len(users_of))])
    return [
        Shard(client, data.n_items, users, train, valid, test, None if markets is None else markets[users])
        for client, (users, train, valid, test) in enumerate(zip(users_by_client, *parts, strict=True))
    ]


def _slice(indptr: np.ndarray, items: np.ndarray, start: int, end: int) -> UserItems:
    own = indptr[start : end + 1]
    return UserItems(own - own[0], items[own[0] : own[-1]])


def save_shard(path: Path, shard: Shard) -> None:
    """Write a shard to a file (npz), whole or not at all."""
    arrays = {"head": np.array([shard.client, shard.n_items], dtype=np.int64), "users": shard.users}
    if shard.markets is not None:
        arrays["markets"] = shard.markets
    for part in _PARTS:
        user_items: UserItems = getattr(shard, part)
        arrays[f"{part}_indptr"], arrays[f"{part}_items"] = user_items.indptr, user_items.items
    write_npz(Path(path), _FORM, arrays)


def load_shard(path: Path) -> Shard:
    """Read a shard that :func:`save_shard` wrote.

    Raises:
        DataError: The file is missing, damaged, contradicts itself or is something else; the text names it.
    """
    path = Path(path)
    arrays = read_npz(path, _FORM)
    try:
        client, n_items = (int(value) for value in arrays["head"])
        users = arrays["users"]
        parts = {part: UserItems(arrays[f"{part}_indptr"], arrays[f"{part}_items"]) for part in _PARTS}
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is incomplete; delete it and prepare the data again") from error
    for name, part in parts.items():
        fits = part.indptr.shape == (len(users) + 1,) and part.indptr[0] == 0
        fits = fits and part.indptr[-1] == len(part.items)
        if not (fits and (part.counts >= 0).all() and ((part.items >= 0) & (part.items < n_items)).all()):
            raise DataError(f"{path} contradicts itself ({name}); delete it and prepare the data again")
    markets = arrays.get("markets")
    if markets is not None and not (
        markets.shape == users.shape and markets.dtype == np.int64 and (markets >= 0).all()
    ):
        raise DataError(f"{path} contradicts itself (markets); delete it and prepare the data again")
    return Shard(client, n_items, users, **parts, markets=markets)


@dataclass(frozen=True)
class PreparedData:
    """A folder with the shards of all clients.

    Attributes:
        folder: Where it is; its name ends in a hash of everything that decides the content.
        dataset: Name of the data set.
        fingerprint: Of the data set, see :meth:`Interactions.fingerprint`.
        clients: Number of clients.
        n_users: Number of users of all clients.
        n_items: Size of the catalogue.
        n_interactions: Numbers of training, validation and test interactions.
        notes: What the loader of the data set dropped, in words.
        markets: Names of the markets by number, () for data without markets. With one client a market these are also
            the numbers of the clients.
        n_attributes: Number of item attributes, see :func:`fedhur_app.data.attributes.load_attributes`; 0: no file.
    """

    folder: Path
    dataset: str
    fingerprint: str
    clients: int
    n_users: int
    n_items: int
    n_interactions: tuple[int, int, int]
    notes: tuple[str, ...] = ()
    markets: tuple[str, ...] = ()
    n_attributes: int = 0


def shard_path(folder: Path, client: int) -> Path:
    """The file of a client's shard in a prepared folder."""
    return Path(folder) / f"client-{client:05d}.npz"


def prepare(
    data: Interactions,
    split_kind: str,
    ratios: Sequence[float],
    partition_kind: str,
    clients: int,
    seed: int,
    home: Path | None = None,
) -> PreparedData:
    """Split, partition and write the shards of all clients and the items' attributes.

    A folder made before is used again.

    Several processes may do this at once: the folder appears whole, by one rename.

    Args:
        data: The interactions.
        split_kind: See :func:`fedhur_app.data.split.split_labels`.
        ratios: Shares of train, validation and test.
        partition_kind: See :func:`fedhur_app.data.partition.assign_clients`.
        clients: Number of clients.
        seed: Of split and partition.
        home: Folder of all data; :func:`fedhur_app.data.catalog.data_home` by default. The shards go to
            `home/prepared/<name>-<hash>`, readable by the present user only.

    Returns:
        Where the shards are and how much they hold.

    Raises:
        DataError: As the functions above.
    """
    markets = market_names(data)
    settings: dict[str, Any] = {
        "version": _CONTENT_VERSION,
        "data": data.fingerprint(),
        "split": split_kind,
        "ratios": [float(share) for share in ratios],
        "partition": partition_kind,
        "clients": {"one-user": data.n_users, "market": len(markets), "published": 0}.get(partition_kind, clients),
        "genres": hashlib.sha256(json.dumps(data.item_genres).encode()).hexdigest()[:16],
        "seed": seed,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    home = data_home() if home is None else Path(home)
    folder = home / "prepared" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', data.name)}-{key}"
    if _is_complete(folder):
        return load_prepared(folder)

    labels = split_labels(data, split_kind, ratios, seed)
    owner = assign_clients(data, labels, partition_kind, clients, seed)
    shards = make_shards(data, labels, owner)
    train, valid, test = (int(count) for count in np.bincount(labels, minlength=3))
    with temporary_folder(folder.parent) as workspace:
        for shard in shards:
            save_shard(shard_path(workspace, shard.client), shard)
        prepared = PreparedData(
            folder=folder,
            dataset=data.name,
            fingerprint=settings["data"],
            clients=len(shards),
            n_users=data.n_users,
            n_items=data.n_items,
            n_interactions=(train, valid, test),
            notes=data.notes,
            markets=markets,
            n_attributes=save_attributes(workspace, data),
        )
        meta = {key: value for key, value in asdict(prepared).items() if key != "folder"}
        (workspace / "meta.json").write_text(json.dumps(meta | {"settings": settings}, indent=1))
        publish(workspace, folder, _is_complete)
    return prepared


def load_prepared(folder: Path) -> PreparedData:
    """Describe a folder that :func:`prepare` wrote, from its meta.json.

    Raises:
        DataError: The folder is not one of prepared shards, or its meta.json is damaged.
    """
    folder = Path(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        return PreparedData(
            folder=folder,
            dataset=meta["dataset"],
            fingerprint=meta["fingerprint"],
            clients=int(meta["clients"]),
            n_users=int(meta["n_users"]),
            n_items=int(meta["n_items"]),
            n_interactions=tuple(meta["n_interactions"]),
            notes=tuple(meta["notes"]),
            markets=tuple(meta["markets"]),
            n_attributes=int(meta["n_attributes"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no prepared data (meta.json is missing or damaged)") from error


def _is_complete(folder: Path) -> bool:
    try:
        prepared = load_prepared(folder)
    except DataError:
        return False
    present = {entry.name for entry in os.scandir(folder)}
    needed = {shard_path(folder, client).name for client in range(prepared.clients)}
    if prepared.n_attributes:
        needed.add(attributes_path(folder).name)
    return needed <= present
