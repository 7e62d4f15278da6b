"""How well does candidate ``j`` answer target ``k``'s query: scores and the scorer's features (eq. 18-19).

Scores are ``(B, K, K)``: block, target ``k``, candidate ``j``. ``B`` may be some blocks of a level, and for energies
the targets some of the clients: with thousands of clients only a part fits into memory.
"""

from dataclasses import dataclass
from typing import Literal

import torch

FeatureSet = Literal["all", "total", "no-total", "no-scale", "no-direction", "direction"]

# Parts of each feature set: energies along the directions, scale of the candidate, total energy.
_PARTS: dict[str, tuple[str, ...]] = {
    "all": ("direction", "scale", "total"),
    "total": ("total",),
    "no-total": ("direction", "scale"),
    "no-scale": ("direction", "total"),
    "no-direction": ("scale", "total"),
    "direction": ("direction",),
}


@dataclass(frozen=True)
class EnergyScores:
    """Energies of candidates along the targets' queries.

    Attributes:
        rho: ``(B, T, K, q)``, ``||q_kt^T Z_j||_2`` for each direction ``t``.
        total: ``s (B, T, K)``, ``||Q_k^T Z_j||_F^2 = sum_t rho_kjt^2``.
        nu: ``(B, K)``, ``||Z_j||_F / sqrt(m d)``, the scale of the candidate.
    """

    rho: torch.Tensor
    total: torch.Tensor
    nu: torch.Tensor


