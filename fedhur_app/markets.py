"""`fedhur markets`: what sharing does to each market of a data set, against every market alone.

The machinery is that of `fedhur compare`; here are the names of tuned strategies, the fixed changes and the reference.
"""

from collections.abc import Sequence
from functools import partial

from fedhur_app import compare
from fedhur_app.config import OWN_DATA, available
from fedhur_app.data.experiment import load_interactions_of
from fedhur_app.reporting.figures import Picture
from fedhur_app.reporting.markets import trains_alone, write_market_report
from fedhur_app.reporting.outcomes import Run
from fedhur_app.sweep import OF_EVERY_RUN, Say, SweepError, set_items

# The picture of the item tables needs the last checkpoint.
CHANGES = (
    *set_items(OF_EVERY_RUN | {"server.checkpoint_every": 1}),
    "evaluation.per_user=true",
    "evaluation.per_client=true",
)


def command(picture: Picture) -> compare.Command:
    """What `fedhur markets` does otherwise than `fedhur compare`.

    Args:
        picture: How item tables come into the plane.
    """
    return compare.Command("markets", CHANGES, partial(write_market_report, picture=picture))


def tuned(dataset: str, strategies: Sequence[str], say: Say) -> list[str]:
    """Each name as `tuned/<dataset>/<name>` where there is such a strategy, as it is where not.

    Args:
        dataset: A file in conf/dataset/.
        strategies: Files in conf/strategy/.
        say: Told which have none.
    """
    known = set(available("strategy"))
    names = {name: f"tuned/{dataset}/{name}" for name in strategies}
    if missing := [name for name, tuned_name in names.items() if tuned_name not in known]:
        say(f"not tuned on {dataset}, with their own settings: {', '.join(missing)}")
    return [names[name] if names[name] in known else name for name in strategies]


def check(runs: Sequence[Run]) -> None:
    """Refuse runs that say nothing about markets, before any of them is made.

    Args:
        runs: What `compare.plan` gave.

    Raises:
        SweepError: The data set has no markets; not exactly one strategy trains every market alone.
        DataError: The data set cannot be fetched.
    """
    settings = runs[0].settings
    if settings.dataset.name == OWN_DATA or load_interactions_of(settings).user_markets is None:
        raise SweepError(f"data set {runs[0].dataset} has no markets: choose one that has, or use `fedhur compare`")
    alone = list(dict.fromkeys(run.strategy for run in runs if trains_alone(run.settings)))
    if len(alone) != 1:
        strategies = dict.fromkeys(run.strategy for run in runs)
        found = f"{', '.join(alone)} are {len(alone)}" if alone else f"none of {', '.join(strategies)} is one"
        raise SweepError(
            f"changes are against one strategy that trains every market alone, {found}: name exactly one, such as "
            "independent"
        )
