"""A run whose last round is drawn: the hierarchy with example titles, and who helps one client for two items.

Beside the ordinary run folder: `tree.png`, `bands.png` and `groups.csv` (groups and listened-to clients by level).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedhur_app.files import write_text
from fedhur_app.reporting.hierarchy_picture import draw_bands, draw_tree, example_tree, relation_bands
from fedhur_app.reporting.tables import to_csv
from fedhur_app.studies.workers.in_process import failures_written, parser, run_config
from fedhur_app.studies.workers.relations import Relations, watched_run


def two_items(relations: Relations) -> tuple[int, int]:
    """The most popular item, and the most popular one of another group on the first level (if there is one)."""
    order = np.argsort(-relations.popularity, kind="stable")
    groups = relations.hierarchy.levels[0].labels.numpy()
    first = int(order[0])
    return first, next((int(item) for item in order if groups[item] != groups[first]), int(order[-1]))


def effective_peers(alpha: np.ndarray) -> float:
    """Mean over blocks and targets of the exponential of the weights' entropy: how many clients are listened to.

    Args:
        alpha: (B, K, K) weights, targets in rows.
    """
    logarithm = np.log(np.where(alpha > 0, alpha, 1.0))
    return float(np.exp(-(alpha * logarithm).sum(axis=-1)).mean())


def draw(relations: Relations, target: int, folder: Path) -> None:
    """Write the pictures and groups.csv.

    Args:
        relations: Of one round.
        target: Row of the client that is helped.
        folder: Where.
    """
    hierarchy = relations.hierarchy
    draw_tree(example_tree(hierarchy, relations.titles, relations.popularity), folder / "tree.png")
    bands = {
        relations.titles[item]: relation_bands(hierarchy, relations.alphas, item, target)
        for item in two_items(relations)
    }
    draw_bands(bands, relations.clients, target, folder / "bands.png")
    lines = [
        [number, level.n_groups, len(level.members), effective_peers(alpha)]
        for number, (level, alpha) in enumerate(zip(hierarchy.levels, relations.alphas, strict=True), 1)
    ]
    write_text(folder / "groups.csv", to_csv(["level", "groups", "blocks", "effective_peers"], lines))


def main(words: Sequence[str] | None = None) -> None:
    """Run once, then draw."""
    options = parser(__doc__ or "")
    options.add_argument("--target", type=int, default=0, help="row of the client that is helped")
    chosen = options.parse_args(words)
    with failures_written(chosen):
        relations, run, result = watched_run(run_config(chosen))
        draw(relations, chosen.target, run.folder.path)
        run.folder.write_result(result)  # last: a folder with a result is finished


if __name__ == "__main__":
    main()
