"""Atomic writing: a reader sees the old file or the new one, never half of one."""

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# Held while numpy reads the header of an array. It does so with ast.literal_eval, and CPython (seen with 3.11.7) counts
# the depth of what that builds for all threads together: two at once end, very rarely, in a SystemError.
ARRAY_HEADERS = threading.Lock()


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """Give a temporary path beside `path`; when the block ends without an error it takes the place of `path`.

    Args:
        path: The file to write; its folder is made.
        durable: Also flush to the disk, so that the file survives a loss of power.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no ordinary file and is not replaced: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            _flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make a new name in a folder survive a loss of power; the file's own content does not say that it is there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, atomically, and so that it survives a loss of power."""
    with replacing(path, durable=True) as temporary:  # made with mode 600
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, for people to read as well. A number that is not finite is refused."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file such as a run's result.json; empty if it does not exist or is not whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_arrays(path: Path, arrays: dict[str, np.ndarray], durable: bool = False) -> None:
    """Write named arrays as .npz atomically."""
    with replacing(path, durable) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what :func:`write_arrays` wrote."""
    with ARRAY_HEADERS, np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
