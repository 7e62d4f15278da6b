import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from fedhur_app.data.measures import gini, jaccard, jensen_shannon, mean_of_pairs, top_share


@pytest.mark.parametrize(
    ("sizes", "value"), [([3, 3, 3], 0), ([0, 0, 0, 8], 3 / 4), ([1, 3], 1 / 4), ([7], 0), ([0, 0], 0)]
)
def test_gini_of_known_sizes(sizes, value):
    assert gini(np.array(sizes)) == pytest.approx(value)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any))
def test_gini_is_half_the_relative_mean_difference(sizes):
    x = np.array(sizes)
    assert gini(x) == pytest.approx(abs(x[:, None] - x).mean() / (2 * x.mean()))


def test_top_share_takes_whole_items_rounded_up():
    counts = np.array([1, 5, 2, 2])
    assert top_share(counts, 0.01) == top_share(counts, 0.25) == 0.5
    assert top_share(counts, 0.26) == 0.7
    assert top_share(counts, 1.0) == 1.0
    assert top_share(np.zeros(3, dtype=int), 0.5) == 0.0
    # 0.2 * 15 is a hair above 3 in binary.
    assert top_share(np.ones(15, dtype=int), 0.2) == pytest.approx(0.2)


@given(st.lists(st.frozensets(st.integers(0, 6)), min_size=1, max_size=6))
def test_jaccard_of_sets(sets):
    member = np.array([[item in found for item in range(7)] for found in sets])
    matrix = jaccard(member)
    for i, one in enumerate(sets):
        for j, two in enumerate(sets):
            expected = len(one & two) / len(one | two) if one | two else np.nan
            assert matrix[i, j] == pytest.approx(expected, nan_ok=True)


def test_jaccard_of_sets_of_many_items_is_exact():
    sets = np.ones((2, 200_001), dtype=bool)
    sets[1, :3] = False
    assert jaccard(sets)[0, 1] == 199_998 / 200_001


def test_mean_of_pairs_leaves_out_what_is_not_known():
    assert mean_of_pairs(np.array([[1, 0.2, 0.4], [0.2, 1, np.nan], [0.4, np.nan, 1]])) == pytest.approx(0.3)
    assert mean_of_pairs(np.ones((1, 1))) is None
    assert mean_of_pairs(np.array([[1, np.nan], [np.nan, np.nan]])) is None


def test_jensen_shannon_of_known_rows():
    # H(middle) - (H(row) + H(whole)) / 2, with the middle (3/4, 1/4) of (1, 0) and (1/2, 1/2).
    entropy = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))
    assert jensen_shannon(np.array([[4, 0], [0, 4]])) == pytest.approx(entropy - 0.5)
    assert jensen_shannon(np.array([[1, 2], [10, 20], [0, 0]])) == pytest.approx(0, abs=1e-12)
    assert jensen_shannon(np.zeros((3, 2))) is None


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=5))
def test_jensen_shannon_agrees_with_scipy(rows):
    counts = np.array(rows)
    expected = np.mean([jensenshannon(row, counts.sum(axis=0), base=2) ** 2 for row in counts])
    assert jensen_shannon(counts) == pytest.approx(expected, abs=1e-7)
