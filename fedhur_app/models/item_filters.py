"""Recommenders without training: item-item filters in closed form, and popularity.

A filter ``F`` (I, I) scores the items of user ``u`` by ``r_u F``, with ``r_u`` (I,) the user's 0/1 training row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from fedhur_app.data.shards import UserItems
from fedhur_app.relations.eigen import dense_top_eigenpairs, top_eigenpairs
from fedhur_app.seeding import torch_generator

# Up to here an I x I matrix is held in memory (200 MB); beyond, only its products with a few columns.
DENSE_ITEMS = 5000
# Eigenvalues of a Gram matrix below this share of the largest one are taken for zero: rounding leaves up to 1e-14 of
# exact zeros, and as squares of singular values they stand for 1e-6 of the largest one, about what float32 holds.
_RANK_TOLERANCE = 1e-12
# Squared singular values that differ by less than this share of the largest one are taken for equal.
_TIE_TOLERANCE = 1e-10
# For the Krylov solver (see top_eigenpairs): random guard columns beyond the wanted ones, precision, and the largest
# number of steps. In the flat tail of the spectrum, where it converges slowly, it hardly matters which directions are
# kept.
_GUARD = 16
_KRYLOV_TOLERANCE = 1e-4
_KRYLOV_STEPS = 20
# Columns of the clients' sides that are multiplied at once, or those of one client.
_SIDE_COLUMNS = 256


@dataclass(frozen=True, eq=False)
class FilterFactors:
    """The GFCF filter of one client without an I x I matrix, see :func:`gfcf_factors`.

    ``r`` is the numerical rank of the client's training matrix: at most the smaller of its numbers of users and of
    items with interactions.

    Attributes:
        basis: (I, r) floating, right singular vectors of the normalised training matrix, in columns.
        values: (r,) floating, squared singular values in descending order, in (0, 1].
        degrees: (I,) floating, training interactions of every item at this client.
    """

    basis: Tensor
    values: Tensor
    degrees: Tensor

    def sides(self, svd_number: int, weight: float) -> tuple[Tensor, Tensor]:
        """Two matrices whose product ``left @ right.T`` is the filter ``F_k``.

        ``F_k = V diag(values) V^T + weight D^-1/2 V_s V_s^T D^1/2``, with ``V_s`` the first ``svd_number`` columns of
        the basis ``V`` (all of them if there are fewer). Of columns with equal singular values either all or none are
        in ``V_s``, since one could choose any rotation of them; so ``V_s`` may hold more than ``svd_number``.

        Args:
            svd_number: Singular vectors of the ideal low-pass filter, >= 0.
            weight: Its weight ``w``.

        Returns:
            ``left`` and ``right``, each (I, r + columns of ``V_s``), float64.

        Raises:
            ValueError: For a negative ``svd_number``.
        """
        basis, ideal = self.basis.double(), self.ideal_width(svd_number)
        root = self.degrees.double().sqrt()[:, None]
        low_pass = basis[:, :ideal]
        left = torch.cat([basis * self.values.double(), weight * _inverse_or_zero(root) * low_pass], dim=1)
        return left, torch.cat([basis, root * low_pass], dim=1)

    def ideal_width(self, svd_number: int) -> int:
        """Number of columns of ``V_s``, see :meth:`sides`.

        Raises:
            ValueError: For a negative ``svd_number``.
        """
        if svd_number < 0:
            raise ValueError(f"svd_number must not be negative: {svd_number}")
        kept = min(svd_number, len(self.values))
        if not kept:
            return 0
        values = self.values.double()
        return int((values >= values[kept - 1] - _TIE_TOLERANCE * values[0]).sum())


def gfcf_factors(train: UserItems, n_items: int) -> FilterFactors:
    """The graph filter of one client (GF-CF: Shen et al. 2021; federated: FedCIA, Han et al. 2025), in factors.

    With ``R`` (U, I) the client's 0/1 training matrix and ``D_u``, ``D_i`` its own degrees,
    ``R~ = D_u^-1/2 R D_i^-1/2`` and ``F_k = R~^T R~ + w D_i^-1/2 V V^T D_i^1/2``, where ``V`` holds the top right
    singular vectors of ``R~``: a linear and an ideal low-pass filter on the graph of items. Users and items without
    interactions give zeros. Singular vectors beyond the numerical rank are left out: they would be arbitrary.

    The decomposition is that of the smaller Gram matrix, by users or by items that have interactions: under 1 s for 943
    users, and a time that grows with the third power of the smaller number.

    Args:
        train: Training items of ``U`` users.
        n_items: Size of the catalogue ``I``.

    Returns:
        Factors of rank 0 for a client without interactions.

    Raises:
        ValueError: If an item lies outside the catalogue.
    """
    degrees = item_counts(train, n_items)
    active = np.flatnonzero(degrees.numpy())  # rows of other items stay exactly zero
    rows = _matrix(train, n_items)[:, active]
    by_user = scipy.sparse.diags_array(_inverse_or_zero(torch.as_tensor(train.counts).double().sqrt()).numpy())
    by_item = scipy.sparse.diags_array(degrees.numpy()[active] ** -0.5)
    normalised = (by_user @ rows @ by_item).tocsr()
    wide = normalised.shape[0] < normalised.shape[1]
    gram = normalised @ normalised.T if wide else normalised.T @ normalised
    vectors, values = _positive_eigenpairs(torch.from_numpy(gram.toarray()))
    basis = torch.zeros(n_items, len(values), dtype=torch.float64)
    basis[active] = torch.from_numpy(normalised.T @ vectors.numpy()) / values.sqrt() if wide else vectors
    return FilterFactors(basis, values, degrees)


def mean_filter(
    factors: Sequence[FilterFactors], svd_number: int, weight: float, rank: int | None
) -> tuple[Tensor, Tensor]:
    """The mean ``F = (1/K) sum_k F_k`` of the clients' filters (FedCIA's aggregation), as a product of two matrices.

    Of rank ``q`` it is the best approximation in the Frobenius norm, ``F V V^T`` with ``V`` the top right singular
    vectors of ``F``. They come from the eigenpairs of ``F^T F``: dense up to ``DENSE_ITEMS`` items; beyond, by block
    Krylov with a fixed start from products with the factors, never an I x I matrix, and only nearly the best. A step
    then takes ``8 I R c`` operations, with ``R`` the columns of all clients' sides and ``c <= q + 16``; what is held
    beside the clients' factors is the sides of a few of them and about ``10 I (q + 16)`` numbers of the solver.

    Args:
        factors: One for each of ``K`` clients.
        svd_number: See :meth:`FilterFactors.sides`.
        weight: Weight ``w`` of the ideal low-pass filters.
        rank: Largest number of columns ``q``; ``None`` for as many as hold ``F`` up to rounding in float32.

    Returns:
        ``left`` and ``right``, each (I, q) float32, with ``F ~= left @ right.T``. Rows of items that no client has
        are zero. ``q`` is smaller than ``rank`` if ``F`` is of lower rank, 0 if no client has interactions.

    Raises:
        ValueError: Without clients, for different catalogues, a rank below 1, or where the exact mean over more than
            ``DENSE_ITEMS`` items would need as many columns as there are items.
    """
    if not factors:
        raise ValueError("there is no mean of filters without clients")
    if rank is not None and rank < 1:
        raise ValueError(f"the rank of the mean filter must be at least 1, not {rank}")
    sizes = {len(client.degrees) for client in factors}
    if len(sizes) > 1:
        raise ValueError(f"the clients' filters are over catalogues of different sizes: {sorted(sizes)}")
    n_items, n_clients = sizes.pop(), len(factors)
    columns = sum(len(client.values) + client.ideal_width(svd_number) for client in factors)

    if n_items <= DENSE_ITEMS:
        mean = torch.zeros(n_items, n_items, dtype=torch.float64)
        for client in factors:
            left, right = client.sides(svd_number, weight)
            mean.addmm_(left, right.T, alpha=1 / n_clients)
        right = _positive_eigenpairs(mean.T @ mean, rank)[0]
        left = mean @ right
    elif rank is None or rank >= min(columns, n_items):
        if columns >= n_items:
            raise ValueError(
                f"the exact mean filter of {n_clients} clients over {n_items} items needs a matrix of items by items, "
                f"which is formed for up to {DENSE_ITEMS} items only: give a rank below {n_items}"
            )
        sides = [client.sides(svd_number, weight) for client in factors]
        left = torch.cat([left for left, _ in sides], dim=1) / n_clients
        right = torch.cat([right for _, right in sides], dim=1)
    else:
        noise = torch_generator(0, "mean filter")
        start = torch.randn(n_items, min(rank + _GUARD, n_items), generator=noise, dtype=torch.float64)

        def product(columns: Tensor, transposed: bool = False) -> Tensor:
            total = torch.zeros_like(columns)
            for left, right in _sides(factors, svd_number, weight):
                total.addmm_(*((right, left.T @ columns) if transposed else (left, right.T @ columns)))
            return total / n_clients

        right, values = top_eigenpairs(
            lambda x: product(product(x), transposed=True), start, rank, _KRYLOV_TOLERANCE, _KRYLOV_STEPS
        )
        right = right[:, _is_positive(values)]
        left = product(right)
    # Eigenvectors hold rounding noise where they should hold zeros, and noise would order items that nobody has.
    known = torch.stack([client.degrees > 0 for client in factors]).any(0)
    return left.float(), (right * known[:, None]).float()


def score_rows(train: UserItems, users: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Scores ``r_u F`` of all items for a filter ``F = left @ right.T`` that is never formed.

    Args:
        train: Training items of ``U`` users.
        users: (n,) int64, the users to score.
        left: (I, q) any floating type, on the CPU, from :meth:`FilterFactors.sides` or :func:`mean_filter`.
        right: (I, q) likewise.

    Returns:
        (n, I) float64.
    """
    return sum_item_rows(train, users, left) @ right.double().T


