"""From scores to weights, residuals and personal filters (eq. 21-24)."""

from collections.abc import Iterable

import torch

from fedhur_app.parallel import for_each
from fedhur_app.relations.eigen import top_eigenpairs
from fedhur_app.relations.filters import Tables, blocks_of
from fedhur_app.relations.hierarchy import Level
from fedhur_app.relations.matching import standardise
from fedhur_app.seeding import torch_generator

# Random columns of the Krylov solver, see top_eigenpairs.
_GUARD = 8
# Work memory where something is computed of all clients, some at a time.
_CHUNK_BYTES = 32 * 2**20


def corrected_scores(scores: torch.Tensor, correction: torch.Tensor, strength: float) -> torch.Tensor:
    """``r = s + lambda Std_j(s) Norm_j(f)`` (eq. 21), over candidates, the last dimension.

    Args:
        scores: ``s (B, K, K)``.
        correction: ``f_psi(x) (B, K, K)``.
        strength: ``lambda``; 0 leaves the scores as they are.
    """
    deviation = scores.std(dim=-1, correction=0, keepdim=True)
    return scores + strength * deviation * standardise(correction)


def weights(
    scores: torch.Tensor,
    tau: float,
    standardize: bool = True,
    include_self: bool = True,
    top: int | None = None,
) -> torch.Tensor:
    """``alpha = softmax_j(r / tau)`` (eq. 22).

    Args:
        scores: ``r (..., K, K)``, candidates last.
        tau: Temperature, > 0.
        standardize: First make the scores of each target z-scores, so that ``tau`` has no units; false is the
            literal formula.
        include_self: Whether a client may weigh itself.
        top: Keep only this many candidates of each target (itself among them, if included) and scale their
            weights to sum 1; of equal weights the smaller client number stays.

    Returns:
        ``(..., K, K)``, every row sums to 1.

    Raises:
        ValueError: For ``tau <= 0``, ``top < 1``, or a single client that must not weigh itself.
    """
    clients = scores.shape[-1]
    if not tau > 0:
        raise ValueError(f"The temperature tau must be positive, not {tau}.")
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, not {top}.")
    logits = (standardise(scores) if standardize else scores) / tau
    if not include_self:
        if clients == 1:
            raise ValueError("A single client has no peers: it needs include_self, or the relation 'none'.")
        diagonal = torch.eye(clients, dtype=torch.bool, device=scores.device)
        logits = logits.masked_fill(diagonal, -torch.inf)
    if top is not None and top < clients:
        dropped = logits.argsort(dim=-1, descending=True, stable=True)[..., top:]
        logits = logits.scatter(-1, dropped, -torch.inf)
    return torch.softmax(logits, dim=-1)


def residuals(alpha: torch.Tensor, grams: torch.Tensor, center: bool = False) -> torch.Tensor:
    """``R_k = sum_j alpha_kj (F_j - F_g) = sum_j alpha_kj H_j - mean_j H_j`` (eq. 23).

    With group means ``(K, B, b, d)`` in place of the Grams it is parameter averaging, ``sum_j alpha_kj z_j - mean_j
    z_j``: the option for coarse levels of very large catalogues; it needs tables in common coordinates.

    Args:
        alpha: ``(B, K, K)`` with rows that sum to 1.
        grams: ``H (K, B, b, b)``, in the units of the item tables (no client or filter scale).
        center: Subtract the mean over clients, so that residuals do not shift the next round's ``S_g``.

    Returns:
        ``(K, B, b, b)``.
    """
    mixed = (alpha @ grams.flatten(-2).transpose(0, 1)).transpose(0, 1).reshape(grams.shape)
    return mixed - (mixed if center else grams).mean(dim=0)


