"""GPFedRec (Zhang et al., KDD 2024) on the server: a graph of clients from their item tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedhur_app.config import GpFedRecSettings
from fedhur_app.protocol import Content
from server_app.stages import PerClient
from server_app.strategies.mixing import MixingStrategy, Mixtures, column_slices, shared_tables


class Server(MixingStrategy):
    """Clients get the mean of all graph-guided tables to start from, and their own as a regulariser."""

    personalised = True

    def mixing(self, round_: int, replies: dict[int, Content]) -> Tensor:
        """`W^L` with equal weights over each client's neighbours."""
        return neighbour_weights(shared_tables(replies), self.settings.gpfedrec)

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """Graph-guided tables `R = W^L E`, and their mean."""
        super().aggregate_items(round_, replies)
        assert isinstance(self.personal, Mixtures)
        self.table = self.personal.mean()
        return None

    def configure_personalize(self, round_: int, clients: list[int]) -> Content | Mapping[int, Content]:
        """The common table and each client's own."""
        assert self.table is not None
        table, guides = self.table, self.personal
        return PerClient(clients, lambda client: Content(arrays={"table": table, "guide": guides[client]}))


def neighbour_weights(tables: Sequence[Tensor], settings: GpFedRecSettings) -> Tensor:
    """Row-stochastic weights (K, K), float64, of the client graph, to the power of `hops`.

    The neighbours of client k are the `neighbours` clients j with the largest `A_kj`, or, where that is null, all with
    `A_kj > threshold * mean(A)`; a client without any is its own. After centring the mean is near 0, so the threshold
    then means "above 0" whatever its value. `A` is the cosine similarity of the flattened tables (a client is its own
    neighbour then). The published code takes `1 - cosine` in its place and so links the clients that differ most
    (`metric: repo`). Uncentred tables of one start are nearly parallel, which makes every pair alike: `centre`
    subtracts their mean over clients first.

    Args:
        tables: K tables (I, d).
        settings: The strategy's settings.
    """
    clients = len(tables)
    gram = torch.zeros(clients, clients, dtype=torch.float64)
    flat = [table.flatten() for table in tables]
    for columns in column_slices(len(flat[0]), 12 * clients):
        wide = torch.stack([row[columns] for row in flat]).double()
        gram.addmm_(wide, wide.T)
    if settings.centre:
        mean = gram.mean(dim=1)
        gram = gram - mean[:, None] - mean + mean.mean()
    norms = gram.diagonal().clamp_min(1e-30).sqrt()
    similarity = gram / (norms[:, None] * norms)
    if settings.metric == "repo":
        similarity = 1 - similarity
    if settings.neighbours is None:
        linked = similarity > settings.threshold * similarity.mean()
    else:
        best = similarity.topk(min(settings.neighbours, clients), dim=1).indices
        linked = torch.zeros(clients, clients, dtype=torch.bool).scatter_(1, best, True)
    alone = ~linked.any(dim=1)
    linked[alone, alone.nonzero()[:, 0]] = True
    weights = linked.double() / linked.sum(dim=1, keepdim=True)
    return torch.linalg.matrix_power(weights, settings.hops)
