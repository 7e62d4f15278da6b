"""Ranking metrics over the full catalogue, as sums over users that pool exactly.

With ``R`` the truth items of a user and ``L`` the best ``k`` of all items that the user has not seen:

* recall ``= |L & R| / |R|``; precision ``= |L & R| / k``; hit ``= 1`` if ``L & R`` is not empty, else 0;
* MRR ``= 1 / rank`` of the first item of ``R`` in ``L``, 0 if there is none;
* NDCG ``= sum_{r: L_r in R} 1/log2(r + 1)  /  sum_{r=1}^{min(k, |R|)} 1/log2(r + 1)``, ``r`` counted from 1;
* F1: the harmonic mean of the *mean* precision and the *mean* recall, as FedCIA reports it;
* AUC: the share of pairs (an item of ``R``, an unseen item outside ``R``) that the scores order rightly, a tie counting
  one half; 0.5 for a user without such a pair. It looks at the whole catalogue and has no ``k``.

Users without truth items are left out of sums and counts.

Ties: items of equal score are ordered by one fixed pseudo-random permutation of the catalogue, the same for
all users. Not by item number: in most data sets low numbers are popular items, so a model that knows nothing
would look good. Scores are compared as float32. They should come in float64, so that the last bits, which
depend on the batch and on the matrix kernel, are rounded away before they can decide anything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from torch import Tensor

from fedhur_app.data.shards import UserItems
from fedhur_app.finite import all_finite
from fedhur_app.seeding import torch_generator

METRICS = ("recall", "precision", "mrr", "ndcg", "hit", "auc")
_WHOLE = ("auc",)  # metrics of the whole catalogue, without a k


def metric_label(name: str, k: int) -> str:
    """Name of a metric with its length of the list, such as ``ndcg@10``; AUC has none."""
    return name if name in _WHOLE else f"{name}@{k}"


class NonFiniteScoresError(ValueError):
    """The model has diverged."""


@dataclass(frozen=True)
class RankSums:
    """Metrics summed over users; add the sums of clients to get those of all their users together.

    Attributes:
        k: Length of the ranked list.
        users: Users counted, those with truth items.
        recall: Sum of the users' recall; likewise the others.
        precision: Sum of precision.
        mrr: Sum of reciprocal ranks.
        ndcg: Sum of NDCG.
        hit: Users with a hit.
        auc: Sum of AUC.
    """

    k: int
    users: float
    recall: float
    precision: float
    mrr: float
    ndcg: float
    hit: float
    auc: float

    @classmethod
    def zero(cls, k: int) -> "RankSums":
        """The sums over nobody."""
        return cls(k, 0.0, *(0.0 for _ in METRICS))

    def __add__(self, other: "RankSums") -> "RankSums":
        """The sums over the users of both. Raises ValueError for lists of different length."""
        if self.k != other.k:
            raise ValueError(f"cannot add metrics at k={self.k} and at k={other.k}")
        return RankSums(self.k, self.users + other.users, *(getattr(self, m) + getattr(other, m) for m in METRICS))

    def means(self) -> dict[str, float]:
        """Means over users by ``recall@k``, ``precision@k``, ``f1@k``, ``mrr@k``, ``ndcg@k``, ``hit@k``, ``auc``.

        NaN without users: a mean over nobody is not a bad result.
        """
        mean = {m: getattr(self, m) / self.users if self.users else math.nan for m in METRICS}
        total = mean["precision"] + mean["recall"]
        f1 = 2 * mean["precision"] * mean["recall"] / total if total != 0 else 0.0
        ordered = {"recall": mean["recall"], "precision": mean["precision"], "f1": f1} | mean
        return {metric_label(name, self.k): value for name, value in ordered.items()}

    def to_dict(self) -> dict[str, float]:
        """Plain floats by field name, for a message."""
        return {name: float(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> "RankSums":
        """The inverse of :meth:`to_dict`. Raises ValueError if a field is missing; ignores other keys."""
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"rank sums lack {', '.join(missing)}")
        return cls(int(values["k"]), *(float(values[name]) for name in names[1:]))


@dataclass(frozen=True)
class UserRanks:
    """Metrics of every counted user, for paired tests; arrays of equal length in the order of ``users``.

    Attributes:
        k: Length of the ranked list.
        users: int64 row numbers of the users, rising: those with truth items.
        recall: float64, one value a user; likewise the others.
        precision: float64.
        mrr: float64.
        ndcg: float64.
        hit: float64, 0 or 1.
        auc: float64.
    """

    k: int
    users: np.ndarray
    recall: np.ndarray
    precision: np.ndarray
    mrr: np.ndarray
    ndcg: np.ndarray
    hit: np.ndarray
    auc: np.ndarray

    def sums(self) -> RankSums:
        """The sums over all users, each rounded only once, so that they depend on no order or batching."""
        return RankSums(self.k, float(len(self.users)), *(math.fsum(getattr(self, m)) for m in METRICS))

    def of(self, chosen: np.ndarray) -> "UserRanks":
        """Those of the users that a mask, bool in the order of ``users``, chooses."""
        return UserRanks(self.k, self.users[chosen], *(getattr(self, m)[chosen] for m in METRICS))


def rank_sums(
    scores_of: Callable[[Tensor], Tensor],
    seen: UserItems | Sequence[UserItems],
    truth: UserItems,
    k: int = 10,
    *,
    n_items: int,
    batch_bytes: int = 64 << 20,
    tie_seed: int = 0,
) -> RankSums:
    """Rank all items for every user and sum the metrics; arguments and errors of :func:`rank_users`."""
    return rank_users(scores_of, seen, truth, k, n_items=n_items, batch_bytes=batch_bytes, tie_seed=tie_seed).sums()


def rank_users(
    scores_of: Callable[[Tensor], Tensor],
    seen: UserItems | Sequence[UserItems],
    truth: UserItems,
    k: int = 10,
    *,
    n_items: int,
    batch_bytes: int = 64 << 20,
    tie_seed: int = 0,
) -> UserRanks:
    """Rank all items for every user with truth items and measure the list.

    Args:
        scores_of: Maps users (n,) int64, on the CPU, to raw scores (n, I), preferably float64, on any device.
        seen: Items to leave out of the ranking, per user: one split or several (training, and validation when
            testing).
        truth: Items to find.
        k: Length of the list; shorter for a user who has fewer than ``k`` unseen items.
        n_items: Size of the catalogue, ``I``.
        batch_bytes: Bound on the memory of one batch of scores (of one user at least). Does not change the result.
        tie_seed: Seed of the permutation that orders equal scores.

    Returns:
        The metrics of every user who has truth items.

    Raises:
        ValueError: If scores have a wrong shape or are not finite, if the splits have different users, if an
            item lies outside the catalogue, or if a truth item is among the user's seen items (no model
            could find it).
    """
    splits = [seen] if isinstance(seen, UserItems) else list(seen)
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    for split in (*splits, truth):
        if len(split.counts) != len(truth.counts):
            raise ValueError(
                f"seen items of {len(split.counts)} users cannot go with truth items of {len(truth.counts)}"
            )
        if outside := int(((split.items < 0) | (split.items >= n_items)).sum()):
            raise ValueError(f"{outside} items lie outside the catalogue 0..{n_items - 1}")

    counts = truth.counts
    users = np.flatnonzero(counts)
    truth_keys = _keys(truth, n_items)
    seen_keys = np.sort(np.concatenate([_keys(split, n_items) for split in splits] or [truth_keys[:0]]))
    if overlap := int(np.isin(truth_keys, seen_keys).sum()):
        raise ValueError(
            f"{overlap} truth interactions are also among the seen ones, where no ranking can find them: "
            "the splits must be disjoint"
        )

    tie_order = torch.randperm(n_items, generator=torch_generator(tie_seed, "ranking ties"))
    batch = max(1, batch_bytes // (n_items * (8 + 4)))  # float64 from the model, float32 here
    hits = np.zeros((len(users), k), dtype=bool)
    auc = np.zeros(len(users))
    for first in range(0, len(users), batch):
        rows = users[first : first + batch]
        scores = scores_of(torch.from_numpy(rows))
        if scores.shape != (len(rows), n_items):
            raise ValueError(f"expected scores of shape {(len(rows), n_items)}, got {tuple(scores.shape)}")
        scores = scores.to(torch.float32, copy=True)  # a copy, masked below
        if not all_finite(scores):
            bad = int((~scores.isfinite()).sum())
            raise NonFiniteScoresError(
                f"{bad} of {scores.numel()} scores are not finite (as float32): the model has diverged"
            )
        _mask(scores, rows, seen_keys, n_items)
        top = _top_items(scores, k, tie_order)
        found = _contains(truth_keys, rows[:, None] * n_items + top)
        hits[first : first + len(rows), : top.shape[1]] = found
        auc[first : first + len(rows)] = _auc(scores, rows, truth_keys)
    return _measure(k, users, counts[users], hits, auc)


def best_items(scores: Tensor, seen: np.ndarray, k: int, tie_seed: int = 0) -> np.ndarray:
    """The list that the metrics would measure for one user.

    Args:
        scores: Raw scores of all items (I,), preferably float64.
        seen: Numbers of the items to leave out.
        k: Length of the list.
        tie_seed: Seed of the permutation that orders equal scores.

    Returns:
        Numbers of items, best first: ``k``, or fewer where fewer are unseen.

    Raises:
        NonFiniteScoresError: A score is not finite: the model has diverged.
    """
    row = scores.to(torch.float32, copy=True)[None]
    if not all_finite(row):
        raise NonFiniteScoresError("scores are not finite (as float32): the model has diverged")
    row[0, torch.from_numpy(np.asarray(seen, dtype=np.int64))] = -math.inf
    unseen = int((row > -math.inf).sum())
    order = torch.randperm(row.shape[1], generator=torch_generator(tie_seed, "ranking ties"))
    return _top_items(row, k, order)[0, :unseen]


def _keys(split: UserItems, n_items: int) -> np.ndarray:
    """``user * I + item`` of every pair, rising."""
    users, items = split.pairs()
    return np.asarray(users, dtype=np.int64) * n_items + np.asarray(items, dtype=np.int64)


def _contains(sorted_keys: np.ndarray, keys: np.ndarray) -> np.ndarray:
    position = np.searchsorted(sorted_keys, keys)
    return np.append(sorted_keys, -1)[position] == keys


def _mask(scores: Tensor, rows: np.ndarray, seen_keys: np.ndarray, n_items: int) -> None:
    """Set the scores (n, I) of items that the users ``rows`` (n,), rising, have seen to minus infinity."""
    row, item = _places(rows, seen_keys, n_items)
    scores[row.to(scores.device), item.to(scores.device)] = -math.inf


def _places(rows: np.ndarray, keys: np.ndarray, n_items: int) -> tuple[Tensor, Tensor]:
    """Where the pairs ``keys``, rising, of the users ``rows``, rising, lie in their matrix of scores: row, item."""
    low, high = np.searchsorted(keys, [rows[0] * n_items, (rows[-1] + 1) * n_items])
    users, items = np.divmod(keys[low:high], n_items)
    row = np.searchsorted(rows, users)
    wanted = rows[row] == users  # users in between who have no truth items are not in the batch
    return torch.from_numpy(row[wanted]), torch.from_numpy(items[wanted])


def _auc(scores: Tensor, rows: np.ndarray, truth_keys: np.ndarray) -> np.ndarray:
    """AUC (n,) of the users ``rows`` (n,) from their scores (n, I), in which seen items are minus infinity.

    Every row is sorted once and its truth items are looked up in it: how many scores lie below, how many not above.
    What does not belong is subtracted: the truth item always beats the user's seen items, and truth items among each
    other win ``|R|^2 / 2`` in all (of two, one wins or both win half; each wins half against itself). Counts are whole
    numbers, so the result depends on no order or batch.
    """
    n_items = scores.shape[1]
    row, item = (place.to(scores.device) for place in _places(rows, truth_keys, n_items))
    truth = torch.bincount(row, minlength=len(rows))
    column = torch.arange(len(row), device=row.device) - (truth.cumsum(0) - truth)[row]
    own = scores.new_full((len(rows), int(truth.max())), -math.inf)  # padding: equal to the seen items only
    own[row, column] = scores[row, item]
    # On the CPU numpy sorts in a tenth of torch's time.
    ordered = torch.from_numpy(np.sort(scores.numpy())) if scores.device.type == "cpu" else scores.sort().values
    below, up_to = (torch.searchsorted(ordered, own, right=right) for right in (False, True))
    unseen = (scores > -math.inf).sum(1)
    padding = own.shape[1] - truth
    twice_won = (below + up_to).sum(1) - (padding + 2 * truth) * (n_items - unseen)
    won = (twice_won - truth**2).cpu().numpy() / 2
    pairs = (truth * (unseen - truth)).cpu().numpy()
    return np.divide(won, pairs, out=np.full(len(rows), 0.5), where=pairs > 0)


def _top_items(scores: Tensor, k: int, tie_order: Tensor) -> np.ndarray:
    """The best items of every row (n, min(k, I)), best first; masked ones, never in the truth, come last.

    ``topk`` orders equal scores as it likes. Rows where that matters, those with equal values among the first
    ``k + 1``, are sorted again: columns in tie order, then a stable sort.
    """
    n_items = scores.shape[1]
    values, items = torch.topk(scores, min(k + 1, n_items), dim=1)
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -math.inf)).any(1)
    if bool(tied.any()):
        order = tie_order.to(scores.device)
        by_rank = torch.sort(scores[tied][:, order], dim=1, descending=True, stable=True).indices
        items[tied] = order[by_rank[:, : items.shape[1]]]
    return items[:, :k].cpu().numpy()


def _measure(k: int, users: np.ndarray, truth_counts: np.ndarray, hits: np.ndarray, auc: np.ndarray) -> UserRanks:
    """Metrics from the hit pattern (n, k) of the lists, and AUC (n,) as it is."""
    discounts = 1 / np.log2(np.arange(2, k + 2))
    ideal = np.concatenate([[0.0], np.cumsum(discounts)])[np.minimum(truth_counts, k)]
    dcg = np.zeros(len(users))
    for rank in range(k):  # rank by rank: every user's sum has the same order of additions
        dcg += hits[:, rank] * discounts[rank]
    found = hits.sum(1)
    hit = (found > 0).astype(np.float64)
    return UserRanks(
        k=k,
        users=users,
        recall=found / truth_counts,
        precision=found / k,
        mrr=hit / (hits.argmax(1) + 1),
        ndcg=dcg / ideal,
        hit=hit,
        auc=auc,
    )
