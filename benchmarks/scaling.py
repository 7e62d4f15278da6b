"""Seconds and memory of a round against items, clients and width: the figures of docs/results/scaling.md.

    python -m benchmarks.scaling measure --data docs/results/scaling/points.json
    python -m benchmarks.scaling page --data docs/results/scaling/points.json --page docs/results/scaling.md

Each point is a run of the local runtime on generated data in a process of its own, on one thread, and its seconds are
CPU seconds, so that other work on the machine counts for little; points that the file already has are not measured
again. The page sets what was measured beside the number of multiply-adds that `operations` counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measuring import machine
from fedhur_app.files import write_json, write_text

STRATEGIES = ("fedavg", "fedcia", "fedhur")
USERS_A_CLIENT, INTERACTIONS_A_USER = 4, 30
EPOCHS = {"fedavg": 1, "fedcia": 2, "fedhur": 3}
QUERY_WIDTH, GROUPS, SCORER = 16, 12, (18, 32)  # of the strategy fedhur: q, groups a block, widths of the scorer
SCORER_ROWS = 20 * 8192 * 3  # a row of a training step counts three times: forward and two products back
# The first round warms up; the median of the others counts. With 1,000 clients and more there is one other.
ROUNDS, ROUNDS_OF_MANY = 3, 2


@dataclass(frozen=True)
class Point:
    """One measurement: strategy, items I, clients K, width d."""

    strategy: str
    items: int
    clients: int
    dim: int

    @property
    def key(self) -> str:
        """Its name in the data file."""
        return f"{self.strategy} I={self.items} K={self.clients} d={self.dim}"


BASE = Point("", items=2000, clients=50, dim=64)
SWEEPS: dict[str, tuple[int, ...]] = {
    "items": (1000, 2000, 5000, 10000, 20000),
    "clients": (10, 50, 200, 500, 2000),
    "dim": (16, 32, 64, 128, 256),
}
LARGE = Point("", items=10000, clients=2000, dim=16)
SYMBOL = {"items": "I", "clients": "K", "dim": "d"}


def sweep(strategy: str, axis: str) -> list[Point]:
    """The points of one curve: one number varies, the others are those of `BASE`."""
    return [replace(BASE, strategy=strategy, **{axis: value}) for value in SWEEPS[axis]]


def operations(point: Point) -> dict[str, dict[str, float]]:
    """Leading terms of the operations of a round, by who does them and by kind.

    Kinds: `calls`, whose cost does not depend on sizes; `passes`, numbers read and written one by one, which memory
    bounds; `products`, multiply-adds of matrix products, eigenpairs included.

    Clients, all together: a call each; Adam passes over the item table in each epoch; ranking takes `U I d`; FedCIA and
    FedHUR align in `6 I d^2 + 20 d^3`; FedHUR also turns the basis, `I d^2`, and solves for user vectors, `I d^2`.
    Server: averaging passes over all tables; FedCIA and FedHUR find eigenpairs, see `eigenpairs`; FedHUR also projects
    the tables on the basis, `K I d^2`, and compares clients: energies `B K^2 q b (b + 1) / 2` a level, the scorer on
    `B K^2` pairs and in training, mixing `G K^2 d^2`.
    """
    items, clients, dim = point.items, point.clients, point.dim
    table = items * dim
    own = {"calls": 1.0, "passes": EPOCHS[point.strategy] * table, "products": USERS_A_CLIENT * table}
    server = {"calls": 1.0, "passes": clients * table, "products": 0.0}
    if point.strategy != "fedavg":
        own["passes"] += 6 * table
        own["products"] += 6 * table * dim + 20 * dim**3
        server["products"] += eigenpairs(point)
    if point.strategy == "fedhur":
        own["products"] += 2 * table * dim
        pairs = (1 + GROUPS) * clients**2
        scorer = SCORER[0] * SCORER[1]
        server["products"] += pairs * QUERY_WIDTH * GROUPS * (GROUPS + 1) / 2 + (pairs + SCORER_ROWS) * scorer
        server["products"] += clients * table * dim + GROUPS * clients**2 * dim**2
        server["passes"] += pairs * SCORER[0]
    return {"clients": {kind: clients * value for kind, value in own.items()}, "server": server}


def eigenpairs(point: Point) -> float:
    """Multiply-adds for the top d eigenpairs of the mean Gram of K tables, as `mean_gram_eigenpairs` finds them."""
    side, width = min(point.items, point.clients * point.dim), point.clients * point.dim
    if side <= 2500 or side <= 2 * (point.dim + 16):
        gram = width**2 * point.items / 2 if width < point.items else width * point.items**2 / 2
        return gram + 4 / 3 * side**3
    return 6 * 2 * width * point.items * (point.dim + 16)


KINDS = ("calls", "passes", "products")


def fit(points: list[dict[str, Any]], part: str) -> dict[str, float]:
    """Seconds of one operation of each kind, by non-negative least squares of relative errors over all points."""
    from scipy.optimize import nnls

    counts = [operations(_point(found))[part] for found in points]
    seconds = [found[f"{part}_seconds"] for found in points]
    rows = [[count[kind] / second for kind in KINDS] for count, second in zip(counts, seconds, strict=True)]
    return dict(zip(KINDS, nnls(rows, [1.0] * len(rows))[0].tolist(), strict=True))


def predicted(point: Point, part: str, cost: dict[str, float]) -> float:
    """Seconds that the counts say, with the costs of `fit`."""
    count = operations(point)[part]
    return sum(cost[kind] * count[kind] for kind in KINDS)


def _point(found: dict[str, Any]) -> Point:
    return Point(found["strategy"], found["items"], found["clients"], found["dim"])


def measure(point: Point) -> dict[str, Any]:
    """Run one point in this process."""
    from fedhur_app.runtime import run_local

    time.perf_counter = time.process_time  # the clock of the app's own measurements
    rounds = ROUNDS if point.clients < 1000 else ROUNDS_OF_MANY
    options = {
        "dataset.synthetic.users": USERS_A_CLIENT * point.clients,
        "dataset.synthetic.items": point.items,
        "dataset.synthetic.interactions_per_user": INTERACTIONS_A_USER,
        "dataset.clients.number": point.clients,
        "model.dim": point.dim,
        "relation.query_width": QUERY_WIDTH,
        "hierarchy.branching": f"[{GROUPS},{GROUPS}]",
        "train.epochs": EPOCHS[point.strategy],
        "rounds": rounds,
        "min_rounds": rounds,
        "server.threads": 1,
        "server.checkpoint_every": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        text = " ".join(f"{key}={value}" for key, value in options.items())
        run_local({"dataset": "synthetic", "strategy": point.strategy, "output-dir": folder, "overrides": text})
        lines = [json.loads(line) for line in (Path(folder) / "history.jsonl").read_text().splitlines()]
        result = json.loads((Path(folder) / "result.json").read_text())
    timed = [line["seconds"] for line in lines[1:]]
    return {
        **asdict(point),
        "clients_seconds": statistics.median(sum(seconds["stages"].values()) for seconds in timed),
        "server_seconds": statistics.median(sum(seconds["server"].values()) for seconds in timed),
        "round_seconds": statistics.median(seconds["round"] for seconds in timed),
        "peak_mib": result["peak_memory_mib"]["server"],
    }


def measure_all(data: Path) -> None:
    """Measure every point that the file does not have, small ones first."""
    content = json.loads(data.read_text()) if data.exists() else {"points": {}}
    points = [point for name in STRATEGIES for axis in SWEEPS for point in sweep(name, axis)]
    wanted = {point.key: point for point in [*points, *(replace(LARGE, strategy=name) for name in STRATEGIES)]}
    for key, point in sorted(wanted.items(), key=lambda pair: pair[1].items * pair[1].clients * pair[1].dim):
        if key in content["points"]:
            continue
        command = [sys.executable, "-m", "benchmarks.scaling", "point", "--point", json.dumps(asdict(point))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{key} failed:\n{done.stderr[-2000:]}")
        content["points"][key] = json.loads(done.stdout.splitlines()[-1])
        content["machine"] = machine()
        content["date"] = datetime.now(UTC).date().isoformat()
        write_json(data, content)
        print(f"{key}: {content['points'][key]['round_seconds']:.2f} s", flush=True)


def page(content: dict[str, Any], picture: str) -> str:
    """The page as Markdown: a table a curve, and what it says."""
    points = content["points"]
    costs = fits(points)
    fixed = ", ".join(f"{SYMBOL[axis]} = {getattr(BASE, axis)}" for axis in SWEEPS)
    lines = f"""# Cost of a round

