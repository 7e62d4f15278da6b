"""The report of `benchmarks.speed` as Markdown."""

import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from benchmarks.bounds import Work
from benchmarks.measuring import Rates, machine, processor
from benchmarks.naive import Comparison
from benchmarks.probe import CLIENT, CLIENT_STEPS, PACKING, RANKING, SERIALISATION, SERVER, SERVER_STEPS, SHARES, USERS
from benchmarks.timed_runs import WARM_UP, TimedRun, client_seconds
from fedhur_app.config import Settings
from fedhur_app.protocol import STAGES

SINGLE, LOCAL, FLOWER = "one process, one thread", "one process", "Flower"
_LEAST = 0.0005  # share of the round below which a part has no row


@dataclass(frozen=True)
class Measured:
    """What a report is made from.

    Attributes:
        settings: Of the runs.
        runs: Column -> run; :data:`SINGLE` is always there.
        comparisons: Naive and ours, on one thread; empty where there is no naive form.
        client: Step -> what an average client has to do.
        server: Step -> what the server has to do.
        rates: Of one thread.
        n_items: Size of the catalogue.
    """

    settings: Settings
    runs: dict[str, TimedRun]
    comparisons: list[Comparison]
    client: dict[str, Work]
    server: dict[str, Work]
    rates: Rates
    n_items: int

    def rounds(self) -> list[float]:
        """Seconds of a round, by run."""
        return [run.median(lambda round_: round_.seconds) for run in self.runs.values()]

    def calls(self, name: str) -> list[float]:
        """Seconds of all calls of a span in a round, with what is inside them, by run."""
        return [run.median(lambda round_: round_.calls.get(name, 0.0)) for run in self.runs.values()]

    def stage(self, name: str) -> list[float]:
        """Seconds of a stage, by run."""
        return [run.median(lambda round_: round_.stages.get(name, 0.0)) for run in self.runs.values()]

    def parts(self, names: Iterable[str]) -> list[float]:
        """Seconds of a round that go to some spans together, by run."""
        wanted = set(names)
        return [
            run.median(lambda round_: sum(seconds for name, seconds in round_.parts.items() if name in wanted))
            for run in self.runs.values()
        ]

    def share(self, name: str) -> list[float]:
        """Seconds of a round that go to one of the shares, by run."""
        return [run.median(lambda round_: round_.shares.get(name, 0.0)) for run in self.runs.values()]


def report(found: Measured, command: str) -> str:
    """The whole report.

    Args:
        found: What was measured.
        command: With which it was.
    """
    settings, single = found.settings, found.runs[SINGLE]
    clients = single.history[-1]["clients"]
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "numpy", "flwr", "ray"))
    about = f"""# Seconds of a round: {settings.strategy} on {settings.dataset.name}

Measured on {datetime.now(UTC).date().isoformat()} on {machine()} ({processor()}), Python {platform.python_version()},
{versions}, with

    {command}

{clients} clients, {found.n_items} items, d = {settings.model.dim}, seed {settings.seed}, clients on the CPU.
Medians of rounds {WARM_UP + 1} to {WARM_UP + len(single.rounds)}: what comes before is warm-up. Every number, ratios
too, is of this one call."""
    sections = {
        "Seconds by stage": [_STAGES, "", *_table(found, _stage_rows(found))],
        "Shares of a round": [_SHARES, "", *_table(found, _share_rows(found))],
        "The naive form": _naive(found),
        "What bounds each step": _bounds(found),
    }
    blocks = ["\n".join(["", f"## {title}", "", *lines]) for title, lines in sections.items()]
    return "\n".join([about, *blocks]) + "\n"


_STAGES = """\
A stage lasts from the server's first message to its last answer. In the last one clients also rank their validation
rows, with user vectors in closed form where the settings ask for them."""
_SHARES = """\
Each moment of a stage is divided equally among the workers that answered (threads, or Ray's processes). What a worker
has of it goes to what it does; where it does nothing, to what the server's process does for messages at that moment;
else to transport and waiting: SuperLink, Ray's scheduling and copies, looking for messages in intervals, workers
without work. Between stages everything is the server's. So the shares sum to the round (up to the medians), and with
two workers a second of a client is half a second of the round. Ray's pickling takes each client's private state to a
worker and back, with every message."""
_COMPARED = """\
The same computation with dense `I x I` matrices, client by client, in the same process, one thread, on the item tables
that the clients sent in the last round. Seconds are those of all clients together.

| step | naive, s | ours, s | naive / ours | |
|---|---|---|---|---|"""
_NOT_COMPARED = """\
None is written for these settings: only for FedCIA, and for FedHUR with item-level residuals in the common basis.
`python -m benchmarks.alignment` compares the fit with residuals of groups."""
_COUNTED = """\
What each step has to compute and to move is counted in benchmarks/bounds.py. One thread of this machine reaches
{flops32:.0f} GFLOP/s in a float32 matrix product, {flops64:.0f} in float64, and copies {bytes:.1f} GB/s (read and
written). The larger of both times is what a step needs at these rates; what it takes is that of the run with one
thread."""


Row = tuple[str, list[float]]


