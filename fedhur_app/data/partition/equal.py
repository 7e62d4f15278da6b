"""Clients of equal size: users in some order, cut into K runs."""

import numpy as np

from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition.clients import Clients
from fedhur_app.data.partition.clusters import taste_clusters
from fedhur_app.seeding import numpy_generator


def by_id(data: Interactions, number: int) -> Clients:
    """Users in the order of their ids (near IID where ids say nothing)."""
    return _runs(np.arange(data.n_users), number)


def at_random(data: Interactions, number: int, seed: int) -> Clients:
    """Users in random order."""
    return _runs(numpy_generator(seed, "partition").permutation(data.n_users), number)


def by_taste(data: Interactions, labels: np.ndarray, number: int, seed: int) -> Clients:
    """Users in the order of their taste cluster, see :func:`taste_clusters` (non-IID); training rows only."""
    return _runs(np.argsort(taste_clusters(data, labels, seed), kind="stable"), number)


def _runs(order: np.ndarray, number: int) -> Clients:
    """Each client gets floor(U / K) users, the last one the remainder too."""
    users = len(order)
    owner = np.empty(users, dtype=np.int64)
    owner[order] = np.minimum(np.arange(users) // (users // number), number - 1)
    return Clients(owner)
