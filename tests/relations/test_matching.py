import pytest
import torch

from fedhur_app.relations.filters import block_gram, blocks_of, group_filters
from fedhur_app.relations.matching import (
    both_scores,
    complementarity_scores,
    concentration,
    cosine_scores,
    energy_scores,
    feature_width,
    features,
    similarity_scores,
    standardise,
)
from fedhur_app.relations.utility import projection, queries, utility
from tests.relations import brute

CLIENTS, WIDTH, DIRECTIONS = 5, 3, 4


@pytest.fixture(scope="module")
def example():
    """Level with padding, means (K, B, b, d), filters, projections, queries."""
    tree = brute.hierarchy(40, (3, 15))
    got = group_filters(brute.tables(CLIENTS, 40, WIDTH), tree, (0.5, 0.5))
    level = tree.leaf
    means = blocks_of(got.means[1], level)
    projections = projection(level, DIRECTIONS, 1, 2).double()
    query = queries(utility(got.grams[1], got.public[1]), projections)
    return level, means, got, projections, query


@pytest.mark.parametrize("max_bytes", [1, 2**27])
def test_cheap_scores_equal_the_direct_form(example, max_bytes):
    level, means, got, _, query = example
    scores = energy_scores(query, got.grams[1], level.mask.sum(dim=1), WIDTH, max_bytes)
    assert scores.rho.shape == (3, CLIENTS, CLIENTS, DIRECTIONS)
    for block in range(3):
        count = int(level.mask[block].sum())
        for j in range(CLIENTS):
            z = means[j, block, :count]
            scale = z.norm() / (count * WIDTH) ** 0.5
            torch.testing.assert_close(scores.nu[block, j], scale)
            for k in range(CLIENTS):
                product = query[k, block, :count].T @ z
                torch.testing.assert_close(scores.total[block, k, j], product.square().sum())
                torch.testing.assert_close(scores.rho[block, k, j], product.norm(dim=1))


def test_a_query_of_zeros_scores_zero(example):
    level, _, got, _, query = example
    silent = query.clone()
    silent[:, :, :, 1] = 0
    scores = energy_scores(silent, got.grams[1], level.mask.sum(dim=1), WIDTH)
    assert (scores.rho[..., 1] == 0).all()
    x = features(scores)
    assert torch.isfinite(x).all()
    assert (x[..., 1] == 0).all()


def test_features_are_z_scores_over_candidates(example):
    level, _, got, _, query = example
    scores = energy_scores(query, got.grams[1], level.mask.sum(dim=1), WIDTH)
    x = features(scores)
    assert x.shape == (3, CLIENTS, CLIENTS, DIRECTIONS + 2)
    for block in range(3):
        for k in range(CLIENTS):
            raw = torch.cat(
                [scores.rho[block, k], scores.nu[block][:, None], scores.total[block, k].sqrt()[:, None]],
                dim=1,
            )
            expected = (raw - raw.mean(dim=0)) / raw.std(dim=0, correction=0)
            torch.testing.assert_close(x[block, k], expected)


@pytest.mark.parametrize(
    ("which", "columns"),
    [
        ("all", [0, 1, 2, 3, 4, 5]),
        ("total", [5]),
        ("no-total", [0, 1, 2, 3, 4]),
        ("no-scale", [0, 1, 2, 3, 5]),
        ("no-direction", [4, 5]),
        ("direction", [0, 1, 2, 3]),
    ],
)
def test_feature_sets_are_columns_of_all(example, which, columns):
    level, _, got, _, query = example
    scores = energy_scores(query, got.grams[1], level.mask.sum(dim=1), WIDTH)
    assert torch.equal(features(scores, which), features(scores)[..., columns])
    assert feature_width(which, DIRECTIONS) == len(columns)


def test_some_blocks_and_some_targets_score_as_all_do(example):
    level, _, got, _, query = example
    sizes = level.mask.sum(dim=1)
    whole = energy_scores(query, got.grams[1], sizes, WIDTH)
    part = energy_scores(query[2:4, 1:], got.grams[1][:, 1:], sizes[1:], WIDTH)
    torch.testing.assert_close(part.rho, whole.rho[1:, 2:4])
    torch.testing.assert_close(part.total, whole.total[1:, 2:4])
    torch.testing.assert_close(part.nu, whole.nu[1:])
    torch.testing.assert_close(features(part), features(whole)[1:, 2:4])


def test_an_unknown_feature_set_is_refused(example):
    level, _, got, _, query = example
    with pytest.raises(ValueError, match="no feature set 'most'"):
        feature_width("most", 4)
    with pytest.raises(ValueError, match="no feature set 'most'"):
        features(energy_scores(query, got.grams[1], level.mask.sum(dim=1), WIDTH), "most")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6, -1e-12])
