"""From settings to data: which interactions, how many clients, the prepared shards of a run."""

from fedhur_app.config import OWN_DATA, Settings
from fedhur_app.data.catalog import load_dataset
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition import clients_of_data, decided_by_data
from fedhur_app.data.shards import PreparedData, prepare


def load_interactions_of(settings: Settings) -> Interactions:
    """The data set that the settings name (fetched if it never was)."""
    dataset = settings.dataset
    return load_dataset(
        dataset.name,
        synthetic=dataset.synthetic.model_dump() | {"seed": settings.seed},
        markets=dataset.markets.model_dump() | {"seed": settings.seed},
    )


def number_of_clients(settings: Settings) -> int:
    """How many clients a run with these settings has; loads the data (once) only where they decide.

    Raises:
        DataError: The data do not say what the kind of clients asks, such as clients by market of data without
            markets; the data set cannot be loaded.
    """
    clients = settings.dataset.clients
    if settings.centralised:
        return 1
    if not decided_by_data(clients.kind):
        return clients.number
    return clients_of_data(load_interactions_of(settings), clients.kind, **clients.options).number


def prepare_data(settings: Settings) -> PreparedData | None:
    """Split the data and write one shard a client; None where the clients bring their own.

    A centralised run has one client that owns all users. The split does not depend on the clients, so its test rows
    are those of the federated runs with the same seed.
    """
    dataset = settings.dataset
    if dataset.name == OWN_DATA:
        return None
    kind, number = ("id", 1) if settings.centralised else (dataset.clients.kind, dataset.clients.number)
    data = load_interactions_of(settings)
    split = dataset.split
    return prepare(data, split.kind, split.ratios, kind, number, settings.seed, options=dataset.clients.options)
