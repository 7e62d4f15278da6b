import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedhur_app.evaluation.statistics import PairedTest, Summary, holm, paired_test, summarise, user_differences

P_VALUES = st.lists(st.floats(0, 1) | st.just(math.nan), max_size=8)
# Few: with ties scipy tries all orders. Far enough apart for ranks and ties to be meant.
DIFFERENCES = st.lists(st.integers(-50, 50).map(lambda number: number / 8), min_size=2, max_size=5)


def test_the_summary_of_three_values_by_hand() -> None:
    # Mean 2; squares 1 + 0 + 1 over n - 1 = 2; with 2 degrees of freedom P(|T| < t) = t / sqrt(2 + t^2) = 0.95.
    summary = summarise([1.0, 2.0, 3.0])
    assert (summary.n, summary.mean, summary.sd) == (3, 2.0, 1.0)
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)
    assert (summary.low, summary.high) == pytest.approx((2 - half, 2 + half), rel=1e-12)


@given(st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=2, max_size=20))
def test_the_interval_is_that_of_scipy(values: list[float]) -> None:
    summary = summarise(values)
    assert summary.sd == pytest.approx(float(np.std(values, ddof=1)), abs=1e-12)
    if stats.sem(values) == 0:  # scipy has no interval of width 0
        assert summary.low == summary.high == summary.mean
    else:
        interval = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert (summary.low, summary.high) == pytest.approx(interval, rel=1e-9, abs=1e-9)


def test_what_few_values_cannot_tell_is_nan() -> None:
    def same(summary: Summary, n: int, *numbers: float) -> bool:
        found = (summary.mean, summary.sd, summary.low, summary.high)
        return summary.n == n and bool(np.array_equal(found, numbers, equal_nan=True))

    assert same(summarise([]), 0, *[math.nan] * 4)
    assert same(summarise([0.25]), 1, 0.25, *[math.nan] * 3)


@pytest.mark.parametrize("function", [summarise, paired_test])
def test_values_that_are_not_finite_are_refused(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match="1 of 3 values are not finite"):
        function([1.0, math.nan, 2.0])


