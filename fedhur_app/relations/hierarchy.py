"""Item hierarchy: k-means of the public item table, split again level by level (spec "Hierarchy").

Level 1 splits the catalogue, level ``l`` splits every group of level ``l - 1`` into children. The children of
one parent form a *block*: filters, utilities and residuals live inside blocks only. Blocks have different
sizes, so they are stored padded to the largest, as ``(B, b, ...)`` tensors, with ``B`` blocks of at most
``b`` groups.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from fedhur_app.finite import all_finite
from fedhur_app.seeding import numpy_generator

# Rows move little after this many Lloyd steps, and the groups only have to be sensible, not optimal.
_MAX_ITER = 50


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy.

    Attributes:
        labels: ``(I,)`` group of every item, dense ``0..m-1``.
        parent: ``(m,)`` group of the level above that holds each group; all zero on level 1.
        members: ``(B, b)`` groups of every block (the children of one parent), padded with -1.
    """

    labels: torch.Tensor
    parent: torch.Tensor
    members: torch.Tensor

    @property
    def n_groups(self) -> int:
        """Number of groups ``m``."""
        return len(self.parent)

    @cached_property
    def mask(self) -> torch.Tensor:
        """``(B, b)`` booleans: true for a group, false for padding."""
        return self.members >= 0

    @cached_property
    def position(self) -> torch.Tensor:
        """``(m,)`` place of every group in the flattened ``(B * b,)`` layout."""
        return torch.argsort(self.members.flatten(), stable=True)[-self.n_groups :]

    @cached_property
    def sizes(self) -> torch.Tensor:
        """``(m,)`` number of items of every group."""
        return torch.bincount(self.labels, minlength=self.n_groups)

    @classmethod
    def from_labels(cls, labels: torch.Tensor, parent: torch.Tensor) -> "Level":
        """Lay out the blocks of dense ``labels (I,)`` with ``parent (m,)``; both are taken as valid."""
        counts = torch.bincount(parent)
        order = torch.argsort(parent, stable=True)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        slot = torch.arange(len(parent), device=parent.device) - first
        members = torch.full((len(counts), int(counts.max())), -1, device=parent.device)
        members[parent[order], slot] = order
        return cls(labels, parent, members)


@dataclass(frozen=True)
class Hierarchy:
    """Levels from coarse to fine; the groups of the last one are the leaves."""

    levels: tuple[Level, ...]

    @property
    def n_items(self) -> int:
        """Number of items ``I``."""
        return len(self.levels[0].labels)

    @property
    def leaf(self) -> Level:
        """The finest level."""
        return self.levels[-1]

    def to(self, device: torch.device | str) -> "Hierarchy":
        """The same hierarchy on another device."""
        return Hierarchy(
            tuple(
                Level(level.labels.to(device), level.parent.to(device), level.members.to(device))
                for level in self.levels
            )
        )

    def pack(self) -> dict[str, np.ndarray]:
        """Small arrays for the wire: ``leaf`` (leaf of every item) and ``parent.l`` for levels 2..L.

        Each array has the smallest unsigned integer type that holds its largest value.
        """
        arrays = {"leaf": _smallest(self.leaf.labels)}
        for number, level in enumerate(self.levels[1:], start=2):
            arrays[f"parent.{number}"] = _smallest(level.parent)
        return arrays

    @classmethod
    def unpack(cls, arrays: Mapping[str, np.ndarray]) -> "Hierarchy":
        """The hierarchy that :meth:`pack` wrote, exactly.

        Raises:
            ValueError: If an array is missing, unknown, not a vector of integers, or if the labels are not
                dense.
        """
        names = ["leaf", *(f"parent.{number}" for number in range(2, len(arrays) + 1))]
        if set(names) != set(arrays):
            raise ValueError(
                f"A packed hierarchy of {len(arrays)} levels holds the arrays {', '.join(names)}, but these "
                f"came: {', '.join(sorted(arrays)) or 'none'}. Do both sides run the same version?"
            )
        labels = _dense(arrays["leaf"], "leaf")
        parents = [_dense(arrays[name], name) for name in names[1:]]
        levels: list[Level] = []
        for number, parent in zip(range(len(names), 1, -1), reversed(parents), strict=True):
            _check_length(f"parent.{number}", parent, labels)
            levels.append(Level.from_labels(labels, parent))
            labels = parent[labels]
        levels.append(Level.from_labels(labels, torch.zeros(int(labels.max()) + 1, dtype=torch.long)))
        return cls(tuple(reversed(levels)))


