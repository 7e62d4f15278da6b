"""FedHUR on the server: global statistics, hierarchy, matching, personal filters (eq. 2-9, 18-24).

With `relation.kind: none` it is FedCIA: everybody gets the top eigenpairs of the mean Gram.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhur_app.config import Settings
from fedhur_app.protocol import Content, Stage
from fedhur_app.relations.filters import (
    GroupFilters,
    block_gram,
    blocks_of,
    group_filters,
    group_means,
    mean_gram_eigenpairs,
    mean_table,
    pack_blocks,
    rows_of,
    smoothed_tables,
)
from fedhur_app.relations.hierarchy import Hierarchy, build_hierarchy, item_directions
from fedhur_app.relations.matching import (
    EnergyScores,
    both_scores,
    complementarity_scores,
    concentration,
    cosine_scores,
    energy_scores,
    feature_width,
    features,
    similarity_scores,
    standardise,
)
from fedhur_app.relations.ridge_scorer import RidgeScorer
from fedhur_app.relations.scorer import Scorer, TrainingRows
from fedhur_app.relations.utility import projection
from fedhur_app.relations.weights import (
    bound_residuals,
    corrected_scores,
    item_norm,
    personal_eigenpairs,
    residuals,
    shared_basis_filters,
    weights,
)
from fedhur_app.seeding import numpy_generator, torch_generator
from server_app.checkpoint import RunFolder
from server_app.stages import DivergedRunError, PerClient, say
from server_app.strategies.base import Fleet, StagedStrategy

# Work memory for numbers of pairs of clients: so many blocks, or targets of one block, are matched at once. Small
# enough for the processor's cache: eight times as much takes almost twice as long with 1,000 clients.
_PAIR_BYTES = 8 * 2**20


class Server(StagedStrategy):
    """One round: collect tables, build the hierarchy, match queries, return personal filters.

    With ``K`` clients, what is held beside the clients' tables is small multiples of ``K^2`` numbers, of the block
    Grams and of the group means. Scores, features and weights of all pairs on all blocks are not: they pass by in
    parts, see :meth:`_relations`.
    """

    def __init__(self, settings: Settings, fleet: Fleet, folder: RunFolder | None = None) -> None:
        super().__init__(settings, fleet, folder)
        self.relation = settings.relation
        if self.relation.kind == "utility":
            self.stages = (Stage.ITEMS, Stage.UTILITY, Stage.PERSONALIZE)
        if settings.residual.coarse_parameter_levels and settings.residual.kind == "group":
            say("levels %s average group means instead of filters", settings.residual.coarse_parameter_levels)
        # By level; 0 stands for all levels.
        self.scorers: dict[int, Scorer | RidgeScorer] = {}
        self.basis: Tensor | None = None
        self.hierarchy: Hierarchy | None = None
        # Of the present round only: who uploaded, what, and what was made of it.
        self.uploaded: list[int] = []
        self.tables: list[Tensor] = []
        self.spectrum: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.statistics: dict[str, Any] = {}
        self.filters = GroupFilters([], [], [])
        self.queries: dict[int, dict[str, Tensor]] = {}
        self.projection_seed = 0
        self.training: dict[int, TrainingRows] = {}

    # --- stage 1 ------------------------------------------------------------------------------------------------

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any]:
        """Mean Gram (eq. 2), hierarchy and public group filters (eq. 3-9)."""
        settings = self.settings
        # A table that nobody's data have touched is noise: who has no data gets the global filter and gives nothing.
        trained = [client for client, content in replies.items() if content.fields["examples"] > 0]
        self.uploaded = trained or list(replies)
        self.tables = [replies[client].record("table")["items"] for client in self.uploaded]
        self._check_size(round_)
        relations = self.relation.kind != "none"
        regroup = relations and (self.hierarchy is None or (round_ - 1) % settings.hierarchy.refresh_every == 0)
        share = settings.hierarchy.smoothing if relations else 0.0
        # Smoothed tables have eigenpairs of their own; those of the tables themselves may be needed to group the items.
        if not share or (regroup and settings.hierarchy.features == "spectral"):
            self.spectrum = self._eigenpairs(self.tables)
        statistics: dict[str, Any] = {}
        if relations:
            if regroup:
                self.hierarchy = self._new_hierarchy()
            statistics["groups"] = [level.n_groups for level in self._tree().levels]
            if share:
                smooth = smoothed_tables(self.tables, self._tree().leaf)
                parts = ((1 - share, self.tables), (share, smooth))
                # Twice as many tables: each counts half in the mean.
                self.spectrum = self._eigenpairs([table * (2 * part) ** 0.5 for part, own in parts for table in own])
        _, values = self.spectrum
        statistics["global_filter"] = {
            "norm": float(values.norm()),
            "effective_rank": float(values.sum() ** 2 / values.square().sum().clamp_min(1e-30)),
        }
        return statistics

    def _eigenpairs(self, tables: list[Tensor]) -> tuple[Tensor, Tensor]:
        pairs = mean_gram_eigenpairs(tables, self.settings.rank, previous_basis=self.basis, seed=self.settings.seed)
        self.basis = pairs[0]
        return pairs

    def _new_hierarchy(self) -> Hierarchy:
        hierarchy = self.settings.hierarchy
        branching = [hierarchy.flat_groups] if hierarchy.flat else hierarchy.branching
        spectral = hierarchy.features == "spectral"
        rows = item_directions(*self.spectrum) if spectral else mean_table(self.tables)
        return build_hierarchy(rows, branching, self.settings.seed)

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
        kept = [row for row, client in enumerate(self.uploaded) if client in replies]
        if len(kept) < len(self.uploaded):
            self.tables = [self.tables[row] for row in kept]
            self.filters = self.filters.of_clients(kept)
            self.uploaded = [self.uploaded[row] for row in kept]

    # --- stage 3 ------------------------------------------------------------------------------------------------

    def configure_personalize(self, round_: int, clients: list[int]) -> Content | Mapping[int, Content]:
        """The global filter, and what makes it personal."""
        vectors, values = self.spectrum
        self.statistics = {}
        if self.relation.kind == "none":
            self._forget()
            return Content(arrays={"filter": {"V": vectors, "w": values}})
        relations = self._relations(round_)
        item = self.settings.residual.kind == "item"
        personal = self._item_filters(relations) if item else self._group_residuals(relations)
        self._forget()
        common = {"filter": {"V": vectors, "w": values}}
        targets = set(self.uploaded)
        return PerClient(
            clients, lambda client: Content(arrays=common | (personal[client].arrays if client in targets else {}))
        )

    def aggregate_personalize(self, round_: int, replies: dict[int, Content]) -> dict[str, Any]:
        """Mean error of the fit over the clients, and the round's relation statistics."""
        errors = [float(content.fields["fit_error"]) for content in replies.values()]
        return {"fit_error": float(np.mean(errors)), **self.statistics}

    def _forget(self) -> None:
        """Drop what the clients sent, before the answers take memory."""
        self.tables = []
        self.queries = {}
        self.filters = GroupFilters([], [], [])
        self.training = {}

    # --- relations ----------------------------------------------------------------------------------------------

    def _relations(self, round_: int) -> Iterator[tuple[int, slice, Tensor]]:
        """Weights of all levels (eq. 18-22), a few blocks at a time; go through them to the end.

        At the end the scorer is trained on this round's pairs (eq. 20), those of its minibatches having been taken as
        they passed, and the statistics are complete. With `score.timing: same` all pairs pass by once before that.

        Yields:
            Index of the level, some of its blocks, and their alpha (b, K, K) with targets in rows.
        """
        score, peers, levels = self.settings.score, self.settings.residual.peers, self._tree().levels
        clients = len(self.uploaded)
        include_self = self.relation.include_self or clients == 1
        # With a utility stage these are the filters that the clients' queries are made from.
        filters = self.filters if self.relation.kind == "utility" else self._filters()
        if self.relation.filter_scale == "spectral":
            filters = filters.spectral()
        self._draw_training_rows(round_)
        if score.timing == "same" and self.training:
            for index in range(len(levels)):
                for blocks in self._parts(index):
                    self._scores(index, blocks, filters)
            self._train_scorers()
        statistics = {}
        for index in range(len(levels)):
            largest = []
            wanted = torch.zeros(clients, clients, dtype=torch.float64)
            for blocks in self._parts(index):
                scores = self._scores(index, blocks, filters)
                # Over all candidates first: who is wanted most cannot be seen once only a few have weights.
                full = weights(scores, score.tau, score.standardize, include_self)
                wanted += full.sum(dim=0, dtype=torch.float64)
                alpha = full
                if peers is not None:
                    alpha = weights(scores, score.tau, score.standardize, include_self, peers)
                largest.append(alpha.amax(dim=-1))
                yield index, blocks, alpha
            of_targets = torch.cat(largest)
            statistics[f"level.{index + 1}"] = {
                "largest_weight": float(of_targets.max()),
                "mean_largest_weight": float(of_targets.mean()),
                "concentration": concentration(wanted),
            }
        self._train_scorers()
        self.statistics["relation"] = statistics

    def _parts(self, index: int) -> Iterator[slice]:
        """So many blocks of a level at once as the work memory takes."""
        blocks = len(self._tree().levels[index].members)
        count = max(1, _PAIR_BYTES // (len(self.uploaded) * self._target_bytes()))
        return (slice(first, min(first + count, blocks)) for first in range(0, blocks, count))

    def _train_scorers(self) -> None:
        """Train every scorer on the rows that were taken for it, once a round."""
        if self.training:
            losses = [self.scorers[number].fit(rows) for number, rows in self.training.items()]
            self.statistics["scorer_loss"] = float(np.mean(losses))
        self.training = {}

    def _target_bytes(self) -> int:
        """About the work memory that one target takes on one block, with all candidates."""
        numbers = 12
        if self.relation.kind == "utility" and self.relation.match == "energy":
            numbers += 5 * self.relation.query_width
        return 4 * numbers * len(self.uploaded)

    def _scores(self, index: int, blocks: slice, filters: GroupFilters) -> Tensor:
        """Scores r (b, K, K) of some blocks of a level, targets in rows."""
        relation, level = self.relation, self._tree().levels[index]
        grams = filters.grams[index][:, blocks]
        kind = {
            "similarity": similarity_scores,
            "complementarity": complementarity_scores,
            "both": both_scores,
        }.get(relation.kind)
        if kind is not None:
            return kind(grams)
        query = self._query_blocks(index, blocks)
        if relation.match == "cosine":
            directions = projection(level, relation.query_width, self.projection_seed, index + 1)
            return cosine_scores(query, grams, filters.public[index][blocks], directions[blocks])
        clients, width = len(self.uploaded), self.tables[0].shape[-1]
        sizes = level.mask[blocks].sum(dim=1)
        scores = query.new_empty(len(sizes), clients, clients)
        # Either all targets at once or, where one block is too much, some of them on one block.
        count = max(1, _PAIR_BYTES // (len(sizes) * self._target_bytes()))
        number = self._scorer_of(index)
        before = blocks.start
        if number == 0:
            before += sum(len(level.members) for level in self._tree().levels[:index])
        for first in range(0, clients, count):
            energy = energy_scores(query[first : first + count], grams, sizes, width)
            scores[:, first : first + count] = self._corrected(energy, number, (before * clients + first) * clients)
        return scores

    def _corrected(self, energy: EnergyScores, number: int, first: int) -> Tensor:
        """Add the view of a scorer as it is now (eq. 21), and take rows to train it on while it is not yet trained.

        Args:
            energy: Of some blocks with all targets, or of some targets on one block.
            number: Of the scorer.
            first: Number of the first of these pairs among all pairs that this scorer sees in the round.
        """
        score = self.settings.score
        if number not in self.scorers:
            return energy.total
        inputs = features(energy, score.features)
        if number in self.training:
            self.training[number].collect(first, inputs, standardise(energy.total))
        return corrected_scores(energy.total, self.scorers[number].predict(inputs), score.correction)

    def _scorer_of(self, index: int) -> int:
        """Number of the scorer of a level, given by its index."""
        return index + 1 if self.settings.score.per_level else 0

    def _draw_training_rows(self, round_: int) -> None:
        """Choose the pairs that the scorers will be trained on; none where there is no scorer."""
        relation, score = self.relation, self.settings.score
        self.training = {}
        if relation.kind != "utility" or relation.match == "cosine" or score.correction == 0:
            return
        levels = self._tree().levels
        pairs: dict[int, int] = {}
        for index, level in enumerate(levels):
            number = self._scorer_of(index)
            pairs[number] = pairs.get(number, 0) + len(level.members) * len(self.uploaded) ** 2
        for number, rows in pairs.items():
            if number not in self.scorers:
                self.scorers[number] = self._new_scorer(number, feature_width(score.features, relation.query_width))
            generator = torch_generator(self.settings.seed, _purpose(number), round_)
            self.training[number] = self.scorers[number].draw(rows, generator)

    def _new_scorer(self, number: int, n_features: int) -> Scorer | RidgeScorer:
        score = self.settings.score
        if score.analytic:
            return RidgeScorer(n_features, score.steps, score.batch)
        seed = int(numpy_generator(self.settings.seed, _purpose(number)).integers(2**31))
        return Scorer(n_features, score.hidden, score.lr, score.steps, score.batch, seed)

    def _query_blocks(self, index: int, blocks: slice) -> Tensor:
        """Queries on some blocks of a level, (K, b, c, q) with up to c groups; clients send real groups only."""
        mask = self._tree().levels[index].mask
        first, last = int(mask[: blocks.start].sum()), int(mask[: blocks.stop].sum())
        rows = torch.stack([self.queries[client][f"level.{index + 1}"][first:last] for client in self.uploaded])
        result = rows.new_zeros(len(rows), *mask[blocks].shape, self.relation.query_width)
        result[:, mask[blocks]] = rows
        return result

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

    def _group_residuals(self, relations: Iterator[tuple[int, slice, Tensor]]) -> dict[int, Content]:
        """Residuals R_k of every level that weighs something (eq. 23), or shifts of group means."""
        settings, levels = self.settings, self._tree().levels
        residual = settings.residual
        norm = float(self.spectrum[1].norm())
        means = group_means(self.tables, self._tree())
        added: dict[int, Tensor] = {}
        for index, chosen, alpha in relations:
            if residual.beta[index] == 0:
                continue
            blocks = blocks_of(means[index], levels[index], chosen)
            if index + 1 in residual.coarse_parameter_levels:
                part = residuals(alpha, blocks)
            else:
                part = residuals(alpha, block_gram(blocks), center=residual.center)
            if index not in added:
                added[index] = part.new_empty(len(part), len(levels[index].members), *part.shape[2:])
            added[index][:, chosen] = part
        personal = {client: Content() for client in self.uploaded}
        ratios = {}
        for index, blocks in added.items():
            name, level, beta = f"level.{index + 1}", levels[index], residual.beta[index]
            if index + 1 in residual.coarse_parameter_levels:
                record, packed = "shifts", beta * rows_of(blocks, level)
            else:
                if residual.max_ratio is not None:
                    blocks = bound_residuals(blocks, level, residual.max_ratio / beta, norm)
                ratios[name] = float((beta * item_norm(blocks, level) / max(norm, 1e-30)).mean())
                record, packed = "residuals", pack_blocks(blocks, level)
            for client, own in zip(self.uploaded, packed, strict=True):
                personal[client].arrays.setdefault(record, {})[name] = own
        self.statistics["residual_ratio"] = ratios
        if self.relation.kind != "utility":
            # Without a utility stage the clients have not seen the hierarchy yet.
            hierarchy = self._packed_hierarchy()
            for content in personal.values():
                content.arrays["hierarchy"] = hierarchy
        return personal

    def _item_filters(self, relations: Iterator[tuple[int, slice, Tensor]]) -> Mapping[int, Content]:
        """Each client's filter with its peers' item-level structure (beyond the paper).

        In the span of the common eigenvectors it is one r x r matrix; `residual.span: own` sends eigenpairs instead.
        """
        residual, rank = self.settings.residual, self.settings.rank
        vectors, values = self.spectrum
        # Block a of a level holds the children of group a of the level above: its weights are those of group a.
        alphas = (block for index, _, alpha in relations if index == residual.item_level for block in alpha)
        labels = None if residual.item_level == 0 else self._tree().levels[residual.item_level - 1].labels
        tables, clients = self.tables, self.uploaded
        if residual.span == "shared":
            filters = shared_basis_filters(vectors, values, tables, alphas, residual.gamma, labels, residual.center)
            added = (filters - torch.diag(values)).flatten(1).norm(dim=1).mean()
            self.statistics["residual_ratio"] = {"item": float(added / values.norm().clamp_min(1e-30))}
            upper = torch.ones(len(values), len(values), dtype=torch.bool).triu()
            packed = filters[:, upper]
            return {
                client: Content(arrays={"personal": {"M": own}}) for client, own in zip(clients, packed, strict=True)
            }
        # The zeros of all but a few peers are not held.
        of_groups = [alpha.to_sparse() for alpha in alphas]

        def own_filter(client: int) -> Content:
            row = clients.index(client)
            alpha = torch.stack([group[row].to_dense() for group in of_groups])
            pairs = personal_eigenpairs(vectors, values, tables, alpha, residual.gamma, rank, labels)
            return Content(arrays={"filter": {"V": pairs[0], "w": pairs[1]}})

        return PerClient(clients, own_filter)

    def _packed_hierarchy(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self._tree().pack().items()}

    # --- resume -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """The scorers, the warm start of the eigen-solver, the hierarchy where it is kept for several rounds."""
        arrays = {} if self.basis is None else {"basis": self.basis.numpy()}
        if self.hierarchy is not None:
            arrays |= {f"hierarchy/{name}": array for name, array in self.hierarchy.pack().items()}
        for number, scorer in self.scorers.items():
            arrays |= {f"{_key(number)}{name}": array for name, array in scorer.state().items()}
        return arrays

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of :meth:`state`."""
        if "basis" in arrays:
            self.basis = torch.tensor(arrays["basis"])
        hierarchy = _part(arrays, "hierarchy/")
        if hierarchy:
            self.hierarchy = Hierarchy.unpack(hierarchy)
        levels = range(1, self.settings.levels + 1) if self.settings.score.per_level else [0]
        for number in levels:
            if scorer := _part(arrays, _key(number)):
                width = feature_width(self.settings.score.features, self.relation.query_width)
                self.scorers[number] = self._new_scorer(number, width)
                self.scorers[number].load(scorer)


def _purpose(number: int) -> str:
    """What a scorer's draws are for."""
    return f"scorer of level {number}" if number else "scorer"


def _key(number: int) -> str:
    """Where a scorer's arrays lie in a checkpoint."""
    return f"scorer/level.{number}/" if number else "scorer/"


def _part(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
