"""How far a market's item vectors are from the consensus: values and gradients in closed form.

Every function takes the rows of a batch's distinct items: `own` (b, d) of the market's table and `common` of the
global table G, which is held fixed, and returns the value and its gradient (b, d) with respect to `own`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Term = tuple[float, Tensor]
Regulariser = Callable[[Tensor, Tensor], Term]

_BLOCK_BYTES = 8 << 20


def mean_squared(own: Tensor, common: Tensor) -> Term:
    """`mean (E_B - G_B)^2` over rows and coordinates; tables of equal width."""
    apart = own - common
    return float(apart.square().mean()), apart * (2 / apart.numel())


def softmax_divergence(own: Tensor, common: Tensor, temperature: float) -> Term:
    """`mean_i KL(softmax(g_i / T) || softmax(e_i / T))` over rows; tables of equal width."""
    target = (common / temperature).softmax(dim=1)
    log_own = (own / temperature).log_softmax(dim=1)
    value = torch.special.xlogy(target, target).sub_(target * log_own).sum(dim=1).mean()
    return float(value), (log_own.exp() - target) / (temperature * len(own))


def contrastive(own: Tensor, common: Tensor, temperature: float) -> Term:
    """InfoNCE: `-mean_i log softmax_j(cos(e_i, g_j) / T)_i`; the positive of an item is the same item in G.

    Blocks of rows: `4 b^2 d` operations, never a `b x b` array. Tables of equal width.
    """
    norms = own.norm(dim=1, keepdim=True).clamp_min(1e-12)
    unit = own / norms
    targets = common / common.norm(dim=1, keepdim=True).clamp_min(1e-12)
    rows = len(own)
    by_unit = -targets
    total = -float((unit * targets).sum()) / temperature
    block = max(1, _BLOCK_BYTES // (rows * own.element_size()))
    for first in range(0, rows, block):
        scores = (unit[first : first + block] @ targets.T).div_(temperature)
        spread = scores.logsumexp(dim=1, keepdim=True)
        total += float(spread.sum())
        by_unit[first : first + block] += scores.sub_(spread).exp_() @ targets
    by_unit /= temperature * rows
    # Through the normalisation: the part along the unit vector vanishes.
    along = (by_unit * unit).sum(dim=1, keepdim=True)
    return total / rows, (by_unit - along * unit) / norms


def relation(own: Tensor, common: Tensor) -> Term:
    """`|E_B E_B^T - G_B G_B^T|^2 / b^2`: what items are to each other, whatever the widths of the two tables.

    By `|E E^T|^2 = |E^T E|^2` only matrices of the widths appear: `O(b d^2)` operations, never a `b x b` array.
    """
    own_gram, cross, common_gram = own.T @ own, common.T @ own, common.T @ common
    scale = 1 / len(own) ** 2
    value = sum_of_squares(own_gram) - 2 * sum_of_squares(cross) + sum_of_squares(common_gram)
    gradient = (own @ own_gram).sub_(common @ cross).mul_(4 * scale)
    return max(value * scale, 0.0), gradient  # rounding could leave a distance of 0 below it


def sum_of_squares(matrix: Tensor) -> float:
    """The squared Frobenius norm, summed in float64."""
    return float(matrix.double().square().sum())


def regulariser(kind: str, temperature: float) -> Regulariser:
    """The function of a name: `mse`, `kl`, `contrastive` or `relation`.

    Args:
        kind: One of these names.
        temperature: T of `kl` and `contrastive`.

    Raises:
        ValueError: Another name.
    """
    if kind == "mse":
        return mean_squared
    if kind == "relation":
        return relation
    if kind == "kl":
        return lambda own, common: softmax_divergence(own, common, temperature)
    if kind == "contrastive":
        return lambda own, common: contrastive(own, common, temperature)
    raise ValueError(f"unknown regulariser {kind!r}: choose mse, kl, contrastive or relation")
