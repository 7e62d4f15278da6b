"""From settings to data: which interactions, how many clients, the prepared shards of a run."""

from fedhur_app.config import OWN_DATA, Settings
from fedhur_app.data.catalog import load_dataset
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition import check_markets, market_names, published_owner
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
    """How many clients a run with these settings has.

    Raises:
        DataError: Clients by market or as published are wanted of data without them; the data set cannot be loaded.
    """
    if settings.centralised:
        return 1
    if settings.dataset.clients.kind == "one-user":
        return load_interactions_of(settings).n_users
    if settings.dataset.clients.kind == "market":
        data = load_interactions_of(settings)
        check_markets(data)
        return len(market_names(data))
    if settings.dataset.clients.kind == "published":
        return int(published_owner(load_interactions_of(settings)).max()) + 1
    return settings.dataset.clients.number


def prepare_data(settings: Settings) -> PreparedData | None:
    """Split the data and write one shard a client; None where the clients bring their own.

    A centralised run has one client that owns all users. The split does not depend on the clients, so its test rows
    are those of the federated runs with the same seed.
    """
    dataset = settings.dataset
    if dataset.name == OWN_DATA:
        return None
    clients = ("id", 1) if settings.centralised else (dataset.clients.kind, dataset.clients.number)
    return prepare(load_interactions_of(settings), dataset.split.kind, dataset.split.ratios, *clients, settings.seed)
