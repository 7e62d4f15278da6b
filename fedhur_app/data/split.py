"""Which interactions are for training, validation and test."""

from collections.abc import Sequence

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.seeding import numpy_generator

TRAIN, VALID, TEST = 0, 1, 2
SPLIT_KINDS = ("random", "user-ratio", "leave-one-out", "temporal", "published")


def split_labels(
    data: Interactions, kind: str, ratios: Sequence[float] = (0.72, 0.08, 0.2), seed: int = 1
) -> np.ndarray:
    """Label each interaction 0 (train), 1 (validation) or 2 (test).

    Kinds, with `c` the number of rows that are divided and ratios `(t, v, s)`:

    - `random`: over the rows of all users, in random order; the first round(c t) train, up to
      round(c (t + v)) validation, the rest test. Users may end up without rows in a part.
    - `user-ratio`: the same inside each user, where at least one row trains; users with one or two rows
      train with them all.
    - `temporal`: as `user-ratio`, but each user's rows are in order of time, ties in order of the file.
    - `leave-one-out`: of each user the last row by time (ties: the later in the file) tests and the one
      before validates. A user with two rows trains with the first and tests the second, one with a single
      row trains with it. The ratios are not used.
    - `published`: as the data came. Ratios and seed are not used.

    Args:
        data: The interactions.
        kind: One of `SPLIT_KINDS`.
        ratios: Shares of train, validation and test, summing to 1.
        seed: Of the random kinds; the same seed gives the same labels.

    Returns:
        int8 (n,).

    Raises:
        DataError: Unknown kind, impossible ratios, a kind by time for data without timestamps, `published` for data
            that came without a split.
    """
    if kind not in SPLIT_KINDS:
        raise DataError(f"there is no split '{kind}'; choose one of {', '.join(SPLIT_KINDS)}")
    if kind in ("leave-one-out", "temporal") and data.timestamps is None:
        raise DataError(f"split '{kind}' needs times, and {data.name} has none; use random or user-ratio")
    if kind == "published":
        if data.labels is None:
            raise DataError(f"{data.name} came without a split; choose another dataset.split.kind")
        return data.labels
    shares = np.asarray(ratios, dtype=np.float64)
    if shares.shape != (3,) or not (shares >= 0).all() or shares[0] == 0 or abs(shares.sum() - 1) > 1e-6:
        raise DataError(f"split ratios must be three numbers >= 0 that sum to 1, the first (train) > 0, not {ratios}")

    if kind == "random":
        order = numpy_generator(seed, "split").permutation(len(data))
        train_end, valid_end = _ends(np.array([len(data)]), shares)
        labels = np.full(len(data), TEST, dtype=np.int8)
        labels[order[: valid_end[0]]] = VALID
        labels[order[: train_end[0]]] = TRAIN
        return labels

    key = data.timestamps
    if kind == "user-ratio":
        key = numpy_generator(seed, "split").permutation(len(data))
    assert key is not None
    place, count = _place_in_user(data.users, key)
    if kind == "leave-one-out":
        train_end, valid_end = np.maximum(count - 2, 1), np.maximum(count - 1, 1)
    else:
        train_end, valid_end = _ends(count, shares)
        train_end = np.where(count <= 2, count, np.maximum(train_end, 1))
        valid_end = np.maximum(valid_end, train_end)
    return np.where(place < train_end, TRAIN, np.where(place < valid_end, VALID, TEST)).astype(np.int8)


def _ends(count: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where train and validation end among `count` rows."""
    # 0.72 + 0.08 is not 0.8 in binary; nine decimals decide what is a half.
    ends = [np.rint(np.round(count * share, 9)).astype(np.int64) for share in np.cumsum(shares[:2])]
    return ends[0], ends[1]


def _place_in_user(users: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place of each row among its user's rows sorted by `key` (ties: file order), and their number, (n,)."""
    order = np.lexsort((key, users))
    counts = np.bincount(users)
    place = np.empty(len(users), dtype=np.int64)
    place[order] = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place, counts[users]
