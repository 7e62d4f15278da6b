"""Top eigenpairs of symmetric matrices and operators: dense for small ones, block Krylov for large ones."""

from collections.abc import Callable

import scipy.linalg
import torch

from fedhur_app.finite import all_finite


def dense_top_eigenpairs(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``rank`` algebraically largest eigenpairs of a symmetric matrix.

    LAPACK's ``evr`` on a subset: 0.2 s for 128 of 1,500, where ``torch.linalg.eigh`` takes three times as
    long.

    Args:
        matrix: ``(n, n)`` symmetric; only the lower triangle is read.
        rank: Number of pairs; more than ``n`` gives ``n``.

    Returns:
        ``vectors (n, r)`` with the sign of :func:`fix_signs`, ``values (r,)`` in descending order.
    """
    if not all_finite(matrix):
        raise ValueError(
            "a Gram matrix is not finite: the item tables have grown too large for their precision, training diverges "
            "(lower train.lr)"
        )
    n = len(matrix)
    rank = min(rank, n)
    if rank == 0:
        return matrix.new_zeros(n, 0), matrix.new_zeros(0)
    values, vectors = scipy.linalg.eigh(
        matrix.detach().cpu().numpy(), lower=True, subset_by_index=[n - rank, n - 1], check_finite=False
    )
    pairs = torch.from_numpy(vectors).flip(1), torch.from_numpy(values).flip(0)
    return fix_signs(pairs[0].to(matrix.device)), pairs[1].to(matrix.device)


def top_eigenpairs(
    matmul: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    rank: int,
    tolerance: float = 1e-5,
    max_steps: int = 60,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``rank`` algebraically largest eigenpairs of a symmetric operator, by block Krylov with restarts.

    A step is one multiplication: Rayleigh-Ritz in the basis, then the residuals of the Ritz vectors join the
    basis, which restarts from the Ritz vectors when it holds four blocks. It stops when the residuals of the
    wanted pairs satisfy ``||A X - X diag(w)||_F <= tolerance * ||w||_2`` and no unwanted Ritz pair can still
    exceed the last wanted one by more than that; then the squares of the eigenvalues are right to about
    ``tolerance ** 2 / relative gap``.

    Args:
        matmul: ``(n, c) -> (n, c)``, the product with the operator; the operator itself is never formed.
        start: ``(n, p)`` with ``p > rank``: a guess of the eigenvectors and, as a guard against missing one,
            some random columns. It need not be orthonormal.
        rank: Number of pairs, smaller than ``p``.
        tolerance: See above; below about 3e-6 it cannot be reached in float32.
        max_steps: The best pairs so far are returned after this many multiplications.

    Returns:
        ``vectors (n, r)``, ``values (r,)`` in descending order; ``r < rank`` if ``n`` is smaller.
    """
    basis = orthonormal(start)
    block = basis.shape[1]
    rank = min(rank, block)
    image = matmul(basis)
    for step in range(1, max_steps + 1):
        small = basis.T @ image
        values, rotation = torch.linalg.eigh((small + small.T) / 2)
        values, rotation = values[-block:].flip(0), rotation[:, -block:].flip(1)
        ritz, ritz_image = basis @ rotation, image @ rotation
        residual = ritz_image - ritz * values
        norms = residual.norm(dim=0)
        scale = values[:rank].norm().clamp_min(torch.finfo(values.dtype).tiny)
        # Random guard columns need a few multiplications before their Ritz values say anything.
        if step >= 3 and norms[:rank].norm() <= tolerance * scale:
            reach = (values[rank:] + norms[rank:]).max() if block > rank else values[rank - 1]
            if reach <= values[rank - 1] + tolerance * scale:
                break
        if step == max_steps:
            break
        active = norms > 0.1 * tolerance * scale / rank**0.5
        if basis.shape[1] + int(active.sum()) > 4 * block:
            basis, image = ritz, ritz_image
        fresh = orthonormal(residual[:, active], basis)
        if fresh.shape[1] == 0:
            break
        basis = torch.cat([basis, fresh], dim=1)
        image = torch.cat([image, matmul(fresh)], dim=1)
    return fix_signs(ritz[:, :rank]), values[:rank]


def orthonormal(columns: torch.Tensor, against: torch.Tensor | None = None) -> torch.Tensor:
    """Orthonormal basis of the span of ``columns (n, c)``, orthogonal to the orthonormal ``against (n, b)``.

    Directions that ``against`` or the other columns already hold to rounding are dropped. Only products and
    one small ``eigh`` a pass, which is several times as fast as a QR of a tall matrix.
    """
    epsilon = torch.finfo(columns.dtype).eps
    norms = columns.norm(dim=0)
    columns = columns[:, norms > 0] / norms[norms > 0]
    identity = torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device)
    clean = 50 * epsilon
    # The first pass loses accuracy where columns are nearly dependent, the second one restores it.
    for cutoff in (columns.shape[0] ** 0.5 * epsilon, 0.1, 0.1):
        overlap = 0.0
        if against is not None:
            inner = against.T @ columns
            columns = columns - against @ inner
            overlap = float(inner.abs().max()) if inner.numel() else 0.0
        gram = columns.T @ columns
        count = len(gram)
        if count == 0 or (overlap <= clean and (gram - identity[:count, :count]).abs().max() <= clean):
            break
        values, rotation = torch.linalg.eigh(gram)
        keep = values > cutoff
        columns = columns @ (rotation[:, keep] / values[keep].sqrt())
    return columns


def fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """Columns whose entry of largest magnitude (the first one of equals) is positive."""
    if vectors.numel() == 0:
        return vectors
    rows = vectors.abs().argmax(dim=0, keepdim=True)
    return vectors * torch.where(vectors.gather(0, rows) < 0, -1.0, 1.0).to(vectors.dtype)
