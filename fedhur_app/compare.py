"""`fedhur compare`: several strategies, each with several seeds, in tables with intervals and tests.

Every run is a `fedhur run` in a process of its own. Its folder alone says whether it is finished, so the same command
goes on where it was stopped. Tables are made from the folders of the runs that completed.
"""

import contextlib
import csv
import fcntl
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from types import FrameType
from typing import Any, Literal

import numpy as np

from fedhur_app.config import ConfigError, Settings, load_settings, read_config_file
from fedhur_app.evaluation.statistics import (
    PairedTest,
    Summary,
    holm,
    paired_test,
    summarise,
    user_differences,
)
from fedhur_app.files import read_arrays, write_text

# Before the caller's own changes. One thread: runs share the cores. No checkpoints: a run that was cut off starts anew.
CHANGES = ("server.threads=1", "server.checkpoint_every=0", "evaluation.per_user=true")
OUTPUT_LOG = "output.log"  # what a run's process printed; in every folder that was made here
TESTED = ("ndcg", "recall", "mrr")
P_VALUES = ("t_p", "t_p_holm", "wilcoxon_p", "wilcoxon_p_holm")
KIB, MIB = 2**10, 2**20

_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0  # a run under Flower ends its SuperLink in that time
# Ways in which a folder that somebody edited, or that was half copied, cannot be read.
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile)

Say = Callable[[str], object]


class CompareError(ValueError):
    """Runs that cannot be compared, or an output folder that does not fit; the text says what to do."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a comparison.

    Attributes:
        dataset: Name of a file in conf/dataset/.
        strategy: Name of a file in conf/strategy/.
        seed: Seed of the run.
        settings: What these and the changes resolve to.
        folder: Its output folder.
    """

    dataset: str
    strategy: str
    seed: int
    settings: Settings
    folder: Path

    @property
    def label(self) -> str:
        """Name for people."""
        return f"{self.strategy} seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        run: The run.
        status: `completed`, `failed`, or `not run` (the comparison was stopped before it ended).
        reason: Why it failed, one line.
        values: What it measured, by column of results.csv; empty unless completed.
        users: Arrays of users.npz; empty unless completed with `evaluation.per_user`.
        code: Fingerprint of the code that ran.
        absent: Clients that did not answer at the test.
    """

    run: Run
    status: Literal["completed", "failed", "not run"]
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict)
    users: dict[str, np.ndarray] = field(default_factory=dict)
    code: str = ""
    absent: int = 0


@dataclass(frozen=True)
class Comparison:
    """One strategy against the best of the others in one metric.

    Attributes:
        metric: Such as `ndcg@10`.
        level: What is paired, `seeds` or `users`.
        strategy: The strategy.
        against: The other strategy with the highest mean of the metric.
        test: Differences are `strategy` minus `against`.
        t_holm: p value of the t test after Holm's correction.
        wilcoxon_holm: p value of the signed-rank test after Holm's correction.
    """

    metric: str
    level: Literal["seeds", "users"]
    strategy: str
    against: str
    test: PairedTest
    t_holm: float
    wilcoxon_holm: float


@dataclass(frozen=True)
class Table:
    """A table of texts, for Markdown and LaTeX.

    Attributes:
        title: One line above it.
        head: Names of the columns.
        rows: Cells, as many a row as the head has.
        left: Number of columns, from the first, that are aligned to the left.
        bold: (row, column) of cells in bold.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    left: int
    bold: set[tuple[int, int]]


# --- planning -------------------------------------------------------------------------------------------------------


