"""Counts of a data set as it is split and shared out, for people and for reports."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedhur_app.data.measures import gini, jensen_shannon, mean_of_pairs, top_share
from fedhur_app.data.profile import Profile

TOP_SHARES = (0.01, 0.1, 0.2)
# More clients with names than this are in the JSON only.
_CLIENTS_SHOWN = 20


@dataclass(frozen=True)
class Distribution:
    """Smallest value, quartiles (linear interpolation) and largest value of a count."""

    min: float
    q1: float
    median: float
    q3: float
    max: float

    @classmethod
    def of(cls, counts: np.ndarray) -> "Distribution":
        """The distribution of some counts, at least one."""
        return cls(*(float(value) for value in np.quantile(counts, (0, 0.25, 0.5, 0.75, 1))))


@dataclass(frozen=True)
class ClientSize:
    """What one client has.

    Attributes:
        name: Its name, or its number as text.
        users: Number of users.
        train: Number of training interactions.
        valid: Of validation interactions.
        test: Of test interactions.
    """

    name: str
    users: int
    train: int
    valid: int
    test: int


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
        users_without_train: Users who have nothing to train on.
        users_without_valid: Users who do not count in validation means.
        users_without_test: Users who do not count in test means.
        per_user: Interactions of a user, their distribution.
        items_never_in_training: Items of the catalogue that no training row holds.
        popularity: Pairs (a, b): the share a of all items with most interactions has the share b of interactions.
        clients: Number of clients.
        users_per_client: Its distribution over clients.
        train_per_client: Training interactions of a client, their distribution.
        clients_without_train: Clients that have nothing to train on.
        gini_users: Gini coefficient of the numbers of users of the clients.
        gini_train: Of their training interactions.
        overlap: Mean Jaccard index of the items that two clients train on; None without two clients that train.
        overlap_pairs: Number of pairs of clients that were compared.
        overlap_exact: Whether these are all pairs; otherwise all pairs of a seeded sample of clients.
        divergence: Mean Jensen-Shannon divergence (bits, 0..1) of the distribution of a client's training
            interactions over groups of items (see :class:`Profile`) from that of all; None if nobody trains.
        client_sizes: Of each client.
        markets: Name, users and interactions of each market, () for data without markets.
        notes: What the loader dropped, in words.
    """

    dataset: str
    users: int
    items: int
    interactions: int
    density: float
    split_sizes: tuple[int, int, int]
    users_without_train: int
    users_without_valid: int
    users_without_test: int
    per_user: Distribution
    items_never_in_training: int
    popularity: tuple[tuple[float, float], ...]
    clients: int
    users_per_client: Distribution
    train_per_client: Distribution
    clients_without_train: int
    gini_users: float
    gini_train: float
    overlap: float | None
    overlap_pairs: int
    overlap_exact: bool
    divergence: float | None
    client_sizes: tuple[ClientSize, ...]
    markets: tuple[tuple[str, int, int], ...] = ()
    notes: tuple[str, ...] = ()


def describe(of: Profile) -> Description:
    """The numbers of a profile (:func:`fedhur_app.data.profile.profile` and `profile_prepared` make one)."""
    users, items, clients = len(of.user_rows), len(of.item_rows), len(of.client_users)
    sizes = of.client_rows.sum(axis=0).tolist()
    names = of.client_names or map(str, range(clients))
    without = (of.user_rows == 0).sum(axis=0).tolist()
    train = of.client_rows[:, 0]
    return Description(
        dataset=of.dataset,
        users=users,
        items=items,
        interactions=sum(sizes),
        density=sum(sizes) / (users * items),
        split_sizes=(sizes[0], sizes[1], sizes[2]),
        users_without_train=without[0],
        users_without_valid=without[1],
        users_without_test=without[2],
        per_user=Distribution.of(of.user_rows.sum(axis=1)),
        items_never_in_training=int((of.item_rows[:, 0] == 0).sum()),
        popularity=tuple((share, top_share(of.item_rows[:, 1], share)) for share in TOP_SHARES),
        clients=clients,
        users_per_client=Distribution.of(of.client_users),
        train_per_client=Distribution.of(train),
        clients_without_train=int((train == 0).sum()),
        gini_users=gini(of.client_users),
        gini_train=gini(train),
        overlap=mean_of_pairs(of.overlap),
        overlap_pairs=len(of.compared) * (len(of.compared) - 1) // 2,
        overlap_exact=len(of.compared) == clients,
        divergence=jensen_shannon(of.groups),
        client_sizes=tuple(
            ClientSize(name, users, *rows)
            for name, users, rows in zip(names, of.client_users.tolist(), of.client_rows.tolist(), strict=True)
        ),
        markets=of.markets,
        notes=of.notes,
    )


def as_dict(description: Description) -> dict[str, Any]:
    """The description as plain values, ready for JSON."""
    return asdict(description)


def render(description: Description) -> str:
    """The description as a plain text table."""
    d = description
    train, valid, test = d.split_sizes
    pairs = "of all pairs" if d.overlap_exact else f"of {d.overlap_pairs} pairs, a sample"
    rows: list[tuple[str, str]] = [
        ("data set", d.dataset),
        ("users", f"{d.users}"),
        ("items", f"{d.items}"),
        ("interactions", f"{d.interactions} (density {d.density:.4%})"),
        ("train / valid / test", f"{train} / {valid} / {test}"),
        ("users without training items", f"{d.users_without_train}"),
        ("users without validation items", f"{d.users_without_valid}"),
        ("users without test items", f"{d.users_without_test}"),
        ("items never in training", f"{d.items_never_in_training}"),
        *((f"interactions of top {share:.0%} items", f"{held:.1%}") for share, held in d.popularity),
        ("clients", f"{d.clients}"),
        ("clients without training items", f"{d.clients_without_train}"),
        ("inequality of clients (Gini)", f"users {d.gini_users:.3f}, training interactions {d.gini_train:.3f}"),
        ("items shared by two clients", f"{_number(d.overlap)} (mean Jaccard {pairs})"),
        ("clients differ from the whole", f"{_number(d.divergence)} (mean Jensen-Shannon over item groups, 0..1)"),
    ]
    lines = [f"{label:<34}{value}" for label, value in rows]
    lines += ["", f"{'':<34}" + "".join(f"{head:>10}" for head in _HEADS)]
    for label, spread in (
        ("users of a client", d.users_per_client),
        ("training interactions of a client", d.train_per_client),
        ("interactions of a user", d.per_user),
    ):
        values = (spread.min, spread.q1, spread.median, spread.q3, spread.max)
        lines.append(f"{label:<34}" + "".join(f"{value:>10g}" for value in values))
    if d.markets:
        lines += ["", f"{'market':<34}{'users':>10}{'interactions':>14}"]
        lines += [f"{market:<34}{users:>10}{interactions:>14}" for market, users, interactions in d.markets]
    names = [client.name for client in d.client_sizes]
    known = [[str(number) for number in range(d.clients)], [market for market, *_ in d.markets]]
    if names not in known and d.clients <= _CLIENTS_SHOWN:
        lines += ["", f"{'client':<34}{'users':>10}{'train':>10}{'valid':>10}{'test':>10}"]
        lines += [f"{c.name:<34}{c.users:>10}{c.train:>10}{c.valid:>10}{c.test:>10}" for c in d.client_sizes]
    lines += [f"note: {note}" for note in d.notes]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_HEADS = ("min", "25 %", "median", "75 %", "max")
