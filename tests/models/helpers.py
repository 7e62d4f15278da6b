from collections.abc import Iterable

import numpy as np
import torch

from fedhur_app.data.shards import UserItems


def user_items(per_user: Iterable[Iterable[int]]) -> UserItems:
    rows = [sorted(items) for items in per_user]
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return UserItems(indptr, np.array([item for row in rows for item in row], dtype=np.int64))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def two_tastes() -> list[list[int]]:
    """Items of 20 users out of 10: even users like 0..4, odd ones 5..9, one of which each has not met yet."""
    return [[i for i in range(5 * (u % 2), 5 * (u % 2) + 5) if i % 5 != u // 2 % 5] for u in range(20)]


def separates_tastes(scores: torch.Tensor) -> bool:
    """Whether scores (20, 10) put all training items of :func:`two_tastes` above all items of the other taste."""
    met, other = torch.zeros(2, 20, 10, dtype=torch.bool)
    for user, row in enumerate(two_tastes()):
        met[user, row] = True
        other[user, 5 - 5 * (user % 2) : 10 - 5 * (user % 2)] = True
    return bool((scores.masked_fill(~met, torch.inf).amin(1) > scores.masked_fill(~other, -torch.inf).amax(1)).all())
