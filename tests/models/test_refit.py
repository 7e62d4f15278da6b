import numpy as np
import pytest
import torch

from fedhur_app.models.refit import refit_users
from tests.models.helpers import generator, user_items


def table(n_items=12, dim=4, dtype=torch.float64, seed=0):
    return torch.randn(n_items, dim, generator=generator(seed), dtype=dtype) * 0.3


ROWS = [{0, 3, 7}, set(), {1}, set(range(12)), {2, 3, 4, 5, 11}]


def brute_force(items, row, w0, l2):
    """Normal equations of the weighted least squares over all items, stacked row by row."""
    e = items.numpy()
    e = e * np.sqrt(len(e)) / np.linalg.norm(e)
    weight, target = np.full(len(e), w0), np.zeros(len(e))
    for i in row:  # a seen item is there twice: once with weight 1 and target 1, once among all with weight w0
        weight[i] += 1
        target[i] = 1 / weight[i]
    root = np.sqrt(weight)
    system = np.vstack([root[:, None] * e, np.sqrt(l2) * np.eye(e.shape[1])])
    right = np.concatenate([root * target, np.zeros(e.shape[1])])
    return e @ np.linalg.lstsq(system, right, rcond=None)[0]  # scores of the scaled table


@pytest.mark.parametrize(("w0", "l2"), [(0.1, 15.0), (0.0, 1.0), (1.0, 0.01)])
def test_scores_equal_a_brute_force_least_squares(w0, l2):
    items = table()
    vectors = refit_users(items, user_items(ROWS), w0, l2)
    for user, row in enumerate(ROWS):
        np.testing.assert_allclose(items @ vectors[user], brute_force(items, row, w0, l2), rtol=1e-9, atol=1e-12)


def test_scores_do_not_depend_on_the_scale_of_the_table_but_vectors_do():
    items, train = table(), user_items(ROWS)
    vectors = refit_users(items, train)
    scaled = refit_users(items * 50, train)
    torch.testing.assert_close(scaled @ (items * 50).T, vectors @ items.T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(scaled * 50, vectors, rtol=1e-10, atol=1e-12)


def test_scores_turn_with_the_table():
    items, train = table(), user_items(ROWS)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator(5), dtype=torch.float64))[0]
    turned = items @ rotation
    torch.testing.assert_close(refit_users(turned, train) @ turned.T, refit_users(items, train) @ items.T)


def test_users_without_items_and_an_all_zero_table_give_zeros():
    vectors = refit_users(table(), user_items(ROWS))
    assert not vectors[1].any()
    assert vectors[[0, 2, 3, 4]].any(1).all()
    assert not refit_users(torch.zeros(12, 4), user_items(ROWS)).any()


def test_a_single_new_user_gets_the_same_bits():
    items, train = table(40, 8, torch.float32), user_items([set(range(u, 40, u + 2)) for u in range(9)])
    whole = refit_users(items, train)
    assert whole.dtype == torch.float32
    for user in (0, 5):
        assert torch.equal(refit_users(items, user_items([train.of(user)]))[0], whole[user])


@pytest.mark.parametrize(
    ("items", "w0", "l2", "message"),
    [
        (table().fill_(torch.nan), 0.1, 15.0, "not finite"),
        (table(), -0.1, 15.0, "unobserved_weight"),
        (table(), 0.1, 0.0, "l2 must be positive"),
    ],
)
def test_what_has_no_solution_is_refused(items, w0, l2, message):
    with pytest.raises(ValueError, match=message):
        refit_users(items, user_items(ROWS), w0, l2)
