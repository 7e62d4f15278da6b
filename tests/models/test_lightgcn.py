import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhur_app.models.lightgcn import LightGCN
from fedhur_app.models.mf import MatrixFactorization
from fedhur_app.models.negatives import NegativeSampler
from fedhur_app.models.training import TrainingOptions, train_locally
from tests.models.helpers import generator, separates_tastes, two_tastes, user_items
from tests.models.test_mf import LOSSES, autograd_loss

N_ITEMS = 7
ROWS = [{0, 1, 2}, {2, 5}, set(), {1, 2, 3, 4}]  # user 2 and item 6 have no edges
ALL = torch.arange(len(ROWS))
BATCH = torch.tensor([[1, 1, 1, 2, 3], [2, 2, 5, 3, 0], [4, 1, 1, 2, 4]])


def tables(dtype=torch.float64, n_users=4, n_items=N_ITEMS, dim=3):
    g = generator(1)
    return torch.randn(n_users, dim, generator=g, dtype=dtype), torch.randn(n_items, dim, generator=g, dtype=dtype)


def dense_final(users, items, rows, layers):
    """Mean of the powers of the dense normalised adjacency, times the stacked tables."""
    n, total = len(users), len(users) + len(items)
    adjacency = torch.zeros(total, total, dtype=users.dtype)
    for u, row in enumerate(rows):
        for i in row:
            adjacency[u, n + i] = adjacency[n + i, u] = 1
    degrees = adjacency.sum(0).clamp(min=1)  # a node without edges has a row of zeros anyhow
    normal = adjacency / (degrees[:, None] * degrees).sqrt()
    stacked = torch.cat([users, items])
    powers = [torch.linalg.matrix_power(normal, layer) @ stacked for layer in range(layers + 1)]
    return torch.stack(powers).mean(0).split([n, len(items)])


@pytest.mark.parametrize("layers", [0, 1, 2, 3, 5])
def test_final_vectors_and_scores_equal_a_dense_brute_force(layers):
    users, items = tables()
    model = LightGCN(users, items, user_items(ROWS), layers)
    final_users, final_items = dense_final(users, items, ROWS, layers)
    torch.testing.assert_close(model.item_vectors(), final_items, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.scores(ALL), final_users @ final_items.T, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.scores(ALL[[3, 0]]), model.scores(ALL)[[3, 0]], rtol=1e-12, atol=1e-14)


@given(data=st.data())
def test_any_graph_propagates_as_the_dense_matrix_does(data):
    n_users, n_items = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    rows = [data.draw(st.sets(st.integers(0, n_items - 1))) for _ in range(n_users)]
    layers = data.draw(st.integers(0, 4))
    users, items = tables(n_users=n_users, n_items=n_items)
    model = LightGCN(users, items, user_items(rows), layers)
    final_users, final_items = dense_final(users, items, rows, layers)
    torch.testing.assert_close(model.item_vectors(), final_items, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.scores(torch.arange(n_users)), final_users @ final_items.T, rtol=1e-12, atol=1e-13)


