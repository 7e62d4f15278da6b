"""Report of the study `correlation`: do a client's scores of the others say whose share in its filter helps it?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from fedhur_app.files import write_text
from fedhur_app.reporting.figures import save
from fedhur_app.reporting.tables import Table, number_text, table_markdown, to_csv
from fedhur_app.studies.association import (
    Interval,
    hurting,
    mean_interval,
    pooled_pearson,
    pooled_spearman,
    row_pearson,
    row_ranks,
    top_hurting,
)
from fedhur_app.studies.places import HasFolder, Place, places_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {
    "energy": "utility (energy)",
    "corrected": "utility with scorer",
    "cosine": "utility (signed)",
    "similarity": "similarity",
    "complementarity": "complementarity",
}
# What the paper reports (Pearson, Spearman): no level, round, number of pairs or interval.
PAPER = (
    ("test NDCG", "utility", ".3224", ".3376"),
    ("test NDCG", "similarity", "-.3248", "-.3469"),
    ("validation, all metrics", "utility", ".26 to .33", "-"),
    ("training MRR", "utility", "-.1106", "-.1002"),
)
ITEM = "item"
SHOWN = "test.ndcg"
BINS = 10
# Okabe and Ito: colour-blind people tell them apart.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7")


@dataclass(frozen=True)
class Told:
    """What one score says of one gain.

    Attributes:
        pearson: Pearson's correlation within a target, mean over targets.
        spearman: Spearman's, likewise.
        pooled_pearson: Over all pairs together.
        pooled_spearman: Likewise.
        top_hurts: Share of a target's top-scored tenth of candidates whose gain is negative, mean over targets.
        all_hurt: Share of all its candidates, likewise.
    """

    pearson: Interval
    spearman: Interval
    pooled_pearson: Interval
    pooled_spearman: Interval
    top_hurts: Interval
    all_hurt: Interval


class Tried:
    """The pairs of one arm on one data, as arrays (targets of all seeds, clients); a target's own column is NaN.

    Args:
        places: Its runs.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        frames = [
            pl.read_csv(place.folder / "pairs.csv", schema_overrides={"level": pl.String}, infer_schema_length=None)
            .cast({"^(score|gain)\\..*$": pl.Float64})
            .with_columns(seed=pl.lit(place.seed))
            for place in places
        ]
        frame = pl.concat(frames).filter(pl.col("target") != pl.col("candidate"))
        units = {unit: row for row, unit in enumerate(frame.select("seed", "target").unique().sort(pl.all()).rows())}
        shape = (len(units), int(frame["candidate"].to_numpy().max(initial=-1)) + 1)
        self.targets = len(units)
        self.rounds: list[int] = sorted(frame["round"].unique())
        self.levels: list[str] = sorted(frame["level"].unique(), key=lambda level: (level == ITEM, level))
        self.scores = [name.removeprefix("score.") for name in frame.columns if name.startswith("score.")]
        self.gains = [name.removeprefix("gain.") for name in frame.columns if name.startswith("gain.")]
        self.arrays: dict[tuple[int, str, str], np.ndarray] = {}
        self.ranks: dict[tuple[int, str, str], np.ndarray] = {}
        for (round_, level), part in frame.group_by("round", "level"):
            rows = [units[unit] for unit in part.select("seed", "target").rows()]
            columns = part["candidate"].to_numpy()
            for name in (*(f"score.{score}" for score in self.scores), *(f"gain.{gain}" for gain in self.gains)):
                array = np.full(shape, np.nan)
                array[rows, columns] = part[name].to_numpy()
                key = (int(str(round_)), str(level), name)
                self.arrays[key], self.ranks[key] = array, row_ranks(array)

    def forms(self) -> Iterator[tuple[str, str]]:
        """Level of the score and level of the gain, where they belong together."""
        for level in self.levels:
            yield level, level
            if level != ITEM:
                yield level, ITEM

    def told(self, rounds: Sequence[int], level: str, score: str, gain_level: str, gain: str) -> Told | None:
        """What a score says of a gain in some rounds together; None where the score was never there.

        Correlations and shares within a target are means over the rounds.
        """
        keys = [((r, level, f"score.{score}"), (r, gain_level, f"gain.{gain}")) for r in rounds]
        keys = [(x, y) for x, y in keys if not np.isnan(self.arrays[x]).all()]
        if not keys:
            return None
        pairs = [(self.arrays[x], self.arrays[y]) for x, y in keys]
        scores, gains = (np.concatenate(side, axis=1) for side in zip(*pairs, strict=True))
        return Told(
            mean_interval(_mean([row_pearson(x, y) for x, y in pairs])),
            mean_interval(_mean([row_pearson(self.ranks[x], self.ranks[y]) for x, y in keys])),
            pooled_pearson(scores, gains),
            pooled_spearman(scores, gains),
            mean_interval(_mean([top_hurting(x, y) for x, y in pairs])),
            mean_interval(_mean([hurting(y) for _, y in pairs])),
        )

    def binned(self, level: str, score: str, gain_level: str, gain: str) -> list[Interval]:
        """Gain of the candidates of every tenth of a target's scores, lowest first, above the mean candidate's.

        The mean of all the target's candidates in the round is subtracted: rounds and targets then weigh alike, also
        where a score is missing in some of them.
        """
        found: list[list[np.ndarray]] = [[] for _ in range(BINS)]
        for round_ in self.rounds:
            ranks = self.ranks[round_, level, f"score.{score}"]
            gains = self.arrays[round_, gain_level, f"gain.{gain}"]
            gains = gains - _row_means(gains)[:, None]
            counts = (~np.isnan(ranks)).sum(axis=1, keepdims=True)
            place = np.full(ranks.shape, -1.0)
            np.divide((ranks - 0.5) * BINS, counts, out=place, where=~np.isnan(ranks) & ~np.isnan(gains))
            for number, values in enumerate(found):
                chosen = (place >= number) & (place < number + 1)
                values.append(_row_means(np.where(chosen, gains, np.nan)))
        return [mean_interval(_mean(values)) for values in found]


