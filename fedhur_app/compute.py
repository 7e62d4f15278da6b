"""Where and with how many threads the mathematics runs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from threadpoolctl import ThreadpoolController

from fedhur_app.config import ConfigError


@lru_cache(maxsize=1)
def _libraries() -> ThreadpoolController:
    """The BLAS libraries of this process. Looking for them takes 5 ms, too much for every message."""
    # numpy and scipy bring their own; both must be loaded before the search.
    import numpy  # noqa: F401
    import scipy.linalg  # noqa: F401

    return ThreadpoolController()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run a block with `number` threads in torch and in the BLAS behind numpy and scipy.

    The number decides how sums are split and so the last bits of the results. Clients always use one thread
    (many share the cores); the server uses the number in its settings.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with _libraries().limit(limits=number):
            yield
    finally:
        torch.set_num_threads(before)


def server_threads(setting: int) -> int:
    """Threads of the server's mathematics: the setting, or one a core where it is 0."""
    return setting or os.cpu_count() or 1


def resolve_device(setting: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means in this process.

    Raises:
        ConfigError: `cuda` was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("setting 'device' is 'cuda', but torch sees no CUDA device here: set device=auto or cpu")
    return torch.device("cuda" if setting != "cpu" and available else "cpu")
