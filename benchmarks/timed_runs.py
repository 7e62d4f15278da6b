"""A run in either runtime with the seconds of its parts, as `benchmarks.probe` records them."""

import json
import os
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.probe import (
    ALGORITHM,
    CALL,
    FOLDER,
    MESSAGE,
    ROUND,
    client_targets,
    server_targets,
    share_of,
)
from benchmarks.spans import Recorder, Span, attribute, read_spans, recording, replaced
from fedhur_app.config import Settings
from fedhur_app.flower_runner import FOR_PEOPLE, FlowerError, app_folder, run_flower, toml_text
from server_app.strategies import server_strategy

WARM_UP = 1  # rounds that do not count


@dataclass(frozen=True)
class RoundTime:
    """One round.

    Attributes:
        seconds: Of the whole round.
        stages: Stage -> seconds, as the history of the run has them.
        parts: Span -> its part of the round; they sum to `seconds` (see `benchmarks.spans.attribute`).
        calls: Span -> seconds of all calls of it in this round, with what is inside them.
        own: Span -> the same without the spans inside.
        workers: Threads or processes in which clients worked.
    """

    seconds: float
    stages: dict[str, float]
    parts: dict[str, float]
    calls: dict[str, float]
    own: dict[str, float]
    workers: int

    @property
    def shares(self) -> dict[str, float]:
        """Parts gathered into the shares of `benchmarks.probe`, seconds."""
        gathered: dict[str, float] = {}
        for name, seconds in self.parts.items():
            gathered[share_of(name)] = gathered.get(share_of(name), 0.0) + seconds
        return gathered


@dataclass(frozen=True)
class TimedRun:
    """A run with the rounds that count.

    Attributes:
        rounds: Times of the rounds after the warm-up.
        history: Their lines of history.jsonl.
        uploads: The item tables of the last round, by client; local runtime only.
    """

    rounds: list[RoundTime]
    history: list[dict[str, Any]]
    uploads: dict[int, Tensor] = field(default_factory=dict)

    def median(self, value: Callable[[RoundTime], float]) -> float:
        """Median over the rounds."""
        return statistics.median(map(value, self.rounds))


def run_config(dataset: str, settings: Settings, overrides: str, folder: Path) -> dict[str, str | int]:
    """Values for the app's run-config; `overrides` are those that led to `settings`."""
    config: dict[str, str | int] = {"dataset": dataset, "strategy": settings.strategy, "seed": settings.seed}
    return config | {"overrides": overrides, "output-dir": str(folder / "run"), "resume": ""}


def timed_local(config: dict[str, str | int], settings: Settings, folder: Path) -> TimedRun:
    """A run in this process, timed; spans and the run's files go into `folder`."""
    from fedhur_app.runtime import run_local

    uploads: dict[int, Tensor] = {}

    def keeping(aggregate: Callable[..., Any]) -> Callable[..., Any]:
        def aggregate_and_keep(server: Any, round_: int, replies: dict[int, Any]) -> Any:
            for client, content in replies.items():
                if "items" in content.arrays.get("table", {}):
                    uploads[client] = content.record("table")["items"]
            return aggregate(server, round_, replies)

        return aggregate_and_keep

    spans = _empty(folder / "spans")
    recorder = Recorder(spans)
    owner = next(kind for kind in server_strategy(settings.algorithm).__mro__ if "aggregate_items" in vars(kind))
    targets = [*client_targets(settings.algorithm), *server_targets(settings.algorithm)]
    with replaced(owner, "aggregate_items", keeping), recording(recorder, targets):
        run_local(dict(config))
    recorder.close()
    return TimedRun(*_times(spans, Path(str(config["output-dir"]))), uploads)


