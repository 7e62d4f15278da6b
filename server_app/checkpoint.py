"""Files of a run: history, server checkpoint, result. Everything is written atomically or appended line by line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhur_app.files import read_arrays, write_arrays, write_json, write_text

CHECKPOINT_FORMAT = 2  # 2: sums of AUC


class CheckpointError(RuntimeError):
    """A checkpoint that is missing or cannot be read."""


@dataclass(frozen=True)
class RunFolder:
    """The output directory of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """All resolved settings, versions and the data fingerprint."""
        return self.path / "config.yaml"

    @property
    def history(self) -> Path:
        """One JSON object a round."""
        return self.path / "history.jsonl"

    @property
    def result(self) -> Path:
        """The outcome."""
        return self.path / "result.json"

    @property
    def checkpoint(self) -> Path:
        """Folder of the server's state and, in simulation, the clients' private states."""
        return self.path / "checkpoint"

    @property
    def states(self) -> Path:
        """Folder of the clients' states between messages, under Flower's simulation and while the run lasts."""
        return self.path / "states"

    def append_history(self, line: dict[str, Any]) -> None:
        """Add one round."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.history.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def read_history(self, last_round: int) -> list[dict[str, Any]]:
        """Rounds 1 to `last_round`; a half-written last line (of a killed run) is ignored.

        Raises:
            CheckpointError: Another line is damaged.
        """
        rounds = []
        lines = self.history.read_bytes().splitlines() if self.history.is_file() else []
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                known = line["round"] <= last_round
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):
                    break
                raise CheckpointError(
                    f"{self.history}, line {number} is damaged: the run cannot be resumed; repair it or start anew"
                ) from error
            if known:
                rounds.append(line)
        return rounds

    def rewrite_history(self, rounds: list[dict[str, Any]]) -> None:
        """Replace the history (on a resume: drop what lies beyond the checkpoint)."""
        write_text(self.history, "".join(json.dumps(line) + "\n" for line in rounds))

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json."""
        write_json(self.result, result)

    def save_users(self, records: list[dict[str, Tensor]]) -> None:
        """Write users.npz: number of each user in the data set, rising, client, training rows, test metrics."""
        columns = {name: torch.cat([record[name] for record in records]).numpy() for name in records[0]}
        order = np.argsort(columns["user"], kind="stable")
        write_arrays(self.path / "users.npz", {name: column[order] for name, column in columns.items()})

    def save_server(self, progress: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Write the server's checkpoint: `progress` (plain values) and the strategy's arrays."""
        header = json.dumps({"format": CHECKPOINT_FORMAT, **progress})
        write_arrays(self.checkpoint / "server.npz", {"_progress": np.array(header), **arrays})

    def load_server(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Read what :meth:`save_server` wrote.

        Raises:
            CheckpointError: There is no readable checkpoint.
        """
        path = self.checkpoint / "server.npz"
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist: the run in {self.path} has no checkpoint (it ended before its first round, "
                "or server.checkpoint_every is 0). Start it anew in another folder"
            )
        try:
            arrays = read_arrays(path)
            progress = json.loads(str(arrays.pop("_progress")))
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}): the run cannot be resumed; start it anew elsewhere"
            ) from error
        if progress.pop("format") != CHECKPOINT_FORMAT:
            raise CheckpointError(f"{path} was written by another version of fedhur: the run cannot be resumed")
        return progress, arrays
