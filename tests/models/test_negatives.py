import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedhur_app.data.shards import UserItems
from fedhur_app.models.negatives import NegativeSampler
from tests.models.helpers import generator, user_items


@st.composite
def catalogues(draw):
    n_items = draw(st.integers(1, 12))
    row = st.sets(st.integers(0, n_items - 1), max_size=n_items)
    return n_items, draw(st.lists(row, min_size=1, max_size=6))


@settings(max_examples=150, deadline=None)
@given(catalogues(), st.integers(0, 2**32))
def test_reaches_exactly_the_items_that_are_not_training_positives(catalogue, seed):
    n_items, rows = catalogue
    sampler = NegativeSampler(user_items(rows), n_items)
    assert sampler.trainable.tolist() == [len(row) < n_items for row in rows]
    assert sampler.skipped_users == sum(len(row) == n_items for row in rows)
    users = torch.arange(len(rows))[sampler.trainable].repeat_interleave(400)
    drawn = sampler.sample(users, generator(seed))
    for user in users.unique().tolist():
        # 400 draws from at most 12 items miss a given one with probability < 1e-15.
        assert set(drawn[users == user].tolist()) == set(range(n_items)) - rows[user]


@pytest.mark.parametrize("positives", [{0, 3, 4, 9}, {0, 1, 2}, {7, 8, 9}, set(), {5}])
def test_draws_are_uniform(positives):
    sampler = NegativeSampler(user_items([{1, 2}, positives, range(10)]), 10)
    drawn = sampler.sample(torch.ones(20_000, dtype=torch.int64), generator(3))
    counts = np.bincount(drawn.numpy(), minlength=10)
    assert chisquare(counts[[i for i in range(10) if i not in positives]]).pvalue > 1e-3


def test_neighbours_of_a_user_with_all_items_are_unharmed():
    sampler = NegativeSampler(user_items([range(1, 4), range(4), range(3), []]), 4)
    drawn = sampler.sample(torch.tensor([0, 2, 0, 2]), generator())
    assert drawn.tolist() == [0, 3, 0, 3]
    assert sampler.skipped_users == 1


def test_a_user_with_all_items_is_refused():
    sampler = NegativeSampler(user_items([{0}, {0, 1}]), 2)
    with pytest.raises(ValueError, match="seen every item"):
        sampler.sample(torch.tensor([0, 1]), generator())


def test_held_out_items_are_drawn_as_often_as_others():
    # Field case 14: user 0 holds items 5..7 in the validation or test part; the sampler cannot know.
    train, held_out = user_items([{0, 1}]), [5, 6, 7]
    drawn = NegativeSampler(train, 10).sample(torch.zeros(8_000, dtype=torch.int64), generator(1))
    assert np.isin(drawn.numpy(), held_out).mean() == pytest.approx(3 / 8, abs=0.02)


def test_same_generator_same_draws():
    sampler = NegativeSampler(user_items([{0, 5}, {2}]), 50)
    users = torch.tensor([0, 1] * 20)
    first, again, other = (sampler.sample(users, generator(s)) for s in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("items", "message"),
    [([0, 4], r"1 .* 0\.\.3"), ([-1, 2], r"1 .* 0\.\.3"), ([2, 1], "sorted"), ([1, 1], "sorted")],
)  # fmt: skip
def test_items_out_of_place_are_refused(items, message):
    with pytest.raises(ValueError, match=message):
        NegativeSampler(UserItems(np.array([0, 2]), np.array(items)), 4)
