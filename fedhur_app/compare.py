"""`fedhur compare`: several strategies, each with several seeds, in tables with intervals and tests.

`fedhur markets` (markets.py) is the same with other fixed changes and another report.

Every run is a `fedhur run` in a process of its own. Its folder alone says whether it is finished, so the same command
goes on where it was stopped. Tables are made from the folders of the runs that completed.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from fedhur_app.config import ConfigError, Settings, flatten, load_settings, read_config_file
from fedhur_app.reporting.comparison import write_report
from fedhur_app.reporting.outcomes import Outcome, Run, read_outcome
from fedhur_app.reporting.tables import number_text
from fedhur_app.sweep import (
    OF_EVERY_RUN,
    OUTPUT_LOG,
    Ended,
    Say,
    SweepError,
    collected_signals,
    locked,
    run_all,
    run_command,
    set_items,
    shown,
)

CHANGES = (*set_items(OF_EVERY_RUN), "evaluation.per_user=true")  # before the caller's own


@dataclass(frozen=True)
class Command:
    """In what the commands that make many runs differ.

    Attributes:
        name: Of the command.
        changes: Items `key=value` for every run, before the caller's own.
        report: Writes tables of the outcomes, in the order of :func:`plan`, into a folder; returns the text to show.
    """

    name: str
    changes: tuple[str, ...]
    report: Callable[[list[Outcome], Path], str]


COMPARE = Command("compare", CHANGES, write_report)


def plan(
    dataset: str,
    strategies: Sequence[str],
    seeds: Sequence[int],
    changes: Sequence[str],
    folder: Path,
    command: Command = COMPARE,
) -> list[Run]:
    """All runs of a comparison, seed by seed, so that a stopped one has whole seeds.

    Args:
        dataset: A file in conf/dataset/.
        strategies: Files in conf/strategy/.
        seeds: Seeds, each from 0 to 2^32 - 1.
        changes: Items `key=value`, for every run.
        folder: Output folder of the comparison.
        command: Whose runs they are.

    Raises:
        ConfigError: An unknown name or key, an impossible value.
        SweepError: Nothing to compare, a name or seed twice, strategies that would be tested in different ways.
    """
    _check_named("strategy", strategies)
    check_seeds(seeds)
    overrides = shlex.join([*command.changes, *changes])
    settings = {strategy: load_settings(dataset, strategy, seeds[0], overrides) for strategy in strategies}
    check_comparable(settings)
    names = [strategy.replace("/", "-") for strategy in strategies]
    for strategy, name in zip(strategies, names, strict=True):
        if names.count(name) > 1:
            raise SweepError(f"strategy {strategy} and another one would both be kept in a folder named {name}")
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


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse no seeds, a seed twice, a seed that no run takes.

    Raises:
        SweepError: Naming the seed.
    """
    _check_named("seed", seeds)
    bad = [seed for seed in seeds if not 0 <= seed < 2**32]
    if bad:
        raise SweepError(f"seed {bad[0]} is not between 0 and {2**32 - 1}")


def _check_named(what: str, values: Sequence[object]) -> None:
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if not values or twice:
        raise SweepError(f"{what} {twice[0]} is named twice" if twice else f"name at least one {what}")


def check_comparable(settings: Mapping[str, Settings], what: str = "strategies") -> None:
    """All must be tested on the same rows with lists of the same length.

    Args:
        settings: By name.
        what: What the names are, for the error.

    Raises:
        SweepError: Naming two that are not, and the setting.
    """
    first, *others = settings
    for other in others:
        for key in ("dataset.name", "dataset.split", "dataset.synthetic", "dataset.markets", "evaluation.k"):
            one, two = (attrgetter(key)(settings[name]) for name in (first, other))
            if one != two:
                raise SweepError(
                    f"{what} {first} and {other} cannot be compared: {key} is {one} in one and {two} in the other. "
                    "Give all the same value with --set"
                )


def finished(runs: Sequence[Run], read: Callable[[Run], Outcome] = read_outcome) -> dict[Run, Outcome]:
    """The runs that earlier commands completed. Nothing is changed on the disk.

    Args:
        runs: The planned runs.
        read: What a run's folder tells.

    Raises:
        SweepError: One has other settings than wanted now, or a folder of these names was not made here.
    """
    found = {}
    for run in runs:
        if not run.folder.exists():
            continue
        outcome = read(run)
        if outcome.status == "completed":
            _check_settings(run)
            found[run] = outcome
        elif any(run.folder.iterdir()) and not (run.folder / OUTPUT_LOG).is_file():
            raise SweepError(
                f"{run.folder} is in the way: it holds no completed run and was not made by this command (no "
                f"{OUTPUT_LOG}). Move it away, or choose another --output"
            )
    return found


