"""Hierarchy and relations of one round, taken out of a run in this process: no run folder keeps them.

They are K^2 numbers a block, so the server lets them pass by in parts and forgets them.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedhur_app.config import DEFAULT_RUN_CONFIG, ConfigError, Settings, settings_of_run
from fedhur_app.data.experiment import load_interactions_of
from fedhur_app.data.interactions import Interactions
from fedhur_app.relations.hierarchy import Hierarchy
from fedhur_app.studies.workers.in_process import LocalRun, build
from server_app.strategies.fedhur import Server as FedHUR


@dataclass(frozen=True)
class Relations:
    """Relations between clients in one round.

    Attributes:
        round: The round.
        clients: Numbers of the K clients that took part, rising.
        hierarchy: The hierarchy of items in that round.
        alphas: One array a level: (B, K, K) weights of its B blocks, targets in rows.
        titles: Title of every item, its id where it has none.
        popularity: (I,) number of interactions of every item.
    """

    round: int
    clients: list[int]
    hierarchy: Hierarchy
    alphas: list[np.ndarray]
    titles: list[str]
    popularity: np.ndarray


def collect_relations(run_config: dict[str, Any], wanted: int | None = None) -> Relations:
    """Run in this process and keep what the server found in one round.

    Args:
        run_config: See :func:`fedhur_app.runtime.run_local`; the run itself is not changed in any bit. Without an
            `output-dir` its files are thrown away.
        wanted: The round; the last one by default.

    Raises:
        ConfigError: The settings have no relations, or the run had no such round.
    """
    with tempfile.TemporaryDirectory() as folder:
        return watched_run({**DEFAULT_RUN_CONFIG, "output-dir": folder, **run_config}, wanted)[0]


def watched_run(config: dict[str, Any], wanted: int | None = None) -> tuple[Relations, LocalRun, dict[str, Any]]:
    """The same for a whole run config: relations, the run, and the result that its folder does not hold yet.

    Raises:
        ConfigError: As :func:`collect_relations`.
    """
    settings = settings_of_run(config)
    if settings.algorithm != "fedhur" or settings.relation.kind == "none" or (wanted or 1) > settings.rounds:
        raise _missing(settings, wanted)
    found: dict[str, Any] = {}
    run = build(settings, config, server=_watched(found, wanted))
    result = run.start()
    if not found:
        raise _missing(settings, wanted)
    data = load_interactions_of(settings)
    popularity = np.bincount(data.items, minlength=data.n_items)
    return Relations(**found, titles=item_titles(data), popularity=popularity), run, result


def _watched(found: dict[str, Any], wanted: int | None) -> type[FedHUR]:
    """FedHUR's server, which leaves hierarchy and weights of a round (None: of every round) in `found`."""

    class Watched(FedHUR):
        """See :func:`_watched`."""

        def _relations(self, round_: int) -> Iterator[tuple[int, slice, Tensor]]:
            if wanted not in (None, round_):
                yield from super()._relations(round_)
                return
            alphas: dict[int, list[np.ndarray]] = {}
            for index, blocks, alpha in super()._relations(round_):
                alphas.setdefault(index, []).append(alpha.cpu().numpy().copy())
                yield index, blocks, alpha
            found.update(
                round=round_,
                clients=list(self.uploaded),
                hierarchy=self.hierarchy,
                alphas=[np.concatenate(alphas[index]) for index in sorted(alphas)],
            )

    return Watched


def _missing(settings: Settings, wanted: int | None) -> ConfigError:
    which = "any round" if wanted is None else f"round {wanted}"
    return ConfigError(
        f"a run with these settings has no relations in {which}: it takes the algorithm fedhur (here "
        f"{settings.algorithm}), relation.kind other than none (here {settings.relation.kind}), and so many rounds "
        f"before it stops (here {settings.rounds} at most)"
    )


def item_titles(data: Interactions) -> list[str]:
    """Title of every item of the data set, its id where it has none."""
    titles = [""] * len(data.item_ids) if data.item_titles is None else data.item_titles.tolist()
    return [str(title) or str(item) for title, item in zip(titles, data.item_ids.tolist(), strict=True)]
