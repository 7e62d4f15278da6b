"""Slow, obvious versions of the formulas, on items instead of blocks."""

import torch

from fedhur_app.relations.hierarchy import Hierarchy, Level, build_hierarchy


def tables(clients: int, items: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(clients, items, dim, generator=generator, dtype=dtype)


def hierarchy(items: int, branching: tuple[int, ...], seed: int = 0) -> Hierarchy:
    return build_hierarchy(tables(1, items, 3, seed)[0], branching, seed)


def assignment(level: Level, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``A (I, m)``, one-hot."""
    return torch.nn.functional.one_hot(level.labels, level.n_groups).to(dtype)


def scatter(blocks: torch.Tensor, level: Level) -> torch.Tensor:
    """Blocks ``(B, b, b)`` as a matrix over all groups ``(m, m)``."""
    full = blocks.new_zeros(level.n_groups, level.n_groups)
    for block, members in zip(blocks, level.members.tolist(), strict=True):
        for x, row in enumerate(members):
            for y, column in enumerate(members):
                if row >= 0 and column >= 0:
                    full[row, column] = block[x, y]
    return full


def same_parent(level: Level) -> torch.Tensor:
    return level.parent[:, None] == level.parent[None, :]


def valid(level: Level) -> torch.Tensor:
    """``(B, b, b)``, true where both groups exist."""
    return level.mask[:, :, None] & level.mask[:, None, :]


def random_symmetric_blocks(level: Level, seed: int, lead: tuple[int, ...] = ()) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, *level.members.shape, level.members.shape[1])
    blocks = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (blocks + blocks.transpose(-1, -2)) / 2 * valid(level)
