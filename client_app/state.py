"""Private state of a client: its tables and what it remembers between messages.

Schema (version 1). Array records: `model` (every parameter of the local recommender, such as `users` and `items`),
`best` (the same at the best validation round, absent while the present model is the best), `optimizer` (moments,
where they are kept), and what an algorithm keeps for its next round (`start` and `guide` of GPFedRec, `labels` of
CoFedRec, `global` and `adversary` of FeCoSR; `best_validation` with `evaluation.selection: client`). Numbers:
`client`, `trained_round` (last round in which it trained), `finished_round` (last round whose last stage it saw),
`best_round` (round of `best`).

In memory the state lives in Flower's `context.state` (in the local runtime beside it, as it is); on disk in one .npz a
client and round. It never leaves the device in a message. Beside it the context holds the `place`: where the server of
a simulation keeps shards and checkpoints, told once in the handshake.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context
from torch import Tensor

from fedhur_app.files import read_arrays, write_arrays
from fedhur_app.protocol import InProcessContext, array_record, tensors_of

SCHEMA = 1
_NUMBERS = "numbers"
_PLACE = "place"


class StateError(RuntimeError):
    """Private state that is missing, damaged or of another schema."""


@dataclass
class ClientState:
    """Everything a client keeps. `numbers` start at 0."""

    arrays: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_context(cls, context: Context) -> "ClientState":
        """Read the state of this node; an empty state if there is none yet."""
        if isinstance(context, InProcessContext):
            return context.live.copy() if context.live else cls()
        if _NUMBERS not in context.state.config_records:
            return cls()
        stored = context.state.config_records[_NUMBERS]
        _check_schema(int(stored["schema"]), "the node's memory")  # type: ignore[arg-type]
        return cls(
            {name: tensors_of(record) for name, record in context.state.array_records.items()},
            {key: int(value) for key, value in stored.items() if key != "schema"},  # type: ignore[arg-type]
        )

    def to_context(self, context: Context) -> None:
        """Replace the node's state by this one (called only when a stage ended well)."""
        if isinstance(context, InProcessContext):
            context.live = self.copy()
            return
        for name in list(context.state.array_records):
            del context.state[name]
        context.state[_NUMBERS] = ConfigRecord({"schema": SCHEMA, **self.numbers})
        for name, tensors in self.arrays.items():
            context.state[name] = array_record(tensors)

    def copy(self) -> "ClientState":
        """A state that can be changed without changing this one; tensors are shared, nobody writes into them."""
        return ClientState({name: dict(tensors) for name, tensors in self.arrays.items()}, dict(self.numbers))

    def save(self, path: Path, durable: bool) -> None:
        """Write the state to `path` atomically."""
        flat = {
            f"{record}|{name}": tensor.cpu().numpy()
            for record, tensors in self.arrays.items()
            for name, tensor in tensors.items()
        }
        header = json.dumps({"schema": SCHEMA, **self.numbers})
        write_arrays(path, {_NUMBERS: np.array(header), **flat}, durable)

    @classmethod
    def load(cls, path: Path) -> "ClientState":
        """Read a state that :meth:`save` wrote.

        Raises:
            StateError: The file is damaged or was written by another version.
        """
        try:
            stored = read_arrays(path)
            numbers = json.loads(str(stored.pop(_NUMBERS)))
        except Exception as error:
            raise StateError(
                f"{path} is not a readable client state ({type(error).__name__}): delete it to start this client anew"
            ) from error
        _check_schema(numbers.pop("schema"), str(path))
        state = cls(numbers=numbers)
        for key, array in stored.items():
            record, _, name = key.partition("|")
            state.arrays.setdefault(record, {})[name] = _tensor(array)
        return state


def set_place(context: Context, place: dict[str, str]) -> None:
    """Remember the paths that the handshake named."""
    context.state[_PLACE] = ConfigRecord(dict(place))


def get_place(context: Context) -> dict[str, str]:
    """What :func:`set_place` remembered; empty before the handshake."""
    return {key: str(value) for key, value in context.state.config_records.get(_PLACE, {}).items()}


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
    the newest that is not younger than the server's round.
    """

    folder: Path
    durable: bool

    def save(self, state: ClientState, client: int, round_: int) -> None:
        """Write the state as of `round_` and remove what no resume can ask for any more."""
        path = self._client(client) / f"round-{round_:05d}.npz"
        state.save(path, self.durable)
        older = [file for file in self._files(client) if file < path]
        for file in older[:-1]:
            file.unlink(missing_ok=True)

    def load(self, client: int, round_: int) -> ClientState | None:
        """The newest state that is not younger than `round_`; None if there is none."""
        last = self._client(client) / f"round-{round_:05d}.npz"
        files = [file for file in self._files(client) if file <= last]
        return ClientState.load(files[-1]) if files else None

    def _client(self, client: int) -> Path:
        return self.folder / f"client-{client:05d}"

    def _files(self, client: int) -> list[Path]:
        return sorted(self._client(client).glob("round-*.npz"))
