"""A study from its definition to its report.

The machinery is that of `fedhur compare` (compare.py): a run is finished if its folder says so, a stopped study goes
on, a failed run is named and stops nothing. An arm with a worker has its runs made by a module of studies/workers/.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedhur_app import compare
from fedhur_app.files import read_json, write_json
from fedhur_app.reporting.outcomes import Outcome, Run
from fedhur_app.studies.definition import Definition
from fedhur_app.studies.plan import StudyRun, command_of, plan, read_run
from fedhur_app.studies.report import write_study
from fedhur_app.studies.reuse import take_over
from fedhur_app.sweep import Say, SweepError

_OPTIONS = "workers.json"  # data, arm and seed of a run -> its worker and that worker's options


@dataclass(frozen=True)
class Making:
    """How a study is made.

    Attributes:
        study: Its name.
        command: The command that makes it again.
        quick: Whether it is the small version.
    """

    study: str
    command: str
    quick: bool


def study(
    definition: Definition,
    making: Making,
    folder: Path,
    jobs: int,
    say: Say,
    report_only: bool = False,
    reuse: Sequence[Path] = (),
) -> int:
    """Make the runs of a study that are missing, then its report.

    Args:
        definition: The study, or its small version.
        making: Its name and command.
        folder: Output folder; made if absent.
        jobs: Runs at once, >= 1.
        say: Takes each line or text for people.
        report_only: Make no runs.
        reuse: Folders of other studies, whose runs of the same settings are copied.

    Returns:
        The exit status: 0 if all runs completed, 1 if one failed or is missing, 130 if a signal stopped the study.

    Raises:
        SweepError: The folder does not fit; nothing was run or removed then.
        DataError: A data set is unknown or cannot be fetched.
    """
    runs = plan(definition, folder)
    about = describe(definition, making)
    _check_folder(folder, making.study)
    _check_options(folder, runs)
    if report_only:
        completed = compare.finished(runs, read_run)
        if not completed:
            raise SweepError(f"{folder} holds none of these runs: run the study first, without --report-only")
        outcomes, stopped = [completed.get(run) or _found(run) for run in runs], False
    else:
        _note_options(folder, runs)
        if reuse:
            say(f"{take_over(runs, reuse)} runs taken over from other studies")
        made, stopped = compare.carry_out(runs, folder, _command, jobs, say, "study", read_run)
        outcomes = list(made)
    say("")
    say(write_study(definition, about, outcomes, folder))
    missing = report_only and any(outcome.status != "completed" for outcome in outcomes)
    return compare.ended(outcomes, stopped, folder, say) or int(missing)


def describe(definition: Definition, making: Making) -> dict[str, Any]:
    """What study.json says before there are tables and figures."""
    return {
        "study": making.study,
        "title": definition.title,
        "question": definition.question,
        "quick": making.quick,
        "command": making.command,
        "made": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "arms": [
            {
                "name": arm.name,
                "data": label,
                "dataset": data.dataset,
                "strategy": arm.strategy or definition.strategy,
                "set": [*definition.changes, *data.changes, *arm.changes],
                "x": arm.x,
                **({"worker": arm.worker, "options": arm.options} if arm.worker else {}),
            }
            for label, data in definition.datasets.items()
            for arm in definition.arms_on(label)
        ],
        "seeds": definition.seeds,
        "figures": [],
        "tables": [],
    }


def _command(run: Run) -> list[str]:
    assert isinstance(run, StudyRun)
    return command_of(run)


def _found(run: StudyRun) -> Outcome:
    return read_run(run) if (run.folder / "result.json").is_file() else Outcome(run, "not run")


def _check_folder(folder: Path, study: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise SweepError(f"{folder} is a file: choose another --output")
    other = read_json(folder / "study.json").get("study", study)
    if other != study:
        raise SweepError(f"{folder} holds the study {other}: choose another --output")


def _note_options(folder: Path, runs: Sequence[StudyRun]) -> None:
    """Write down the words that workers get for the runs that are to be made: they stand in no config.yaml."""
    new = {_key(run): _words(run) for run in runs if run.arm.worker and not (run.folder / "result.json").is_file()}
    if new:
        write_json(folder / _OPTIONS, read_json(folder / _OPTIONS) | new)


def _key(run: StudyRun) -> str:
    return f"{run.data}/{run.arm.name}/{run.seed}"


def _words(run: StudyRun) -> list[str | None]:
    return [run.arm.worker, *run.arm.options]


def _check_options(folder: Path, runs: Sequence[StudyRun]) -> None:
    """Completed runs must have been made with the worker's options that are wanted now."""
    noted = read_json(folder / _OPTIONS)
    for run in runs:
        now, old = _words(run), noted.get(_key(run), [None])
        if old != now and (run.folder / "result.json").is_file():
            raise SweepError(
                f"the run in {run.folder} was made by {json.dumps(old)}, wanted now is {json.dumps(now)}: choose "
                "another --output, or delete that folder to run it again"
            )
