import numpy as np
import pytest

from fedhur_app.data.attributes import attributes_of, attributes_path, load_attributes
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.shards import prepare
from fedhur_app.data.store import write_npz

GENRES = {"1": ["War", "Drama"], "2": [], "4": ["Drama", "Drama"]}
# Items 1, 2, 3, 4; genres Drama, War.
EXPECTED = [[1, 1], [0, 0], [0, 0], [1, 0]]


def prepared(folder, genres):
    data = from_raw("x", [1, 1, 2, 2], [1, 2, 3, 4], item_genres=genres)
    return prepare(data, "random", (0.5, 0.0, 0.5), "id", 2, 1, folder)


def test_items_by_sorted_genres(tmp_path):
    of_data, names = attributes_of(from_raw("x", [1, 1, 2, 2], [1, 2, 3, 4], item_genres=GENRES))
    assert names == ("Drama", "War")
    place = prepared(tmp_path, GENRES)
    loaded = load_attributes(place.folder)
    assert place.n_attributes == 2
    for matrix in (of_data, loaded):
        assert matrix.dtype == np.float32
        assert matrix.toarray().tolist() == EXPECTED
        assert matrix.has_sorted_indices
        assert matrix.nnz == 3


@pytest.mark.parametrize("genres", [None, {}, {"1": [], "9": ["War"]}])
def test_without_genres_there_are_none(tmp_path, genres):
    place = prepared(tmp_path, genres)
    assert place.n_attributes == 0
    assert not attributes_path(place.folder).exists()
    assert load_attributes(place.folder) is None


@pytest.mark.parametrize(
    "arrays",
    [
        {"indices": np.array([0])},
        {"indices": np.array([2]), "indptr": np.array([0, 1]), "names": np.array(["a", "b"])},
        {"indices": np.array([0]), "indptr": np.array([0, 2]), "names": np.array(["a", "b"])},
    ],
)
def test_a_file_that_cannot_be_right_is_named(tmp_path, arrays):
    write_npz(attributes_path(tmp_path), "fedhur-attributes 1", arrays)
    with pytest.raises(DataError, match=r"attributes\.npz is incomplete or contradicts itself"):
        load_attributes(tmp_path)
    attributes_path(tmp_path).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"attributes\.npz is damaged"):
        load_attributes(tmp_path)
