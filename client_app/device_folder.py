"""What a device keeps in its `state-dir`.

```
client-name                  the node's name, drawn at the first start
catalogue.json               the items of the federation
rows-<key>/                  the node's rows in the numbers of the catalogue; made anew when file or catalogue change
  shard.npz, about.json      about.json: ids of the users, items that the catalogue does not have
runs/00001-<run>/            one folder a run, the newest and those before it that can be continued
  membership.json            number, settings, catalogue, rows: what a node must know after a restart
  report.json                what left the device, and how good the model was
  client-00007/round-*.npz   private state (state.py)
```

Every file appears whole, by one rename; all but the report survive a loss of power. Everything can be deleted at any
time: the node then joins again as new.
"""

import json
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from client_app.state import StateFolder
from fedhur_app.data.errors import DataError
from fedhur_app.data.item_catalogue import Catalogue
from fedhur_app.data.own_rows import Rows
from fedhur_app.data.shards import load_shard, save_shard
from fedhur_app.data.store import publish, temporary_folder
from fedhur_app.files import read_json, write_durably, write_json

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_RUN = re.compile(r"(\d{5})-([0-9a-f]+)")
_KEPT_RUNS = 3


class NodeError(ValueError):
    """A node config or a state-dir that cannot be used; the text says what to change."""


@dataclass(frozen=True)
class Membership:
    """What a node is in a run.

    Attributes:
        run: The run.
        client: Its number.
        clients: How many there are to be.
        name: Its name.
        catalogue: Fingerprint of the catalogue, "" where the node has a prepared shard and was told none.
        rows: Key of its rows, "" for a prepared shard.
        settings: The run's settings as JSON.
        options: How the node's file is read, see :func:`fedhur_app.data.own_rows.options_of_node`.
    """

    run: str
    client: int
    clients: int
    name: str
    catalogue: str
    rows: str
    settings: str
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """For the node's memory or disk."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Membership | None":
        """The inverse of :meth:`to_json`; None where the text is damaged."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True)
class DeviceRun:
    """The folder of one run."""

    folder: Path

    @property
    def states(self) -> StateFolder:
        """The private states."""
        return StateFolder(self.folder, durable=True)

    def membership(self) -> Membership | None:
        """What the node is in the run; None where that cannot be read."""
        try:
            return Membership.from_json((self.folder / "membership.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def report(self) -> dict[str, Any]:
        """What left the device and how good the model was; empty at first."""
        return read_json(self.folder / "report.json")

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Replace the report."""
        write_json(self.folder / "report.json", report)


@dataclass(frozen=True)
class DeviceFolder:
    """A `state-dir`."""

    path: Path

    def name(self) -> str:
        """The node's name, drawn at the first call.

        Raises:
            NodeError: The file does not hold a name.
        """
        file = self.path / "client-name"
        if not file.exists():
            write_durably(file, f"node-{secrets.token_hex(6)}\n".encode())
        name = file.read_text(encoding="utf-8", errors="replace").strip()
        if not NAME.fullmatch(name):
            raise NodeError(
                f"{file} does not hold a name (letters, digits, dots, dashes, underscores; at most 64): delete it"
            )
        return name

    def catalogue(self) -> Catalogue | None:
        """The federation's items, if they are known and undamaged."""
        try:
            return Catalogue.from_bytes((self.path / "catalogue.json").read_bytes())
        except (OSError, DataError):
            return None

    def save_catalogue(self, catalogue: Catalogue) -> None:
        """Replace the catalogue."""
        catalogue.save(self.path / "catalogue.json")

    def rows(self, key: str) -> Rows | None:
        """The rows that :meth:`save_rows` wrote under a key; None where they are missing or damaged."""
        try:
            return _read_rows(self.path / f"rows-{key}")
        except (DataError, OSError, ValueError, KeyError, TypeError):
            return None

    def save_rows(self, key: str, rows: Rows) -> None:
        """Write the rows and remove those of before."""
        final = self.path / f"rows-{key}"
        with temporary_folder(self.path) as workspace:
            save_shard(workspace / "shard.npz", rows.shard)
            about = {"users": rows.users, "unknown": [rows.unknown_items, rows.unknown_interactions]}
            write_durably(workspace / "about.json", json.dumps(about).encode())
            publish(workspace, final, lambda _: False)
        for other in self.path.glob("rows-*"):
            if other != final:
                shutil.rmtree(other, ignore_errors=True)

    def runs(self) -> list[DeviceRun]:
        """The folders of runs, newest first."""
        folders = [each for each in (self.path / "runs").glob("*-*") if _RUN.fullmatch(each.name)]
        return [DeviceRun(each) for each in sorted(folders, reverse=True)]

    def run(self, run: str) -> DeviceRun | None:
        """The folder of a run, if the node was in it."""
        return next((each for each in self.runs() if each.folder.name.partition("-")[2] == run), None)

    def enter_run(self, membership: Membership) -> DeviceRun:
        """Make the folder of a run, or use the one that is there, and remove those of runs long ago."""
        runs = self.runs()
        found = self.run(membership.run)
        if found is None:
            number = 1 + max((int(each.folder.name[:5]) for each in runs), default=0)
            found = DeviceRun(self.path / "runs" / f"{number:05d}-{membership.run}")
        write_durably(found.folder / "membership.json", membership.to_json().encode())
        # A run that ended before its first round holds nothing to continue from.
        others = [each for each in runs if each.folder != found.folder]
        held = [each for each in others if any(each.folder.glob("client-*/round-*.npz"))]
        for each in {*others} - {*held[: _KEPT_RUNS - 1]}:
            shutil.rmtree(each.folder, ignore_errors=True)
        return found


# Rows never change under their key.
@lru_cache(maxsize=256)
def _read_rows(folder: Path) -> Rows:
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    shard = load_shard(folder / "shard.npz")
    rows = Rows(shard, tuple(map(str, about["users"])), *map(int, about["unknown"]))
    if len(rows.users) != shard.n_users:
        raise ValueError("another number of users")
    return rows
