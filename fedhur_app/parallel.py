"""Threads: one for each product of matrices, and several products side by side.

A BLAS that splits one product over all cores waits at every step for the slowest of its threads. On two cores, one of
them busy with other work, that made the server's part of a round take 20 s where one thread takes 2.5 s; and how the
sums are split decides the last bits. Here every product has one thread and independent products are spread: the results
are the same with any number of threads.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TypeVar

import torch
from threadpoolctl import ThreadpoolController

T = TypeVar("T")
R = TypeVar("R")

# Threads that :func:`in_order` may use. New threads start with the default, so nothing is spread twice.
_WORKERS = ContextVar("workers", default=1)


@lru_cache(maxsize=1)
def _libraries() -> ThreadpoolController:
    """The BLAS libraries of this process. Looking for them takes 5 ms, too much for every message."""
    # numpy and scipy bring their own; both must be loaded before the search.
    import numpy  # noqa: F401
    import scipy.linalg  # noqa: F401

    return ThreadpoolController()


def cores(setting: int) -> int:
    """A number of threads: the setting, or one a core where it is 0."""
    return setting or os.cpu_count() or 1


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run a block with one thread in torch and in the BLAS behind numpy and scipy, and `number` in :func:`in_order`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    token = _WORKERS.set(number)
    try:
        with _libraries().limit(limits=1):
            yield
    finally:
        _WORKERS.reset(token)
        torch.set_num_threads(before)


def in_order(function: Callable[[T], R], items: Iterable[T], workers: int | None = None) -> Iterator[R]:
    """``map(function, items)`` with some calls side by side; results and exceptions come in the order of the items.

    Args:
        function: May be called from any thread; must not touch what another call writes.
        items: Taken one by one in the caller's thread, no more than a few ahead of the results.
        workers: Threads; by default what :func:`threads` allows here, 1 without it.
    """
    workers = _WORKERS.get() if workers is None else workers
    if workers <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def for_each(function: Callable[[T], object], items: Iterable[T]) -> None:
    """Call `function` on all items, as :func:`in_order` does, for what it writes."""
    for _ in in_order(function, items):
        pass
