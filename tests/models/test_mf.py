import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedhur_app.models.mf import MatrixFactorization
from tests.models.helpers import generator

LOSSES = ["bpr", "bce", "mse", "elementwise"]


def autograd_loss(loss, p, e_i, e_j):
    """The losses once more, from torch's own definitions."""
    s_i, s_j = torch.einsum("nd,nd->n", p, e_i), torch.einsum("nd,nd->n", p, e_j)
    if loss == "bpr":
        return -F.logsigmoid(s_i - s_j).mean()
    if loss == "bce":
        bce = F.binary_cross_entropy_with_logits
        return 0.5 * bce(s_i, torch.ones_like(s_i)) + 0.5 * bce(s_j, torch.zeros_like(s_j))
    if loss == "mse":
        return 0.5 * F.mse_loss(s_i, torch.ones_like(s_i)) + 0.5 * F.mse_loss(s_j, torch.zeros_like(s_j))
    return 0.5 * F.mse_loss(p * e_i, torch.ones_like(p)) + 0.5 * F.mse_loss(p * e_j, torch.zeros_like(p))


def random_model(loss, n_users=4, n_items=6, dim=3, dtype=torch.float64):
    g = generator(1)
    return MatrixFactorization(
        torch.randn(n_users, dim, generator=g, dtype=dtype),
        torch.randn(n_items, dim, generator=g, dtype=dtype),
        loss,
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_equal_autograd_with_repeats_in_the_batch(loss):
    model = random_model(loss)
    # User 1 three times, (1, 2) twice, item 2 once as a negative; user 0 and item 5 never.
    users = torch.tensor([1, 1, 1, 2, 3])
    positives = torch.tensor([2, 2, 0, 3, 0])
    negatives = torch.tensor([4, 1, 1, 2, 4])
    value, gradients = model.loss_and_gradients(users, positives, negatives)

    p, e = model.users.clone().requires_grad_(), model.items.clone().requires_grad_()
    expected = autograd_loss(loss, p[users], e[positives], e[negatives])
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradients["users"], p.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradients["items"], e.grad, rtol=1e-12, atol=1e-15)
    assert not gradients["users"][0].any()
    assert not gradients["items"][5].any()


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        ("bpr", math.log(1 + math.exp(-3))),  # scores 2 and -1
        ("bce", (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-1))) / 2),
        ("mse", (1 + 1) / 2),
        # products (3, -1) and (1, -2) against (1, 1) and (0, 0): residuals (2, -2) and (1, -2)
        ("elementwise", ((4 + 4) / 2 + (1 + 4) / 2) / 2),
    ],
)
def test_losses_by_hand(loss, value):
    users = torch.tensor([[1.0, 1.0]])
    items = torch.tensor([[3.0, -1.0], [1.0, -2.0]])
    zero, one = torch.tensor([0]), torch.tensor([1])
    assert MatrixFactorization(users, items, loss).loss_and_gradients(zero, zero, one)[0] == pytest.approx(
        value, rel=1e-6
    )


@pytest.mark.parametrize("loss", ["bpr", "bce"])
def test_scores_of_1e4_give_finite_losses_and_gradients(loss):
    users = torch.tensor([[100.0], [-100.0]])
    items = torch.tensor([[100.0], [-100.0]])
    model = MatrixFactorization(users, items, loss)
    value, gradients = model.loss_and_gradients(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([1, 1]))
    # One triple is as right as can be (loss 0), the other as wrong: 2e4 apart, or 1e4 from each target.
    assert value == pytest.approx(1e4 if loss == "bpr" else 5e3)
    assert all(bool(g.isfinite().all()) for g in gradients.values())
    assert gradients["items"][0, 0] > 0  # the item moves along +p of the wrong user, whose p is negative


def test_scores_are_raw_float64_dot_products():
    model = random_model("bpr", dtype=torch.float32)
    scores = model.scores(torch.tensor([2, 0]))
    assert scores.dtype == torch.float64
    users, items = model.users.tolist(), model.items.tolist()
    expected = [[math.fsum(a * b for a, b in zip(users[u], e, strict=True)) for e in items] for u in (2, 0)]
    np.testing.assert_allclose(scores, expected, rtol=1e-14, atol=1e-14)


def test_initialise_shares_the_item_table_and_not_the_users():
    a = MatrixFactorization.initialise(30, 500, 16, 0.01, generator(1), generator(9), "mse")
    b = MatrixFactorization.initialise(30, 500, 16, 0.01, generator(2), generator(9), "mse")
    assert torch.equal(a.items, b.items)
    assert not torch.equal(a.users, b.users)
    assert (a.users.shape, a.items.shape, a.loss) == ((30, 16), (500, 16), "mse")
    assert a.items.std().item() == pytest.approx(0.01, rel=0.05)


def test_parameters_are_the_tables_themselves():
    model = random_model("bpr")
    model.parameters()["items"].zero_()
    assert not model.scores(torch.tensor([0])).any()


@pytest.mark.parametrize(
    ("users", "items", "loss", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 2), "bpr", "same width"),
        (torch.zeros(2, 3), torch.zeros(4, 3).double(), "bpr", "one floating type"),
        (torch.zeros(2, 3), torch.zeros(4, 3), "bprr", "unknown loss 'bprr'"),
    ],
)
def test_what_does_not_fit_is_refused(users, items, loss, message):
    with pytest.raises(ValueError, match=message):
        MatrixFactorization(users, items, loss)
