"""Supervised contrastive loss with its gradient, in blocks of rows."""

import math

import torch
from torch import Tensor

_BLOCK_BYTES = 32 << 20
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
    by_unit = torch.zeros_like(table)
    total = 0.0
    scale = temperature / _BASE_TEMPERATURE / n_items
    block = max(1, _BLOCK_BYTES // (4 * n_items * table.element_size()))
    for first in range(0, n_items, block):
        rows = torch.arange(first, min(first + block, n_items), device=table.device)
        scores = (unit[rows] @ unit.T) / temperature
        alike = labels[rows, None] == labels
        alike[torch.arange(len(rows)), rows] = False
        peers = alike.sum(dim=1, keepdim=True)
        counted = (peers > 0).to(table.dtype)
        scores[torch.arange(len(rows)), rows] = -math.inf
        spread = scores.logsumexp(dim=1, keepdim=True)
        share = alike.to(table.dtype) / peers.clamp_min(1)
        finite = scores.masked_fill(scores.isinf(), 0.0)
        total += float(((spread[:, 0] - (share * finite).sum(dim=1)) * counted[:, 0]).sum())
        # d loss / d s_ij: softmax minus the uniform distribution over the peers.
        by_score = ((scores - spread).exp() - share) * counted * (scale / temperature)
        by_unit[rows] += by_score @ unit
        by_unit += by_score.T @ unit[rows]
    # Through the normalisation: the part along z_i vanishes.
    along = (by_unit * unit).sum(dim=1, keepdim=True)
    return total * scale, (by_unit - along * unit) / norms
