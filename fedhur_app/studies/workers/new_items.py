"""A run in which some items appear only in a later round: their training rows are withheld until then.

The new items are a seeded share of the catalogue. Before the round in which they appear no client holds a training row
of theirs; from that round on all do. Validation and test rows never change. The catalogue is the same in all rounds, so
the items have vectors before, and are drawn as negatives as every item is that a user has no row of: nobody tells the
model that they are new. `--control` withholds nothing and measures the same, for comparison.

After every round the validation rows are ranked, all of them and those of new items alone (among all items; a user's
training rows of the whole data never compete, also while they are withheld, so that rounds can be compared). The test
rows are ranked once, with the model of the best validation round among those since the items have appeared: the
rounds before do not count when that is chosen.

Files: `curves.csv` (round, part, items, users, metric, value), `new-items.csv` (item), and an ordinary run folder.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message

from client_app.algorithms import client_algorithm
from client_app.app import app as client_app
from client_app.state import ClientState, get_place, set_place
from fedhur_app.compute import resolve_device
from fedhur_app.config import ConfigError, Settings
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.shards import PreparedData, Shard, UserItems, load_shard, save_shard, shard_path
from fedhur_app.evaluation.ranking import RankSums, metric_label, rank_sums
from fedhur_app.files import write_text
from fedhur_app.parallel import threads
from fedhur_app.protocol import FIELDS, Stage, with_field
from fedhur_app.reporting.tables import to_csv
from fedhur_app.runtime import Client
from fedhur_app.seeding import numpy_generator
from fedhur_app.studies.workers.in_process import (
    build,
    failures_written,
    parser,
    run_config,
    settings_of_all_rounds,
)

METRICS = ("recall", "ndcg", "mrr")


def choose_items(n_items: int, share: float, seed: int) -> np.ndarray:
    """Numbers of the new items, rising: a seeded share of the catalogue, at least one item.

    Raises:
        ConfigError: A share outside (0, 1).
    """
    if not 0 < share < 1:
        raise ConfigError(f"--share {share}: the share of new items must lie between 0 and 1")
    number = max(1, round(share * n_items))
    return np.sort(numpy_generator(seed, "new items").choice(n_items, number, replace=False))


def round_of_appearance(after: float, rounds: int) -> int:
    """The first round with the new items' rows, when a share of all rounds is over; not the first one.

    Raises:
        ConfigError: A share outside (0, 1), or one round only.
    """
    if not 0 < after < 1 or rounds < 2:
        raise ConfigError(f"--after {after}: items can appear in rounds 2 to {rounds} (rounds), after a share of them")
    return min(max(2, 1 + round(after * rounds)), rounds)


def only(rows: UserItems, wanted: np.ndarray) -> UserItems:
    """The rows of some items; `wanted` (I,) is true for these items."""
    kept = wanted[rows.items]
    return UserItems(np.concatenate([[0], np.cumsum(kept)])[rows.indptr], rows.items[kept])


def write_without(data: PreparedData, new: np.ndarray, folder: Path) -> None:
    """Write the shards of all clients without the training rows of the items for which `new` (I,) is true."""
    for client in range(data.clients):
        shard = load_shard(shard_path(data.folder, client))
        save_shard(shard_path(folder, client), replace(shard, train=only(shard.train, ~new)))


@dataclass
class GrowingClients:
    """The clients, whose rows grow in one round, and what is measured with their models.

    Attributes:
        app: The ClientApp.
        settings: The run's settings.
        before: Folder of the shards before the items appear.
        after: Folder of the shards from then on.
        appear: The round in which they appear.
        new: (I,) true for the new items.
        measured: (round, part, "all" or "new") -> sums over the users of all clients.
    """

    app: Client
    settings: Settings
    before: Path
    after: Path
    appear: int
    new: np.ndarray
    measured: dict[tuple[int, str, str], RankSums] = field(default_factory=dict)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message with the rows of its round, and measure after the last stage of a round and in the test."""
        stage = message.metadata.message_type
        if stage == Stage.HELLO:
            message.content = with_field(message.content, "data", str(self.before))
            return self.app(message, context)
        fields = message.content.config_records[FIELDS]
        round_ = int(fields["round"])  # type: ignore[arg-type]
        folder = self.before if round_ < self.appear else self.after
        set_place(context, get_place(context) | {"data": str(folder)})
        answer = self.app(message, context)
        if stage == Stage.RANK:
            best = int(fields["best_round"])  # type: ignore[arg-type]
            with threads(1):
                self._measure(context, folder, "test", best, best)
        elif fields.get("finish"):
            with threads(1):
                self._measure(context, folder, "valid", round_, None)
        return answer

    def _measure(self, context: Context, folder: Path, part: str, round_: int, best_round: int | None) -> None:
        """Rank one part of a client's rows with its present model, or with that of the best round."""
        client, settings = int(context.node_config["partition-id"]), self.settings
        present, whole = load_shard(shard_path(folder, client)), load_shard(shard_path(self.after, client))
        state = ClientState.from_context(context)
        algorithm = client_algorithm(settings.algorithm)(
            settings, present, state, round_, resolve_device(settings.device)
        )
        model = state.arrays["model"] if best_round is None else algorithm.best_model(best_round)
        scores = algorithm.scores(model)
        seen = [whole.train] if part == "valid" else [whole.train, whole.valid]
        for items, truth in self._truths(whole, part).items():
            sums = rank_sums(scores, seen, truth, settings.evaluation.k, n_items=whole.n_items)
            key = (round_, part, items)
            self.measured[key] = self.measured.get(key, RankSums.zero(settings.evaluation.k)) + sums

    def _truths(self, shard: Shard, part: str) -> dict[str, UserItems]:
        rows: UserItems = getattr(shard, part)
        return {"all": rows, "new": only(rows, self.new)}

    def table(self) -> str:
        """All that was measured, as CSV; the mean over nobody is left out."""
        rows = [
            [round_, part, items, int(sums.users), metric_label(metric, sums.k), getattr(sums, metric) / sums.users]
            for (round_, part, items), sums in sorted(self.measured.items())
            for metric in (METRICS if sums.users else ())
        ]
        return to_csv(["round", "part", "items", "users", "metric", "value"], rows)


