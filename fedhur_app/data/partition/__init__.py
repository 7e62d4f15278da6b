"""Which client owns which users. A new way is one function and one entry of `PARTITIONS`.

A function takes what it needs by name: `data` (Interactions), `labels` ((n,), 0 for training rows), `seed`, and
settings of the section `dataset.clients`. One without `number` reads the number of clients out of the data.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.kinds import call, choose, needs
from fedhur_app.data.partition.clients import Clients
from fedhur_app.data.partition.clusters import item_groups, taste_clusters
from fedhur_app.data.partition.dirichlet import by_dirichlet
from fedhur_app.data.partition.equal import at_random, by_id, by_taste
from fedhur_app.data.partition.markets import OTHER_MARKET, by_market, market_names, market_numbers
from fedhur_app.data.partition.told import by_column, by_file, one_user, published

__all__ = [
    "OTHER_MARKET",
    "PARTITIONS",
    "Clients",
    "assign_clients",
    "clients_of_data",
    "decided_by_data",
    "item_groups",
    "market_names",
    "market_numbers",
    "options_of",
    "taste_clusters",
]

PARTITIONS: dict[str, Callable[..., Clients]] = {
    "id": by_id,
    "random": at_random,
    "taste": by_taste,
    "dirichlet": by_dirichlet,
    "one-user": one_user,
    "market": by_market,
    "column": by_column,
    "file": by_file,
    "published": published,
}


def assign_clients(
    data: Interactions, labels: np.ndarray, kind: str, clients: int = 100, seed: int = 1, **options: Any
) -> Clients:
    """Give each user to one client.

    Args:
        data: The interactions.
        labels: Of :func:`fedhur_app.data.split.split_labels`, (n,); tastes are read from training rows only.
        kind: A key of :data:`PARTITIONS`; the functions say what each does.
        clients: Number of clients K, 1..n_users, for the kinds that ask for one.
        seed: Of the random kinds; the same seed gives the same clients.
        options: Other settings of `dataset.clients`; a kind takes those that it needs.

    Raises:
        DataError: Unknown kind; fewer than one client or more clients than users; data or a file that do not say what
            the kind asks.
    """
    partition = choose(PARTITIONS, kind, "partition")
    if "number" in needs(partition):
        if clients < 1:
            raise DataError(f"the number of clients must be at least 1, not {clients}")
        if clients > data.n_users:
            raise DataError(
                f"{clients} clients cannot share {data.n_users} users; ask for at most {data.n_users} clients "
                "(dataset.clients.number)"
            )
    return call(partition, data=data, labels=labels, number=clients, seed=seed, **options)


def decided_by_data(kind: str) -> bool:
    """Whether the number of clients is that of the data, not that of the settings."""
    return "number" not in needs(choose(PARTITIONS, kind, "partition"))


def clients_of_data(data: Interactions, kind: str, **options: Any) -> Clients:
    """As :func:`assign_clients` for a kind that is decided by the data; such a kind needs no split and no seed."""
    return call(choose(PARTITIONS, kind, "partition"), data=data, **options)


def options_of(kind: str) -> tuple[str, ...]:
    """Settings of `dataset.clients` that a kind takes besides `number`."""
    taken = needs(choose(PARTITIONS, kind, "partition"))
    return tuple(name for name in taken if name not in ("data", "labels", "number", "seed"))
