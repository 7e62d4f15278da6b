"""Report of the study `hierarchy`: what the groups of items look like, and whom a client listens to for two items."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from fedhur_app.reporting.tables import Table, number_text, table_markdown
from fedhur_app.studies.places import HasFolder, places_of


def report(runs: Sequence[HasFolder], folder: Path) -> str:
    """Gather the pictures of the worker `pictures` in the study's folder; returns the text of the report.

    Args:
        runs: Completed runs.
        folder: Of the study.
    """
    parts = []
    for place in places_of(runs):
        name = f"{place.data}-{place.arm}-{place.seed}"
        shutil.copyfile(place.folder / "tree.png", folder / f"tree-{name}.png")
        shutil.copyfile(place.folder / "bands.png", folder / f"bands-{name}.png")
        rows = [
            [str(level), str(groups), str(blocks), number_text(peers, 1)]
            for level, groups, blocks, peers in pl.read_csv(place.folder / "groups.csv").iter_rows()
        ]
        head = ["level", "groups", "blocks", "clients listened to"]
        parts.append(table_markdown(Table(f"{place.data}, {place.arm}, seed {place.seed}", head, rows, 1, set())))
        parts.append(
            f"![The largest groups with their most popular items, {name}](tree-{name}.png)\n\n"
            f"![Weights of all clients for two items, {name}](bands-{name}.png)\n"
        )
    parts.append(
        "Clients listened to: exponential of the weights' entropy, mean over blocks and targets. A band is a level: "
        "the weights in the block that holds the item (eq. 22); the paper's figure 2 shows the same for two items.\n"
    )
    return "\n".join(parts)