def energy_scores(
    query: torch.Tensor, grams: torch.Tensor, sizes: torch.Tensor, width: int, max_bytes: int = 128 * 2**20
) -> EnergyScores:
    """Energy of every candidate along the targets' queries (eq. 18).

    ``rho_kjt^2 = q_kt^T H_j q_kt = <q q^T, H_j>``: one matrix product a block, on upper triangles.

    Args:
        query: ``Q (T, B, b, q)`` of the targets.
        grams: ``H (K, B, b, b)`` of the candidates.
        sizes: ``(B,)`` number of groups in every block.
        width: ``d``, columns of the item tables.
        max_bytes: Bound of the work memory for the products ``q q^T``, at least one target's.
    """
    targets, n_blocks, size, directions = query.shape
    rows, columns = torch.triu_indices(size, size, device=query.device)
    twice = torch.where(rows == columns, 1, 2).to(grams.dtype)
    per_target = directions * len(rows) * query.element_size()
    chunk = max(1, max_bytes // max(1, per_target))
    rho = query.new_empty(n_blocks, targets, len(grams), directions)
    for block in range(n_blocks):
        candidates = (grams[:, block, rows, columns] * twice).T
        by_direction = query[:, block].transpose(-1, -2)
        for first in range(0, targets, chunk):
            part = by_direction[first : first + chunk]
            energy = (part[..., rows] * part[..., columns]) @ candidates
            rho[block, first : first + chunk] = energy.transpose(-1, -2)
    rho.clamp_min_(0)
    total = rho.sum(dim=-1)
    trace = grams.diagonal(dim1=-2, dim2=-1).sum(dim=-1).T.clamp_min(0)
    return EnergyScores(rho.sqrt_(), total, (trace / (sizes[:, None] * width)).sqrt())


def features(scores: EnergyScores, which: FeatureSet = "all") -> torch.Tensor:
    """Features ``x_kj = Norm_j[rho_1..rho_q, nu, sqrt(s)]`` (eq. 19), or some of them.

    Args:
        scores: Of some blocks and targets.
        which: ``all``, only the ``total`` energy or only ``direction``, or all without one kind.

    Returns:
        ``(B, T, K, f)``, standardised over candidates.

    Raises:
        ValueError: For an unknown feature set.
    """
    parts = _parts(which)
    kinds = {
        "direction": scores.rho,
        "scale": scores.nu[:, None, :, None].expand(*scores.total.shape, 1),
        "total": scores.total.sqrt()[..., None],
    }
    return torch.cat([standardise(kinds[part], dim=2) for part in parts], dim=-1)


def feature_width(which: FeatureSet, directions: int) -> int:
    """Number of features ``f`` of a feature set for ``q`` directions.

    Raises:
        ValueError: For an unknown feature set.
    """
    return sum(directions if part == "direction" else 1 for part in _parts(which))


def standardise(values: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``Norm``: z-scores along ``dim``; zeros where the values are constant to rounding."""
    centred = values - values.mean(dim=dim, keepdim=True)
    deviation = centred.square().mean(dim=dim, keepdim=True).sqrt()
    noise = 10 * torch.finfo(values.dtype).eps * values.abs().amax(dim=dim, keepdim=True)
    return torch.where(deviation > noise, centred / deviation, 0)


def cosine_scores(
    sketches: torch.Tensor, grams: torch.Tensor, public: torch.Tensor, projections: torch.Tensor
) -> torch.Tensor:
    """Cosine of the target's sketch ``U_k P`` and the candidate's ``(H_j - F_g) P`` (``match: cosine``).

    Args:
        sketches: ``(K, B, b, q)``, columns not normalised.
        grams: ``H (K, B, b, b)``, scaled as the clients scaled theirs.
        public: ``F_g (B, b, b)``, likewise.
        projections: ``P (B, b, q)``.

    Returns:
        ``(B, K, K)`` in [-1, 1]; 0 where one side is zero.
    """
    return _unit_rows(sketches) @ _unit_rows((grams - public) @ projections).transpose(-1, -2)


def similarity_scores(grams: torch.Tensor) -> torch.Tensor:
    """``cos(vec H_k, vec H_j)`` of ``H (K, B, b, b)``: ``(B, K, K)``, blind to rotations of the tables."""
    rows = _unit_rows(grams)
    return rows @ rows.transpose(-1, -2)


def complementarity_scores(grams: torch.Tensor, energy: float = 0.95) -> torch.Tensor:
    """Share of the candidate's directions that the target lacks, ``||(I - B_k B_k^T) B_j||_F^2 / rank(B_j)``.

    ``B`` are the leading left singular vectors of ``Z``, that is eigenvectors of ``H``, that hold ``energy``
    of ``||Z||_F^2``.

    Args:
        grams: ``H (K, B, b, b)``.
        energy: Share of the energy that the basis keeps.

    Returns:
        ``(B, K, K)`` in [0, 1]; 0 for a candidate without any direction.
    """
    values, vectors = torch.linalg.eigh(grams)
    values, vectors = values.clamp_min(0).flip(-1), vectors.flip(-1)
    total = values.sum(dim=-1, keepdim=True)
    # A direction counts if those before it fall short of the wanted energy.
    before = values.cumsum(dim=-1) - values
    kept = (before < energy * total * (1 - 10 * torch.finfo(values.dtype).eps)) & (values > 0)
    projectors = (vectors * kept[..., None, :]) @ vectors.transpose(-1, -2)
    flat = projectors.flatten(-2).transpose(0, 1)
    ranks = kept.sum(dim=-1).T[:, None, :]
    return torch.where(ranks > 0, 1 - flat @ flat.transpose(-1, -2) / ranks, 0).clamp(0, 1)


def both_scores(grams: torch.Tensor) -> torch.Tensor:
    """Similarity plus complementarity, each standardised over candidates: ``(B, K, K)``."""
    return standardise(similarity_scores(grams)) + standardise(complementarity_scores(grams))


def concentration(scores: torch.Tensor, top: int = 10) -> float:
    """How often the most wanted client stands among the others' ``top`` peers, from 0 to 1.

    Args:
        scores: ``(K, K)`` scores or weights, targets in rows; the client itself never counts. Of equal scores
            the smaller client number is preferred.
        top: Peers counted for each target; with ``top >= K - 1`` every client is wanted by all.
    """
    clients = len(scores)
    if clients < 2:
        return 0.0
    masked = scores.double().clone().fill_diagonal_(-torch.inf)
    best = masked.argsort(dim=1, descending=True, stable=True)[:, : min(top, clients - 1)]
    return float(torch.bincount(best.flatten(), minlength=clients).max()) / (clients - 1)


def _parts(which: str) -> tuple[str, ...]:
    if which not in _PARTS:
        raise ValueError(f"There is no feature set {which!r}; choose one of {', '.join(_PARTS)}.")
    return _PARTS[which]


def _unit_rows(values: torch.Tensor) -> torch.Tensor:
    """``(K, B, b, c)`` to ``(B, K, b c)`` with rows of unit length; a zero row stays zero."""
    rows = values.flatten(-2).transpose(0, 1)
    norms = rows.norm(dim=-1, keepdim=True)
    return torch.where(norms > torch.finfo(norms.dtype).tiny, rows / norms, 0)
