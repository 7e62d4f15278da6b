"""FedCIA without parameters on the client: its GFCF filter in factors, and `server_weight r_u F + r_u F_k`."""

from collections.abc import Callable

from torch import Tensor

from client_app.algorithms.untrained import UntrainedClient
from fedhur_app.models.item_filters import combined_scores, gfcf_factors, score_rows
from fedhur_app.protocol import Arrays, Content


class Client(UntrainedClient):
    """Uploads its filter once; keeps the mean filter.

    The filter says as much as the item co-occurrences of the client's users: for a client of one user that is which
    items the user has (docs/protocol.md).
    """

    def upload(self) -> Arrays:
        """The exact filter F_k: singular vectors, values, degrees, in float32."""
        factors = gfcf_factors(self.shard.train, self.shard.n_items)
        parts = {"basis": factors.basis, "values": factors.values, "degrees": factors.degrees}
        return {"factors": {name: part.float() for name, part in parts.items()}}

    def apply(self, request: Content) -> dict[str, float | int]:
        """Keep the mean filter `left right^T`."""
        self.set_model(request.record("filter"))
        return {}

    def scores(self, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """The mean filter's scores beside those of the client's own; its own alone while it has no mean filter."""
        settings, train = self.settings.gfcf, self.shard.train
        own = gfcf_factors(train, self.shard.n_items).sides(settings.singular_vectors, settings.ideal_weight)
        if not parameters:  # it was not among the round's clients
            return lambda users: score_rows(train, users, *own)
        mean = (parameters["left"], parameters["right"])
        return lambda users: combined_scores(train, users, mean, own, settings.server_weight)
