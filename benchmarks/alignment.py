"""Time of the three alignment solvers, for the filters of FedCIA and FedHUR, on one thread.

``python -m benchmarks.alignment [--items 1682 --dim 128 --steps 100 --clients 100]``
"""

import argparse
import platform
import statistics
import time

import torch

from fedhur_app.relations.alignment import PersonalFilter, Solver, align
from fedhur_app.relations.filters import group_filters, mean_gram_eigenpairs
from fedhur_app.relations.hierarchy import build_hierarchy
from fedhur_app.seeding import torch_generator

# The reference takes seconds a client: this many are measured, and the rest of --clients extrapolated.
_REFERENCE_CLIENTS = 2
_FAST: tuple[Solver, ...] = ("exact", "gd")
_SLOW: Solver = "reference"
_BRANCHING = (12, 12, 12)


def synthetic_tables(clients: int, items: int, dim: int) -> torch.Tensor:
    """``(K, I, d)`` tables that share a decaying spectrum, each with noise and a rotation of its own."""
    generator = torch_generator(1, "benchmark")
    rank = min(2 * dim, items)
    shared = torch.randn(items, rank, generator=generator) / torch.arange(1, rank + 1).sqrt()
    tables = torch.empty(clients, items, dim)
    for client in range(clients):
        mixing = torch.randn(rank, dim, generator=generator) / rank**0.5
        tables[client] = shared @ mixing + 0.05 * torch.randn(items, dim, generator=generator)
    return tables


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1682)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--clients", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    tables = synthetic_tables(min(arguments.clients, 20), arguments.items, arguments.dim)
    vectors, values = mean_gram_eigenpairs(tables, arguments.dim)
    hierarchy = build_hierarchy(tables.mean(dim=0), _BRANCHING, seed=1)
    filters = group_filters(tables, hierarchy, (1.0,) * len(_BRANCHING))
    groups = [level.n_groups for level in hierarchy.levels]
    print(
        f"{arguments.items} items, width {arguments.dim}, {arguments.steps} steps, groups {groups}, "
        f"one thread, torch {torch.__version__}, {platform.processor() or platform.machine()}"
    )
    for name in ("FedCIA", "FedHUR"):
        seconds: dict[Solver, float] = {}
        for solver in (*_FAST, _SLOW):
            count = min(arguments.clients, _REFERENCE_CLIENTS if solver == _SLOW else len(tables))
            fits, times = [], []
            for client in range(count):
                if name == "FedCIA":
                    personal = PersonalFilter(vectors, values)
                else:
                    residuals = [0.3 * (gram[client] - gram.mean(dim=0)) for gram in filters.grams]
                    personal = PersonalFilter(vectors, values, hierarchy, residuals, (1.0,) * len(groups))
                started = time.perf_counter()
                fits.append(align(personal, tables[client], solver, steps=arguments.steps).objective)
                times.append(time.perf_counter() - started)
            seconds[solver] = statistics.median(times)
            print(
                f"{name:7} {solver:10} {seconds[solver]:8.4f} s a client (median of {count}), for "
                f"{arguments.clients} clients {seconds[solver] * arguments.clients:7.1f} s (extrapolated), "
                f"mean fit error {statistics.mean(fits):.5f}",
                flush=True,
            )
        for fast in _FAST:
            print(f"{name:7} reference / {fast}: {seconds[_SLOW] / seconds[fast]:.1f}")


if __name__ == "__main__":
    main()
