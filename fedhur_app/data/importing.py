"""`fedhur data import`: a file becomes a data set that runs know by name."""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhur_app.config import available, load_settings
from fedhur_app.data.catalog import DATASETS, DOWNLOADS, data_home
from fedhur_app.data.errors import DataError
from fedhur_app.data.formats import ReadOptions, Taken, read_data
from fedhur_app.data.interactions import Interactions, subset
from fedhur_app.data.reading.sources import Source
from fedhur_app.data.store import is_data_set, publish, save_interactions, temporary_folder

_NAME = re.compile(r"\w[\w.+-]*")
# Names of columns that are printed.
_SHOWN = 40
# Folders of prepared shards and of downloads lie beside the data sets.
_RESERVED = ("prepared", DOWNLOADS)


@dataclass(frozen=True)
class ImportOptions(ReadOptions):
    """How to read a file, and which interactions to keep.

    Filters work in this order: rating 0 (`implicit_zeros`), repeated pairs (`dedupe`), `min_rating`, `k_core`.

    Attributes:
        min_rating: Interactions with a lower rating are left out.
        k_core: Least number of items of a user and of users of an item; both hold for what remains.
    """

    min_rating: float | None = None
    k_core: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Report:
    """What was read, what was left out and why.

    Attributes:
        taken: What was found in the files; counts of lines and rows.
        data: The result.
        options: What people asked for.
    """

    taken: Taken
    data: Interactions
    options: ImportOptions

    def lines(self) -> list[str]:
        """Text for people, with the first rows: not for logs that others read."""
        taken = self.taken
        lines = [f"{taken.place}: {taken.format}"]
        lines += [f"  {what}: {_shortened(value)}" for what, value in taken.form.items()]
        lines += [f"  {role}: {column}" for role, column in taken.columns.items()]
        if taken.unused:
            lines.append(f"  not used: {_shortened(', '.join(taken.unused))}")
        if taken.sample:
            lines.append(f"  first rows ({', '.join(taken.heads)}):")
            lines += ["    " + "  ".join(map(str, row)) for row in taken.sample]
        lines += [f"also read: {tally.place} ({taken.known[tally.place]})" for tally in taken.tallies[1:]]
        for tally in taken.tallies:
            lines += tally.lines()
            if tally.without:
                lines.append(f"{tally.place}: {tally.without} line{'s' * (tally.without > 1)} without items left out")
        lines += [] if taken.tallies else self.data.notes  # else the counts below say the same
        lines.append(f"{taken.rows} interactions read")
        lines += [f"  {count} left out: {why}" for why, count in taken.dropped.items()]
        data = self.data
        lines.append(f"{len(data)} interactions of {data.n_users} users with {data.n_items} items kept")
        if data.user_markets is not None:
            lines.append(f"{len(np.unique(data.user_markets))} markets")
        if data.user_columns:
            lines.append(f"of users: {', '.join(data.user_columns)}")
        return lines

    def as_card(self) -> dict[str, Any]:
        """The same without any row, ready for JSON: files with checksums, options, counts."""
        taken = self.taken
        options = {key: value for key, value in asdict(self.options).items() if value is not None}
        for key in ("items", "users"):
            if key in options:
                options[key] = Path(options[key]).name
        return {
            "source": f"imported from {Path(taken.files[0]).name}",
            "licence": "that of the imported files",
            "files": {path.name: Source(path).sha256() for path in taken.files},
            "import": {
                "format": taken.format,
                "form": taken.form,
                "columns": taken.columns,
                "unused": taken.unused,
                "options": options,
                "lines": [tally.as_card() for tally in taken.tallies],
                "rows": taken.rows,
                "dropped": taken.dropped,
            },
        }


def _shortened(names: str) -> str:
    """Names of columns; of a table with hundreds of them the first."""
    listed = names.split(", ")
    return names if len(listed) <= _SHOWN else f"{', '.join(listed[:_SHOWN])}, ... ({len(listed)} columns)"


@dataclass(frozen=True)
class Imported:
    """A data set that was read.

    Attributes:
        data: The interactions.
        report: How they were read.
    """

    data: Interactions
    report: Report


