"""Report of the study `new-items`: how soon do methods recommend items that appear while a model is in use?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from fedhur_app.evaluation.statistics import summarise
from fedhur_app.files import read_json, write_text
from fedhur_app.reporting.comparison import spread_text
from fedhur_app.reporting.figures import COLOURS, save
from fedhur_app.reporting.tables import Table, number_text, table_markdown, to_csv
from fedhur_app.studies.places import HasFolder, Place, places_of

# New items count as arrived when their recall is this share of that in a run that always had them.
ARRIVED = 0.95
CONTROL = "-control"  # behind the name of an arm: that of the same run with nothing withheld


@dataclass(frozen=True)
class Curves:
    """What one run measured.

    Attributes:
        place: Where it lies.
        appear: The round in which the new items appear.
        control: Whether it withheld nothing.
        valid: ("all" or "new", metric) -> one value a round, (rounds,); NaN where no user could be measured.
        test: ("all" or "new", metric) -> value.
        k: Length of the list.
    """

    place: Place
    appear: int
    control: bool
    valid: dict[tuple[str, str], np.ndarray]
    test: dict[tuple[str, str], float]
    k: int


def read_curves(place: Place) -> Curves:
    """What a run of the worker `new_items` left."""
    result = read_json(place.folder / "result.json")
    frame = pl.read_csv(place.folder / "curves.csv", schema_overrides={"value": pl.Float64})
    rounds = int(result["rounds"])
    valid: dict[tuple[str, str], np.ndarray] = {}
    test: dict[tuple[str, str], float] = {}
    k = 0
    for round_, part, items, _, label, value in frame.rows():
        metric, _, length = label.partition("@")
        k = int(length)
        if part == "test":
            test[items, metric] = value
        else:
            valid.setdefault((items, metric), np.full(rounds, np.nan))[round_ - 1] = value
    return Curves(place, int(result["appear"]), bool(result["control"]), valid, test, k)


def rounds_until(own: np.ndarray, control: np.ndarray, appear: int, share: float = ARRIVED) -> int | None:
    """Rounds with the new items' rows until their recall is a share of that of the same round in the control run.

    Args:
        own: (rounds,) recall of the new items.
        control: The same where nothing was withheld.
        appear: The round in which the items appear.
        share: That counts as arrived.

    Returns:
        1 for the round in which they appear; None: never. Rounds in which the control finds none do not count.
    """
    there = (control > 0) & (own >= share * control)
    there[: appear - 1] = False
    return int(np.argmax(there)) + 2 - appear if there.any() else None


def report(runs: Sequence[HasFolder], folder: Path) -> str:
    """Write curves.csv, arrival.csv and figures into the study's folder; returns the text of the report.

    Args:
        runs: Completed runs of the worker `new_items`.
        folder: Of the study.
    """
    found = [read_curves(place) for place in places_of(runs)]
    lines = [
        [c.place.data, c.place.arm, c.place.seed, c.control, round_, items, f"{metric}@{c.k}", float(value)]
        for c in found
        for (items, metric), values in c.valid.items()
        for round_, value in enumerate(values, 1)
    ]
    head = ["data", "arm", "seed", "control", "round", "items", "metric", "value"]
    write_text(folder / "curves.csv", to_csv(head, lines))
    parts = [_introduction(found)]
    arrivals: list[list[object]] = []
    for data in dict.fromkeys(c.place.data for c in found):
        of_data = [c for c in found if c.place.data == data]
        parts.append(table_markdown(_table(data, of_data)))
        arrivals += [
            [data, arm, seed, "" if waited is None else waited]
            for arm, waits in _arrivals(of_data).items()
            for seed, waited in waits.items()
        ]
        name = f"new-items-{data}"
        _draw(of_data, name, folder)
        parts.append(
            f"![New items and all items round by round, {data}]({name}.png)\n\nMean over seeds. Solid: the items "
            "appear in the round of the vertical line; dotted: the same run with their rows from the start.\n"
        )
    write_text(folder / "arrival.csv", to_csv(["data", "arm", "seed", "rounds"], arrivals))
    return "\n".join(parts)


def control_of(curves: Curves, among: Sequence[Curves]) -> Curves | None:
    """The run of the arm's control on the same data with the same seed."""
    place = curves.place
    wanted = (place.data, place.arm + CONTROL, place.seed)
    return next((each for each in among if (each.place.data, each.place.arm, each.place.seed) == wanted), None)


