"""The data sets that FedHUR knows by name. A new one is one entry of `DATASETS`."""

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from fedhur_app.data import markets, movielens, synthetic
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.store import is_data_set, load_interactions, publish, save_interactions, temporary_folder


@dataclass(frozen=True)
class DataSet:
    """A data set known by name.

    Attributes:
        name: What people type.
        summary: One line about it.
        licence: Its terms, shown when it is fetched.
        source: Where it comes from.
        build: Downloads into an empty folder and returns the checked data; None for data without a download of
            their own.
        generate: Draws the data; None for data that are not generated.
        base: Data set that this one is made of; it is fetched instead.
        derive: Makes this data set, whose name is the second argument, of its base.
    """

    name: str
    summary: str
    licence: str
    source: str
    build: Callable[[Path, Callable[[str], object]], Interactions] | None = None
    generate: Callable[..., Interactions] | None = None
    base: str = ""
    derive: Callable[[Interactions, str], Interactions] | None = None


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
            name="markets-ml-100k",
            summary="MovieLens 100K in 11 markets: the zip code areas of its users, and all others",
            licence=movielens.LICENCE,
            source=movielens.URL,
            base="ml-100k",
            derive=movielens.with_zip_code_markets,
        ),
        DataSet(
            name="markets-synthetic",
            summary="generated: markets with one catalogue and tastes that differ as much as one likes",
            licence="Generated data, free of any terms.",
            source="fedhur_app.data.markets",
            generate=markets.generate,
        ),
        DataSet(
            name="synthetic",
            summary="generated: users who mix a few of many groups of items within groups",
            licence="Generated data, free of any terms.",
            source="fedhur_app.data.synthetic",
            generate=synthetic.generate,
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


def fetch(name: str, home: Path | None = None, say: Callable[[str], object] = print) -> Path:
    """Download a data set once; later calls do nothing. Its licence is shown at the download.

    Args:
        name: A name in `DATASETS`.
        home: Folder of all data sets; :func:`data_home` by default.
        say: Takes each line that people should read.

    Returns:
        The folder of the data set; that of its base where it is made of another one.

    Raises:
        DataError: Unknown name, no source reachable, wrong checksum. Nothing is left behind then.
    """
    entry = _entry(name)
    home = data_home() if home is None else Path(home)
    folder = home / name
    if entry.base:
        return fetch(entry.base, home, say)
    if entry.build is None:
        say(f"{name} is generated when it is loaded; there is nothing to fetch.")
        return folder
    if is_data_set(folder):
        return folder
    say(entry.licence)
    with temporary_folder(home) as downloads, temporary_folder(home) as finished:
        save_interactions(finished, entry.build(downloads, say))
        publish(finished, folder, is_data_set)
    say(f"{name} is in {folder}")
    return folder


def load_dataset(
    name: str,
    home: Path | None = None,
    synthetic: Mapping[str, Any] | None = None,
    markets: Mapping[str, Any] | None = None,
) -> Interactions:
    """Load a data set by name; one that was never fetched is fetched first.

    Args:
        name: A name in `DATASETS`.
        home: Folder of all data sets; :func:`data_home` by default.
        synthetic: Arguments of :func:`fedhur_app.data.synthetic.generate` for the data set `synthetic`.
        markets: Arguments of :func:`fedhur_app.data.markets.generate` for the data set `markets-synthetic`.

    Raises:
        DataError: As :func:`fetch`; a damaged file; an argument that the generator does not know.
    """
    entry = _entry(name)
    if entry.generate is not None:
        arguments = {"synthetic": synthetic, "markets-synthetic": markets}[name]
        return _generate(entry.generate, arguments or {})
    data = load_interactions(fetch(name, home))
    return data if entry.derive is None else entry.derive(data, name)


def _generate(generate: Callable[..., Interactions], arguments: Mapping[str, Any]) -> Interactions:
    known = inspect.signature(generate).parameters
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4) or sorted(known)
            raise DataError(f"generated data has no setting '{key}'; did you mean {' or '.join(near)}?")
    return generate(**arguments)
