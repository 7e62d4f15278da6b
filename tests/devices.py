"""A small federation of nodes that bring their own files, in the local runtime."""

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict

from client_app.app import app as client_app
from fedhur_app.config import DEFAULT_RUN_CONFIG
from fedhur_app.runtime import LocalGrid
from server_app.app import app as server_app

ITEMS = [f"film-{number:02d}" for number in range(16)]
OPTIONS = (
    "rounds=3 min_rounds=3 model.dim=4 train.lr=0.05 relation.query_width=2 hierarchy.branching=[2,2] "
    "residual.beta=[1.0,1.0] score.steps=2 dataset.split.kind=user-ratio dataset.split.ratios=[0.6,0.2,0.2] device=cpu"
)


def write_files(folder: Path, nodes: int, users: int = 5, rows: int = 8, extra: str = "") -> list[Path]:
    """A CSV file a node: users of its own with some of the items."""
    paths = []
    for node in range(nodes):
        generator = np.random.default_rng(node)
        lines = ["user_id,item_id"]
        for user in range(users):
            lines += [f"u{node}{user},{ITEMS[item]}" for item in generator.choice(len(ITEMS), rows, replace=False)]
        path = folder / f"rows-{node}.csv"
        path.write_text("\n".join([*lines, *([extra] if extra else [])]) + "\n")
        paths.append(path)
    return paths


def write_catalogue(folder: Path, ids: list[str] = ITEMS) -> Path:
    """A file of items with titles."""
    path = folder / "items.csv"
    path.write_text("item_id,title\n" + "".join(f"{item},Title of {item}\n" for item in ids))
    return path


def federation(folder: Path, nodes: int = 3, **config: Any) -> LocalGrid:
    """Nodes `a`, `b`, ... with files and a state-dir each; `config` changes the node config of all."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = write_files(folder, nodes)
    write_catalogue(folder)

    def of_node(number: int) -> dict[str, Any]:
        own = {
            "data-path": str(paths[number]),
            "state-dir": str(folder / f"device-{number}"),
            "client": "abcdefgh"[number],
            "seed-secret": number,
        }
        return {key: value for key, value in {**own, **config}.items() if value is not None}

    return LocalGrid(client_app, nodes, {}, node_config=of_node)


def start(output: Path, grid: LocalGrid, strategy: str = "fedavg", overrides: str = "", **config: Any) -> None:
    """A run of own-data into `output`; the catalogue is beside the nodes' files."""
    catalogue = f"dataset.catalogue={output.parent / 'items.csv'}" if "catalogue=" not in overrides else ""
    options = (
        f"{OPTIONS} dataset.clients.number={len(grid.contexts)} server.connect_timeout=0.5 {catalogue} {overrides}"
    )
    run_config = {
        **DEFAULT_RUN_CONFIG,
        "dataset": "own-data",
        "strategy": strategy,
        "output-dir": str(output),
        "overrides": options,
        **config,
    }
    server_app(grid, Context(1, 1, {}, RecordDict(), run_config))


def forget(grid: LocalGrid, client: int) -> None:
    """What a restart of a SuperNode does: the node's memory is gone."""
    context = list(grid.contexts.values())[client]
    context.state, context.live = RecordDict(), None


def restarting(grid: LocalGrid, client: int, before: str, round_: int) -> Any:
    """A fault: a node is restarted just before it gets the message of a stage in a round."""

    def fault(message: Any, number: int) -> None:
        hit = message.metadata.message_type == before and message.metadata.group_id == f"round-{round_}"
        if number == client and hit:
            forget(grid, client)

    return fault
