import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhur_app.relations.filters import mean_gram_eigenpairs
from fedhur_app.relations.hierarchy import Hierarchy, build_hierarchy, item_directions
from tests.relations import brute


def check_valid(hierarchy: Hierarchy, branching: tuple[int, ...], items: int) -> None:
    assert len(hierarchy.levels) == len(branching)
    above = torch.zeros(items, dtype=torch.long)
    for level, children in zip(hierarchy.levels, branching, strict=True):
        assert level.labels.shape == (items,)
        assert sorted(set(level.labels.tolist())) == list(range(level.n_groups))
        assert torch.equal(level.parent[level.labels], above), "a group's items must share its only parent"
        assert level.sizes.sum() == items
        assert level.sizes.min() >= 1
        counts = torch.bincount(level.parent)
        assert counts.max() <= children
        assert level.members.shape == (int(above.max()) + 1, int(counts.max()))
        for parent, members in enumerate(level.members.tolist()):
            real = [member for member in members if member >= 0]
            assert real == torch.nonzero(level.parent == parent)[:, 0].tolist()
            assert members == real + [-1] * (len(members) - len(real))
        flat = level.members.flatten()
        assert flat[level.position].tolist() == list(range(level.n_groups))
        above = level.labels


def same(first: Hierarchy, second: Hierarchy) -> bool:
    return all(
        torch.equal(a.labels, b.labels) and torch.equal(a.parent, b.parent) and torch.equal(a.members, b.members)
        for a, b in zip(first.levels, second.levels, strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(
    vectors=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    branching=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 3),
)
def test_any_input_gives_a_valid_deterministic_hierarchy_that_survives_the_wire(vectors, branching, seed):
    # Few distinct values: identical vectors, groups smaller than their children, giant groups.
    items = torch.tensor([[float(v % 5), float(v // 5)] for v in vectors])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hierarchy = build_hierarchy(items, branching, seed)
    check_valid(hierarchy, tuple(branching), len(items))
    assert same(hierarchy, build_hierarchy(items, branching, seed))
    assert same(hierarchy, Hierarchy.unpack(hierarchy.pack()))


def test_four_items_into_eight_clusters_are_singletons():
    hierarchy = build_hierarchy(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), (8,), 0)
    assert sorted(hierarchy.leaf.labels.tolist()) == [0, 1, 2, 3]


def test_five_identical_vectors_are_one_group():
    hierarchy = build_hierarchy(torch.ones(5, 3), (3, 3), 0)
    assert hierarchy.levels[0].n_groups == 1
    check_valid(hierarchy, (3, 3), 5)


def test_one_giant_group_and_an_outlier():
    items = torch.zeros(50, 2)
    items[0] = 1e6
    hierarchy = build_hierarchy(items, (4, 4), 0)
    assert sorted(hierarchy.levels[0].sizes.tolist()) == [1, 49]
    check_valid(hierarchy, (4, 4), 50)


def test_separated_clusters_are_found_at_their_level():
    centres = torch.tensor([[0.0, 0.0], [0.0, 1.0], [100.0, 0.0], [100.0, 1.0]])
    truth = torch.arange(4).repeat(10)
    noise = 0.01 * torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    coarse, fine = build_hierarchy(centres[truth] + noise, (2, 2), 0).levels
    for level, expected in ((coarse, truth // 2), (fine, truth)):
        pairs = set(zip(level.labels.tolist(), expected.tolist(), strict=True))
        assert len(pairs) == level.n_groups == int(expected.max()) + 1


def test_another_seed_gives_another_hierarchy_and_no_global_state_is_touched():
    items = brute.tables(1, 60, 4)[0]
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    first, second = build_hierarchy(items, (5, 5), 0), build_hierarchy(items, (5, 5), 1)
    assert not same(first, second)
    assert (np.random.get_state()[1] == before[0]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])


def test_pack_uses_the_smallest_types():
    packed = brute.hierarchy(300, (3, 300)).pack()
    assert packed["leaf"].dtype == np.uint16
    assert packed["parent.2"].dtype == np.uint8
    assert set(packed) == {"leaf", "parent.2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("leaf"), "holds the arrays leaf"),
        (lambda p: p.update({"parent.9": p["parent.2"]}), "parent.9"),
        (lambda p: p.update(leaf=p["leaf"].astype(float)), "vector of integers"),
        (lambda p: p.update(leaf=p["leaf"][None]), "vector of integers"),
        (lambda p: p.update(leaf=p["leaf"] + 1), "'leaf'.*every number"),
        (lambda p: p.update(leaf=p["leaf"].astype(np.int64) - 1), "out of range"),
        (lambda p: p.update({"parent.2": p["parent.2"][:-1]}), "parent.2"),
        (lambda p: p.update({"parent.2": np.append(p["parent.2"], 0)}), "parent.2.*finer level has"),
    ],
)
def test_unpack_names_what_is_wrong(change, message):
    packed = brute.hierarchy(20, (3, 3)).pack()
    change(packed)
    with pytest.raises(ValueError, match=message):
        Hierarchy.unpack(packed)


@pytest.mark.parametrize(
    ("items", "branching", "message"),
    [
        (torch.zeros(0, 3), (2,), "at least one item"),
        (torch.zeros(4), (2,), "matrix"),
        (torch.tensor([[1.0], [float("nan")]]), (2,), "1 of 2 rows"),
        (torch.zeros(4, 2), (), "at least one number"),
        (torch.zeros(4, 2), (2, 0), "at least 1"),
    ],
)
def test_impossible_inputs_are_refused(items, branching, message):
    with pytest.raises(ValueError, match=message):
        build_hierarchy(items, branching, 0)


def test_a_real_size_takes_seconds_at_most():
    started = time.perf_counter()
    hierarchy = build_hierarchy(torch.randn(1682, 128, generator=torch.Generator().manual_seed(0)), (12, 12, 12), 1)
    # About 0.4 s; the bound only catches a change of order of magnitude on a busy machine.
    assert time.perf_counter() - started < 10
    assert 800 < hierarchy.leaf.n_groups <= 1682


def test_directions_do_not_depend_on_the_coordinates_of_the_clients():
    generator = torch.Generator().manual_seed(0)
    tables = list(torch.randn(3, 20, 5, generator=generator, dtype=torch.float64))
    tables[1][4] = tables[0][4] = tables[2][4] = 0
    rotated = [
        table @ torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))[0] for table in tables
    ]
    first, second = (item_directions(*mean_gram_eigenpairs(each, 15)) for each in (tables, rotated))
    cosines = first @ first.T
    assert torch.allclose(cosines, second @ second.T, atol=1e-6)
    gram = sum(table @ table.T for table in tables)
    known = gram.diagonal() > 0
    lengths = gram.diagonal().sqrt()[known]
    assert torch.allclose(cosines[known][:, known], (gram[known][:, known] / lengths / lengths[:, None]), atol=1e-6)
    assert (first[4] == 0).all()
