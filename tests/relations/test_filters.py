import pytest
import torch

from fedhur_app.relations import eigen, filters
from fedhur_app.relations.filters import (
    block_gram,
    blocks_of,
    group_filters,
    group_means,
    local_filters,
    local_grams,
    mean_gram_eigenpairs,
    mean_table,
    pack_blocks,
    rows_of,
    smoothed_tables,
    unpack_blocks,
)
from fedhur_app.relations.hierarchy import Level
from tests.relations import brute

BRANCHINGS = [(4,), (3, 3), (2, 3, 2), (2, 2, 2, 2, 2)]


@pytest.mark.parametrize("branching", BRANCHINGS)
def test_group_means_are_means_over_items(branching):
    tree = brute.hierarchy(37, branching)
    items = brute.tables(3, 37, 5)
    for level, means in zip(tree.levels, group_means(items, tree), strict=True):
        for group in range(level.n_groups):
            torch.testing.assert_close(means[:, group], items[:, level.labels == group].mean(dim=1))


def test_a_list_of_tables_is_the_same_as_an_array_of_them(monkeypatch):
    tree = brute.hierarchy(37, (3, 3))
    items = brute.tables(6, 37, 5)
    for whole, listed in zip(group_means(items, tree), group_means(list(items), tree), strict=True):
        assert torch.equal(whole, listed)
    for scale in ("none", "unit"):
        whole, listed = (group_filters(tables, tree, (0.5, 0.5), scale) for tables in (items, list(items)))
        for index in range(2):
            torch.testing.assert_close(whole.grams[index], listed.grams[index])
            torch.testing.assert_close(whole.public[index], listed.public[index])
    for size in (1, 6 * 5 * 8 * 10, 2**20):
        monkeypatch.setattr(filters, "_CHUNK_BYTES", size)
        torch.testing.assert_close(mean_table(list(items)), items.mean(dim=0))
    assert torch.equal(mean_table(items), items.mean(dim=0))
    with pytest.raises(ValueError, match=r"36 rows.*37 items"):
        group_means([items[0, :36]], tree)


def test_some_blocks_are_a_part_of_all():
    level = brute.hierarchy(37, (3, 14)).leaf
    values = brute.tables(2, level.n_groups, 3)
    assert torch.equal(blocks_of(values, level, slice(1, 3)), blocks_of(values, level)[:, 1:3])


def test_group_means_refuse_another_catalogue():
    with pytest.raises(ValueError, match=r"36 rows.*37 items"):
        group_means(brute.tables(1, 36, 2), brute.hierarchy(37, (3,)))


def test_blocks_and_rows_are_inverse_and_padding_is_zero():
    level = brute.hierarchy(37, (3, 14)).leaf
    values = brute.tables(2, level.n_groups, 3)
    blocks = blocks_of(values, level)
    assert not level.mask.all(), "the example needs padding"
    assert (blocks[:, ~level.mask] == 0).all()
    assert torch.equal(rows_of(blocks, level), values)
    for block, members in enumerate(level.members.tolist()):
        for slot, member in enumerate(members):
            if member >= 0:
                assert torch.equal(blocks[:, block, slot], values[:, member])


def brute_filters(items, tree, beta):
    """F_k and F_g over all groups, entry by entry (eq. 3-9)."""
    own_filters, public_filters = [], []
    for index, level in enumerate(tree.levels):
        m = level.n_groups
        own = torch.zeros(len(items), m, m, dtype=items.dtype)
        for k, table in enumerate(items):
            z = [table[level.labels == group].mean(dim=0) for group in range(m)]
            for b in range(m):
                for c in range(m):
                    parent = int(level.parent[b])
                    if parent != int(level.parent[c]):
                        continue
                    inherited = beta[index - 1] * public_filters[-1][parent, parent] if index else 0.0
                    own[k, b, c] = inherited + z[b] @ z[c]
        own_filters.append(own)
        public_filters.append(own.mean(dim=0))
    return own_filters, public_filters


@pytest.mark.parametrize("branching", BRANCHINGS)
def test_group_filters_equal_the_formulas_entry_by_entry(branching):
    tree = brute.hierarchy(30, branching)
    items = brute.tables(4, 30, 3)
    beta = [0.7, 0.4, 1.3, 0.2, 0.9]
    got = group_filters(items, tree, beta[: len(branching)])
    own, public = brute_filters(items, tree, beta)
    for index, level in enumerate(tree.levels):
        torch.testing.assert_close(brute.scatter(got.public[index], level), public[index])
        assert (got.public[index][~brute.valid(level)] == 0).all()
        for k in range(4):
            # F_k - F_g = H_k - mean H: what is inherited is public and cancels.
            difference = brute.scatter(got.grams[index][k] - got.grams[index].mean(dim=0), level)
            torch.testing.assert_close(difference, own[index][k] - public[index])
            assert (got.grams[index][k][~brute.valid(level)] == 0).all()


