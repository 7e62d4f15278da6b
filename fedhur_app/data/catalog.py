"""The data sets that FedHUR knows by name. A new one is one entry of `DATASETS`."""

import contextlib
import difflib
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from fedhur_app.data import markets, movielens, public, synthetic
from fedhur_app.data.archives import Archive, Reading, by_hand, obtain, sha256_of
from fedhur_app.data.download import DownloadError, Say, only_one
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions, subset
from fedhur_app.data.store import is_data_set, load_interactions, publish, save_interactions

DOWNLOADS = "downloads"


@dataclass(frozen=True)
class DataSet:
    """A data set known by name.

    Attributes:
        name: What people type.
        summary: One line about it.
        licence: Its terms, shown when it is fetched.
        source: Where it comes from.
        archive: What is downloaded; None for data without a download of their own.
        reading: How the archive becomes a data set, where :func:`fedhur_app.data.importing.import_file` reads it.
        read: Reads the archive otherwise; the second argument is an empty folder.
        instead: Gets the data in another way where the archive cannot be had; takes an empty folder.
        instead_source: Where they come from then.
        generate: Draws the data; None for data that are not generated.
        base: Data set that this one is made of; it is fetched instead.
        derive: Makes this data set, whose name is the second argument, of its base.
    """

    name: str
    summary: str
    licence: str
    source: str
    archive: Archive | None = None
    reading: Reading | None = None
    read: Callable[[Path, Path], Interactions] | None = None
    instead: Callable[[Path, Say], Interactions] | None = None
    instead_source: str = ""
    generate: Callable[..., Interactions] | None = None
    base: str = ""
    derive: Callable[[Interactions, str], Interactions] | None = None


def _published(name: str, summary: str, licence: str, archive: Archive, reading: Reading) -> DataSet:
    return DataSet(name, summary, licence, archive.addresses[0], archive, reading)


DATASETS: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet(
            name="ml-100k",
            summary="MovieLens 100K: 943 users, 1682 films, 100000 ratings",
            licence=movielens.LICENCE,
            source=movielens.ML_100K.addresses[0],
            archive=movielens.ML_100K,
            read=movielens.read_ml_100k,
            instead=movielens.ml_100k_from_package,
            instead_source=movielens.PACKAGE,
        ),
        _published(
            "ml-1m",
            "MovieLens 1M: 6040 users, 3706 films, 1000209 ratings",
            movielens.LICENCE,
            movielens.ML_1M,
            Reading(counts=movielens.ML_1M_COUNTS),
        ),
        _published(
            "ml-25m",
            "MovieLens 25M: 162541 users, 59047 films, 25000095 ratings",
            movielens.LICENCE_SHARED,
            movielens.ML_25M,
            Reading(counts=movielens.ML_25M_COUNTS),
        ),
        _published(
            "ml-latest-small",
            "MovieLens, small and changing (in 2018: 610 users, 9724 films, 100836 ratings)",
            movielens.LICENCE_SHARED,
            movielens.ML_LATEST_SMALL,
            Reading(counts=movielens.ML_LATEST_SMALL_COUNTS),
        ),
        _published(
            "book-crossing",
            "books, implicit: rating 0 (none given) counts as well; 10-core of 1149780 rows",
            public.BOOK_CROSSING_LICENCE,
            public.BOOK_CROSSING,
            public.BOOK_CROSSING_READING,
        ),
        _published(
            "book-crossing-explicit",
            "books, explicit: without rating 0 (none given); 5-core of 433671 ratings",
            public.BOOK_CROSSING_LICENCE,
            public.BOOK_CROSSING,
            public.BOOK_CROSSING_EXPLICIT_READING,
        ),
        _published(
            "amazon-beauty",
            "Amazon Beauty of 2014, 5-core: 22363 users, 12101 products, 198502 reviews",
            public.AMAZON_LICENCE,
            public.AMAZON_BEAUTY,
            public.AMAZON_BEAUTY_READING,
        ),
        _published(
            "lastfm",
            "Last.fm of HetRec 2011: 1892 users, 17632 artists, 92834 counts of plays, no times",
            public.LASTFM_LICENCE,
            public.LASTFM,
            public.LASTFM_READING,
        ),
        DataSet(
            name="markets-ml-100k",
            summary="MovieLens 100K in 11 markets: the zip code areas of its users, and all others",
            licence=movielens.LICENCE,
            source=movielens.ML_100K.addresses[0],
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


def imported(home: Path | None = None) -> list[str]:
    """Names of the data sets that people imported: the folders with a card in `home`, :func:`data_home` by default."""
    home = data_home() if home is None else Path(home)
    try:
        folders = [path.parent.name for path in home.glob("*/card.json")]
    except OSError:
        return []
    return sorted(name for name in folders if name not in DATASETS and not name.startswith("."))


def _entry(name: str, home: Path) -> DataSet:
    if name in DATASETS:
        return DATASETS[name]
    known = [*DATASETS, *imported(home)]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known))}"
    raise DataError(f"there is no data set '{name}'; {hint}")


