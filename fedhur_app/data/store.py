"""Files that are either whole or absent: npz archives with a format mark, data sets, folders published by rename."""

import json
import math
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import polars as pl

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.files import ARRAY_HEADERS

# Sizes in bytes: a zip member's fixed header, and the extra field that zipfile adds for members of any size.
_LOCAL_HEADER, _ZIP64_EXTRA = 30, 20
_ALIGNMENT = 64
# numpy answers foreign and damaged content in as many ways, and none of them names the file.
_UNREADABLE = (zipfile.BadZipFile, struct.error, ValueError, OSError, EOFError, AttributeError, TypeError)
_DATA_SET = "fedhur-dataset 1"
_FILES = ("interactions.parquet", "users.parquet", "items.parquet", "card.json")
# Columns of the tables, and the attributes of Interactions that they hold.
_ROW_COLUMNS = {"rating": "ratings", "timestamp": "timestamps", "label": "labels"}
_OF_USERS = {"market": "user_markets", "client": "owner"}
_USER_TABLE = {"id", *_OF_USERS}


def write_npz(path: Path, form: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to `path` with a mark of their form; a reader never sees half a file.

    It is an ordinary .npz file without compression, in which the values of each array begin at a multiple of 64 bytes,
    so that :func:`read_npz` can map them into memory.

    Args:
        path: File to write; its folder must exist.
        form: Name and version of the layout, for :func:`read_npz` to compare.
        arrays: The content.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, array in {"form": np.array(form), **arrays}.items():
                member = zipfile.ZipInfo(f"{name}.npy")
                member.extra = _padding(file.tell() + _LOCAL_HEADER + len(member.filename) + _ZIP64_EXTRA)
                with archive.open(member, "w", force_zip64=True) as content:
                    np.lib.format.write_array(content, np.asarray(array, order="C"), allow_pickle=False)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _padding(offset: int) -> bytes:
    """An extra field of a zip member (that readers pass over) after which `offset` is a multiple of 64."""
    missing = -(offset + 4) % _ALIGNMENT
    return struct.pack(f"<HH{missing}x", 0xD935, missing)


def read_npz(path: Path, form: str) -> dict[str, np.ndarray]:
    """Map all arrays that :func:`write_npz` wrote into memory.

    Their pages belong to the file: processes share them, and the system takes them back when memory is short. Writing
    to an array changes the copy in this process only. The checksums of the file are compared once, here.

    Raises:
        DataError: The file is missing, damaged, or holds something else; the text names it.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a file")
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            arrays = {member.filename.removesuffix(".npy"): _mapped(file, member) for member in archive.infolist()}
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


def _mapped(file: BinaryIO, member: zipfile.ZipInfo) -> np.ndarray:
    """One array of an .npz file, mapped into memory (or read, where it is compressed, empty or holds no numbers).

    Raises:
        ValueError: The bytes are not those that were written, or no array of plain values.
    """
    file.seek(member.header_offset)
    header = struct.unpack("<4s22x2H", file.read(_LOCAL_HEADER))
    start = member.header_offset + _LOCAL_HEADER + header[1] + header[2]
    if header[0] != b"PK\3\4" or member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("not the form that write_npz writes")
    file.seek(start)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"unknown version of the array format: {version}")
    with ARRAY_HEADERS:
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    offset = file.tell()
    end = offset + math.prod(shape) * dtype.itemsize
    if dtype.hasobject or fortran or end != start + member.file_size:
        raise ValueError("not an array of plain values, or of another size than it says")
    whole = np.memmap(file, np.uint8, "c", start, (member.file_size,))
    if zlib.crc32(whole.data) != member.CRC:
        raise ValueError("checksum")
    # A plain array over the same pages: memmap's own class would follow every slice.
    return np.ndarray(shape, dtype, buffer=whole, offset=offset - start)


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


def save_interactions(folder: Path, data: Interactions, card: Mapping[str, Any] | None = None) -> None:
    """Write a data set into a folder: three parquet tables, and a card about them (docs/data.md).

    Args:
        folder: An empty folder; :func:`publish` gives it its name when all is written.
        data: The data set.
        card: What is known about the origin, ready for JSON: source, licence, files, filters.

    Raises:
        DataError: A column of users has a name that the table of users keeps for itself.
    """
    if taken := sorted(set(data.user_columns) & _USER_TABLE):
        raise DataError(f"{data.name}: a column of users cannot be called {taken[0]!r}; rename it in the file")
    rows = {"user": data.users.astype(np.int32), "item": data.items.astype(np.int32)}
    rows |= {column: value for column, name in _ROW_COLUMNS.items() if (value := getattr(data, name)) is not None}
    users: dict[str, Any] = {"id": data.user_ids}
    users |= {column: value for column, name in _OF_USERS.items() if (value := getattr(data, name)) is not None}
    items: dict[str, Any] = {"id": data.item_ids}
    if data.item_titles is not None:
        items["title"] = data.item_titles
    if data.item_genres is not None:
        items["genres"] = pl.Series(list(map(list, data.item_genres)), dtype=pl.List(pl.String))
    pl.DataFrame(rows).write_parquet(folder / "interactions.parquet")
    pl.DataFrame(users | dict(data.user_columns)).write_parquet(folder / "users.parquet")
    pl.DataFrame(items).write_parquet(folder / "items.parquet")
    content = {
        "form": _DATA_SET,
        "name": data.name,
        **(card or {}),
        "statistics": {"users": data.n_users, "items": data.n_items, "interactions": len(data)},
        "notes": list(data.notes),
        "fingerprint": data.fingerprint(),
    }
    (folder / "card.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a data set's folder.

    Raises:
        DataError: There is none, or it is damaged or of another form.
    """
    path = Path(folder) / "card.json"
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is missing or damaged; delete {folder}, then fetch or import it again") from error
    if not isinstance(card, dict) or card.get("form") != _DATA_SET:
        raise DataError(f"{path} is not the card of a data set of this version; fetch or import the data again")
    return card


def load_interactions(folder: Path) -> Interactions:
    """Read back what :func:`save_interactions` wrote.

    Raises:
        DataError: A file is missing or damaged, or its content is not what the card's fingerprint says.
    """
    card = read_card(folder)
    rows, users, items = (_read_table(folder / f"{name}.parquet") for name in ("interactions", "users", "items"))
    try:
        genres = items["genres"].to_list() if "genres" in items.columns else None
        data = Interactions(
            name=card["name"],
            users=rows["user"].to_numpy().astype(np.int64),
            items=rows["item"].to_numpy().astype(np.int64),
            user_ids=_text(users["id"]),
            item_ids=_text(items["id"]),
            **{name: _numbers(rows, column) for column, name in _ROW_COLUMNS.items()},
            item_titles=_text(items["title"]) if "title" in items.columns else None,
            item_genres=None if genres is None else tuple(map(tuple, genres)),
            user_columns={name: _text(users[name]) for name in users.columns if name not in _USER_TABLE},
            user_markets=_text(users["market"]) if "market" in users.columns else None,
            owner=_numbers(users, "client"),
            notes=tuple(card["notes"]),
        )
        intact = data.fingerprint() == card["fingerprint"]
    except (pl.exceptions.PolarsError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the tables in {folder} are incomplete; delete it, then fetch or import it again") from error
    if not intact:
        raise DataError(f"the tables in {folder} were changed or damaged; delete it, then fetch or import it again")
    return data


def is_data_set(folder: Path) -> bool:
    """Whether a folder holds a whole data set; its content is not checked."""
    return all((folder / name).is_file() for name in _FILES)


def _read_table(path: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(path, use_statistics=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path} is missing or damaged; delete {path.parent}, then fetch or import it again") from error


def _text(column: pl.Series) -> np.ndarray:
    return column.to_numpy().astype(str)


def _numbers(table: pl.DataFrame, column: str) -> np.ndarray | None:
    return table[column].to_numpy() if column in table.columns else None
