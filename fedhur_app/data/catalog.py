"""The data sets that FedHUR knows by name. A new one is one entry of `DATASETS`."""

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from fedhur_app.data import movielens, synthetic
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.store import load_interactions, publish, save_interactions, temporary_folder


@dataclass(frozen=True)
class DataSet:
    """A data set known by name.

    Attributes:
        name: What people type.
        summary: One line about it.
        licence: Its terms, shown when it is fetched.
        source: Where it comes from.
        build: Downloads into an empty folder and returns the checked data; None for generated data.
    """

    name: str
    summary: str
    licence: str
    source: str
    build: Callable[[Path, Callable[[str], object]], Interactions] | None


DATASETS: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet(
            name="ml-100k",
            summary="MovieLens 100K: 943 users, 1682 films, 100000 ratings",
            licence=movielens.LICENCE,
            source=movielens.URL,
            build=movielens.build_ml_100k,
        ),
        DataSet(
            name="synthetic",
            summary="generated: users who mix a few of many groups of items within groups",
            licence="Generated data, free of any terms.",
            source="fedhur_app.data.synthetic",
            build=None,
        ),
    )
}


def data_home() -> Path:
    """Where data sets and client shards are kept: FEDHUR_DATA, else the user's cache folder."""
    return Path(os.environ.get("FEDHUR_DATA") or platformdirs.user_cache_dir("fedhur")).expanduser()


def _entry(name: str) -> DataSet:
    if name in DATASETS:
        return DATASETS[name]
    near = difflib.get_close_matches(name.lower(), DATASETS, n=3, cutoff=0.4) or sorted(DATASETS)
    raise DataError(f"there is no data set '{name}'; did you mean {' or '.join(near)}?")


def _is_complete(folder: Path) -> bool:
    return (folder / "interactions.npz").is_file() and (folder / "about.json").is_file()


def fetch(name: str, home: Path | None = None, say: Callable[[str], object] = print) -> Path:
    """Download a data set once; later calls do nothing. Its licence is shown at the download.

    Args:
        name: A name in `DATASETS`.
        home: Folder of all data sets; :func:`data_home` by default.
        say: Takes each line that people should read.

    Returns:
        The folder of the data set.

    Raises:
        DataError: Unknown name, no source reachable, wrong checksum. Nothing is left behind then.
    """
    entry = _entry(name)
    home = data_home() if home is None else Path(home)
    folder = home / name
    if entry.build is None:
        say(f"{name} is generated when it is loaded; there is nothing to fetch.")
        return folder
    if _is_complete(folder):
        return folder
    say(entry.licence)
    with temporary_folder(home) as downloads, temporary_folder(home) as finished:
        save_interactions(finished, entry.build(downloads, say))
        publish(finished, folder, _is_complete)
    say(f"{name} is in {folder}")
    return folder


def load_dataset(name: str, home: Path | None = None, synthetic: Mapping[str, Any] | None = None) -> Interactions:
    """Load a data set by name; one that was never fetched is fetched first.

    Args:
        name: A name in `DATASETS`.
        home: Folder of all data sets; :func:`data_home` by default.
        synthetic: Arguments of :func:`fedhur_app.data.synthetic.generate` for the data set `synthetic`.

    Raises:
        DataError: As :func:`fetch`; a damaged file; an argument that the generator does not know.
    """
    if _entry(name).build is None:
        return _generate(synthetic or {})
    return load_interactions(fetch(name, home))


def _generate(arguments: Mapping[str, Any]) -> Interactions:
    known = inspect.signature(synthetic.generate).parameters
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4) or sorted(known)
            raise DataError(f"synthetic data has no setting '{key}'; did you mean {' or '.join(near)}?")
    return synthetic.generate(**arguments)
