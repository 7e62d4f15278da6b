"""FedHUR on the server: global statistics, hierarchy, matching, personal filters (eq. 2-9, 18-24).

With `relation.kind: none` it is FedCIA: everybody gets the top eigenpairs of the mean Gram.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhur_app.config import Settings
from fedhur_app.protocol import Arrays, Content, Stage
from fedhur_app.relations.filters import (
    GroupFilters,
    block_gram,
    blocks_of,
    group_filters,
    group_means,
    mean_gram_eigenpairs,
    pack_blocks,
)
from fedhur_app.relations.hierarchy import Hierarchy, build_hierarchy
from fedhur_app.relations.matching import (
    EnergyScores,
    both_scores,
    complementarity_scores,
    concentration,
    cosine_scores,
    energy_scores,
    features,
    similarity_scores,
    standardise,
)
from fedhur_app.relations.scorer import Scorer
from fedhur_app.relations.utility import projection
from fedhur_app.relations.weights import (
    bound_residuals,
    corrected_scores,
    item_norm,
    mean_shifts,
    personal_eigenpairs,
    residuals,
    shared_basis_filters,
    weights,
)
from fedhur_app.seeding import numpy_generator, torch_generator
from server_app.checkpoint import RunFolder
from server_app.stages import DivergedRunError, say
from server_app.strategies.base import Fleet, StagedStrategy


class Server(StagedStrategy):
    """One round: collect tables, build the hierarchy, match queries, return personal filters."""

    def __init__(self, settings: Settings, fleet: Fleet, folder: RunFolder | None = None) -> None:
        super().__init__(settings, fleet, folder)
        self.relation = settings.relation
        if self.relation.kind == "utility":
            self.stages = (Stage.ITEMS, Stage.UTILITY, Stage.PERSONALIZE)
        if settings.residual.coarse_parameter_levels and settings.residual.kind == "group":
            say("levels %s average group means instead of filters", settings.residual.coarse_parameter_levels)
        self.scorer: Scorer | None = None
        self.basis: Tensor | None = None
        self.hierarchy: Hierarchy | None = None
        # Of the present round only: who uploaded, what, and what was made of it.
        self.uploaded: list[int] = []
        self.tables = torch.empty(0)
        self.spectrum: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.statistics: dict[str, Any] = {}
        self.filters = GroupFilters([], [], [])
        self.queries: dict[int, dict[str, Tensor]] = {}
        self.projection_seed = 0

    # --- stage 1 ------------------------------------------------------------------------------------------------

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any]:
        """Mean Gram (eq. 2), hierarchy and public group filters (eq. 3-9)."""
        settings = self.settings
        self.uploaded = list(replies)
        self.tables = torch.stack([content.record("table")["items"] for content in replies.values()])
        self._check_size(round_)
        vectors, values = mean_gram_eigenpairs(
            self.tables, settings.rank, previous_basis=self.basis, seed=settings.seed
        )
        self.spectrum = (vectors, values)
        self.basis = vectors
        statistics: dict[str, Any] = {
            "global_filter": {
                "norm": float(values.norm()),
                "effective_rank": float(values.sum() ** 2 / values.square().sum().clamp_min(1e-30)),
            }
        }
        if self.relation.kind != "none":
            if self.hierarchy is None or (round_ - 1) % settings.hierarchy.refresh_every == 0:
                branching = (
                    [settings.hierarchy.flat_groups] if settings.hierarchy.flat else settings.hierarchy.branching
                )
                self.hierarchy = build_hierarchy(self.tables.mean(dim=0), branching, settings.seed)
            statistics["groups"] = [level.n_groups for level in self.hierarchy.levels]
        return statistics

    def _check_size(self, round_: int) -> None:
        """Finite tables whose Gram is not: name the client before it spoils the mean."""
        for client, table in zip(self.uploaded, self.tables, strict=True):
            if not bool(torch.isfinite(table.norm() ** 2)):
                raise DivergedRunError(
                    f"client {client}, round {round_}: its item table has grown too large (largest entry "
                    f"{float(table.abs().max()):.3g}), training diverges. Lower train.lr; the last checkpoint is kept"
                )

    # --- stage 2 ------------------------------------------------------------------------------------------------

    def configure_utility(self, round_: int, clients: list[int]) -> Content:
        """Hierarchy, public filters and the seed of the shared projection, for everybody."""
        self.filters = self._filters()
        generator = numpy_generator(self.settings.seed, "projection", round_)
        self.projection_seed = int(generator.integers(2**31))
        packed = {
            f"level.{number}": pack_blocks(public, level)
            for number, (level, public) in enumerate(zip(self._tree().levels, self.filters.public, strict=True), 1)
        }
        return Content(
            {"projection_seed": self.projection_seed},
            {"hierarchy": self._packed_hierarchy(), "filters": packed},
        )

    def aggregate_utility(self, round_: int, replies: dict[int, Content]) -> None:
        """Keep the queries; only clients that sent one are targets and candidates."""
        self.queries = {client: content.record("queries") for client, content in replies.items()}
        if len(replies) < len(self.uploaded):
            kept = [self.uploaded.index(client) for client in replies]
            self.tables = self.tables[kept]
            self.filters = self.filters.of_clients(kept)
            self.uploaded = list(replies)

    # --- stage 3 ------------------------------------------------------------------------------------------------

    def configure_personalize(self, round_: int, clients: list[int]) -> Content | dict[int, Content]:
        """The global filter, and what makes it personal."""
        vectors, values = self.spectrum
        self.statistics = {}
        if self.relation.kind == "none":
            return Content(arrays={"filter": {"V": vectors, "w": values}})
        alphas = self._relations(round_)
        item = self.settings.residual.kind == "item"
        personal = self._item_filters(alphas) if item else self._group_residuals(alphas)
        common = {"filter": {"V": vectors, "w": values}}
        return {client: Content(arrays=common | personal[client]) for client in clients}

    def aggregate_personalize(self, round_: int, replies: dict[int, Content]) -> dict[str, Any]:
        """Mean error of the fit over the clients, and the round's relation statistics."""
        errors = [float(content.fields["fit_error"]) for content in replies.values()]
        self.tables = torch.empty(0)
        self.queries = {}
        self.filters = GroupFilters([], [], [])
        return {"fit_error": float(np.mean(errors)), **self.statistics}

    # --- relations ----------------------------------------------------------------------------------------------

    def _relations(self, round_: int) -> list[Tensor]:
        """Weights alpha (B, K, K) of every level (eq. 18-22)."""
        score = self.settings.score
        include_self = self.relation.include_self or len(self.uploaded) == 1
        all_scores = self._scores(round_)
        # Over all candidates first: who is wanted most cannot be seen once the weights of all but a few are zero.
        full = [weights(scores, score.tau, score.standardize, include_self) for scores in all_scores]
        peers = self.settings.residual.peers
        alphas = full
        if peers is not None:
            alphas = [weights(scores, score.tau, score.standardize, include_self, peers) for scores in all_scores]
        self.statistics["relation"] = {
            f"level.{number}": {
                "largest_weight": float(alpha.max()),
                "mean_largest_weight": float(alpha.amax(dim=-1).mean()),
                "concentration": concentration(wanted.mean(dim=0)),
            }
            for number, (alpha, wanted) in enumerate(zip(alphas, full, strict=True), 1)
        }
        return alphas

    def _scores(self, round_: int) -> list[Tensor]:
        """Scores r (B, K, K) of every level, targets in rows."""
        relation, hierarchy = self.relation, self._tree()
        # With a utility stage these are the filters that the clients' queries are made from.
        filters = self.filters if relation.kind == "utility" else self._filters()
        if relation.filter_scale == "spectral":
            filters = filters.spectral()
        kind = {
            "similarity": similarity_scores,
            "complementarity": complementarity_scores,
            "both": both_scores,
        }.get(relation.kind)
        if kind is not None:
            return [kind(grams) for grams in filters.grams]
        queries = [self._query_blocks(number) for number in range(1, len(hierarchy.levels) + 1)]
        if relation.match == "cosine":
            return [
                cosine_scores(
                    query,
                    filters.grams[index],
                    filters.public[index],
                    projection(level, relation.query_width, self.projection_seed, index + 1),
                )
                for index, (level, query) in enumerate(zip(hierarchy.levels, queries, strict=True))
            ]
        width = self.tables.shape[-1]
        energies = [
            energy_scores(query, filters.grams[index], level, width)
            for index, (level, query) in enumerate(zip(hierarchy.levels, queries, strict=True))
        ]
        return self._corrected(round_, energies)

    def _corrected(self, round_: int, energies: list[EnergyScores]) -> list[Tensor]:
        """Add the scorer's view (eq. 21); only then train it on this round (eq. 20)."""
        score = self.settings.score
        if score.correction == 0:
            return [energy.total for energy in energies]
        inputs = [features(energy, score.features) for energy in energies]
        if self.scorer is None:
            self.scorer = self._new_scorer(inputs[0].shape[-1])
        corrected = [
            corrected_scores(energy.total, self.scorer.predict(x), score.correction)
            for energy, x in zip(energies, inputs, strict=True)
        ]
        rows = torch.cat([x.flatten(0, -2) for x in inputs])
        targets = torch.cat([standardise(energy.total).flatten() for energy in energies])
        generator = torch_generator(self.settings.seed, "scorer", round_)
        self.statistics["scorer_loss"] = self.scorer.fit(rows, targets, generator)
        return corrected

    def _new_scorer(self, n_features: int) -> Scorer:
        score = self.settings.score
        seed = int(numpy_generator(self.settings.seed, "scorer").integers(2**31))
        return Scorer(n_features, score.hidden, score.lr, score.steps, score.batch, seed)

    def _query_blocks(self, number: int) -> Tensor:
        """Queries of a level as blocks (K, B, b, q); clients send the rows of real groups only."""
        level = self._tree().levels[number - 1]
        blocks = torch.zeros(len(self.uploaded), *level.members.shape, self.relation.query_width)
        for row, client in enumerate(self.uploaded):
            blocks[row][level.mask] = self.queries[client][f"level.{number}"]
        return blocks

    def _filters(self) -> GroupFilters:
        """Filters for matching; `filter_scale` comes later, since clients receive the unscaled public ones."""
        residual = self.settings.residual
        return group_filters(
            self.tables,
            self._tree(),
            residual.beta if residual.inherit is None else residual.inherit,
            client_scale=self.relation.client_scale,
        )

    def _tree(self) -> Hierarchy:
        if self.hierarchy is None:
            raise RuntimeError("the hierarchy is built in aggregate_items, which was not called")
        return self.hierarchy

    # --- what makes a filter personal ---------------------------------------------------------------------------

    def _group_residuals(self, alphas: list[Tensor]) -> dict[int, Arrays]:
        """Residuals R_k of every level that weighs something (eq. 23), or shifts of group means."""
        settings, hierarchy = self.settings, self._tree()
        residual = settings.residual
        norm = float(self.spectrum[1].norm())
        means = group_means(self.tables, hierarchy)
        personal: dict[int, Arrays] = {client: {} for client in self.uploaded}
        ratios = {}
        for index, (level, alpha, beta) in enumerate(zip(hierarchy.levels, alphas, residual.beta, strict=True)):
            name = f"level.{index + 1}"
            if beta == 0:
                continue
            if index + 1 in residual.coarse_parameter_levels:
                shifts = beta * mean_shifts(alpha, means[index], level)
                for row, client in enumerate(self.uploaded):
                    personal[client].setdefault("shifts", {})[name] = shifts[row]
                continue
            grams = block_gram(blocks_of(means[index], level))
            blocks = residuals(alpha, grams, center=residual.center)
            if residual.max_ratio is not None:
                blocks = bound_residuals(blocks, level, residual.max_ratio / beta, norm)
            ratios[name] = float((beta * item_norm(blocks, level) / max(norm, 1e-30)).mean())
            for row, client in enumerate(self.uploaded):
                personal[client].setdefault("residuals", {})[name] = pack_blocks(blocks[row], level)
        self.statistics["residual_ratio"] = ratios
        if self.relation.kind != "utility":
            # Without a utility stage the clients have not seen the hierarchy yet.
            for arrays in personal.values():
                arrays["hierarchy"] = self._packed_hierarchy()
        return personal

    def _item_filters(self, alphas: list[Tensor]) -> dict[int, Arrays]:
        """Each client's filter with its peers' item-level structure (beyond the paper).

        In the span of the common eigenvectors it is one r x r matrix; `residual.span: own` sends eigenpairs instead.
        """
        residual = self.settings.residual
        vectors, values = self.spectrum
        # Block a of a level holds the children of group a of the level above: its weights are those of group a.
        alpha = alphas[residual.item_level]
        labels = None if residual.item_level == 0 else self._tree().levels[residual.item_level - 1].labels
        if residual.span == "shared":
            filters = shared_basis_filters(vectors, values, self.tables, alpha, residual.gamma, labels, residual.center)
            added = (filters - torch.diag(values)).flatten(1).norm(dim=1).mean()
            self.statistics["residual_ratio"] = {"item": float(added / values.norm().clamp_min(1e-30))}
            upper = torch.ones(len(values), len(values), dtype=torch.bool).triu()
            return {client: {"personal": {"M": filters[row][upper]}} for row, client in enumerate(self.uploaded)}
        personal: dict[int, Arrays] = {}
        for row, client in enumerate(self.uploaded):
            own_vectors, own_values = personal_eigenpairs(
                vectors, values, self.tables, alpha[:, row], residual.gamma, self.settings.rank, labels
            )
            personal[client] = {"filter": {"V": own_vectors, "w": own_values}}
        return personal

    def _packed_hierarchy(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self._tree().pack().items()}

    # --- resume -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """The scorer, the warm start of the eigen-solver, the hierarchy where it is kept for several rounds."""
        arrays = {} if self.basis is None else {"basis": self.basis.numpy()}
        if self.hierarchy is not None:
            arrays |= {f"hierarchy/{name}": array for name, array in self.hierarchy.pack().items()}
        if self.scorer is not None:
            arrays |= {f"scorer/{name}": array for name, array in self.scorer.state().items()}
        return arrays

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of :meth:`state`."""
        if "basis" in arrays:
            self.basis = torch.tensor(arrays["basis"])
        hierarchy = _part(arrays, "hierarchy/")
        if hierarchy:
            self.hierarchy = Hierarchy.unpack(hierarchy)
        scorer = _part(arrays, "scorer/")
        if scorer:
            self.scorer = self._new_scorer(scorer["0.weight"].shape[1])
            self.scorer.load(scorer)


def _part(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
