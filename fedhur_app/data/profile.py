"""What describes a data set that is split and shared out, as arrays: for the numbers and for the picture."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from fedhur_app.data.interactions import Interactions
from fedhur_app.data.measures import jaccard
from fedhur_app.data.partition import Clients, item_groups, market_names
from fedhur_app.data.shards import Shard, load_prepared, load_shard, make_shards, shard_path
from fedhur_app.seeding import numpy_generator

# Of more clients a seeded sample of so many is compared, all pairs of them.
COMPARED_CLIENTS = 200
_PARTS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class Profile:
    """Counts of a data set with K clients, U users, I items and M markets. Training rows are what clients learn from.

    Attributes:
        dataset: Name of the data set.
        client_names: Names of the clients by number, or ().
        client_users: int64 (K,), users of each client.
        client_rows: int64 (K, 3), training, validation and test rows of each client.
        user_rows: int64 (U, 3), those of each user, client after client.
        item_rows: int64 (I, 2), training rows and all rows of each item.
        compared: int64, numbers of the clients in `overlap`, ascending: all, or a seeded sample.
        overlap: float64, Jaccard index of the items that two clients train on, for all pairs of `compared`; NaN where
            neither trains.
        groups: float64 (K, G), training rows of each client by group of items, those of
            :func:`fedhur_app.data.partition.item_groups`. Not by genre: those of two clients hardly ever differ.
        markets: Name, users and rows of each market, () for data without markets.
        notes: What the loader dropped, in words.
    """

    dataset: str
    client_names: tuple[str, ...]
    client_users: np.ndarray
    client_rows: np.ndarray
    user_rows: np.ndarray
    item_rows: np.ndarray
    compared: np.ndarray
    overlap: np.ndarray
    groups: np.ndarray
    markets: tuple[tuple[str, int, int], ...]
    notes: tuple[str, ...]


def profile(data: Interactions, labels: np.ndarray, clients: Clients) -> Profile:
    """The profile of a data set.

    Args:
        data: The interactions.
        labels: 0 train, 1 validation, 2 test, (n,).
        clients: Who owns whom.
    """
    shards = make_shards(data, labels, clients.owner)
    return _of_shards(data.name, shards, clients.names, market_names(data), data.notes)


def profile_prepared(folder: Path) -> Profile:
    """The profile of a folder of prepared shards; reads every shard.

    Raises:
        DataError: The folder or a file in it cannot be read.
    """
    prepared = load_prepared(folder)
    shards = [load_shard(shard_path(folder, client)) for client in range(prepared.clients)]
    return _of_shards(prepared.dataset, shards, prepared.client_names, prepared.markets, prepared.notes)


def _of_shards(
    name: str,
    shards: list[Shard],
    client_names: tuple[str, ...],
    markets: tuple[str, ...],
    notes: tuple[str, ...],
) -> Profile:
    items = shards[0].n_items
    trained = np.concatenate([shard.train.items for shard in shards]).astype(np.int32)
    rows = np.array([[len(getattr(shard, part)) for part in _PARTS] for shard in shards], dtype=np.int64)
    of_train = np.bincount(trained, minlength=items)
    of_all = of_train.copy()
    for part in _PARTS[1:]:
        of_all += np.bincount(np.concatenate([getattr(shard, part).items for shard in shards]), minlength=items)
    # Rows of clients, with an item as often as users of the client train on it.
    starts = np.concatenate([[0], np.cumsum(rows[:, 0])])
    held = sp.csr_array((np.ones(len(trained), dtype=np.float32), trained, starts), shape=(len(shards), items))
    compared = np.arange(len(shards))
    if len(shards) > COMPARED_CLIENTS:
        drawn = numpy_generator(0, "compared-clients").choice(len(shards), COMPARED_CLIENTS, replace=False)
        compared = np.sort(drawn)
    return Profile(
        dataset=name,
        client_names=client_names,
        client_users=np.array([shard.n_users for shard in shards], dtype=np.int64),
        client_rows=rows,
        user_rows=np.stack(
            [np.concatenate([getattr(shard, part).counts for shard in shards]) for part in _PARTS], axis=1
        ),
        item_rows=np.stack([of_train, of_all], axis=1),
        compared=compared,
        overlap=jaccard(_sets([shards[client] for client in compared], items)),
        groups=(held @ _groups(shards, trained)).toarray(),
        markets=_by_market(shards, markets),
        notes=notes,
    )


def _groups(shards: list[Shard], trained: np.ndarray) -> sp.csr_array:
    """Which item is in which group, 0/1 (I, G)."""
    items = shards[0].n_items
    users = np.concatenate([shard.users for shard in shards])
    counts = np.concatenate([shard.train.counts for shard in shards])
    # The seed is fixed: a description depends on the data alone.
    groups = item_groups(np.repeat(users, counts), trained, len(users), items, seed=0)
    return sp.csr_array((np.ones(items), (np.arange(items), groups)), shape=(items, int(groups.max()) + 1))


def _sets(shards: list[Shard], items: int) -> np.ndarray:
    """Which items each client trains on, bool (K, I)."""
    sets = np.zeros((len(shards), items), dtype=bool)
    for place, shard in enumerate(shards):
        sets[place, shard.train.items] = True
    return sets


def _by_market(shards: list[Shard], names: tuple[str, ...]) -> tuple[tuple[str, int, int], ...]:
    """Name, users and interactions of each market."""
    users, interactions = (np.zeros(len(names), dtype=np.int64) for _ in range(2))
    for shard in shards:
        if shard.markets is not None:
            np.add.at(users, shard.markets, 1)
            np.add.at(interactions, shard.markets, shard.train.counts + shard.valid.counts + shard.test.counts)
    return tuple(zip(names, users.tolist(), interactions.tolist(), strict=True))
