import dataclasses
import time

import numpy as np
import pytest
import torch

from fedhur_app.relations import alignment
from fedhur_app.relations.alignment import PersonalFilter, align, fit_error, gd_step_size, procrustes
from tests.relations import brute
from tests.tensors import LargestTensor

BRANCHINGS = [(), (5,), (3, 3), (2, 3, 2), (2, 2, 2, 2, 2), (4, 200)]


def personal_filter(items, rank, branching, seed=0, strength=1.0, betas=None, positive=True):
    """A filter and its dense matrix, assembled from one-hot assignments."""
    factor = torch.linalg.qr(brute.tables(1, items, rank, seed)[0])[0]
    values = torch.linspace(10, 1, rank).double()
    if not positive:
        values[rank // 2 :] = 0
    dense = (factor * values) @ factor.T
    if not branching:
        return PersonalFilter(factor, values), dense
    tree = brute.hierarchy(items, branching, seed)
    betas = betas or [0.5 + 0.3 * number for number in range(len(branching))]
    residuals = []
    for number, level in enumerate(tree.levels):
        residuals.append(strength * brute.random_symmetric_blocks(level, seed + number))
    for level, residual, beta in zip(tree.levels, residuals, betas, strict=True):
        assigned = brute.assignment(level)
        dense = dense + beta * assigned @ brute.scatter(residual, level) @ assigned.T
    return PersonalFilter(factor, values, tree, residuals, betas), dense


def single(personal):
    residuals = [residual.float() for residual in personal.residuals]
    return PersonalFilter(
        personal.vectors.float(), personal.values.float(), personal.hierarchy, residuals, personal.betas
    )


def optimum(dense, dim):
    """The smallest relative objective of any table of this width, from numpy's dense eigen-solver."""
    values = torch.from_numpy(np.linalg.eigvalsh(dense.numpy()))
    kept = values[-dim:].clamp_min(0)
    return float((values.square().sum() - kept.square().sum()) / values.square().sum())


@pytest.mark.parametrize("branching", BRANCHINGS)
def test_the_operator_is_the_dense_filter(branching):
    personal, dense = personal_filter(50, 6, branching)
    table = brute.tables(1, 50, 4, seed=9)[0]
    torch.testing.assert_close(personal.dense(), dense)
    torch.testing.assert_close(personal.matmul(table), dense @ table)
    assert personal.squared_norm() == pytest.approx(float(dense.square().sum()), rel=1e-12)
    assert personal.inner_product(table) == pytest.approx(float((dense * (table @ table.T)).sum()), rel=1e-10)
    expected = float((table @ table.T - dense).square().sum() / dense.square().sum())
    assert fit_error(personal, table) == pytest.approx(expected, rel=1e-10)


def test_levels_of_zero_weight_do_nothing():
    personal, dense = personal_filter(50, 6, (3, 3, 3), betas=[0.0, 1.0, 0.0])
    assert len(personal.tree) == 2
    torch.testing.assert_close(personal.dense(), dense)
    none, dense = personal_filter(50, 6, (3, 3), betas=[0.0, 0.0])
    assert none.tree == []
    torch.testing.assert_close(none.dense(), (none.vectors * none.values) @ none.vectors.T)


@pytest.mark.parametrize("branching", BRANCHINGS)
@pytest.mark.parametrize("krylov", [False, True])
@pytest.mark.parametrize("strength", [0.05, 2.0])
def test_exact_reaches_the_optimum_of_a_dense_solver(branching, krylov, strength, monkeypatch):
    if krylov:
        monkeypatch.setattr(alignment, "_DENSE_BASIS", 0)
        monkeypatch.setattr(alignment, "_GUARD", 4)
    personal, dense = personal_filter(150, 8, branching, strength=strength)
    present = brute.tables(1, 150, 8, seed=5)[0]
    best = optimum(dense, 8)
    double = align(personal, present)
    assert double.objective == pytest.approx(best, abs=1e-7)
    assert fit_error(personal, double.items) == pytest.approx(double.objective, abs=1e-12)
    float32 = align(single(personal), present.float())
    assert float32.items.dtype == torch.float32
    assert float(fit_error(personal, float32.items)) == pytest.approx(best, abs=1e-6)


def test_exact_is_the_krylov_solver_above_the_dense_size():
    """A basis above the limit, with all defaults."""
    personal, dense = personal_filter(1500, 16, (20, 60), strength=0.02)
    assert alignment._Coordinates(personal).size > alignment._DENSE_BASIS
    result = align(single(personal), brute.tables(1, 1500, 16)[0].float())
    assert result.objective == pytest.approx(optimum(dense, 16), abs=1e-6)


def test_exact_keeps_the_meaning_of_the_present_table():
    personal, _ = personal_filter(60, 6, (3, 3))
    solution = align(personal, brute.tables(1, 60, 6)[0]).items
    generator = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    # A table that already is a solution, turned in any way, stays as it is.
    torch.testing.assert_close(align(personal, solution @ rotation).items, solution @ rotation)


@pytest.mark.parametrize("reflect", [1.0, -1.0])
def test_procrustes_is_the_best_rotation(reflect):
    table, target = brute.tables(2, 40, 5, seed=2)
    rotation = procrustes(table, target)
    torch.testing.assert_close(rotation.T @ rotation, torch.eye(5).double())
    best = (table @ rotation - target).norm()
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-3, 0.1, 10.0):
        for _ in range(20):
            skew = torch.randn(5, 5, generator=generator, dtype=torch.float64)
            other = rotation @ torch.linalg.matrix_exp(scale * (skew - skew.T))
            other[:, 0] *= reflect
            assert (table @ other - target).norm() >= best