def test_what_is_inherited_is_the_public_diagonal_not_the_own_nor_a_cross_entry():
    tree = brute.hierarchy(30, (3, 3))
    items = brute.tables(4, 30, 3)
    got = group_filters(items, tree, (1.0, 1.0))
    coarse = brute.scatter(got.public[0], tree.levels[0])
    inherited = got.public[1] - got.grams[1].mean(dim=0)
    for parent in range(3):
        values = inherited[parent][brute.valid(tree.leaf)[parent]]
        torch.testing.assert_close(values, coarse[parent, parent].expand_as(values))
        cross = coarse[parent, (parent + 1) % 3]
        own = brute.scatter(got.grams[0][0], tree.levels[0])[parent, parent]
        assert abs(float(values[0] - cross)) > 0.01
        assert abs(float(values[0] - own)) > 0.01


def test_beta_must_cover_the_levels():
    with pytest.raises(ValueError, match="beta"):
        group_filters(brute.tables(2, 30, 3), brute.hierarchy(30, (2, 2, 2)), (1.0,))


@pytest.mark.parametrize("client_scale", ["none", "unit"])
@pytest.mark.parametrize("filter_scale", ["none", "spectral"])
def test_client_and_server_scale_alike(client_scale, filter_scale):
    tree = brute.hierarchy(30, (3, 3))
    items = brute.tables(4, 30, 3) * torch.tensor([1.0, 5.0, 0.1, 2.0])[:, None, None]
    server = group_filters(items, tree, (0.5, 0.5), client_scale, filter_scale)
    broadcast = group_filters(items, tree, (0.5, 0.5), client_scale).public
    for k in range(4):
        grams, public = local_filters(items[k], tree, broadcast, client_scale, filter_scale)
        for index in range(2):
            torch.testing.assert_close(grams[index], server.grams[index][k])
            torch.testing.assert_close(public[index], server.public[index])
    if filter_scale == "spectral":
        for public in server.public:
            torch.testing.assert_close(torch.linalg.eigvalsh(public)[:, -1], torch.ones(len(public)).double())
    if client_scale == "unit":
        unit = items / items.flatten(1).norm(dim=1)[:, None, None]
        torch.testing.assert_close(server.means[1], group_means(unit, tree)[1])


def test_scaling_a_zero_table_and_a_zero_filter_gives_no_nan():
    tree = brute.hierarchy(10, (2, 2))
    scaled = group_filters(torch.zeros(2, 10, 3), tree, (1.0, 1.0), "unit", "spectral")
    assert all((gram == 0).all() for gram in scaled.grams)
    assert all((public == 0).all() for public in scaled.public)


def test_local_grams_are_those_of_one_client():
    tree = brute.hierarchy(30, (3, 3))
    items = brute.tables(2, 30, 3)
    for index, gram in enumerate(local_grams(items[1], tree)):
        means = group_means(items, tree)[index][1]
        torch.testing.assert_close(gram, block_gram(blocks_of(means, tree.levels[index])))


