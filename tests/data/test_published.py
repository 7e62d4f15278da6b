import numpy as np
import pytest

from fedhur_app.data.errors import DataError
from fedhur_app.data.partition import assign_clients
from fedhur_app.data.published import read_matrix_folders, read_npz_rows
from fedhur_app.data.split import split_labels

USER, ITEM = np.array([3, 0, 3, 7], dtype=np.int32), np.array([5, 5, 1, 0], dtype=np.int32)


def npz(path, **arrays):
    np.savez(path, **({"user": USER, "item": ITEM} | arrays))
    return path


def test_an_npz_file_brings_its_split_and_its_clients(tmp_path):
    path = npz(tmp_path / "x.npz", split=np.array([0, 1, 2, 0]), client=np.array([12, 4, 12, 4]), num_items=8)
    data = read_npz_rows(path, "x")
    assert data.user_ids.tolist() == ["0", "3", "7"]
    assert data.item_ids.tolist() == ["0", "1", "5"]
    assert split_labels(data, "published").tolist() == [0, 1, 2, 0]
    assert assign_clients(data, data.labels, "published").owner.tolist() == [0, 1, 0]


def test_the_published_catalogue_can_be_kept(tmp_path):
    path = npz(tmp_path / "x.npz", num_items=np.int64(8))
    data = read_npz_rows(path, "x", keep_catalogue=True)
    assert data.item_ids.tolist() == [str(item) for item in range(8)]
    assert data.items.tolist() == ITEM.tolist()


def test_of_repeated_pairs_one_row_with_its_label_is_kept(tmp_path):
    arrays = {"user": np.array([1, 1, 2]), "item": np.array([4, 4, 4]), "split": np.array([0, 2, 1])}
    data = read_npz_rows(npz(tmp_path / "x.npz", **arrays), "x")
    assert (len(data), data.labels.tolist()) == (2, [2, 1])
    assert "1 repeated (user, item) pair" in data.notes[0]
    assert read_npz_rows(tmp_path / "x.npz", "x", which="first").labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"split": np.array([0, 1, 3, 0])}, "row 2: the split is 3"),
        ({"client": np.array([1, 1, 2, 1])}, "its user is at two clients"),
        ({"split": np.array([0, 1])}, "array 'split' is"),
        ({"user": np.array([0.5, 1, 2, 3])}, "must be integers or text"),
        ({"rating": np.array([1, np.nan, 2, 3])}, "row 1: the rating is not a finite number"),
        ({"item": np.array([{}] * 4, dtype=object)}, "an array holds Python objects"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        read_npz_rows(npz(tmp_path / "x.npz", **arrays), "x")


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 and then nonsense"])
def test_what_is_no_npz_file_is_named(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.npz is damaged or is not"):
        read_npz_rows(path, "x")
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        read_npz_rows(path, "x")
    np.savez(path, user=USER)
    with pytest.raises(DataError, match=r"no array 'item' \(found: user\)"):
        read_npz_rows(path, "x")


def test_a_catalogue_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(DataError, match="'num_items' is 3, but not all items"):
        read_npz_rows(npz(tmp_path / "x.npz", num_items=3), "x", keep_catalogue=True)
    with pytest.raises(DataError, match="no number 'num_items'"):
        read_npz_rows(npz(tmp_path / "y.npz"), "y", keep_catalogue=True)


def folders(root, clients):
    """Folders of clients in FedCIA's form; `clients` maps a number to its matrix of labels, -1 for nothing."""
    for client, labels in clients.items():
        (root / str(client)).mkdir()
        for label, part in enumerate(("train", "valid", "test")):
            np.save(root / str(client) / f"{part}_dataset.npy", (np.array(labels) == label).astype(np.float32))
    return root


TWO = {0: [[0, -1, 1, -1], [-1, -1, -1, -1]], 2: [[-1, -1, 0, 2]]}


def test_matrices_become_rows_with_label_and_client(tmp_path):
    (tmp_path / "about").mkdir()
    data = read_matrix_folders(folders(tmp_path, TWO), "x")
    assert data.user_ids.tolist() == ["0/0", "2/0"]
    assert data.item_ids.tolist() == ["0", "2", "3"]
    assert (data.users.tolist(), data.items.tolist(), data.labels.tolist()) == (
        [0, 0, 1, 1],
        [0, 1, 1, 2],
        [0, 1, 0, 2],
    )
    assert data.owner.tolist() == [0, 1]
    assert data.notes == ("1 user without any interaction: left out",)
    assert read_matrix_folders(tmp_path, "x", keep_catalogue=True).n_items == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: np.save(root / "0/valid_dataset.npy", np.zeros((2, 5))), "three matrices have different shapes"),
        (lambda root: np.save(root / "2/test_dataset.npy", np.array([[0, 0, 1, 1.0]])), "item 2 is in two parts"),
        (lambda root: np.save(root / "2/test_dataset.npy", np.array([[0, 0, 0.5, 1]])), "row 0, column 2 is 0.5"),
        (lambda root: np.save(root / "2/test_dataset.npy", np.array([[0, 0, np.nan, 1]])), "row 0, column 2 is nan"),
        (lambda root: np.save(root / "2/test_dataset.npy", np.zeros(4)), "not a matrix of numbers"),
        (lambda root: (root / "2/test_dataset.npy").write_bytes(b"x"), "damaged or is not an .npy"),
        (lambda root: (root / "2/test_dataset.npy").unlink(), "does not exist"),
    ],
)
def test_wrong_matrices_are_refused(tmp_path, change, message):
    change(folders(tmp_path, TWO))
    with pytest.raises(DataError, match=message):
        read_matrix_folders(tmp_path, "x")


def test_clients_with_other_catalogues_are_refused(tmp_path):
    with pytest.raises(DataError, match="3 items, but the clients before have 4"):
        read_matrix_folders(folders(tmp_path, TWO | {3: [[0, 1, 2]]}), "x")


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no folders 0, 1"):
        read_matrix_folders(tmp_path, "x")


def test_data_without_a_split_or_clients_have_none_to_offer(tmp_path):
    data = read_npz_rows(npz(tmp_path / "x.npz"), "x")
    with pytest.raises(DataError, match="x came without a split"):
        split_labels(data, "published")
    with pytest.raises(DataError, match="x came without clients"):
        assign_clients(data, np.zeros(4), "published")
