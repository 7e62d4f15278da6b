"""Strategies that mix the clients' tables by a K x K matrix: FedAvg and its personalised descendants.

With `W` (R, K) non-negative, the server computes `sum_j W_rj T_j / sum_j W_rj` for every shared tensor `T`. One row
means one result for everybody, K rows one for each client. A strategy says `W` (:meth:`MixingStrategy.mixing`) and,
where it differs, what travels back.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhur_app.config import Settings
from fedhur_app.protocol import Content
from server_app.checkpoint import RunFolder
from server_app.stages import PerClient
from server_app.strategies.base import Fleet, StagedStrategy

Tables = dict[str, Tensor]

# Work memory where the tables of all clients are used at once: so many columns of them at a time.
_CHUNK_BYTES = 32 * 2**20
# Tables that are mixed at once: reading all uploads for every single client would take longer than the products.
_MIXED_BYTES = 256 * 2**20


class MixingStrategy(StagedStrategy):
    """Mixes what clients upload.

    Attributes:
        personalised: Whether :meth:`mixing` gives every client a row of its own.
        table: The newest result that all clients share, by parameter; None before the first round, or where the
            strategy has none.
        up_to_date: Clients that hold `table`; the others get it with the call to train.
        personal: Of the present round: client -> its own result, made when it is sent.
    """

    personalised = False

    def __init__(self, settings: Settings, fleet: Fleet, folder: RunFolder | None = None) -> None:
        super().__init__(settings, fleet, folder)
        self.table: Tables | None = None
        self.up_to_date: set[int] = set()
        self.personal: Mapping[int, Tables] = {}

    # --- hooks of a strategy ------------------------------------------------------------------------------------

    def mixing(self, round_: int, replies: dict[int, Content]) -> Tensor:
        """Weights (1, K), or (K, K) if `personalised`, float64; rows need not sum to 1.

        Clients stand in the order of `replies`.

        By default one row: training interactions, or 1 for every client that has some (`fedavg.weighting`).
        """
        examples = torch.tensor([float(content.fields["examples"]) for content in replies.values()]).double()
        if self.settings.fedavg.weighting == "uniform":
            examples = (examples > 0).double()
        return examples[None]

    # --- stages -------------------------------------------------------------------------------------------------

    def configure_items(self, round_: int, clients: list[int]) -> Content | dict[int, Content]:
        """Nothing for clients that hold the present shared table, that table for the others."""
        if self.table is None:
            return Content()
        fresh, stale = Content(), Content(arrays={"table": self.table})
        return {client: fresh if client in self.up_to_date else stale for client in clients}

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """Mix the uploads; where nobody trained, the shared table stays as it is."""
        weights = self.mixing(round_, replies)
        uploads = [content.record("table") for content in replies.values()]
        if self.personalised:
            self.personal = Mixtures(weights, dict(zip(replies, uploads, strict=True)))
        elif bool(weights.any()):
            self.table = weighted_mean(weights[0], uploads)
        elif self.table is None:
            self.table = uploads[0]  # any table is as good as another
        return None

    def configure_personalize(self, round_: int, clients: list[int]) -> Content | Mapping[int, Content]:
        """Each client's own result, or the shared one."""
        if personal := self.personal:
            return PerClient(clients, lambda client: Content(arrays={"table": personal[client]}))
        if self.table is None:
            raise RuntimeError("configure_personalize was called before aggregate_items")
        return Content(arrays={"table": self.table})

    def aggregate_personalize(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """Note who holds the present shared table."""
        self.up_to_date = set(replies)
        self.personal = {}
        return None

    def forget(self, client: int) -> None:
        """It gets the shared table with the next call to train."""
        self.up_to_date.discard(client)

    # --- resume -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """The shared table and who holds it."""
        if self.table is None:
            return {}
        tables = {f"table/{name}": tensor.numpy() for name, tensor in self.table.items()}
        return {"up_to_date": np.array(sorted(self.up_to_date), dtype=np.int64), **tables}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of :meth:`state`."""
        self.table = tables_below(arrays, "table")
        self.up_to_date = set(arrays["up_to_date"].tolist()) if self.table else set()


def tables_below(arrays: dict[str, np.ndarray], prefix: str) -> Tables | None:
    """Tensors by name of the arrays `prefix/name` of a checkpoint; None if there are none."""
    start = f"{prefix}/"
    return {key.removeprefix(start): torch.tensor(a) for key, a in arrays.items() if key.startswith(start)} or None


def weighted_mean(weights: Tensor, uploads: Sequence[Tables]) -> Tables:
    """`sum_j w_j T_j / sum_j w_j` of every tensor, summed in float64 in the order given.

    Args:
        weights: (K,) float64, not all zero.
        uploads: Tensors of K clients by name.
    """
    mean: Tables = {}
    for name in uploads[0]:
        total: Tensor | None = None
        for weight, tables in zip(weights.tolist(), uploads, strict=True):
            if weight:
                tensor = tables[name].double() * weight
                total = tensor if total is None else total.add_(tensor)
        assert total is not None, "all weights are zero"
        mean[name] = (total / weights.sum()).float()
    return mean


def mix(weights: Tensor, uploads: Sequence[Tables]) -> list[Tables]:
    """The weighted means of every row of `weights` (R, K), in float32: R x K x (size of a table) operations."""
    normal = (weights / weights.sum(dim=1, keepdim=True)).float()
    mixed: list[Tables] = [{} for _ in range(len(normal))]
    for name, first in uploads[0].items():
        flat = [tables[name].flatten() for tables in uploads]
        whole = normal.new_empty(len(normal), first.numel())
        for columns in column_slices(first.numel(), 4 * len(uploads)):
            whole[:, columns] = normal @ torch.stack([row[columns] for row in flat])
        for row, tensor in enumerate(whole):
            mixed[row][name] = tensor.reshape(first.shape)
    return mixed


class Mixtures(Mapping[int, Tables]):
    """Each client's weighted mean of the uploads: made for some clients at a time, when one of them is asked for.

    So `K` tables are held, the uploads, not twice as many.

    Args:
        weights: (K, K), float64; no row is zero.
        uploads: Client -> its tables, in the order of the rows and columns of `weights`.
    """

    def __init__(self, weights: Tensor, uploads: dict[int, Tables]) -> None:
        self.weights = weights
        self._uploads = list(uploads.values())
        self._rows = {client: row for row, client in enumerate(uploads)}
        table = sum(tensor.numel() * tensor.element_size() for tensor in self._uploads[0].values())
        self._count = max(1, _MIXED_BYTES // max(1, table))
        self._first = 0
        self._made: list[Tables] = []

    def __getitem__(self, client: int) -> Tables:
        row = self._rows[client]
        if not self._first <= row < self._first + len(self._made):
            self._first = row - row % self._count
            self._made = []
            self._made = mix(self.weights[self._first : self._first + self._count], self._uploads)
        return self._made[row - self._first]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def mean(self) -> Tables:
        """The mean of all clients' results, summed in float64, without making them."""
        normal = self.weights / self.weights.sum(dim=1, keepdim=True)
        return weighted_mean(normal.mean(dim=0), self._uploads)


def column_slices(columns: int, column_bytes: int) -> Iterator[slice]:
    """Cut a number of columns so that each part takes bounded memory."""
    count = max(1, _CHUNK_BYTES // max(1, column_bytes))
    for first in range(0, columns, count):
        yield slice(first, min(first + count, columns))


def shared_tables(replies: dict[int, Content], name: str = "items") -> list[Tensor]:
    """One shared table of every client, in the order of `replies`, where they lie."""
    return [content.record("table")[name] for content in replies.values()]