@pytest.mark.parametrize("branching", BRANCHINGS)
def test_packed_blocks_come_back_exactly(branching):
    for seed, level in enumerate(brute.hierarchy(37, branching).levels):
        blocks = brute.random_symmetric_blocks(level, seed)
        vector = pack_blocks(blocks, level)
        children = torch.bincount(level.parent)
        assert vector.shape == (int((children * (children + 1) // 2).sum()),)
        assert torch.equal(unpack_blocks(vector, level), blocks)
        assert torch.equal(pack_blocks(torch.stack([blocks, -blocks]), level), torch.stack([vector, -vector]))
    with pytest.raises(ValueError, match="needs"):
        unpack_blocks(vector[1:], level)


def dense_pairs(items, rank):
    gram = torch.stack([table @ table.T for table in items]).mean(dim=0)
    values, vectors = torch.linalg.eigh(gram)
    return gram, vectors.flip(1)[:, :rank], values.flip(0)[:rank]


@pytest.mark.parametrize("method", ["auto", "exact", "iterative"])
@pytest.mark.parametrize(("clients", "items", "dim"), [(5, 90, 40), (3, 200, 10), (30, 40, 4)])
def test_eigenpairs_are_those_of_the_mean_of_the_grams(method, clients, items, dim):
    tables = brute.tables(clients, items, dim)
    gram, vectors, values = dense_pairs(tables, 8)
    got_vectors, got_values = mean_gram_eigenpairs(tables, 8, method)
    torch.testing.assert_close(got_values, values)
    torch.testing.assert_close(got_vectors.T @ got_vectors, torch.eye(8).double())
    torch.testing.assert_close(gram @ got_vectors, got_vectors * got_values)
    torch.testing.assert_close((got_vectors * got_values) @ got_vectors.T, (vectors * values) @ vectors.T)
    # Not the Gram of the mean.
    mean = tables.mean(dim=0)
    assert abs(float(torch.linalg.eigvalsh(mean @ mean.T)[-1] - values[0])) > 0.1 * float(values[0])


def test_iterative_equals_exact_at_a_size_where_it_iterates():
    tables = brute.tables(20, 500, 30, dtype=torch.float32) * torch.linspace(1, 0.1, 500)[:, None]
    exact = mean_gram_eigenpairs(tables, 16, "exact")
    cold = mean_gram_eigenpairs(list(tables), 16, "iterative", seed=3)
    warm = mean_gram_eigenpairs(tables, 16, "iterative", previous_basis=exact[0])
    for vectors, values in (cold, warm):
        torch.testing.assert_close(values, exact[1], rtol=1e-5, atol=0)
        overlap = torch.linalg.svdvals(exact[0].T @ vectors)
        assert float(overlap.min()) > 1 - 1e-4


def test_eigenpairs_are_deterministic_with_fixed_signs():
    tables = brute.tables(20, 500, 30, dtype=torch.float32)
    for method in ("exact", "iterative"):
        first, second = (mean_gram_eigenpairs(tables, 8, method, seed=1) for _ in range(2))
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        largest = first[0].gather(0, first[0].abs().argmax(dim=0, keepdim=True))
        assert (largest > 0).all()
        assert (first[1].diff() <= 0).all()


def test_more_rank_than_there_is():
    vectors, values = mean_gram_eigenpairs(brute.tables(1, 30, 4), 10)
    assert vectors.shape == (30, 4)
    repeated = brute.tables(1, 30, 4).expand(3, 30, 4)
    vectors, values = mean_gram_eigenpairs(repeated, 10)
    assert (values[:4] > 0.1).all()
    assert (values[4:] == 0).all()
    assert torch.isfinite(vectors).all()
    torch.testing.assert_close((vectors * values) @ vectors.T, repeated[0] @ repeated[0].T)
    zero_vectors, zero_values = mean_gram_eigenpairs(torch.zeros(2, 30, 4), 3)
    assert (zero_values == 0).all()
    assert torch.isfinite(zero_vectors).all()
    assert mean_gram_eigenpairs(brute.tables(9, 5, 4), 10)[0].shape == (5, 5)


def test_tables_of_different_widths():
    tables = [brute.tables(1, 60, width, seed=width)[0] for width in (3, 8, 5)]
    _, values = mean_gram_eigenpairs(tables, 6)
    torch.testing.assert_close(values, dense_pairs(tables, 6)[2])


def test_a_large_catalogue_never_sees_an_items_by_items_matrix(monkeypatch):
    items, dim = 6000, 12
    shared = brute.tables(1, items, 6, dtype=torch.float32)[0] * torch.linspace(3, 1, 6)
    tables = shared @ brute.tables(220, 6, dim, dtype=torch.float32)
    tables += 0.1 * torch.rand(tables.shape, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(filters, "_mean_gram", lambda _: pytest.fail("formed I x I"))
    monkeypatch.setattr(filters, "dense_top_eigenpairs", lambda *_: pytest.fail("dense solver"))
    vectors, values = mean_gram_eigenpairs(tables, 4)
    image = sum(table @ (table.T @ vectors) for table in tables) / len(tables)
    torch.testing.assert_close(image, vectors * values, rtol=0, atol=1e-4 * float(values[0]))
    with pytest.raises(ValueError, match="limited to 5,000"):
        mean_gram_eigenpairs(tables[:1].expand(500, items, dim), 4, "exact")


def test_no_clients_is_an_error():
    with pytest.raises(ValueError, match="no item tables"):
        mean_gram_eigenpairs([], 4)


def test_krylov_finds_a_large_eigenvalue_outside_the_warm_start_and_ignores_negative_ones():
    values = torch.cat([torch.tensor([50.0, 10.0, 9.0]), -torch.linspace(1, 100, 297)]).double()
    start = torch.cat([torch.eye(300)[:, 1:3].double(), brute.tables(1, 300, 4)[0]], dim=1)
    vectors, found = eigen.top_eigenpairs(lambda x: values[:, None] * x, start, 2)
    torch.testing.assert_close(found, values[:2], rtol=1e-6, atol=0)
    torch.testing.assert_close(vectors.abs(), torch.eye(300)[:, :2].double(), rtol=0, atol=1e-4)


def test_smoothing_averages_cosines_over_groups_and_keeps_lengths():
    generator = torch.Generator().manual_seed(3)
    tables = [torch.randn(12, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    for table in tables:
        table[7] = 0  # nobody knows this item
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 1, 2, 0, 2])
    level = Level.from_labels(labels, torch.zeros(3, dtype=torch.long))
    found = sum(table @ table.T for table in smoothed_tables(tables, level)) / 3
    gram = sum(table @ table.T for table in tables) / 3
    lengths = gram.diagonal().sqrt()
    for i in range(12):
        for j in range(12):
            cosines = [
                gram[a, b] / (lengths[a] * lengths[b])
                for a in range(12)
                for b in range(12)
                if labels[a] == labels[i] and labels[b] == labels[j] and lengths[a] > 0 and lengths[b] > 0
            ]
            expected = lengths[i] * lengths[j] * sum(cosines) / len(cosines)
            assert found[i, j] == pytest.approx(float(expected), abs=1e-10)


def test_smoothing_over_groups_of_one_item_changes_nothing():
    tables = list(torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    level = Level.from_labels(torch.arange(5), torch.zeros(5, dtype=torch.long))
    for table, smooth in zip(tables, smoothed_tables(tables, level), strict=True):
        assert torch.allclose(table, smooth)
