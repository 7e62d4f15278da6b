"""FedHUR on the client: the utility query and the fit of the item table to the personal filter (eq. 10-17, 25).

With `relation.kind: none` it is FedCIA: no query, and the personal filter is the global one.
"""

import torch
from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.protocol import Arrays, Content
from fedhur_app.relations.alignment import PersonalFilter, align
from fedhur_app.relations.eigen import dense_top_eigenpairs
from fedhur_app.relations.filters import local_filters, unpack_blocks
from fedhur_app.relations.hierarchy import Hierarchy
from fedhur_app.relations.utility import projection, queries, utility
from fedhur_app.seeding import torch_generator

_LARGEST_NOISY_GRAM = 5000


class Client(ClientAlgorithm):
    """Queries, then aligns; `P_k` is never touched by what the server sends."""

    def upload(self) -> Arrays:
        """The item table E_k, or a factor of its noisy Gram where `privacy.laplace_scale` asks for noise."""
        items = self.state.arrays["model"]["items"]
        scale = self.settings.privacy.laplace_scale
        return {"table": {"items": self._noisy_factor(items, scale) if scale else items}}

    def utility(self, request: Content) -> Content:
        """Stage 2: `Q_k` of every level from the received hierarchy and public filters (eq. 10-17)."""
        self.require_trained()
        relation = self.settings.relation
        packed = request.record("hierarchy")
        self.state.arrays["hierarchy"] = packed
        hierarchy = _unpack(packed)
        public = [
            unpack_blocks(request.record("filters")[f"level.{number}"], level)
            for number, level in enumerate(hierarchy.levels, start=1)
        ]
        items = self.state.arrays["model"]["items"]
        grams, public = local_filters(items, hierarchy, public, relation.client_scale, relation.filter_scale)
        seed = int(request.fields["projection_seed"])
        answer = {}
        for number, level in enumerate(hierarchy.levels, start=1):
            directions = projection(level, relation.query_width, seed, number)
            signal = utility(grams[number - 1], public[number - 1], relation.query)
            normalise = relation.match == "energy" and relation.query_norm == "columns"
            query = queries(signal, directions, normalise)
            answer[f"level.{number}"] = query[level.mask]
        return Content(arrays={"queries": answer})

    def apply(self, request: Content) -> dict[str, float | int]:
        """Stage 3: fit `E_k E_k^T` to the personal filter (eq. 25); reports the relative error of the fit."""
        settings = self.settings
        # What the utility stage left for this stage is of no use after it.
        packed = self.state.arrays.pop("hierarchy", None)
        if "hierarchy" in request.arrays:
            packed = request.record("hierarchy")
        hierarchy = _unpack(packed).to(self.device) if packed else None
        vectors, values = (request.record("filter")[name].to(self.device) for name in ("V", "w"))
        if "personal" in request.arrays:
            vectors, values = _in_shared_basis(vectors, request.record("personal")["M"].to(self.device))
        personal = PersonalFilter(vectors, values, *self._residuals(request, hierarchy))
        items = self.state.arrays["model"]["items"].to(self.device)
        result = align(
            personal,
            items,
            solver=settings.align.solver,
            steps=settings.align.steps,
            eta=settings.align.step_size,
        )
        items = result.items
        if "shifts" in request.arrays:
            assert hierarchy is not None
            for name, shift in request.record("shifts").items():
                items = items + shift.to(self.device)[hierarchy.levels[_number(name) - 1].labels]
        self.set_model({"items": items})
        return {"fit_error": float(result.objective)}

    def _residuals(
        self, request: Content, hierarchy: Hierarchy | None
    ) -> tuple[Hierarchy | None, list[Tensor], list[float]]:
        """Hierarchy, residual and weight of every level; levels that were not sent weigh nothing."""
        if hierarchy is None or "residuals" not in request.arrays:
            return None, [], []
        sent = request.record("residuals")
        residuals, betas = [], []
        for number, level in enumerate(hierarchy.levels, start=1):
            vector = sent.get(f"level.{number}")
            blocks, width = level.members.shape
            if vector is None:
                residuals.append(torch.zeros(blocks, width, width, device=self.device))
            else:
                residuals.append(unpack_blocks(vector.to(self.device), level))
            betas.append(0.0 if vector is None else self.settings.residual.beta[number - 1])
        return hierarchy, residuals, betas

    def _noisy_factor(self, items: Tensor, scale: float) -> Tensor:
        n_items = len(items)
        if n_items > _LARGEST_NOISY_GRAM:
            raise ValueError(
                f"privacy.laplace_scale forms a dense {n_items} x {n_items} Gram matrix; it is refused above "
                f"{_LARGEST_NOISY_GRAM} items"
            )
        noise = laplace_noise(n_items, scale, torch_generator(self.seed, "gram-noise", self.round, self.shard.client))
        vectors, values = dense_top_eigenpairs(items @ items.T + noise.to(items), self.settings.rank)
        return vectors * values.clamp_min(0).sqrt()


def laplace_noise(size: int, scale: float, generator: torch.Generator) -> Tensor:
    """Symmetric noise (size, size), float64: Laplace(0, scale) on and above the diagonal, mirrored below it."""
    # In float64, and away from the end where the logarithm is infinite: float32 draws hit it once in 2^24.
    uniform = torch.rand(size, size, generator=generator, dtype=torch.float64).clamp_min(2.0**-53) - 0.5
    noise = (-scale * uniform.sign() * torch.log1p(-2 * uniform.abs())).triu()
    return noise + noise.triu(1).T


def _in_shared_basis(vectors: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenpairs of `V M V^T` from V (I, r) and the upper triangle of M (r, r)."""
    rank = vectors.shape[1]
    matrix = torch.zeros(rank, rank, device=vectors.device)
    rows, columns = torch.triu_indices(rank, rank)
    matrix[rows, columns] = packed
    matrix[columns, rows] = packed
    rotation, values = dense_top_eigenpairs(matrix, rank)
    return vectors @ rotation, values.clamp_min(0)


def _unpack(packed: dict[str, Tensor]) -> Hierarchy:
    return Hierarchy.unpack({name: tensor.numpy() for name, tensor in packed.items()})


def _number(name: str) -> int:
    return int(name.removeprefix("level."))
