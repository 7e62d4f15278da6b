"""EASE (Steck 2019): a linear item model in closed form on the client's rows; with `centralised: true`, on all rows."""

from collections.abc import Callable

from torch import Tensor

from client_app.algorithms.untrained import UntrainedClient
from fedhur_app.models.item_filters import ease_weights, sum_item_rows


class Client(UntrainedClient):
    """Keeps nothing: the weights are made anew when they are needed, twice a run."""

    def scores(self, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Scores `r_u B`."""
        train = self.shard.train
        weights = ease_weights(train, self.shard.n_items, self.settings.ease.l2)
        return lambda users: sum_item_rows(train, users, weights)
