"""Statistics of a comparison: intervals over seeds, paired tests, correction for several tests.

NaN stands for what cannot be told: the deviation of one value, a test of one pair.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
# Differences are sums of floats: what is this far below the largest of them is rounding, not an effect.
_RELATIVE_NOISE_DIGITS = 12


@dataclass(frozen=True)
class Summary:
    """A sample in five numbers.

    Attributes:
        n: Number of values.
        mean: Their mean; NaN without values.
        sd: Standard deviation with n - 1 in the denominator; NaN for fewer than two values.
        low: Lower end of the 95 % confidence interval of the mean (Student's t); NaN for fewer than two values.
        high: Its upper end.
    """

    n: int
    mean: float
    sd: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Two two-sided tests of paired differences.

    Attributes:
        n: Number of pairs.
        difference: Mean difference; NaN without pairs.
        t_p: p value of the paired t test; NaN for fewer than two pairs, and where all pairs differ by the same
            amount, not 0: a t statistic has no value then.
        wilcoxon_p: p value of the Wilcoxon signed-rank test; NaN for fewer than two pairs.
    """

    n: int
    difference: float
    t_p: float
    wilcoxon_p: float


def summarise(values: Sequence[float] | np.ndarray) -> Summary:
    """Mean, standard deviation and confidence interval.

    Args:
        values: (n,) finite numbers, independent of each other.

    Raises:
        ValueError: A value is not finite.
    """
    sample = _finite(values)
    n = len(sample)
    if n == 0:
        return Summary(0, math.nan, math.nan, math.nan, math.nan)
    mean = float(sample.mean())
    if n == 1:
        return Summary(1, mean, math.nan, math.nan, math.nan)
    sd = float(sample.std(ddof=1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * sd / math.sqrt(n)
    return Summary(n, mean, sd, mean - half, mean + half)


def paired_test(differences: Sequence[float] | np.ndarray) -> PairedTest:
    """Test whether paired differences are centred at 0, by the t test and by ranks.

    The signed-rank test leaves out pairs without a difference (Wilcoxon's own way). Where no pair differs, both p
    values are 1.

    Args:
        differences: (n,) finite numbers, one a pair, independent of each other.

    Raises:
        ValueError: A difference is not finite.
    """
    sample = _finite(differences)
    n = len(sample)
    mean = float(sample.mean()) if n else math.nan
    if n < 2:
        return PairedTest(n, mean, math.nan, math.nan)
    scale = float(np.abs(sample).max())
    if scale == 0:
        return PairedTest(n, 0.0, 1.0, 1.0)
    scaled = np.round(sample / scale, _RELATIVE_NOISE_DIGITS)
    constant = bool(np.all(scaled == scaled[0]))
    t_p = math.nan if constant else float(stats.ttest_1samp(sample, 0.0).pvalue)
    return PairedTest(n, mean, t_p, float(stats.wilcoxon(scaled[scaled != 0]).pvalue))


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's step-down correction: what it returns, compared with a level, bounds the chance of any false finding.

    Args:
        p_values: (m,) p values of one family of tests; NaN for a test that was not made, which does not count.

    Returns:
        (m,) corrected p values in the same order, NaN where the p value is.

    Raises:
        ValueError: A p value outside [0, 1].
    """
    given = np.asarray(p_values, dtype=np.float64)
    made = np.flatnonzero(~np.isnan(given))
    if np.any((given[made] < 0) | (given[made] > 1)):
        raise ValueError(f"p values must lie in [0, 1]: {given.tolist()}")
    order = made[np.argsort(given[made], kind="stable")]
    weights = np.arange(len(order), 0, -1)
    corrected = np.full(given.shape, np.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(weights * given[order]), 1.0)
    return corrected


def user_differences(
    pairs: Sequence[tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]],
) -> np.ndarray:
    """One difference a user: the mean over the seeds in which both methods tested that user.

    Args:
        pairs: For each seed, (users, values) of the first method and of the second: (n,) distinct user numbers and
            (n,) values of these users. The methods may have tested different users.

    Returns:
        (users,) mean of first minus second, by rising user number; users that the methods never share are left out.
    """
    users, differences = [], []
    for (first_users, first), (second_users, second) in pairs:
        shared, in_first, in_second = np.intersect1d(first_users, second_users, True, return_indices=True)
        users.append(shared)
        differences.append(first[in_first] - second[in_second])
    if not users:
        return np.zeros(0)
    distinct, index = np.unique(np.concatenate(users), return_inverse=True)
    sums = np.bincount(index, np.concatenate(differences), minlength=len(distinct))
    return sums / np.bincount(index, minlength=len(distinct))


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    sample = np.asarray(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(sample))} of {sample.size} values are not finite")
    return sample
