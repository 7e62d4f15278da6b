import math

import pytest
import torch

from fedhur_app.relations.filters import blocks_of, group_filters, mean_gram_eigenpairs, rows_of
from fedhur_app.relations.weights import (
    bound_residuals,
    corrected_scores,
    item_norm,
    personal_eigenpairs,
    residuals,
    weights,
)
from tests.relations import brute
from tests.tensors import LargestTensor


def test_corrected_scores_entry_by_entry():
    s, f = brute.tables(2, 4, 4).abs(), brute.tables(2, 4, 4, seed=1)
    got = corrected_scores(s, f, 0.3)
    for b in range(2):
        for k in range(4):
            mean, spread = f[b, k].mean(), f[b, k].std(correction=0)
            for j in range(4):
                expected = s[b, k, j] + 0.3 * s[b, k].std(correction=0) * (f[b, k, j] - mean) / spread
                torch.testing.assert_close(got[b, k, j], expected)
    assert torch.equal(corrected_scores(s, f, 0.0), s)
    # A scorer that says the same of everyone corrects nothing.
    assert torch.equal(corrected_scores(s, torch.full_like(f, 0.7), 5.0), s)


def test_weights_by_hand():
    scores = torch.tensor([[0.0, math.log(2)], [math.log(3), 0.0]]).double()
    got = weights(scores, tau=1.0, standardize=False)
    torch.testing.assert_close(got, torch.tensor([[1 / 3, 2 / 3], [3 / 4, 1 / 4]]).double())
    sharper = weights(scores, tau=0.5, standardize=False)
    torch.testing.assert_close(sharper[0], torch.tensor([1 / 5, 4 / 5]).double())
    # Standardised, two candidates are always at -1 and 1.
    e = math.e
    torch.testing.assert_close(
        weights(scores, tau=1.0)[0], torch.tensor([1 / (1 + e * e), e * e / (1 + e * e)]).double()
    )


def test_standardised_weights_have_no_units():
    scores = brute.tables(3, 6, 6)
    torch.testing.assert_close(weights(1e6 * scores + 5, 0.7), weights(scores, 0.7))
    assert not torch.allclose(weights(10 * scores, 0.7, standardize=False), weights(scores, 0.7, standardize=False))


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("top", [None, 1, 3, 100])
def test_rows_sum_to_one_and_only_candidates_weigh(standardize, include_self, top):
    scores = 1e4 * brute.tables(3, 6, 6)
    scores[1] = 7.0  # all alike
    alpha = weights(scores, 0.5, standardize, include_self, top)
    torch.testing.assert_close(alpha.sum(dim=2), torch.ones(3, 6).double())
    assert (alpha >= 0).all()
    candidates = 6 if include_self else 5
    if standardize:
        assert ((alpha > 0).sum(dim=2) == min(top or candidates, candidates)).all()
    if not include_self:
        assert (alpha.diagonal(dim1=1, dim2=2) == 0).all()
    if top:
        full = weights(scores, 0.5, standardize, include_self)
        kept = torch.where(alpha > 0, full, 0)
        torch.testing.assert_close(alpha, kept / kept.sum(dim=2, keepdim=True))
        assert (torch.where(alpha > 0, full, 1).amin(dim=2) >= torch.where(alpha > 0, 0, full).amax(dim=2)).all()


def test_weights_refuse_what_has_no_meaning():
    with pytest.raises(ValueError, match="tau"):
        weights(torch.zeros(2, 2), 0.0)
    with pytest.raises(ValueError, match="top"):
        weights(torch.zeros(2, 2), 1.0, top=0)
    with pytest.raises(ValueError, match="single client"):
        weights(torch.zeros(1, 1), 1.0, include_self=False)
    assert weights(torch.zeros(1, 1), 1.0).tolist() == [[1.0]]


def filters_and_weights():
    tree = brute.hierarchy(40, (3, 15))
    got = group_filters(brute.tables(5, 40, 3), tree, (0.5, 0.5))
    return tree, got, [weights(brute.tables(len(level.members), 5, 5), 0.8) for level in tree.levels]


def test_residuals_are_weighted_deviations_of_filters():
    tree, got, alphas = filters_and_weights()
    for level, alpha, grams, public in zip(tree.levels, alphas, got.grams, got.public, strict=True):
        r = residuals(alpha, grams)
        inherited = public - grams.mean(dim=0)
        for k in range(5):
            for block in range(len(level.members)):
                expected = sum(
                    alpha[block, k, j] * (inherited[block] + grams[j, block] - public[block]) for j in range(5)
                )
                torch.testing.assert_close(r[k, block], expected)
        torch.testing.assert_close(r, r.transpose(-1, -2))
        assert (r[:, ~brute.valid(level)] == 0).all()


