"""Uniform negatives that are exact, without a rejection loop."""

import numpy as np
import torch
from torch import Tensor

from fedhur_app.data.shards import UserItems

# Draws are integers below 2^62 taken modulo the number of free items: biased by less than I / 2^62.
_DRAW_LIMIT = 1 << 62


class NegativeSampler:
    """Draws items uniformly from those that are not *training* positives of a user.

    It knows the training items only: leaving out validation or test positives too would tell the model
    what they are.

    With a user's positives sorted, ``i_0 < i_1 < ...``, there are ``i_t - t`` free items before ``i_t``,
    which never falls with ``t``. The ``r``-th free item is therefore ``r + #{t: i_t - t <= r}``: one
    binary search.

    Args:
        train: Training items of the ``U`` users, sorted within a user, without repeats.
        n_items: Size of the catalogue, ``I``.

    Attributes:
        trainable: (U,) bool, true where a negative exists: the user has not seen every item.
        skipped_users: Number of users for whom none exists.

    Raises:
        ValueError: If an item is not in ``0..I-1`` or a user's items are not strictly rising.
    """

    def __init__(self, train: UserItems, n_items: int) -> None:
        self.n_items = n_items
        users, items = (np.asarray(column, dtype=np.int64) for column in train.pairs())
        if outside := int(((items < 0) | (items >= n_items)).sum()):
            raise ValueError(f"{outside} training items lie outside the catalogue 0..{n_items - 1}")
        if np.any(np.diff(users * n_items + items) <= 0):
            raise ValueError("training items must be sorted and without repeats within each user")
        start = np.asarray(train.indptr, dtype=np.int64)
        free_before = items - (np.arange(len(items)) - start[users])
        # One rising sequence for all users. free_before is at most I - 1 where the user has a free item; a
        # user who has none may reach I, which is the first key of the next user, but is never looked up.
        self._keys = torch.from_numpy(users * (n_items + 1) + free_before)
        self._start = torch.from_numpy(start[:-1].copy())
        self._free = torch.from_numpy(n_items - np.diff(start))
        self.trainable: Tensor = self._free > 0
        self.skipped_users = int((~self.trainable).sum())

    def sample(self, users: Tensor, generator: torch.Generator) -> Tensor:
        """One negative for every entry of ``users``.

        Args:
            users: (n,) int64 on the CPU; a user may occur often and gets independent draws.
            generator: A CPU generator.

        Returns:
            (n,) int64 items.

        Raises:
            ValueError: If one of the users has seen every item; leave them out with :attr:`trainable`.
        """
        if not bool(self.trainable[users].all()):
            raise ValueError("a user who has seen every item has no negative: keep only users of `trainable`")
        rank = torch.randint(_DRAW_LIMIT, users.shape, generator=generator) % self._free[users]
        position = torch.searchsorted(self._keys, users * (self.n_items + 1) + rank, right=True)
        return rank + position - self._start[users]