def item_norm(blocks: torch.Tensor, level: Level) -> torch.Tensor:
    """``||A R A^T||_F (K,)`` of blocks ``(K, B, b, b)``: an entry counts by its groups' sizes."""
    sizes = blocks_of(level.sizes[:, None].to(blocks.dtype), level)
    # Some clients at a time: the squares of all are as large as all the blocks.
    parts = blocks.split(max(1, _CHUNK_BYTES // (blocks[0].numel() * blocks.element_size())))
    return torch.cat([(part.square() * sizes * sizes.transpose(-1, -2)).sum(dim=(-3, -2, -1)) for part in parts]).sqrt()


def bound_residuals(blocks: torch.Tensor, level: Level, max_ratio: float, global_norm: float) -> torch.Tensor:
    """Residuals scaled down, where needed, to ``||A R_k A^T||_F <= max_ratio ||S_g||_F``.

    Args:
        blocks: ``R (K, B, b, b)``.
        level: Their level.
        max_ratio: The bound.
        global_norm: ``||S_g||_F``, that is ``||w||_2``.
    """
    norms = item_norm(blocks, level)
    limit = max_ratio * global_norm
    factors = torch.where(norms > limit, limit / norms, 1)
    return blocks * factors[..., None, None, None]


def shared_basis_filters(
    vectors: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    alphas: Iterable[torch.Tensor],
    gamma: float,
    labels: torch.Tensor | None = None,
    center: bool = False,
) -> torch.Tensor:
    """All clients' filters with item-level residuals, seen in the basis ``V`` that everybody gets anyway.

    ``M_k = V^T S~_k V`` with ``S~_k = S_g + gamma sum_a 1_a (sum_j alpha_kj^(a) E_j E_j^T - S_g) 1_a`` over the
    groups ``a`` of one level (beyond the paper). The client aligns to ``V M_k V^T``: what travels is one symmetric
    ``r x r`` matrix, and the cost is ``2 K I r d + 2 G K^2 r^2`` operations for all clients together, against
    ``4 m I d^2`` for one multiplication and one client in :func:`personal_eigenpairs`. Beside the result, memory is
    held for two matrices ``r x r`` a client and the weights of one group.

    Args:
        vectors: ``V (I, r)``, eigenvectors of ``S_g``.
        values: ``w (r,)``, their eigenvalues.
        tables: ``K`` tables ``(I, d)`` of the clients that are targets and candidates.
        alphas: Weights ``(K, K)`` of every group in turn, targets in rows.
        gamma: Strength, from 0 (``S_g``) to 1 (the peers' mean inside groups).
        labels: ``(I,)`` group of every item; ``None`` makes the whole catalogue one group.
        center: Subtract the mean over clients from what is added, so that it does not shift the next round's ``S_g``.

    Returns:
        ``(K, r, r)``, symmetric.

    Raises:
        ValueError: If the weights and the groups do not fit.
    """
    n_items, rank = vectors.shape
    groups = torch.zeros(n_items, dtype=torch.long) if labels is None else labels
    n_groups, seen = int(groups.max()) + 1, 0
    clients = len(tables)
    added = vectors.new_zeros(clients, rank * rank)
    for group, alpha in enumerate(alphas):
        seen = group + 1
        if group < n_groups:
            grams = _seen_grams(vectors, tables, (groups == group).nonzero()[:, 0])
            mixed = alpha @ grams
            mean = (mixed if center else grams).mean(dim=0)
            added += mixed.sub_(mean)
    if seen != n_groups:
        raise ValueError(f"There are weights for {seen} groups, but the items have {n_groups} groups.")
    filters = added.mul_(gamma).reshape(clients, rank, rank)
    filters += torch.diag(values)
    return (filters + filters.transpose(-1, -2)) / 2


def _seen_grams(vectors: torch.Tensor, tables: Tables, rows: torch.Tensor) -> torch.Tensor:
    """``V_a^T E_k E_k^T V_a`` on the items ``rows`` of one group, of all clients: ``(K, r^2)``."""
    basis = vectors.index_select(0, rows).T
    rank, count = basis.shape
    grams = vectors.new_empty(len(tables), rank * rank)
    chunk = max(1, _CHUNK_BYTES // max(1, tables[0].shape[1] * max(count, rank) * vectors.element_size()))

    def see(first: int) -> None:
        part = slice(first, first + chunk)
        seen = basis @ torch.stack([table.index_select(0, rows) for table in tables[part]])
        grams[part] = (seen @ seen.transpose(-1, -2)).flatten(1)

    for_each(see, range(0, len(tables), chunk))
    return grams


def personal_eigenpairs(
    vectors: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    alpha: torch.Tensor,
    gamma: float,
    rank: int,
    labels: torch.Tensor | None = None,
    tolerance: float = 1e-3,
    max_steps: int = 20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top eigenpairs of one client's filter with item-level residuals (``residual: item``, beyond the paper).

    ``S~_k = S_g + gamma sum_a 1_a (sum_j alpha_j^(a) E_j E_j^T - S_g) 1_a`` over the groups ``a`` of one
    level, as an
    operator: a multiplication of ``c`` columns costs ``4 m I d c`` operations with ``m`` peers. Never ``I x
        I``.

    Args:
        vectors: ``V (I, r)`` of ``S_g``, also the warm start.
        values: ``w (r,)``.
        tables: ``K`` tables ``(I, d)`` of all clients.
        alpha: ``(G, K)`` the client's weights in every group; candidates of weight 0 cost nothing.
        gamma: Strength, from 0 (``S_g``) to 1 (the peers' mean inside groups).
        rank: Number of pairs.
        labels: ``(I,)`` group of every item; ``None`` makes the whole catalogue one group (``G = 1``).
        tolerance: Of :func:`fedhur_app.relations.eigen.top_eigenpairs`.
        max_steps: Likewise: multiplications at most.

    Returns:
        ``V_k (I, rank)``, ``w_k (rank,)`` descending, never negative; fewer columns if there are fewer items.

    Raises:
        ValueError: If ``alpha`` and the groups do not fit.
    """
    n_items = len(vectors)
    groups = [torch.arange(n_items, device=vectors.device)]
    if labels is not None:
        order = torch.argsort(labels, stable=True)
        groups = list(order.split(torch.bincount(labels, minlength=len(alpha)).tolist()))
    if len(groups) != len(alpha):
        raise ValueError(f"There are weights for {len(alpha)} groups, but the items have {len(groups)} groups.")
    factors = []
    for rows, weight in zip(groups, alpha, strict=True):
        peers = weight.nonzero()[:, 0]
        roots = (gamma * weight[peers]).sqrt()
        scaled = [tables[peer][rows] * root for peer, root in zip(peers.tolist(), roots, strict=True)]
        factors.append(torch.cat(scaled, dim=1))
    mass = values[:, None]

    def matmul(columns: torch.Tensor) -> torch.Tensor:
        product = vectors @ (mass * (vectors.T @ columns))
        for rows, factor in zip(groups, factors, strict=True):
            part, own = columns[rows], vectors[rows]
            product[rows] += factor @ (factor.T @ part) - gamma * (own @ (mass * (own.T @ part)))
        return product

    known = vectors[:, :rank]
    generator = torch_generator(0, "personal eigenpairs")
    noise = torch.randn(n_items, rank - known.shape[1] + _GUARD, generator=generator)
    start = torch.cat([known, noise.to(known)], dim=1)
    pairs = top_eigenpairs(matmul, start, rank, tolerance, max_steps)
    return pairs[0], pairs[1].clamp_min(0)
