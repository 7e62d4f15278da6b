"""The rows of a node that brings its own data: a file matched with the federation's catalogue, or a prepared shard."""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedhur_app.config import SplitSettings
from fedhur_app.data.errors import DataError
from fedhur_app.data.importing import ImportOptions, import_file
from fedhur_app.data.interactions import Interactions, subset
from fedhur_app.data.item_catalogue import Catalogue
from fedhur_app.data.reading.sources import Source
from fedhur_app.data.shards import Shard, make_shards
from fedhur_app.data.split import split_labels
from fedhur_app.data.store import is_data_set, load_interactions

# Keys of a node's config and the options of `fedhur data import` that they are.
_OPTIONS = {
    "data-format": "format",
    "user-col": "user_col",
    "item-col": "item_col",
    "rating-col": "rating_col",
    "time-col": "time_col",
    "split-col": "split_col",
    "min-rating": "min_rating",
    "on-bad-line": "on_bad_line",
}


@dataclass(frozen=True, eq=False)
class Rows:
    """What a node trains and tests on.

    Attributes:
        shard: Its rows, with the numbers of the catalogue.
        users: The original id of each local user. Private.
        unknown_items: Items of its file that are not in the catalogue.
        unknown_interactions: Interactions with these, which are left out.
    """

    shard: Shard
    users: tuple[str, ...]
    unknown_items: int = 0
    unknown_interactions: int = 0

    @property
    def users_fingerprint(self) -> str:
        """16 hex digits that change with the users and their order. They never leave the device."""
        return hashlib.sha256(json.dumps(self.users).encode()).hexdigest()[:16]


def shard_file(path: Path) -> Path | None:
    """The prepared shard that `path` is, or that lies in it as shard.npz; None where it is something else."""
    file = path / "shard.npz" if path.is_dir() else path
    if not zipfile.is_zipfile(file):
        return file if path.is_dir() and file.exists() else None
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
    return file if {"form.npy", "head.npy", "users.npy"} <= names else None


def rows_of_shard(shard: Shard) -> Rows:
    """A prepared shard knows its users by their numbers in the data set that it was cut from."""
    return Rows(shard, tuple(map(str, shard.users.tolist())))


def as_client(rows: Rows, client: int) -> Rows:
    """The rows under a client's number."""
    return replace(rows, shard=replace(rows.shard, client=client))


def options_of_node(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a node's config says about reading its file, as options of an import.

    Raises:
        DataError: An impossible value.
    """
    options = {option: config[key] for key, option in _OPTIONS.items() if key in config}
    for option, value in options.items():
        if option.endswith("_col"):
            options[option] = str(value)
    if not isinstance(options.get("min_rating", 0), int | float):
        raise DataError(f"min-rating of the node config is {options['min_rating']!r}: it must be a number")
    if options.get("on_bad_line", "error") not in ("error", "skip"):
        raise DataError(f"on-bad-line of the node config is {options['on_bad_line']!r}: it must be error or skip")
    return options


def read_own(path: Path, options: Mapping[str, Any]) -> Interactions:
    """Read a node's file: the folder of an imported data set, or whatever can be imported.

    Raises:
        DataError: There is no such file, or it cannot be read.
    """
    if not path.exists():
        raise DataError(f"data-path {path} does not exist")
    if path.is_dir() and is_data_set(path):
        return load_interactions(path)
    return import_file(path, "own-data", ImportOptions(**options)).data


def rows_key(path: Path, options: Mapping[str, Any], catalogue: Catalogue, split: SplitSettings, seed: int) -> str:
    """16 hex digits that change whenever :func:`match_rows` may give other rows: of files, catalogue and settings.

    Raises:
        DataError: There is no such file.
    """
    if not path.exists():
        raise DataError(f"data-path {path} does not exist")
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    content = [(str(file.relative_to(path)), Source(file).sha256()) for file in files]
    parts = [content, sorted(options.items()), catalogue.fingerprint, split.model_dump(), seed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def match_rows(data: Interactions, catalogue: Catalogue, split: SplitSettings, seed: int) -> Rows:
    """Keep the rows with items of the catalogue, in its numbers, and split them.

    Args:
        data: All rows of the node.
        catalogue: The items of the federation. Those that the node has no row of are items like all others to it.
        split: How rows are divided into training, validation and test.
        seed: Of the split.

    Returns:
        The rows, as client 0.

    Raises:
        DataError: No row is left; the split asks for times or labels that the data do not have.
    """
    numbers = catalogue.numbers(data.item_ids.tolist())
    known = numbers[data.items] >= 0
    if not known.any():
        raise DataError(f"none of the {data.n_items} items of the node's rows is in the federation's catalogue")
    kept = subset(data, known)
    matched = replace(
        kept,
        items=catalogue.numbers(kept.item_ids.tolist())[kept.items],
        item_ids=np.array(catalogue.ids),
        item_titles=None,
        item_genres=None,
        user_markets=None,  # numbers of markets would be those of this node alone
        owner=None,
    )
    labels = split_labels(matched, split.kind, split.ratios, seed)
    (shard,) = make_shards(matched, labels, np.zeros(matched.n_users, dtype=np.int64))
    return Rows(shard, tuple(kept.user_ids.tolist()), int((numbers < 0).sum()), int((~known).sum()))
