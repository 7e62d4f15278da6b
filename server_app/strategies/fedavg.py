"""FedAvg with private user tables (FedMF): `E = sum_k n_k E_k / sum_k n_k`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhur_app.config import Settings
from fedhur_app.protocol import Content
from server_app.checkpoint import RunFolder
from server_app.strategies.base import Fleet, StagedStrategy


class Server(StagedStrategy):
    """Averages item tables; clients that missed the last average get it with the call to train."""

    def __init__(self, settings: Settings, fleet: Fleet, folder: RunFolder | None = None) -> None:
        super().__init__(settings, fleet, folder)
        self.table: Tensor | None = None
        self.up_to_date: set[int] = set()

    def configure_items(self, round_: int, clients: list[int]) -> Content | dict[int, Content]:
        """Nothing for clients that hold the present average, the average for the others."""
        if self.table is None:
            return Content()
        fresh, stale = Content(), Content(arrays={"table": {"items": self.table}})
        return {client: fresh if client in self.up_to_date else stale for client in clients}

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """The weighted mean; clients without a single training example do not count."""
        uniform = self.settings.fedavg.weighting == "uniform"
        total = 0.0
        mean: Tensor | None = None
        for content in replies.values():
            examples = float(content.fields["examples"])
            weight = float(examples > 0) if uniform else examples
            if weight:
                table = content.record("table")["items"].double() * weight
                mean = table if mean is None else mean.add_(table)
                total += weight
        if mean is not None:
            self.table = (mean / total).float()
        elif self.table is None:
            # Nobody trained at all: any table is as good as another, keep the first client's.
            self.table = next(iter(replies.values())).record("table")["items"]
        return None

    def configure_personalize(self, round_: int, clients: list[int]) -> Content | dict[int, Content]:
        """The average, for everybody."""
        if self.table is None:
            raise RuntimeError("configure_personalize was called before aggregate_items")
        return Content(arrays={"table": {"items": self.table}})

    def aggregate_personalize(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """Note who holds the present average."""
        self.up_to_date = set(replies)
        return None

    def state(self) -> dict[str, np.ndarray]:
        """The average and who holds it."""
        if self.table is None:
            return {}
        return {"table": self.table.numpy(), "up_to_date": np.array(sorted(self.up_to_date), dtype=np.int64)}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of :meth:`state`."""
        if "table" in arrays:
            self.table = torch.tensor(arrays["table"])
            self.up_to_date = set(arrays["up_to_date"].tolist())
