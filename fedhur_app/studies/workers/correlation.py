"""A run of FedHUR in which, in some rounds, every candidate is tried out on some targets.

In the chosen rounds, once the queries are in, the worker takes all clients' item tables as uploaded and, for a seeded
sample of targets ``k`` and all candidates ``j``, notes the scores of ``j`` for ``k`` (studies/pair_scores.py) and the
gain of mixing ``j`` alone into ``k``'s filter (studies/pair_gains.py): a metric of ``k``'s users with that filter minus
the metric with ``S_g`` alone, for training, validation and test rows. The run itself goes on as if nobody had looked.
The test rows are touched in these rounds for the analysis alone: no choice is made from what they say.

Tables are fitted exactly, whatever `align.solver` is: the gain is that of the filter, not of a solver's path.

Files: `pairs.csv` (round, level, target, candidate, score.*, gain.<part>.<metric>), where level `item` is that of
items; `base.csv` (round, target, part, metric, value) with `S_g` alone; and an ordinary run folder.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_app.state import ClientState
from fedhur_app.config import ConfigError, Settings
from fedhur_app.data.shards import load_shard, shard_path
from fedhur_app.files import write_text
from fedhur_app.protocol import Content
from fedhur_app.relations.alignment import PersonalFilter
from fedhur_app.relations.filters import local_grams
from fedhur_app.reporting.tables import to_csv
from fedhur_app.seeding import numpy_generator
from fedhur_app.studies.pair_gains import METRICS, PARTS, TargetUsers, item_filter, level_filter
from fedhur_app.studies.pair_scores import SCORES, Predict, item_scores, level_scores
from fedhur_app.studies.workers.in_process import (
    LocalRun,
    build,
    failures_written,
    parser,
    run_config,
    settings_of_all_rounds,
)
from server_app.stages import say
from server_app.strategies.fedhur import Server as FedHUR

GAINS = tuple(f"{part}.{metric}" for part in PARTS for metric in METRICS)
HEADER = ("round", "level", "target", "candidate", *(f"score.{s}" for s in SCORES), *(f"gain.{g}" for g in GAINS))


class Pairs:
    """What is noted of pairs of clients in the chosen rounds.

    Args:
        settings: Of the run.
        rounds: The rounds.
        targets: Client numbers of the targets.
        gamma: Weight of the candidate in the filter.
    """

    def __init__(self, settings: Settings, rounds: Sequence[int], targets: Sequence[int], gamma: float) -> None:
        self.settings = settings
        self.rounds = rounds
        self.targets = targets
        self.gamma = gamma
        self.run: LocalRun | None = None
        self.rows: list[list[Any]] = []
        self.base: list[list[Any]] = []

    def look(self, round_: int, server: FedHUR) -> None:
        """Note scores and gains of a round in which all queries are in and no filter has been sent."""
        if round_ not in self.rounds:
            return
        targets = [target for target in self.targets if target in server.uploaded]
        places = [server.uploaded.index(target) for target in targets]
        users = self._users(targets)
        base = users.measure(PersonalFilter(*server.spectrum))
        for target, found in zip(targets, base, strict=True):
            for (part, metric), value in np.ndenumerate(found):
                self.base.append([round_, target, PARTS[part], METRICS[metric], _text(value)])
        for name, scores, filters in self._levels(server, places):
            gains = np.stack([users.measure(filter_) - base for filter_ in filters], axis=1)
            for row, target in enumerate(targets):
                for column, candidate in enumerate(server.uploaded):
                    told = [_text(float(scores[s][row, column])) if s in scores else "" for s in SCORES]
                    gained = [_text(value) for value in gains[row, column].ravel()]
                    self.rows.append([round_, name, target, candidate, *told, *gained])
            say("round %d: tried %d candidates on level %s", round_, gains.shape[1], name)

    def _users(self, targets: Sequence[int]) -> TargetUsers:
        """The targets' users, their private tables and item tables as they stand in the middle of the round."""
        assert self.run is not None
        contexts = [self.run.grid.contexts[self.run.strategy.fleet.nodes[target]] for target in targets]
        models = [ClientState.from_context(context).arrays["model"] for context in contexts]
        shards = [load_shard(shard_path(self.run.data.folder, target)) for target in targets]
        return TargetUsers.of(
            self.settings, shards, [model["users"] for model in models], [model["items"] for model in models]
        )

    def _levels(
        self, server: FedHUR, places: Sequence[int]
    ) -> Iterator[tuple[str, dict[str, Tensor], Iterator[PersonalFilter]]]:
        """Name, scores of the targets and filter of each candidate, level by level."""
        hierarchy = server.hierarchy
        assert hierarchy is not None
        settings, gamma, (vectors, values) = self.settings, self.gamma, server.spectrum
        filters = server.filters.spectral() if settings.relation.filter_scale == "spectral" else server.filters
        seed = server.projection_seed
        plain = [torch.stack(grams) for grams in zip(*(local_grams(t, hierarchy) for t in server.tables), strict=True)]
        for index, grams in enumerate(plain):
            scores = level_scores(filters, hierarchy, index, places, settings, seed, self._scorer(server, index))
            residuals = grams - grams.mean(dim=0)
            yield (
                str(index + 1),
                scores,
                (level_filter(vectors, values, hierarchy, index, residual, gamma) for residual in residuals),
            )
        scores = item_scores(server.tables, places, settings, seed, self._scorer(server, 0))
        yield "item", scores, (item_filter(vectors, values, table, gamma) for table in server.tables)

    def _scorer(self, server: FedHUR, index: int) -> Predict | None:
        """The scorer of a level as the round before left it; None in the first round."""
        scorer = server.scorers.get(index + 1 if self.settings.score.per_level else 0)
        return scorer.predict if scorer else None


