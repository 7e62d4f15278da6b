"""FedCA (Zhang et al., 2024, arXiv 2406.03933) on the client: principal directions go up, part of the mix is taken."""

import torch
from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.protocol import Arrays, Content


class Client(ClientAlgorithm):
    """`E_k <- keep E_k + (1 - keep) (server's mixture)`, for all that is shared."""

    def upload(self) -> Arrays:
        """The shared parameters and the principal directions of the embeddings of the client's training items."""
        arrays = super().upload()
        seen = torch.from_numpy(self.shard.train.items).unique()
        rows = arrays["table"]["items"].index_select(0, seen)
        # As many directions as the width would span the whole space at every client.
        components = min(self.settings.fedca.components, max(1, rows.shape[1] - 1))
        return arrays | {"basis": {"B": principal_directions(rows, components)}}

    def apply(self, request: Content) -> dict[str, float | int]:
        """Move towards the mixture."""
        keep, model = self.settings.fedca.keep, self.state.arrays["model"]
        mixture = request.record("table")
        self.set_model({name: keep * model[name] + (1 - keep) * tensor for name, tensor in mixture.items()})
        return {}


def principal_directions(rows: Tensor, components: int) -> Tensor:
    """Orthonormal principal components (components, d) of rows (n, d); zero rows where there are fewer."""
    directions = torch.zeros(components, rows.shape[1])
    if len(rows) > 1:
        _, spread, right = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
        found = min(components, int((spread > 1e-6 * spread[0]).sum()))
        directions[:found] = right[:found]
    return directions
