import time

import numpy as np
import pytest

from fedhur_app.data.errors import DataError
from fedhur_app.data.split import split_labels
from fedhur_app.data.synthetic import generate


@pytest.fixture(scope="module")
def data():
    return generate(400, 300, 30, seed=5)


def test_shape_titles_groups_and_times(data):
    assert (data.name, data.n_users, data.n_items) == ("synthetic", 400, 300)
    assert data.item_ids.tolist() == [str(item) for item in range(300)]
    # 16 leaf groups share 300 items evenly, in an order that item numbers do not tell.
    leaves, sizes = np.unique([path[-1] for path in data.item_genres], return_counts=True)
    assert sorted(leaves) == sorted(f"{a}.{b}" for a in range(1, 5) for b in range(1, 5))
    assert set(sizes) == {18, 19}
    assert all(path[1].startswith(path[0] + ".") for path in data.item_genres)
    assert data.item_titles[12] == f"item 12 (group {data.item_genres[12][-1]})"
    assert (np.diff(data.timestamps) >= 0).all()
    assert data.ratings is None
    assert len(data) / 400 == pytest.approx(30, rel=0.1)


def test_the_seed_decides(data):
    assert generate(400, 300, 30, seed=5).fingerprint() == data.fingerprint()
    assert generate(400, 300, 30, seed=6).fingerprint() != data.fingerprint()


def test_activity_without_spread_is_exact_and_a_user_can_take_everything():
    data = generate(6, 8, 8, branching=(2,), activity_spread=0, noise=0.0)
    assert np.bincount(data.users).tolist() == [8] * 6
    assert np.bincount(generate(9, 20, 5, branching=(2, 2), activity_spread=0).users).tolist() == [5] * 9


def test_single_picks_follow_the_stated_probabilities():
    # One group, no noise: the item of rank r is picked with probability r^-1 / (1 + 1/2 + 1/3 + 1/4).
    data = generate(20_000, 4, 1, branching=(1,), popularity_skew=1.0, noise=0.0, activity_spread=0, seed=2)
    share = np.sort(np.bincount(data.items, minlength=4) / 20_000)[::-1]
    expected = np.array([1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12)
    assert share == pytest.approx(expected, abs=0.012)
    # Pure noise: every item alike.
    data = generate(20_000, 4, 1, branching=(2,), noise=1.0, activity_spread=0, seed=2)
    assert np.bincount(data.items, minlength=4) / 20_000 == pytest.approx([0.25] * 4, abs=0.012)


def test_times_follow_the_order_of_the_picks():
    # Of all three picks of a user the first one goes by popularity r^-2: 1 / (1 + 1/4 + 1/9 + 1/16) = .702.
    data = generate(5000, 4, 3, branching=(1,), popularity_skew=2.0, noise=0.0, activity_spread=0, seed=2)
    first = np.unique(data.users, return_index=True)[1]
    share = np.bincount(data.items[first], minlength=4).max() / 5000
    assert share == pytest.approx(0.702, abs=0.02)


def recall_at_10(scores, train, test):
    scores = np.where(train, -np.inf, scores)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :10]
    hits = np.take_along_axis(test, top, axis=1).sum(axis=1)
    has_test = test.any(axis=1)
    return (hits[has_test] / test.sum(axis=1)[has_test]).mean()


def test_neighbours_and_groups_beat_popularity(data):
    labels = split_labels(data, "random")
    train, test = (np.zeros((data.n_users, data.n_items), dtype=bool) for _ in range(2))
    train[data.users[labels == 0], data.items[labels == 0]] = True
    test[data.users[labels == 2], data.items[labels == 2]] = True
    popularity = train.sum(axis=0).astype(float)
    norms = np.maximum(np.sqrt(popularity), 1)
    cosine = (train.T.astype(float) @ train) / np.outer(norms, norms)
    np.fill_diagonal(cosine, 0)
    leaf = np.unique([path[-1] for path in data.item_genres], return_inverse=True)[1]
    share = train @ np.eye(16)[leaf]

    by_popularity = recall_at_10(np.tile(popularity, (data.n_users, 1)), train, test)
    by_neighbours = recall_at_10(train @ cosine, train, test)
    by_group = recall_at_10(share[:, leaf] * (popularity + 1), train, test)
    assert by_neighbours > 2 * by_popularity
    assert by_group > 2 * by_popularity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"users": 0}, "at least 1"),
        ({"interactions_per_user": 0}, "at least 1"),
        ({"branching": ()}, "at least 1"),
        ({"branching": (4, 0)}, "at least 1"),
        ({"items": 15}, "15 items cannot fill 16 groups"),
        ({"concentration": 0}, "concentration must be > 0"),
        ({"noise": 1.5}, r"noise 0\.\.1"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        generate(**arguments)


def test_a_catalogue_of_3000_by_3000_is_a_matter_of_seconds():
    start = time.process_time()
    data = generate(3000, 3000, 50)
    assert (data.n_users, data.n_items) == (3000, 3000)
    assert time.process_time() - start < 10
