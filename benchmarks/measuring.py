"""What benchmarks share: the machine and its rates, made-up item tables, times of the fit."""

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from fedhur_app.relations.alignment import PersonalFilter, Solver, align
from fedhur_app.seeding import torch_generator

Result = TypeVar("Result")

# The reference takes seconds a client: this many are measured, and the others extrapolated.
REFERENCE_CLIENTS = 2


def machine() -> str:
    """System, architecture and cores, without a name."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def processor() -> str:
    """What the system calls its processor; empty where it does not say."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and its seconds."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


@dataclass(frozen=True)
class Rates:
    """What one thread of this machine reaches.

    Attributes:
        flops32: Floating-point operations a second of a float32 matrix product, additions and multiplications.
        flops64: The same in float64.
        bytes: Bytes a second that a copy between arrays larger than the caches reads and writes.
    """

    flops32: float
    flops64: float
    bytes: float


def machine_rates(side: int = 1024, mebibytes: int = 256, repeats: int = 5) -> Rates:
    """Rates of this machine, each the best of some repeats: the other ones were disturbed.

    Args:
        side: Of the square matrices.
        mebibytes: Size of the array that is copied.
        repeats: How often each is measured.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch_generator(0, "machine rates")
        flops = []
        for kind in (torch.float32, torch.float64):
            left = torch.randn(side, side, generator=generator, dtype=kind)
            product = torch.empty_like(left)
            flops.append(2 * side**3 / _best(lambda a=left, c=product: torch.mm(a, a, out=c), repeats))  # type: ignore[misc]
        source = torch.zeros(mebibytes * 2**18)
        target = torch.ones_like(source)
        copied = 2 * source.numel() * source.element_size()
        return Rates(flops[0], flops[1], copied / _best(lambda: target.copy_(source), repeats))
    finally:
        torch.set_num_threads(before)


def _best(work: Callable[[], object], repeats: int) -> float:
    return min(timed(work)[1] for _ in range(repeats))


def synthetic_tables(clients: int, items: int, dim: int) -> torch.Tensor:
    """``(K, I, d)`` tables that share a decaying spectrum, each with noise and a rotation of its own."""
    generator = torch_generator(1, "benchmark")
    rank = min(2 * dim, items)
    shared = torch.randn(items, rank, generator=generator) / torch.arange(1, rank + 1).sqrt()
    tables = torch.empty(clients, items, dim)
    for client in range(clients):
        mixing = torch.randn(rank, dim, generator=generator) / rank**0.5
        tables[client] = shared @ mixing + 0.05 * torch.randn(items, dim, generator=generator)
    return tables


def fit_times(
    filters: Iterable[PersonalFilter], tables: Iterable[torch.Tensor], solver: Solver, steps: int, eta: float = 0.5
) -> tuple[list[float], list[float]]:
    """Seconds and relative errors of the fit of each table to its filter.

    Args:
        filters: One a client.
        tables: ``(I, d)``, one a client; as many clients are measured as the shorter of both has.
        solver: Of :func:`fedhur_app.relations.alignment.align`.
        steps: Of the solvers that have steps.
        eta: Of the solver `gd`.
    """
    seconds, errors = [], []
    align(PersonalFilter(torch.eye(2), torch.ones(2)), torch.eye(2), solver, 1)  # what is imported at the first call
    for personal, table in zip(filters, tables, strict=False):
        result, time_ = timed(lambda f=personal, e=table: align(f, e, solver, steps, eta))  # type: ignore[misc]
        seconds.append(time_)
        errors.append(result.objective)
    return seconds, errors
