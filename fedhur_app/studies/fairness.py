"""Who gains and who loses: numbers over single users and single clients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

WORST = 0.1
GROUPS = 5


@dataclass(frozen=True, eq=False)
class Gain:
    """Differences of one run from another of the same seed.

    Attributes:
        users: (n,) numbers of the users that both tested, rising.
        of_users: (n,) difference of each, first run minus second.
        clients: (c,) numbers of their clients, rising.
        of_clients: (c,) mean difference of the users of each client.
        sizes: (c,) users of each client that both tested.
    """

    users: np.ndarray
    of_users: np.ndarray
    clients: np.ndarray
    of_clients: np.ndarray
    sizes: np.ndarray


def gain(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], metric: str) -> Gain:
    """What the first run gives each user and client more than the second.

    Args:
        first: Arrays of users.npz.
        second: Likewise. Where one of the two runs had all data in one place, the other's clients count.
        metric: Such as `ndcg`.
    """
    users, one, two = np.intersect1d(first["user"], second["user"], assume_unique=True, return_indices=True)
    differences = first[metric][one] - second[metric][two]
    owners = max(first["client"][one], second["client"][two], key=lambda owner: len(np.unique(owner)))
    clients, means, sizes = client_means(owners, differences)
    return Gain(users, differences, clients, means, sizes)


def client_means(clients: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients (c,) in rising order, mean value (c,) and number (c,) of their users.

    Args:
        clients: (n,) client of each user.
        values: (n,) value of each user.
    """
    numbers, index = np.unique(clients, return_inverse=True)
    sizes = np.bincount(index, minlength=len(numbers))
    return numbers, np.bincount(index, values, minlength=len(numbers)) / sizes, sizes


def losing(differences: np.ndarray) -> float:
    """Share of differences below 0; NaN without any."""
    return float(np.mean(differences < 0)) if len(differences) else math.nan


def worst_mean(values: np.ndarray, share: float = WORST) -> float:
    """Mean of the smallest values: a share of all, rounded up to whole ones; NaN without any."""
    if not len(values):
        return math.nan
    count = math.ceil(round(share * len(values), 9))
    return float(np.sort(values)[:count].mean())


def gini(values: np.ndarray) -> float:
    """Gini coefficient of values >= 0: mean absolute difference of two of them, as a share of twice the mean.

    0: all equal; near 1: one has everything. 0 where all are 0; NaN without any.

    Raises:
        ValueError: A value is negative.
    """
    if not len(values):
        return math.nan
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if ordered[0] < 0:
        raise ValueError(f"the Gini coefficient is for values of 0 or more, not {ordered[0]}")
    n, total = len(ordered), ordered.sum()
    if total == 0:
        return 0.0
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total))


def activity_means(interactions: np.ndarray, values: np.ndarray, groups: int = GROUPS) -> list[float]:
    """Mean value of users in groups of equal size, from the least to the most active.

    Args:
        interactions: (n,) training rows of each user; of equal ones the earlier user comes first.
        values: (n,) value of each user.
        groups: Number of groups; NaN stands for an empty one.
    """
    parts = np.array_split(np.argsort(interactions, kind="stable"), groups)
    return [float(values[part].mean()) if len(part) else math.nan for part in parts]