def test_standardising_a_constant_gives_zeros(dtype, constant):
    column = torch.full((97,), constant, dtype=dtype)
    assert (standardise(column) == 0).all()
    # To rounding: a mean that is off by one unit in the last place must not turn into z-scores of one.
    column[3] = torch.nextafter(column[3], torch.tensor(1e9, dtype=dtype))
    if constant:
        assert (standardise(column) == 0).all()


def test_cosine_scores_compare_sketches_with_projected_deviations(example):
    _, _, got, projections, _ = example
    sketches = queries(utility(got.grams[1], got.public[1]), projections, normalise=False)
    scores = cosine_scores(sketches, got.grams[1], got.public[1], projections)
    for block in range(3):
        for k in range(CLIENTS):
            for j in range(CLIENTS):
                a = sketches[k, block].flatten()
                b = ((got.grams[1][j, block] - got.public[1][block]) @ projections[block]).flatten()
                assert float(scores[block, k, j]) == pytest.approx(float(a @ b / a.norm() / b.norm()))
    assert (cosine_scores(0 * sketches, got.grams[1], got.public[1], projections) == 0).all()


def test_similarity_is_the_cosine_of_grams_and_blind_to_rotation(example):
    _, means, got, _, _ = example
    scores = similarity_scores(got.grams[1])
    a, b = got.grams[1][0, 1].flatten(), got.grams[1][3, 1].flatten()
    assert float(scores[1, 0, 3]) == pytest.approx(float(a @ b / a.norm() / b.norm()))
    rotations = torch.linalg.qr(brute.tables(CLIENTS, WIDTH, WIDTH, seed=7))[0]
    turned = block_gram(means @ rotations[:, None])
    torch.testing.assert_close(similarity_scores(turned), scores)
    torch.testing.assert_close(scores.diagonal(dim1=1, dim2=2), torch.ones(3, CLIENTS).double())


def test_complementarity_is_the_share_of_directions_that_the_target_lacks(example):
    _, means, got, _, _ = example
    scores = complementarity_scores(got.grams[1])
    for block in range(3):
        bases = []
        for z in means[:, block]:
            left, singular, _ = torch.linalg.svd(z, full_matrices=False)
            share = singular.square().cumsum(0) / singular.square().sum()
            bases.append(left[:, : int((share < 0.95).sum()) + 1])
        for k, own in enumerate(bases):
            for j, other in enumerate(bases):
                lacking = other - own @ (own.T @ other)
                expected = float(lacking.square().sum()) / other.shape[1]
                assert float(scores[block, k, j]) == pytest.approx(expected, abs=1e-9)


def test_complementarity_of_known_subspaces():
    axes = torch.eye(3).double()
    grams = torch.stack(
        [
            torch.outer(axes[0], axes[0]),
            torch.outer(axes[1], axes[1]),
            torch.diag(torch.tensor([1.0, 1.0, 0.0]).double()),
            torch.diag(torch.tensor([1.0, 0.04, 0.0]).double()),  # 96 % along the first axis
            torch.zeros(3, 3).double(),
        ]
    )[:, None]
    scores = complementarity_scores(grams)[0]
    expected = [
        [0.0, 1.0, 0.5, 0.0, 0.0],
        [1.0, 0.0, 0.5, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.5, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 0.0],
    ]
    torch.testing.assert_close(scores, torch.tensor(expected).double())


def test_both_weighs_the_two_alike(example):
    grams = example[2].grams[1]
    expected = standardise(similarity_scores(grams)) + standardise(complementarity_scores(grams))
    assert torch.equal(both_scores(grams), expected)
    torch.testing.assert_close(both_scores(grams).mean(dim=2), torch.zeros(3, CLIENTS).double())


def test_concentration_counts_the_most_wanted_client():
    everyone_wants_7 = torch.zeros(30, 30)
    everyone_wants_7[:, 7] = 1
    assert concentration(everyone_wants_7, top=1) == 1.0
    ring = torch.eye(30).roll(1, dims=1)
    assert concentration(ring, top=1) == pytest.approx(1 / 29)
    # The own weight does not count, however large.
    assert concentration(ring + 5 * torch.eye(30), top=1) == pytest.approx(1 / 29)
    half = torch.eye(30).roll(1, dims=1)
    half[:15] = 0
    half[:15, 20] = 1
    assert concentration(half, top=1) == pytest.approx(16 / 29)  # 15 and client 19, whose ring peer is 20
    assert concentration(torch.rand(8, 8, generator=torch.Generator().manual_seed(0))) == 1.0
    assert concentration(torch.ones(1, 1)) == 0.0


def test_concentration_of_random_scores_is_near_chance():
    scores = torch.rand(100, 100, generator=torch.Generator().manual_seed(0))
    assert 0.1 < concentration(scores) < 0.25
