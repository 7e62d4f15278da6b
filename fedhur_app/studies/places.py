"""Runs of a study by their folders, `runs/<data>/<arm>/seed-<seed>`, for reports on the files of workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class HasFolder(Protocol):
    """A run, as the study's runner knows it."""

    @property
    def folder(self) -> Path:
        """Its output folder."""
        ...


@dataclass(frozen=True)
class Place:
    """Where the files of one run lie.

    Attributes:
        data: Label of the data.
        arm: Name of the arm.
        seed: Seed of the run.
        folder: Its folder.
    """

    data: str
    arm: str
    seed: int
    folder: Path


def places_of(runs: Sequence[HasFolder]) -> list[Place]:
    """The runs' places, in their order.

    Raises:
        ValueError: A folder that is not named as those of a study are.
    """
    found = []
    for run in runs:
        folder = Path(run.folder)
        word, _, seed = folder.name.partition("-")
        if word != "seed" or not seed.isdecimal():
            raise ValueError(f"{folder} is no folder of a study's run: its name should be seed-<number>")
        found.append(Place(folder.parents[1].name, folder.parent.name, int(seed), folder))
    return found
