"""Random generators derived from (run seed, purpose, round, client), never from global state.

A draw depends only on what it is for, not on which process makes it or in which order: the same seed gives
bit-equal runs in one process, under Ray with any number of actors, and after a resume.
"""

import zlib

import numpy as np
import torch


def _sequence(seed: int, purpose: str, round_: int, client: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), round_, client])


def numpy_generator(seed: int, purpose: str, round_: int = 0, client: int = 0) -> np.random.Generator:
    """A numpy generator for one purpose of one client in one round.

    Args:
        seed: Seed of the run, >= 0.
        purpose: What the draws are for, for example ``"negatives"``; different purposes are independent.
        round_: Round number, 0 for draws made before the first round.
        client: Partition number of the client, 0 for draws of the server.
    """
    return np.random.default_rng(_sequence(seed, purpose, round_, client))


def torch_generator(seed: int, purpose: str, round_: int = 0, client: int = 0) -> torch.Generator:
    """The same as :func:`numpy_generator` for torch (a CPU generator)."""
    state = _sequence(seed, purpose, round_, client).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))
