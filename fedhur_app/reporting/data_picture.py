"""Picture of a data set as it is shared out. matplotlib is imported where it is used: it takes a second."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhur_app.data.profile import Profile
from fedhur_app.files import replacing
from fedhur_app.seeding import numpy_generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAP_CLIENTS = 100
# Blue and vermilion of Okabe and Ito, which colour-blind people tell apart; also dark and light in grey.
_DARK, _LIGHT = "#0072B2", "#D55E00"


def draw_data(profile: Profile, path: Path) -> None:
    """Draw client sizes, popularity, overlap of clients and interactions of users.

    Args:
        profile: What to draw.
        path: The file; its suffix (.png, .svg, .pdf) decides the form.
    """
    # A figure of its own, without pyplot: it draws whatever the person's backend is.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 2, width_ratios=(1, 1.4))
    _client_sizes(figure.add_subplot(grid[0, 0]), profile)
    _user_sizes(figure.add_subplot(grid[0, 1]), profile)
    _popularity(figure.add_subplot(grid[1, 0]), profile)
    _popularity_share(figure.add_subplot(grid[2, 0]), profile)
    _overlap(figure.add_subplot(grid[1:, 1]), profile)
    users, items, clients = len(profile.user_rows), len(profile.item_rows), len(profile.client_users)
    rows = int(profile.client_rows.sum())
    figure.suptitle(f"{profile.dataset}: {users} users, {items} items, {rows} interactions, {clients} clients")
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=150)
        temporary.chmod(0o644)


def _client_sizes(panel: "Axes", profile: Profile) -> None:
    """Users and training interactions of the clients, each from the largest to the smallest."""
    place = np.arange(1, len(profile.client_users) + 1)
    for sizes, label, colour, style in (
        (profile.client_rows[:, 0], "training interactions", _DARK, "-"),
        (profile.client_users, "users", _LIGHT, "--"),
    ):
        panel.plot(
            place, np.sort(sizes)[::-1], style, color=colour, label=label, drawstyle="steps-mid", marker=_mark(place)
        )
    # From 0, where a client may be; linear up to 1.
    panel.set_yscale("symlog", linthresh=1)
    panel.set(title="client sizes", xlabel="clients, largest first", ylabel="count", ylim=(0, None))
    panel.legend(fontsize="small")


def _user_sizes(panel: "Axes", profile: Profile) -> None:
    """How many users have how many interactions."""
    rows = profile.user_rows.sum(axis=1)
    top = max(2, int(rows.max()))
    bins = np.unique(np.round(np.geomspace(1, top + 1, 31)).astype(int))
    panel.hist(rows, bins=bins.tolist(), color=_DARK, edgecolor="white", linewidth=0.5)
    panel.axvline(max(1.0, float(np.median(rows))), color=_LIGHT, linestyle="--", label=f"median {np.median(rows):g}")
    panel.set_xscale("log")
    none = int((rows == 0).sum())
    title = "interactions of a user" + (f" ({none} users without any are not shown)" if none else "")
    panel.set(title=title, xlabel="interactions", ylabel="users")
    panel.legend(fontsize="small")


def _popularity(panel: "Axes", profile: Profile) -> None:
    """Interactions of the items by rank, both logarithmic."""
    counts = np.sort(profile.item_rows[:, 1])[::-1]
    counts = counts[counts > 0]
    panel.loglog(np.arange(1, len(counts) + 1), counts, color=_DARK, marker=_mark(counts))
    panel.set(title="popularity", xlabel="item, most popular first", ylabel="interactions")


def _popularity_share(panel: "Axes", profile: Profile) -> None:
    """Share of the interactions that the most popular items hold."""
    counts = np.sort(profile.item_rows[:, 1])[::-1]
    share = np.concatenate([[0], np.cumsum(counts)]) / max(1, counts.sum()) * 100
    panel.plot(np.linspace(0, 100, len(share)), share, color=_DARK, label=profile.dataset)
    panel.plot([0, 100], [0, 100], color="grey", linestyle=":", label="all items equally popular")
    panel.set(xlabel="share of items, most popular first (%)", ylabel="share of interactions (%)")
    panel.set(title="popularity, cumulative", xlim=(0, 100), ylim=(0, 102))
    panel.legend(fontsize="small", loc="lower right")


def _overlap(panel: "Axes", profile: Profile) -> None:
    """Jaccard index of the items of two clients; the diagonal, which is 1, is left out."""
    shown = np.arange(len(profile.compared))
    what = "all clients"
    if len(shown) > MAP_CLIENTS:
        shown = np.sort(numpy_generator(0, "drawn-clients").choice(len(shown), MAP_CLIENTS, replace=False))
        what = f"{MAP_CLIENTS} clients drawn at random"
    values = profile.overlap[np.ix_(shown, shown)].copy()
    np.fill_diagonal(values, np.nan)
    known = values[~np.isnan(values)]
    image = panel.imshow(
        values, cmap="cividis", vmin=0, vmax=max(known.max(initial=0.0), 0.01), interpolation="nearest"
    )
    panel.set_facecolor("lightgrey")
    numbers = profile.compared[shown]
    # Every client where they have names, as far as there is place.
    ticks = np.arange(0, len(shown), -(-len(shown) // (20 if profile.client_names else 5)))
    labels = [profile.client_names[numbers[tick]] if profile.client_names else str(numbers[tick]) for tick in ticks]
    panel.set_xticks(ticks, labels, rotation=45 if profile.client_names else 0)
    panel.set_yticks(ticks, labels)
    panel.set(title=f"overlap of the items that clients train on\n{what}", xlabel="client", ylabel="client")
    panel.figure.colorbar(image, ax=panel, label="Jaccard index (shared / held by either)", shrink=0.8)


def _mark(points: np.ndarray) -> str:
    """A line of few points shows them."""
    return "o" if len(points) <= 12 else ""