def _table(found: Measured, rows: list[Row]) -> list[str]:
    """Rows of seconds, a column a run, each with its share of the round; without rows that are nothing everywhere."""
    whole = found.rounds()
    lines = ["| | " + " | ".join(f"{name}, s" for name in found.runs) + " |", "|---" * (1 + len(whole)) + "|"]
    for name, seconds in rows:
        pairs = list(zip(seconds, whole, strict=True))
        if any(value >= _LEAST * all_ for value, all_ in pairs):
            cells = [f"{value:.3f} ({value / all_:.1%})" for value, all_ in pairs]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _stage_rows(found: Measured) -> list[Row]:
    rows: list[Row] = []
    taken = found.runs[SINGLE].rounds[0].stages
    for stage in (stage for stage in STAGES if stage in taken):
        hook = stage.partition(".")[2]
        rows += [
            (f"server, before {stage}", found.calls(f"configure_{hook}")),
            (f"**{stage}**", found.stage(stage)),
            (f"server, after {stage}", found.calls(f"aggregate_{hook}")),
        ]
    rows.insert(len(rows) - 1, ("of it ranking and user vectors", found.parts((RANKING, USERS))))
    files, end = found.calls("server's files"), found.calls("end of the round")
    return [
        *rows,
        ("server, validation and history", [all_ - part for all_, part in zip(end, files, strict=True)]),
        ("server, checkpoint", files),
        ("**round**", found.rounds()),
    ]


def _share_rows(found: Measured) -> list[Row]:
    known = {name for run in found.runs.values() for round_ in run.rounds for name in round_.parts}
    inside: dict[str, list[Row]] = {
        CLIENT: [(name, found.parts([name])) for name in CLIENT_STEPS],
        SERVER: [(name, found.parts([name])) for name in SERVER_STEPS],
        SERIALISATION: [(name, found.parts([name])) for name in PACKING if name in known],
    }
    rows: list[Row] = []
    for share in SHARES:
        rows.append((f"**{share}**", found.share(share)))
        rows += [(f"of it {name}", seconds) for name, seconds in inside.get(share, [])]
    return [*rows, ("**round**", found.rounds())]


def _naive(found: Measured) -> list[str]:
    if not found.comparisons:
        return [_NOT_COMPARED]
    lines = [_COMPARED]
    for row in found.comparisons:
        lines.append(f"| {row.step} | {row.naive:.3g} | {row.ours:.3g} | {row.ratio:.1f} | {row.note} |")
    ours = found.rounds()[list(found.runs).index(SINGLE)]
    naive = ours + sum(row.naive - row.ours for row in found.comparisons)
    lines.append(f"| round | {naive:.3g} | {ours:.3g} | {naive / ours:.1f} | naive: ours with these steps exchanged |")
    return lines


def _bounds(found: Measured) -> list[str]:
    rates, single = found.rates, found.runs[SINGLE]
    reached = {"flops32": rates.flops32 / 1e9, "flops64": rates.flops64 / 1e9, "bytes": rates.bytes / 1e9}
    lines = [_COUNTED.format(**reached), ""]
    for step, work in found.client.items():
        lines.append(_bound(step, work, "a client", client_seconds(single, step), rates))
    for step, work in found.server.items():
        lines.append(_bound(step, work, "on the server", _on_server(single, step), rates))
    lines.append(_messages(single, rates))
    counted = {*found.client, *found.server}
    rest = [(step, client_seconds(single, step), " a client") for step in CLIENT_STEPS if step not in counted]
    rest += [(step, _on_server(single, step), "") for step in SERVER_STEPS if step not in counted]
    named = [f"{step} {_time(seconds)}{whose}" for step, seconds, whose in rest if seconds]
    if named:
        lines += ["", f"Not counted, but measured: {', '.join(named)}."]
    return lines


def _on_server(run: TimedRun, step: str) -> float:
    return run.median(lambda round_: round_.own.get(step, 0.0))


def _bound(step: str, work: Work, whose: str, taken: float, rates: Rates) -> str:
    arithmetic, moving, needed = work.arithmetic(rates), work.moving(rates), work.seconds(rates)
    kind = "arithmetic" if arithmetic >= moving else "memory"
    amounts = f"{_amount(work.flops, 'FLOP')} and {_amount(work.bytes, 'B')} {whose}"
    return f"- {step}: {amounts}, {_against(taken, needed, kind)}"


def _against(taken: float, needed: float, kind: str) -> str:
    return f"{_time(needed)} at the measured rate ({kind}), takes {_time(taken)}, {taken / needed:.1f} times that"


def _messages(run: TimedRun, rates: Rates) -> str:
    """Bytes of a round's messages against the copies that they need: one at each end, read and written."""
    sizes = [line["bytes_up_per_client"] + line["bytes_down_per_client"] for line in run.history]
    moved = 2 * 2 * statistics.median(sizes)
    clients = run.history[-1]["clients"]
    packing = [name for name in PACKING if "records" in name]
    taken = run.median(lambda round_: sum(round_.own.get(name, 0.0) for name in packing)) / clients
    amounts = f"{_amount(moved / 4, 'B')} of messages and {_amount(moved, 'B')} moved a client"
    return f"- tensors to records and back, both ends: {amounts}, {_against(taken, moved / rates.bytes, 'memory')}"


def _amount(number: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.1 * size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
