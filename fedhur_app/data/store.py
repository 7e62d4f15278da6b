"""Files that are either whole or absent: npz archives with a format mark, folders published by rename."""

import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions

_INTERACTIONS = "fedhur-interactions 1"
# numpy answers foreign and damaged content in as many ways, and none of them names the file.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, AttributeError, TypeError)
_OPTIONAL_ARRAYS = ("ratings", "timestamps", "item_titles", "user_zip_codes", "user_markets")


def write_npz(path: Path, form: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to `path` with a mark of their form; a reader never sees half a file.

    Args:
        path: File to write; its folder must exist.
        form: Name and version of the layout, for :func:`read_npz` to compare.
        arrays: The content.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            content: dict[str, Any] = {"form": np.array(form), **arrays}
            np.savez(file, allow_pickle=False, **content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_npz(path: Path, form: str) -> dict[str, np.ndarray]:
    """Read all arrays that :func:`write_npz` wrote.

    Raises:
        DataError: The file is missing, damaged, or holds something else; the text names it.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a file")
    try:
        # Opened here, because np.load leaves a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; prepare or fetch the data again") from None
    except PermissionError:
        raise DataError(f"{path} cannot be read: no permission") from None
    except _UNREADABLE as error:
        kind = form.split()[0]
        raise DataError(f"{path} is damaged or is not a {kind} file; delete it and try again") from error
    found = str(arrays.pop("form", "no mark"))
    if found != form:
        raise DataError(f"{path} is not a '{form}' file (it says '{found}'); delete it and try again")
    return arrays


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A private folder inside `parent` (made if absent), gone afterwards unless it was published."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=".new-"))
    except OSError as error:
        raise DataError(
            f"cannot write to {parent} ({error.strerror}): set FEDHUR_DATA to a folder that can be written"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path, is_complete: Callable[[Path], bool]) -> None:
    """Give a finished folder its final name by one rename, also when other processes do the same at once.

    Where another process was first and its folder is complete, that one stays; an incomplete one is replaced.

    Args:
        folder: The finished folder, on the same file system.
        final: The name that readers look for.
        is_complete: Tells whether a folder found at `final` can be used.
    """
    for _ in range(10):
        try:
            os.rename(folder, final)
            return
        except OSError:
            if not final.exists():
                raise
        if is_complete(final):
            return
        with temporary_folder(final.parent) as trash:
            # Moving is atomic, deleting in place is not; another process may have moved it already.
            try:
                os.rename(final, trash / "incomplete")
            except FileNotFoundError:
                continue
    raise DataError(f"{final} cannot be replaced; delete it and try again")


def save_interactions(folder: Path, data: Interactions) -> None:
    """Write a data set into a folder: `interactions.npz` and `about.json`."""
    arrays = {key: getattr(data, key) for key in ("users", "items", "user_ids", "item_ids")}
    arrays |= {key: value for key in _OPTIONAL_ARRAYS if (value := getattr(data, key)) is not None}
    write_npz(folder / "interactions.npz", _INTERACTIONS, arrays)
    about = {"name": data.name, "notes": data.notes, "item_genres": data.item_genres}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def load_interactions(folder: Path) -> Interactions:
    """Read back what :func:`save_interactions` wrote.

    Raises:
        DataError: A file is missing or damaged; the text names it.
    """
    arrays = read_npz(folder / "interactions.npz", _INTERACTIONS)
    about_file = folder / "about.json"
    try:
        about = json.loads(about_file.read_text(encoding="utf-8"))
        genres = about["item_genres"]
        return Interactions(
            name=about["name"],
            users=arrays["users"],
            items=arrays["items"],
            user_ids=arrays["user_ids"],
            item_ids=arrays["item_ids"],
            **{key: arrays.get(key) for key in _OPTIONAL_ARRAYS},
            item_genres=None if genres is None else tuple(map(tuple, genres)),
            notes=tuple(about["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{about_file} is missing or damaged; delete {folder} and fetch again") from error