def test_fewer_positive_eigenvalues_than_columns():
    personal, dense = personal_filter(40, 6, (), positive=False)
    result = align(personal, brute.tables(1, 40, 10)[0])
    assert result.items.shape == (40, 10)
    assert int(torch.linalg.matrix_rank(result.items)) == 3
    torch.testing.assert_close(result.items @ result.items.T, dense)
    assert result.objective < 1e-20
    # Negative eigenvalues are no reason for imaginary columns: the best table is zero.
    negative = PersonalFilter(personal.vectors, -personal.values)
    assert (align(negative, brute.tables(1, 40, 10)[0]).items == 0).all()
    nothing = PersonalFilter(personal.vectors, 0 * personal.values)
    assert align(nothing, brute.tables(1, 40, 3)[0]).objective == 0.0


def test_more_rank_than_width_keeps_the_largest_even_if_unsorted():
    personal, dense = personal_filter(40, 8, ())
    order = [3, 0, 7, 1, 2, 6, 5, 4]
    shuffled = PersonalFilter(personal.vectors[:, order], personal.values[order])
    assert align(shuffled, brute.tables(1, 40, 3)[0]).objective == pytest.approx(optimum(dense, 3), abs=1e-12)


def test_a_rounded_basis_is_taken_for_what_it_is():
    personal, _ = personal_filter(60, 6, ())
    rounded = PersonalFilter(personal.vectors.to(torch.float16).double(), personal.values)
    dense = (rounded.vectors * rounded.values) @ rounded.vectors.T
    torch.testing.assert_close(align(rounded, brute.tables(1, 60, 4)[0]).objective, optimum(dense, 4))


@pytest.mark.parametrize("branching", BRANCHINGS)
@pytest.mark.parametrize("steps", [0, 1, 7, 150])
def test_gd_equals_the_naive_loop(branching, steps):
    personal, dense = personal_filter(50, 6, branching, strength=0.3)
    present = brute.tables(1, 50, 6, seed=4)[0]
    top = max(float(torch.linalg.eigvalsh(dense)[-1]), float(torch.linalg.eigvalsh(present.T @ present)[-1]))
    step = gd_step_size(personal, present, eta=0.4)
    assert step == pytest.approx(0.4 / top, rel=1e-3)
    naive = present.clone()
    for _ in range(steps):
        naive -= step * (naive @ naive.T - dense) @ naive
    double = align(personal, present, "gd", steps=steps, eta=0.4)
    assert float((double.items - naive).norm() / naive.norm()) < 1e-9
    float32 = align(single(personal), present.float(), "gd", steps=steps, eta=0.4)
    assert float((float32.items.double() - naive).norm() / naive.norm()) < 1e-4


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_gd_converges_towards_exact_from_tables_of_any_size(scale):
    personal, _ = personal_filter(50, 6, (3, 3), strength=0.05)
    present = scale * brute.tables(1, 50, 6)[0]
    errors = [align(personal, present, "gd", steps=steps).objective for steps in (0, 100, 1000)]
    assert errors[0] > errors[1] >= errors[2] - 1e-12
    if scale <= 1:
        assert errors[2] == pytest.approx(align(personal, present).objective, abs=1e-4)