def combined_scores(
    train: UserItems, users: Tensor, mean: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mean_weight: float
) -> Tensor:
    """Scores of FedCIA on GF-CF filters, ``mean_weight * r_u F + r_u F_k``.

    Args:
        train: Training items of ``U`` users.
        users: (n,) int64, the users to score.
        mean: The two sides of the mean filter ``F``, from :func:`mean_filter`.
        own: The two sides of the client's filter ``F_k``, from :meth:`FilterFactors.sides`.
        mean_weight: ``agg_p`` of the published code.

    Returns:
        (n, I) float64.
    """
    return mean_weight * score_rows(train, users, *mean) + score_rows(train, users, *own)


def sum_item_rows(train: UserItems, users: Tensor, table: Tensor) -> Tensor:
    """Sums over each user's training items of the rows of a table, ``r_u T``: the scores of a filter held whole.

    Args:
        train: Training items of ``U`` users.
        users: (n,) int64, the users to sum for; repeats are allowed.
        table: (I, c) any floating type, on the CPU.

    Returns:
        (n, c) float64, zero for users without training items.

    Raises:
        ValueError: If an item lies outside the table.
    """
    rows = _matrix(train, len(table))[users.numpy()]
    return torch.from_numpy(rows @ table.double().numpy())


def ease_weights(train: UserItems, n_items: int, l2: float) -> Tensor:
    """Item-item weights of EASE (Steck 2019).

    The minimiser of ``||X - X B||_F^2 + l2 ||B||_F^2`` under ``diag(B) = 0``, with ``X`` (U, I) the 0/1 training
    matrix: ``P = (X^T X + l2 I)^-1``, ``B_ij = -P_ij / P_jj`` off the diagonal. Scores are ``r_u B``, see
    :func:`sum_item_rows`.

    Args:
        train: Training items of ``U`` users.
        n_items: Size of the catalogue ``I``.
        l2: Ridge coefficient, > 0.

    Returns:
        ``B`` (I, I) float64, not symmetric.

    Raises:
        ValueError: For more than ``DENSE_ITEMS`` items, an ``l2`` that is not positive, or an item outside the
            catalogue.
    """
    if n_items > DENSE_ITEMS:
        raise ValueError(
            f"EASE inverts a matrix of items by items, which is done for up to {DENSE_ITEMS} items only; "
            f"this catalogue has {n_items}"
        )
    if not (math.isfinite(l2) and l2 > 0):
        raise ValueError(f"l2 must be positive, not {l2}")
    rows = _matrix(train, n_items)
    gram = torch.from_numpy((rows.T @ rows).toarray())
    gram.diagonal().add_(l2)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return (inverse / -inverse.diagonal()).fill_diagonal_(0.0)


