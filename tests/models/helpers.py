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
