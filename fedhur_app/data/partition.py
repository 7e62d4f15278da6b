"""Which client owns which users."""

import numpy as np
import scipy.sparse as sp

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions, in_order
from fedhur_app.data.split import TRAIN
from fedhur_app.seeding import numpy_generator

PARTITION_KINDS = ("id", "random", "taste", "one-user", "market", "published")
# The market of all who belong to no other one; it is numbered last.
OTHER_MARKET = "other"
_TASTE_CLUSTERS = 8
_TASTE_RANK = 16


def assign_clients(data: Interactions, labels: np.ndarray, kind: str, clients: int = 100, seed: int = 1) -> np.ndarray:
    """Give each user to one client.

    Kinds, with U users and K clients; in the first three each client gets floor(U / K) users and the last
    one the remainder too:

    - `id`: users in the order of their ids (near IID where ids say nothing).
    - `random`: users in random order.
    - `taste`: users in the order of their taste cluster, see :func:`taste_clusters` (non-IID).
    - `one-user`: a client for each user; `clients` is not used.
    - `market`: a client for each market, in the order of :func:`market_names`; `clients` is not used.
    - `published`: the clients that the data came with; `clients` is not used.

    Args:
        data: The interactions.
        labels: Of :func:`fedhur_app.data.split.split_labels`, (n,); `taste` looks at training rows only.
        kind: One of `PARTITION_KINDS`.
        clients: K, 1..n_users.
        seed: Of the random kinds; the same seed gives the same clients.

    Returns:
        int64 (n_users,): client number 0..K-1 of each user. Every client owns a user.

    Raises:
        DataError: Unknown kind; fewer than one client or more clients than users; `market` for data without markets;
            `published` for data that came without clients.
    """
    if kind not in PARTITION_KINDS:
        raise DataError(f"there is no partition '{kind}'; choose one of {', '.join(PARTITION_KINDS)}")
    users = data.n_users
    if kind == "one-user":
        return np.arange(users, dtype=np.int64)
    if kind == "market":
        check_markets(data)
        numbers = market_numbers(data)
        assert numbers is not None
        return numbers
    if kind == "published":
        return published_owner(data)
    if clients < 1:
        raise DataError(f"the number of clients must be at least 1, not {clients}")
    if clients > users:
        raise DataError(f"{clients} clients cannot share {users} users; ask for at most {users} clients")
    order = np.arange(users)
    if kind == "random":
        order = numpy_generator(seed, "partition").permutation(users)
    elif kind == "taste":
        order = np.argsort(taste_clusters(data, labels, seed), kind="stable")
    owner = np.empty(users, dtype=np.int64)
    owner[order] = np.minimum(np.arange(users) // (users // clients), clients - 1)
    return owner


def check_markets(data: Interactions) -> None:
    """Refuse data that cannot be shared out by market.

    Raises:
        DataError: The data set has no markets.
    """
    if data.user_markets is None:
        raise DataError(f"{data.name} has no markets to make clients of; choose another dataset.clients.kind")


def published_owner(data: Interactions) -> np.ndarray:
    """The client of each user as the data came, int64 (n_users,).

    Raises:
        DataError: The data came without clients.
    """
    if data.owner is None:
        raise DataError(f"{data.name} came without clients; choose another dataset.clients.kind")
    return data.owner


def market_names(data: Interactions) -> tuple[str, ...]:
    """Names of the markets of a data set; their places are the numbers of the markets, and of clients by market.

    Every market has a user. They are sorted by value if all are integers, else as text; "other" is the last in
    either case. () for data without markets.
    """
    if data.user_markets is None:
        return ()
    names = set(data.user_markets.tolist())
    last = names & {OTHER_MARKET}
    return (*in_order(names - last), *last)


def market_numbers(data: Interactions) -> np.ndarray | None:
    """Number of the market of each user, int64 (n_users,); None for data without markets."""
    if data.user_markets is None:
        return None
    number = {name: place for place, name in enumerate(market_names(data))}
    return np.array([number[name] for name in data.user_markets.tolist()], dtype=np.int64)


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
    # scikit-learn takes a second to import, and the other kinds do without.
    from sklearn.cluster import KMeans
    from sklearn.utils.extmath import randomized_svd
    from threadpoolctl import threadpool_limits

    train = labels == TRAIN
    users, items = data.users[train], data.items[train]
    degree_u = np.maximum(np.bincount(users, minlength=data.n_users), 1)
    degree_i = np.maximum(np.bincount(items, minlength=data.n_items), 1)
    values = 1.0 / np.sqrt(degree_u[users] * degree_i[items])
    matrix = sp.csr_matrix((values, (users, items)), shape=(data.n_users, data.n_items))
    draw = numpy_generator(seed, "partition")
    svd_seed, kmeans_seed = (int(value) for value in draw.integers(0, 2**31, 2))
    # One thread: how sums are split must not decide who shares a client.
    with threadpool_limits(1):
        left, singular, _ = randomized_svd(matrix, min(_TASTE_RANK, *matrix.shape), n_iter=7, random_state=svd_seed)
    points = left * singular
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    # Users with equal rows differ by rounding only; k-means must see them as one point.
    points = points.round(9)
    clusters = min(_TASTE_CLUSTERS, len(np.unique(points, axis=0)))
    with threadpool_limits(1):
        return KMeans(clusters, n_init=10, random_state=kmeans_seed).fit_predict(points).astype(np.int64)