def main(words: Sequence[str] | None = None, app: Client | None = None) -> None:
    """Run once; `app` stands in for the ClientApp."""
    options = parser(__doc__ or "")
    options.add_argument("--after", type=float, default=0.33, help="share of the rounds that are over by then")
    options.add_argument("--share", type=float, default=0.1, help="share of the catalogue that is new")
    options.add_argument("--control", action="store_true", help="withhold nothing")
    chosen = options.parse_args(words)
    with failures_written(chosen), tempfile.TemporaryDirectory(prefix="fedhur-new-items-") as place:
        _run(run_config(chosen), chosen.after, chosen.share, chosen.control, Path(place), app)


def _run(config: dict[str, Any], after: float, share: float, control: bool, place: Path, app: Client | None) -> None:
    settings, config = settings_of_all_rounds(config)
    appear = round_of_appearance(after, settings.rounds)
    if settings.evaluation.selection != "pooled":
        raise ConfigError("evaluation.selection must be pooled: the test needs one best round")
    data = prepare_data(settings)
    if data is None:
        raise ConfigError(f"{settings.dataset.name} means rows on devices: a study needs the data here")
    chosen = choose_items(data.n_items, share, settings.seed)
    new = np.zeros(data.n_items, dtype=bool)
    new[chosen] = True
    before = data.folder if control else place
    if not control:
        write_without(data, new, place)
    clients = GrowingClients(app or client_app, settings, before, data.folder, appear, new)
    run = build(settings, config, client=clients, data=data)
    run.strategy.on_round = _forget_best(run.strategy.progress, appear)
    result = run.start({"appear": appear, "share": share, "control": control, "new_items": len(chosen)})
    write_text(run.folder.path / "new-items.csv", "item\n" + "".join(f"{item}\n" for item in chosen))
    write_text(run.folder.path / "curves.csv", clients.table())
    run.folder.write_result(result)


def _forget_best(progress: Any, appear: int) -> Callable[[dict[str, Any]], None]:
    """Called after every round: the rounds before the items appear do not count as the best one."""

    def after_round(line: dict[str, Any]) -> None:
        if line["round"] == appear - 1:
            progress.best_round, progress.best_value = 0, -1.0

    return after_round


if __name__ == "__main__":
    main()
