"""What `fedhur data list` shows: the data sets known by name, and those that people imported."""

from dataclasses import dataclass
from pathlib import Path

from fedhur_app.data import catalog
from fedhur_app.data.catalog import DATASETS, DOWNLOADS, DataSet, data_home
from fedhur_app.data.errors import DataError
from fedhur_app.data.store import is_data_set, read_card


@dataclass(frozen=True)
class Listed:
    """One data set.

    Attributes:
        name: What people type.
        about: One line about it.
        download: Size of its archive, "" where nothing or an unknown number of bytes is downloaded.
        state: Whether it is there, in words.
    """

    name: str
    about: str
    download: str
    state: str


def known(home: Path | None = None) -> list[Listed]:
    """All entries of the catalogue, in its order."""
    home = data_home() if home is None else home
    return [Listed(name, entry.summary, _size(entry), _state(entry, home)) for name, entry in DATASETS.items()]


def imported(home: Path | None = None) -> list[Listed]:
    """Data sets in `home` that the catalogue does not know, by name."""
    home = data_home() if home is None else home
    return [_imported(home / name) for name in catalog.imported(home)]


def _imported(folder: Path) -> Listed:
    if not is_data_set(folder):
        return Listed(folder.name, "", "", f"incomplete; delete {folder} and import it again")
    try:
        statistics = read_card(folder)["statistics"]
        about = ", ".join(f"{statistics[what]} {what}" for what in ("users", "items", "interactions"))
    except (DataError, KeyError, TypeError):
        return Listed(folder.name, "", "", f"damaged; delete {folder} and import it again")
    return Listed(folder.name, about, "", "imported")


def _size(entry: DataSet) -> str:
    if entry.archive is None or entry.archive.size is None:
        return ""
    return f"{entry.archive.size / 2**20:.1f} MiB"


def _state(entry: DataSet, home: Path) -> str:
    if entry.generate is not None:
        return "generated"
    base = entry.base or entry.name
    if is_data_set(home / base):
        return "fetched" if not entry.base else f"made of {base}, fetched"
    archive = DATASETS[base].archive
    if archive is not None and (home / DOWNLOADS / f"{archive.file}.part").is_file():
        return "partly downloaded"
    return "not fetched"
