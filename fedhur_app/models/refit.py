"""User vectors in closed form, given an item table."""

import math

import numpy as np
import torch
from torch import Tensor

from fedhur_app.data.shards import UserItems


def refit_users(items: Tensor, train: UserItems, unobserved_weight: float = 0.1, l2: float = 15.0) -> Tensor:
    """Implicit ridge regression for every user, on a fixed item table.

    With ``E~ = s E``, ``s = sqrt(I) / ||E||_F`` (rows of mean square 1, so that ``l2`` means the same for
    every table and round), the vector of user ``u`` solves

        ``(w0 E~^T E~ + sum_{i in u} e~_i e~_i^T + l2 I) p~ = sum_{i in u} e~_i``,

    the minimiser of ``sum_{i in u} (1 - p.e~_i)^2 + w0 sum_i (p.e~_i)^2 + l2 |p|^2`` (Hu, Koren & Volinsky
    2008). Returned is ``p = s p~``, which goes with the table *as given*: ``items @ p`` equals ``E~ @ p~``.
    So scores, unlike vectors, do not depend on the scale of ``items``.

    Every user is an independent solve (float64, Cholesky): pass a single new user to fold them in.

    Args:
        items: Item table (I, d), any floating type.
        train: Training items of ``U`` users.
        unobserved_weight: Weight ``w0 >= 0`` of the pull of all scores to 0.
        l2: Ridge coefficient, > 0.

    Returns:
        (U, d) user vectors of the type and on the device of ``items``; zero for users without training
        items, and for everyone if the table is zero.

    Raises:
        ValueError: For a table that is not finite or weights out of range.
    """
    if not (math.isfinite(unobserved_weight) and unobserved_weight >= 0):
        raise ValueError(f"unobserved_weight must not be negative: {unobserved_weight}")
    if not (math.isfinite(l2) and l2 > 0):
        raise ValueError(f"l2 must be positive, not {l2}")
    table = items.double()
    norm = torch.linalg.matrix_norm(table).item()
    if not math.isfinite(norm):
        raise ValueError("cannot refit users: the item table holds values that are not finite")
    n_items, dim = items.shape
    vectors = torch.zeros(len(train.counts), dim, dtype=items.dtype, device=items.device)
    if norm == 0:
        return vectors
    scale = math.sqrt(n_items) / norm
    table = table * scale
    identity = torch.eye(dim, dtype=table.dtype, device=table.device)
    common = unobserved_weight * _gram(table) + l2 * identity
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(common))
    for user in np.flatnonzero(train.counts).tolist():
        seen = table.index_select(0, torch.as_tensor(train.of(user), device=table.device))
        if len(seen) < dim:
            # (C + X^T X)^-1 X^T 1 = C^-1 X^T (I + X C^-1 X^T)^-1 1: as many unknowns as the user has items.
            reduced = seen @ inverse
            dual = _solve(torch.addmm(identity[: len(seen), : len(seen)], reduced, seen.T), seen.new_ones(len(seen)))
            solved = dual @ reduced
        else:
            solved = _solve(torch.addmm(common, seen.T, seen), seen.sum(0))
        vectors[user] = solved * scale
    return vectors


def _gram(table: Tensor) -> Tensor:
    """``E^T E``. numpy sees that it is symmetric and computes half of it: a third of torch's time in float64."""
    if table.device.type != "cpu":
        return table.T @ table
    array = table.numpy()
    return torch.from_numpy(array.T @ array)


def _solve(matrix: Tensor, target: Tensor) -> Tensor:
    return torch.cholesky_solve(target[:, None], torch.linalg.cholesky(matrix))[:, 0]