def _check_settings(run: Run) -> None:
    advice = "choose another --output, or delete that folder to run it again"
    try:
        before = read_config_file(run.folder / "config.yaml")
    except ConfigError as error:
        raise SweepError(
            f"the completed run in {run.folder} has settings that cannot be read: {error}; {advice}"
        ) from error
    old = flatten(before.model_dump())
    for key, new in flatten(run.settings.model_dump()).items():
        # `fedhur run` under Flower replaces auto by cpu where clients get no share of the GPU.
        if old[key] != new and (key, old[key], new) != ("device", "cpu", "auto"):
            raise SweepError(
                f"the completed run in {run.folder} has {key}={shown(old[key])}, wanted now is {shown(new)}: {advice}"
            )


def compare(
    runs: list[Run],
    folder: Path,
    changes: Sequence[str],
    runtime: str,
    jobs: int,
    say: Say,
    command: Command = COMPARE,
) -> int:
    """Do the runs that are not finished yet, then write and show the tables.

    Args:
        runs: What :func:`plan` gave.
        folder: Output folder of the comparison; made if absent.
        changes: The changes that :func:`plan` got.
        runtime: `local` or `flower`.
        jobs: Runs at once, >= 1.
        say: Takes each line or text for people.
        command: The command that :func:`plan` got.

    Returns:
        The exit status: 0 if all runs completed, 1 if one failed, 130 if a signal stopped the comparison.

    Raises:
        SweepError: The folder does not fit; nothing was run or removed then.
        DataError: The data set is unknown or cannot be fetched.
    """

    def words(run: Run) -> list[str]:
        return command_of(run, runtime, [*command.changes, *changes])

    outcomes, stopped = carry_out(runs, folder, words, jobs, say, command.name)
    say("")
    say(command.report(outcomes, folder))
    return ended(outcomes, stopped, folder, say)


def carry_out(
    runs: Sequence[Run],
    folder: Path,
    words: Callable[[Run], list[str]],
    jobs: int,
    say: Say,
    name: str,
    read: Callable[[Run], Outcome] = read_outcome,
) -> tuple[list[Outcome], bool]:
    """Do the runs that are not finished yet.

    Args:
        runs: All runs, each with a folder of its own below `folder`.
        folder: Output folder; made if absent.
        words: The command of a run.
        jobs: Runs at once, >= 1.
        say: Takes each line for people.
        name: Of the `fedhur` command whose runs they are.
        read: What a run's folder tells.

    Returns:
        What became of the runs, in their order; whether a signal stopped them.

    Raises:
        SweepError: The folder does not fit; nothing was run or removed then.
        DataError: A data set is unknown or cannot be fetched.
    """
    if (folder / "result.json").exists():
        raise SweepError(f"{folder} holds a single run: choose another --output")
    with locked(folder, name) as lock:
        say(f"output: {folder}")
        outcomes = finished(runs, read)
        waiting = {run.folder: run for run in runs if run not in outcomes}
        if outcomes:
            say(f"{len(outcomes)} of {len(runs)} runs are completed already")
        for dataset in dict.fromkeys(run.settings.dataset.name for run in waiting.values()):
            _fetch(dataset, say)

        def note(process: Ended) -> None:
            run = waiting[process.folder]
            outcomes[run] = outcome = _outcome_of(run, process, read)
            say(f"[{len(outcomes)}/{len(runs)}] {_progress_line(outcome)}")

        with collected_signals() as signals:
            stopped = run_all(waiting, lambda path: words(waiting[path]), jobs, note, lock, signals, say)
    for run in runs:
        if run not in outcomes:  # a run may have completed while it was being stopped
            outcome = read(run)
            outcomes[run] = outcome if outcome.status == "completed" else Outcome(run, "not run")
    return [outcomes[run] for run in runs], stopped


def ended(outcomes: Sequence[Outcome], stopped: bool, folder: Path, say: Say) -> int:
    """Say how it ended; returns the exit status (0: all completed, 1: a run failed, 130: stopped)."""
    if stopped:
        say("stopped; the same command with --output goes on with the runs that are missing")
    say(f"output: {folder}")
    failed = any(outcome.status == "failed" for outcome in outcomes)
    return 130 if stopped else int(failed)


def command_of(run: Run, runtime: str, changes: Sequence[str]) -> list[str]:
    """The `fedhur run` that does it."""
    return run_command(run.dataset, run.strategy, run.seed, run.folder, changes, runtime)


def _fetch(dataset: str, say: Say) -> None:
    """Download the data set once, before several runs would."""
    from fedhur_app.data import catalog

    entry = catalog.DATASETS.get(dataset)
    if entry is None or entry.generate is None:
        catalog.fetch(dataset, say=say)


def _outcome_of(run: Run, process: Ended, read: Callable[[Run], Outcome]) -> Outcome:
    if (run.folder / "result.json").is_file():
        return read(run)
    return Outcome(run, "failed", f"{process.reason} (see {run.folder / OUTPUT_LOG})")


def _progress_line(outcome: Outcome) -> str:
    run = outcome.run
    if outcome.status != "completed":
        return f"{run.label} failed: {outcome.reason}"
    metric = f"ndcg@{run.settings.evaluation.k}"
    value = outcome.values.get(f"test_{metric}", math.nan)
    seconds = number_text(outcome.values.get("seconds", math.nan), 0)
    return f"{run.label}: test {metric} {number_text(value, 4)}, {seconds} s"
