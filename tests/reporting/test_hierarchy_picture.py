from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from fedhur_app.config import DEFAULT_RUN_CONFIG, ConfigError, settings_of_run
from fedhur_app.data.experiment import load_interactions_of
from fedhur_app.relations.hierarchy import Hierarchy, Level
from fedhur_app.reporting.hierarchy_picture import Group, draw_bands, draw_tree, example_tree, relation_bands
from fedhur_app.studies.workers.relations import collect_relations

# Items 0-3 and 4-5; the first group is split into {0}, {1}, {2, 3}, the second into {4, 5}.
COARSE = Level.from_labels(torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0]))
FINE = Level.from_labels(torch.tensor([0, 1, 2, 2, 3, 3]), torch.tensor([0, 0, 0, 1]))
TREE = Hierarchy((COARSE, FINE))
TITLES = ["zero", "one", "two", "three", "four", "five $5 $6"]


def test_the_tree_shows_the_largest_groups_and_their_most_popular_titles() -> None:
    tree = example_tree(TREE, TITLES, np.array([9, 8, 1, 5, 2, 2]), shown=(2, 2), examples=1)
    assert tree == Group(
        6,
        [],
        [
            Group(4, [], [Group(2, ["three"]), Group(1, ["zero"])], left_out=1),
            Group(2, [], [Group(2, ["four"])]),
        ],
    )
    assert example_tree(TREE, TITLES, np.arange(6), shown=(1,), examples=2) == Group(
        6, [], [Group(4, ["three", "two"])], left_out=1
    )


def test_titles_and_items_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="has 6 items, but there are 5 titles"):
        example_tree(TREE, TITLES[:5], np.arange(6))


def test_the_band_of_a_level_is_that_of_the_block_that_holds_the_item() -> None:
    rng = np.random.default_rng(1)
    alphas = [rng.random((1, 3, 3)), rng.random((2, 3, 3))]
    for item, block in ((0, 0), (3, 0), (4, 1), (5, 1)):
        expected = np.stack([alphas[0][0, 2], alphas[1][block, 2]])
        assert np.array_equal(relation_bands(TREE, alphas, item, target=2), expected)
    with pytest.raises(ValueError, match=r"has \[1, 2\] blocks by level, the weights \[2\]"):
        relation_bands(TREE, alphas[1:], 0, 0)


def words(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_pictures_are_written_as_their_suffix_says(tmp_path: Path) -> None:
    tree = example_tree(TREE, TITLES, np.arange(6), shown=(2, 2))
    draw_tree(tree, tmp_path / "tree.svg")
    ElementTree.parse(tmp_path / "tree.svg")
    # Titles are drawn as shapes, with their text beside them as a comment.
    for text in ("five $5 $6", "three", "and 1 more"):
        assert text in words(tmp_path / "tree.svg").replace(r"\$", "$")
    bands = {title: np.random.default_rng(2).random((2, 3)) for title in ("a $x", "b")}
    draw_bands(bands, [4, 7, 9], 1, tmp_path / "bands.svg")
    assert "client 7, which is helped" in words(tmp_path / "bands.svg")
    draw_bands(bands, [4, 7, 9], 1, tmp_path / "bands.png")
    assert (tmp_path / "bands.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def small() -> dict[str, Any]:
    return {
        "dataset": "synthetic", "strategy": "fedhur", "seed": 1,
        "overrides": "rounds=2 min_rounds=1 dataset.clients.number=4 dataset.synthetic.users=24 "
        "dataset.synthetic.items=40 dataset.synthetic.interactions_per_user=12 hierarchy.branching=[3,2] "
        "train.epochs=1 model.dim=8",
    }  # fmt: skip


def test_relations_come_out_of_a_run(small: dict[str, Any]) -> None:
    found = collect_relations(small)
    assert found.round == 2
    assert found.clients == [0, 1, 2, 3]
    assert [alpha.shape for alpha in found.alphas] == [(1, 4, 4), (3, 4, 4)]
    for alpha in found.alphas:
        assert alpha.sum(axis=-1) == pytest.approx(np.ones(alpha.shape[:2]), abs=1e-5)
    assert found.hierarchy.n_items == len(found.titles) == len(found.popularity) == 40
    assert found.titles[0].startswith("item ")
    data = load_interactions_of(settings_of_run({**DEFAULT_RUN_CONFIG, **small}))
    assert found.popularity.tolist() == [int((data.items == item).sum()) for item in range(40)]
    assert relation_bands(found.hierarchy, found.alphas, 5, 0).shape == (2, 4)


def test_a_run_without_relations_is_an_error(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no relations in round 9"):
        collect_relations(small, wanted=9)
    with pytest.raises(ConfigError, match=r"here none"):
        collect_relations(small | {"strategy": "fedcia"})
