"""What it does to a target client to mix in one candidate: filters with one candidate, and the targets' metrics.

A filter with candidate ``j`` alone is, on level ``l``, ``S_g + gamma A_l (F_j^(l) - F_g^(l)) A_l^T`` (eq. 24 with all
weight on ``j``), and on the level of items ``(1 - gamma) S_g + gamma E_j E_j^T``. Neither depends on the target: the
target comes in by its users, and by the rotation that keeps its user table's meaning. So one eigenproblem a candidate
and level serves all targets, and with closed-form user vectors one table does.

Cost of one table, with ``I`` items, width ``d``, ``p`` columns of the basis (``2 d`` for items, ``d`` and the level's
groups else) and ``U`` users of all targets with ``n`` rows: ``4 I p d + 10 p^3`` for the table, ``2 U I d`` for the
scores and ``2 n I`` comparisons for AUC, which comes with the ranking. For 1,682 items, ``d`` 64 and 20 targets with
200 users that is about 0.1 GFLOP and, most of the time, the ranking of 15,000 training rows: 0.1 to 0.3 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedhur_app.config import Settings
from fedhur_app.data.shards import Shard, UserItems
from fedhur_app.evaluation.ranking import rank_users
from fedhur_app.models.mf import MatrixFactorization
from fedhur_app.models.refit import refit_users
from fedhur_app.relations.alignment import PersonalFilter, align, procrustes
from fedhur_app.relations.hierarchy import Hierarchy

PARTS = ("train", "valid", "test")
METRICS = ("recall", "mrr", "ndcg")


def level_filter(
    vectors: Tensor, values: Tensor, hierarchy: Hierarchy, index: int, residual: Tensor, gamma: float
) -> PersonalFilter:
    """``S_g + gamma A_l R A_l^T``.

    Args:
        vectors: ``V (I, r)`` of ``S_g``.
        values: ``w (r,)``.
        hierarchy: The hierarchy.
        index: Of the level, from 0.
        residual: ``F_j - F_g (B, b, b)`` on this level, in the units of the item tables.
        gamma: Its weight.
    """
    zeros = [residual.new_zeros(*level.members.shape, level.members.shape[1]) for level in hierarchy.levels]
    zeros[index] = residual
    betas = [gamma if number == index else 0.0 for number in range(len(hierarchy.levels))]
    return PersonalFilter(vectors, values, hierarchy, zeros, betas)


def item_filter(vectors: Tensor, values: Tensor, table: Tensor, gamma: float) -> PersonalFilter:
    """``(1 - gamma) S_g + gamma E_j E_j^T`` from ``V (I, r)``, ``w (r,)`` and ``E_j (I, d)``."""
    weights = torch.cat([(1 - gamma) * values, gamma * values.new_ones(table.shape[1])])
    return PersonalFilter(torch.cat([vectors, table], dim=1), weights)


@dataclass(frozen=True)
class TargetUsers:
    """The users of the target clients, one after the other.

    Attributes:
        settings: Of the run: list length, closed-form user vectors.
        owner: (U,) position of each user's client among the targets.
        rows: Part -> the users' items.
        users: ``P_k`` of each target.
        items: ``E_k`` of each target, before it is aligned.
    """

    settings: Settings
    owner: np.ndarray
    rows: dict[str, UserItems]
    users: Sequence[Tensor]
    items: Sequence[Tensor]

    @classmethod
    def of(
        cls, settings: Settings, shards: Sequence[Shard], users: Sequence[Tensor], items: Sequence[Tensor]
    ) -> "TargetUsers":
        """From the shards and tables of the targets."""
        owner = np.repeat(np.arange(len(shards)), [shard.n_users for shard in shards])
        rows = {part: _stacked([getattr(shard, part) for shard in shards]) for part in PARTS}
        return cls(settings, owner, rows, users, items)

    def measure(self, filter_: PersonalFilter) -> np.ndarray:
        """Metrics of every target with its table fitted exactly to a filter.

        Training rows are ranked among all items, validation rows among those that are no training rows, test rows
        among those that are neither, by the code that ranks in a run.

        Returns:
            (targets, parts, metrics) means over the target's users that have rows in the part; NaN without any.
        """
        table = align(filter_, self.items[0]).items  # in any rotation, see _vectors
        scores = MatrixFactorization(self._vectors(table), table).scores
        found = np.full((len(self.users), len(PARTS), len(METRICS)), np.nan)
        seen: list[UserItems] = []
        for number, part in enumerate(PARTS):
            truth = self.rows[part]
            ranks = rank_users(scores, seen, truth, self.settings.evaluation.k, n_items=len(table))
            owner = self.owner[ranks.users]
            counts = np.bincount(owner, minlength=len(found))
            for column, metric in enumerate(METRICS):
                sums = np.bincount(owner, getattr(ranks, metric), minlength=len(found))
                np.divide(sums, counts, out=found[:, number, column], where=counts > 0)
            seen.append(truth)
        return found

    def _vectors(self, table: Tensor) -> Tensor:
        """Vectors (U, d) of all users for one table: closed form, or each target's own in this table's rotation."""
        refit = self.settings.user_refit
        if refit.enabled:
            return refit_users(table, self.rows["train"], refit.unobserved_weight, refit.l2)
        # The target's table is `table @ Q`, whose scores P_k (table Q)^T are those of P_k Q^T with `table`.
        rotations = [procrustes(table, items) for items in self.items]
        return torch.cat([own @ rotation.T for own, rotation in zip(self.users, rotations, strict=True)])


def _stacked(parts: Sequence[UserItems]) -> UserItems:
    counts = np.concatenate([part.counts for part in parts])
    return UserItems(np.concatenate([[0], np.cumsum(counts)]), np.concatenate([part.items for part in parts]))
