"""What recommenders without training have in common: no parameters, no epochs; scores come from the shard's rows."""

from collections.abc import Callable

from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.protocol import Arrays


class UntrainedClient(ClientAlgorithm):
    """Scores are computed when they are asked for; an algorithm gives :meth:`scores` and what it shares."""

    def initial_model(self) -> dict[str, Tensor]:
        """No parameters."""
        return {}

    def train(self) -> dict[str, float | int]:
        """Nothing to do; counts only."""
        return {"examples": len(self.shard.train), "loss_sum": 0.0, "skipped_users": 0}

    def upload(self) -> Arrays:
        """Nothing leaves the device."""
        return {}

    def scores(self, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Function from users (n,) to raw scores (n, I)."""
        raise NotImplementedError