def item_directions(vectors: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Rows of ``V diag(sqrt(w))`` with length 1: what to cluster so that groups depend on directions in ``S_g`` only.

    The mean of the clients' tables is the paper's choice. It means nothing where tables are rotated against each other,
    and its rows differ most in length, which is popularity.

    Args:
        vectors: Eigenvectors ``(I, r)`` of ``S_g``.
        values: Eigenvalues ``(r,)``.

    Returns:
        ``(I, r)``; items of which ``S_g`` knows nothing have zero rows.
    """
    rows = vectors * values.clamp_min(0).sqrt()
    lengths = rows.norm(dim=1, keepdim=True)
    return torch.where(lengths > 0, rows / lengths.clamp_min(torch.finfo(rows.dtype).tiny), 0)


def build_hierarchy(items: torch.Tensor, branching: Sequence[int], seed: int) -> Hierarchy:
    """Split items into groups, and every group again, by seeded k-means on one thread.

    A group with no more items than children is split into singletons; identical vectors stay together in
    larger groups, so a level can have fewer groups than asked. No group is ever empty.

    Args:
        items: ``(I, d)`` public item table ``E_g``.
        branching: Children of every group, one number a level, for example ``(12, 12, 12)``.
        seed: Seed of the run (and round); equal inputs give an equal hierarchy.

    Raises:
        ValueError: If the table is empty, not a matrix or not finite, or ``branching`` is empty or below 1.
    """
    if items.dim() != 2 or len(items) == 0:
        raise ValueError(f"The item table must be a matrix with at least one item, not of shape {tuple(items.shape)}.")
    if not all_finite(items):
        bad = int((~torch.isfinite(items).all(dim=1)).sum())
        raise ValueError(f"The item table holds NaN or infinite values in {bad} of {len(items)} rows.")
    if len(branching) == 0 or any(children < 1 for children in branching):
        raise ValueError(f"branching needs at least one number, all of them at least 1, not {list(branching)}.")
    table = items.detach().cpu().to(torch.float64 if items.dtype == torch.float64 else torch.float32).numpy()
    rng = numpy_generator(seed, "hierarchy")
    labels = np.zeros(len(table), dtype=np.int64)
    levels = []
    with threadpool_limits(limits=1), warnings.catch_warnings():
        # Fewer distinct vectors than children is a normal input here, not a mistake to warn about.
        warnings.simplefilter("ignore", ConvergenceWarning)
        for children in branching:
            labels, parent = _split(table, labels, children, rng)
            levels.append(Level.from_labels(torch.from_numpy(labels), torch.from_numpy(parent)))
    return Hierarchy(tuple(levels))


def _split(
    table: np.ndarray, labels: np.ndarray, children: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Labels of the next level and the parent of every new group."""
    finer = np.empty_like(labels)
    parent: list[int] = []
    order = np.argsort(labels, kind="stable")
    for group, rows in enumerate(np.split(order, np.cumsum(np.bincount(labels))[:-1])):
        seed = int(rng.integers(2**31))
        if children == 1:
            local = np.zeros(len(rows), dtype=np.int64)
        elif len(rows) <= children:
            local = np.arange(len(rows))
        else:
            kmeans = KMeans(children, n_init=1, max_iter=_MAX_ITER, random_state=seed, algorithm="lloyd")
            local = np.unique(kmeans.fit_predict(table[rows]), return_inverse=True)[1]
        finer[rows] = len(parent) + local
        parent += [group] * (int(local.max()) + 1)
    return finer, np.asarray(parent)


def _smallest(values: torch.Tensor) -> np.ndarray:
    return values.cpu().numpy().astype(np.min_scalar_type(int(values.max())))


def _dense(array: np.ndarray, name: str) -> torch.Tensor:
    """``array`` as int64 if it is a vector whose values are exactly ``0..max``, each used."""
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"The hierarchy's array {name!r} must be a non-empty vector of integers, "
            f"not {array.dtype} of shape {array.shape}."
        )
    values = array.astype(np.int64)
    if values.min() < 0 or values.max() >= len(values) or (np.bincount(values) == 0).any():
        raise ValueError(
            f"The hierarchy's array {name!r} must use every number from 0 to its largest value "
            f"(here {values.min()} to {values.max()} in {len(values)} entries): "
            f"a group is empty or out of range."
        )
    return torch.from_numpy(values)


def _check_length(name: str, parent: torch.Tensor, labels: torch.Tensor) -> None:
    groups = int(labels.max()) + 1
    if len(parent) != groups:
        raise ValueError(
            f"The hierarchy's array {name!r} names the parents of {len(parent)} groups, but the finer level "
            f"has {groups} groups."
        )
