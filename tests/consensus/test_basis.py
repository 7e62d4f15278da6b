import math

import pytest
import torch
from torch import Tensor

from fedhur_app.consensus.basis import distance, map_to_common, relation_distance, table_from_common


def random(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram(table: Tensor) -> Tensor:
    return table @ table.T


def test_a_rotated_table_is_rotated_back() -> None:
    common = random(9, 4, 1)
    rotation = torch.linalg.qr(random(4, 4, 2)).Q
    own = common @ rotation
    assert torch.allclose(own @ map_to_common(own, common), common)


def test_a_wider_market_keeps_the_best_gram_of_g_s_width() -> None:
    own, common = random(9, 5, 1), random(9, 2, 2)
    moved = own @ map_to_common(own, common)
    tail = torch.linalg.svdvals(own)[2:]
    # Eckart and Young: nothing of rank 2 comes nearer to E E^T.
    assert torch.dist(gram(moved), gram(own)) == pytest.approx(float((tail**4).sum().sqrt()))


def test_a_narrower_market_keeps_its_gram() -> None:
    own, common = random(9, 2, 1), random(9, 5, 2)
    assert torch.allclose(gram(own @ map_to_common(own, common)), gram(own))


def test_no_rotation_is_nearer_to_g() -> None:
    own, common = random(9, 3, 1), random(9, 3, 2)
    best = torch.dist(own @ map_to_common(own, common), common)
    for seed in range(20):
        rotation = torch.linalg.qr(random(3, 3, seed)).Q
        assert torch.dist(own @ rotation, common) >= best


def test_fewer_items_than_columns() -> None:
    own, common = random(2, 5, 1), random(2, 4, 2)
    assert torch.allclose(gram(own @ map_to_common(own, common)), gram(own))


@pytest.mark.parametrize("width", [4, 6])
def test_a_new_market_has_g_s_relations(width: int) -> None:
    common = random(9, 4, 1)
    table = table_from_common(common, width)
    assert table.shape == (9, width)
    assert torch.allclose(gram(table), gram(common))


def test_a_narrow_new_market_has_the_best_of_them() -> None:
    common = random(9, 4, 1)
    tail = torch.linalg.svdvals(common)[3:]
    apart = torch.dist(gram(table_from_common(common, 3)), gram(common))
    assert apart == pytest.approx(float((tail**4).sum().sqrt()))


def test_distances() -> None:
    own, common = random(9, 4, 1), random(9, 4, 2)
    assert distance(own, common) == pytest.approx(float((own - common).norm() / common.norm()))
    other = random(9, 6, 3)
    literal = float((gram(other) - gram(common)).norm() / gram(common).norm())
    assert relation_distance(other, common) == pytest.approx(literal)
    assert distance(common, common) == relation_distance(common, common) == 0
    assert distance(common, torch.zeros_like(common)) == math.inf
