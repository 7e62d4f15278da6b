"""A scorer in closed form: what the network of scorer.py is trained for, solved exactly by a linear function."""

from collections.abc import Mapping

import numpy as np
import torch

from fedhur_app.relations.scorer import TrainingRows

# Of mean squares of z-scores, so it has no unit; it only decides where features depend on each other.
_RIDGE = 1e-3


class RidgeScorer:
    """``f(x) = w^T x``, ``w`` the minimiser of ``mean (w^T x - target)^2 + l2 ||w||^2``; 0 before the first fit.

    It has no intercept: features and target are centred over the candidates. Nothing of the rounds before is kept but
    ``w``, which the next round uses.

    Args:
        n_features: Width of the features.
        steps: Minibatches of one :meth:`fit`.
        batch: Rows of a minibatch.
    """

    def __init__(self, n_features: int, steps: int, batch: int) -> None:
        self.steps = steps
        self.batch = batch
        self.weights = torch.zeros(n_features)

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """``f(x)`` for ``x (..., f)``: ``(...)``."""
        return features @ self.weights.to(features)

    def draw(self, rows: int, generator: torch.Generator) -> TrainingRows:
        """Choose the random rows of the next :meth:`fit` out of ``rows`` rows.

        Raises:
            ValueError: Without any rows.
        """
        return TrainingRows.draw(rows, self.steps, self.batch, generator)

    def fit(self, rows: TrainingRows) -> float:
        """Solve for the weights on all chosen rows.

        Args:
            rows: What :meth:`draw` chose, filled.

        Returns:
            Mean squared error of the new weights on these rows.

        Raises:
            ValueError: If some of the chosen rows have not been seen.
        """
        parts = list(rows.batches())
        features = torch.cat([part for part, _ in parts]).double()
        target = torch.cat([goal for _, goal in parts]).double()
        matrix = features.T @ features / len(features)
        matrix += _RIDGE * torch.eye(len(matrix), dtype=matrix.dtype)
        weights = torch.linalg.solve(matrix, features.T @ target / len(features))
        self.weights = weights.float()
        return float((features @ weights - target).square().mean())

    def state(self) -> dict[str, np.ndarray]:
        """The weights, for an exact resume."""
        return {"weights": self.weights.numpy().copy()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from what :meth:`state` returned.

        Raises:
            ValueError: If the weights are missing or have another shape.
        """
        found = arrays.get("weights")
        if found is None or found.shape != tuple(self.weights.shape):
            raise ValueError(
                f"The scorer's weights should have shape {tuple(self.weights.shape)}, but "
                f"{'nothing' if found is None else found.shape} was found: was it saved with other features?"
            )
        self.weights = torch.tensor(found)
