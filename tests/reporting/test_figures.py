from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from fedhur_app.reporting.figures import bands, draw_curves, project
from fedhur_app.reporting.item_tables import ItemTables

HISTORY = [
    ("a", 1, "us", 1, "ndcg@10", 0.2),
    ("a", 2, "us", 1, "ndcg@10", 0.4),
    ("a", 1, "us", 2, "ndcg@10", 0.5),
    ("a", 1, "us", 1, "auc", 0.9),
    ("a", 1, "de", 1, "ndcg@10", 0.1),
    ("b", 1, "us", 1, "ndcg@10", 0.8),
]


def test_a_line_is_the_mean_over_seeds_between_smallest_and_largest() -> None:
    assert bands(HISTORY, "us", "a", "ndcg@10") == pytest.approx(np.array([[1, 0.3, 0.2, 0.4], [2, 0.5, 0.5, 0.5]]))
    assert bands(HISTORY, "de", "b", "ndcg@10").shape == (0, 4)


def test_curves_are_drawn_as_png_and_pdf(tmp_path: Path) -> None:
    draw_curves(HISTORY, "ndcg@10", tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


def tables() -> ItemTables:
    rng = np.random.default_rng(1)
    plane = rng.normal(size=(2, 6))  # rows of a plane in six dimensions, away from the origin
    one, two, shared = (rng.normal(size=(5, 2)) @ plane + 3 for _ in range(3))
    return ItemTables({0: one, 4: two}, shared)


def test_pca_of_tables_that_lie_in_a_plane_keeps_all_distances() -> None:
    found, shared = project(tables(), "pca")
    assert list(found) == [0, 4]
    before = np.concatenate([*tables().markets.values(), tables().shared])
    assert pdist(np.concatenate([*found.values(), shared])) == pytest.approx(pdist(before))


def test_tsne_repeats_and_bounds_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhur_app.reporting.figures.TSNE_POINTS", 12)
    found, shared = project(tables(), "tsne")
    assert {xy.shape for xy in (*found.values(), shared)} == {(4, 2)}
    assert np.array_equal(project(tables(), "tsne")[1], shared)
