"""Clients whose mixtures of tastes are drawn from a Dirichlet distribution."""

import numpy as np
from scipy.special import logsumexp

from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition.clients import Clients
from fedhur_app.data.partition.clusters import item_groups
from fedhur_app.data.split import TRAIN
from fedhur_app.seeding import numpy_generator

_SWEEPS = 500


def by_dirichlet(data: Interactions, labels: np.ndarray, number: int, alpha: float, seed: int) -> Clients:
    """Clients of equal size (to one user) with mixtures of tastes drawn from a Dirichlet distribution.

    Items are grouped by :func:`item_groups`, also where the data have genres: most films have several, and
    nearly everybody's first one is drama. A user's taste is the group whose share of her training rows is farthest
    above its share of all training rows; users without training rows get the taste of a random other one. Each client
    draws a mixture over the G tastes from Dirichlet(alpha G p), p the shares of the tastes among users: the mean of the
    mixtures is p, and for equal shares this is the usual Dirichlet(alpha) (Hsu et al. 2019, "Measuring the effects of
    non-identical data distribution for federated visual classification"). Then the mixtures are scaled to what there
    is: iterative proportional fitting changes them as little as possible (in Kullback-Leibler divergence) such that
    every client gets its number of users and every user is taken once. Which users of a taste go where is random.

    A large alpha gives each client the mixture of all users (IID), a small one (0.01) a single taste a client as far
    as sizes allow.

    Args:
        data: The interactions.
        labels: 0 for training rows, (n,).
        number: K.
        alpha: > 0.
        seed: Of everything drawn.
    """
    draw = numpy_generator(seed, "dirichlet")
    tastes = _tastes(data, labels, seed, draw)
    sizes = np.bincount(tastes)
    capacity = np.full(number, data.n_users // number)
    capacity[: data.n_users % number] += 1

    concentration = alpha * len(sizes) * sizes / sizes.sum()
    shape = (number, len(sizes))
    # The logarithm of Gamma(a) variates as Gamma(a + 1) times U^(1/a): for a small a they themselves are 0.
    logs = np.log(draw.standard_gamma(concentration + 1, shape)) + np.log1p(-draw.random(shape)) / concentration
    counts = _whole(_fitted(logs, capacity, sizes), capacity, sizes, draw)

    owner = np.empty(data.n_users, dtype=np.int64)
    for taste in range(len(sizes)):
        owner[draw.permutation(np.flatnonzero(tastes == taste))] = np.repeat(np.arange(number), counts[:, taste])
    return Clients(owner)


def _tastes(data: Interactions, labels: np.ndarray, seed: int, draw: np.random.Generator) -> np.ndarray:
    """Taste of each user, int64 (n_users,), numbered 0..G-1 with every number in use."""
    rows = labels == TRAIN
    users, items = data.users[rows], data.items[rows]
    groups = item_groups(users, items, data.n_users, data.n_items, seed)
    number = int(groups.max()) + 1
    counts = np.bincount(users * number + groups[items], minlength=data.n_users * number).reshape(data.n_users, number)
    degree = counts.sum(axis=1)
    share = counts.sum(axis=0) / max(1, len(users))
    tastes = (counts / np.maximum(degree, 1)[:, None] - share).argmax(axis=1)
    known = tastes[degree > 0]
    if len(known):
        tastes[degree == 0] = draw.choice(known, int((degree == 0).sum()))
    return np.unique(tastes, return_inverse=True)[1].astype(np.int64)


def _fitted(logs: np.ndarray, capacity: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Scale rows and columns of exp(logs), (K, G), in turn until rows sum to `capacity` and columns to `sizes`."""
    rows, columns = np.log(capacity)[:, None], np.log(sizes)
    logs = logs - logsumexp(logs, axis=1, keepdims=True) + rows
    for _ in range(_SWEEPS):
        logs = logs - logsumexp(logs, axis=0) + columns
        off = logsumexp(logs, axis=1, keepdims=True) - rows
        logs = logs - off
        if np.abs(off).max() < 1e-3:
            break
    return np.exp(logs)


def _whole(plan: np.ndarray, capacity: np.ndarray, sizes: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Whole numbers near a plan, (K, G), whose rows sum to `capacity` and whose columns sum to `sizes`."""
    # Floors; where a column would get more than there is, its last rows go without.
    taken = np.minimum(np.floor(plan + 1e-9).cumsum(axis=0), sizes).astype(np.int64)
    counts = np.diff(taken, axis=0, prepend=0)
    free, left = capacity - counts.sum(axis=1), sizes - counts.sum(axis=0)
    # The largest remainders are rounded up, as long as there is place.
    for place in np.argsort(counts - plan, axis=None, kind="stable").tolist():
        client, taste = divmod(place, len(sizes))
        if free[client] and left[taste]:
            counts[client, taste] += 1
            free[client] -= 1
            left[taste] -= 1
    # What is left over meets at random.
    places = np.repeat(np.arange(len(capacity)), free)
    np.add.at(counts, (draw.permutation(places), np.repeat(np.arange(len(sizes)), left)), 1)
    return counts
