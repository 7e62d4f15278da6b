"""CoFedRec (He et al., WWW 2024, arXiv 2411.01690) on the server: clients that agree on a cluster of items.

Every round: k-means on the mean item table; a random client and a random cluster of items; the clients whose tables
resemble the chosen one's on that cluster, up to the elbow of the sorted similarities, take the mean of their tables.
The other clients keep theirs.
"""

from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from fedhur_app.protocol import Content
from fedhur_app.seeding import numpy_generator
from server_app.strategies.mixing import MixingStrategy, stacked, weighted_mean


class Server(MixingStrategy):
    """Item clusters for everybody, a table for the members of the round's groups."""

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """Cluster the items, form the groups, average within each."""
        settings = self.settings.cofedrec
        tables = stacked(replies)
        generator = numpy_generator(self.settings.seed, "groups", round_)
        self.labels = item_clusters(tables.mean(dim=0), settings.clusters, self.settings.seed)
        clients = list(replies)
        free = np.arange(len(clients))
        sizes = []
        for _ in range(settings.groups):
            if not len(free):
                break
            chosen = int(generator.integers(len(free)))
            cluster = int(generator.integers(int(self.labels.max()) + 1))
            members = free[group_of(tables[free][:, self.labels == cluster], chosen)]
            mean = weighted_mean(
                torch.ones(len(members)).double(), [replies[clients[member]].record("table") for member in members]
            )
            self.personal |= {clients[member]: mean for member in members}
            free = np.setdiff1d(free, members)
            sizes.append(len(members))
        return {"group_sizes": sizes}

    def configure_personalize(self, round_: int, clients: list[int]) -> Content | dict[int, Content]:
        """The clusters, and the mean of its group for a member."""
        labels = {"labels": {"items": self.labels}}
        alone = Content(arrays=dict(labels))
        return {
            client: Content(arrays=labels | {"table": self.personal[client]}) if client in self.personal else alone
            for client in clients
        }


def item_clusters(table: Tensor, clusters: int, seed: int) -> Tensor:
    """k-means labels (I,), int16, of the rows of a table (I, d); at most as many clusters as distinct rows."""
    rows = table.double().numpy()
    number = min(clusters, len(np.unique(rows, axis=0)))
    random_state = int(numpy_generator(seed, "item clusters").integers(2**31))
    labels = KMeans(number, n_init=1, random_state=random_state).fit_predict(rows)
    return torch.from_numpy(labels).to(torch.int16)


def group_of(rows: Tensor, chosen: int) -> np.ndarray:
    """Clients (rising numbers) most similar to `chosen` on some items, up to the elbow, `chosen` included.

    Args:
        rows: The tables of K clients on these items, (K, b, d).
        chosen: Whose group it is.
    """
    unit = rows.double() / rows.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)
    similarity = (unit * unit[chosen]).sum(dim=(1, 2))  # sum of the items' cosines
    similarity[chosen] = torch.inf  # first in the order, whatever rounding says
    order = similarity.argsort(descending=True, stable=True)
    similarity[chosen] = float(rows.shape[1])
    return np.sort(order[: elbow(similarity[order].numpy()) + 1].numpy())


def elbow(falling: np.ndarray) -> int:
    """Position of the point of a falling curve (n,) that is farthest from the chord between its ends."""
    x = np.arange(len(falling), dtype=np.float64)
    along = np.array([x[-1], falling[-1] - falling[0]])
    return int(np.abs(along[0] * (falling - falling[0]) - along[1] * x).argmax())
