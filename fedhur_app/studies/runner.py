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
from fedhur_app.files import read_json
from fedhur_app.reporting.outcomes import Outcome, Run
from fedhur_app.studies.definition import Definition
from fedhur_app.studies.plan import StudyRun, command_of, plan, read_run
from fedhur_app.studies.report import write_study
from fedhur_app.studies.reuse import take_over
from fedhur_app.sweep import Say, SweepError


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
    _check_options(folder, runs)
    if report_only:
        if not folder.is_dir():
            raise SweepError(f"{folder} does not exist: run the study first, without --report-only")
        outcomes, stopped = [_found(run) for run in runs], False
    else:
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


def _check_options(folder: Path, runs: Sequence[StudyRun]) -> None:
    """A worker's options stand in no config.yaml: what study.json says of them must still hold."""
    before = {
        (arm.get("data"), arm.get("name")): [arm.get("worker"), *arm.get("options", [])]
        for arm in read_json(folder / "study.json").get("arms", [])
    }
    for run in runs:
        now: list[str | None] = [run.arm.worker, *run.arm.options]
        old = before.get((run.data, run.arm.name), now)
        if old != now and (run.folder / "result.json").is_file():
            raise SweepError(
                f"the run in {run.folder} was made by {json.dumps(old)}, wanted now is {json.dumps(now)}: choose "
                "another --output, or delete that folder to run it again"
            )
