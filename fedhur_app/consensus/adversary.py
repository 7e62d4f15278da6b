"""An adversary that tells a market's item vectors from the consensus, which the market then learns to deceive.

A network of one hidden layer, private to its market, with hand-written gradients:
`logit(x) = w . relu(W x + b) + c`, above 0 for "a market's own".
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

HIDDEN = 16
_STEP = 0.1


def initial_adversary(dim: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Weights for item vectors of width `dim`, by fan-in; biases zero."""
    return {
        "hidden": torch.randn(HIDDEN, dim, generator=generator) * dim**-0.5,
        "hidden_bias": torch.zeros(HIDDEN),
        "output": torch.randn(HIDDEN, generator=generator) * HIDDEN**-0.5,
        "output_bias": torch.zeros(()),
    }


def deceive(adversary: dict[str, Tensor], own: Tensor, common: Tensor) -> tuple[float, Tensor]:
    """One step of the adversary on both sets of rows, then the market's loss `mean softplus(logit(e_i))`.

    The market wants its rows taken for the consensus. Rows are scaled by the root mean square of all of them first,
    without which small tables would give the adversary nothing to see.

    Args:
        adversary: Its weights, changed in place.
        own: (b, d) rows of the market's table.
        common: (b, d) rows of G.

    Returns:
        The loss and its gradient (b, d) with respect to `own`, the scale held fixed.
    """
    scale = torch.cat([own, common]).square().mean().sqrt().clamp_min(1e-12)
    mine, theirs = own / scale, common / scale
    _learn(adversary, torch.cat([mine, theirs]), torch.arange(2 * len(own), device=own.device) < len(own))
    hidden = mine @ adversary["hidden"].T + adversary["hidden_bias"]
    logits = hidden.relu() @ adversary["output"] + adversary["output_bias"]
    by_hidden = (logits.sigmoid() / len(own))[:, None] * adversary["output"] * (hidden > 0)
    return float(softplus(logits).mean()), by_hidden @ adversary["hidden"] / scale


def _learn(adversary: dict[str, Tensor], rows: Tensor, is_own: Tensor) -> None:
    """One gradient step on the logistic loss."""
    hidden = rows @ adversary["hidden"].T + adversary["hidden_bias"]
    active = hidden.relu()
    logits = active @ adversary["output"] + adversary["output_bias"]
    by_logit = (logits.sigmoid() - is_own.to(logits.dtype)) / len(rows)
    by_hidden = by_logit[:, None] * adversary["output"] * (hidden > 0)
    gradients = {
        "hidden": by_hidden.T @ rows,
        "hidden_bias": by_hidden.sum(dim=0),
        "output": active.T @ by_logit,
        "output_bias": by_logit.sum(),
    }
    for name, gradient in gradients.items():
        adversary[name].sub_(_STEP * gradient)
