"""Local matrix factorisation in closed form: implicit alternating least squares (Hu, Koren & Volinsky 2008).

A shard of a few users is fitted better, and with fewer operations, than by steps along sampled gradients. What leaves
the device is sharper for the same reason: the Gram matrix of the item table is close to the shard's co-occurrences.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fedhur_app.data.shards import UserItems
from fedhur_app.models.refit import refit_users
from fedhur_app.models.training import DivergedError, TrainingReport

_CHUNK_BYTES = 64 * 2**20


def fit_items(
    users: Tensor,
    train: UserItems,
    n_items: int,
    unobserved_weight: float = 0.3,
    l2: float = 0.1,
    anchor: Tensor | None = None,
) -> Tensor:
    """The item table that fits fixed user vectors best.

    The row of item ``i`` that the users ``S_i`` have solves

        ``(w0 P^T P + sum_{u in S_i} p_u p_u^T + l2 I) e = sum_{u in S_i} p_u + l2 e0_i``,

    the minimiser of ``sum_{u in S_i} (1 - p_u.e)^2 + w0 sum_u (p_u.e)^2 + l2 |e - e0_i|^2``. With fewer users than
    dimensions the unknowns are as many as the users: outside the span of ``P`` a row stays what it was.

    Args:
        users: User table ``P`` (U, d).
        train: Training items of the ``U`` users.
        n_items: Size of the catalogue ``I``.
        unobserved_weight: Weight ``w0 >= 0`` of the pull of all scores to 0.
        l2: Ridge coefficient, > 0.
        anchor: Table ``E0`` (I, d) that rows are pulled to; None: zero, and items that nobody has get zero rows.

    Returns:
        (I, d), of the type and on the device of ``users``.
    """
    table = users.double()
    count, dim = table.shape
    span = torch.eye(dim, dtype=table.dtype, device=table.device)
    if count < dim:
        span, triangle = torch.linalg.qr(table.T)  # P = R^T Q^T
        table = triangle.T
    rank = table.shape[1]
    old = None if anchor is None else anchor.double()
    inner = None if old is None else old @ span
    common = unobserved_weight * (table.T @ table) + l2 * torch.eye(rank, dtype=table.dtype, device=table.device)
    owners, items = (torch.as_tensor(column, device=table.device) for column in train.pairs())
    order = torch.argsort(items, stable=True)
    owners, items = owners[order], items[order]
    solved = table.new_zeros(n_items, rank)
    if inner is not None:  # rows of items that nobody has: only pulled
        solved = torch.linalg.solve(common, l2 * inner.T).T
    distinct, starts = torch.unique_consecutive(items, return_counts=True)
    ends = starts.cumsum(0)
    step = max(1, _CHUNK_BYTES // (8 * rank * rank))
    for first in range(0, len(distinct), step):
        chosen = distinct[first : first + step]
        pairs = slice(int(ends[first - 1]) if first else 0, int(ends[min(first + step, len(distinct)) - 1]))
        rows = torch.searchsorted(chosen, items[pairs])
        vectors = table[owners[pairs]]
        matrices = common.repeat(len(chosen), 1, 1)
        # A few pairs at a time: each is a matrix.
        for begin in range(0, len(rows), step):
            part = vectors[begin : begin + step]
            matrices.index_add_(0, rows[begin : begin + step], part[:, :, None] * part[:, None, :])
        target = table.new_zeros(len(chosen), rank).index_add_(0, rows, vectors)
        if inner is not None:
            target += l2 * inner[chosen]
        factor = torch.linalg.cholesky(matrices)
        solved[chosen] = torch.cholesky_solve(target[:, :, None], factor)[:, :, 0]
    result = solved @ span.T
    if old is not None and inner is not None:
        result += old - inner @ span.T
    return result.to(users)


def train_implicit(
    items: Tensor, train: UserItems, sweeps: int, unobserved_weight: float, l2: float, anchored: bool = False
) -> tuple[Tensor, Tensor, TrainingReport]:
    """Alternate between closed-form user vectors and closed-form item rows.

    Users go first, so the given item table decides where the sweeps begin. Before the items are fitted, user vectors
    are brought to mean square length 1 and the other table is scaled against it: `l2` then has no unit, and item tables
    of different clients have comparable lengths.

    Args:
        items: Item table (I, d) to begin with.
        train: Training items of the client's ``U`` users.
        sweeps: How often both tables are fitted, >= 1.
        unobserved_weight: See :func:`fit_items`.
        l2: See :func:`fit_items` and :func:`fedhur_app.models.refit.refit_users`.
        anchored: Pull item rows to the given table and not to zero (for averages of tables over clients).

    Returns:
        User table (U, d), item table (I, d), and a report whose loss is the mean of ``(1 - p.e)^2`` over the
        interactions.

    Raises:
        DivergedError: A table is not finite.
    """
    counts = torch.from_numpy(np.bincount(train.items, minlength=len(items)))
    users = items.new_zeros(len(train.counts), items.shape[1])
    examples = len(train)
    if examples == 0:
        return users, items, TrainingReport(0.0, 0.0, 0.0, 0.0, 0, 0, counts, {})
    owners, chosen = (torch.as_tensor(column, device=items.device) for column in train.pairs())
    start, losses = items, []
    for _ in range(sweeps):
        users = refit_users(items, train, unobserved_weight, l2)
        length = float(torch.linalg.matrix_norm(users.double())) / math.sqrt(max(1, int((train.counts > 0).sum())))
        if not (math.isfinite(length) and length > 0):
            raise DivergedError("closed-form user vectors are zero or not finite")
        anchor = start * length if anchored else None
        fitted = fit_items(users / length, train, len(items), unobserved_weight, l2, anchor)
        # An anchored table keeps its coordinates, scale included: others average it with theirs.
        users, items = (users, fitted / length) if anchored else (users / length, fitted)
        error = 1 - (users[owners].double() * items[chosen].double()).sum(1)
        losses.append(float((error * error).mean()))
    if not math.isfinite(losses[-1]):
        raise DivergedError("closed-form tables are not finite")
    report = TrainingReport(losses[-1] * examples, losses[-1], losses[0], 0.0, examples, 0, counts, {})
    return users, items, report
