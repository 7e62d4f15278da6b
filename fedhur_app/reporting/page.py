"""What a report page contains: from folders of runs, comparisons and studies to plain data.

A folder is recognised by its files and searched for others. What cannot be read is kept as a :class:`Problem` and
shown; it never ends the command. Nothing here knows of HTML, see page_html.py.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedhur_app.reporting.page_documents import DOCUMENTS, Document, natural, read_document
from fedhur_app.reporting.page_runs import RUN_FILES, PageRun, Problem, read_run, value_text

_NOT_SEARCHED = {"checkpoint", "tensorboard", "trials"}  # trials of a search judge settings; they are no results
# Settings that decide where and how a run is computed, not what comes out: runs that differ in them alone are one arm.
_OF_THE_MACHINE = ("server.", "device", "evaluation.per_user", "evaluation.per_client", "evaluation.batch_mib")


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed only.

    Attributes:
        name: For people, different from that of any other arm of the results.
        number: Decides its colour: the same for all arms of that name in a study, or outside of studies.
        runs: One a seed, by seed.
    """

    name: str
    number: int
    runs: list[PageRun]

    @property
    def completed(self) -> list[PageRun]:
        """The runs whose values count."""
        return [run for run in self.runs if run.status == "completed"]

    def values(self, column: str) -> list[float]:
        """The values of a column, one a completed run that has it."""
        return [run.values[column] for run in self.completed if column in run.values]


@dataclass(frozen=True)
class Results:
    """Arms that were tested on the same rows.

    Attributes:
        name: Name of the data set, with what tells it from others of that name.
        study: Folder of the study; None for all other runs, which stand together.
        metric: Name of the main metric.
        arms: In the order of the study, or from the best down.
        repeated: Names of runs that do not count: another run has the same settings and the same seed.
    """

    name: str
    study: Path | None
    metric: str
    arms: list[Arm]
    repeated: list[str]

    @property
    def runs(self) -> list[PageRun]:
        """All runs that count."""
        return [run for arm in self.arms for run in arm.runs]

    def columns(self, prefix: str = "") -> list[str]:
        """Columns that any run has, in order of appearance."""
        found = dict.fromkeys(column for run in self.runs for column in run.values)
        return [column for column in found if column.startswith(prefix)]


@dataclass(frozen=True)
class Page:
    """Everything on the page.

    Attributes:
        title: Its title.
        made: When, UTC.
        runs: All runs, also those that do not count.
        results: By data set: those of the studies, then of all other runs together.
        documents: Studies first.
        problems: What could not be read.
    """

    title: str
    made: datetime
    runs: list[PageRun]
    results: list[Results]
    documents: list[Document]
    problems: list[Problem]

    def results_of(self, study: Path | None) -> list[Results]:
        """Results of a study, or of the runs that belong to none."""
        return [results for results in self.results if results.study == study]

    def source(self, results: Results) -> str:
        """Title of the study that results are of, empty for others."""
        return next((d.title for d in self.documents if results.study == d.folder), "")

    def shared_settings(self) -> dict[str, Any]:
        """Settings that have one value in all runs."""
        keys, runs = self._settings()
        return {key: runs[0][key] for key in keys if _same(run.get(key, ...) for run in runs)}

    def different_settings(self) -> list[str]:
        """Settings that do not; a run whose version had no such setting differs as well."""
        keys, runs = self._settings()
        return [key for key in keys if not _same(run.get(key, ...) for run in runs)]

    def _settings(self) -> tuple[list[str], list[dict[str, Any]]]:
        runs = [run.settings for run in self.runs if run.settings]
        keys = dict.fromkeys(key for run in runs for key in run)
        return [key for key in keys if key not in ("seed", "strategy", "dataset.name")], runs


def collect(folders: Sequence[Path], title: str = "", made: datetime | None = None) -> Page:
    """Read all runs and documents in and below some folders.

    Args:
        folders: Where to look. A folder that is there twice, or lies in another one, counts once.
        title: Title of the page; by default made of what was found.
        made: When the page was made; now by default.
    """
    problems: list[Problem] = []
    runs: list[PageRun] = []
    documents: list[Document] = []
    seen: set[Path] = set()
    for root in folders:
        for folder, files in _walk(root, problems):
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            kind = next((kind for kind, needed, _ in DOCUMENTS if set(needed) <= files), None)
            if kind is not None:
                documents.append(read_document(kind, folder, root, files, problems))
            elif files & set(RUN_FILES):
                runs.append(read_run(folder, root, problems))
            elif "output.log" in files:
                problems.append(Problem(str(folder), "a run that was started and wrote nothing but output.log"))
    documents.sort(key=lambda document: [kind for kind, _, _ in DOCUMENTS].index(document.kind))
    runs_of: dict[Path | None, list[PageRun]] = {d.folder: [] for d in documents if d.kind == "study"}
    runs_of[None] = []
    places = {folder.resolve(): folder for folder in runs_of if folder is not None}
    for run in runs:
        if run.dataset:  # else nothing is known of it but its damage
            runs_of[places.get(run.collection.resolve())].append(run)
    orders: dict[Path | None, list[str]] = {
        document.folder: [name for name, *_ in document.arms] for document in documents
    }
    results = [found for study, own in runs_of.items() for found in _results(own, study, orders.get(study, []))]
    return Page(title or _title(runs, documents), made or datetime.now(UTC), runs, results, documents, problems)