def test_one_edge_by_hand():
    # A swaps the two vectors, so the mean over layers 0 to 2 is (x + y + x) / 3.
    users, items = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 6.0], [9.0, 9.0]])
    model = LightGCN(users, items, user_items([{0}]), 2)
    assert torch.equal(model.item_vectors(), torch.tensor([[1.0, 4.0], [3.0, 3.0]]))
    assert torch.equal(model.scores(torch.tensor([0])), torch.tensor([[2 * 1 + 2 * 4, 2 * 3 + 2 * 3]]).double())


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_equal_autograd_of_the_dense_formulation(loss, layers):
    users, items = tables()
    value, gradients = LightGCN(users, items, user_items(ROWS), layers, loss).loss_and_gradients(*BATCH)
    p, e = users.clone().requires_grad_(), items.clone().requires_grad_()
    final_users, final_items = dense_final(p, e, ROWS, layers)
    u, i, j = BATCH
    expected = autograd_loss(loss, final_users[u], final_items[i], final_items[j])
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradients["users"], p.grad, rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(gradients["items"], e.grad, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_without_layers_it_is_matrix_factorisation_to_the_bit(loss, dtype):
    users, items = tables(dtype)
    graph, plain = LightGCN(users, items, user_items(ROWS), 0, loss), MatrixFactorization(users, items, loss)
    (value, gradients), (expected, wanted) = (model.loss_and_gradients(*BATCH) for model in (graph, plain))
    assert value == expected
    assert all(torch.equal(gradients[name], wanted[name]) for name in ("users", "items"))
    assert torch.equal(graph.scores(ALL), plain.scores(ALL))
    assert torch.equal(graph.item_vectors(), items)


@pytest.mark.parametrize("layers", [1, 3])
def test_nodes_without_edges_keep_their_share_of_the_ego_vector(layers):
    users, items = tables(torch.float32)
    model = LightGCN(users, items, user_items(ROWS), layers)
    assert torch.equal(model.item_vectors()[6], items[6] / (layers + 1))
    expected = (users[2] / (layers + 1)).double() @ model.item_vectors().double().T
    torch.testing.assert_close(model.scores(ALL[2:3])[0], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows", [[set(), set()], []])
def test_a_client_without_edges(rows):
    users, items = tables(torch.float32, n_users=len(rows))
    model = LightGCN(users, items, user_items(rows), 3)
    assert torch.equal(model.item_vectors(), items / 4)
    assert model.scores(torch.arange(len(rows))).shape == (len(rows), N_ITEMS)


def test_a_step_on_the_tables_changes_the_next_scores():
    users, items = tables()
    model = LightGCN(users, items, user_items(ROWS), 2)
    model.scores(ALL)
    model.parameters()["items"].mul_(2)
    model.parameters()["users"].add_(1)
    fresh = LightGCN(users.clone(), items.clone(), user_items(ROWS), 2)
    assert torch.equal(model.scores(ALL), fresh.scores(ALL))
    assert torch.equal(model.item_vectors(), fresh.item_vectors())


def test_no_warnings_and_the_same_bits_again():
    rng = np.random.default_rng(0)
    rows = [set(rng.choice(300, 20, replace=False).tolist()) for _ in range(50)]
    users, items = tables(torch.float32, 50, 300, 128)
    batch = torch.stack([torch.randint(high, (400,), generator=generator()) for high in (50, 300, 300)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = [LightGCN(users, items, user_items(rows), 3).loss_and_gradients(*batch) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in ("users", "items"))


@pytest.mark.parametrize("loss", ["bpr", "bce"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_training_separates_two_tastes(loss, optimizer):
    items = user_items(two_tastes())
    start = MatrixFactorization.initialise(20, 10, 4, 0.1, generator(1), generator(2))
    model = LightGCN(start.users, start.items, items, 2, loss)
    options = TrainingOptions(epochs=100, batch_size=16, optimizer=optimizer, lr=0.05 if optimizer == "adam" else 1.0)
    report = train_locally(model, items, NegativeSampler(items, 10), options, generator(4))
    assert report.loss_mean < 0.6 * report.first_epoch_mean
    assert separates_tastes(model.scores(torch.arange(20)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"users": torch.zeros(4, 2)}, "same width"),
        ({"items": torch.zeros(7, 3).double()}, "one floating type"),
        ({"users": torch.zeros(4, 3).long(), "items": torch.zeros(7, 3).long()}, "one floating type"),
        ({"users": torch.zeros(5, 3)}, "training items of 4 users do not go with 5"),
        ({"items": torch.zeros(5, 3)}, r"1 training items lie outside the catalogue 0\.\.4"),
        ({"layers": -1}, "must not be negative: -1"),
        ({"loss": "bprr"}, "unknown loss 'bprr'"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, message):
    usual = {"users": torch.zeros(4, 3), "items": torch.zeros(7, 3), "train": user_items(ROWS)}
    with pytest.raises(ValueError, match=message):
        LightGCN(**(usual | wrong))
