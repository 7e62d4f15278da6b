"""The learned correction of the scores: one small network for all levels and blocks (eq. 20-21).

Order matters: a round's weights use the scorer as the round before left it; then it is trained on this
round's scores.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from fedhur_app.models.optimizers import Optimizer

# Arrays of :meth:`Scorer.state` and the entries of the optimiser's state that they hold.
_ADAM = {"first": "exp_avg", "second": "exp_avg_sq", "steps": "step"}
# Rows that pass through the network at once when predicting.
_ROWS = 2**16


class Scorer:
    """``f_psi``: features to one number, trained by Adam.

    Args:
        n_features: Width of the features.
        hidden: Width of the hidden layer.
        lr: Learning rate of Adam.
        steps: Minibatch steps of one :meth:`fit`.
        batch: Rows of a minibatch.
        seed: Of the initial weights.
    """

    def __init__(
        self,
        n_features: int,
        hidden: int = 32,
        lr: float = 1e-3,
        steps: int = 50,
        batch: int = 4096,
        seed: int = 0,
    ) -> None:
        self.steps = steps
        self.batch = batch
        # Without torch's own initialisation, which draws from the global generator.
        first, last = (nn.utils.skip_init(nn.Linear, *shape) for shape in ((n_features, hidden), (hidden, 1)))
        self.network = nn.Sequential(first, nn.ReLU(), last)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter, fan_in in zip(
                self.network.parameters(), (n_features, n_features, hidden, hidden), strict=True
            ):
                parameter.uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)
        self.lr = lr
        self.optimizer = Optimizer("adam", self._parameters(), lr)

    @torch.no_grad()
    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """``f_psi(x)`` for ``x (..., f)``: ``(...)``."""
        rows = features.reshape(-1, features.shape[-1])
        return torch.cat([self.network(part)[:, 0] for part in rows.split(_ROWS)]).reshape(features.shape[:-1])

    def fit(self, features: torch.Tensor, target: torch.Tensor, generator: torch.Generator) -> float:
        """A few steps on ``sum (f_psi(x) - target)^2`` (eq. 20), estimated on random minibatches.

        Args:
            features: ``x (..., f)``; concatenate the rows of all levels.
            target: ``Norm_j(s) (...)``.
            generator: Draws the minibatches.

        Returns:
            Mean squared error over the minibatches, each before its step.

        Raises:
            ValueError: If features and target differ in their number of rows.
        """
        rows, goal = features.reshape(-1, features.shape[-1]), target.reshape(-1)
        if len(rows) != len(goal) or len(rows) == 0:
            raise ValueError(f"The scorer needs as many targets as rows, at least one: {len(rows)} and {len(goal)}.")
        losses = []
        with torch.enable_grad():
            for _ in range(self.steps):
                picked = torch.randint(len(rows), (min(self.batch, len(rows)),), generator=generator)
                loss = (self.network(rows[picked])[:, 0] - goal[picked]).square().mean()
                gradients = torch.autograd.grad(loss, list(self.network.parameters()))
                self.optimizer.step({str(number): gradient for number, gradient in enumerate(gradients)})
                losses.append(float(loss.detach()))
        return float(np.mean(losses))

    def state(self) -> dict[str, np.ndarray]:
        """Weights and Adam's moments, for an exact resume."""
        moments = self.optimizer.state()
        arrays = {}
        for name, parameter in self._parameters().items():
            arrays[f"{name}.weight"] = parameter.numpy().copy()
            for kind, entry in _ADAM.items():
                arrays[f"{name}.{kind}"] = np.atleast_1d(moments[f"adam/{name}/{entry}"].numpy()).copy()
        return arrays

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from what :meth:`state` returned.

        Raises:
            ValueError: If an array is missing or has another shape.
        """
        moments = {}
        for number, parameter in self._parameters().items():
            for kind in ("weight", *_ADAM):
                name = f"{number}.{kind}"
                shape = (1,) if kind == "steps" else tuple(parameter.shape)
                if name not in arrays or arrays[name].shape != shape:
                    found = arrays[name].shape if name in arrays else "nothing"
                    raise ValueError(
                        f"The scorer's state {name!r} should have shape {shape}, but {found} was found: "
                        "was it saved with other features or another hidden width?"
                    )
            parameter.copy_(torch.tensor(arrays[f"{number}.weight"]))
            for kind, entry in _ADAM.items():
                moment = torch.tensor(arrays[f"{number}.{kind}"])
                moments[f"adam/{number}/{entry}"] = moment[0] if kind == "steps" else moment
        self.optimizer = Optimizer("adam", self._parameters(), self.lr, state=moments)

    def _parameters(self) -> dict[str, torch.Tensor]:
        """The network's parameters by number, to be changed in place."""
        return {str(number): parameter.data for number, parameter in enumerate(self.network.parameters())}
