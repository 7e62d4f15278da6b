"""What a partition answers."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Clients:
    """Who owns whom. Every client owns a user.

    Attributes:
        owner: int64 (n_users,): client number 0..K-1 of each user.
        names: Name of each client by number; () where clients are only numbered.
    """

    owner: np.ndarray
    names: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """Number of clients, K."""
        return int(self.owner.max()) + 1

    def digest(self) -> str:
        """16 hex digits that change when an owner or a name does."""
        content = np.ascontiguousarray(self.owner, "<i8").tobytes() + json.dumps(self.names).encode()
        return hashlib.sha256(content).hexdigest()[:16]
