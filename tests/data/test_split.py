import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.split import SPLIT_KINDS, split_labels


def of_counts(counts, timestamps=True):
    """Users 0, 1, ... with so many interactions each, file order user by user, time running backwards."""
    users = np.repeat(np.arange(len(counts)), counts)
    items = np.concatenate([np.arange(count) for count in counts])
    return from_raw("made-up", users, items, timestamps=-np.arange(len(users)) if timestamps else None)


def sizes(labels):
    return np.bincount(labels, minlength=3).tolist()


def test_random_split_has_the_exact_sizes_of_ml_100k():
    assert sizes(split_labels(of_counts([1000] * 100), "random")) == [72_000, 8_000, 20_000]


def test_random_split_rounds_the_two_boundaries():
    # 7 rows: round(7 * .72) = 5, round(7 * .8) = 6.
    assert sizes(split_labels(of_counts([7]), "random")) == [5, 1, 1]
    assert sizes(split_labels(of_counts([7]), "random", (0.5, 0, 0.5))) == [4, 0, 3]


def test_random_split_is_by_interaction_over_all_users():
    labels = split_labels(of_counts([10] * 200), "random")
    share = (labels.reshape(200, 10) == 0).mean(axis=1)
    assert share.min() < 0.5
    assert share.max() == 1.0
    # Hypergeometric: the standard deviation of a user's training share is sqrt(.72 * .28 / 10) = .142.
    assert share.std() == pytest.approx(0.142, abs=0.03)


def test_user_ratio_has_the_ratios_inside_each_user():
    data = of_counts([100, 50, 5, 3, 2, 1])
    labels = split_labels(data, "user-ratio")
    # c = 5: round(3.6), round(4.0); c = 3: round(2.16), round(2.4); one or two rows all train.
    expected = [[72, 8, 20], [36, 4, 10], [4, 0, 1], [2, 0, 1], [2, 0, 0], [1, 0, 0]]
    assert [sizes(labels[data.users == user]) for user in range(6)] == expected


def test_small_train_ratio_still_trains_on_one_row():
    labels = split_labels(of_counts([3]), "user-ratio", (0.1, 0.1, 0.8))
    assert sizes(labels) == [1, 0, 2]


def test_leave_one_out_takes_the_last_two_by_time():
    # User 1: times 30, 10, 20 (last, first, middle); user 2 has two rows, user 3 one.
    data = from_raw("x", [1, 1, 1, 2, 2, 3], [1, 2, 3, 1, 2, 1], timestamps=[30, 10, 20, 5, 4, 9])
    assert split_labels(data, "leave-one-out").tolist() == [2, 0, 1, 2, 0, 0]


def test_leave_one_out_with_neighbouring_seconds_and_ties_in_file_order():
    data = from_raw("x", [1] * 3, [1, 2, 3], timestamps=[881250951, 881250949, 881250950])
    assert split_labels(data, "leave-one-out").tolist() == [2, 0, 1]
    tied = from_raw("x", [1] * 4, [9, 2, 7, 1], timestamps=[5, 5, 5, 5])
    assert split_labels(tied, "leave-one-out").tolist() == [0, 0, 1, 2]


def test_temporal_split_goes_by_time_with_ties_in_file_order():
    data = of_counts([5, 2])
    # Times run backwards, so the last rows of the file come first.
    assert split_labels(data, "temporal", (0.6, 0.2, 0.2)).tolist() == [2, 1, 0, 0, 0, 0, 0]
    tied = from_raw("x", [1] * 5, [5, 4, 3, 2, 1], timestamps=[7] * 5)
    assert split_labels(tied, "temporal", (0.6, 0.2, 0.2)).tolist() == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("kind", ["leave-one-out", "temporal"])
def test_split_by_time_needs_times(kind):
    with pytest.raises(DataError, match=f"'{kind}' needs times.*random or user-ratio"):
        split_labels(of_counts([3], timestamps=False), kind)


@pytest.mark.parametrize(
    "ratios", [(0.8, 0.2), (0.8, 0.1, 0.2), (1.2, -0.1, -0.1), (0, 0.5, 0.5), (float("nan"), 0.5, 0.5)]
)
def test_impossible_ratios_are_refused(ratios):
    with pytest.raises(DataError, match="sum to 1"):
        split_labels(of_counts([3]), "random", ratios)


def test_unknown_kind_is_refused():
    with pytest.raises(DataError, match=r"no split 'loo'.*leave-one-out"):
        split_labels(of_counts([3]), "loo")


@pytest.mark.parametrize("kind", ["random", "user-ratio"])
def test_the_seed_decides(kind):
    data = of_counts([40, 30])
    assert np.array_equal(split_labels(data, kind, seed=4), split_labels(data, kind, seed=4))
    assert not np.array_equal(split_labels(data, kind, seed=4), split_labels(data, kind, seed=5))


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    kind=st.sampled_from([kind for kind in SPLIT_KINDS if kind != "published"]),
    parts=st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 5)),
    seed=st.integers(0, 3),
)
def test_sizes_of_any_split(counts, kind, parts, seed):
    ratios = [part / sum(parts) for part in parts]
    data = of_counts(counts)
    labels = split_labels(data, kind, ratios, seed)
    assert labels.dtype == np.int8
    assert labels.shape == (len(data),)
    assert set(labels.tolist()) <= {0, 1, 2}
    # No size is more than one row from its share.
    whole = [len(data)] if kind == "random" else [] if kind == "leave-one-out" else counts
    for user, count in enumerate(whole):
        got = sizes(labels if kind == "random" else labels[data.users == user])
        if kind == "random" or count > 2:
            assert all(abs(n - count * share) <= 1 + 1e-9 for n, share in zip(got, ratios, strict=True))
    if kind != "random":
        assert np.unique(data.users[labels == 0]).tolist() == list(range(len(counts)))
    if kind == "leave-one-out":
        assert sizes(labels)[1:] == [sum(c > 2 for c in counts), sum(c > 1 for c in counts)]
