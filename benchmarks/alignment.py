"""Time of the three alignment solvers, for the filters of FedCIA and FedHUR, on one thread.

``python -m benchmarks.alignment [--items 1682 --dim 128 --steps 100 --clients 100]``
"""

import argparse
import statistics

import torch

from benchmarks.measuring import REFERENCE_CLIENTS, fit_times, machine, synthetic_tables
from fedhur_app.relations.alignment import PersonalFilter, Solver
from fedhur_app.relations.filters import group_filters, mean_gram_eigenpairs
from fedhur_app.relations.hierarchy import build_hierarchy

_FAST: tuple[Solver, ...] = ("exact", "gd")
_SLOW: Solver = "reference"
_BRANCHING = (12, 12, 12)


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
        f"one thread, torch {torch.__version__}, {machine()}"
    )
    for name in ("FedCIA", "FedHUR"):
        seconds: dict[Solver, float] = {}
        for solver in (*_FAST, _SLOW):
            count = min(arguments.clients, REFERENCE_CLIENTS if solver == _SLOW else len(tables))
            personal = []
            for client in range(count):
                if name == "FedCIA":
                    personal.append(PersonalFilter(vectors, values))
                    continue
                residuals = [0.3 * (gram[client] - gram.mean(dim=0)) for gram in filters.grams]
                personal.append(PersonalFilter(vectors, values, hierarchy, residuals, (1.0,) * len(groups)))
            times, fits = fit_times(personal, tables, solver, arguments.steps)
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
