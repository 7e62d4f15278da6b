"""Local matrix factorisation in closed form: implicit alternating least squares (Hu, Koren & Volinsky 2008).

A shard of a few users is fitted better, and with fewer operations, than by steps along sampled gradients. What leaves
the device is sharper for the same reason: the Gram matrix of the item table is close to the shard's co-occurrences.
"""

import math
from collections.abc import Iterator

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
    dimensions everything happens in the span of ``P``: outside it a row stays what it was.

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
    identity = torch.eye(max(rank, 1), dtype=table.dtype, device=table.device)
    common = unobserved_weight * (table.T @ table) + l2 * identity[:rank, :rank]
    root = torch.linalg.cholesky(common)
    reduced = torch.cholesky_solve(table.T, root).T  # P C^-1 (U, rank)
    overlap = reduced @ table.T  # P C^-1 P^T (U, U)
    old = None if anchor is None else anchor.double()
    inner = table.new_zeros(n_items, rank) if old is None else old @ span
    # Rows of items that nobody has: only pulled, towards 0 and to the anchor.
    solved = inner if old is None else l2 * torch.cholesky_solve(inner.T, root).T
    pulled = solved @ table.T  # What the users score before their items count (I, U).
    for chosen, owners in _items_by_owners(train, table.device):
        number = owners.shape[1]
        if number <= rank:
            # (C + X^T X)^-1 (X^T 1 + l2 e0) = b + C^-1 X^T (I + X C^-1 X^T)^-1 (1 - X b) with b = l2 C^-1 e0: as many
            # unknowns as the item has owners, and most items have few.
            matrices = overlap[owners[:, :, None], owners[:, None, :]] + identity[:number, :number]
            missing = 1 - pulled[chosen[:, None], owners]
            weights = torch.cholesky_solve(missing[:, :, None], torch.linalg.cholesky(matrices))
            solved[chosen] += (weights * reduced[owners]).sum(1)
        else:
            for item, own in zip(chosen, table[owners], strict=True):
                factor = torch.linalg.cholesky(torch.addmm(common, own.T, own))
                solved[item] = torch.cholesky_solve((own.sum(0) + l2 * inner[item])[:, None], factor)[:, 0]
    result = solved @ span.T
    if old is not None:
        result += old - inner @ span.T
    return result.to(users)


def _items_by_owners(train: UserItems, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Items (n,) that equally many users have, and those users (n, number), some at a time."""
    users, items = train.pairs()
    order = np.argsort(items, kind="stable")
    owners = torch.as_tensor(users[order], device=device)
    distinct, counts = (torch.as_tensor(part) for part in np.unique(items, return_counts=True))
    starts = counts.cumsum(0) - counts
    for number in counts.unique().tolist():
        for chosen in (counts == number).nonzero()[:, 0].split(max(1, _CHUNK_BYTES // (8 * number * number))):
            places = (starts[chosen][:, None] + torch.arange(number)).to(device)
            yield distinct[chosen].to(device), owners[places]


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
