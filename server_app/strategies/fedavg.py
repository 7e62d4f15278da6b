"""FedAvg with private user parameters: `E = sum_k n_k E_k / sum_k n_k` (FedMF; FedNCF with `model.kind: ncf`)."""

from typing import Any

import torch

from fedhur_app.protocol import Content
from server_app.strategies.mixing import MixingStrategy, Tables


class Server(MixingStrategy):
    """One row of weights for everybody; with `fedavg.row_masked` every row of the item tables has its own."""

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """The weighted mean of everything shared; rows of item tables by how often a client trained on the item."""
        before = self.table
        super().aggregate_items(round_, replies)
        if self.settings.fedavg.row_masked:
            assert self.table is not None
            counts = torch.stack([content.record("counts")["items"] for content in replies.values()]).double()
            uploads = [content.record("table") for content in replies.values()]
            for name in [name for name in self.table if "items" in name]:
                self.table[name] = _row_mean(counts, uploads, name, (before or self.table)[name])
        return None


def _row_mean(counts: torch.Tensor, uploads: list[Tables], name: str, untouched: torch.Tensor) -> torch.Tensor:
    """Mean of the tables `name` (I, d) with weights (K, I) by row; rows of weight zero are those of `untouched`."""
    total = torch.zeros_like(untouched, dtype=torch.float64)
    for weights, tables in zip(counts, uploads, strict=True):
        total += weights[:, None] * tables[name].double()
    sums = counts.sum(dim=0)[:, None]
    return torch.where(sums > 0, total / sums.clamp_min(1), untouched.double()).float()
