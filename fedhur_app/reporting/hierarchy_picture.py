"""Two pictures of how FedHUR sees items and clients: a tree of item groups, and relation bands (the paper's figure 2).

The tree shows example titles; the bands show, for an item, who gives how much on every level. Both take plain arrays;
`studies/workers/relations.py` gets them out of a run. matplotlib is imported where it is used (a second).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhur_app.files import replacing
from fedhur_app.relations.hierarchy import Hierarchy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGEST = 36  # of a title, in letters
_ROW = 0.32  # inches a line of the tree takes


@dataclass(frozen=True)
class Group:
    """A group of items in the tree.

    Attributes:
        items: Number of its items.
        examples: Titles of some of them, the most popular first; of groups that are not split further.
        children: The largest groups it is split into.
        left_out: Number of further groups it is split into.
    """

    items: int
    examples: list[str] = field(default_factory=list)
    children: list["Group"] = field(default_factory=list)
    left_out: int = 0


def example_tree(
    hierarchy: Hierarchy,
    titles: Sequence[str],
    popularity: np.ndarray,
    shown: Sequence[int] = (4, 2, 2),
    examples: int = 3,
) -> Group:
    """The largest groups of every level, with the most popular titles of each finest group.

    Args:
        hierarchy: Of I items.
        titles: I titles.
        popularity: (I,) numbers of interactions.
        shown: Groups to show of each parent, one number a level; the levels beyond are left out.
        examples: Titles to show of a group.

    Raises:
        ValueError: Numbers of items differ.
    """
    if not hierarchy.n_items == len(popularity) == len(titles):
        raise ValueError(
            f"the hierarchy has {hierarchy.n_items} items, but there are {len(titles)} titles and counts of "
            f"{len(popularity)} items"
        )
    labels = [level.labels.cpu().numpy() for level in hierarchy.levels]
    return _group(labels, np.arange(len(titles)), 0, titles, popularity, shown, examples)


def _group(
    labels: list[np.ndarray],
    items: np.ndarray,
    level: int,
    titles: Sequence[str],
    popularity: np.ndarray,
    shown: Sequence[int],
    examples: int,
) -> Group:
    if level == min(len(labels), len(shown)):
        known = items[np.argsort(-popularity[items], kind="stable")[:examples]]
        return Group(len(items), [titles[item] for item in known])
    numbers, counts = np.unique(labels[level][items], return_counts=True)
    largest = numbers[np.argsort(-counts, kind="stable")[: shown[level]]]
    parts = [items[labels[level][items] == number] for number in largest]
    children = [_group(labels, part, level + 1, titles, popularity, shown, examples) for part in parts]
    return Group(len(items), [], children, len(numbers) - len(largest))


def draw_tree(tree: Group, path: Path) -> None:
    """Draw a tree from left to right, example titles at its right.

    Args:
        tree: What :func:`example_tree` gave.
        path: The file; its suffix (.png, .svg, .pdf) decides the form.
    """
    from matplotlib.figure import Figure

    levels, lines = _depth(tree), _lines(tree)
    figure = Figure(figsize=(1.2 * levels + 6.5, max(2.0, _ROW * lines + 0.4)), layout="constrained")
    panel = figure.subplots()
    _draw_group(panel, tree, 0, 0.0)
    panel.set(xlim=(-0.6, levels + 5.2), ylim=(lines, -1))
    panel.set_axis_off()
    _save(figure, path)


def _depth(group: Group) -> int:
    return max((1 + _depth(child) for child in group.children), default=0)


def _lines(group: Group) -> int:
    return sum(map(_lines, group.children)) + bool(group.left_out) if group.children else 1


def _draw_group(panel: "Axes", group: Group, level: int, top: float) -> float:
    """Draw a group from line `top` on; gives the height of its middle."""
    at, places = top, []
    for child in group.children:
        places.append(_draw_group(panel, child, level + 1, at))
        at += _lines(child)
    middle = (places[0] + places[-1]) / 2 if places else top
    for place in places:
        half = level + 0.5
        panel.plot([level, half, half, level + 1], [middle, middle, place, place], color="#999999", lw=0.8, zorder=1)
    if group.left_out:
        panel.text(level + 1, at, f"and {group.left_out} more", color="#666666", va="center", ha="center", fontsize=8)
    box = {"boxstyle": "round", "facecolor": "#dcebf7", "edgecolor": "#0072B2", "linewidth": 0.6}
    panel.text(level, middle, str(group.items), va="center", ha="center", fontsize=8, bbox=box)
    if group.examples:
        texts = [title if len(title) <= _LONGEST else f"{title[: _LONGEST - 1]}…" for title in group.examples]
        panel.text(level + 0.35, middle, _plain("  ·  ".join(texts)), va="center", fontsize=8)
    return middle


def _plain(text: str) -> str:
    """A title may hold dollar signs, which matplotlib takes for formulas."""
    return text.replace("$", r"\$")


def relation_bands(hierarchy: Hierarchy, alphas: Sequence[np.ndarray], item: int, target: int) -> np.ndarray:
    """How much each client gives to a target for an item: (L, K), a row a level, of the block that holds the item.

    Args:
        hierarchy: Of I items, L levels.
        alphas: One array a level: (B, K, K) weights of its B blocks, targets in rows (eq. 22).
        item: Number of the item.
        target: Row of the client that is helped.

    Raises:
        ValueError: Not one array a level, or one with another number of blocks.
    """
    blocks = [len(level.members) for level in hierarchy.levels]
    if [len(alpha) for alpha in alphas] != blocks:
        raise ValueError(f"the hierarchy has {blocks} blocks by level, the weights {[len(alpha) for alpha in alphas]}")
    # The block of a level holds the children of one group of the level above; level 1 has one block.
    above = [0, *(int(level.labels[item]) for level in hierarchy.levels[:-1])]
    return np.stack([alpha[block][target] for alpha, block in zip(alphas, above, strict=True)])


def draw_bands(bands: Mapping[str, np.ndarray], clients: Sequence[int], target: int, path: Path) -> None:
    """Draw a panel an item: a band a level, a column a client, darker where the client gives more.

    Args:
        bands: Title -> what :func:`relation_bands` gave, all of the same target.
        clients: Numbers of the K clients.
        target: Row of the client that is helped; its own column is marked.
        path: The file; its suffix (.png, .svg, .pdf) decides the form.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    levels = max(len(rows) for rows in bands.values())
    figure = Figure(figsize=(9, (0.42 * levels + 1.0) * len(bands) + 0.3), layout="constrained")
    panels = figure.subplots(len(bands), squeeze=False)[:, 0]
    highest = max(float(rows.max()) for rows in bands.values())
    for panel, (title, rows) in zip(panels, bands.items(), strict=True):
        image = panel.imshow(rows, aspect="auto", cmap="Blues", vmin=0, vmax=highest, interpolation="nearest")
        panel.set(title=_plain(title), ylabel="level", yticks=range(len(rows)))
        panel.set_yticklabels([str(level) for level in range(1, len(rows) + 1)])
        panel.set_xticks([])
        panel.plot([target], [-0.5], marker="v", color="#D55E00", clip_on=False, markersize=7)
    columns = panels[-1].xaxis
    columns.set_major_locator(MaxNLocator(nbins=12, integer=True))
    columns.set_major_formatter(lambda place, _: str(clients[int(place)]) if 0 <= place < len(clients) else "")
    panels[-1].set_xlabel(f"client that gives (client {clients[target]}, which is helped, has the mark)")
    figure.colorbar(image, ax=list(panels), label="weight α")
    _save(figure, path)


def _save(figure: "Figure", path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=150)
        temporary.chmod(0o644)