Measured on {content["date"]} on {content["machine"]} with `python -m benchmarks.scaling`:
CPU seconds on one thread, local runtime, generated data with {USERS_A_CLIENT} users a client and
{INTERACTIONS_A_USER} interactions a user; FedHUR with two levels of {GROUPS} groups and item-level residuals in the
common basis. What is not varied is {fixed}.
All clients run one after the other here, so their seconds are those of all of them together. The memory is the peak of
the one process that holds server and clients.

**The count.** `operations` in benchmarks/scaling.py counts, for clients and server, calls (whose cost does not depend
on sizes), numbers that are read and written one by one, and multiply-adds of matrix products. One price for each kind,
fitted over all points of a strategy, gives the seconds in brackets: where they follow what was measured, the growth is
the count's. The worst fit is FedAvg with 500 clients and more, whose clients take one and a half times what the count
says; that their states no longer fit the processor's cache is a guess.

| | a call, ms | numbers passed, M/s | multiply-adds, G/s |
|---|---|---|---|""".split("\n")
    for (name, part), cost in costs.items():
        rates = [f"{1000 * cost['calls']:.1f}"]
        rates += [f"{1 / cost[kind] / unit:.3g}" if cost[kind] else "-" for kind, unit in _UNITS.items()]
        lines.append(f"| {name}, {part} | {' | '.join(rates)} |")
    lines += f"""
