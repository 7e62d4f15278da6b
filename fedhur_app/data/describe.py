"""Counts of a data set as it is split and shared out, for people and for reports."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhur_app.data.interactions import Interactions
from fedhur_app.data.partition import market_names
from fedhur_app.data.shards import Shard, load_prepared, load_shard, make_shards, shard_path


@dataclass(frozen=True)
class Distribution:
    """Smallest value, quartiles (linear interpolation) and largest value of a count over clients."""

    min: float
    q1: float
    median: float
    q3: float
    max: float

    @classmethod
    def of(cls, counts: Iterable[int]) -> "Distribution":
        """The distribution of some counts, at least one."""
        return cls(*(float(value) for value in np.quantile(list(counts), (0, 0.25, 0.5, 0.75, 1))))


@dataclass(frozen=True)
class Description:
    """What a data set holds and how it is shared out.

    Attributes:
        dataset: Name of the data set.
        users: Number of users.
        items: Size of the catalogue.
        interactions: Number of interactions.
        density: interactions / (users * items).
        split_sizes: Numbers of training, validation and test interactions.
        clients: Number of clients.
        users_per_client: Its distribution over clients.
        train_per_client: Training interactions of a client, their distribution.
        users_without_train: Users who have nothing to train on.
        users_without_valid: Users who do not count in validation means.
        users_without_test: Users who do not count in test means.
        items_never_in_training: Items of the catalogue that no training row holds.
        markets: Name, users and interactions of each market, () for data without markets.
        notes: What the loader dropped, in words.
    """

    dataset: str
    users: int
    items: int
    interactions: int
    density: float
    split_sizes: tuple[int, int, int]
    clients: int
    users_per_client: Distribution
    train_per_client: Distribution
    users_without_train: int
    users_without_valid: int
    users_without_test: int
    items_never_in_training: int
    markets: tuple[tuple[str, int, int], ...] = ()
    notes: tuple[str, ...] = ()


def describe(data: Interactions, labels: np.ndarray, owner: np.ndarray) -> Description:
    """Count what is in a data set.

    Args:
        data: The interactions.
        labels: 0 train, 1 validation, 2 test, (n,).
        owner: Client of each user, (n_users,).
    """
    return _of_shards(data.name, data.n_items, make_shards(data, labels, owner), market_names(data), data.notes)


def describe_prepared(folder: Path) -> Description:
    """Count what is in a folder of prepared shards; reads every shard.

    Raises:
        DataError: The folder or a shard in it cannot be read.
    """
    prepared = load_prepared(folder)
    shards = [load_shard(shard_path(folder, client)) for client in range(prepared.clients)]
    return _of_shards(prepared.dataset, prepared.n_items, shards, prepared.markets, prepared.notes)


def _of_shards(
    name: str, items: int, shards: list[Shard], markets: tuple[str, ...], notes: tuple[str, ...]
) -> Description:
    users = sum(shard.n_users for shard in shards)
    sizes = [sum(len(getattr(shard, part)) for shard in shards) for part in ("train", "valid", "test")]
    without = [
        sum(int((getattr(shard, part).counts == 0).sum()) for shard in shards) for part in ("train", "valid", "test")
    ]
    trained = np.zeros(items, dtype=bool)
    for shard in shards:
        trained[shard.train.items] = True
    return Description(
        dataset=name,
        users=users,
        items=items,
        interactions=sum(sizes),
        density=sum(sizes) / (users * items),
        split_sizes=(sizes[0], sizes[1], sizes[2]),
        clients=len(shards),
        users_per_client=Distribution.of(shard.n_users for shard in shards),
        train_per_client=Distribution.of(len(shard.train) for shard in shards),
        users_without_train=without[0],
        users_without_valid=without[1],
        users_without_test=without[2],
        items_never_in_training=int((~trained).sum()),
        markets=_by_market(shards, markets),
        notes=notes,
    )


def _by_market(shards: list[Shard], names: tuple[str, ...]) -> tuple[tuple[str, int, int], ...]:
    """Name, users and interactions of each market."""
    users, interactions = (np.zeros(len(names), dtype=np.int64) for _ in range(2))
    for shard in shards:
        if shard.markets is not None:
            np.add.at(users, shard.markets, 1)
            np.add.at(interactions, shard.markets, shard.train.counts + shard.valid.counts + shard.test.counts)
    return tuple(zip(names, users.tolist(), interactions.tolist(), strict=True))


def as_dict(description: Description) -> dict[str, Any]:
    """The description as plain values, ready for JSON."""
    return asdict(description)


def render(description: Description) -> str:
    """The description as a plain text table."""
    d = description
    train, valid, test = d.split_sizes
    pairs: list[tuple[str, str]] = [
        ("data set", d.dataset),
        ("users", f"{d.users}"),
        ("items", f"{d.items}"),
        ("interactions", f"{d.interactions} (density {d.density:.4%})"),
        ("train / valid / test", f"{train} / {valid} / {test}"),
        ("users without training items", f"{d.users_without_train}"),
        ("users without validation items", f"{d.users_without_valid}"),
        ("users without test items", f"{d.users_without_test}"),
        ("items never in training", f"{d.items_never_in_training}"),
        ("clients", f"{d.clients}"),
    ]
    lines = [f"{label:<32}{value}" for label, value in pairs]
    lines += ["", f"{'a client has':<32}" + "".join(f"{head:>10}" for head in _HEADS)]
    for label, spread in (("users", d.users_per_client), ("training interactions", d.train_per_client)):
        values = (spread.min, spread.q1, spread.median, spread.q3, spread.max)
        lines.append(f"{label:<32}" + "".join(f"{value:>10g}" for value in values))
    if d.markets:
        lines += ["", f"{'market':<32}{'users':>10}{'interactions':>14}"]
        lines += [f"{market:<32}{users:>10}{interactions:>14}" for market, users, interactions in d.markets]
    lines += [f"note: {note}" for note in d.notes]
    return "\n".join(lines)


_HEADS = ("min", "25 %", "median", "75 %", "max")
