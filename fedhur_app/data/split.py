"""Which interactions are for training, validation and test. A new way is one function and one entry of `SPLITS`."""

from collections.abc import Callable, Sequence

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.kinds import call, choose
from fedhur_app.seeding import numpy_generator

TRAIN, VALID, TEST = 0, 1, 2


def split_labels(
    data: Interactions, kind: str, ratios: Sequence[float] = (0.72, 0.08, 0.2), seed: int = 1
) -> np.ndarray:
    """Label each interaction 0 (train), 1 (validation) or 2 (test).

    Args:
        data: The interactions.
        kind: A key of :data:`SPLITS`; the functions say what each does.
        ratios: Shares `(t, v, s)` of train, validation and test, summing to 1.
        seed: Of the random kinds; the same seed gives the same labels.

    Returns:
        int8 (n,).

    Raises:
        DataError: Unknown kind, impossible ratios, a kind by time for data without timestamps, published labels of
            data that have none.
    """
    split = choose(SPLITS, kind, "split")
    shares = np.asarray(ratios, dtype=np.float64)
    if shares.shape != (3,) or not (shares >= 0).all() or shares[0] == 0 or abs(shares.sum() - 1) > 1e-6:
        raise DataError(f"split ratios must be three numbers >= 0 that sum to 1, the first (train) > 0, not {ratios}")
    return call(split, data=data, shares=shares, seed=seed)


def random_rows(data: Interactions, shares: np.ndarray, seed: int) -> np.ndarray:
    """The n rows of all users, in random order: the first round(n t) train, those up to round(n (t + v)) validate.

    The rest tests. Users may end up without rows in a part.
    """
    return _cut(numpy_generator(seed, "split").permutation(len(data)), shares)


def user_ratio(data: Interactions, shares: np.ndarray, seed: int) -> np.ndarray:
    """As `random`, but inside each user. At least one row trains; users with one or two rows train with them all."""
    return _cut_each_user(data, numpy_generator(seed, "split").permutation(len(data)), shares)


def temporal(data: Interactions, shares: np.ndarray) -> np.ndarray:
    """As `user-ratio`, but each user's rows are in order of time, ties in order of the file."""
    return _cut_each_user(data, _times(data, "temporal"), shares)


def temporal_global(data: Interactions, shares: np.ndarray) -> np.ndarray:
    """The rows of all users together in order of time, ties in order of the file, cut as those of `random`.

    So nothing that is trained on is later than what is tested, as in a service that is switched on one day. Users who
    came after the first cut have no training row. They still belong to a client, which does not train on them: their
    user vectors stay as they were drawn (`user_refit` makes them zero, so that all items tie), and their test rows
    count in the means as those of all others. `fedhur data describe` says how many such users there are.
    """
    return _cut(np.argsort(_times(data, "temporal-global"), kind="stable"), shares)


def leave_one_out(data: Interactions) -> np.ndarray:
    """Of each user the last row by time (ties: the later in the file) tests and the one before validates.

    A user with two rows trains with the first and tests the second, one with a single row trains with it. The ratios
    are not used.
    """
    counts = np.bincount(data.users, minlength=data.n_users)
    return _by_place(data, _times(data, "leave-one-out"), np.maximum(counts - 2, 1), np.maximum(counts - 1, 1))


def published(data: Interactions) -> np.ndarray:
    """As the data came. Ratios and seed are not used."""
    if data.labels is None:
        raise DataError(f"{data.name} came without a split; choose another dataset.split.kind")
    return data.labels


SPLITS: dict[str, Callable[..., np.ndarray]] = {
    "random": random_rows,
    "user-ratio": user_ratio,
    "leave-one-out": leave_one_out,
    "temporal": temporal,
    "temporal-global": temporal_global,
    "published": published,
}


def _times(data: Interactions, kind: str) -> np.ndarray:
    if data.timestamps is None:
        raise DataError(f"split '{kind}' needs times, and {data.name} has none; use random or user-ratio")
    return data.timestamps


def _ends(count: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where train and validation end among `count` rows."""
    # 0.72 + 0.08 is not 0.8 in binary; nine decimals decide what is a half.
    ends = [np.rint(np.round(count * share, 9)).astype(np.int64) for share in np.cumsum(shares[:2])]
    return ends[0], ends[1]


def _cut(order: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Labels of the rows when all of them, in this order, are cut in two places."""
    train_end, valid_end = _ends(np.array([len(order)]), shares)
    labels = np.full(len(order), TEST, dtype=np.int8)
    labels[order[: valid_end[0]]] = VALID
    labels[order[: train_end[0]]] = TRAIN
    return labels


def _cut_each_user(data: Interactions, key: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Labels of the rows when those of each user, sorted by `key`, are cut in two places."""
    counts = np.bincount(data.users, minlength=data.n_users)
    train_end, valid_end = _ends(counts, shares)
    train_end = np.where(counts <= 2, counts, np.maximum(train_end, 1))
    return _by_place(data, key, train_end, np.maximum(valid_end, train_end))


def _by_place(data: Interactions, key: np.ndarray, train_end: np.ndarray, valid_end: np.ndarray) -> np.ndarray:
    """Labels from the place of each row among its user's rows sorted by `key` (ties: file order).

    Args:
        data: The interactions.
        key: (n,).
        train_end: Of each user, (n_users,): rows at places below train.
        valid_end: Rows at places from `train_end` to below validate, all later ones test.
    """
    counts = np.bincount(data.users, minlength=data.n_users)
    ends = np.minimum(np.stack([train_end, valid_end, counts], axis=1), counts[:, None])
    sizes = np.diff(ends, axis=1, prepend=0)
    labels = np.empty(len(data), dtype=np.int8)
    # Sorted by user and key, the labels of a user are a run of 0, one of 1 and one of 2.
    in_order = np.repeat(np.tile(np.array([TRAIN, VALID, TEST], dtype=np.int8), data.n_users), sizes.ravel())
    labels[np.lexsort((key, data.users))] = in_order
    return labels
