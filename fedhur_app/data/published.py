"""Data that come with their split and their clients, as papers publish them: arrays in .npz, or one folder a client."""

import zipfile
from pathlib import Path

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions, Which, from_raw

_PARTS = ("train", "valid", "test")
_UNREADABLE = (zipfile.BadZipFile, ValueError, OSError, EOFError)
# Optional arrays of an npz file, all of one value a row.
_OF_ROWS = ("rating", "timestamp", "split", "client", "market")


def read_npz_rows(path: Path, name: str, keep_catalogue: bool = False, which: Which = "last") -> Interactions:
    """Read interactions from the arrays of an .npz file.

    Args:
        path: Holds `user` and `item` (n,), integers or text, and if they are there `rating`, `timestamp`, `split` (0
            train, 1 validation, 2 test), `client` and `market`, all (n,), and the numbers `num_users` and `num_items`.
        name: Name of the data set.
        keep_catalogue: Keep the catalogue as published: items 0..num_items-1, also those that no row names. Else the
            items of the rows are the catalogue.
        which: Of rows that repeat a pair, see :func:`fedhur_app.data.interactions.from_codes`.

    Raises:
        DataError: The file cannot be read, lacks an array, or its arrays do not fit each other.
    """
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder; an .npz file is needed")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (*_UNREADABLE, AttributeError, TypeError) as error:
        if "Object arrays" in str(error):
            raise DataError(
                f"{path}: an array holds Python objects, which are not read; save ids as text, such as "
                "np.asarray(ids, dtype=str), or as integers"
            ) from error
        raise DataError(f"{path} is damaged or is not an .npz file of arrays") from error
    for needed in ("user", "item"):
        if needed not in arrays:
            raise DataError(f"{path} has no array '{needed}' (found: {', '.join(sorted(arrays)) or 'none'})")
    for key in ("user", "item", *_OF_ROWS):
        if key in arrays and arrays[key].shape != arrays["user"].shape[:1]:
            raise DataError(f"{path}: array '{key}' is {arrays[key].shape}, 'user' {arrays['user'].shape}")
    catalogue = None
    if keep_catalogue:
        catalogue = map(str, range(_published_items(path, arrays)))
    optional = {key: arrays.get(key) for key in _OF_ROWS}
    try:
        return from_raw(
            name,
            arrays["user"],
            arrays["item"],
            optional["rating"],
            optional["timestamp"],
            markets=optional["market"],
            labels=optional["split"],
            owners=optional["client"],
            catalogue=catalogue,
            which=which,
        )
    except DataError as error:
        raise DataError(f"{path}: {str(error).removeprefix(f'{name}: ')}") from error


def _published_items(path: Path, arrays: dict[str, np.ndarray]) -> int:
    """The number of items that an npz file says its catalogue has."""
    if "num_items" not in arrays:
        raise DataError(f"{path} has no number 'num_items', so the published catalogue is not known")
    number, items = int(arrays["num_items"]), arrays["item"]
    if items.dtype.kind not in "iu" or (len(items) and not 0 <= items.min() <= items.max() < number):
        raise DataError(f"{path}: 'num_items' is {number}, but not all items are numbers in 0..{number - 1}")
    return number


def read_matrix_folders(folder: Path, name: str, keep_catalogue: bool = False) -> Interactions:
    """Read a federation in the form of FedCIA's repository: dense 0/1 matrices, one folder a client.

    Args:
        folder: Holds folders `0`, `1`, ... with `train_dataset.npy`, `valid_dataset.npy` and `test_dataset.npy`, each
            (users of the client, items). Names that are no numbers are passed over.
        name: Name of the data set. User `r` of client `k` is called `k/r`, the item of column `i` is called `i`.
        keep_catalogue: Keep the columns without any interaction as items.

    Raises:
        DataError: No such folders, a file that is missing or no matrix of zeros and ones, matrices that do not fit
            each other, an interaction in two parts of the split.
    """
    folder = Path(folder)
    numbers = sorted(int(path.name) for path in folder.glob("*") if path.is_dir() and path.name.isdecimal())
    if not numbers:
        raise DataError(f"{folder} holds no folders 0, 1, ... with {_PARTS[0]}_dataset.npy and so on, one a client")
    users, items, labels, owners = [], [], [], []
    columns: int | None = None
    without = 0
    for client in numbers:
        matrices = [_matrix(folder / str(client) / f"{part}_dataset.npy") for part in _PARTS]
        shapes = {matrix.shape for matrix in matrices}
        if len(shapes) > 1:
            raise DataError(f"{folder / str(client)}: the three matrices have different shapes ({sorted(shapes)})")
        if columns not in (None, matrices[0].shape[1]):
            raise DataError(
                f"{folder / str(client)}: {matrices[0].shape[1]} items, but the clients before have {columns}"
            )
        columns = matrices[0].shape[1]
        held = np.stack(matrices).sum(0)
        if (twice := np.argwhere(held > 1)).size:
            row, column = twice[0]
            raise DataError(f"{folder / str(client)}: row {row}, item {column} is in two parts of the split")
        without += int((held.sum(1) == 0).sum())
        for label, matrix in enumerate(matrices):
            rows, item = np.nonzero(matrix)
            users.append(np.array([f"{client}/{row}" for row in range(len(matrix))])[rows])
            items.append(item)
            labels.append(np.full(len(rows), label, dtype=np.int8))
            owners.append(np.full(len(rows), client))
    catalogue = map(str, range(columns or 0)) if keep_catalogue else None
    notes = [f"{without} user{'s' * (without > 1)} without any interaction: left out"] if without else []
    columns_of_rows = [np.concatenate(part) for part in (users, items, labels, owners)]
    return from_raw(
        name,
        columns_of_rows[0],
        columns_of_rows[1],
        labels=columns_of_rows[2],
        owners=columns_of_rows[3],
        catalogue=catalogue,
        notes=notes,
    )


def _matrix(path: Path) -> np.ndarray:
    """A matrix of zeros and ones as booleans."""
    try:
        matrix = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except _UNREADABLE as error:
        raise DataError(f"{path} is damaged or is not an .npy file") from error
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or matrix.dtype.kind not in "biuf":
        raise DataError(f"{path} is not a matrix of numbers (users, items)")
    if (other := np.argwhere((matrix != 0) & (matrix != 1))).size:
        row, column = other[0]
        raise DataError(f"{path}: row {row}, column {column} is {matrix[row, column]}; 0 or 1 are expected")
    return matrix != 0
