"""What a target thinks of each candidate before anything is mixed: the scores of all relation kinds, pair by pair.

On a level, a score of a pair is the mean over the level's blocks of the block's score, standardised over the
candidates: what the softmax of eq. 22 sees. On the level of items every item is a group of its own and the catalogue
one block; the same formulas are computed from the tables there, never with an ``I x I`` matrix.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from fedhur_app.config import ScoreSettings, Settings
from fedhur_app.relations.filters import GroupFilters, mean_gram_eigenpairs, table_scale
from fedhur_app.relations.hierarchy import Hierarchy
from fedhur_app.relations.matching import (
    EnergyScores,
    complementarity_scores,
    cosine_scores,
    energy_scores,
    features,
    similarity_scores,
    standardise,
)
from fedhur_app.relations.utility import projection, queries, utility
from fedhur_app.relations.weights import corrected_scores
from fedhur_app.seeding import torch_generator

SCORES = ("energy", "corrected", "cosine", "similarity", "complementarity")
Predict = Callable[[Tensor], Tensor]
_ENERGY_KEPT = 0.95  # of a table, by the directions that complementarity counts


def level_scores(
    filters: GroupFilters,
    hierarchy: Hierarchy,
    index: int,
    targets: Sequence[int],
    settings: Settings,
    seed: int,
    scorer: Predict | None,
) -> dict[str, Tensor]:
    """Scores of all candidates for some targets on one level.

    Args:
        filters: Of all clients, scaled as the run scales them for matching.
        hierarchy: The hierarchy.
        index: Of the level, from 0.
        targets: Positions of the targets among the clients.
        settings: Of the run: form and width of the query, features and strength of the scorer.
        seed: Of the shared projection.
        scorer: Features to one number, as the round before left it; None: there is none, and no ``corrected``.

    Returns:
        Name of the score -> ``(T, K)``, targets in rows.
    """
    level, rows = hierarchy.levels[index], list(targets)
    directions = projection(level, settings.relation.query_width, seed, index + 1)
    total: dict[str, Tensor] = {}
    for block in range(len(level.members)):
        part = slice(block, block + 1)
        grams, public = filters.grams[index][:, part], filters.public[index][part]
        signal = utility(grams[rows], public, settings.relation.query)
        query = queries(signal, directions[part], settings.relation.query_norm == "columns")
        energy = energy_scores(query, grams, level.mask[part].sum(dim=1), filters.means[index].shape[-1])
        found = _energies(energy, scorer, settings.score) | {
            "cosine": cosine_scores(signal @ directions[part], grams, public, directions[part]),
            "similarity": similarity_scores(grams)[:, rows],
            "complementarity": complementarity_scores(grams, _ENERGY_KEPT)[:, rows],
        }
        for name, scores in found.items():
            total[name] = total.get(name, 0) + standardise(scores[0])
    return {name: scores / len(level.members) for name, scores in total.items()}


def item_scores(
    tables: Sequence[Tensor], targets: Sequence[int], settings: Settings, seed: int, scorer: Predict | None
) -> dict[str, Tensor]:
    """The same with every item a group of its own, from the clients' tables ``(I, d)``.

    With ``X = [E_1 ... E_K]`` all pairs take ``6 T K I d^2`` operations for ``T`` targets (similarity, complementarity
    and the energies) and ``4 K I d q (T + 1)`` for the utilities: 0.2 TFLOP for 20 of 100 clients with 1,682 items and
    width 64.
    """
    relation = settings.relation
    tables = [table * table_scale(table, relation.client_scale) for table in tables]
    n_items, width = tables[0].shape
    clients = len(tables)
    stacked = torch.cat(list(tables), dim=1)
    scale = 1.0
    if relation.filter_scale == "spectral":
        scale = 1 / float(mean_gram_eigenpairs(tables, 1)[1][0])

    def common(columns: Tensor) -> Tensor:
        """``S_g`` times columns (I, c)."""
        return stacked @ (stacked.T @ columns) * (scale / clients)

    def blocks(columns: Tensor) -> Tensor:
        """``E_j^T`` times columns (I, c), of every candidate: (K, d, c)."""
        return (stacked.T @ columns).reshape(clients, width, -1)

    generator = torch_generator(seed, "projection of level 0")
    directions = torch.randn(n_items, relation.query_width, generator=generator).to(stacked)
    projected = common(directions)
    residuals = torch.stack([table @ (table.T @ directions) for table in tables]) * scale - projected
    bases = [_basis(table) for table in tables]
    ranks = torch.tensor([basis.shape[1] for basis in bases])
    all_bases = torch.cat([pad(basis, (0, width - basis.shape[1])) for basis in bases], dim=1)
    squared_norms = torch.stack([(table.T @ table).square().sum() for table in tables])
    scales = torch.stack([table.norm() for table in tables]) * (scale / (n_items * width)) ** 0.5
    identity = torch.eye(relation.query_width).to(stacked)
    rho, found = [], {name: stacked.new_zeros(len(targets), clients) for name in SCORES if name != "corrected"}
    for row, target in enumerate(targets):
        own = tables[target]

        def gram(columns: Tensor, own: Tensor = own) -> Tensor:
            """The target's ``H`` times columns (I, c)."""
            return own @ (own.T @ columns) * scale

        sketch = gram(directions)
        if relation.query != "local":
            right, left = gram(projected), common(sketch)
            sketch = sketch - {"right": right, "left": left, "symmetric": (right + left) / 2}[relation.query]
        query = queries(sketch, identity, relation.query_norm == "columns")  # the projection is in the sketch already
        rho.append(blocks(query).norm(dim=1) * scale**0.5)
        found["cosine"][row] = cosine_similarity(sketch.flatten()[None], residuals.flatten(1), eps=1e-30)
        products = blocks(own).square().sum(dim=(1, 2))
        found["similarity"][row] = products / (squared_norms * squared_norms[target]).sqrt().clamp_min(1e-30)
        shared = (bases[target].T @ all_bases).reshape(-1, clients, width).square().sum(dim=(0, 2))
        found["complementarity"][row] = torch.where(ranks > 0, 1 - shared / ranks, 0).clamp(0, 1)
    by_direction = torch.stack(rho)[None]
    energy = EnergyScores(by_direction, by_direction.square().sum(dim=-1), scales[None])
    found |= {name: scores[0] for name, scores in _energies(energy, scorer, settings.score).items()}
    return {name: standardise(scores) for name, scores in found.items()}


def _energies(energy: EnergyScores, scorer: Predict | None, score: ScoreSettings) -> dict[str, Tensor]:
    """Utility energy, and the same with the scorer's correction (eq. 21) where there is a scorer."""
    found = {"energy": energy.total}
    if scorer is not None:
        inputs = features(energy, score.features)
        found["corrected"] = corrected_scores(energy.total, scorer(inputs), score.correction)
    return found


def _basis(table: Tensor) -> Tensor:
    """Leading left singular vectors (I, r) of a table that hold 95 % of its energy, as complementarity counts them."""
    values, right = torch.linalg.eigh(table.T @ table)
    values, right = values.clamp_min(0).flip(0), right.flip(1)
    before = values.cumsum(0) - values
    kept = (before < _ENERGY_KEPT * values.sum() * (1 - 10 * torch.finfo(values.dtype).eps)) & (values > 0)
    return (table @ right[:, kept]) / values[kept].sqrt()