def import_file(path: Path, name: str, options: ImportOptions | None = None) -> Imported:
    """Read a file and filter it; nothing is written.

    Args:
        path: A file of interactions, or a folder that holds a known one.
        name: Name of the data set.
        options: How; all is found and kept by default.

    Raises:
        DataError: The file cannot be used, or nothing is left; the text says where and what to do.
    """
    options = options or ImportOptions()
    data, taken = read_data(Path(path), name, options)
    if options.implicit_zeros == "drop" and not taken.tallies and data.ratings is not None:
        data = _kept(data, data.ratings != 0, "rating 0: implicit", taken)
    if options.min_rating is not None:
        if not math.isfinite(options.min_rating):
            raise DataError(f"--min-rating {options.min_rating}: a finite number is needed")
        if data.ratings is None:
            raise DataError(f"{taken.place}: --min-rating needs ratings, and there are none; name them by --rating-col")
        data = _kept(data, data.ratings >= options.min_rating, f"rated below {options.min_rating:g}", taken)
    if max(options.k_core) > 1:
        least = ",".join(map(str, options.k_core))
        data = _kept(data, k_core(data.users, data.items, *options.k_core), f"not in the {least}-core", taken)
    if taken.rows != len(data) + sum(taken.dropped.values()):
        raise AssertionError(f"{taken.rows} rows were read, {len(data)} kept and {taken.dropped} left out")
    return Imported(data, Report(taken, data, options))


def _kept(data: Interactions, keep: np.ndarray, why: str, taken: Taken) -> Interactions:
    dropped = len(keep) - int(keep.sum())
    if dropped == len(keep):
        raise DataError(f"{taken.place}: nothing is left: all {dropped} interactions are {why}; ask for less")
    if dropped:
        taken.dropped[why] = dropped
        data = subset(data, keep, taken.catalogue)
    return data


def k_core(users: np.ndarray, items: np.ndarray, least_items: int, least_users: int) -> np.ndarray:
    """The largest set of rows in which every user has enough items and every item enough users.

    Args:
        users: Numbers of users (n,).
        items: Numbers of items (n,).
        least_items: Of a user.
        least_users: Of an item.

    Returns:
        True for the rows of the set (n,); it may be empty.
    """
    keep = np.ones(len(users), dtype=bool)
    while True:
        of_user = np.bincount(users[keep], minlength=users.max() + 1)
        of_item = np.bincount(items[keep], minlength=items.max() + 1)
        still = keep & (of_user[users] >= least_items) & (of_item[items] >= least_users)
        if still.sum() == keep.sum():
            return still
        keep = still


def parse_k_core(text: str) -> tuple[int, int]:
    """Two numbers with a comma, or one for both.

    Raises:
        DataError: The text is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise DataError(
            f"--k-core {text}: give the least number of items of a user and of users of an item, such as 5,5"
        )
    return int(parts[0]), int(parts[-1])


def check_name(name: str, home: Path | None = None, force: bool = False) -> None:
    """See whether a data set may be imported under a name.

    Args:
        name: The name.
        home: Folder of all data sets; :func:`data_home` by default.
        force: An imported data set of that name may be replaced.

    Raises:
        DataError: It may not.
    """
    folder = (data_home() if home is None else Path(home)) / name
    if not _NAME.fullmatch(name):
        raise DataError(
            f"--name {name!r}: a data set's name begins with a letter or digit and holds letters, digits, dots, dashes "
            "and underscores"
        )
    if name in available("dataset") or name in DATASETS or name in _RESERVED:
        raise DataError(f"--name {name}: this name is taken by a data set of FedHUR; choose another one")
    if not folder.exists():
        return
    if not (folder / "card.json").exists():
        raise DataError(f"{folder} is there and is no data set: choose another name, or delete it")
    if not force:
        raise DataError(f"there is a data set {name} in {folder}: replace it with --force, or choose another name")


def save_imported(imported: Imported, home: Path | None = None, force: bool = False) -> Path:
    """Give an imported data set its place, so that runs find it by name. A reader sees the old one or the new one.

    Args:
        imported: What was read.
        home: Folder of all data sets; :func:`data_home` by default.
        force: Replace an imported data set of that name.

    Returns:
        The folder of the data set.

    Raises:
        DataError: The name is taken or impossible, or the folder cannot be written.
    """
    home = data_home() if home is None else Path(home)
    name = imported.data.name
    check_name(name, home, force)
    with temporary_folder(home) as finished:
        save_interactions(finished, imported.data, imported.report.as_card())
        publish(finished, home / name, (lambda _: False) if force else is_data_set)
    return home / name


def next_steps(data: Interactions) -> list[str]:
    """How to use an imported data set, in words."""
    published = " --set dataset.split.kind=published" if data.labels is not None else ""
    if data.owner is not None:
        published += " --set dataset.clients.kind=published"
    elif data.user_markets is not None:
        published += " --set dataset.clients.kind=market"
    elif data.n_users < load_settings().dataset.clients.number:
        published += f" --set dataset.clients.number={max(1, data.n_users // 10)}"  # the default could not run
    return [f"next: fedhur data describe {data.name}{published}", f"      fedhur run --dataset {data.name}{published}"]
