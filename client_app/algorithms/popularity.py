"""Popularity: the number of training interactions of an item, the same scores for all users."""

from collections.abc import Callable

from torch import Tensor

from client_app.algorithms.untrained import UntrainedClient
from fedhur_app.models.item_filters import item_counts


class Client(UntrainedClient):
    """Counts the rows of the client (`centralised: true`: of everybody)."""

    def scores(self, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Item counts."""
        counts = item_counts(self.shard.train, self.shard.n_items)
        return lambda users: counts.expand(len(users), -1)
