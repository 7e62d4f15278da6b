"""Seconds and memory of a round against items, clients and width: the figures of docs/results/scaling.md.

    python -m benchmarks.scaling measure --data docs/results/scaling/points.json
    python -m benchmarks.scaling page --data docs/results/scaling/points.json --page docs/results/scaling.md

Each point is a run of the local runtime on generated data in a process of its own, on one thread, and its seconds are
CPU seconds, so that other work on the machine counts for little; points that the file already has are not measured
again. The page sets what was measured beside the number of multiply-adds that `operations` counts.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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


def operations(point: Point) -> dict[str, float]:
    """Leading terms of the multiply-adds of a round, of all clients together and of the server.

    A client: Adam on the whole item table (8 a number) for each batch; ranking, `U I d`; FedCIA and FedHUR align in
    `6 I d^2 + 20 d^3`; FedHUR also turns the basis, `I d^2`, and solves for user vectors, `I d^2`.
    Server: averaging, `K I d`; or the eigenpairs of the mean Gram, see `eigenpairs`; FedHUR also projects the tables
    on the basis, `K I d^2`, and compares clients: energies `B K^2 q b (b + 1) / 2` a level, the scorer on `B K^2` pairs
    and in training, mixing `G K^2 d^2`.
    """
    items, clients, dim = point.items, point.clients, point.dim
    client = EPOCHS[point.strategy] * 8 * items * dim + USERS_A_CLIENT * items * dim
    if point.strategy == "fedavg":
        return {"clients": clients * client, "server": clients * items * dim}
    client += 6 * items * dim**2 + 20 * dim**3
    server = eigenpairs(point)
    if point.strategy == "fedhur":
        client += 2 * items * dim**2
        pairs = (1 + GROUPS) * clients**2
        scorer = SCORER[0] * SCORER[1]
        server += pairs * QUERY_WIDTH * GROUPS * (GROUPS + 1) / 2 + (pairs + SCORER_ROWS) * scorer
        server += clients * items * dim**2 + GROUPS * clients**2 * dim**2
    return {"clients": clients * client, "server": server}


def eigenpairs(point: Point) -> float:
    """Multiply-adds for the top d eigenpairs of the mean Gram of K tables, as `mean_gram_eigenpairs` finds them."""
    side, width = min(point.items, point.clients * point.dim), point.clients * point.dim
    if side <= 2500 or side <= 2 * (point.dim + 16):
        gram = width**2 * point.items / 2 if width < point.items else width * point.items**2 / 2
        return gram + 4 / 3 * side**3
    return 6 * 2 * width * point.items * (point.dim + 16)


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
    for key, point in sorted(wanted.items(), key=lambda pair: sum(operations(pair[1]).values())):
        if key in content["points"]:
            continue
        command = [sys.executable, "-m", "benchmarks.scaling", "point", "--point", json.dumps(asdict(point))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{key} failed:\n{done.stderr[-2000:]}")
        content["points"][key] = json.loads(done.stdout.splitlines()[-1])
        content["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
        content["date"] = datetime.now(UTC).date().isoformat()
        write_json(data, content)
        print(f"{key}: {content['points'][key]['round_seconds']:.2f} s", flush=True)


def slope(x: list[float], y: list[float]) -> float:
    """Exponent of a power law through the last two points: how fast y grows where x is large."""
    return math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])


def page(content: dict[str, Any], picture: str) -> str:
    """The page as Markdown: a table a curve, and what it says."""
    points = content["points"]
    fixed = ", ".join(f"{SYMBOL[axis]} = {getattr(BASE, axis)}" for axis in SWEEPS)
    about = f"""# Cost of a round

Measured on {content["date"]} on {content["machine"]} with `python -m benchmarks.scaling`:
CPU seconds on one thread, local runtime, generated data with {USERS_A_CLIENT} users a client and
{INTERACTIONS_A_USER} interactions a user; FedHUR with two levels of {GROUPS} groups and item-level residuals in the
common basis. What is not varied is {fixed}. Points that were not measured are left out.

Counted are multiply-adds (leading terms, `operations` in benchmarks/scaling.py); *rate* is the count over the seconds.
Where the rate stays, time grows as the count says. *Exponent*: of a power law through the last two points. All clients
run one after the other here, so their seconds are those of all of them together. The memory is the peak of the one
process that holds server and clients.

