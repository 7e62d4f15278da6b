"""Closed-form local training against the normal equations written out, and against what it must do at the borders."""

import numpy as np
import pytest
import torch

from fedhur_app.data.shards import UserItems
from fedhur_app.models.als import fit_items, train_implicit
from fedhur_app.models.refit import refit_users


def shard(matrix):
    rows = [np.flatnonzero(row) for row in matrix]
    return UserItems(np.cumsum([0, *map(len, rows)]), np.concatenate(rows))


def drawn(users, items, dim, seed=0, share=0.3):
    generator = np.random.default_rng(seed)
    matrix = generator.random((users, items)) < share
    matrix[:, -1] = False  # nobody has the last item
    matrix[:, 0] = True
    return (
        matrix,
        torch.from_numpy(generator.normal(size=(users, dim))),
        torch.from_numpy(generator.normal(size=(items, dim))),
    )


@pytest.mark.parametrize(("users", "dim"), [(3, 6), (9, 4), (5, 5)])
@pytest.mark.parametrize("anchored", [False, True])
def test_rows_solve_their_normal_equations(users, dim, anchored, monkeypatch):
    monkeypatch.setattr("fedhur_app.models.als._CHUNK_BYTES", 8 * dim * dim * 3)  # three items at a time
    matrix, table, old = drawn(users, 17, dim)
    weight, l2 = 0.3, 0.7
    found = fit_items(table, shard(matrix), 17, weight, l2, old if anchored else None)
    for item in range(17):
        own = table[torch.from_numpy(matrix[:, item])]
        left = weight * table.T @ table + own.T @ own + l2 * torch.eye(dim, dtype=torch.float64)
        right = own.sum(0) + (l2 * old[item] if anchored else 0)
        assert torch.allclose(found[item], torch.linalg.solve(left, right), atol=1e-10)
    assert anchored or (found[-1] == 0).all()


def test_the_gradient_of_the_objective_is_zero():
    matrix, table, old = drawn(4, 8, 3)
    solved = fit_items(table, shard(matrix), 8, 0.2, 0.5, old).requires_grad_()
    scores, wanted = table @ solved.T, torch.from_numpy(matrix).double()
    loss = (wanted * (1 - scores) ** 2).sum() + 0.2 * (scores**2).sum() + 0.5 * ((solved - old) ** 2).sum()
    loss.backward()
    assert solved.grad.abs().max() < 1e-10


def test_sweeps_fit_a_shard_and_do_not_depend_on_the_scale_of_the_start():
    matrix, _, start = drawn(6, 30, 8)
    users, items, report = train_implicit(start, shard(matrix), 4, 0.05, 0.01)
    scores = users @ items.T
    seen = torch.from_numpy(matrix)
    assert scores[seen].min() > scores[~seen].max()
    assert report.loss_mean == pytest.approx(float(((1 - scores[seen]) ** 2).mean()))
    assert report.loss_mean < report.first_epoch_mean
    assert report.examples == matrix.sum()
    assert report.item_counts.tolist() == matrix.sum(0).tolist()
    assert float((users**2).sum(1).mean()) == pytest.approx(1)
    scaled = train_implicit(1e-3 * start, shard(matrix), 4, 0.05, 0.01)
    assert torch.allclose(scaled[1], items, atol=1e-8)


def test_an_anchored_table_keeps_its_coordinates():
    matrix, _, start = drawn(3, 12, 6)
    users, items, _ = train_implicit(start, shard(matrix), 1, 0.3, 0.5, anchored=True)
    # What is not in the span of the users' vectors is as it was.
    outside = torch.eye(6, dtype=torch.float64) - torch.linalg.pinv(users) @ users
    assert torch.allclose(items @ outside, start @ outside, atol=1e-8)
    assert torch.allclose(users, refit_users(start, shard(matrix), 0.3, 0.5))


def test_a_client_without_rows_changes_nothing():
    empty = UserItems(np.zeros(3, dtype=np.int64), np.array([], dtype=np.int64))
    start = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    users, items, report = train_implicit(start, empty, 2, 0.3, 0.1)
    assert torch.equal(items, start)
    assert (report.examples, report.loss_sum, users.shape) == (0, 0.0, (2, 2))
