"""Made-up markets: one catalogue, several groups of users whose tastes differ as much as one likes."""

from collections.abc import Sequence

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions, from_raw
from fedhur_app.data.synthetic import draw_counts, draw_times, first_arrivals
from fedhur_app.seeding import numpy_generator

_USERS_AT_ONCE = 512


def generate(
    users: Sequence[int] = (400, 120),
    interactions_per_user: Sequence[int] = (40, 10),
    items: int = 500,
    dim: int = 8,
    shift: float = 0.5,
    own_items: float = 0.0,
    popularity_skew: float = 0.5,
    sharpness: float = 2.5,
    activity_spread: float = 0.5,
    seed: int = 1,
) -> Interactions:
    """Draw markets in which the same items mean partly the same and partly something else.

    In market m item i has the vector `sqrt(1 - s^2) v_i + s w_i`, where s is `shift`, v is shared by all markets and
    w is drawn for the market, all standard normal in `dim` dimensions; its popularity (a log weight) is
    `popularity_skew` times a mixture of standard normal numbers in the same way. So two markets agree with
    correlation 1 - s^2: entirely for shift 0, not at all for shift 1. A user with the standard normal vector p picks
    distinct items one after the other with probabilities in proportion to
    `exp(sharpness * (p . vector) / sqrt(dim) + popularity)` (successive draws without replacement are the first n of
    logits plus Gumbel noise); the times follow the order of picks.

    Args:
        users: Number of users of each market.
        interactions_per_user: Mean number of interactions of a user, of each market; nobody has more than the market
            sells or less than one.
        items: Number of items of all markets.
        dim: Dimensions of taste.
        shift: How far the markets are apart, 0..1.
        own_items: Share of the items that one market alone sells; they are dealt evenly to the markets, at random.
        popularity_skew: Standard deviation of the log popularity; 0 makes all items equally popular.
        sharpness: Standard deviation of a user's log preferences; 0 makes users pick by popularity alone.
        activity_spread: Standard deviation of the log of a user's number of interactions; 0: all the same.
        seed: The same seed gives the same data. What a market draws depends neither on the other markets nor on the
            sizes of their lists, so a market can be changed while the rest stays.

    Returns:
        The data, rows in order of time, without ratings. Markets are called "0", "1", ..., users are numbered from
        those of market 0 on. The genre of an item is the coordinate in which its shared vector is largest, with the
        sign, such as "3-"; so it says what the markets have in common.

    Raises:
        DataError: A number out of range, lists of unequal length, a market that sells nothing.
    """
    if not users or len(users) != len(interactions_per_user):
        raise DataError(
            "markets: users and interactions_per_user need one number a market each, "
            f"not {len(users)} and {len(interactions_per_user)}"
        )
    if min(*users, *interactions_per_user, items, dim) < 1:
        raise DataError("markets: users, interactions_per_user, items and dim must be at least 1")
    if not (0 <= shift <= 1 and 0 <= own_items <= 1):
        raise DataError("markets: shift and own_items must be 0..1")
    if min(popularity_skew, sharpness, activity_spread) < 0:
        raise DataError("markets: popularity_skew, sharpness and activity_spread must be >= 0")
    draw = numpy_generator(seed, "markets")
    vectors, popularity = draw.standard_normal((items, dim)), draw.standard_normal(items)
    sold = _sold(items, own_items, len(users), draw)
    if not sold.any(axis=1).all():
        raise DataError(f"markets: {items} items are too few, a market would sell nothing; give more items")

    rows = []
    for market, (n_users, mean) in enumerate(zip(users, interactions_per_user, strict=True)):
        # A generator for each market: the rich one stays the same when the sparse one is changed.
        draw = numpy_generator(seed, "market", client=market)
        local = _mixed(vectors, draw.standard_normal((items, dim)), shift)
        appeal = popularity_skew * _mixed(popularity, draw.standard_normal(items), shift)
        tastes = draw.standard_normal((n_users, dim)) * (sharpness / np.sqrt(dim))
        counts = draw_counts(n_users, mean, activity_spread, int(sold[market].sum()), draw)
        picked = []
        for start in range(0, n_users, _USERS_AT_ONCE):
            part = slice(start, start + _USERS_AT_ONCE)
            logits = np.where(sold[market], tastes[part] @ local.T + appeal, -np.inf)
            picked.append(first_arrivals(-(logits + draw.gumbel(size=logits.shape)), counts[part]))
        who = np.repeat(np.arange(n_users), counts)
        rows.append((sum(users[:market]) + who, np.concatenate(picked), draw_times(who, draw)))
    who, what, when = (np.concatenate(column) for column in zip(*rows, strict=True))
    market_of = np.repeat(np.arange(len(users)), users)
    order = np.argsort(when, kind="stable")
    genres = {str(item): _genre(vector) for item, vector in enumerate(vectors)}
    return from_raw(
        "markets-synthetic",
        who[order],
        what[order],
        timestamps=when[order],
        markets=market_of[who[order]],
        catalogue=genres,
        item_titles={item: f"item {item} (genre {genre})" for item, genre in genres.items()},
        item_genres={item: (genre,) for item, genre in genres.items()},
    )


def _mixed(shared: np.ndarray, own: np.ndarray, shift: float) -> np.ndarray:
    """Variance 1 - shift^2 from what is shared and shift^2 from what is the market's own."""
    return np.sqrt(1 - shift**2) * shared + shift * own


def _sold(items: int, own: float, markets: int, draw: np.random.Generator) -> np.ndarray:
    """Which items each market sells, bool (markets, items)."""
    sold = np.ones((markets, items), dtype=bool)
    alone = draw.permutation(items)[: round(own * items)]
    sold[:, alone] = np.arange(markets)[:, None] == np.arange(len(alone)) % markets
    return sold


def _genre(vector: np.ndarray) -> str:
    """Number of the largest coordinate, from 1, and its sign."""
    largest = int(np.abs(vector).argmax())
    return f"{largest + 1}{'+' if vector[largest] > 0 else '-'}"
