"""Private state of a client: its tables and what it remembers between messages.

Schema (version 2: with a checksum and `about`). Array records: `model` (every parameter of the local recommender, such
as `users` and `items`), `best` (the same at the best validation round, absent while the present model is the best),
`optimizer` (moments, where they are kept), and what an algorithm keeps for its next round (`start` and `guide` of
GPFedRec, `labels` of CoFedRec, `global` and `adversary` of FeCoSR; `best_validation` with `evaluation.selection:
client`). Numbers: `client`, `trained_round` (last round in which it trained), `finished_round` (last round whose last
stage it saw), `best_round` (round of `best`). On a device also `secret` (mixed into its draws), `tested_round` (whose
model was tested) and, where it lost what it had learnt, `kept` and `lost`: its model is that of round `kept`, while it
had trained until round `lost`.

In memory the state lives in Flower's `context.state` (in the local runtime beside it, as it is; in a simulation under
Flower the context says in which files its tensors are, state_files.py); on disk in one .npz a client and round, with a
checksum over everything, and on a device with what it belongs to (`about`: run, node, catalogue, users, settings). It
never leaves the device in a message. Beside it the context holds the `place`: where the server of a simulation keeps
shards, checkpoints and these files, or what a device is in its run, told once in the handshake.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context
from torch import Tensor

from client_app.state_files import StateFiles
from fedhur_app.files import read_arrays, write_arrays
from fedhur_app.protocol import InProcessContext, array_record, tensors_of

SCHEMA = 2
_NUMBERS = "numbers"
_FILES = "files"
_PLACE = "place"


class StateError(RuntimeError):
    """Private state that is missing, damaged or of another schema."""


@dataclass
class ClientState:
    """Everything a client keeps. `numbers` start at 0."""

    arrays: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    # In a simulation under Flower: where the arrays came from.
    files: StateFiles | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_context(cls, context: Context) -> "ClientState":
        """Read the state of this node; an empty state if there is none yet."""
        if isinstance(context, InProcessContext):
            return context.live.copy() if context.live else cls()
        if _NUMBERS not in context.state.config_records:
            return cls()
        stored = context.state.config_records[_NUMBERS]
        _check_schema(int(stored["schema"]), "the node's memory")  # type: ignore[arg-type]
        numbers = {key: int(value) for key, value in stored.items() if key != "schema"}  # type: ignore[arg-type]
        if (folder := _folder_of(context)) is not None:
            files = StateFiles.from_text(folder, str(context.state.config_records[_FILES]["text"])).load()
            return cls({record: dict(tensors) for record, tensors in files.read.items()}, numbers, files)
        return cls({name: tensors_of(record) for name, record in context.state.array_records.items()}, numbers)

    def to_context(self, context: Context) -> None:
        """Replace the node's state by this one (called only when a stage ended well)."""
        if isinstance(context, InProcessContext):
            context.live = self.copy()
            return
        if (folder := _folder_of(context)) is not None:
            files = (self.files or StateFiles(folder)).write(self.arrays)
            context.state[_FILES] = ConfigRecord({"text": files.to_text()})
        else:
            for name in list(context.state.array_records):
                del context.state[name]
            for name, tensors in self.arrays.items():
                context.state[name] = array_record(tensors)
        context.state[_NUMBERS] = ConfigRecord({"schema": SCHEMA, **self.numbers})

    def copy(self) -> "ClientState":
        """A state that can be changed without changing this one; tensors are shared, nobody writes into them."""
        arrays = {name: dict(tensors) for name, tensors in self.arrays.items()}
        return ClientState(arrays, dict(self.numbers), self.files)

    def save(self, path: Path, durable: bool, about: Mapping[str, str] | None = None) -> None:
        """Write the state to `path` atomically, with what it belongs to."""
        flat = {
            f"{record}|{name}": tensor.cpu().numpy()
            for record, tensors in self.arrays.items()
            for name, tensor in tensors.items()
        }
        header = {
            "schema": SCHEMA,
            "about": dict(about or {}),
            "numbers": self.numbers,
            "records": sorted(self.arrays),  # also those without arrays, as models without parameters are
        }
        text = json.dumps(header | {"checksum": _checksum(header, flat)})
        write_arrays(path, {_NUMBERS: np.array(text), **flat}, durable)

    @classmethod
    def load(cls, path: Path) -> "ClientState":
        """Read a state that :meth:`save` wrote.

        Raises:
            StateError: The file is damaged or was written by another version.
        """
        return cls.read(path)[0]

    @classmethod
    def read(cls, path: Path) -> tuple["ClientState", dict[str, str]]:
        """As :meth:`load`, with what the state belongs to."""
        try:
            flat = read_arrays(path)
            header = json.loads(str(flat.pop(_NUMBERS)))
            schema = header["schema"]
        except Exception as error:
            raise _unreadable(path, type(error).__name__) from error
        _check_schema(schema, str(path))
        if header.pop("checksum", "") != _checksum(header, flat):
            raise _unreadable(path, "its checksum is wrong")
        state = cls({record: {} for record in header["records"]}, header["numbers"])
        for key, array in flat.items():
            record, _, name = key.partition("|")
            state.arrays[record][name] = _tensor(array)
        return state, header["about"]


