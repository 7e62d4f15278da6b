"""How well a score tells a gain: correlations and shares, with bootstrap intervals over targets.

Scores and gains are ``(N, C)``: ``N`` targets with ``C`` candidates each. Targets are the units that are drawn again,
all their candidates with them: pairs with one target are not independent of each other. NaN marks what is not there.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.stats import rankdata

from fedhur_app.seeding import numpy_generator

DRAWS = 1000
CONFIDENCE = 0.95
TOP = 0.1  # share of the candidates that counts as top-scored


@dataclass(frozen=True)
class Interval:
    """A number with the percentile interval of its bootstrap.

    Attributes:
        n: Targets that it rests on.
        value: The number; NaN where nothing can be told.
        low: Lower end of the 95 % interval; NaN for fewer than two targets.
        high: Its upper end.
    """

    n: int
    value: float
    low: float
    high: float


NOTHING = Interval(0, np.nan, np.nan, np.nan)


def row_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks within every row from 1, equal values their mean rank, NaN where the value is NaN."""
    ranks = np.full(values.shape, np.nan)
    for row, own in zip(ranks, values, strict=True):
        there = ~np.isnan(own)
        row[there] = rankdata(own[there])
    return ranks


def row_pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's correlation in every row of ``(N, C)`` over the pairs that are there: ``(N,)``.

    NaN for a row with a constant side, or with fewer than two pairs.
    """
    return _correlation(_moments(x, y))


def row_spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's correlation in every row: Pearson's of the ranks, ties at their mean rank."""
    x, y = _both(x, y)
    return row_pearson(row_ranks(x), row_ranks(y))


def mean_interval(values: np.ndarray, seed: int = 0) -> Interval:
    """Mean of one value a target, (N,); targets with NaN are left out."""
    there = values[~np.isnan(values)]
    if not len(there):
        return NOTHING
    return _interval(len(there), float(there.mean()), _draws(len(there), seed) @ there / len(there))


def pooled_pearson(x: np.ndarray, y: np.ndarray, seed: int = 0) -> Interval:
    """Pearson's correlation over all pairs of all targets together; intervals draw whole targets."""
    moments = _moments(x, y)
    moments = moments[moments[:, 0] > 0]
    if not len(moments):
        return NOTHING
    value = float(_correlation(moments.sum(axis=0, keepdims=True))[0])
    drawn = _correlation(_draws(len(moments), seed) @ moments)
    return _interval(len(moments), value, drawn[~np.isnan(drawn)])


def pooled_spearman(x: np.ndarray, y: np.ndarray, seed: int = 0) -> Interval:
    """Spearman's, likewise. Ranks are those among all pairs and are not taken anew for a draw."""
    x, y = _both(x, y)
    first, second = (row_ranks(values.reshape(1, -1)).reshape(values.shape) for values in (x, y))
    return pooled_pearson(first, second, seed)


def hurting(gains: np.ndarray) -> np.ndarray:
    """Share of each target's candidates with a gain below 0, (N,); NaN for a target without any."""
    there = ~np.isnan(gains)
    counts = there.sum(axis=1)
    return np.divide((gains < 0).sum(axis=1), counts, out=np.full(len(gains), np.nan), where=counts > 0)


def top_hurting(scores: np.ndarray, gains: np.ndarray, share: float = TOP) -> np.ndarray:
    """The same among each target's top-scored candidates, at least one; of equal scores the earlier one is taken."""
    scores, gains = _both(scores, gains)
    found = np.full(len(scores), np.nan)
    for row, (told, gained) in enumerate(zip(scores, gains, strict=True)):
        there = np.flatnonzero(~np.isnan(told))
        if len(there):
            count = max(1, round(share * len(there)))
            best = there[np.argsort(-told[there], kind="stable")[:count]]
            found[row] = np.mean(gained[best] < 0)
    return found


def _both(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sides with NaN wherever one has it."""
    gone = np.isnan(x) | np.isnan(y)
    return np.where(gone, np.nan, x), np.where(gone, np.nan, y)


def _moments(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Counts, sums, squares and products of every row, (N, 6), about the mean of all: then little cancels."""
    x, y = _both(x, y)
    there = ~np.isnan(x)
    if not there.any():
        return np.zeros((len(x), 6))
    x, y = (np.where(there, values - values[there].mean(), 0.0) for values in (x, y))
    columns = [there.sum(axis=1), x.sum(axis=1), y.sum(axis=1), (x * x).sum(axis=1), (y * y).sum(axis=1)]
    return np.stack([*columns, (x * y).sum(axis=1)], axis=1).astype(np.float64)


def _correlation(moments: np.ndarray) -> np.ndarray:
    n, x, y, xx, yy, xy = moments.T
    with np.errstate(invalid="ignore", divide="ignore"):
        of_x, of_y = xx - x * x / n, yy - y * y / n
        # What is left of a constant side after the subtraction is rounding.
        noise = 1e-12
        told = (n > 1) & (of_x > noise * xx) & (of_y > noise * yy)
        return np.where(told, np.clip((xy - x * y / n) / np.sqrt(of_x * of_y), -1, 1), np.nan)


@lru_cache(maxsize=8)
def _draws(n: int, seed: int) -> np.ndarray:
    """How often each of n targets is drawn, (DRAWS, n)."""
    picked = numpy_generator(seed, "bootstrap").integers(n, size=(DRAWS, n))
    counts = np.zeros((DRAWS, n))
    np.add.at(counts, (np.arange(DRAWS)[:, None], picked), 1)
    return counts


def _interval(n: int, value: float, drawn: np.ndarray) -> Interval:
    if n < 2 or not len(drawn):
        return Interval(n, value, np.nan, np.nan)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(n, value, float(low), float(high))