def _arrivals(found: Sequence[Curves]) -> dict[str, dict[int, int | None]]:
    """Rounds until the new items have arrived, by arm and seed, of the runs that have a control."""
    waits: dict[str, dict[int, int | None]] = {}
    for curves in found:
        control = control_of(curves, found)
        own = curves.valid.get(("new", "recall"))
        if control is not None and own is not None:
            waited = rounds_until(own, control.valid["new", "recall"], curves.appear)
            waits.setdefault(curves.place.arm, {})[curves.place.seed] = waited
    return waits


def _introduction(found: Sequence[Curves]) -> str:
    appear = ", ".join(map(str, sorted({c.appear for c in found})))
    return (
        "A seeded share of the items has no training row at any client before a round "
        f"(here {appear}), and all of its rows from then on. The catalogue is the same throughout, so these items are "
        "drawn as negatives before: the model learns that nobody takes them. Validation rows are ranked after every "
        "round among all items; `new` counts the rows of new items alone. An arm whose name ends in `-control` is the "
        "same run with nothing withheld. Arrived: the first round, counted from that of the appearance as 1, whose "
        f"recall of new items is {ARRIVED:.0%} of the control's in the same round, for each seed. Test rows are ranked "
        "once, with the model of the best validation round since the items appeared.\n"
    )


def _table(data: str, found: Sequence[Curves]) -> Table:
    waits = _arrivals(found)
    k = found[0].k
    head = ["arm", "seeds", "new: before", "at once", "one later", "at the end", "arrived after"]
    head += [f"test NDCG@{k}", f"test recall@{k} of new"]
    rows = []
    for arm in dict.fromkeys(c.place.arm for c in found):
        own = [c for c in found if c.place.arm == arm]
        curves = [c.valid.get(("new", "recall"), np.full(1, np.nan)) for c in own]
        moments = [[c.appear - 2 for c in own], [c.appear - 1 for c in own], [c.appear for c in own], [-1] * len(own)]
        cells = []
        for places in moments:
            values = [curve[place] for curve, place in zip(curves, places, strict=True) if place < len(curve)]
            cells.append(number_text(_mean(values), 3))
        waited = [("never" if each is None else str(each)) for each in waits.get(arm, {}).values()]
        tests = [
            spread_text(summarise([c.test[key] for c in own if key in c.test]))
            for key in (("all", "ndcg"), ("new", "recall"))
        ]
        rows.append([arm, str(len(own)), *cells, ", ".join(waited) or "-", *tests])
    title = f"{data}: recall@{k} of new items on validation rows around their appearance, mean over seeds"
    return Table(title, head, rows, 1, set())


def _mean(values: Sequence[float]) -> float:
    there = [value for value in values if not np.isnan(value)]
    return float(np.mean(there)) if there else float("nan")


def _draw(found: Sequence[Curves], name: str, folder: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    methods = list(dict.fromkeys(c.place.arm.removesuffix(CONTROL) for c in found))
    arms = list(dict.fromkeys(c.place.arm for c in found))
    for panel, (items, metric), label in zip(
        panels, (("new", "recall"), ("all", "ndcg")), ("recall of new items", "NDCG of all items"), strict=True
    ):
        for arm in arms:
            own = [c for c in found if c.place.arm == arm]
            rows = [c.valid[items, metric] for c in own if (items, metric) in c.valid]
            if not rows:
                continue
            length = min(map(len, rows))
            mean = np.mean([row[:length] for row in rows], axis=0)
            colour = COLOURS[methods.index(arm.removesuffix(CONTROL)) % len(COLOURS)]
            style = ":" if own[0].control else "-"
            panel.plot(np.arange(length) + 1, mean, color=colour, linestyle=style, label=arm)
        for appear in {c.appear for c in found}:
            panel.axvline(appear, color="grey", linewidth=0.8)
        panel.set(xlabel="round", ylabel=f"validation {label} (top {found[0].k})")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    save(figure, folder, name, ("png",))
