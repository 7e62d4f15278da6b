import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedhur_app.data.shards import UserItems
from fedhur_app.models import item_filters
from fedhur_app.models.item_filters import (
    combined_scores,
    ease_weights,
    gfcf_factors,
    item_counts,
    mean_filter,
    score_rows,
    sum_item_rows,
)
from tests.models.helpers import user_items

N_ITEMS = 12
# Users 0 and 5 are alike (rank 5 of 7), user 2 has nothing, nobody has items 6 and 10.
ROWS = [{0, 3, 7}, {1, 3}, set(), {0, 1, 2, 3, 4, 5, 8, 9}, {2, 5, 11}, {0, 3, 7}, {7, 11}]
CLIENTS = [ROWS, [{0, 1}, {1, 2, 9}, {3}], [set()], [{4, 5, 6}]]


def dense(rows, n_items=N_ITEMS):
    matrix = np.zeros((len(rows), n_items))
    for user, row in enumerate(rows):
        matrix[user, list(row)] = 1
    return matrix


def inverse_root(degrees):
    return np.diag([1 / np.sqrt(degree) if degree else 0.0 for degree in degrees])


def brute_filter(rows, svd_number, weight, n_items=N_ITEMS):
    """The definition with I x I matrices and a full SVD, cut at the numerical rank."""
    matrix = dense(rows, n_items)
    items = matrix.sum(0)
    normalised = inverse_root(matrix.sum(1)) @ matrix @ inverse_root(items)
    right = np.linalg.svd(normalised)[2][: np.linalg.matrix_rank(normalised, tol=1e-9)][:svd_number]
    return normalised.T @ normalised + weight * inverse_root(items) @ right.T @ right @ np.diag(np.sqrt(items))


def filter_of(rows, svd_number, weight, n_items=N_ITEMS):
    left, right = gfcf_factors(user_items(rows), n_items).sides(svd_number, weight)
    return (left @ right.T).numpy()


def factors_of(clients=CLIENTS, n_items=N_ITEMS):
    return [gfcf_factors(user_items(rows), n_items) for rows in clients]


def mean_of(clients, svd_number, weight, n_items=N_ITEMS):
    return sum(brute_filter(rows, svd_number, weight, n_items) for rows in clients) / len(clients)


def product(pair):
    return (pair[0].double() @ pair[1].double().T).numpy()


def random_clients(n_clients, n_users, n_items, seed=0):
    draws = np.random.default_rng(seed).random((n_clients, n_users, n_items)) ** np.linspace(1, 3, n_items)
    return [[set(np.flatnonzero(row > 0.6)) for row in client] for client in draws]