def watched(pairs: Pairs) -> type[FedHUR]:
    """FedHUR's server, which lets `pairs` look before it answers the queries."""

    class Watched(FedHUR):
        """See :func:`watched`."""

        def configure_personalize(self, round_: int, clients: list[int]) -> Content | Mapping[int, Content]:
            """As FedHUR's."""
            pairs.look(round_, self)
            return super().configure_personalize(round_, clients)

    return Watched


def main(words: Sequence[str] | None = None) -> None:
    """Run once."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", default="1,3,5", metavar="N,N,...", help="rounds in which pairs are tried")
    options.add_argument("--targets", type=int, default=20, help="number of targets, a seeded sample of the clients")
    options.add_argument("--gamma", type=float, default=0.3, help="weight of the candidate in the filter")
    chosen = options.parse_args(words)
    with failures_written(chosen):
        _run(run_config(chosen), _numbers(chosen.rounds), chosen.targets, chosen.gamma)


def _run(config: dict[str, Any], rounds: list[int], n_targets: int, gamma: float) -> None:
    settings, config = settings_of_all_rounds(config, max(rounds))
    if settings.algorithm != "fedhur" or settings.relation.kind != "utility" or settings.model.kind != "mf":
        raise ConfigError(
            f"strategy {settings.strategy}: pairs are tried in runs of FedHUR with relation.kind=utility and "
            "model.kind=mf, whose stages bring everything that is needed"
        )
    pairs = Pairs(settings, rounds, (), gamma)
    run = build(settings, config, server=watched(pairs))
    pairs.run, pairs.targets = run, sample_targets(run.strategy.fleet.clients, n_targets, settings.seed)
    result = run.start({"rounds_tried": rounds, "targets": list(pairs.targets), "gamma": gamma})
    head = ("round", "target", "part", "metric", "value")
    write_text(run.folder.path / "base.csv", to_csv(head, pairs.base))
    write_text(run.folder.path / "pairs.csv", to_csv(HEADER, pairs.rows))
    run.folder.write_result(result)


def sample_targets(clients: Sequence[int], number: int, seed: int) -> list[int]:
    """Client numbers of the targets, rising; all clients where there are no more than `number`."""
    generator = numpy_generator(seed, "correlation targets")
    return sorted(generator.choice(clients, min(number, len(clients)), replace=False).tolist())


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise ConfigError(f"--rounds {text}: round numbers from 1 with commas between them, such as 1,3,5")
    return numbers


def _text(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.7g}"


if __name__ == "__main__":
    main()
