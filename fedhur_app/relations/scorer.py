"""The learned correction of the scores: one small network for all levels and blocks (eq. 20-21).

Order matters: a round's weights use the scorer as the round before left it; then it is trained on this
round's scores.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from fedhur_app.models.optimizers import Optimizer

# Arrays of :meth:`Scorer.state` and the entries of the optimiser's state that they hold.
_ADAM = {"first": "exp_avg", "second": "exp_avg_sq", "steps": "step"}
# Rows that pass through the network at once when predicting.
_ROWS = 2**16


class TrainingRows:
    """Minibatches whose rows are chosen before the rows are there, and taken as these pass by in parts.

    The features of all pairs of clients on all blocks need not be held: 20 steps of 8,192 rows are 12 MB, all pairs of
    2,000 clients on 150 blocks 45 GB.

    Args:
        picked: ``(steps, n)`` numbers of the wanted rows.
    """

    def __init__(self, picked: torch.Tensor) -> None:
        self._shape = picked.shape
        self._numbers, self._order = picked.flatten().sort(stable=True)
        self._features = torch.empty(0)
        self._target = torch.empty(0)
        self._seen = 0

    @classmethod
    def draw(cls, rows: int, steps: int, batch: int, generator: torch.Generator) -> "TrainingRows":
        """Choose random minibatches out of ``rows`` rows.

        Raises:
            ValueError: Without any rows.
        """
        if rows < 1:
            raise ValueError("The scorer needs at least one row to train on.")
        picked = [torch.randint(rows, (min(batch, rows),), generator=generator) for _ in range(steps)]
        return cls(torch.stack(picked))

    def collect(self, first: int, features: torch.Tensor, target: torch.Tensor) -> None:
        """Take what is wanted of the rows ``first``, ``first + 1``, ...; every row must pass by once, in any order.

        Args:
            first: Number of the first of these rows.
            features: ``x (..., f)``.
            target: ``Norm_j(s) (...)``.

        Raises:
            ValueError: If features and target differ in their number of rows.
        """
        rows, goal = features.reshape(-1, features.shape[-1]), target.reshape(-1)
        if len(rows) != len(goal):
            raise ValueError(f"The scorer needs as many targets as rows: {len(rows)} and {len(goal)}.")
        if not self._seen:
            self._features = rows.new_empty(len(self._order), rows.shape[1])
            self._target = goal.new_empty(len(self._order))
        start, stop = torch.searchsorted(self._numbers, torch.tensor([first, first + len(rows)])).tolist()
        places, wanted = self._order[start:stop], self._numbers[start:stop] - first
        self._features[places], self._target[places] = rows[wanted], goal[wanted]
        self._seen += stop - start

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Features ``(n, f)`` and targets ``(n,)`` of every minibatch.

        Raises:
            ValueError: If some of the chosen rows have not been seen.
        """
        if self._seen != len(self._order):
            raise ValueError(f"The scorer has seen {self._seen} of the {len(self._order)} rows that it is to train on.")
        steps, n = self._shape
        yield from zip(self._features.reshape(steps, n, -1), self._target.reshape(steps, n), strict=True)


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

    def draw(self, rows: int, generator: torch.Generator) -> "TrainingRows":
        """Choose the random minibatches of the next :meth:`fit` out of ``rows`` rows.

        Raises:
            ValueError: Without any rows.
        """
        return TrainingRows.draw(rows, self.steps, self.batch, generator)

    def fit(self, rows: "TrainingRows") -> float:
        """A few steps on ``sum (f_psi(x) - target)^2`` (eq. 20), estimated on random minibatches.

        Args:
            rows: What :meth:`draw` chose, filled.

        Returns:
            Mean squared error over the minibatches, each before its step.

        Raises:
            ValueError: If some of the chosen rows have not been seen.
        """
        losses = []
        with torch.enable_grad():
            for features, target in rows.batches():
                loss = (self.network(features)[:, 0] - target).square().mean()
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