def report(runs: Sequence[HasFolder], folder: Path) -> str:
    """Write correlation.csv and figures into the study's folder; returns the text of the report.

    Args:
        runs: Completed runs of the worker `correlation`.
        folder: Of the study.
    """
    groups: dict[tuple[str, str], list[Place]] = {}
    for place in places_of(runs):
        groups.setdefault((place.data, place.arm), []).append(place)
    lines: list[list[Any]] = []
    parts = [_introduction(), table_markdown(_paper_table())]
    for (data, arm), places in groups.items():
        tried = Tried(places)
        over_all = _all_told(tried, tried.rounds)
        by_round = {str(round_): _all_told(tried, [round_]) for round_ in tried.rounds}
        for name, told in (by_round | {"all": over_all}).items():
            for key, each in told.items():
                numbers = [end for found in _intervals(each) for end in (found.value, found.low, found.high)]
                lines.append([data, arm, name, *key, each.pearson.n, *numbers])
        parts.append(table_markdown(_table(f"{data}, {arm}", over_all)))
        parts.append(_draw(tried, over_all, f"{data}-{arm}", f"{data}, {arm}", folder))
    head = ["data", "arm", "round", "score_level", "score", "gain_level", "part", "metric", "targets"]
    head += [f"{each.name}{end}" for each in fields(Told) for end in ("", "_low", "_high")]
    write_text(folder / "correlation.csv", to_csv(head, lines))
    return "\n".join(parts)


Key = tuple[str, str, str, str, str]  # level of the score, score, level of the gain, part, metric


def _all_told(tried: Tried, rounds: Sequence[int]) -> dict[Key, Told]:
    found = {}
    for level, gain_level in tried.forms():
        for score in tried.scores:
            for gain in tried.gains:
                told = tried.told(rounds, level, score, gain_level, gain)
                if told is not None:
                    part, _, metric = gain.partition(".")
                    found[level, score, gain_level, part, metric] = told
    return found


def _intervals(told: Told) -> list[Interval]:
    return [getattr(told, each.name) for each in fields(Told)]


def _introduction() -> str:
    return (
        "For a target client `k` and every other client `j`, the gain is a metric of `k`'s users with `j` alone mixed "
        "into its filter, minus that with the global filter alone. Level 1, 2, ...: "
        "`S_g + gamma A_l (F_j - F_g) A_l^T`; level item: `(1 - gamma) S_g + gamma E_j E_j^T`. Correlations are within "
        "a target, mean over targets, all rounds together, with 95 % intervals of a bootstrap over targets; "
        "correlation.csv has every round, part and metric, and the correlations over all pairs together. A score that "
        "knew nothing would stand at 0, and its top tenth would hurt as often as all candidates do. There is no scorer "
        "in the first round. Test rows are looked at for this analysis; nothing was chosen by them.\n"
    )


def _paper_table() -> Table:
    rows = [list(row) for row in PAPER]
    return Table(
        "The paper's numbers (no level, round or interval given)", ["gain", "score", "r", "rho"], rows, 2, set()
    )