A dash: of no weight beside the others. A client costs some milliseconds whatever its size, so that in I and d its
time rises slowly until the tables are large. The server of FedCIA and FedHUR finds eigenpairs: up to 2,500 items (or
stacked columns) densely, with the third power of the smaller side, and beyond by block Krylov, whose multiplications
are counted as six here. Nothing grows with the square of the catalogue. FedHUR's comparison of clients grows with the
square of their number: with 2,000 clients its server takes a third of the round.

![Cost of a round]({picture})""".split("\n")
    for name in STRATEGIES:
        lines += ["", f"## {name}"]
        for axis in SWEEPS:
            lines += ["", *_table(points, costs, sweep(name, axis), SYMBOL[axis], axis)]
    lines += ["", f"## {LARGE.clients:,} clients, {LARGE.items:,} items, d = {LARGE.dim}", ""]
    lines += _table(points, costs, [replace(LARGE, strategy=name) for name in STRATEGIES], "strategy", "strategy")
    return "\n".join(lines) + "\n"


_UNITS = {"passes": 1e6, "products": 1e9}


def fits(points: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Costs of the operations by strategy and part."""
    return {
        (name, part): fit([found for found in points.values() if found["strategy"] == name], part)
        for name in STRATEGIES
        for part in ("clients", "server")
    }


def _table(
    points: dict[str, Any], costs: dict[tuple[str, str], dict[str, float]], rows: list[Point], head: str, axis: str
) -> list[str]:
    lines = [f"| {head} | clients, s | server, s | round, s | peak, MiB |", "|---|---|---|---|---|"]
    for point in rows:
        if point.key not in points:
            continue
        found, value = points[point.key], getattr(point, axis)
        row = [f"{value:,}" if isinstance(value, int) else value]
        for part in ("clients", "server"):
            said = predicted(point, part, costs[point.strategy, part])
            row.append(f"{found[f'{part}_seconds']:.3g} ({said:.3g})")
        row += [f"{found['round_seconds']:.3g}", f"{found['peak_mib']:.0f}"]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def draw(content: dict[str, Any], path: Path) -> None:
    """Time and memory of a round as measured (points), and the time that the counts say (lines), on log axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    costs = fits(content["points"])
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, len(SWEEPS), squeeze=False)
    for column, axis in enumerate(SWEEPS):
        for number, name in enumerate(STRATEGIES):
            points = [point for point in sweep(name, axis) if point.key in content["points"]]
            x = [getattr(point, axis) for point in points]
            found = [content["points"][point.key] for point in points]
            counted = [
                sum(predicted(point, part, costs[name, part]) for part in ("clients", "server")) for point in points
            ]
            panels[0, column].plot(x, counted, color=f"C{number}", label=f"{name}: count")
            panels[0, column].plot(x, [point["round_seconds"] for point in found], "o", color=f"C{number}", label=name)
            panels[1, column].plot(x, [point["peak_mib"] for point in found], "o-", color=f"C{number}")
        for row, label in enumerate(("CPU seconds a round", "peak memory, MiB")):
            panel = panels[row, column]
            panel.set(xscale="log", yscale="log", xlabel=f"{axis} ({SYMBOL[axis]})", ylabel=label)
            panel.set_xticks(SWEEPS[axis])
            for side in (panel.xaxis, panel.yaxis):
                side.set_major_formatter(StrMethodFormatter("{x:,g}"))
                side.set_minor_formatter(NullFormatter())
            panel.grid(alpha=0.3)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "page", "point"))
    parser.add_argument("--data", type=Path, default=Path("docs/results/scaling/points.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/scaling.md"))
    parser.add_argument("--point", help="one point as JSON, for a process of its own")
    arguments = parser.parse_args()
    if arguments.what == "point":
        print(json.dumps(measure(Point(**json.loads(arguments.point)))))
    elif arguments.what == "measure":
        arguments.data.parent.mkdir(parents=True, exist_ok=True)
        measure_all(arguments.data)
    else:
        content = json.loads(arguments.data.read_text())
        picture = arguments.data.with_name("curves.png")
        draw(content, picture)
        write_text(arguments.page, page(content, f"{arguments.data.parent.name}/{picture.name}"))


if __name__ == "__main__":
    main()