def timed_flower(config: dict[str, str | int], settings: Settings, folder: Path, clients: int) -> TimedRun:
    """A run under Flower's simulation, timed; spans and the run's files go into `folder`.

    Raises:
        FlowerError: The run did not complete.
    """
    root = app_folder()
    app = _app(_empty(folder / "app"), root)
    spans = _empty(folder / "spans")
    lines: list[str] = []

    def follow(line: str) -> None:
        lines.append(line)
        if FOR_PEOPLE in line:
            print(line, file=sys.stderr, flush=True)

    # The workers import this checkout, and the app itself is two lines of names.
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    with _environment({FOLDER: str(spans), ALGORITHM: settings.algorithm, "PYTHONPATH": path}):
        outcome = run_flower(config, clients, on_line=follow, app_folder=app)
    if not outcome.completed:
        raise FlowerError(f"the run under Flower did not complete ({outcome.status}):\n" + "\n".join(lines[-40:]))
    return TimedRun(*_times(spans, Path(str(config["output-dir"]))))


def _app(folder: Path, checkout: Path) -> Path:
    """A Flower app with the run-config keys of `checkout`, whose two halves are those of `benchmarks.probe`."""
    keys = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    (folder / "timed_app.py").write_text(
        '"""The app with the timing around it."""\n\nfrom benchmarks.probe import client, server\n\n'
        '__all__ = ["client", "server"]\n',
        encoding="utf-8",
    )
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "fedhur-timed"\nversion = "0.1.0"\ndescription = "FedHUR, timed"\nlicense = "Apache-2.0"\n\n'
        '[tool.flwr.app]\npublisher = "fedhur"\n\n'
        '[tool.flwr.app.components]\nserverapp = "timed_app:server"\nclientapp = "timed_app:client"\n\n'
        f"[tool.flwr.app.config]\n{toml_text(keys)}",
        encoding="utf-8",
    )
    return folder


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _empty(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _times(spans_folder: Path, output: Path) -> tuple[list[RoundTime], list[dict[str, Any]]]:
    """The rounds that count, and their lines of the history."""
    history = [json.loads(line) for line in (output / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    return round_times(read_spans(spans_folder), history)[WARM_UP:], history[WARM_UP:]


def round_times(spans: list[Span], history: list[dict[str, Any]]) -> list[RoundTime]:
    """Times of all rounds from the spans of a run.

    Raises:
        ValueError: The spans have another number of rounds than the history.
    """
    rounds = [span for span in spans if span.name == ROUND]
    if len(rounds) != len(history):
        raise ValueError(
            f"the history has {len(history)} rounds, but {len(rounds)} were timed: the strategy's server does not use "
            "StagedStrategy.run_round (fecosr.asynchronous does not)"
        )
    return [_round_time(span, spans, line) for span, line in zip(rounds, history, strict=True)]


def _round_time(round_: Span, spans: list[Span], line: dict[str, Any]) -> RoundTime:
    inside = [span for span in spans if span.end > round_.start and span.start < round_.end]
    calls = [span for span in inside if span.name.startswith(CALL) and span.thread == round_.thread]
    names = {span.name for span in calls}
    parts: dict[str, float] = {}
    most = 1
    edges = [round_.start, *(edge for call in calls for edge in (call.start, call.end)), round_.end]
    for number, (start, end) in enumerate(pairwise(edges)):
        lanes = {round_.thread}
        if number % 2:  # between the edges of a call: clients are at work
            within = [span for span in inside if span.name == MESSAGE and span.end > start and span.start < end]
            lanes = {span.thread for span in within} or lanes
            most = max(most, len(lanes))
        for name, seconds in attribute(inside, start, end, lanes, names).items():
            parts[name] = parts.get(name, 0.0) + seconds
    whole: dict[str, float] = {}
    own: dict[str, float] = {}
    until: dict[tuple[str, str], float] = {}
    for span in inside:
        own[span.name] = own.get(span.name, 0.0) + span.own
        if span.end > until.get((span.name, span.thread), 0.0):  # not inside a span of the same name
            whole[span.name] = whole.get(span.name, 0.0) + span.seconds
            until[span.name, span.thread] = span.end
    return RoundTime(round_.seconds, line["seconds"]["stages"], parts, whole, own, most)


def client_seconds(run: TimedRun, step: str) -> float:
    """Mean seconds of a client in one round for one of its steps, itself only; median over rounds."""
    return statistics.median(
        round_.own.get(step, 0.0) / line["clients"] for round_, line in zip(run.rounds, run.history, strict=True)
    )
