"""Groups of users and of items by what goes together in the training rows."""

import numpy as np
import scipy.sparse as sp

from fedhur_app.data.interactions import Interactions
from fedhur_app.data.split import TRAIN
from fedhur_app.seeding import numpy_generator

_CLUSTERS = 8
_RANK = 16
# More users hardly change what the groups of items are, and their decomposition takes minutes.
_USERS_FOR_ITEMS = 20_000


def taste_clusters(data: Interactions, labels: np.ndarray, seed: int = 1) -> np.ndarray:
    """Cluster users by their training rows.

    Seeded k-means on the unit rows of the truncated left singular vectors, times singular values, of
    D_u^-1/2 R D_i^-1/2, R the binary training matrix and D the degrees; up to 8 clusters in up to 16
    dimensions. A user without training rows sits at the origin.

    Args:
        data: The interactions.
        labels: 0 for training rows, (n,).
        seed: Of the decomposition and of k-means.

    Returns:
        int64 (n_users,): cluster of each user.
    """
    train = labels == TRAIN
    matrix = _scaled(data.users[train], data.items[train], (data.n_users, data.n_items))
    draw = numpy_generator(seed, "partition")
    svd_seed, kmeans_seed = (int(value) for value in draw.integers(0, 2**31, 2))
    left, singular, _ = _decomposed(matrix, svd_seed)
    return _clusters(left * singular, kmeans_seed)


def item_groups(users: np.ndarray, items: np.ndarray, n_users: int, n_items: int, seed: int = 1) -> np.ndarray:
    """Cluster items by who trains on them, as :func:`taste_clusters` does users.

    The first singular vector, which only says how popular an item is, is left out (Dhillon 2001, "Co-clustering
    documents and words using bipartite spectral graph partitioning"). Of more than 20,000 users a seeded sample of so
    many decides.

    Args:
        users: User of each training row, (n,).
        items: Item of each training row, (n,).
        n_users: Number of users.
        n_items: Number of items.
        seed: Of the sample, the decomposition and k-means.

    Returns:
        int64 (n_items,): group of each item; items that no row (of the sample) holds are in a last group of their own.
    """
    draw = numpy_generator(seed, "item-groups")
    svd_seed, kmeans_seed = (int(value) for value in draw.integers(0, 2**31, 2))
    if n_users > _USERS_FOR_ITEMS:
        drawn = np.zeros(n_users, dtype=bool)
        drawn[draw.choice(n_users, _USERS_FOR_ITEMS, replace=False)] = True
        rows = drawn[users]
        users, items = users[rows], items[rows]
    known = np.unique(items)
    if not len(known):
        return np.zeros(n_items, dtype=np.int64)
    matrix = _scaled(users, np.searchsorted(known, items), (n_users, len(known)))
    _, singular, right = _decomposed(matrix, svd_seed)
    degrees = np.bincount(np.searchsorted(known, items))
    points = (right.T * singular)[:, 1:] / np.sqrt(degrees)[:, None]
    found = _clusters(points, kmeans_seed) if points.shape[1] else np.zeros(len(known), dtype=np.int64)
    groups = np.full(n_items, found.max() + 1, dtype=np.int64)
    groups[known] = found
    return groups


def _scaled(users: np.ndarray, items: np.ndarray, shape: tuple[int, int]) -> sp.csr_matrix:
    """D_u^-1/2 R D_i^-1/2."""
    degree_u = np.maximum(np.bincount(users, minlength=shape[0]), 1)
    degree_i = np.maximum(np.bincount(items, minlength=shape[1]), 1)
    values = 1.0 / np.sqrt(degree_u[users] * degree_i[items])
    return sp.csr_matrix((values, (users, items)), shape=shape)


def _decomposed(matrix: sp.csr_matrix, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truncated singular value decomposition."""
    # scikit-learn takes a second to import, and most kinds do without.
    from sklearn.utils.extmath import randomized_svd
    from threadpoolctl import threadpool_limits

    # One thread: how sums are split must not decide who shares a client.
    with threadpool_limits(1):
        return randomized_svd(matrix, min(_RANK, *matrix.shape), n_iter=7, random_state=seed)


def _clusters(points: np.ndarray, seed: int) -> np.ndarray:
    """K-means on the directions of some points, int64 (len(points),)."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    # Points with equal rows differ by rounding only; k-means must see them as one point.
    points = points.round(9)
    clusters = min(_CLUSTERS, len(np.unique(points, axis=0)))
    with threadpool_limits(1):
        return KMeans(clusters, n_init=10, random_state=seed).fit_predict(points).astype(np.int64)