def _walk(root: Path, problems: list[Problem]) -> Iterable[tuple[Path, set[str]]]:
    """Folders with the names of their files, in the order of their names with numbers read as numbers."""
    if not root.is_dir():
        problems.append(Problem(str(root), "is not a folder" if root.exists() else "there is no such folder"))
        return

    def unreadable(error: OSError) -> None:
        problems.append(Problem(str(error.filename), f"cannot be read ({error.strerror})"))

    for where, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = sorted((f for f in folders if f not in _NOT_SEARCHED and not f.startswith(".")), key=natural)
        yield Path(where), set(files)


# --- results ----------------------------------------------------------------------------------------------------------


def _results(runs: list[PageRun], study: Path | None, order: Sequence[str]) -> list[Results]:
    """Group runs by the rows they were tested on, and those by settings.

    Args:
        runs: Of one study, or all others.
        study: Folder of the study.
        order: Names of its arms; without them the best come first.
    """
    groups: dict[tuple[str, ...], list[PageRun]] = {}
    for run in runs:
        groups.setdefault((run.dataset, *_texts(_data_settings(run))), []).append(run)
    names = _names_of_data([group[0] for group in groups.values()])
    found: list[Results] = []
    numbers: dict[str, int] = {}
    for name, group in zip(names, groups.values(), strict=True):
        named, repeated = _arms(group)
        metric = next((run.metric for run in group if run.metric), "") or next(
            (column.removeprefix("test_") for run in group for column in run.values if "_ndcg" in column), ""
        )
        arms = [Arm(name_of_arm, 0, own) for name_of_arm, own in named]
        if order:
            arms.sort(key=lambda arm: order.index(arm.runs[0].arm) if arm.runs[0].arm in order else len(order))
        else:
            arms.sort(key=lambda arm: -_mean(arm.values(f"test_{metric}")))
        arms = [replace(arm, number=numbers.setdefault(arm.name, len(numbers))) for arm in arms]
        found.append(Results(name, study, metric, arms, repeated))
    return found


def _data_settings(run: PageRun) -> dict[str, Any]:
    """What decides rows and clients."""
    not_meant = ["dataset.name"]
    not_meant += [] if run.dataset.startswith("synthetic") else ["dataset.synthetic."]
    not_meant += [] if run.dataset.startswith("markets-synthetic") else ["dataset.markets."]
    return {
        key: value
        for key, value in run.settings.items()
        if key == "evaluation.k" or (key.startswith("dataset.") and not key.startswith(tuple(not_meant)))
    }


def _names_of_data(first: list[PageRun]) -> list[str]:
    """Names of groups: that of the data set, with the settings in which it differs from another group of that name."""
    names = []
    for run in first:
        alike = [_data_settings(other) for other in first if other.dataset == run.dataset]
        names.append(run.dataset + _suffix(_data_settings(run), alike, "dataset."))
    return _distinct(names)


def _arms(runs: list[PageRun]) -> tuple[list[tuple[str, list[PageRun]]], list[str]]:
    """Names and runs of arms, and names of the runs that do not count."""
    by_settings: dict[tuple[str, ...], dict[int, PageRun]] = {}
    repeated = []
    for run in runs:
        of_arm = by_settings.setdefault((run.arm, *_texts(_arm_settings(run))), {})
        before = of_arm.get(run.seed)
        # Of two runs with one seed the last counts, but never one that failed instead of one that did not.
        if before is not None and before.status == "completed" != run.status:
            repeated.append(run.name)
            continue
        if before is not None:
            repeated.append(before.name)
        of_arm[run.seed] = run
    members = [[of_arm[seed] for seed in sorted(of_arm)] for of_arm in by_settings.values()]
    names = []
    for runs_ in members:
        alike = [_arm_settings(other[0]) for other in members if other[0].arm == runs_[0].arm]
        names.append(runs_[0].arm + _suffix(_arm_settings(runs_[0]), alike))
    arms = list(zip(_distinct(names), members, strict=True))
    return arms, repeated


def _arm_settings(run: PageRun) -> dict[str, Any]:
    """What must be equal for runs to be one arm."""
    return {
        key: value
        for key, value in run.settings.items()
        if key != "seed" and not key.startswith(("dataset.", *_OF_THE_MACHINE))
    }


def _texts(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value_text(value)}" for key, value in sorted(settings.items())]


def _suffix(own: dict[str, Any], alike: list[dict[str, Any]], prefix: str = "") -> str:
    """Up to three settings in which one of several differs from the others, in brackets."""
    different = [key for key in own if not _same(other.get(key, ...) for other in alike)]
    if not different:
        return ""
    texts = [f"{key.removeprefix(prefix)}={value_text(own[key])}" for key in different[:3]]
    return f" ({', '.join(texts)}{', …' if len(different) > 3 else ''})"


def _distinct(names: list[str]) -> list[str]:
    """Number names that occur twice."""
    count, used = Counter(names), Counter[str]()
    found = []
    for name in names:
        used[name] += 1
        found.append(f"{name} #{used[name]}" if count[name] > 1 else name)
    return found


def _same(values: Iterable[Any]) -> bool:
    return len({"absent" if value is ... else json.dumps(value, default=str) for value in values}) <= 1


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else -math.inf


def _title(runs: list[PageRun], documents: list[Document]) -> str:
    titles = [document.title for document in documents if document.kind == "study"]
    if len(titles) == 1:
        return titles[0]
    if titles:
        return f"{len(titles)} studies"
    data = list(dict.fromkeys(run.dataset for run in runs if run.dataset))
    return f"Runs on {', '.join(data[:3])}{', …' if len(data) > 3 else ''}" if data else "Report"
