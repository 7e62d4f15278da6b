"""The naive form of what FedCIA and FedHUR compute, beside ours: dense ``I x I`` matrices, client by client.

For the forms whose filters are low-rank: no relation, and item-level residuals in the common basis. The residuals of
groups are compared by `benchmarks.alignment`.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measuring import REFERENCE_CLIENTS, fit_times, timed
from fedhur_app.config import Settings
from fedhur_app.parallel import cores, threads
from fedhur_app.relations.alignment import PersonalFilter
from fedhur_app.relations.eigen import dense_top_eigenpairs
from fedhur_app.relations.filters import mean_gram_eigenpairs, mean_table
from fedhur_app.relations.hierarchy import build_hierarchy
from fedhur_app.relations.weights import shared_basis_filters, weights
from fedhur_app.seeding import torch_generator

_FIT_CLIENTS = 20  # of our solver


@dataclass(frozen=True)
class Comparison:
    """One step of a round, both ways.

    Attributes:
        step: What is computed.
        naive: Seconds for all clients.
        ours: Seconds for all clients.
        note: How they were measured.
    """

    step: str
    naive: float
    ours: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Naive over ours."""
        return self.naive / self.ours


def covered(settings: Settings) -> bool:
    """Whether this file has the naive form of a run with these settings."""
    if settings.algorithm != "fedhur":
        return False
    residual = settings.residual
    return settings.relation.kind == "none" or (residual.kind == "item" and residual.span == "shared")


def dense_mean_gram(tables: Sequence[Tensor]) -> Tensor:
    """``S_g = mean_k E_k E_k^T (I, I)`` of tables ``(I, d)``, one client at a time."""
    total = tables[0].new_zeros(len(tables[0]), len(tables[0]))
    for table in tables:
        total += torch.einsum("id,jd->ij", table, table)
    return total / len(tables)


def dense_filter(mean_gram: Tensor, tables: Sequence[Tensor], peers: Tensor, gamma: float, labels: Tensor) -> Tensor:
    """A client's ``S_g + gamma sum_a 1_a (sum_j c_j^(a) E_j E_j^T) 1_a``, formed from its peers' Grams one by one.

    Args:
        mean_gram: ``S_g (I, I)``.
        tables: ``K`` tables ``(I, d)``.
        peers: ``c (G, K)``, the client's weights less those of the mean that is taken off, see :func:`off_mean`.
        gamma: Strength.
        labels: ``(I,)`` group of every item, below ``G``.
    """
    result = mean_gram.clone()
    for group, own in enumerate(peers):
        rows = (labels == group).nonzero()[:, 0]
        block = result.new_zeros(len(rows), len(rows))
        for weight, table in zip(own, tables, strict=True):
            block += weight * torch.einsum("id,jd->ij", table[rows], table[rows])
        result[rows[:, None], rows] += gamma * block
    return result


def off_mean(alphas: Tensor, center: bool) -> Tensor:
    """Weights ``(G, K, K)`` less those of what is taken off a residual: the mean residual's, or ``S_g``'s."""
    clients = alphas.shape[-1]
    return alphas - (alphas.mean(dim=1, keepdim=True) if center else 1 / clients)


def compare(settings: Settings, tables: Sequence[Tensor]) -> list[Comparison]:
    """Both ways on the item tables ``(I, d)`` that a run's clients sent.

    Times do not depend on who is whose peer, so the weights are random ones.

    Raises:
        ValueError: For settings that are not :func:`covered`.
    """
    if not covered(settings):
        raise ValueError("the naive form is written for relation.kind none and for residual.kind item, span shared")
    clients = len(tables)
    with threads(cores(settings.server.threads)):
        dense, naive_gram = timed(lambda: dense_mean_gram(tables))
        _, naive_pairs = timed(lambda: torch.linalg.eigh(dense))
        (vectors, values), ours = timed(lambda: mean_gram_eigenpairs(tables, settings.rank, seed=settings.seed))
        rows = [Comparison("S_g and its eigenpairs", naive_gram + naive_pairs, ours, _parts(naive_gram, naive_pairs))]
        seen = torch.diag(values).expand(min(clients, _FIT_CLIENTS), -1, -1)
        if settings.relation.kind != "none":
            seen, row = _filters(settings, tables, dense, vectors, values)
            rows.append(row)
    with threads(1):
        rows.append(_fit(settings, tables, vectors, seen))
    return rows


def _parts(gram: float, pairs: float) -> str:
    return f"naive: {gram:.2f} s for S_g, {pairs:.2f} s for all its eigenpairs"


def _filters(
    settings: Settings, tables: Sequence[Tensor], dense: Tensor, vectors: Tensor, values: Tensor
) -> tuple[Tensor, Comparison]:
    """All clients' filters: ours, and naively those of a few clients."""
    residual, clients = settings.residual, len(tables)
    labels = torch.zeros(len(dense), dtype=torch.long)
    if residual.item_level:
        hierarchy = build_hierarchy(mean_table(tables), settings.hierarchy.branching, settings.seed)
        labels = hierarchy.levels[residual.item_level - 1].labels
    groups = int(labels.max()) + 1
    scores = torch.randn(groups, clients, clients, generator=torch_generator(settings.seed, "benchmark"))
    own = settings.relation.include_self or clients == 1
    alphas = weights(scores, 1.0, True, own, residual.peers)
    seen, ours = timed(
        lambda: shared_basis_filters(vectors, values, tables, iter(alphas), residual.gamma, labels, residual.center)
    )
    count = min(clients, REFERENCE_CLIENTS)
    peers = off_mean(alphas, residual.center)
    naive = [
        timed(lambda k=client: dense_filter(dense, tables, peers[:, k], residual.gamma, labels))[1]  # type: ignore[misc]
        for client in range(count)
    ]
    return seen, Comparison("personal filters", statistics.mean(naive) * clients, ours, _extrapolated(count, clients))


def _fit(settings: Settings, tables: Sequence[Tensor], vectors: Tensor, seen: Tensor) -> Comparison:
    """The fit of the clients' tables to filters seen in the common basis, ``(n, r, r)``."""
    align, clients = settings.align, len(tables)
    filters, turned = [], []
    for matrix in seen[:_FIT_CLIENTS]:
        (rotation, values), seconds = timed(lambda m=matrix: dense_top_eigenpairs(m, len(m)))  # type: ignore[misc]
        filters.append(PersonalFilter(vectors @ rotation, values.clamp_min(0)))
        turned.append(seconds)
    ours, _ = fit_times(filters, tables, align.solver, align.steps, align.step_size)
    naive, _ = fit_times(filters[:REFERENCE_CLIENTS], tables, "reference", align.steps)
    own = statistics.mean(map(sum, zip(ours, turned, strict=True))) * clients
    note = f"naive: {align.steps} steps of autograd on the dense matrix, {_extrapolated(len(naive), clients)}"
    return Comparison("fit", statistics.mean(naive) * clients, own, note)


def _extrapolated(measured: int, clients: int) -> str:
    return f"{measured} of {clients} clients measured naively, the others extrapolated"
