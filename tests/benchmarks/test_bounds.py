"""Counts of operations, against torch's own counter of the products that the app makes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bounds
from benchmarks.bounds import Sizes, Work, counted
from benchmarks.measuring import Rates, machine_rates, synthetic_tables
from benchmarks.probe import CLIENT_STEPS, SERVER_STEPS
from fedhur_app.config import load_settings
from fedhur_app.relations.filters import mean_gram_eigenpairs
from fedhur_app.relations.matching import energy_scores
from fedhur_app.relations.weights import shared_basis_filters

# Two levels: one block of 3 groups, 3 blocks of 2 groups.
SIZES = Sizes(items=30, clients=4, dim=5, rank=6, users=[2, 7], ranked=2, levels=[(1, 3), (3, 2)])
SETTINGS = load_settings("synthetic", "fedhur", 1, "hierarchy.branching=[3,2] relation.query_width=4")


def products(work):
    """Operations of the matrix products of `work`, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_personal_filters_are_counted_as_they_are_computed():
    tables = synthetic_tables(SIZES.clients, SIZES.items, SIZES.dim)
    vectors, values = mean_gram_eigenpairs(tables, SIZES.rank)
    labels = torch.arange(3).repeat_interleave(10)
    alphas = torch.full((3, 4, 4), 0.25)
    made = products(lambda: shared_basis_filters(vectors, values, tables, iter(alphas), 0.3, labels))
    assert bounds.filters(SIZES, SETTINGS).flops32 == made


def test_energies_are_counted_as_they_are_computed():
    made = 0
    for blocks, side in SIZES.levels:
        query, grams = torch.randn(4, blocks, side, 4), torch.randn(4, blocks, side, side)
        sizes = torch.full((blocks,), side)
        made += products(lambda q=query, h=grams, m=sizes: energy_scores(q, h, m, SIZES.dim))
    assert bounds.energies(SIZES, SETTINGS).flops32 == made


def test_users_with_few_items_cost_the_smaller_solve():
    one = {count: bounds.user_vectors(Sizes(30, 1, 5, 5, [count], 1), SETTINGS).flops64 for count in (0, 2, 9)}
    assert one[0] == 30 * 25 + 125
    assert one[2] - one[0] == pytest.approx(2 * 2 * 25 + 2 * 4 * 5 + 8 / 3)
    assert one[9] - one[0] == pytest.approx(2 * 9 * 25 + 125 / 3)


@pytest.mark.parametrize(
    ("items", "clients", "dim", "flops"),
    [
        (10, 4, 5, 20 * 10**2 + 4 / 3 * 10**3 + 2 * 10**2 * 5),  # K d above I: the I x I Gram
        (50, 2, 5, 50 * 10**2 + 4 / 3 * 10**3 + 2 * 10**2 * 5),  # below: that of the columns
        (4000, 1000, 5, 6 * 4 * 4000 * 5000 * 21),  # large: products with the stacked tables
    ],
)
def test_eigenpairs_follow_the_smaller_side(items, clients, dim, flops):
    assert bounds.eigenpairs(Sizes(items, clients, dim, dim, [], 0), SETTINGS).flops32 == pytest.approx(flops)


def test_smoothed_tables_are_counted_beside_the_others():
    smooth = load_settings("synthetic", "fedhur", 1, "hierarchy.smoothing=0.2 hierarchy.features=spectral")
    once, twice = (bounds.eigenpairs(Sizes(10, clients, 5, 5, [], 0), SETTINGS) for clients in (4, 8))
    assert bounds.eigenpairs(Sizes(10, 4, 5, 5, [], 0), smooth) == once + twice


def test_training_counts_batches_and_epochs():
    settings = load_settings("synthetic", "fedhur", 1, "train.epochs=3 train.negatives=2 train.batch_size=5")
    # 9 interactions, 2 negatives: 18 triples in 4 batches; the tables have 30 and 2 rows.
    work = bounds.training(SIZES, settings)
    assert work.flops32 == 3 * (12 * 18 * 5 + 12 * 4 * 32 * 5)
    assert work.bytes == 4 * 3 * (15 * 18 * 5 + 8 * 4 * 32 * 5)


def test_the_slower_of_arithmetic_and_memory_bounds_a_step():
    rates = Rates(flops32=10.0, flops64=5.0, bytes=2.0)
    assert Work(20, 5, 2).seconds(rates) == Work(20, 5, 2).arithmetic(rates) == 3
    assert Work(20, 5, 8).seconds(rates) == Work(20, 5, 8).moving(rates) == 4
    assert (Work(2, 4, 6) + Work(4, 2, 0)).of_each(2) == Work(3, 3, 3)


@pytest.mark.parametrize(
    ("strategy", "overrides", "client", "server"),
    [
        ("fedhur", "", set(CLIENT_STEPS[:5]), set(SERVER_STEPS) - {"item groups", "group filters"}),
        (
            "fedhur-paper",
            "",
            {"training", "utility query", "ranking"},
            {SERVER_STEPS[0], "energies", "scorer and weights"},
        ),
        ("fedcia", "", {"training", "fit", "ranking"}, {SERVER_STEPS[0]}),
        ("fedavg", "", {"training", "ranking"}, set()),
        ("fedncf", "", set(), set()),
    ],
)
def test_only_what_a_strategy_does_is_counted(strategy, overrides, client, server):
    found = counted(SIZES, load_settings("synthetic", strategy, 1, overrides))
    assert (set(found[0]), set(found[1])) == (client, server)
    assert all(work.flops > 0 and work.bytes > 0 for works in found for work in works.values())


def test_rates_of_a_machine_are_those_of_one_thread_and_leave_torch_as_it_was():
    torch.set_num_threads(2)
    try:
        rates = machine_rates(side=64, mebibytes=1, repeats=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    # Between the slowest and the fastest thinkable processor.
    assert all(1e7 < rate < 1e13 for rate in (rates.flops32, rates.flops64, rates.bytes))