![Cost of a round]({picture})"""
    floor = min(found["clients_seconds"] / found["clients"] for found in points.values())
    about += f"""

What it says: time and memory grow in proportion to the number of clients. A client costs {1000 * floor:.0f} ms or
more a round whatever its size (messages, ranking, optimiser), so that in I and d the clients' time rises more slowly
than the count until the tables are large, and the rate rises with them. FedAvg's server only adds tables up. FedCIA's
and FedHUR's server finds eigenpairs: up to 2,500 items (or stacked columns) densely, which grows with the third power
of the smaller side, and beyond by block Krylov, whose multiplications are counted as six here. Nothing grows with the
square of the catalogue. FedHUR's comparison of pairs of clients grows with their square, and is small beside the
clients' own work up to the sizes measured."""
    lines = about.split("\n")
    for name in STRATEGIES:
        lines += ["", f"## {name}"]
        for axis in SWEEPS:
            lines += ["", *_table(points, name, axis)]
    lines += ["", f"## {LARGE.clients:,} clients, {LARGE.items:,} items, d = {LARGE.dim}", ""]
    lines += ["| strategy | clients, s | server, s | round, s | peak, MiB |", "|---|---|---|---|---|"]
    large = [(name, points.get(replace(LARGE, strategy=name).key)) for name in STRATEGIES]
    for name, found in large:
        if found is None:
            continue
        seconds = " | ".join(f"{found[f'{part}_seconds']:.3g}" for part in ("clients", "server", "round"))
        lines.append(f"| {name} | {seconds} | {found['peak_mib']:.0f} |")
    return "\n".join(lines) + "\n"


def _table(points: dict[str, Any], name: str, axis: str) -> list[str]:
    symbol = SYMBOL[axis]
    head = [
        symbol,
        "clients, s",
        "counted, G",
        "rate, G/s",
        "server, s",
        "counted, G",
        "rate, G/s",
        "round, s",
        "peak, MiB",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    curves: dict[str, list[float]] = {"x": [], "clients": [], "server": [], "clients ops": [], "server ops": []}
    for point in sweep(name, axis):
        if point.key not in points:
            continue
        found, counted = points[point.key], operations(point)
        row = [f"{getattr(point, axis):,}"]
        curves["x"].append(getattr(point, axis))
        for part in ("clients", "server"):
            seconds, giga = found[f"{part}_seconds"], counted[part] / 1e9
            row += [f"{seconds:.3g}", f"{giga:.3g}", f"{giga / seconds:.2g}"]
            curves[part].append(seconds)
            curves[f"{part} ops"].append(giga)
        row += [f"{found['round_seconds']:.3g}", f"{found['peak_mib']:.0f}"]
        lines.append(f"| {' | '.join(row)} |")
    measured = {part: slope(curves["x"], curves[part]) for part in curves if part != "x"}
    exponents = "; ".join(
        f"{part} {measured[part]:.2f} measured, {measured[f'{part} ops']:.2f} counted" for part in ("clients", "server")
    )
    return [*lines, "", f"Exponents in {symbol} at the end: {exponents}."]


def draw(content: dict[str, Any], path: Path) -> None:
    """Round time and memory, measured (lines) and counted (dashed, through the first point), on log axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, len(SWEEPS), squeeze=False)
    for column, axis in enumerate(SWEEPS):
        for number, name in enumerate(STRATEGIES):
            points = [point for point in sweep(name, axis) if point.key in content["points"]]
            x = [getattr(point, axis) for point in points]
            found = [content["points"][point.key] for point in points]
            seconds = [point["round_seconds"] for point in found]
            counted = [sum(operations(point).values()) for point in points]
            panels[0, column].plot(x, seconds, "o-", color=f"C{number}", label=name)
            scale = seconds[-1] / counted[-1]
            panels[0, column].plot(x, [scale * count for count in counted], ":", color=f"C{number}")
            panels[1, column].plot(x, [point["peak_mib"] for point in found], "o-", color=f"C{number}", label=name)
        for row, label in enumerate(("seconds a round", "peak memory, MiB")):
            panels[row, column].set(xscale="log", yscale="log", xlabel=f"{axis} ({SYMBOL[axis]})", ylabel=label)
            panels[row, column].grid(alpha=0.3)
    panels[0, 0].legend(frameon=False, title="dotted: counted,\nthrough the last point")
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
