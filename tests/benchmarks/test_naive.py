"""The naive forms compute the same as ours."""

import pytest
import torch

from benchmarks.measuring import synthetic_tables
from benchmarks.naive import compare, covered, dense_filter, dense_mean_gram, off_mean
from fedhur_app.config import load_settings
from fedhur_app.relations.filters import mean_gram_eigenpairs
from fedhur_app.relations.weights import shared_basis_filters, weights

CLIENTS, ITEMS, DIM = 4, 14, 3
LABELS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])


@pytest.fixture
def tables():
    return synthetic_tables(CLIENTS, ITEMS, DIM).double()


def test_the_mean_gram_is_that_of_our_eigenpairs(tables):
    vectors, values = mean_gram_eigenpairs(tables, ITEMS)
    torch.testing.assert_close(dense_mean_gram(list(tables)), vectors @ torch.diag(values) @ vectors.T)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("labels", [LABELS, torch.zeros(ITEMS, dtype=torch.long)])
def test_dense_filters_are_ours_seen_in_the_basis(tables, center, labels):
    vectors, values = mean_gram_eigenpairs(tables, 5)
    groups = int(labels.max()) + 1
    alphas = weights(torch.randn(groups, CLIENTS, CLIENTS, dtype=torch.float64), 1.0, include_self=False)
    ours = shared_basis_filters(vectors, values, tables, iter(alphas), 0.3, labels, center)
    peers = off_mean(alphas, center)
    for client in range(CLIENTS):
        dense = dense_filter(dense_mean_gram(list(tables)), list(tables), peers[:, client], 0.3, labels)
        torch.testing.assert_close(vectors.T @ dense @ vectors, ours[client])


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        ("fedhur", ["S_g and its eigenpairs", "personal filters", "fit"]),
        ("fedcia", ["S_g and its eigenpairs", "fit"]),
    ],
)
def test_both_ways_are_timed_for_all_clients(tables, strategy, steps):
    settings = load_settings("synthetic", strategy, 1, "model.dim=3 hierarchy.branching=[3,2] align.steps=2")
    rows = compare(settings, list(tables.float()))
    assert [row.step for row in rows] == steps
    assert all(row.naive > 0 and row.ours > 0 and row.ratio == row.naive / row.ours for row in rows)
    assert f"2 of {CLIENTS} clients" in rows[-1].note


@pytest.mark.parametrize(
    ("strategy", "overrides"), [("fedavg", ""), ("fedhur-paper", ""), ("fedhur", "residual.span=own residual.peers=2")]
)
def test_other_forms_are_refused(tables, strategy, overrides):
    settings = load_settings("synthetic", strategy, 1, overrides)
    assert not covered(settings)
    with pytest.raises(ValueError, match=r"relation\.kind none"):
        compare(settings, list(tables))
