"""GFCF (Shen et al. 2021): a graph filter of the client's own rows, `r_u F_k`; with `centralised: true` of all rows."""

from collections.abc import Callable

from torch import Tensor

from client_app.algorithms.untrained import UntrainedClient
from fedhur_app.models.item_filters import gfcf_factors, score_rows


class Client(UntrainedClient):
    """Keeps nothing: the filter is made anew when it is needed."""

    def scores(self, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Scores `r_u F_k`."""
        settings, train = self.settings.gfcf, self.shard.train
        sides = gfcf_factors(train, self.shard.n_items).sides(settings.singular_vectors, settings.ideal_weight)
        return lambda users: score_rows(train, users, *sides)
