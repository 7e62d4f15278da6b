"""Made-up data with a known structure: groups of items within groups, users who like a few of them."""

import math
from collections.abc import Sequence

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions, from_raw
from fedhur_app.seeding import numpy_generator

_USERS_AT_ONCE = 512
_FIRST_SECOND = 1_000_000_000
_SPAN_SECONDS = 365 * 24 * 3600


def generate(
    users: int = 1000,
    items: int = 800,
    interactions_per_user: int = 40,
    branching: Sequence[int] = (4, 4),
    concentration: float = 0.3,
    popularity_skew: float = 0.8,
    noise: float = 0.1,
    activity_spread: float = 0.5,
    seed: int = 1,
) -> Interactions:
    """Draw a data set in which users follow hierarchical interests.

    Items are dealt evenly, in random order, to the leaf groups of a tree with `branching[0]` groups, each of
    `branching[1]` groups, and so on. Each user spreads attention over the children of every node by a
    symmetric Dirichlet draw, so that the share of a leaf is the product along its path. Inside a leaf the
    item of rank r has popularity r^-skew. A user then picks distinct items one after the other with these
    probabilities, mixed with `noise` times the uniform distribution; the times follow the order of picks.

    Args:
        users: Number of users.
        items: Number of items, at least the number of leaf groups.
        interactions_per_user: Mean number of interactions of a user; nobody has more than `items` or less
            than one.
        branching: Number of children at each level of the tree.
        concentration: Of the Dirichlet draws; small values give users with few interests.
        popularity_skew: Exponent of popularity inside a leaf; 0 makes its items equally popular.
        noise: Share of picks regardless of interest, 0..1.
        activity_spread: Standard deviation of the log of a user's number of interactions; 0: all the same.
        seed: The same seed gives the same data.

    Returns:
        The data, rows in order of time, without ratings; `item_genres` names the groups of an item from the
        top level down ("1", "1.3"), and its title is such as "item 12 (group 1.3)".

    Raises:
        DataError: A number out of range.
    """
    leaves = math.prod(branching)
    if users < 1 or interactions_per_user < 1 or not branching or min(branching) < 1:
        raise DataError("synthetic data: users, interactions_per_user and branching must be at least 1")
    if items < leaves:
        raise DataError(f"synthetic data: {items} items cannot fill {leaves} groups; give more items")
    if concentration <= 0 or popularity_skew < 0 or activity_spread < 0 or not 0 <= noise <= 1:
        raise DataError(
            "synthetic data: concentration must be > 0, popularity_skew and activity_spread >= 0, noise 0..1"
        )
    draw = numpy_generator(seed, "synthetic")

    leaf_of = draw.permutation(np.arange(items) % leaves)
    popularity = _popularity(leaf_of, leaves, popularity_skew, draw)
    interest = np.ones((users, 1))
    for children in branching:
        shares = draw.dirichlet(np.full(children, concentration), size=(users, interest.shape[1]))
        interest = (interest[:, :, None] * shares).reshape(users, -1)
    counts = draw_counts(users, interactions_per_user, activity_spread, items, draw)

    # float32 from here on: the table of users x items is what takes the time.
    focused, popularity = ((1 - noise) * interest).astype(np.float32), popularity.astype(np.float32)
    picked = [
        _pick(
            focused[start : start + _USERS_AT_ONCE, leaf_of] * popularity + np.float32(noise / items),
            counts[start : start + _USERS_AT_ONCE],
            draw,
        )
        for start in range(0, users, _USERS_AT_ONCE)
    ]
    who, what = np.repeat(np.arange(users), counts), np.concatenate(picked)
    when = draw_times(who, draw)
    order = np.argsort(when, kind="stable")

    names = [_group_names(leaf, branching) for leaf in range(leaves)]
    groups = {str(item): names[leaf] for item, leaf in enumerate(leaf_of)}
    return from_raw(
        "synthetic",
        who[order],
        what[order],
        timestamps=when[order],
        catalogue=groups,
        item_titles={item: f"item {item} (group {path[-1]})" for item, path in groups.items()},
        item_genres=groups,
    )


def draw_counts(users: int, mean: float, spread: float, most: int, draw: np.random.Generator) -> np.ndarray:
    """Log-normal numbers of interactions, (users,) int64 in 1..most.

    Args:
        users: Number of users.
        mean: Mean of the numbers before they are rounded and bounded.
        spread: Standard deviation of their log; 0: all the same.
        most: Upper bound.
        draw: The generator.
    """
    factor = np.exp(draw.normal(-(spread**2) / 2, spread, users))
    return np.clip(np.rint(mean * factor), 1, most).astype(np.int64)


def draw_times(who: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Seconds within one year that grow with the picks of each user, int64 (n,).

    Args:
        who: User of each pick, ascending; the picks of a user are in order, (n,).
        draw: The generator.
    """
    when = _FIRST_SECOND + draw.integers(0, _SPAN_SECONDS, len(who))
    # Sorting by (user, time) puts the sorted times of a user beside that user's picks.
    return when[np.lexsort((when, who))]


def _popularity(leaf_of: np.ndarray, leaves: int, skew: float, draw: np.random.Generator) -> np.ndarray:
    """Popularity of each item inside its leaf, (items,), summing to 1 over a leaf."""
    order = np.lexsort((draw.random(len(leaf_of)), leaf_of))
    sizes = np.bincount(leaf_of, minlength=leaves)
    rank = np.empty(len(leaf_of), dtype=np.int64)
    rank[order] = np.arange(len(leaf_of)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1
    weight = rank.astype(np.float64) ** -float(skew)
    return weight / np.bincount(leaf_of, weights=weight, minlength=leaves)[leaf_of]


def _pick(weights: np.ndarray, counts: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Successive draws without replacement: the items of the smallest Exp(1)/weight, in that order.

    Args:
        weights: Probability of each item for each user, (u, items).
        counts: How many items each user picks, (u,).
        draw: The generator.

    Returns:
        The picks of all users one after the other, (counts.sum(),).
    """
    with np.errstate(divide="ignore", over="ignore"):
        arrival = draw.standard_exponential(weights.shape, dtype=np.float32) / weights
    return first_arrivals(arrival, counts)


def first_arrivals(arrival: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The items that arrive first at each user, in the order of arrival.

    Args:
        arrival: When each item arrives at each user, (u, items).
        counts: How many items each user takes, (u,).

    Returns:
        The items of all users one after the other, (counts.sum(),).
    """
    most = int(counts.max())
    first = np.argpartition(arrival, most - 1, axis=1)[:, :most]
    first = np.take_along_axis(first, np.argsort(np.take_along_axis(arrival, first, axis=1), axis=1), axis=1)
    return first[np.arange(most) < counts[:, None]]


def _group_names(leaf: int, branching: Sequence[int]) -> tuple[str, ...]:
    """Names of the groups of a leaf from the top level down, numbered from 1: ("1", "1.3")."""
    digits = [int(digit) + 1 for digit in np.unravel_index(leaf, tuple(branching))]
    return tuple(".".join(map(str, digits[: level + 1])) for level in range(len(digits)))
