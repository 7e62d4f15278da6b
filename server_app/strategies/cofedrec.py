"""CoFedRec (He et al., WWW 2024, arXiv 2411.01690) on the server: clients that agree on a cluster of items.

Every round: k-means on the mean item table; a random client and a random cluster of items; the clients whose tables
resemble the chosen one's on that cluster, up to the elbow of the sorted similarities, take the mean of their tables.
The other clients keep theirs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from fedhur_app.protocol import Content
from fedhur_app.relations.filters import mean_table
from fedhur_app.seeding import numpy_generator
from server_app.stages import PerClient
from server_app.strategies.mixing import MixingStrategy, Tables, shared_tables, weighted_mean


class Server(MixingStrategy):
    """Item clusters for everybody, a table for the members of the round's groups."""

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """Cluster the items, form the groups, average within each."""
        settings = self.settings.cofedrec
        tables = shared_tables(replies)
        generator = numpy_generator(self.settings.seed, "groups", round_)
        self.labels = item_clusters(mean_table(tables), settings.clusters, self.settings.seed)
        clients = list(replies)
        free = np.arange(len(clients))
        sizes = []
        personal: dict[int, Tables] = {}
        for _ in range(settings.groups):
            if not len(free):
                break
            chosen = int(generator.integers(len(free)))
            cluster = int(generator.integers(int(self.labels.max()) + 1))
            inside = self.labels == cluster
            members = free[group_of([tables[client][inside] for client in free], chosen)]
            mean = weighted_mean(
                torch.ones(len(members)).double(), [replies[clients[member]].record("table") for member in members]
            )
            personal |= {clients[member]: mean for member in members}
            free = np.setdiff1d(free, members)
            sizes.append(len(members))
        self.personal = personal
        return {"group_sizes": sizes}

    def configure_personalize(self, round_: int, clients: list[int]) -> Content | Mapping[int, Content]:
        """The clusters, and the mean of its group for a member."""
        labels, personal = {"labels": {"items": self.labels}}, self.personal
        return PerClient(
            clients,
            lambda client: Content(arrays=labels | ({"table": personal[client]} if client in personal else {})),
        )


def item_clusters(table: Tensor, clusters: int, seed: int) -> Tensor:
    """k-means labels (I,), int16, of the rows of a table (I, d); at most as many clusters as distinct rows."""
    rows = table.double().numpy()
    number = min(clusters, len(np.unique(rows, axis=0)))
    random_state = int(numpy_generator(seed, "item clusters").integers(2**31))
    labels = KMeans(number, n_init=1, random_state=random_state).fit_predict(rows)
    return torch.from_numpy(labels).to(torch.int16)


def group_of(rows: Sequence[Tensor], chosen: int) -> np.ndarray:
    """Clients (rising numbers) most similar to `chosen` on some items, up to the elbow, `chosen` included.

    Args:
        rows: The tables of K clients on these items, (b, d) each.
        chosen: Whose group it is.
    """
    own = _unit_rows(rows[chosen])
    similarity = torch.stack([(_unit_rows(table) * own).sum() for table in rows])  # sum of the items' cosines
    similarity[chosen] = torch.inf  # first in the order, whatever rounding says
    order = similarity.argsort(descending=True, stable=True)
    similarity[chosen] = float(len(own))
    return np.sort(order[: elbow(similarity[order].numpy()) + 1].numpy())


def _unit_rows(table: Tensor) -> Tensor:
    wide = table.double()
    return wide / wide.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def elbow(falling: np.ndarray) -> int:
    """Position of the point of a falling curve (n,) that is farthest from the chord between its ends."""
    x = np.arange(len(falling), dtype=np.float64)
    along = np.array([x[-1], falling[-1] - falling[0]])
    return int(np.abs(along[0] * (falling - falling[0]) - along[1] * x).argmax())
