"""Fine-tuning of a client's item table towards its personal filter (eq. 24-25).

The filter is ``S~ = V diag(w) V^T + sum_l beta_l A_l R^(l) A_l^T`` with the one-hot assignments ``A_l (I x
m_l)``. It is never formed (the naive ``reference`` solver excepted): everything runs in an orthonormal basis
of ``span([V, leaf indicators])``. Leaf indicators are orthogonal as they are, so the basis is the scaled
indicators and those directions of ``V`` that vary within leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from fedhur_app.relations.eigen import dense_top_eigenpairs, orthonormal, top_eigenpairs
from fedhur_app.relations.filters import blocks_of, group_diagonal, rows_of, sum_rows
from fedhur_app.relations.hierarchy import Hierarchy, Level
from fedhur_app.seeding import torch_generator

Solver = Literal["exact", "gd", "reference"]

# Up to this size of the basis the dense eigen-solver beats the Krylov solver, which is warm-started at V and
# loses less than 1e-7 of ||S~||_F^2 with this tolerance.
_DENSE_BASIS = 1000
_TOLERANCE = 1e-4
# Random columns of the Krylov solver, see top_eigenpairs.
_GUARD = 16
# V counts as orthonormal below this deviation of V^T V from the identity, in units of the machine epsilon.
_ORTHONORMAL = 100
_REFERENCE_ITEMS = 5000


@dataclass(frozen=True)
class PersonalFilter:
    """The personal filter ``S~`` (eq. 24) as an operator.

    Attributes:
        vectors: ``V (I, r)``. Meant are orthonormal eigenvectors of ``S_g``; any other factor of
            ``S_g = V diag(w) V^T`` (rounded for the wire, say) works, only slower.
        values: ``w (r,)``.
        hierarchy: Of the residuals; ``None`` for the filter of FedCIA, which has none.
        residuals: ``R^(l) (B, b, b)`` symmetric, one a level, zero in the padding.
        betas: ``beta_l``, one a level; the levels below the last non-zero one cost nothing.

    Raises:
        ValueError: If shapes or numbers of levels do not fit each other.
    """

    vectors: torch.Tensor
    values: torch.Tensor
    hierarchy: Hierarchy | None = None
    residuals: Sequence[torch.Tensor] = ()
    betas: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.vectors.dim() != 2 or self.values.shape != self.vectors.shape[1:]:
            raise ValueError(
                f"V must be (items, rank) and w (rank,), not {tuple(self.vectors.shape)} and "
                f"{tuple(self.values.shape)}."
            )
        levels = self.hierarchy.levels if self.hierarchy else ()
        if not len(levels) == len(self.residuals) == len(self.betas):
            raise ValueError(
                f"Residuals and betas need one entry for each of the {len(levels)} levels of the hierarchy, "
                f"not {len(self.residuals)} and {len(self.betas)}."
            )
        if self.hierarchy and self.hierarchy.n_items != self.n_items:
            raise ValueError(f"V has {self.n_items} items, but the hierarchy {self.hierarchy.n_items}.")
        for number, (level, residual) in enumerate(zip(levels, self.residuals, strict=True), start=1):
            if residual.shape != (*level.members.shape, level.members.shape[1]):
                raise ValueError(
                    f"The residual of level {number} has shape {tuple(residual.shape)}, but its blocks "
                    f"are {tuple(level.members.shape)}."
                )

    @property
    def n_items(self) -> int:
        """Number of items ``I``."""
        return len(self.vectors)

    @cached_property
    def tree(self) -> list[tuple[Level, torch.Tensor]]:
        """Levels down to the last of non-zero weight, with ``beta_l R^(l)``; empty without a residual."""
        if self.hierarchy is None or not any(self.betas):
            return []
        last = max(index for index, beta in enumerate(self.betas) if beta)
        rows = zip(self.hierarchy.levels, self.residuals, self.betas, strict=True)
        return [(level, beta * residual) for level, residual, beta in rows][: last + 1]

    @cached_property
    def gram(self) -> torch.Tensor:
        """``V^T V (r, r)``."""
        return self.vectors.T @ self.vectors

    def double(self) -> "PersonalFilter":
        """The same filter in float64."""
        residuals = [residual.double() for residual in self.residuals]
        return PersonalFilter(self.vectors.double(), self.values.double(), self.hierarchy, residuals, self.betas)

    def matmul(self, table: torch.Tensor) -> torch.Tensor:
        """``S~ @ table`` for ``table (I, c)``."""
        product = self.vectors @ (self.values[:, None] * (self.vectors.T @ table))
        return product + self._residual_matmul(table) if self.tree else product

    def squared_norm(self) -> float:
        """``||S~||_F^2``, without ever forming the matrix."""
        scaled_gram = self.gram * self.values
        total = (scaled_gram * scaled_gram.T).sum()
        if self.tree:
            total += 2 * (self.values * (self.vectors * self._residual_matmul(self.vectors)).sum(dim=0)).sum()
        # What the levels above add to every entry of a block is one constant: the diagonal of their sum.
        above = self.values.new_zeros(1)
        for level, residual in self.tree:
            sizes = blocks_of(level.sizes[:, None].to(residual.dtype), level)
            weighted = residual * sizes * sizes.transpose(-1, -2)
            total += (weighted * residual).sum() + 2 * (above * weighted.sum(dim=(-2, -1))).sum()
            above = above[level.parent] + group_diagonal(residual, level)
        return float(total)

    def inner_product(self, table: torch.Tensor) -> float:
        """``<S~, E E^T> = tr(E^T S~ E)`` for ``table (I, d)``."""
        total = (self.values[:, None] * (self.vectors.T @ table).square()).sum()
        if self.tree:
            level = self.tree[-1][0]
            sums = sum_rows(table, level.labels, level.n_groups)
            total += (sums * _tree_matmul(self.tree, sums)).sum()
        return float(total)

    def dense(self) -> torch.Tensor:
        """``S~ (I, I)``, for the reference solver and for tests.

        Raises:
            ValueError: For more than 5,000 items.
        """
        if self.n_items > _REFERENCE_ITEMS:
            raise ValueError(
                f"A dense filter of {self.n_items} items is too large: the reference solver is limited to "
                f"{_REFERENCE_ITEMS} items. Use the solver 'exact' or 'gd'."
            )
        return self.matmul(torch.eye(self.n_items, dtype=self.vectors.dtype, device=self.vectors.device))

    def _residual_matmul(self, table: torch.Tensor) -> torch.Tensor:
        level = self.tree[-1][0]
        return _tree_matmul(self.tree, sum_rows(table, level.labels, level.n_groups)).index_select(0, level.labels)


@dataclass(frozen=True)
class AlignmentResult:
    """An aligned item table.

    Attributes:
        items: ``(I, d)``.
        objective: Relative fit error ``||E E^T - S~||_F^2 / ||S~||_F^2`` (not divided for a filter of zeros).
    """

    items: torch.Tensor
    objective: float


def align(
    personal: PersonalFilter,
    items: torch.Tensor,
    solver: Solver = "exact",
    steps: int = 100,
    eta: float = 0.5,
    learning_rate: float = 0.1,
) -> AlignmentResult:
    """Fine-tune an item table, ``min_E ||E E^T - S~||_F^2`` (eq. 25).

    * ``exact``: the minimiser, ``V_d diag(sqrt(w_d)) Q`` from the ``d`` largest positive eigenpairs.
      ``Q`` is the rotation that brings it closest to the present table. In float32 its objective is that of a
      dense float64 eigen-solver to ``1e-6``.
    * ``gd``: ``steps`` steps ``E <- E - k (E E^T - S~) E`` with :func:`gd_step_size`, run in the small basis:
      the same result as the naive loop, to rounding.
    * ``reference``: ``steps`` steps of autograd SGD with ``learning_rate`` on the un-squared norm of the
      dense matrix, which is what the published FedCIA code does. For comparison only.

    Args:
        personal: The filter.
        items: ``(I, d)`` the client's present table; not modified.
        solver: See above.
        steps: Of ``gd`` and ``reference``.
        eta: Of ``gd``, between 0 and 1: above 1 it need not converge.
        learning_rate: Of ``reference``.

    Raises:
        ValueError: For a table of another number of items, an unknown solver, or ``reference`` above 5,000
            items.
    """
    if items.dim() != 2 or len(items) != personal.n_items:
        raise ValueError(f"The item table is {tuple(items.shape)}, but the filter has {personal.n_items} items.")
    if solver == "exact":
        coefficients = _exact_coefficients(personal, items)
        if coefficients is not None:
            return AlignmentResult(personal.vectors @ coefficients, _error_of_coefficients(personal, coefficients))
        aligned = _exact_in_basis(personal, items)
    elif solver == "gd":
        aligned = _gradient_descent(personal, items, steps, eta)
    elif solver == "reference":
        aligned = _reference(personal, items, steps, learning_rate)
    else:
        raise ValueError(f"There is no solver {solver!r}; choose 'exact', 'gd' or 'reference'.")
    return AlignmentResult(aligned, fit_error(personal, aligned))


def fit_error(personal: PersonalFilter, items: torch.Tensor) -> float:
    """``||E E^T - S~||_F^2 / ||S~||_F^2`` of ``items (I, d)``, in float64 because large terms cancel."""
    personal, items = personal.double(), items.double()
    norm = personal.squared_norm()
    error = float((items.T @ items).square().sum()) - 2 * personal.inner_product(items) + norm
    return max(error, 0.0) / (norm or 1.0)


def procrustes(table: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Orthogonal ``Q (d, d)`` that minimises ``||table Q - target||_F``, both ``(I, d)``."""
    return _closest_rotation(table.T @ target)


