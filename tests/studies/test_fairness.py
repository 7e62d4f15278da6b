import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhur_app.studies import fairness

VALUES = st.lists(st.integers(0, 50), min_size=1, max_size=30)


@given(VALUES)
def test_gini_is_half_the_relative_mean_difference(values):
    n = len(values)
    mean = Fraction(sum(values), n)
    pairs = sum(abs(a - b) for a in values for b in values)
    expected = Fraction(pairs, n * n) / (2 * mean) if mean else Fraction(0)
    assert fairness.gini(np.array(values)) == pytest.approx(float(expected), abs=1e-12)


def test_gini_of_equals_is_0_and_of_one_owner_near_1():
    assert fairness.gini(np.full(7, 0.3)) == pytest.approx(0.0, abs=1e-12)
    assert fairness.gini(np.array([0, 0, 0, 5.0])) == pytest.approx(0.75)
    assert math.isnan(fairness.gini(np.array([])))
    with pytest.raises(ValueError, match=r"not -1\.0"):
        fairness.gini(np.array([1.0, -1.0]))


@given(VALUES)
def test_the_worst_tenth_is_counted_up_to_whole_ones(values):
    count = -(-len(values) // 10)
    expected = sum(sorted(values)[:count]) / count
    assert fairness.worst_mean(np.array(values, dtype=float)) == pytest.approx(expected)


@given(VALUES)
def test_activity_groups_are_equal_parts_from_the_least_active(counts):
    values = np.arange(len(counts), dtype=float)
    means = fairness.activity_means(np.array(counts), values)
    order = sorted(range(len(counts)), key=lambda user: (counts[user], user))
    sizes = [len(counts) // 5 + (place < len(counts) % 5) for place in range(5)]
    for mean, size in zip(means, sizes, strict=True):
        part, order = order[:size], order[size:]
        assert math.isnan(mean) if not part else mean == pytest.approx(sum(part) / size)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-5, 5)), min_size=1, max_size=30))
def test_clients_have_the_mean_of_their_users(users):
    clients, values = (np.array(column) for column in zip(*users, strict=True))
    numbers, means, sizes = fairness.client_means(clients, values)
    assert numbers.tolist() == sorted({client for client, _ in users})
    for number, mean, size in zip(numbers, means, sizes, strict=True):
        own = [value for client, value in users if client == number]
        assert (mean, size) == (pytest.approx(sum(own) / len(own)), len(own))


def test_gain_pairs_users_and_takes_the_clients_of_the_federated_run():
    first = {"user": np.array([1, 2, 4, 7]), "client": np.zeros(4, int), "ndcg": np.array([0.5, 0.25, 1.0, 0.0])}
    second = {"user": np.array([2, 4, 5, 7]), "client": np.array([3, 9, 9, 9]), "ndcg": np.array([0.5, 0.5, 1.0, 0.5])}
    gain = fairness.gain(first, second, "ndcg")
    assert gain.users.tolist() == [2, 4, 7]
    assert gain.of_users.tolist() == [-0.25, 0.5, -0.5]
    assert (gain.clients.tolist(), gain.of_clients.tolist(), gain.sizes.tolist()) == ([3, 9], [-0.25, 0.0], [1, 2])
    assert fairness.losing(gain.of_users) == pytest.approx(2 / 3)
    assert fairness.losing(gain.of_clients) == 0.5
    back = fairness.gain(second, first, "ndcg")
    assert back.of_users.tolist() == [0.25, -0.5, 0.5]
    assert back.clients.tolist() == [3, 9]