def test_holm_by_hand() -> None:
    # Rising: .005 * 4 = .02; .01 * 3 = .03; .03 * 2 = .06; .04 * 1 = .04, raised to .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], abs=1e-15)
    assert holm([0.6, 0.5]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


def test_a_test_that_was_not_made_does_not_count() -> None:
    assert holm([0.01, math.nan, 0.04]) == pytest.approx([0.02, math.nan, 0.04], abs=1e-15, nan_ok=True)


@given(P_VALUES)
def test_holm_rejects_what_its_steps_reject(p_values: list[float]) -> None:
    """The procedure in Holm's words: go up the sorted p values until one is above level / (number left)."""
    corrected = holm(p_values)
    made = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for step, (p, i) in enumerate(made):
            if p * (len(made) - step) > level:
                break
            rejected.add(i)
        assert {i for i, p in enumerate(corrected) if p <= level} == rejected


@given(P_VALUES, st.randoms())
def test_holm_keeps_order_bounds_and_permutations(p_values: list[float], random: object) -> None:
    corrected = holm(p_values)
    given_, m = np.array(p_values), np.count_nonzero(~np.isnan(p_values))
    made = ~np.isnan(given_)
    assert np.array_equal(np.isnan(corrected), ~made)
    assert np.all(corrected[made] >= given_[made])
    assert np.all(corrected[made] <= np.minimum(m * given_[made], 1.0))  # never above Bonferroni's
    ordered = corrected[made][np.argsort(given_[made], kind="stable")]
    assert np.all(np.diff(ordered) >= 0)
    order = list(range(len(p_values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert np.array_equal(holm(given_[order]), corrected[order], equal_nan=True)


def test_p_values_outside_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        holm([0.5, 1.5])


def brute_signed_rank(differences: list[float]) -> float:
    """Share of the sign patterns that are as far from balance as the one at hand, zeros left out."""
    nonzero = [d for d in differences if d]
    sizes = sorted(abs(d) for d in nonzero)
    ranks = [(2 * sizes.index(abs(d)) + 1 + sizes.count(abs(d))) / 2 for d in nonzero]  # ties: mean rank
    centre = sum(ranks) / 2
    distance = abs(sum(rank for rank, d in zip(ranks, nonzero, strict=True) if d > 0) - centre)
    patterns = list(itertools.product((0, 1), repeat=len(ranks)))
    far = [abs(sum(r for r, up in zip(ranks, signs, strict=True) if up) - centre) >= distance for signs in patterns]
    return sum(far) / len(patterns)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=9, unique=True), st.integers(0, 2**9 - 1))
def test_the_signed_rank_test_of_few_pairs_is_exact(sizes: list[int], signs: int) -> None:
    differences = [size / 8 if signs >> i & 1 else -size / 8 for i, size in enumerate(sizes)]
    assert paired_test([*differences, 0.0]).wilcoxon_p == pytest.approx(brute_signed_rank(differences), abs=1e-12)


@settings(max_examples=40)
@given(DIFFERENCES)
def test_the_t_test_by_its_formula(values: list[float]) -> None:
    test = paired_test(values)
    n, mean = len(values), float(np.mean(values))
    assert test.n == n
    assert test.difference == pytest.approx(mean, abs=1e-12)
    sd = float(np.std(values, ddof=1))
    if sd > 0:
        statistic = abs(mean) / (sd / math.sqrt(n))
        assert test.t_p == pytest.approx(2 * float(stats.t.sf(statistic, n - 1)), rel=1e-9)
    assert 0 < test.wilcoxon_p <= 1


@settings(max_examples=40)
@given(DIFFERENCES)
def test_swapping_the_methods_changes_only_the_sign(values: list[float]) -> None:
    forth, back = paired_test(values), paired_test([-value for value in values])
    assert forth.difference == -back.difference
    found = (forth.t_p, forth.wilcoxon_p)
    assert found == pytest.approx((back.t_p, back.wilcoxon_p), rel=1e-12, nan_ok=True)


def test_many_pairs_agree_with_scipy_on_both_samples() -> None:
    generator = np.random.default_rng(3)
    first, second = generator.random(300), generator.random(300)
    second[:40] = first[:40]
    test = paired_test(first - second)
    assert test.t_p == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-9)
    assert test.wilcoxon_p == pytest.approx(stats.wilcoxon(first, second).pvalue, rel=1e-9)


def test_no_difference_at_all_is_p_1() -> None:
    assert paired_test([0.0, 0.0, 0.0]) == PairedTest(3, 0.0, 1.0, 1.0)


def test_one_pair_is_no_test() -> None:
    for values in ([], [0.5]):
        test = paired_test(values)
        assert test.n == len(values)
        assert math.isnan(test.t_p)
        assert math.isnan(test.wilcoxon_p)


def test_equal_differences_have_ranks_but_no_t() -> None:
    # 0.3 - 0.2 and 0.2 - 0.1 differ in the last bit: that is not a variance to divide by.
    test = paired_test([0.3 - 0.2, 0.2 - 0.1, 0.1])
    assert test.difference == pytest.approx(0.1)
    assert math.isnan(test.t_p)
    assert test.wilcoxon_p == 0.25  # 2^(1-3), the smallest that three pairs allow


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_smallest_p_of_n_pairs(n: int) -> None:
    assert paired_test(np.arange(1.0, n + 1)).wilcoxon_p == pytest.approx(2 ** (1 - n), rel=1e-12)


def test_differences_of_users_by_hand() -> None:
    def of(*values: float) -> np.ndarray:
        return np.array(values)

    first_seed = ((np.array([1, 2, 5]), of(0.5, 0.25, 1.0)), (np.array([2, 5, 7]), of(0.75, 0.5, 9.0)))
    second_seed = ((np.array([5, 1]), of(0.25, 1.0)), (np.array([1, 5]), of(0.5, 0.25)))
    # User 1: only in the second seed, 1 - 1/2. User 2: only in the first, 1/4 - 3/4. User 5: mean of 1/2 and 0.
    assert user_differences([first_seed, second_seed]).tolist() == [0.5, -0.5, 0.25]
    assert user_differences([]).tolist() == []
    nobody = (np.array([1]), of(0.5)), (np.array([2]), of(0.5))
    assert user_differences([nobody]).tolist() == []
