import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedhur_app.models.mf import MatrixFactorization, score_loss
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


def biased(loss, dtype=torch.float64):
    model = random_model(loss, dtype=dtype)
    model.bias = torch.tensor([0.5, -2.0, 1.0, 3.0], dtype=dtype)
    return model


@pytest.mark.parametrize("loss", ["bpr", "bce", "mse"])
def test_gradients_with_a_bias_equal_autograd(loss):
    model = biased(loss)
    users, positives, negatives = torch.tensor([[1, 1, 1, 2, 3], [2, 2, 0, 3, 0], [4, 1, 1, 2, 4]])
    value, gradients = model.loss_and_gradients(users, positives, negatives)

    # p.e + b is a dot product of longer vectors: (p, b).(e, 1).
    p, e, b = (tensor.clone().requires_grad_() for tensor in (model.users, model.items, model.bias))
    one = torch.ones(len(users), 1, dtype=e.dtype)
    expected = autograd_loss(
        loss,
        torch.cat([p[users], b[users, None]], 1),
        torch.cat([e[positives], one], 1),
        torch.cat([e[negatives], one], 1),
    )
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    for name, leaf in (("users", p), ("items", e), ("user_bias", b)):
        torch.testing.assert_close(gradients[name], leaf.grad, rtol=1e-11, atol=1e-15)
    assert gradients["user_bias"][0] == 0
    assert bool(gradients["user_bias"].any()) == (loss != "bpr")  # exactly 0 for bpr, which compares scores


def test_the_bias_is_a_parameter_and_moves_all_scores_of_a_user():
    model = biased("bce", torch.float32)
    assert model.parameters().keys() == {"users", "items", "user_bias"}
    plain = MatrixFactorization(model.users, model.items)
    users = torch.tensor([3, 1])
    assert torch.equal(model.scores(users), plain.scores(users) + torch.tensor([[3.0], [-2.0]]).double())
    model.parameters()["user_bias"].zero_()
    assert torch.equal(model.scores(users), plain.scores(users))


def test_initialise_with_a_bias_adds_zeros_and_draws_nothing():
    a, b = (
        MatrixFactorization.initialise(3, 5, 2, 0.1, generator(1), generator(2), user_bias=x) for x in (True, False)
    )
    assert torch.equal(a.users, b.users)
    assert torch.equal(a.items, b.items)
    assert torch.equal(a.parameters()["user_bias"], torch.zeros(3))
    assert b.bias is None
    assert b.parameters().keys() == {"users", "items"}


def test_bce_with_a_bias_by_hand():
    # Item vectors of 0: both scores are the bias, 4.
    model = MatrixFactorization(torch.zeros(1, 2), torch.zeros(2, 2), "bce", torch.tensor([4.0]))
    zero, one = torch.tensor([0]), torch.tensor([1])
    value, gradients = model.loss_and_gradients(zero, zero, one)
    assert value == pytest.approx((math.log1p(math.exp(-4)) + math.log1p(math.exp(4))) / 2, rel=1e-6)
    assert gradients["user_bias"].item() == pytest.approx(
        (1 / (1 + math.exp(-4)) - 1 / (1 + math.exp(4))) / 2, rel=1e-6
    )


@pytest.mark.parametrize(
    ("bias", "loss", "message"),
    [
        (torch.zeros(3), "bce", r"user bias \(3,\)"),
        (torch.zeros(2, 1), "bce", r"user bias \(2, 1\)"),
        (torch.zeros(2).double(), "bce", "float64 must be"),
        (torch.zeros(2), "elementwise", "does not go with the loss 'elementwise'"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(bias, loss, message):
    with pytest.raises(ValueError, match=message):
        MatrixFactorization(torch.zeros(2, 3), torch.zeros(4, 3), loss, bias)


def test_item_vectors_are_the_item_table():
    model = biased("bpr")
    assert model.item_vectors() is model.items


def test_elementwise_is_no_function_of_scores():
    with pytest.raises(ValueError, match="not a function of scores"):
        score_loss("elementwise", torch.zeros(2), torch.zeros(2))


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
