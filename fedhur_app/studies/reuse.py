"""Runs that another study has made already: one setting of FedHUR is an arm of many studies."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedhur_app.config import ConfigError, Settings, read_config_file
from fedhur_app.files import read_arrays, read_json
from fedhur_app.studies.plan import StudyRun
from fedhur_app.sweep import OUTPUT_LOG, SweepError


def take_over(runs: Sequence[StudyRun], studies: Sequence[Path]) -> int:
    """Copy completed runs of the same settings, seed and strategy from other studies; nothing there is changed.

    Runs of workers are left out: what they are asked besides the settings stands in no file of theirs. What exists
    already stays as it is.

    Args:
        runs: The planned runs.
        studies: Folders of other studies or comparisons.

    Returns:
        Number of runs copied.

    Raises:
        SweepError: A folder holds no runs.
    """
    made: dict[str, Path] = {}
    for study in studies:
        results = sorted(study.glob("**/seed-*/result.json"))
        if not results:
            raise SweepError(f"--reuse {study}: there are no runs in this folder")
        for result in results:
            folder = result.parent
            if read_json(result).get("status") != "completed" or not (folder / OUTPUT_LOG).is_file():
                continue
            users = folder / "users.npz"
            if users.is_file() and not read_arrays(users).keys() >= {"client", "interactions"}:
                continue  # of a version before studies: reports need these columns
            try:
                made.setdefault(_key(read_config_file(folder / "config.yaml")), folder)
            except ConfigError:
                continue  # of another version, or made by a worker that keeps none
    copied = 0
    for run in runs:
        source = made.get(_key(run.settings))
        if source is None or run.arm.worker is not None or run.folder.exists():
            continue
        partial = run.folder.with_name(f"{run.folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        partial.rename(run.folder)
        copied += 1
    return copied


def _key(settings: Settings) -> str:
    return json.dumps(settings.model_dump(mode="json"), sort_keys=True)
