"""Figures as PNG and PDF. matplotlib and scikit-learn are imported where they are used: they take seconds."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedhur_app.files import replacing
from fedhur_app.reporting.item_tables import ItemTables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = Literal["pca", "tsne"]
# Okabe and Ito: colour-blind people tell them apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# t-SNE takes minutes for more points.
TSNE_POINTS = 3000

History = list[tuple[str, int, str, int, str, float]]  # method, seed, market, round, metric, value


def bands(history: History, market: str, method: str, metric: str) -> np.ndarray:
    """Rounds of one line: (rounds, 4) with round, mean, smallest and largest value over the seeds that have it."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for m, _, where, round_, name, value in history:
        if (m, where, name) == (method, market, metric):
            by_round[round_].append(value)
    rows = [(round_, np.mean(found), min(found), max(found)) for round_, found in sorted(by_round.items())]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def draw_curves(history: History, metric: str, folder: Path) -> None:
    """Write curves.png and curves.pdf: a panel a market, a line a method (mean over seeds, band from min to max)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    markets = list(dict.fromkeys(row[2] for row in history))
    methods = list(dict.fromkeys(row[0] for row in history))
    columns = min(3, len(markets))
    lines = -(-len(markets) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel, market in zip(panels, markets, strict=False):
        for number, method in enumerate(methods):
            round_, mean, low, high = bands(history, market, method, metric).T
            panel.plot(round_, mean, color=f"C{number % 10}", label=method)
            panel.fill_between(round_, low, high, color=f"C{number % 10}", alpha=0.15, linewidth=0)
        panel.set(title=market, xlabel="round", ylabel=f"validation {metric}")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in panels[len(markets) :]:
        panel.set_axis_off()
    panels[0].legend(fontsize="small")
    save(figure, folder, "curves")


def project(tables: ItemTables, picture: Picture) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """All tables in the plane, by one fit for all rows together.

    Args:
        tables: Tables of one width.
        picture: `pca`, or `tsne` (of at most :data:`TSNE_POINTS` rows: the same items of every table, drawn once).

    Returns:
        Market -> (items, 2), and (items, 2) of the global table.
    """
    stacked = np.stack([*tables.markets.values(), tables.shared]).astype(np.float64)
    if picture == "pca":
        from sklearn.decomposition import PCA

        points = PCA(2, svd_solver="full").fit_transform(stacked.reshape(-1, stacked.shape[2]))
    else:
        from sklearn.manifold import TSNE

        wanted = min(stacked.shape[1], max(1, TSNE_POINTS // len(stacked)))
        items = np.sort(np.random.default_rng(0).choice(stacked.shape[1], wanted, replace=False))
        rows = stacked[:, items].reshape(-1, stacked.shape[2])
        points = TSNE(2, init="pca", perplexity=min(30.0, (len(rows) - 1) / 3), random_state=0).fit_transform(rows)
    *found, shared = points.reshape(len(stacked), -1, 2)
    return dict(zip(tables.markets, found, strict=True)), shared


def draw_tables(tables: ItemTables, names: dict[int, str], picture: Picture, folder: Path) -> None:
    """Write tables.png and tables.pdf: a colour a market's item table, the global table in black.

    Args:
        tables: Tables of one width.
        names: Names of the markets.
        picture: See :func:`project`.
        folder: Where to write.
    """
    from matplotlib.figure import Figure

    points, shared = project(tables, picture)
    figure = Figure(figsize=(6, 5), layout="constrained")
    panel = figure.subplots()
    for number, (market, xy) in enumerate(points.items()):
        # Ten colours, then other marks.
        colour, mark = f"C{number % 10}", "o^sv"[number // 10 % 4]
        panel.scatter(xy[:, 0], xy[:, 1], s=6, alpha=0.5, linewidths=0, label=names[market], color=colour, marker=mark)
    panel.scatter(shared[:, 0], shared[:, 1], s=6, alpha=0.7, linewidths=0, color="black", label="G")
    panel.set(title=f"item tables, {'PCA' if picture == 'pca' else 't-SNE'}", xticks=[], yticks=[])
    panel.legend(markerscale=3, fontsize="small")
    save(figure, folder, "tables")


def save(figure: "Figure", folder: Path, name: str, kinds: Sequence[str] = ("png", "pdf")) -> None:
    """Write a figure as <folder>/<name>.<kind>, of each kind.

    It is a figure of its own, without pyplot: it draws with Agg whatever the person's backend is.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    for kind in kinds:
        with replacing(folder / f"{name}.{kind}") as temporary:
            figure.savefig(temporary, format=kind, dpi=150)
            temporary.chmod(0o644)
