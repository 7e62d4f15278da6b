import pytest
import torch

from fedhur_app.relations.filters import block_gram, blocks_of, group_filters
from fedhur_app.relations.utility import projection, queries, reconstruction_objective, utility
from tests.relations import brute


def example():
    """Blocks with padding: means (B, b, d), Grams, public filters, level."""
    tree = brute.hierarchy(40, (3, 15))
    items = 0.4 * brute.tables(3, 40, 4)
    got = group_filters(items, tree, (0.5, 0.5))
    level = tree.leaf
    assert not level.mask.all()
    return blocks_of(got.means[1][0], level), got.grams[1][0], got.public[1], level


def test_objective_is_half_the_squared_reconstruction_error():
    means, _, public, _ = example()
    for z, f, value in zip(means, public, reconstruction_objective(means, public), strict=True):
        expected = sum(float(((z.T - z.T @ f) ** 2)[a, b]) for a in range(z.shape[1]) for b in range(z.shape[0])) / 2
        assert float(value) == pytest.approx(expected)


def test_utility_is_the_symmetrised_negative_gradient():
    means, gram, public, _ = example()
    variable = public.clone().requires_grad_()
    reconstruction_objective(means, variable).sum().backward()
    negative = -variable.grad
    torch.testing.assert_close(utility(gram, public), (negative + negative.transpose(-1, -2)) / 2)
    torch.testing.assert_close(utility(gram, public, "right"), negative)
    torch.testing.assert_close(utility(gram, public, "left"), negative.transpose(-1, -2))
    assert torch.equal(utility(gram, public, "local"), gram)
    with pytest.raises(ValueError, match="no utility form 'up'"):
        utility(gram, public, "up")


def test_a_small_step_along_the_utility_lowers_every_objective_and_one_against_it_raises_it():
    means, gram, public, _ = example()
    step = 1e-4 * utility(gram, public)
    here = reconstruction_objective(means, public)
    assert (reconstruction_objective(means, public + step) < here).all()
    assert (reconstruction_objective(means, public - step) > here).all()


def test_padding_never_leaks_into_queries():
    _, gram, public, level = example()
    projections = projection(level, 6, seed=1, level_number=2)
    assert projections.shape == (*level.members.shape, 6)
    assert (projections[~level.mask] == 0).all()
    for form in ("symmetric", "local", "right", "left"):
        answer = queries(utility(gram, public, form), projections.double())
        assert (answer[~level.mask] == 0).all()
        for block in range(len(level.members)):
            count = int(level.mask[block].sum())
            small = utility(gram[block, :count, :count], public[block, :count, :count], form)
            torch.testing.assert_close(answer[block, :count], queries(small, projections.double()[block, :count]))


def test_query_columns_have_unit_length_and_zero_columns_stay_zero():
    utilities = torch.diag(torch.tensor([1.0, -3.0, 0.0]))
    directions = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    sketch = queries(utilities, directions, normalise=False)
    assert torch.equal(sketch, utilities @ directions)
    answer = queries(utilities, directions)
    torch.testing.assert_close(answer.norm(dim=0), torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(answer[:, 2], torch.tensor([1.0, -3.0, 0.0]) / 10**0.5)


def test_projection_depends_on_seed_and_level_only_and_is_gaussian():
    level = brute.hierarchy(400, (20,)).leaf
    first = projection(level, 500, 1, 1)
    assert torch.equal(first, projection(level, 500, 1, 1))
    assert not torch.equal(first, projection(level, 500, 2, 1))
    assert not torch.equal(first, projection(level, 500, 1, 2))
    assert float(first.mean()) == pytest.approx(0, abs=0.05)
    assert float(first.std()) == pytest.approx(1, abs=0.05)
    assert float((first.abs() > 1.96).double().mean()) == pytest.approx(0.05, abs=0.01)


def test_the_gradient_of_a_block_gram_example_by_hand():
    z = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double()
    gram = block_gram(z)
    assert gram.tolist() == [[1.0, 1.0], [1.0, 2.0]]
    # F = diag(1, 0): H F = [[1, 0], [1, 0]], F H = [[1, 1], [0, 0]].
    public = torch.diag(torch.tensor([1.0, 0.0]).double())
    assert utility(gram, public).tolist() == [[0.0, 0.5], [0.5, 2.0]]