def test_gd_leaves_a_zero_table_at_zero():
    personal, _ = personal_filter(50, 6, (3, 3))
    assert (align(personal, torch.zeros(50, 6).double(), "gd").items == 0).all()


def test_reference_is_autograd_on_the_norm():
    personal, dense = personal_filter(40, 5, (3, 3))
    present = brute.tables(1, 40, 5)[0]
    naive = present.clone()
    for _ in range(4):
        error = naive @ naive.T - dense
        naive -= 0.1 * 2 * error @ naive / error.norm()
    result = align(personal, present, "reference", steps=4, learning_rate=0.1)
    torch.testing.assert_close(result.items, naive)
    assert not result.items.requires_grad


@pytest.mark.parametrize("solver", ["exact", "gd", "reference"])
def test_the_present_table_is_not_modified_and_results_repeat(solver):
    personal, _ = personal_filter(50, 6, (3, 3))
    present = brute.tables(1, 50, 6)[0]
    before = present.clone()
    with torch.no_grad():
        first, second = (align(personal, present, solver, steps=5) for _ in range(2))
    assert torch.equal(present, before)
    assert torch.equal(first.items, second.items)
    assert first.objective < fit_error(personal, present)


def test_large_catalogues_never_see_an_items_by_items_matrix():
    """6,000 items: the largest tensor that any operation returns stays far below 6,000 x 6,000."""
    items = 6000
    personal, _ = _large_filter(items)
    present = 0.01 * brute.tables(1, items, 8, dtype=torch.float32)[0]
    with LargestTensor() as largest:
        exact, gd = align(personal, present), align(personal, present, "gd", steps=20)
    assert exact.objective < gd.objective < 1.5
    assert items * 8 <= largest.numbers < items * 100
    with pytest.raises(ValueError, match="limited to 5000 items"):
        align(personal, present, "reference")


def _large_filter(items):
    factor = torch.linalg.qr(brute.tables(1, items, 8, dtype=torch.float32)[0])[0]
    tree = brute.hierarchy(items, (5, 10))
    residuals = [0.001 * brute.random_symmetric_blocks(level, 1).float() for level in tree.levels]
    return PersonalFilter(factor, torch.linspace(9, 2, 8), tree, residuals, (1.0, 1.0)), tree


def test_errors_say_what_does_not_fit():
    personal, _ = personal_filter(50, 6, (3, 3))
    with pytest.raises(ValueError, match="50 items"):
        align(personal, brute.tables(1, 49, 6)[0])
    with pytest.raises(ValueError, match="no solver 'newton'"):
        align(personal, brute.tables(1, 50, 6)[0], "newton")
    with pytest.raises(ValueError, match="rank"):
        PersonalFilter(personal.vectors, personal.values[:-1])
    for change, message in (
        ({"residuals": personal.residuals[:1]}, "one entry for each of the 2 levels"),
        ({"residuals": [personal.residuals[0]] * 2}, "level 2"),
        ({"vectors": personal.vectors[1:]}, "hierarchy 50"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(personal, **change)


def test_gd_is_several_times_as_fast_as_the_reference():
    personal, _ = personal_filter(1000, 64, ())
    present = brute.tables(1, 1000, 64, dtype=torch.float32)[0]
    seconds = {}
    for solver in ("gd", "reference"):
        started = time.perf_counter()
        align(single(personal), present, solver, steps=20)
        seconds[solver] = time.perf_counter() - started
    # More than 20 with 1,682 items and 100 steps (python -m benchmarks.alignment).
    assert seconds["reference"] > 3 * seconds["gd"]
