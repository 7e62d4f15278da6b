"""Cuts a data set into the folders of devices, so that a trial can be compared with the simulation row by row."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from fedhur_app.config import OWN_DATA, Settings
from fedhur_app.data.experiment import load_interactions_of
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition import assign_clients
from fedhur_app.data.split import split_labels
from fedhur_app.deploy.errors import DeployError
from fedhur_app.deploy.layout import client_names, numbered

ROWS, ITEMS = "interactions.csv", "items.csv"
_LABELS = np.array(["train", "valid", "test"])


def split_data(settings: Settings, folder: Path, force: bool = False) -> list[Path]:
    """Write the rows of each client into a folder of its own, and the catalogue for the server.

    Where `folder` holds a deployment with as many devices as there are clients, the rows go to the devices' `data/`
    in order of name and the catalogue to `server/`; else to `<folder>/client-<number>` and to `folder`.

    A client's folder gets `interactions.csv` (user, item, rating, timestamp, split; the ids of the data set). With
    `dataset.split.kind: published` the device trains and tests on the same rows as the simulation. The catalogue is
    `items.csv` (item, title, genres).

    Args:
        settings: Data set, split and clients, as a run has them.
        folder: Where; made if absent.
        force: Replace what lies there.

    Returns:
        The clients' folders, in the order of client numbers.

    Raises:
        DeployError: Another number of devices than clients, a client without rows, or files that would be overwritten.
    """
    if settings.dataset.name == OWN_DATA:
        raise DeployError(f"{OWN_DATA} means rows on devices: name the data set that is to be cut")
    folder = folder.expanduser().resolve()
    data = load_interactions_of(settings)
    split, clients = settings.dataset.split, settings.dataset.clients
    labels = split_labels(data, split.kind, split.ratios, settings.seed)
    shared = assign_clients(data, labels, clients.kind, clients.number, settings.seed, **clients.options)
    client_of = shared.owner[data.users]
    empty = np.flatnonzero(np.bincount(client_of, minlength=shared.number) == 0)
    if len(empty):
        raise DeployError(f"client {empty[0]} would get no rows, and a device needs some: set fewer clients")
    folders, catalogue = _places(folder, shared.number)
    files = [*(place / ROWS for place in folders), catalogue]
    if not force and (present := [file for file in files if file.exists()]):
        raise DeployError(f"{present[0]} exists: choose another folder, or replace it with --force")
    for client, place in enumerate(folders):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_rows(place / ROWS, data, labels, np.flatnonzero(client_of == client))
        (place / ROWS).chmod(0o600)
    _write_catalogue(catalogue, data)
    return folders


def _places(folder: Path, clients: int) -> tuple[list[Path], Path]:
    names: Sequence[str] = client_names(folder)
    if not names:
        return [folder / name for name in numbered(clients)], folder / ITEMS
    if len(names) != clients:
        raise DeployError(
            f"{folder} has {len(names)} devices and the data set is cut into {clients} clients: add "
            f"--set dataset.clients.number={len(names)}"
        )
    return [folder / "clients" / name / "data" for name in names], folder / "server" / ITEMS


def _write_rows(path: Path, data: Interactions, labels: np.ndarray, rows: np.ndarray) -> None:
    columns = {"user": data.user_ids[data.users[rows]], "item": data.item_ids[data.items[rows]]}
    if data.ratings is not None:
        columns["rating"] = data.ratings[rows]
    if data.timestamps is not None:
        columns["timestamp"] = data.timestamps[rows]
    columns["split"] = _LABELS[labels[rows]]
    pl.DataFrame({name: column.tolist() for name, column in columns.items()}).write_csv(path)


def _write_catalogue(path: Path, data: Interactions) -> None:
    titles = [""] * data.n_items if data.item_titles is None else data.item_titles.tolist()
    genres = [""] * data.n_items if data.item_genres is None else ["|".join(each) for each in data.item_genres]
    pl.DataFrame({"item": data.item_ids.tolist(), "title": titles, "genres": genres}).write_csv(path)