def _unreadable(path: Path, why: str) -> StateError:
    return StateError(f"{path} is not a readable client state ({why}): delete it to start this client anew")


def _checksum(header: Mapping[str, object], flat: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the header and every array's name, type, shape and values."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(flat):
        array = flat[name]
        digest.update(f"|{name} {array.dtype.str} {array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def set_place(context: Context, place: dict[str, str]) -> None:
    """Remember the paths that the handshake named."""
    context.state[_PLACE] = ConfigRecord(dict(place))


def get_place(context: Context) -> dict[str, str]:
    """What :func:`set_place` remembered; empty before the handshake."""
    return {key: str(value) for key, value in context.state.config_records.get(_PLACE, {}).items()}


def _folder_of(context: Context) -> Path | None:
    """Where a simulation keeps the tensors of this node's state between messages."""
    folder = get_place(context).get("states")
    return Path(folder) / f"node-{context.node_id}" if folder else None


def _tensor(array: np.ndarray) -> Tensor:
    return tensors_of(array_record({"x": array}))["x"]


def _check_schema(found: int, where: str) -> None:
    if found != SCHEMA:
        raise StateError(f"{where} holds client state of schema {found}, this version reads {SCHEMA}")


@dataclass(frozen=True)
class StateFolder:
    """States of clients on disk: `<folder>/client-00007/round-00012.npz`.

    The server's checkpoint of round t is written after all clients finished round t, so a killed run may leave
    client files of round t + 1 beside a server that stands at t: the two newest files are kept, and a resume takes
    the newest that is not younger than the server's round. A device writes a file in every round, whatever the server
    keeps: of these two more are kept, the newest of rounds with a checkpoint.
    """

    folder: Path
    durable: bool

    def save(
        self, state: ClientState, client: int, round_: int, about: Mapping[str, str] | None = None, every: int = 1
    ) -> None:
        """Write the state as of `round_` and remove what nobody can ask for any more.

        Args:
            state: The state.
            client: Whose it is.
            round_: The round.
            about: What it belongs to.
            every: Rounds between two checkpoints of the server; 0: it keeps none.
        """
        path = self._file(client, round_)
        state.save(path, self.durable, about)
        files = [file for file in self._files(client) if file <= path]
        resumable = [file for file in files if every and _round(file) % every == 0]
        for file in {*files} - {*files[-2:], *resumable[-2:]}:
            file.unlink(missing_ok=True)

    def load(self, client: int, round_: int) -> ClientState | None:
        """The newest state that is not younger than `round_`; None if there is none."""
        files = [file for file in self._files(client) if _round(file) <= round_]
        return ClientState.load(files[-1]) if files else None

    def newest(self, client: int, round_: int) -> Iterator[tuple[ClientState, dict[str, str]] | StateError]:
        """The states that are not younger than `round_`, newest first, or why one of them cannot be read."""
        for file in reversed([file for file in self._files(client) if _round(file) <= round_]):
            try:
                yield ClientState.read(file)
            except StateError as error:
                yield error

    def forget_after(self, client: int, round_: int) -> None:
        """Remove states of later rounds: a run that goes on from `round_` makes them anew."""
        for file in self._files(client):
            if _round(file) > round_:
                file.unlink(missing_ok=True)

    def _file(self, client: int, round_: int) -> Path:
        return self.folder / f"client-{client:05d}" / f"round-{round_:05d}.npz"

    def _files(self, client: int) -> list[Path]:
        return sorted((self.folder / f"client-{client:05d}").glob("round-*.npz"))


def _round(file: Path) -> int:
    return int(file.stem.removeprefix("round-"))