def item_counts(train: UserItems, n_items: int) -> Tensor:
    """Training interactions of every item, (I,) float64: as scores for all users alike, popularity.

    Raises:
        ValueError: If an item lies outside the catalogue.
    """
    return torch.from_numpy(np.asarray(_matrix(train, n_items).sum(0), dtype=np.float64))


def _matrix(train: UserItems, n_items: int) -> scipy.sparse.csr_array:
    """The 0/1 matrix (U, I) of the training items, float64."""
    if outside := int(((train.items < 0) | (train.items >= n_items)).sum()):
        raise ValueError(f"{outside} items lie outside the catalogue 0..{n_items - 1}")
    shape = (len(train.counts), n_items)
    return scipy.sparse.csr_array((np.ones(len(train)), train.items, train.indptr), shape=shape)


def _inverse_or_zero(values: Tensor) -> Tensor:
    return torch.where(values > 0, 1 / values, 0.0)


def _positive_eigenpairs(gram: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """The ``rank`` largest eigenpairs of a Gram matrix (default: all) that are not zero: (n, r) and (r,)."""
    vectors, values = dense_top_eigenpairs(gram, len(gram) if rank is None else rank)
    kept = _is_positive(values)
    return vectors[:, kept], values[kept]


def _is_positive(values: Tensor) -> Tensor:
    """Which eigenvalues of a Gram matrix, in descending order, are not zero up to rounding."""
    return (values > 0) & (values >= _RANK_TOLERANCE * values[:1])


def _sides(factors: Sequence[FilterFactors], svd_number: int, weight: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The sides of all clients, those of a few side by side.

    Made anew for every product, since those of all clients are four to eight times as large as their factors; some at a
    time, since a product with the few columns of one client spends its time on the result.
    """
    gathered: list[tuple[Tensor, Tensor]] = []
    columns = 0
    for number, client in enumerate(factors, start=1):
        gathered.append(client.sides(svd_number, weight))
        columns += gathered[-1][0].shape[1]
        if columns >= _SIDE_COLUMNS or number == len(factors):
            lefts, rights = zip(*gathered, strict=True)
            yield torch.cat(lefts, dim=1), torch.cat(rights, dim=1)
            gathered, columns = [], 0
