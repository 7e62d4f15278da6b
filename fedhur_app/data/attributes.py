"""Attributes of items for the server: what a public catalogue says about them, such as genres. No users' data."""

from pathlib import Path

import numpy as np
import scipy.sparse as sp

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.store import read_npz, write_npz

_FORM = "fedhur-attributes 1"


def attributes_path(folder: Path) -> Path:
    """The file of the attributes in a prepared folder; there is none where nothing is known about the items."""
    return Path(folder) / "attributes.npz"


def attributes_of(data: Interactions) -> tuple[sp.csr_array, tuple[str, ...]] | None:
    """Which item has which genre.

    Returns:
        float32 0/1 (I, A) with sorted columns in each row, and the names of the A genres, sorted as text: those of
        the columns. None where no item has a genre.
    """
    genres = [sorted(set(names)) for names in data.item_genres or ()]
    names = sorted({name for of_item in genres for name in of_item})
    if not names:
        return None
    column = {name: place for place, name in enumerate(names)}
    indices = np.array([column[name] for of_item in genres for name in of_item], dtype=np.int64)
    indptr = np.cumsum([0, *map(len, genres)])
    return _matrix(indices, indptr, len(names)), tuple(names)


def save_attributes(folder: Path, data: Interactions) -> int:
    """Write the attributes of a data set into a folder; returns their number A, 0 where none was written."""
    found = attributes_of(data)
    if found is None:
        return 0
    matrix, names = found
    arrays = {"indices": matrix.indices, "indptr": matrix.indptr, "names": np.array(names)}
    write_npz(attributes_path(folder), _FORM, arrays)
    return len(names)


def load_attributes(folder: Path) -> sp.csr_array | None:
    """Attributes of the items of a prepared folder.

    Returns:
        float32 0/1 (I, A), columns in the order of the sorted names; None where nothing is known about the items.

    Raises:
        DataError: The file is damaged or contradicts itself; the text names it.
    """
    path = attributes_path(folder)
    if not path.exists():
        return None
    arrays = read_npz(path, _FORM)
    try:
        matrix = _matrix(arrays["indices"], arrays["indptr"], len(arrays["names"]))
        matrix.check_format()
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is incomplete or contradicts itself; delete it and prepare the data again") from error
    return matrix


def _matrix(indices: np.ndarray, indptr: np.ndarray, columns: int) -> sp.csr_array:
    values = np.ones(len(indices), dtype=np.float32)
    return sp.csr_array((values, indices, indptr), shape=(len(indptr) - 1, columns))
