"""The planned runs of a study, their commands, and what their folders tell."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from fedhur_app import compare
from fedhur_app.config import ConfigError, load_settings
from fedhur_app.files import read_json
from fedhur_app.reporting.outcomes import Outcome, Run, read_outcome
from fedhur_app.studies.definition import Arm, Definition
from fedhur_app.sweep import SweepError, module_command, run_command, run_options


@dataclass(frozen=True, eq=False)
class StudyRun(Run):
    """One run of a study.

    Attributes:
        data: Label of the data.
        arm: The arm.
        changes: Items of `--set`.
    """

    data: str
    arm: Arm
    changes: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name for people."""
        return f"{self.data}, {self.arm.name}, seed {self.seed}"


def plan(definition: Definition, folder: Path) -> list[StudyRun]:
    """All runs of a study, seed by seed, so that a stopped one has whole seeds.

    Args:
        definition: The study.
        folder: Its output folder.

    Raises:
        ConfigError: An unknown name or key, an impossible value, with the arm.
        SweepError: Arms that would be tested in different ways.
    """
    compare.check_seeds(definition.seeds)
    runs = []
    for label, data in definition.datasets.items():
        if not definition.arms_on(label):
            continue
        settings, changes = {}, {}
        for arm in definition.arms_on(label):
            changes[arm.name] = (*compare.CHANGES, *definition.changes, *data.changes, *arm.changes)
            try:
                settings[arm.name] = load_settings(
                    data.dataset,
                    arm.strategy or definition.strategy,
                    definition.seeds[0],
                    shlex.join(changes[arm.name]),
                )
            except ConfigError as error:
                raise SweepError(f"arm {arm.name} on data {label}: {error}") from error
        compare.check_comparable(settings, "arms")
        runs += [
            StudyRun(
                data.dataset,
                arm.strategy or definition.strategy,
                seed,
                settings[arm.name].model_copy(update={"seed": seed}),
                folder / "runs" / label / arm.name / f"seed-{seed}",
                label,
                arm,
                changes[arm.name],
            )
            for seed in definition.seeds
            for arm in definition.arms_on(label)
        ]
    return sorted(runs, key=lambda run: definition.seeds.index(run.seed))


def command_of(run: StudyRun) -> list[str]:
    """The command that makes a run."""
    if run.arm.worker is None:
        return run_command(run.dataset, run.strategy, run.seed, run.folder, run.changes)
    options = run_options(run.dataset, run.strategy, run.seed, run.folder, run.changes)
    return [*module_command(f"fedhur_app.studies.workers.{run.arm.worker}"), *options, *run.arm.options]


def read_run(run: Run) -> Outcome:
    """What a run's folder tells; a worker's result need not hold what `fedhur run` writes."""
    result = read_json(run.folder / "result.json")
    worker = isinstance(run, StudyRun) and run.arm.worker is not None
    if worker and result.get("status") == "completed" and "test" not in result:
        numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
        return Outcome(run, "completed", "", numbers)
    return read_outcome(run)
