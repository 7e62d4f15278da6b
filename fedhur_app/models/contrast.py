"""Supervised contrastive loss with its gradient, in blocks of rows."""

import math

import torch
from torch import Tensor

_BLOCK_BYTES = 2 << 20  # scores of one block of rows: they stay in a core's cache
_BASE_TEMPERATURE = 0.5  # the published code of CoFedRec scales the loss by temperature / base


def supervised_contrast(table: Tensor, labels: Tensor, temperature: float) -> tuple[float, Tensor]:
    """SupCon (Khosla et al. 2020) of the normalised rows of an item table, as CoFedRec uses it.

    With `z_i = e_i / |e_i|`, `s_ij = z_i . z_j / tau` and `P_i` the other items of i's cluster, the mean over items of

        `-(tau / 0.5) 1/|P_i| sum_{p in P_i} (s_ip - log sum_{a != i} exp s_ia)`,

    0 for items alone in their cluster. In closed form, block by block of rows: `4 I^2 d` operations, never an `I x I`
    array.

    Args:
        table: (I, d) floating point.
        labels: Cluster of each item, (I,) integers.
        temperature: tau > 0.

    Returns:
        The loss and its gradient (I, d).
    """
    n_items = len(table)
    norms = table.norm(dim=1, keepdim=True).clamp_min(1e-12)
    unit = table / norms
    # The peers' part needs sums of clusters only: sum_p z_i . z_p = z_i . (C_i - z_i).
    cluster = torch.unique(labels, return_inverse=True)[1]
    sums = torch.zeros(int(cluster.max()) + 1, table.shape[1], dtype=table.dtype, device=table.device)
    others = sums.index_add_(0, cluster, unit).index_select(0, cluster) - unit
    peers = torch.bincount(cluster).index_select(0, cluster)[:, None] - 1
    counted = (peers > 0).to(table.dtype)
    mean_peer = others / peers.clamp_min(1)
    total = -float((unit * mean_peer * counted).sum()) / temperature
    by_unit = -2 * mean_peer * counted
    # The softmax over all others, for rows that count.
    block = max(1, _BLOCK_BYTES // (n_items * table.element_size()))
    for first in range(0, n_items, block):
        rows = slice(first, first + block)
        scores = (unit[rows] / temperature) @ unit.T
        place = torch.arange(len(scores), device=table.device)
        scores[place, first + place] = -math.inf
        largest = scores.amax(dim=1, keepdim=True)
        powers = scores.sub_(largest).exp_()
        sums = powers.sum(dim=1, keepdim=True)
        total += float(((largest + sums.log()) * counted[rows]).sum())
        # softmax = share * powers; scaling the thin factors instead spares a pass over the block.
        share = counted[rows] / sums
        by_unit[rows] += share * (powers @ unit)
        by_unit += powers.T @ (share * unit[rows])
    scale = temperature / _BASE_TEMPERATURE / n_items
    by_unit *= scale / temperature
    # Through the normalisation: the part along z_i vanishes.
    along = (by_unit * unit).sum(dim=1, keepdim=True)
    return total * scale, (by_unit - along * unit) / norms
