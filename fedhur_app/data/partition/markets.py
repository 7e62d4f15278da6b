"""Markets of the users, and one client for each."""

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions, in_order
from fedhur_app.data.partition.clients import Clients

# The market of all who belong to no other one; it is numbered last.
OTHER_MARKET = "other"


def by_market(data: Interactions) -> Clients:
    """A client for each market, in the order of :func:`market_names`."""
    numbers = market_numbers(data)
    if numbers is None:
        raise DataError(f"{data.name} has no markets to make clients of; choose another dataset.clients.kind")
    return Clients(numbers, market_names(data))


def market_names(data: Interactions) -> tuple[str, ...]:
    """Names of the markets of a data set; their places are the numbers of the markets, and of clients by market.

    Every market has a user. They are sorted by value if all are integers, else as text; "other" is the last in
    either case. () for data without markets.
    """
    if data.user_markets is None:
        return ()
    names = set(data.user_markets.tolist())
    last = names & {OTHER_MARKET}
    return (*in_order(names - last), *last)


def market_numbers(data: Interactions) -> np.ndarray | None:
    """Number of the market of each user, int64 (n_users,); None for data without markets."""
    if data.user_markets is None:
        return None
    number = {name: place for place, name in enumerate(market_names(data))}
    return np.array([number[name] for name in data.user_markets.tolist()], dtype=np.int64)