def plan(
    dataset: str, strategies: Sequence[str], seeds: Sequence[int], changes: Sequence[str], folder: Path
) -> list[Run]:
    """All runs of a comparison, seed by seed, so that a stopped one has whole seeds.

    Args:
        dataset: A file in conf/dataset/.
        strategies: Files in conf/strategy/.
        seeds: Seeds, each from 0 to 2^32 - 1.
        changes: Items `key=value`, for every run.
        folder: Output folder of the comparison.

    Raises:
        ConfigError: An unknown name or key, an impossible value.
        CompareError: Nothing to compare, a name or seed twice, strategies that would be tested in different ways.
    """
    for what, values in (("strategy", strategies), ("seed", seeds)):
        twice = [value for i, value in enumerate(values) if value in values[:i]]
        if not values or twice:
            raise CompareError(f"{what} {twice[0]} is named twice" if twice else f"name at least one {what}")
    bad = [seed for seed in seeds if not 0 <= seed < 2**32]
    if bad:
        raise CompareError(f"seed {bad[0]} is not between 0 and {2**32 - 1}")
    overrides = shlex.join([*CHANGES, *changes])
    settings = {strategy: load_settings(dataset, strategy, seeds[0], overrides) for strategy in strategies}
    _check_comparable(settings)
    names = [strategy.replace("/", "-") for strategy in strategies]
    for strategy, name in zip(strategies, names, strict=True):
        if names.count(name) > 1:
            raise CompareError(f"strategy {strategy} and another one would both be kept in a folder named {name}")
    return [
        Run(
            dataset,
            strategy,
            seed,
            settings[strategy].model_copy(update={"seed": seed}),
            folder / "runs" / name / f"seed-{seed}",
        )
        for seed in seeds
        for strategy, name in zip(strategies, names, strict=True)
    ]


def _check_comparable(settings: dict[str, Settings]) -> None:
    """All strategies must be tested on the same rows with lists of the same length."""
    first, *others = settings
    for other in others:
        for key in ("dataset.name", "dataset.split", "dataset.synthetic", "evaluation.k"):
            one, two = (attrgetter(key)(settings[name]) for name in (first, other))
            if one != two:
                raise CompareError(
                    f"strategies {first} and {other} cannot be compared: {key} is {one} in one and {two} in the other. "
                    "Give all the same value with --set"
                )


