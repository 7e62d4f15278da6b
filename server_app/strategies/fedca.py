"""FedCA (Zhang et al., 2024, arXiv 2406.03933) on the server: composite aggregation.

Each client i gets a mixture with weights `x_i = argmin ||x||^2 + q.x` over the simplex, `q = -2 (p + w_s s_i + w_c
c_i)`: similarity s of the tables, complementarity c of the data, shares p of the interactions. The minimiser is the
Euclidean projection of `p + w_s s_i + w_c c_i` on the simplex, in closed form.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhur_app.config import FedCaSettings
from fedhur_app.protocol import Content
from server_app.strategies.mixing import MixingStrategy, shared_tables

# Work memory for the cosines of the directions of pairs of clients: so many targets at a time.
_PAIR_BYTES = 64 * 2**20


class Server(MixingStrategy):
    """A mixture for every client."""

    personalised = True

    def mixing(self, round_: int, replies: dict[int, Content]) -> Tensor:
        """The weights x (K, K)."""
        settings = self.settings.fedca
        examples = torch.tensor([float(content.fields["examples"]) for content in replies.values()]).double()
        shares = examples / examples.sum() if bool(examples.any()) else torch.full_like(examples, 1 / len(examples))
        bases = torch.stack([content.record("basis")["B"].double() for content in replies.values()])
        return composite_weights(
            shares,
            table_similarity(shared_tables(replies), settings.similarity),
            data_complementarity(bases, settings.complementarity),
            settings,
        )


def composite_weights(shares: Tensor, similarity: Tensor, complementarity: Tensor, settings: FedCaSettings) -> Tensor:
    """Mixing weights (K, K), rows on the simplex, from shares (K,) and two matrices (K, K).

    `alpha` weighs similarity and `beta` complementarity, as the paper and its README say; the published code does the
    reverse (`swapped`).
    """
    by_similarity, by_complement = settings.alpha, settings.beta
    if settings.swapped:
        by_similarity, by_complement = by_complement, by_similarity
    return simplex_projection(shares + by_similarity * similarity + by_complement * complementarity)


def simplex_projection(points: Tensor) -> Tensor:
    """Euclidean projection of every row (..., n) on the simplex `x >= 0, sum x = 1` (Held, Wolfe & Crowder 1974)."""
    points = points - points.amax(dim=-1, keepdim=True)  # the projection does not change, rounding errors do
    ordered = points.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(dim=-1) - 1
    number = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype)
    support = (ordered * number > excess).sum(dim=-1, keepdim=True)
    return (points - excess.gather(-1, support - 1) / support).clamp_min(0)


def table_similarity(tables: Sequence[Tensor], form: str) -> Tensor:
    """`1 / (1 + distance)` (K, K) between the scores of the items on each table's first principal component.

    Such scores have no sign of their own: `aligned` takes the nearer of the two. The published code (`repo`) takes them
    as the solver gives them, and 1 for values above 0.9. (It also subtracts the scores of an initial table, which
    cancel.)

    Args:
        tables: K tables (I, d).
        form: `aligned` or `repo`.
    """
    scores = []
    for table in tables:
        centred = table.double() - table.double().mean(dim=0)
        _, directions = torch.linalg.eigh(centred.T @ centred)
        scores.append(centred @ directions[:, -1])
    principal = torch.stack(scores)  # (K, I)
    squares = principal.square().sum(dim=1)
    products = principal @ principal.T
    if form == "aligned":
        products = products.abs()
    distance = (squares[:, None] + squares - 2 * products).clamp_min(0).sqrt()
    similarity = 1 / (1 + distance)
    return torch.where(similarity > 0.9, 1.0, similarity) if form == "repo" else similarity


def data_complementarity(bases: Tensor, form: str) -> Tensor:
    """How clients' principal subspaces lie to each other, (K, K) with targets in rows.

    * `outside`: share of j's subspace outside i's, `1 - ||B_i B_j^T||_F^2 / t`, `t` the number of j's directions: what
      j knows that i does not. 0 where j has none.
    * `aligned`: `cos(mean_t angle_t)` of the principal angles: largest for *aligned* subspaces, as in the published
      code; over the directions that both have, 0 where one has none.
    * `repo`: the same with cosines matched greedily, signs and all, in place of the principal angles.

    Args:
        bases: Orthonormal rows (K, t, d); zero rows where a client has fewer directions.
        form: One of the names above.
    """
    count = max(1, _PAIR_BYTES // max(1, 8 * len(bases) * bases.shape[1] ** 2))
    return torch.cat([_complementarity(bases[i : i + count], bases, form) for i in range(0, len(bases), count)])


def _complementarity(targets: Tensor, bases: Tensor, form: str) -> Tensor:
    """The rows (T, K) of some targets (T, t, d)."""
    cosines = torch.einsum("itd,jsd->ijts", targets, bases)
    if form == "outside":
        directions = bases.square().sum(dim=(1, 2))
        return torch.where(directions > 0, 1 - cosines.square().sum(dim=(2, 3)) / directions.clamp_min(1), 0.0)
    if form == "repo":
        return _greedily_matched(cosines).clamp(-1, 1).arccos().mean(dim=-1).cos()
    own, directions = (side.square().sum(dim=2).round().sum(dim=1) for side in (targets, bases))
    number = torch.minimum(own[:, None], directions)[..., None]  # of principal angles of a pair
    existing = torch.arange(bases.shape[1]) < number
    angles = torch.linalg.svdvals(cosines).clamp(-1, 1).arccos()  # smallest first
    mean = (angles * existing).sum(dim=-1) / number[..., 0].clamp_min(1)
    return torch.where(number[..., 0] > 0, mean.cos(), 0.0)


def _greedily_matched(cosines: Tensor) -> Tensor:
    """Largest entry of every matrix (..., t, t), then the largest without its row and column, and so on: (..., t)."""
    left = cosines.clone()
    size = left.shape[-1]
    matched = []
    for _ in range(size):
        value, place = left.flatten(-2).max(dim=-1)
        matched.append(value)
        rows = torch.arange(size) == (place // size)[..., None]
        columns = torch.arange(size) == (place % size)[..., None]
        left = left.masked_fill(rows[..., :, None] | columns[..., None, :], -torch.inf)
    return torch.stack(matched, dim=-1)
