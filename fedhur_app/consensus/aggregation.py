"""From the differences that markets upload to the step of the global table."""

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK_BYTES = 64 << 20


def weighted_step(n_items: int, uploads: Sequence[tuple[Tensor, Tensor]], weights: Tensor) -> Tensor:
    """`sum_k w_k Delta_ki / sum_k w_k` for every item i, over the markets that sent it; zero for items nobody sent.

    Args:
        n_items: I.
        uploads: For each market its items (n_k,) int64, distinct, and their differences (n_k, d).
        weights: (K,) >= 0.

    Returns:
        (I, d) float32, summed in float64 in the order given.
    """
    width = uploads[0][1].shape[1]
    total = torch.zeros(n_items, width, dtype=torch.float64)
    mass = torch.zeros(n_items, dtype=torch.float64)
    for (items, rows), weight in zip(uploads, weights.tolist(), strict=True):
        total.index_add_(0, items, rows.double(), alpha=weight)
        mass.index_add_(0, items, torch.full((len(items),), weight, dtype=torch.float64))
    return torch.where(mass[:, None] > 0, total / mass.clamp_min(1e-300)[:, None], 0.0).float()


def trimmed_step(n_items: int, uploads: Sequence[tuple[Tensor, Tensor]], trim: float) -> Tensor:
    """The coordinate-wise trimmed mean over the markets that sent an item.

    Of `c` values of a coordinate the `floor(trim c)` smallest and as many of the largest are left out, but never all:
    `trim = 0.5` is the median. Of three values or more at least one is left out on either side (unless `trim` is 0):
    else few markets would be no protection against one that is damaged. With one or two values there is none.

    Args:
        n_items: I.
        uploads: As for :func:`weighted_step`.
        trim: Share from each side, 0 to 0.5.

    Returns:
        (I, d) float32; zero for items nobody sent.
    """
    width = uploads[0][1].shape[1]
    step = torch.zeros(n_items, width)
    block = max(1, _BLOCK_BYTES // (8 * width * len(uploads)))
    for first in range(0, n_items, block):
        last = min(first + block, n_items)
        values = torch.full((len(uploads), last - first, width), torch.inf, dtype=torch.float64)
        counts = torch.zeros(last - first, dtype=torch.int64)
        for market, (items, rows) in enumerate(uploads):
            inside = (items >= first) & (items < last)
            values[market, items[inside] - first] = rows[inside].double()
            counts[items[inside] - first] += 1
        wanted = (trim * counts.double()).floor().long().clamp_min(1 if trim > 0 else 0)
        cut = torch.minimum(wanted, (counts - 1).clamp_min(0) // 2)
        place = torch.arange(len(uploads))[:, None]
        kept = (place >= cut) & (place < counts - cut)  # (K, items): places in the sorted values
        ordered = values.sort(dim=0).values
        total = torch.where(kept[:, :, None], ordered, 0.0).sum(dim=0)
        step[first:last] = (total / kept.sum(dim=0).clamp_min(1)[:, None]).float()
    return step


def shrunk_to_attributes(table: Tensor, evidence: Tensor, attributes: Tensor, prior: float) -> Tensor:
    """A lighter table: what an item's attributes say, and its own part only as far as there is evidence for it.

    With `A` the least-squares fit `(M^T N M + I)^-1 M^T N G` of attribute vectors, weighted by the evidence, an item's
    row becomes `M_i A + n_i / (n_i + prior) (G_i - M_i A)`: items that little is known about get the mean of their
    kind, those that many have trained keep their own vector.

    Args:
        table: G (I, d).
        evidence: n (I,) >= 0, how often markets sent each item.
        attributes: M (I, a), rows of 0 and 1, scaled here to sum to 1.
        prior: Evidence at which the two parts weigh the same; 0 returns the table as it is.

    Returns:
        (I, d) float32.
    """
    if prior == 0:
        return table
    kinds = attributes.double() / attributes.sum(dim=1, keepdim=True).double().clamp_min(1)
    weighted = kinds * evidence.double()[:, None]
    normal = weighted.T @ kinds + torch.eye(kinds.shape[1], dtype=torch.float64)
    fitted = kinds @ torch.linalg.solve(normal, weighted.T @ table.double())
    share = (evidence / (evidence + prior)).double()[:, None]
    return (fitted + share * (table.double() - fitted)).float()
