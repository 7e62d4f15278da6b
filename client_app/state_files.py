"""Tensors of a client's state in files that the next worker maps into memory.

Flower's simulation keeps every node's context in the server's process and sends it to one of Ray's workers and back
with every message: a pickled copy of everything that a client remembers, six times a round of FedHUR. All workers see
the run's folder anyway (shards and checkpoints lie there), so the context holds only where the tensors are. A tensor
that a stage did not replace is not written again.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhur_app.files import replacing
from fedhur_app.protocol import Arrays

# As torch aligns its own memory: some kernels round differently on other addresses.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: name of the file, first byte, numpy's name of the type, shape."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateFiles:
    """The files of one client as of one state.

    Attributes:
        folder: Where they lie.
        number: Rises with every file that is written.
        places: Place of every tensor, by record and name.
        stale: Files that the state before this one needed and this one does not. They are removed with the next
            state: a worker that dies before its answer arrives leaves the state before as the valid one.
        read: The tensors themselves, for telling which of them were replaced.
    """

    folder: Path
    number: int = 0
    places: dict[str, dict[str, Place]] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
    read: Arrays = field(default_factory=dict)

    def write(self, arrays: Arrays) -> "StateFiles":
        """Write what is new in `arrays` and remove what nobody needs any more."""
        known = {id(tensor): self.places[record][name] for record, name, tensor in _each(self.read)}
        file = f"{self.number + 1}.bin"
        new: dict[int, tuple[Place, np.ndarray]] = {}
        end = 0
        for _, _, tensor in _each(arrays):
            if id(tensor) not in known and id(tensor) not in new:
                values = np.ascontiguousarray(tensor.detach().cpu().numpy())
                start = -(-end // _ALIGNMENT) * _ALIGNMENT
                new[id(tensor)] = Place(file, start, str(values.dtype), tuple(tensor.shape)), values
                end = start + values.nbytes
        if end:
            with replacing(self.folder / file) as temporary, temporary.open("wb") as stream:
                for place, values in new.values():
                    stream.seek(place.offset)
                    stream.write(values.data)
        known |= {key: place for key, (place, _) in new.items()}
        places = {record: {name: known[id(tensor)] for name, tensor in arrays[record].items()} for record in arrays}
        needed = {place.file for _, _, place in _each(places)}
        before = {place.file for _, _, place in _each(self.places)}
        for name in set(self.stale) - needed:
            (self.folder / name).unlink(missing_ok=True)
        return StateFiles(self.folder, self.number + 1, places, tuple(sorted(before - needed)))

    def load(self) -> "StateFiles":
        """Map the tensors into memory. Writing to one changes this process's copy only."""
        mapped: dict[str, Tensor] = {}
        for file in {place.file for _, _, place in _each(self.places) if _bytes(place)}:
            path = self.folder / file
            mapped[file] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        read: Arrays = {
            record: {name: _tensor(mapped, place) for name, place in names.items()}
            for record, names in self.places.items()
        }
        return StateFiles(self.folder, self.number, self.places, self.stale, read)

    def to_text(self) -> str:
        """Everything but the folder and the tensors, for the node's context."""
        places = {
            record: {name: asdict(place) for name, place in names.items()} for record, names in self.places.items()
        }
        return json.dumps({"number": self.number, "places": places, "stale": self.stale})

    @classmethod
    def from_text(cls, folder: Path, text: str) -> "StateFiles":
        """The inverse of :meth:`to_text`."""
        plain = json.loads(text)
        places = {
            record: {name: Place(**{**place, "shape": tuple(place["shape"])}) for name, place in names.items()}
            for record, names in plain["places"].items()
        }
        return cls(folder, plain["number"], places, tuple(plain["stale"]))


def _each(nested: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    return ((record, name, value) for record, names in nested.items() for name, value in names.items())


def _bytes(place: Place) -> int:
    return int(np.prod(place.shape, dtype=np.int64)) * np.dtype(place.dtype).itemsize


def _tensor(mapped: dict[str, Tensor], place: Place) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, place.dtype)).dtype
    if not _bytes(place):
        return torch.empty(place.shape, dtype=dtype)
    part = mapped[place.file][place.offset : place.offset + _bytes(place)]
    return part.view(dtype).reshape(place.shape)
