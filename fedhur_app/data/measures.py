"""Numbers that say how unevenly things are shared out. Where there is nothing to measure they are None, never NaN."""

import numpy as np


def gini(sizes: np.ndarray) -> float:
    """Gini coefficient of sizes >= 0, (n,): 0 for equal sizes, (n - 1) / n if one has all; 0 if all are 0."""
    total = sizes.sum()
    if total == 0:
        return 0.0
    n = len(sizes)
    place = np.arange(1, n + 1)
    return float(((2 * place - n - 1) * np.sort(sizes)).sum() / (n * total))


def top_share(counts: np.ndarray, share: float) -> float:
    """Share of all counts, (n,), that the ceil(share * n) largest have; 0 if all are 0."""
    # 0.2 * 15 is 3.0000000000000004 in binary; nine decimals decide what is whole.
    top = int(np.ceil(np.round(share * len(counts), 9)))
    total = counts.sum()
    return float(np.sort(counts)[len(counts) - top :].sum() / total) if total else 0.0


def jaccard(sets: np.ndarray) -> np.ndarray:
    """Size of the intersection over that of the union, of all pairs of sets.

    Args:
        sets: bool (K, I).

    Returns:
        float64 (K, K); NaN for two empty sets, which have no such number.
    """
    both = np.zeros((len(sets), len(sets)))
    # float32 counts exactly up to 2^24.
    for start in range(0, sets.shape[1], 1 << 16):
        part = sets[:, start : start + (1 << 16)].astype(np.float32)
        both += part @ part.T
    sizes = np.diag(both)
    union = sizes[:, None] + sizes - both
    return np.divide(both, union, out=np.full_like(both, np.nan), where=union > 0)


def mean_of_pairs(matrix: np.ndarray) -> float | None:
    """Mean over the pairs of different rows of a symmetric matrix, NaN left out; None without such a pair."""
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    pairs = pairs[~np.isnan(pairs)]
    return float(pairs.mean()) if len(pairs) else None


def jensen_shannon(counts: np.ndarray) -> float | None:
    """Mean Jensen-Shannon divergence of the rows from the sum of all rows, in bits: 0 (all alike) to 1.

    Args:
        counts: (K, G), >= 0; rows of zeros are left out.

    Returns:
        The unweighted mean over rows; None if all are zero.
    """
    counts = counts[counts.sum(axis=1) > 0]
    if not len(counts):
        return None
    rows = counts / counts.sum(axis=1, keepdims=True)
    whole = counts.sum(axis=0) / counts.sum()
    middle = (rows + whole) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        of_rows = np.where(rows > 0, rows * np.log2(rows / middle), 0.0).sum(axis=1)
        of_whole = np.where(whole > 0, whole * np.log2(whole / middle), 0.0).sum(axis=1)
    # Rounding may give a divergence a hair below 0.
    return float(np.clip((of_rows + of_whole) / 2, 0.0, 1.0).mean())