def _closest_rotation(product: torch.Tensor) -> torch.Tensor:
    left, _, right = torch.linalg.svd(product)
    return left @ right


def gd_step_size(personal: PersonalFilter, items: torch.Tensor, eta: float = 0.5) -> float:
    """Step ``k = eta / lambda_max`` of ``gd``.

    ``lambda_max`` is the larger one of the top eigenvalues of ``S~`` and of ``E^T E``: a table much larger
    than the filter would diverge otherwise. A zero table stays where it is, with step 0.
    """
    return _step_size(_Coordinates(personal), items, eta)


class _Coordinates:
    """An orthonormal basis of ``span([V, leaf indicators])`` and the filter in it.

    Coordinates ``(p, c)`` are, first, ``m`` of the scaled leaf indicators, then those of ``within (I, p -
    m)``.
    """

    def __init__(self, personal: PersonalFilter) -> None:
        self.personal = personal
        vectors = personal.vectors
        self.level = personal.tree[-1][0] if personal.tree else None
        if self.level is None:
            if _orthonormal(personal):
                self.within = vectors
                self.low_rank = None  # V is the basis: the filter is diag(w).
                return
            self.within = orthonormal(vectors)
        else:
            self.root = self.level.sizes.to(vectors.dtype).sqrt()[:, None]
            self.within = vectors.new_zeros(personal.n_items, 0)
            deviations = vectors - self._leaf_rows(self._leaf_coordinates(vectors))
            # A column that is constant within leaves to rounding adds no direction.
            keep = deviations.norm(dim=0) > 10 * torch.finfo(vectors.dtype).eps * vectors.norm(dim=0)
            self.within = orthonormal(deviations[:, keep])
        self.low_rank = self.project(vectors)

    @property
    def size(self) -> int:
        """``p``."""
        return self.within.shape[1] + (self.level.n_groups if self.level else 0)

    def project(self, table: torch.Tensor) -> torch.Tensor:
        """Coordinates ``(p, c)`` of the part of ``table (I, c)`` inside the span."""
        inner = self.within.T @ table
        return inner if self.level is None else torch.cat([self._leaf_coordinates(table), inner])

    def expand(self, coordinates: torch.Tensor) -> torch.Tensor:
        """``(p, c)`` to item rows ``(I, c)``."""
        if self.level is None:
            return self.within @ coordinates
        groups = self.level.n_groups
        return torch.addmm(self._leaf_rows(coordinates[:groups]), self.within, coordinates[groups:])

    def matmul(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Product with the filter, ``(p, c) -> (p, c)``."""
        values = self.personal.values[:, None]
        if self.low_rank is None:
            return values * coordinates
        product = self.low_rank @ (values * (self.low_rank.T @ coordinates))
        if self.level is not None:
            groups = self.level.n_groups
            product[:groups] += self.root * _tree_matmul(self.personal.tree, self.root * coordinates[:groups])
        return product

    def dense(self) -> torch.Tensor:
        """The filter in the basis, ``(p, p)``."""
        return self.matmul(torch.eye(self.size, dtype=self.within.dtype, device=self.within.device))

    def _leaf_coordinates(self, table: torch.Tensor) -> torch.Tensor:
        assert self.level is not None
        return sum_rows(table, self.level.labels, self.level.n_groups) / self.root

    def _leaf_rows(self, coordinates: torch.Tensor) -> torch.Tensor:
        assert self.level is not None
        return (coordinates / self.root).index_select(0, self.level.labels)


def _tree_matmul(tree: Sequence[tuple[Level, torch.Tensor]], sums: torch.Tensor) -> torch.Tensor:
    """Residual part on sums over the finest groups: ``A^T x (m, c)`` to the value of every group's items."""
    products = []
    for level, residual in reversed(tree):
        blocks = blocks_of(sums, level)
        products.append(residual @ blocks)
        # Block a holds the children of group a, so its sum is that of group a.
        sums = blocks.sum(dim=1)
    rows = sums  # Of the root, only to give the loop its shape.
    for (level, _), product in zip(tree, reversed(products), strict=True):
        own = rows_of(product, level)
        rows = own if level is tree[0][0] else own + rows.index_select(0, level.parent)
    return rows


def _exact_coefficients(personal: PersonalFilter, items: torch.Tensor) -> torch.Tensor | None:
    """``C (r, d)`` of the minimiser ``V C`` of a filter without residuals, if its eigenpairs need not be searched for.

    Only two products have the height of the table, ``V^T E`` here and ``V C``: the rest is ``r x r``.
    """
    if personal.tree:
        return None
    values, width = personal.values, items.shape[1]
    if len(values) <= width and bool((values >= 0).all()):
        # The filter already is E E^T of a table of this width, whatever V is.
        kept = torch.arange(len(values), device=values.device)
    elif _orthonormal(personal):
        kept = values.argsort(descending=True, stable=True)[:width]
    else:
        return None
    roots = values[kept].clamp_min(0).sqrt()[:, None]
    product = items.new_zeros(width, width)
    product[: len(kept)] = roots * (personal.vectors.T @ items)[kept]
    coefficients = items.new_zeros(len(values), width)
    coefficients[kept] = roots * _closest_rotation(product)[: len(kept)]
    return coefficients


def _error_of_coefficients(personal: PersonalFilter, coefficients: torch.Tensor) -> float:
    """:func:`fit_error` of ``V C``: ``tr((G D)^2) / tr((G W)^2)`` with ``D = C C^T - W``: nothing large cancels."""
    gram, weights = personal.gram.double(), personal.values.double()
    coefficients = coefficients.double()
    difference = gram @ (coefficients @ coefficients.T - torch.diag(weights))
    scaled = gram * weights
    norm = float((scaled * scaled.T).sum())
    return max(float((difference * difference.T).sum()), 0.0) / (norm or 1.0)


def _orthonormal(personal: PersonalFilter) -> bool:
    gram = personal.gram
    deviation = (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max()
    return bool(deviation <= _ORTHONORMAL * torch.finfo(gram.dtype).eps)


def _exact_in_basis(personal: PersonalFilter, items: torch.Tensor) -> torch.Tensor:
    coordinates = _Coordinates(personal)
    vectors, values = _top_of_basis(coordinates, items.shape[1])
    best = items.new_zeros(items.shape)
    best[:, : len(values)] = coordinates.expand(vectors) * values.clamp_min(0).sqrt()
    return best @ procrustes(best, items)


def _top_of_basis(coordinates: _Coordinates, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = coordinates.size
    if size <= max(_DENSE_BASIS, 2 * (rank + _GUARD)):
        return dense_top_eigenpairs(coordinates.dense(), rank)
    assert coordinates.low_rank is not None
    known = coordinates.low_rank[:, :rank]
    noise = torch.randn(size, rank - known.shape[1] + _GUARD, generator=torch_generator(0, "alignment"))
    return top_eigenpairs(coordinates.matmul, torch.cat([known, noise.to(known)], dim=1), rank, _TOLERANCE)


def _step_size(coordinates: _Coordinates, items: torch.Tensor, eta: float) -> float:
    if coordinates.low_rank is None:
        top = float(coordinates.personal.values.max()) if coordinates.size else 0.0
    else:
        noise = torch.randn(coordinates.size, _GUARD, generator=torch_generator(0, "step size")).to(items)
        top = float(top_eigenpairs(coordinates.matmul, noise, rank=1, tolerance=1e-4)[1].max())
    largest = max(top, float(torch.linalg.eigvalsh(items.T @ items)[-1]))
    return eta / largest if largest > 0 else 0.0


def _gradient_descent(personal: PersonalFilter, items: torch.Tensor, steps: int, eta: float) -> torch.Tensor:
    """All steps on ``(p + d) x d`` matrices: inside the span, and what is outside it through its Gram."""
    coordinates = _Coordinates(personal)
    step = _step_size(coordinates, items, eta)
    inside = coordinates.project(items)
    outside = items - coordinates.expand(inside)
    outside_gram = outside.T @ outside
    identity = torch.eye(items.shape[1], dtype=items.dtype, device=items.device)
    transform = identity
    for _ in range(steps):
        shrink = identity - step * (inside.T @ inside + outside_gram)
        inside = torch.addmm(coordinates.matmul(inside), inside, shrink, beta=step)
        transform = transform @ shrink
        outside_gram = shrink @ outside_gram @ shrink
    return coordinates.expand(inside) + outside @ transform


def _reference(personal: PersonalFilter, items: torch.Tensor, steps: int, learning_rate: float) -> torch.Tensor:
    target = personal.dense()
    table = items.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([table], lr=learning_rate)
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            torch.linalg.matrix_norm(table @ table.T - target).backward()
            optimizer.step()
    return table.detach()
