"""Item tables at the end of a run: those of the markets and the global one between them."""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from fedhur_app.consensus.basis import map_to_common
from fedhur_app.files import read_arrays


@dataclass(frozen=True)
class ItemTables:
    """Item tables of one run's last round.

    Attributes:
        markets: Market number -> (I, d_m), of the markets whose model has an item table.
        shared: The global table G (I, d).
    """

    markets: dict[int, np.ndarray]
    shared: np.ndarray

    @property
    def comparable(self) -> bool:
        """Whether all tables have the same width."""
        return {table.shape for table in self.markets.values()} == {self.shared.shape}


def read_item_tables(folder: Path, moved: bool = False) -> ItemTables | None:
    """The tables in the checkpoint of a run; None if it holds no global table or none of a market.

    Args:
        folder: Output folder of the run.
        moved: Bring each market's table into the coordinates of G first, as its uploads were: where the tables are
            compared by relations between items, they have coordinates of their own.
    """
    server = folder / "checkpoint" / "server.npz"
    shared = read_arrays(server).get("global/items") if server.is_file() else None
    markets = {}
    for client in sorted((folder / "checkpoint" / "clients").glob("client-*")):
        files = sorted(client.glob("round-*.npz"))
        table = read_arrays(files[-1]).get("model|items") if files else None
        if table is not None and moved and shared is not None:
            table = table @ map_to_common(torch.from_numpy(table), torch.from_numpy(shared)).numpy()
        if table is not None:
            markets[int(client.name.removeprefix("client-"))] = table
    return ItemTables(markets, shared) if shared is not None and markets else None


def distances_to_shared(tables: ItemTables) -> dict[int, float]:
    """Mean over items of ||E_m - G||, row by row, for every market m. All tables have the same shape."""
    return {market: _distance(table, tables.shared) for market, table in tables.markets.items()}


def distances_to_others(tables: ItemTables) -> dict[int, float]:
    """Mean over items and the other markets n of ||E_m - E_n|| for every market m; NaN for an only market."""
    between: dict[int, list[float]] = {market: [] for market in tables.markets}
    for one, two in combinations(tables.markets, 2):
        distance = _distance(tables.markets[one], tables.markets[two])
        between[one].append(distance)
        between[two].append(distance)
    return {market: float(np.mean(found)) if found else float("nan") for market, found in between.items()}


def _distance(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.linalg.norm(one.astype(np.float64) - two, axis=1).mean())