def read_outcome(run: Run) -> Outcome:
    """What the run's folder tells; a run without a result, or with damaged files, is a failed one."""
    try:
        result = json.loads((run.folder / "result.json").read_text(encoding="utf-8"))
        if result["status"] != "completed":
            return Outcome(run, "failed", _one_line(str(result["reason"])))
        users = _read_users(run.folder / "users.npz") if run.settings.evaluation.per_user else {}
        lines = (run.folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        values = _values(result, [json.loads(line) for line in lines])
        absent = len(result.get("absent_at_test", {}))
        return Outcome(run, "completed", "", values, users, str(result["versions"]["code"]), absent)
    except FileNotFoundError as error:
        return Outcome(run, "failed", f"there is no {Path(str(error.filename)).name} in {run.folder}")
    except _DAMAGE as error:
        return Outcome(run, "failed", f"files in {run.folder} are damaged ({type(error).__name__}: {error})")


def _values(result: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, float]:
    """Columns of results.csv. A metric over nobody (null in JSON) has none."""
    values: dict[str, float] = {name: int(result[name]) for name in ("best_round", "rounds")}
    for part in ("validation", "test"):
        values |= {f"{part}_{name}": float(value) for name, value in result[part].items() if value is not None}
    for direction in ("bytes_up", "bytes_down"):
        values[direction] = int(result[direction])
        values[f"{direction}_per_client_round"] = fmean(float(line[f"{direction}_per_client"]) for line in history)
    return values | {"users_tested": int(result["users_evaluated"]), "seconds": float(result["seconds"])}


def _read_users(path: Path) -> dict[str, np.ndarray]:
    users = read_arrays(path)
    numbers = users["user"]
    if any(users[name].shape != numbers.shape for name in TESTED) or np.any(np.diff(numbers) <= 0):
        raise ValueError("users.npz must hold every user once, in rising order")
    return users


def finished(runs: list[Run]) -> dict[Run, Outcome]:
    """The runs that earlier commands completed. Nothing is changed on the disk.

    Raises:
        CompareError: One has other settings than wanted now, or a folder of these names was not made here.
    """
    found = {}
    for run in runs:
        if not run.folder.exists():
            continue
        outcome = read_outcome(run)
        if outcome.status == "completed":
            _check_settings(run)
            found[run] = outcome
        elif any(run.folder.iterdir()) and not (run.folder / OUTPUT_LOG).is_file():
            raise CompareError(
                f"{run.folder} is in the way: it holds no completed run and was not made by `fedhur compare` (no "
                f"{OUTPUT_LOG}). Move it away, or choose another --output"
            )
    return found


def _check_settings(run: Run) -> None:
    advice = "choose another --output, or delete that folder to run it again"
    try:
        before = read_config_file(run.folder / "config.yaml")
    except ConfigError as error:
        raise CompareError(
            f"the completed run in {run.folder} has settings that cannot be read: {error}; {advice}"
        ) from error
    for key, old, new in _differences(before.model_dump(), run.settings.model_dump()):
        # `fedhur run` under Flower replaces auto by cpu where clients get no share of the GPU.
        if (key, old, new) != ("device", "cpu", "auto"):
            raise CompareError(
                f"the completed run in {run.folder} has {key}={_yaml(old)}, wanted now is {_yaml(new)}: {advice}"
            )


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, value in new.items():
        if isinstance(value, dict):
            yield from _differences(old[key], value, f"{prefix}{key}.")
        elif old[key] != value:
            yield f"{prefix}{key}", old[key], value


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- running --------------------------------------------------------------------------------------------------------


def compare(runs: list[Run], folder: Path, changes: Sequence[str], runtime: str, jobs: int, say: Say) -> int:
    """Do the runs that are not finished yet, then write and show the tables.

    Args:
        runs: What :func:`plan` gave.
        folder: Output folder of the comparison; made if absent.
        changes: The changes that :func:`plan` got.
        runtime: `local` or `flower`.
        jobs: Runs at once, >= 1.
        say: Takes each line or text for people.

    Returns:
        The exit status: 0 if all runs completed, 1 if one failed, 130 if a signal stopped the comparison.

    Raises:
        CompareError: The folder does not fit; nothing was run or removed then.
        DataError: The data set is unknown or cannot be fetched.
    """
    if (folder / "result.json").exists():
        raise CompareError(f"{folder} holds a single run: choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompareError(f"cannot write to {folder} ({error.strerror}): choose another --output") from error
    with _locked(folder) as lock:
        say(f"output: {folder}")
        outcomes = finished(runs)
        waiting = [run for run in runs if run not in outcomes]
        if outcomes:
            say(f"{len(outcomes)} of {len(runs)} runs are completed already")
        if waiting:
            _fetch(waiting[0].settings.dataset.name, say)

        def ended(run: Run, code: int) -> None:
            outcomes[run] = outcome = _outcome_of_process(run, code)
            say(f"[{len(outcomes)}/{len(runs)}] {_progress_line(outcome)}")

        stopped = _execute(waiting, lambda run: command_of(run, runtime, changes), jobs, ended, lock, say)
    for run in runs:
        if run not in outcomes:  # a run may have completed while it was being stopped
            outcome = read_outcome(run)
            outcomes[run] = outcome if outcome.status == "completed" else Outcome(run, "not run")
    say("")
    say(write_report([outcomes[run] for run in runs], folder))
    if stopped:
        say("stopped; the same command with --output goes on with the runs that are missing")
    say(f"output: {folder}")
    failed = any(outcome.status == "failed" for outcome in outcomes.values())
    return 130 if stopped else int(failed)


def command_of(run: Run, runtime: str, changes: Sequence[str]) -> list[str]:
    """The `fedhur run` that does it."""
    options = [word for change in (*CHANGES, *changes) for word in ("--set", change)]
    return [
        *(sys.executable, "-m", "fedhur_app.cli", "run", "--runtime", runtime, "--dataset", run.dataset),
        *("--strategy", run.strategy, "--seed", str(run.seed), "--output", str(run.folder), *options),
    ]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Keep other comparisons out of a folder.

    The runs inherit the lock: should this process be killed, it lasts until the last of them has ended.
    """
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CompareError(
                f"another `fedhur compare`, or a run that one left behind, is at work in {folder}: wait for its end, "
                "or choose another --output"
            ) from error
        except OSError:
            pass  # a file system without locks: then nobody is kept out
        yield handle
    finally:
        os.close(handle)


def _fetch(dataset: str, say: Say) -> None:
    """Download the data set once, before several runs would."""
    from fedhur_app.data import catalog

    entry = catalog.DATASETS.get(dataset)
    if entry is None or entry.build is not None:
        catalog.fetch(dataset, say=say)


def _execute(
    runs: list[Run],
    command: Callable[[Run], list[str]],
    jobs: int,
    ended: Callable[[Run, int], None],
    lock: int,
    say: Say,
) -> bool:
    """Run the commands, `jobs` at once; tells whether a signal stopped that. No process is left behind."""
    waiting, running = deque(runs), dict[Run, subprocess.Popen[bytes]]()
    with _collected_signals() as received:
        try:
            while (waiting or running) and not received:
                while waiting and len(running) < jobs:
                    run = waiting.popleft()
                    running[run] = _start(run, command(run), lock)
                time.sleep(_POLL_SECONDS)
                for run, process in list(running.items()):
                    if process.poll() is not None:
                        del running[run]
                        ended(run, process.returncode)
        finally:
            if running:
                with contextlib.suppress(OSError):  # a closed pipe must not keep the runs alive
                    say(f"stopping {len(running)} runs")
                _stop(list(running.values()), received)
        return bool(waiting or running)


def _start(run: Run, command: list[str], lock: int) -> "subprocess.Popen[bytes]":
    """Start a run in a fresh folder. What a failed or unfinished one left there goes; `finished` has looked at it."""
    if run.folder.exists():
        rmtree(run.folder)
    run.folder.mkdir(parents=True)
    with (run.folder / OUTPUT_LOG).open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for this process, which then stops the runs
        )


@contextlib.contextmanager
def _collected_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list instead of being ended by them between two statements."""
    received: list[int] = []

    def collect(number: int, _: FrameType | None) -> None:
        received.append(number)

    def ignore(number: int, _: FrameType | None) -> None:
        # What this process ignores (SIGINT in the background of a script, SIGHUP under nohup) the runs would ignore
        # for good; what it handles they may handle.
        pass

    old = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            ignored = signal.getsignal(number) is signal.SIG_IGN
            old[number] = signal.signal(number, ignore if ignored else collect)
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _stop(processes: "list[subprocess.Popen[bytes]]", received: list[int]) -> None:
    """End processes: first asked, then, or after another signal, forced."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline, before = time.monotonic() + _STOP_SECONDS, len(received)
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or len(received) > before:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _outcome_of_process(run: Run, code: int) -> Outcome:
    outcome = read_outcome(run)
    if outcome.status == "completed" or (run.folder / "result.json").is_file():
        return outcome
    if code < 0:
        return Outcome(run, "failed", f"its process was ended by {signal.Signals(-code).name}")
    log = run.folder / OUTPUT_LOG
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = lines[-1].strip() if lines else f"its process ended with status {code}"
    return Outcome(run, "failed", f"{said} (see {log})")


def _progress_line(outcome: Outcome) -> str:
    run = outcome.run
    if outcome.status != "completed":
        return f"{run.label} failed: {outcome.reason}"
    metric = f"ndcg@{run.settings.evaluation.k}"
    value = outcome.values.get(f"test_{metric}", math.nan)
    return f"{run.label}: test {metric} {_number(value, 4)}, {outcome.values['seconds']:.0f} s"


def _one_line(text: str) -> str:
    return text.strip().partition("\n")[0]


# --- numbers --------------------------------------------------------------------------------------------------------


def summaries(outcomes: list[Outcome]) -> dict[str, dict[str, Summary]]:
    """Summary over the completed seeds of every value, by strategy and column of results.csv."""
    columns = _columns(outcomes)
    return {
        strategy: {
            column: summarise([outcome.values[column] for outcome in completed if column in outcome.values])
            for column in columns
        }
        for strategy, completed in _completed(outcomes).items()
    }


def paired_tests(outcomes: list[Outcome]) -> list[Comparison]:
    """Every strategy against the best of the others, in each tested metric, paired by seeds and by users.

    Means that decide who is best are over each strategy's completed seeds; a test uses the seeds that both completed.
    Holm's correction is over the comparisons of one metric, level and kind of test. Best against second best is one
    comparison, though it stands in two rows.
    """
    found = []
    means = {name: {c: s.mean for c, s in columns.items()} for name, columns in summaries(outcomes).items()}
    completed = _completed(outcomes)
    for base in TESTED:
        metric = f"{base}@{outcomes[0].run.settings.evaluation.k}"
        column = f"test_{metric}"
        mean = {name: values[column] for name, values in means.items() if not math.isnan(values.get(column, math.nan))}
        best = {
            name: max((other for other in mean if other != name), key=mean.__getitem__, default="") for name in mean
        }
        pairs = [(name, other) for name, other in best.items() if other]
        levels: tuple[Literal["seeds", "users"], ...] = ("seeds", "users")
        for level in levels:
            tests = []
            for name, other in pairs:
                shared = _shared_seeds(completed[name], completed[other])
                differences = _seed_differences(shared, column) if level == "seeds" else _user_differences(shared, base)
                tests.append(paired_test(differences))
            t_holm = _holm_of_pairs(pairs, [test.t_p for test in tests])
            wilcoxon_holm = _holm_of_pairs(pairs, [test.wilcoxon_p for test in tests])
            found += [
                Comparison(metric, level, *pair, test, t_p, wilcoxon_p)
                for pair, test, t_p, wilcoxon_p in zip(pairs, tests, t_holm, wilcoxon_holm, strict=True)
            ]
    return found


def _completed(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """The completed runs of every strategy, also of one that has none."""
    by_strategy: dict[str, list[Outcome]] = {outcome.run.strategy: [] for outcome in outcomes}
    for outcome in outcomes:
        if outcome.status == "completed":
            by_strategy[outcome.run.strategy].append(outcome)
    return by_strategy


def _columns(outcomes: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(column for outcome in outcomes for column in outcome.values))


def _shared_seeds(first: list[Outcome], second: list[Outcome]) -> list[tuple[Outcome, Outcome]]:
    by_seed = {outcome.run.seed: outcome for outcome in second}
    return [(outcome, by_seed[outcome.run.seed]) for outcome in first if outcome.run.seed in by_seed]


def _seed_differences(shared: list[tuple[Outcome, Outcome]], column: str) -> list[float]:
    return [
        first.values[column] - second.values[column]
        for first, second in shared
        if column in first.values and column in second.values
    ]


def _user_differences(shared: list[tuple[Outcome, Outcome]], name: str) -> np.ndarray:
    def values_of(outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
        return outcome.users["user"], outcome.users[name]

    return user_differences([(values_of(one), values_of(two)) for one, two in shared if one.users and two.users])


def _holm_of_pairs(pairs: list[tuple[str, str]], p_values: list[float]) -> list[float]:
    """Holm's correction over distinct pairs: the same two strategies the other way round have the same p value."""
    distinct = dict(zip(map(frozenset, pairs), p_values, strict=True))
    corrected = dict(zip(distinct, holm(list(distinct.values())).tolist(), strict=True))
    return [corrected[frozenset(pair)] for pair in pairs]


# --- tables ---------------------------------------------------------------------------------------------------------


def write_report(outcomes: list[Outcome], folder: Path) -> str:
    """Write results.csv, summary.csv, tests.csv, table.md and table.tex; returns the text of table.md.

    Args:
        outcomes: Of all runs, in the order of :func:`plan`.
        folder: Where to write.
    """
    summary, tests = summaries(outcomes), paired_tests(outcomes)
    columns = _columns(outcomes)
    write_text(
        folder / "results.csv",
        _csv(
            ["strategy", "seed", "status", "reason", *columns],
            [
                [o.run.strategy, o.run.seed, o.status, o.reason, *(o.values.get(column) for column in columns)]
                for o in outcomes
            ],
        ),
    )
    write_text(
        folder / "summary.csv",
        _csv(
            ["strategy", "metric", "n", "mean", "sd", "ci_low", "ci_high"],
            [
                [strategy, column, s.n, s.mean, s.sd, s.low, s.high]
                for strategy, by_column in summary.items()
                for column, s in by_column.items()
            ],
        ),
    )
    write_text(
        folder / "tests.csv",
        _csv(
            [*("metric", "pairs", "strategy", "against", "n", "difference"), *P_VALUES],
            [[c.metric, c.level, c.strategy, c.against, c.test.n, c.test.difference, *_p_values(c)] for c in tests],
        ),
    )
    title, tables, notes = _title(outcomes), _tables(summary, tests), _notes(outcomes, tests)
    markdown = to_markdown(title, tables, notes)
    write_text(folder / "table.md", markdown)
    write_text(folder / "table.tex", to_latex(title, tables, notes))
    return markdown


def _csv(head: list[str], rows: list[list[Any]]) -> str:
    """CSV with numbers in full; empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row])
    return text.getvalue()


def _title(outcomes: list[Outcome]) -> str:
    strategies = dict.fromkeys(outcome.run.strategy for outcome in outcomes)
    seeds = dict.fromkeys(str(outcome.run.seed) for outcome in outcomes)
    name = "seed" if len(seeds) == 1 else "seeds"
    return f"{', '.join(strategies)} on {outcomes[0].run.settings.dataset.name}, {name} {', '.join(seeds)}"


def _tables(summary: dict[str, dict[str, Summary]], tests: list[Comparison]) -> list[Table]:
    columns = list(next(iter(summary.values())))  # the same of all strategies
    if not columns:
        return []  # no run completed

    def metrics_of(part: str) -> list[tuple[str, str]]:
        return [(column, column.removeprefix(part)) for column in columns if column.startswith(part)]

    cost = [
        ("bytes_up", "MiB up", MIB, 2),
        ("bytes_down", "MiB down", MIB, 2),
        ("bytes_up_per_client_round", "KiB up a client and round", KIB, 1),
        ("bytes_down_per_client_round", "KiB down a client and round", KIB, 1),
        ("rounds", "rounds", 1, 1),
        ("best_round", "best round", 1, 1),
        ("seconds", "seconds", 1, 1),
    ]
    tables = [
        _table("Test, mean ± standard deviation", summary, metrics_of("test_"), _spread),
        _table("Test, 95 % confidence interval of the mean", summary, metrics_of("test_"), _interval),
        _table("Validation (best round), mean ± standard deviation", summary, metrics_of("validation_"), _spread),
        _table(
            "Cost, mean ± standard deviation",
            summary,
            [(column, name) for column, name, _, _ in cost],
            lambda s, j: _spread(s, j, cost[j][2], cost[j][3]),
            lowest=True,
            plain=("rounds", "best_round"),
        ),
    ]
    if tests:
        tables.append(_test_table(tests))
    return tables


def _table(
    title: str,
    summary: dict[str, dict[str, Summary]],
    columns: list[tuple[str, str]],
    cell: Callable[[Summary, int], str],
    lowest: bool = False,
    plain: tuple[str, ...] = (),
) -> Table:
    """One row a strategy, one column a value, the best mean in bold (not in the columns `plain`)."""
    empty = summarise([])
    rows, bold = [], set()
    for strategy, by_column in summary.items():
        found = [by_column.get(column, empty) for column, _ in columns]
        seeds = max((s.n for s in by_column.values()), default=0)
        rows.append([strategy, str(seeds), *(cell(s, j) for j, s in enumerate(found))])
    for j, (column, _) in enumerate(columns):
        means = [by_column.get(column, empty).mean for by_column in summary.values()]
        present = [mean for mean in means if not math.isnan(mean)]
        if len(present) > 1 and column not in plain:
            best = min(present) if lowest else max(present)
            bold |= {(i, j + 2) for i, mean in enumerate(means) if mean == best and rows[i][j + 2] != "-"}
    return Table(title, ["strategy", "seeds", *(name for _, name in columns)], rows, 1, bold)


def _test_table(tests: list[Comparison]) -> Table:
    head = ["metric", "pairs", "strategy", "against", "n", "difference", "t p", "t p (Holm)", "W p", "W p (Holm)"]
    rows = [
        [c.metric, c.level, c.strategy, c.against, str(c.test.n), _number(c.test.difference, 4)]
        + [_p_text(p) for p in _p_values(c)]
        for c in tests
    ]
    return Table("Paired tests (t test, and W: Wilcoxon's signed ranks)", head, rows, 4, set())


def _p_values(comparison: Comparison) -> tuple[float, ...]:
    """In the order of :data:`P_VALUES`."""
    test = comparison.test
    return test.t_p, comparison.t_holm, test.wilcoxon_p, comparison.wilcoxon_holm


def _spread(summary: Summary, _: int, unit: float = 1, digits: int = 4) -> str:
    mean = _number(summary.mean / unit, digits)
    return mean if summary.n < 2 else f"{mean} ± {_number(summary.sd / unit, digits)}"


def _interval(summary: Summary, _: int) -> str:
    return "-" if summary.n < 2 else f"[{_number(summary.low, 4)}, {_number(summary.high, 4)}]"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: never -0.0000


def _p_text(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}"


def _notes(outcomes: list[Outcome], tests: list[Comparison]) -> list[str]:
    """What a reader of the tables must know, failed runs first."""
    notes = [f"{o.run.label} failed and is left out: {o.reason}" for o in outcomes if o.status == "failed"]
    missing = [outcome.run.label for outcome in outcomes if outcome.status == "not run"]
    if missing:
        notes.append(f"Stopped before these runs ended: {', '.join(missing)}.")
    notes += [f"{o.run.label}: {o.absent} clients did not answer at the test." for o in outcomes if o.absent]
    if len({outcome.code for outcome in outcomes if outcome.code}) > 1:
        notes.append("The runs were not all made by the same version of the code (versions in each config.yaml).")
    notes.append(
        "Mean and standard deviation (n - 1) are over seeds, intervals are Student's t over seeds. Bold: the best mean "
        "of a column. Seconds are wall time, longer where several runs share the machine."
    )
    if not tests:
        return notes
    notes.append(
        "Every strategy is tested against the one with the best mean among the others; the difference is strategy "
        "minus against. Holm's correction is over the comparisons of one metric, one kind of pairs and one kind of "
        "test; best against second best stands in two rows and counts once. It does not cover that the opponent was "
        "chosen by the same runs."
    )
    if any(math.isnan(c.test.t_p) or math.isnan(c.test.wilcoxon_p) for c in tests):
        notes.append(
            "A p value of - is a test that cannot be made: fewer than two pairs, or differences that are all the same."
        )
    notes += [
        f"Pairs of seeds: with {n} seeds the smallest possible two-sided p of Wilcoxon's test is 2^(1-{n}) = "
        f"{2.0 ** (1 - n):.2g}, however clear the difference."
        for n in sorted({c.test.n for c in tests if c.level == "seeds" and c.test.n > 1})
    ]
    notes.append(
        "Pairs of users: one value a user, its difference averaged over the seeds in which both strategies tested it. "
        "These tests treat users as independent, but all users share the same seeds (splits and initialisations) and "
        "the models trained on each other's data: they tell about more users, not about more seeds."
    )
    if outcomes[0].run.settings.dataset.name == "synthetic":
        notes.append("Synthetic data are drawn anew for every seed: a user number is another user in each of them.")
    return notes


def to_markdown(title: str, tables: list[Table], notes: list[str]) -> str:
    """The tables with padded columns, which also read well as plain text."""
    parts = [f"# {title}\n"]
    for table in tables:
        grid = [table.head, *table.rows]
        texts = [
            [_markdown(cell, (i - 1, j) in table.bold) for j, cell in enumerate(row)] for i, row in enumerate(grid)
        ]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = [
            [text.ljust(width) if j < table.left else text.rjust(width) for j, (text, width) in enumerate(pairs)]
            for pairs in (list(zip(row, widths, strict=True)) for row in texts)
        ]
        rule = ["-" * width if j < table.left else "-" * (width - 1) + ":" for j, width in enumerate(widths)]
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))
        parts.append(f"{table.title}:\n\n{text}\n")
    return "\n".join([*parts, *(f"- {note}" for note in notes)]) + "\n"


def _markdown(text: str, bold: bool) -> str:
    text = text.replace("|", "\\|")
    return f"**{text}**" if bold else text


def to_latex(title: str, tables: list[Table], notes: list[str]) -> str:
    r"""The tables as plain `tabular`, to \input into any document; no package is needed."""
    parts = [f"% {_one_line(title)}"]
    for table in tables:
        columns = "".join("l" if j < table.left else "r" for j in range(len(table.head)))
        lines = [
            " & ".join(
                rf"\textbf{{{latex_text(cell)}}}" if (i, j) in table.bold else latex_text(cell)
                for j, cell in enumerate(row)
            )
            + r" \\"
            for i, row in enumerate([table.head, *table.rows], -1)
        ]
        parts += [
            rf"\noindent {latex_text(table.title)}\par\smallskip",
            rf"\noindent\begin{{tabular}}{{{columns}}}",
            *(r"\hline", lines[0], r"\hline", *lines[1:], r"\hline"),
            r"\end{tabular}\par\bigskip",
        ]
    parts += [rf"\noindent {{\footnotesize {latex_text(note)}\par}}" for note in notes]
    return "\n".join(parts) + "\n"


_LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "`": "'",
        "±": r"$\pm$",
    }
)


def latex_text(text: str) -> str:
    """Text with all of LaTeX's special characters escaped, and real minus signs.

    Letters beyond Latin ones, and signs that no standard font has, become question marks: they would be errors.
    """
    escaped = re.sub(r"(?<!\w)-(?=\d)", "$-$", text.translate(_LATEX))
    return "".join(c if c.isascii() or (c.isalpha() and c < "\u0180") else "?" for c in escaped)