def test_means_in_place_of_grams_are_averaged_parameters():
    tree, got, alphas = filters_and_weights()
    level, means = tree.levels[1], got.means[1]
    shifts = rows_of(residuals(alphas[1], blocks_of(means, level)), level)
    for k in range(5):
        for group, parent in enumerate(level.parent.tolist()):
            expected = sum(alphas[1][parent, k, j] * means[j, group] for j in range(5)) - means[:, group].mean(dim=0)
            torch.testing.assert_close(shifts[k, group], expected)


def test_centred_residuals_shift_nothing_and_uniform_weights_give_none():
    _, got, alphas = filters_and_weights()
    plain, centred = residuals(alphas[1], got.grams[1]), residuals(alphas[1], got.grams[1], center=True)
    assert float(plain.mean(dim=0).abs().max()) > 1e-3
    torch.testing.assert_close(centred.mean(dim=0), torch.zeros_like(centred[0]), atol=1e-12, rtol=0)
    torch.testing.assert_close(centred, plain - plain.mean(dim=0))
    uniform = torch.full_like(alphas[1], 1 / 5)
    torch.testing.assert_close(residuals(uniform, got.grams[1]), torch.zeros_like(plain), atol=1e-12, rtol=0)


def test_item_norm_and_bound():
    tree, got, alphas = filters_and_weights()
    level = tree.leaf
    r = residuals(alphas[1], got.grams[1])
    assigned = brute.assignment(level)
    norms = torch.stack([(assigned @ brute.scatter(one, level) @ assigned.T).norm() for one in r])
    torch.testing.assert_close(item_norm(r, level), norms)
    limit = float(norms.median())
    bounded = bound_residuals(r, level, max_ratio=0.1, global_norm=limit / 0.1)
    torch.testing.assert_close(item_norm(bounded, level), norms.clamp_max(limit))
    for k in range(5):
        torch.testing.assert_close(bounded[k], r[k] * (limit / norms[k]).clamp_max(1))
    assert (bound_residuals(0 * r, level, 0.1, 1.0) == 0).all()


@pytest.mark.parametrize("groups", [None, 1, 4])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_personal_eigenpairs_are_those_of_the_item_residual(groups, gamma):
    items, rank = 60, 5
    tables = brute.tables(6, items, 4) * torch.linspace(2, 0.5, 6)[:, None, None]
    vectors, values = mean_gram_eigenpairs(tables, 5)
    public = (vectors * values) @ vectors.T
    labels = None if groups is None else brute.hierarchy(items, (groups,)).leaf.labels
    alpha = weights(brute.tables(1, groups or 1, 6)[0], 0.5, top=3)
    dense = public.clone()
    for group, weight in enumerate(alpha):
        inside = torch.ones(items).double() if labels is None else (labels == group).double()
        peers = sum(weight[j] * tables[j] @ tables[j].T for j in range(6))
        dense += gamma * inside[:, None] * (peers - public) * inside
    expected, expected_vectors = torch.linalg.eigh(dense)
    expected, expected_vectors = expected.flip(0)[:rank], expected_vectors.flip(1)[:, :rank]
    got_vectors, got = personal_eigenpairs(vectors, values, tables, alpha, gamma, rank, labels, tolerance=1e-9)
    torch.testing.assert_close(got, expected.clamp_min(0))
    torch.testing.assert_close(
        (got_vectors * got) @ got_vectors.T,
        (expected_vectors * expected) @ expected_vectors.T,
        atol=1e-6,
        rtol=0,
    )


def test_personal_eigenpairs_more_rank_than_items_and_wrong_groups():
    tables = brute.tables(3, 6, 4)
    vectors, values = mean_gram_eigenpairs(tables, 4)
    alpha = torch.tensor([[0.5, 0.5, 0.0]]).double()
    got_vectors, got = personal_eigenpairs(vectors, values, tables, alpha, 0.5, 10)
    assert got_vectors.shape == (6, 6)
    assert (got >= 0).all()
    with pytest.raises(ValueError, match=r"2 groups.*1 groups"):
        personal_eigenpairs(vectors, values, tables, alpha.expand(2, 3), 0.5, 3)


def test_personal_eigenpairs_of_a_large_catalogue():
    """The quick default is right to 1e-3, and nothing of size I x I is ever allocated."""
    items, rank = 6000, 6
    shared = brute.tables(1, items, 6, dtype=torch.float32)[0]
    tables = shared @ brute.tables(20, 6, rank, dtype=torch.float32)
    tables += 0.3 * brute.tables(20, items, rank, seed=1, dtype=torch.float32)
    vectors, values = mean_gram_eigenpairs(tables, rank)
    alpha = torch.zeros(1, 20)
    alpha[0, :4] = 0.25
    with LargestTensor() as largest:
        got_vectors, got = personal_eigenpairs(vectors, values, tables, alpha, 0.3, rank)
    assert items * rank <= largest.numbers < items * 300
    factor = torch.cat([vectors * (0.7 * values).sqrt(), *(tables[:4] * (0.3 * 0.25) ** 0.5)], dim=1)
    expected = torch.linalg.svdvals(factor)[:rank].square()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(got_vectors.T @ got_vectors, torch.eye(rank), atol=1e-4, rtol=0)