def _table(title: str, told: dict[Key, Told]) -> Table:
    head = ["level", "score", "gain of", "r test NDCG", "rho test NDCG", "r valid. NDCG", "r train MRR"]
    head += ["top tenth hurts", "all hurt"]
    rows = []
    for level, score, gain_level in dict.fromkeys(key[:3] for key in told):
        test = told[level, score, gain_level, "test", "ndcg"]
        valid = told[level, score, gain_level, "valid", "ndcg"]
        train = told[level, score, gain_level, "train", "mrr"]
        cells = [_text(each) for each in (test.pearson, test.spearman, valid.pearson, train.pearson)]
        shares = [_text(test.top_hurts), number_text(test.all_hurt.value, 3)]
        rows.append([level, NAMES.get(score, score), gain_level, *cells, *shares])
    targets = max((each.pearson.n for each in told.values()), default=0)
    return Table(f"{title}: {targets} targets, test NDCG where nothing else is said", head, rows, 3, set())


def _text(interval: Interval) -> str:
    value = number_text(interval.value, 3)
    if np.isnan(interval.low):
        return value
    return f"{value} [{number_text(interval.low, 3)}, {number_text(interval.high, 3)}]"


def _mean(values: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over rounds of one value a target, without NaN; NaN where there is nothing else."""
    return _row_means(np.stack(values, axis=1))


def _row_means(values: np.ndarray) -> np.ndarray:
    counts = (~np.isnan(values)).sum(axis=1)
    return np.divide(np.nansum(values, axis=1), counts, out=np.full(len(values), np.nan), where=counts > 0)


# --- figures --------------------------------------------------------------------------------------------------------


def _draw(tried: Tried, told: dict[Key, Told], name: str, title: str, folder: Path) -> str:
    """Bars of correlations, and gain against score; returns the Markdown that shows them."""
    bars, bins = f"correlations-{name}", f"gain-by-score-{name}"
    _draw_bars(told, bars, folder)
    _draw_bins(tried, bins, folder)
    return (
        f"![Correlation of scores and gain in test NDCG, {title}]({bars}.png)\n\n"
        "Spearman's correlation within a target of score and gain in test NDCG, with the gain on the score's own level "
        "and on that of items.\n\n"
        f"![Gain in test NDCG by score, {title}]({bins}.png)\n\n"
        "Gain in test NDCG, above that of the target's mean candidate, by tenths of the target's scores: a line that "
        "rises to the right is a score that finds who helps.\n"
    )


def _draw_bars(told: dict[Key, Told], name: str, folder: Path) -> None:
    from matplotlib.figure import Figure

    levels = list(dict.fromkeys(key[0] for key in told))
    scores = list(dict.fromkeys(key[1] for key in told))
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharey=True))
    for panel, of_items in zip(panels, (False, True), strict=True):
        for number, score in enumerate(scores):
            places, values = [], []
            for place, level in enumerate(levels):
                found = told.get((level, score, ITEM if of_items else level, "test", "ndcg"))
                if found is not None and not np.isnan(found.spearman.value):
                    places.append(place + (number - (len(scores) - 1) / 2) * 0.8 / len(scores))
                    values.append((found.spearman.value, found.spearman.low, found.spearman.high))
            mean, low, high = np.array(values, dtype=np.float64).reshape(-1, 3).T
            panel.bar(places, mean, 0.8 / len(scores), color=_COLOURS[number % 5], label=NAMES.get(score, score))
            panel.errorbar(places, mean, np.abs([mean - low, high - mean]), fmt="none", ecolor="black", capsize=2)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(levels)), levels)
        panel.set(title=f"gain of {'items' if of_items else 'the same level'}", xlabel="level of the score")
    panels[0].set_ylabel("Spearman's correlation with the gain\nin test NDCG, within a target")
    panels[1].legend(fontsize="small")
    save(figure, folder, name, ("png",))


def _draw_bins(tried: Tried, name: str, folder: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(tried.levels), 3.8), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(tried.levels), squeeze=False).ravel())
    tenths = np.arange(BINS) + 1
    for panel, level in zip(panels, tried.levels, strict=True):
        for number, score in enumerate(tried.scores):
            found = tried.binned(level, score, level, SHOWN)
            mean, low, high = np.array([(each.value, each.low, each.high) for each in found]).T
            colour = _COLOURS[number % 5]
            panel.plot(tenths, mean, marker="o", markersize=3, color=colour, label=NAMES.get(score, score))
            panel.fill_between(tenths, low, high, color=colour, alpha=0.12, linewidth=0)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(title=f"level {level}", xlabel="tenth of the target's scores, 10 = highest", xticks=tenths)
    panels[0].set_ylabel("gain in test NDCG above the target's mean")
    panels[-1].legend(fontsize="small")
    save(figure, folder, name, ("png",))