def fetch(
    name: str,
    home: Path | None = None,
    say: Say = print,
    file: Path | None = None,
) -> Path:
    """Download a data set once; later calls do nothing. Its licence is shown at the download.

    What has arrived of a download that was broken off stays in `downloads` below `home`, and the next call goes on from
    there. The folder of the data set appears by one rename when all is read, checked and written. Only one process at a
    time fetches a data set; others wait for it.

    Args:
        name: A name in `DATASETS`, or of an imported data set.
        home: Folder of all data sets; :func:`data_home` by default.
        say: Takes each line that people should read.
        file: The archive, where somebody downloaded it by hand; it is verified as a download is, and stays.

    Returns:
        The folder of the data set; that of its base where it is made of another one.

    Raises:
        DataError: Unknown name, no source reachable, a wrong checksum, other numbers of users, items or interactions
            than published. There is no folder of the data set then.
    """
    home = data_home() if home is None else Path(home)
    folder = home / name
    if name in imported(home):
        return folder
    entry = _entry(name, home)
    if entry.base:
        return fetch(entry.base, home, say, file)
    if entry.archive is None:
        if file is not None:
            raise DataError(f"{name} is generated; there is no archive to take it from")
        say(f"{name} is generated when it is loaded; there is nothing to fetch.")
        return folder
    if is_data_set(folder):
        return folder
    with _workspace(home, entry.archive, say) as work:
        if not is_data_set(folder):  # another process may have been at it
            say(entry.licence)
            data, card, archive = _build(entry, entry.archive, home / DOWNLOADS, work, say, file)
            finished = work / "finished"
            finished.mkdir()
            save_interactions(finished, data, card)
            publish(finished, folder, is_data_set)
            if archive is not None and file is None:
                archive.unlink(missing_ok=True)
            say(f"{name} is in {folder}: {data.n_users} users, {data.n_items} items, {len(data)} interactions")
    return folder


@contextmanager
def _workspace(home: Path, archive: Archive, say: Say) -> Iterator[Path]:
    """An empty folder for one process at a time; what a killed one left in it is deleted.

    It belongs to the archive and not to the data set, because two data sets may be made of one archive.
    """
    downloads = home / DOWNLOADS
    work = downloads / f"{archive.file}.work"
    try:
        with only_one(downloads / f"{archive.file}.fetch", say):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write to {home} ({error.strerror or error}): make room, or set FEDHUR_DATA to another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # it holds what was downloaded so far
            downloads.rmdir()


def _build(
    entry: DataSet, archive: Archive, downloads: Path, work: Path, say: Say, file: Path | None
) -> tuple[Interactions, dict[str, Any], Path | None]:
    """The data set, what its card says about the origin, and the archive; None where it came in another way."""
    try:
        verified = obtain(archive, downloads, say, file)
    except DownloadError as error:
        advice = by_hand(entry.name, archive)
        if entry.instead is None:
            raise DataError(f"{entry.name} could not be downloaded:\n{error}\n{advice}") from error
        say(str(error))
        try:
            return entry.instead(work, say), {"source": entry.instead_source, "licence": entry.licence}, None
        except DataError as other:
            raise DataError(f"{entry.name} could not be downloaded:\n{error}\n{other}\n{advice}") from other
    say(f"reading {verified.path}")
    card: dict[str, Any] = {
        "source": verified.source,
        "licence": entry.licence,
        "files": {archive.file: sha256_of(verified.path)},
    }
    if entry.read is not None:
        return entry.read(verified.path, work), card, verified.path
    assert entry.reading is not None
    # Read from a folder of its own: files that lie beside an archive by chance must not become part of the data.
    alone = work / archive.file
    alone.symlink_to(verified.path.resolve())
    data, more = _read(entry.name, entry.reading, alone, verified.expected)
    return data, more | card, verified.path


def _read(name: str, reading: Reading, archive: Path, expected: bool) -> tuple[Interactions, dict[str, Any]]:
    """Read an archive, compare it with what was published, and leave out what the filters leave out."""
    # Not at the top: what imports files has to know the names of the catalogue.
    from fedhur_app.data.importing import ImportOptions, import_file

    read = import_file(archive, name, ImportOptions(**reading.options))
    card: dict[str, Any] = {}
    if reading.counts is not None and expected:
        if difference := reading.counts.difference(read.data):
            raise DataError(
                f"{name}: {difference}. {archive.name} has the right checksum, so it was read wrongly; no data set "
                "was made. Please report this"
            )
        card["published"] = reading.counts.as_card()
    if reading.filters:
        read = import_file(archive, name, ImportOptions(**reading.options, **reading.filters))
    return _touched(read.data), read.report.as_card() | card


def _touched(data: Interactions) -> Interactions:
    """Without the items of the publisher's catalogue that have no interaction: the literature does not count them."""
    touched = subset(data, np.ones(len(data), dtype=bool))
    if missing := data.n_items - touched.n_items:
        return replace(
            touched, notes=(*touched.notes, f"{missing} items of the catalogue without interactions left out")
        )
    return touched


def load_dataset(
    name: str,
    home: Path | None = None,
    synthetic: Mapping[str, Any] | None = None,
    markets: Mapping[str, Any] | None = None,
) -> Interactions:
    """Load a data set by name; one that was never fetched is fetched first.

    Args:
        name: A name in `DATASETS`, or of an imported data set.
        home: Folder of all data sets; :func:`data_home` by default.
        synthetic: Arguments of :func:`fedhur_app.data.synthetic.generate` for the data set `synthetic`.
        markets: Arguments of :func:`fedhur_app.data.markets.generate` for the data set `markets-synthetic`.

    Raises:
        DataError: As :func:`fetch`; a damaged file; an argument that the generator does not know.
    """
    home = data_home() if home is None else Path(home)
    if name in imported(home):
        return load_interactions(home / name)
    entry = _entry(name, home)
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