# Both Gram matrices: fewer users than items and the other way round.
@pytest.mark.parametrize("rows", [ROWS, [{i, (3 * i + 1) % 6, i // 2} for i in range(6)] * 3 + [{5}, set()]])
@pytest.mark.parametrize("svd_number", [0, 1, 3])
def test_the_filter_equals_its_definition(rows, svd_number):
    np.testing.assert_allclose(filter_of(rows, svd_number, 0.3), brute_filter(rows, svd_number, 0.3), atol=1e-13)


def test_a_filter_by_hand():
    # Two users, three items, degrees 1, 2, 1: R~ = [[1, 1/sqrt 2, 0], [0, 1/sqrt 2, 1]] / sqrt 2, and the top
    # singular vector is that of the root degrees, (1, sqrt 2, 1) / 2, at 1. So V V^T D^1/2 = (1, 2, 1) / 4 a row.
    half, root = 1 / 2, 1 / (2 * np.sqrt(2))
    low_pass = np.array([[half, root, 0], [root, half, root], [0, root, half]])
    ideal = np.outer([1, 1, 1], [1, 2, 1]) / 4
    np.testing.assert_allclose(filter_of([{0, 1}, {1, 2}], 1, 0.8, 3), low_pass + 0.8 * ideal, atol=1e-15)


@pytest.mark.parametrize("svd_number", [5, 7, 100])
def test_singular_vectors_end_at_the_rank(svd_number):
    factors = gfcf_factors(user_items(ROWS), N_ITEMS)
    assert factors.basis.shape == (N_ITEMS, 5)
    assert factors.sides(svd_number, 0.3)[0].shape == (N_ITEMS, 10)
    np.testing.assert_allclose(filter_of(ROWS, svd_number, 0.3), brute_filter(ROWS, svd_number, 0.3), atol=1e-13)


@given(st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=10))
def test_factors_are_a_singular_value_decomposition_of_any_shard(rows):
    factors = gfcf_factors(user_items(rows), 8)
    rank = len(factors.values)
    np.testing.assert_allclose(factors.basis.T @ factors.basis, np.eye(rank), atol=1e-10)
    assert (factors.values.diff() <= 0).all()
    np.testing.assert_allclose(filter_of(rows, 8, 0.0, 8), brute_filter(rows, 8, 0.0, 8), atol=1e-12)
    # With all of the row space the ideal filter hands a user of the client their own row back.
    left, right = factors.sides(8, 1.0)
    matrix = torch.from_numpy(dense(rows, 8)) * (factors.degrees > 0)
    root = factors.degrees.sqrt()
    own = matrix * torch.where(root > 0, 1 / root, 0.0)
    np.testing.assert_allclose(own @ factors.basis @ factors.basis.T * root, matrix, atol=1e-9)
    np.testing.assert_allclose(
        matrix @ left @ right.T, matrix.numpy() @ filter_of(rows, 8, 0.0, 8) + matrix.numpy(), atol=1e-9
    )
    if len(factors.values):
        assert factors.values[0].item() == pytest.approx(1)  # the constant on a connected part of the graph


def test_equal_singular_values_are_kept_together():
    # Four parts that are not connected: four singular values of 1, and one from {4, 5} and {5, 6}. Cut within the
    # four, any rotation of them would do; the result must not depend on the solver's or the users' order.
    rows = [{0, 1}, {2}, {3}, {4, 5}, {5, 6}]
    expected = brute_filter(rows, 4, 0.3)
    for svd_number in (1, 2, 4):
        np.testing.assert_allclose(filter_of(rows, svd_number, 0.3), expected, atol=1e-13)
        np.testing.assert_allclose(filter_of(rows[::-1], svd_number, 0.3), expected, atol=1e-13)
    assert np.abs(filter_of(rows, 5, 0.3) - expected).max() > 0.05


@pytest.mark.parametrize("rows", [[set()], [set(), set()], []])
def test_a_client_without_interactions_has_a_zero_filter(rows):
    factors = gfcf_factors(user_items(rows), N_ITEMS)
    assert (factors.basis.shape, factors.values.shape) == ((N_ITEMS, 0), (0,))
    assert not filter_of(rows, 4, 0.3).any()
    left, right = mean_filter([factors], 4, 0.3, 3)
    assert left.shape == right.shape == (N_ITEMS, 0)
    users = torch.arange(len(rows))
    assert torch.equal(score_rows(user_items(rows), users, left, right), torch.zeros(len(rows), N_ITEMS).double())


def test_one_user_scores_their_items_alike_and_the_others_zero():
    # R~ = (1, 1, 1) / sqrt 3 over the user's items, all degrees 1: F_k = (1 + w) / 3 on them.
    train = user_items([{1, 4, 7}])
    scores = score_rows(train, torch.tensor([0]), *gfcf_factors(train, N_ITEMS).sides(32, 0.3))
    expected = np.zeros((1, N_ITEMS))
    expected[0, [1, 4, 7]] = 1.3
    np.testing.assert_allclose(scores, expected, atol=1e-14)


def test_scores_are_products_of_training_rows_and_filter():
    train, users = user_items(ROWS), torch.tensor([4, 2, 0, 4])
    own = gfcf_factors(train, N_ITEMS).sides(3, 0.3)
    scores = score_rows(train, users, *own)
    assert scores.dtype == torch.float64
    expected = dense(ROWS)[users] @ brute_filter(ROWS, 3, 0.3)
    np.testing.assert_allclose(scores, expected, atol=1e-13)
    assert not scores[1].any()
    assert not scores[:, [6, 10]].any()  # exactly: ties must stay ties

    mean = mean_filter(factors_of(), 3, 0.3, None)
    both = combined_scores(train, users, mean, own, 60.0)
    np.testing.assert_allclose(both, 60 * dense(ROWS)[users] @ mean_of(CLIENTS, 3, 0.3) + expected, atol=2e-5)


@pytest.mark.parametrize("limit", [item_filters.DENSE_ITEMS, N_ITEMS + 4])
@pytest.mark.parametrize("rank", [None, N_ITEMS + 15])
def test_the_exact_mean_is_the_mean_of_the_clients_filters(monkeypatch, limit, rank):
    monkeypatch.setattr(item_filters, "DENSE_ITEMS", limit)
    n_items = N_ITEMS + 16  # more than all factors have columns (5 + 3, 3 + 3, 0, 1 + 1)
    left, right = mean_filter(factors_of(n_items=n_items), 3, 0.3, rank)
    assert left.dtype == right.dtype == torch.float32
    assert left.shape == right.shape
    np.testing.assert_allclose(product((left, right)), mean_of(CLIENTS, 3, 0.3, n_items), atol=1e-6)
    assert not left[[10, *range(N_ITEMS, n_items)]].any()
    assert not right[[10, *range(N_ITEMS, n_items)]].any()


def test_the_exact_mean_has_no_more_columns_than_its_rank():
    expected = mean_of(CLIENTS, 3, 0.3)
    assert mean_filter(factors_of(), 3, 0.3, None)[0].shape == (N_ITEMS, np.linalg.matrix_rank(expected))


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_a_mean_of_low_rank_is_the_best_approximation_on_both_paths(monkeypatch, rank):
    expected = mean_of(CLIENTS, 3, 0.3)
    u, s, vt = np.linalg.svd(expected)
    best = u[:, :rank] * s[:rank] @ vt[:rank]
    whole = mean_filter(factors_of(), 3, 0.3, rank)
    monkeypatch.setattr(item_filters, "DENSE_ITEMS", N_ITEMS - 1)
    implicit = mean_filter(factors_of(), 3, 0.3, rank)
    for pair in (whole, implicit):
        assert pair[0].shape == pair[1].shape == (N_ITEMS, rank)
        np.testing.assert_allclose(product(pair), best, atol=1e-6)
        assert not pair[0][10].any()
        assert not pair[1][10].any()


@pytest.mark.parametrize("columns", [1, 10, 1000])
def test_the_mean_does_not_depend_on_how_many_clients_are_multiplied_at_once(columns, monkeypatch):
    monkeypatch.setattr(item_filters, "DENSE_ITEMS", N_ITEMS - 1)
    expected = product(mean_filter(factors_of(), 3, 0.3, 4))
    monkeypatch.setattr(item_filters, "_SIDE_COLUMNS", columns)
    np.testing.assert_allclose(product(mean_filter(factors_of(), 3, 0.3, 4)), expected, atol=1e-6)


def test_the_implicit_path_is_near_the_best_where_it_iterates_and_repeats_its_bits(monkeypatch):
    clients, n_items, rank = random_clients(6, 25, 150), 150, 10
    factors, expected = factors_of(clients, n_items), mean_of(clients, 5, 0.3, n_items)
    least = np.linalg.norm(np.linalg.svd(expected)[1][rank:])
    assert np.linalg.norm(product(mean_filter(factors, 5, 0.3, rank)) - expected) == pytest.approx(least, rel=1e-5)
    monkeypatch.setattr(item_filters, "DENSE_ITEMS", 100)
    pair = mean_filter(factors, 5, 0.3, rank)
    assert np.linalg.norm(product(pair) - expected) == pytest.approx(least, rel=1e-4)
    again = mean_filter(factors, 5, 0.3, rank)
    assert torch.equal(pair[0], again[0])
    assert torch.equal(pair[1], again[1])


def test_a_mean_that_cannot_be_formed_is_refused(monkeypatch):
    factors = factors_of()
    with pytest.raises(ValueError, match="without clients"):
        mean_filter([], 3, 0.3, 4)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        mean_filter(factors, 3, 0.3, 0)
    with pytest.raises(ValueError, match=r"different sizes: \[12, 13\]"):
        mean_filter([*factors, gfcf_factors(user_items(ROWS), 13)], 3, 0.3, 4)
    with pytest.raises(ValueError, match="svd_number must not be negative"):
        mean_filter(factors, -1, 0.3, 4)
    monkeypatch.setattr(item_filters, "DENSE_ITEMS", 5)
    for rank in (None, N_ITEMS):
        with pytest.raises(ValueError, match=r"4 clients over 12 items.* up to 5 items.* rank below 12"):
            mean_filter(factors, 3, 0.3, rank)


def test_ease_is_the_ridge_regression_that_may_not_use_the_item_itself():
    l2, x = 0.7, dense(ROWS)
    weights = ease_weights(user_items(ROWS), N_ITEMS, l2).numpy()
    assert not np.diag(weights).any()
    for item in range(N_ITEMS):  # the columns are independent: regress each on all the others
        others = np.delete(np.arange(N_ITEMS), item)
        system = np.vstack([x[:, others], np.sqrt(l2) * np.eye(N_ITEMS - 1)])
        target = np.concatenate([x[:, item], np.zeros(N_ITEMS - 1)])
        np.testing.assert_allclose(weights[others, item], np.linalg.lstsq(system, target, rcond=None)[0], atol=1e-12)


def test_ease_minimises_its_loss_numerically():
    l2, x, n_items = 2.0, dense([{0, 1}, {1, 2, 3}, {0, 3}], 4), 4
    free = ~np.eye(n_items, dtype=bool)

    def loss(values):
        b = np.zeros((n_items, n_items))
        b[free] = values
        return ((x - x @ b) ** 2).sum() + l2 * (b**2).sum()

    found = minimize(loss, np.zeros(free.sum()), tol=1e-12).x
    weights = ease_weights(user_items([{0, 1}, {1, 2, 3}, {0, 3}]), n_items, l2)
    np.testing.assert_allclose(weights.numpy()[free], found, atol=1e-5)


def test_ease_scores_and_items_without_interactions():
    train, users = user_items(ROWS), torch.tensor([3, 2])
    weights = ease_weights(train, N_ITEMS, 5.0)
    scores = sum_item_rows(train, users, weights)
    np.testing.assert_allclose(scores, dense(ROWS)[users] @ weights.numpy(), atol=1e-14)
    assert not scores[:, [6, 10]].any()


def test_ease_refuses_large_catalogues_and_no_regularisation():
    with pytest.raises(ValueError, match=r"up to 5000 items only; this catalogue has 5001"):
        ease_weights(user_items(ROWS), item_filters.DENSE_ITEMS + 1, 1.0)
    for l2 in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="l2 must be positive"):
            ease_weights(user_items(ROWS), N_ITEMS, l2)


def test_popularity_counts_users():
    counts = item_counts(user_items(ROWS), N_ITEMS)
    assert counts.dtype == torch.float64
    assert counts.tolist() == dense(ROWS).sum(0).tolist()


@pytest.mark.parametrize("item", [-1, 12])
def test_items_outside_the_catalogue_are_refused(item):
    train = UserItems(np.array([0, 1]), np.array([item]))
    for function in (gfcf_factors, item_counts, lambda train, n: ease_weights(train, n, 1.0)):
        with pytest.raises(ValueError, match=r"1 items lie outside the catalogue 0\.\.11"):
            function(train, N_ITEMS)
