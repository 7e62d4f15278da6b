"""The rounds of every strategy: sampling, stages, pooled validation, early stopping, checkpoints, the final test.

A strategy names its stages and gives, for each, what is sent (`configure_<stage>`) and what is done with the answers
(`aggregate_<stage>`). Flower's own `Strategy` fixes one train and one evaluate exchange a round, so this class keeps
its form (`strategy.start(grid)`) without inheriting from it.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from flwr.serverapp import Grid
from torch import Tensor

from fedhur_app.config import Settings
from fedhur_app.evaluation.ranking import RankSums
from fedhur_app.parallel import cores, threads
from fedhur_app.protocol import Content, Stage
from fedhur_app.seeding import numpy_generator
from server_app.checkpoint import RunFolder
from server_app.stages import PerClient, StageResult, StageRunner, say


@dataclass(frozen=True)
class Fleet:
    """Who takes part, from the handshake.

    Attributes:
        nodes: Client number -> Flower node id.
        n_items: Items of the catalogue that all clients share.
        valid_users: Client number -> its users with validation items.
        interactions: Client number -> its training interactions.
        attributes: (I, a) 0 and 1, what the catalogue says about items, such as genres; None if nothing.
        run: Name of the run, where nodes keep their own state and must know what it belongs to; "" in a simulation.
    """

    nodes: dict[int, int]
    n_items: int
    valid_users: dict[int, int]
    interactions: dict[int, int] = field(default_factory=dict)
    attributes: Tensor | None = None
    run: str = ""

    @property
    def clients(self) -> list[int]:
        """Client numbers in order."""
        return sorted(self.nodes)


@dataclass
class Progress:
    """What the rounds have led to so far; part of the checkpoint."""

    round: int = 0
    best_round: int = 0
    best_value: float = -1.0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    sums: dict[int, dict[str, float]] = field(default_factory=dict)
    # Client -> the last round in which it is known to have trained; a resume compares it with what was restored.
    trained: dict[int, int] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """For JSON, whose keys are text."""
        return {
            **self.__dict__,
            "sums": {str(client): sums for client, sums in self.sums.items()},
            "trained": {str(client): round_ for client, round_ in self.trained.items()},
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Progress":
        """From JSON."""
        numbered = {name: {int(client): value for client, value in plain[name].items()} for name in ("sums", "trained")}
        return cls(**{**plain, **numbered})


@dataclass(frozen=True)
class Outcome:
    """What a finished run reports."""

    rounds: int
    best_round: int
    validation: dict[str, float | None]
    test: dict[str, float | None]
    users_evaluated: int
    bytes_up: int
    bytes_down: int
    seconds: float
    absent_at_test: dict[int, str]
    client_memory_mib: float | None  # the largest peak of a client's process, where clients can tell


class Roll(Protocol):
    """Who takes part, where that can change between rounds (server_app/handshake.py)."""

    def before_round(self, runner: StageRunner, round_: int) -> dict[int, str]:
        """Let nodes join that are lost or new.

        Args:
            runner: Sends messages; its nodes are the fleet's.
            round_: The round that is about to begin.

        Returns:
            Client -> what it goes on from: "new" or the round of its state.
        """
        ...


class StagedStrategy:
    """Base of the server halves.

    Args:
        settings: The run's settings.
        fleet: Who takes part.
        folder: Where history and checkpoints go; None writes nothing.
    """

    stages: tuple[str, ...] = (Stage.ITEMS, Stage.PERSONALIZE)

    def __init__(self, settings: Settings, fleet: Fleet, folder: RunFolder | None = None) -> None:
        self.settings = settings
        self.fleet = fleet
        self.folder = folder
        self.progress = Progress()
        self.on_round: Callable[[dict[str, Any]], None] | None = None  # takes each line of the history
        self.roll: Roll | None = None  # None: who takes part never changes
        self.joined: dict[int, str] = {}  # before the present round, see Roll
        # Clients that trained since the last checkpoint: their files are older than their state.
        self._unsaved: set[int] = set()
        self._settings_json = settings.for_clients()

    # --- a run --------------------------------------------------------------------------------------------------

    def start(self, grid: Grid) -> Outcome:
        """Run the rounds that are left, then test the best model.

        Raises:
            RunError: The run cannot go on (see server_app/stages.py).
        """
        server = self.settings.server
        trained = self.progress.trained if self.fleet.run else None
        runner = StageRunner(grid, self.fleet.nodes, server.quorum, server.stage_timeout, trained)
        with threads(cores(server.threads)):
            while not self.finished():
                self.call_the_roll(runner)
                self.run_round(runner, self.progress.round + 1)
            if self.progress.round < self.settings.rounds:
                say("early stop: no better validation in %d rounds", self.progress.round - self.progress.best_round)
            self.call_the_roll(runner)
            return self.run_test(runner)

    def call_the_roll(self, runner: StageRunner) -> None:
        """Let nodes join that are lost or new; they then get what they do not hold."""
        if self.roll is None:
            return
        joined = self.roll.before_round(runner, self.progress.round + 1)
        for client in joined:
            self.forget(client)
        self.joined |= joined

    def finished(self) -> bool:
        """Whether the last round was the last: all rounds done, or no better validation for `patience` rounds."""
        done, settings = self.progress.round, self.settings
        if done >= settings.rounds:
            return True
        return done >= settings.min_rounds and done - self.progress.best_round >= settings.patience

    def run_round(self, runner: StageRunner, round_: int) -> None:
        """One round: its stages in order, pooled validation, history, checkpoint."""
        start = time.perf_counter()
        label = self.label(round_)
        save = self.saves(round_)
        clients = self.sample(round_)
        results: list[StageResult] = []
        statistics: dict[str, Any] = {}
        server_seconds: dict[str, float] = {}
        for stage in self.stages:
            clock = time.perf_counter()
            contents = self._hook("configure", stage)(round_, clients)
            last = stage == self.stages[-1]
            requests = self._requests(contents, clients, round_, finish=last, save=save and last)
            waited = time.perf_counter()
            result = runner.call(stage, round_, requests, label)
            answered = time.perf_counter()
            statistics |= self._hook("aggregate", stage)(round_, result.replies) or {}
            for content in result.replies.values():
                content.arrays = {}  # used; 100 tables need not stay in memory for the rest of the round
            server_seconds[stage] = waited - clock + time.perf_counter() - answered
            results.append(result)
            clients = list(result.replies)
        self.close_round(runner, round_, results, statistics, server_seconds, start)

    def label(self, round_: int) -> str:
        """What log lines and errors call a round."""
        return f"round {round_}/{self.settings.rounds}"

    def saves(self, round_: int) -> bool:
        """Whether clients and server write a checkpoint in a round."""
        every = self.settings.server.checkpoint_every
        return bool(self.folder and every and round_ % every == 0)

    def close_round(
        self,
        runner: StageRunner,
        round_: int,
        results: list[StageResult],
        statistics: dict[str, Any],
        server_seconds: dict[str, float],
        start: float,
    ) -> None:
        """Checkpoint, pooled validation, history of a round that began at `start` (`time.perf_counter`)."""
        first = results[0].replies
        self._unsaved |= set(first)
        self.progress.trained |= {client: int(content.fields["round"]) for client, content in first.items()}
        save = self.saves(round_)
        if save:
            self._save_unsaved(runner, round_, self.label(round_), set(results[-1].replies))
        self._finish_round(round_, results, statistics, server_seconds, time.perf_counter() - start, save)

    def sample(self, round_: int) -> list[int]:
        """Clients of this round: all, or a seeded random share of them (at least one)."""
        clients = self.fleet.clients
        if self.settings.fraction_train >= 1.0:
            return clients
        # Rounded first: 0.07 * 100 is a little above 7.
        number = max(1, math.ceil(round(self.settings.fraction_train * len(clients), 9)))
        generator = numpy_generator(self.settings.seed, "participants", round_)
        return sorted(generator.choice(clients, number, replace=False).tolist())

    def run_test(self, runner: StageRunner) -> Outcome:
        """Rank the test rows of all clients with the model of the best round: the only look at the test rows."""
        progress = self.progress
        request = self.request(Content(), progress.round, finish=False, save=False)
        request.fields["best_round"] = progress.best_round
        requests = dict.fromkeys(self.fleet.clients, request)
        result = runner.call(Stage.RANK, progress.round, requests, "test")
        pooled = RankSums.zero(self.settings.evaluation.k)
        for content in result.replies.values():
            pooled = pooled + _sums(content, "test")
        if self.settings.evaluation.per_user and self.folder is not None:
            self.folder.save_users([content.record("users") for content in result.replies.values()])
        return Outcome(
            rounds=progress.round,
            best_round=progress.best_round,
            validation=self._best_validation(),
            test=_means(pooled),
            users_evaluated=int(pooled.users),
            bytes_up=progress.bytes_up,
            bytes_down=progress.bytes_down,
            seconds=progress.seconds + result.seconds,
            absent_at_test=result.absent,
            client_memory_mib=max(
                (
                    float(content.fields["peak_memory_mib"])
                    for content in result.replies.values()
                    if "peak_memory_mib" in content.fields
                ),
                default=None,
            ),
        )

    def resume(self, progress: Progress, arrays: dict[str, np.ndarray]) -> None:
        """Continue after `progress.round` with the arrays of the checkpoint."""
        self.progress = progress
        self.load_state(arrays)

    # --- pieces -------------------------------------------------------------------------------------------------

    def request(self, content: Content, round_: int, *, finish: bool, save: bool) -> Content:
        """`content` with the fields that every request carries."""
        fields: dict[str, Any] = {
            "settings": self._settings_json,
            "round": round_,
            "best_round": self.progress.best_round,
            "finish": finish,
            "save": save,
            "run": self.fleet.run,  # an empty text does not travel
        }
        return Content(fields | content.fields, content.arrays)

    def _requests(
        self,
        contents: Content | Mapping[int, Content],
        clients: list[int],
        round_: int,
        *,
        finish: bool,
        save: bool,
    ) -> Mapping[int, Content]:
        """Requests by client; clients with the same content share one object, which is then encoded once."""
        if isinstance(contents, PerClient):
            each = contents
            return PerClient(each, lambda client: self.request(each[client], round_, finish=finish, save=save))
        if isinstance(contents, Content):
            contents = dict.fromkeys(clients, contents)
        distinct = {id(content): content for content in contents.values()}
        built = {key: self.request(content, round_, finish=finish, save=save) for key, content in distinct.items()}
        return {client: built[id(content)] for client, content in contents.items()}

    def _hook(self, what: str, stage: str) -> Callable[..., Any]:
        hook: Callable[..., Any] = getattr(self, f"{what}_{stage.partition('.')[2]}")
        return hook

    def _save_unsaved(self, runner: StageRunner, round_: int, label: str, saved: set[int]) -> None:
        """Have the other clients that trained since the last checkpoint write their state too.

        They missed the last stage of this round, or took part in rounds before it only.
        """
        missed = sorted(self._unsaved - saved)
        if missed:
            request = self.request(Content(), round_, finish=False, save=True)
            runner.call(Stage.CHECKPOINT, round_, dict.fromkeys(missed, request), label, quorum=0.0)
        self._unsaved = set()

    def _finish_round(
        self,
        round_: int,
        results: list[StageResult],
        statistics: dict[str, Any],
        server_seconds: dict[str, float],
        seconds: float,
        save: bool,
    ) -> None:
        progress, k = self.progress, self.settings.evaluation.k
        self.note_validation(results[-1].replies)
        validation = _means(self._pooled_validation())
        value = validation[f"ndcg@{k}"]
        progress.round = round_
        if value is None:
            # Nobody has validation items: nothing can be chosen, the latest model counts.
            progress.best_round = round_
        elif value > progress.best_value:
            progress.best_round, progress.best_value = round_, value
        up = sum(sum(result.bytes_up.values()) for result in results)
        down = sum(sum(result.bytes_down.values()) for result in results)
        progress.bytes_up += up
        progress.bytes_down += down
        progress.seconds += seconds
        trained = results[0].replies.values()
        examples = sum(int(content.fields.get("examples", 0)) for content in trained)
        loss = sum(float(content.fields.get("loss_sum", 0.0)) for content in trained) / max(examples, 1)
        participants = len(results[0].replies) + len(results[0].absent)
        line = {
            "round": round_,
            "clients": participants,
            "examples": examples,
            "skipped_users": sum(int(content.fields.get("skipped_users", 0)) for content in trained),
            "loss": loss,
            "validation": validation,
            "best_round": progress.best_round,
            **statistics,
            **({"markets": _markets(results[-1].replies)} if self.settings.evaluation.per_client else {}),
            **self._comings(results),
            "stages": {
                result.stage: {
                    "replies": len(result.replies),
                    "absent": {str(client): reason for client, reason in result.absent.items()},
                    "bytes_up": result.bytes_up,
                    "bytes_down": result.bytes_down,
                }
                for result in results
            },
            "bytes_up_per_client": up / participants,
            "bytes_down_per_client": down / participants,
            "seconds": {
                "round": seconds,
                "stages": {result.stage: result.seconds for result in results},
                "server": server_seconds,
            },
        }
        if self.folder is not None:
            self.folder.append_history(line)
            if save:
                self.folder.save_server(progress.to_plain(), self.state())
        if self.on_round:
            self.on_round(line)
        quality = "no client has validation items"
        if value is not None:
            quality = f"validation ndcg@{k} {value:.4f} (best {progress.best_value:.4f}, round {progress.best_round})"
        say("round %d/%d | %s | loss %.4f | %.1f s", round_, self.settings.rounds, quality, loss, seconds)

    def _comings(self, results: list[StageResult]) -> dict[str, dict[str, Any]]:
        """Of a line of the history: who joined before the round, and who was restarted without losing anything."""
        restored = {
            str(client): int(content.fields["restored"])
            for result in results
            for client, content in result.replies.items()
            if "restored" in content.fields
        }
        if restored:
            say("restarted, going on from their own disks: %s", ", ".join(f"client {client}" for client in restored))
        joined = {str(client): how for client, how in self.joined.items()}
        self.joined = {}
        return {name: who for name, who in (("joined", joined), ("restored", restored)) if who}

    def note_validation(self, replies: dict[int, Content]) -> None:
        """Each client's latest sums or, where every client keeps the model of its own best round, its best ones."""
        for client, content in replies.items():
            before, sums = self.progress.sums.get(client), _sums(content, "valid")
            keeps = self.settings.evaluation.selection == "client" and before is not None and sums.users > 0
            if not keeps or sums.ndcg > RankSums.from_dict(before or {}).ndcg:
                self.progress.sums[client] = sums.to_dict()

    def judged(self) -> list[int]:
        """Clients whose validation decides which round is the best: all."""
        return self.fleet.clients

    def _pooled_validation(self) -> RankSums:
        """Sums over clients, as :meth:`note_validation` keeps them; zeros for those who have not taken part yet."""
        k = self.settings.evaluation.k
        pooled = RankSums.zero(k)
        for client in self.judged():
            latest = self.progress.sums.get(client)
            unseen = {**RankSums.zero(k).to_dict(), "users": float(self.fleet.valid_users[client])}
            pooled = pooled + RankSums.from_dict(latest or unseen)
        return pooled

    def _best_validation(self) -> dict[str, float | None]:
        if self.folder is not None:
            for line in self.folder.read_history(self.progress.round):
                if line["round"] == self.progress.best_round:
                    return dict(line["validation"])
        return {f"ndcg@{self.settings.evaluation.k}": self.progress.best_value}

    # --- hooks of a strategy ------------------------------------------------------------------------------------

    def configure_items(self, round_: int, clients: list[int]) -> Content | dict[int, Content]:
        """What goes down with the call to train; by default nothing."""
        return Content()

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """Use the uploads; may return statistics for the history."""
        return None

    def configure_personalize(self, round_: int, clients: list[int]) -> Content | Mapping[int, Content]:
        """The last answer of the round."""
        raise NotImplementedError(f"{type(self).__module__} does not say what clients get back")

    def aggregate_personalize(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """Use what clients report about the last stage; may return statistics for the history."""
        return None

    def forget(self, client: int) -> None:
        """A client joined: what it was sent before, it may hold no longer."""

    def state(self) -> dict[str, np.ndarray]:
        """Arrays that a resume needs, beyond the progress of the rounds."""
        return {}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of :meth:`state`."""


def _means(sums: RankSums) -> dict[str, float | None]:
    """Means over users; None (null in JSON) where there is no user to take a mean over."""
    return {name: value if sums.users else None for name, value in sums.means().items()}


def _markets(replies: dict[int, Content]) -> dict[str, dict[str, float | None]]:
    """Validation of every market: of every client, or of the markets that a client with several tells apart."""
    markets: dict[str, dict[str, float | None]] = {}
    for client, content in replies.items():
        told = sorted({name.split(".")[1] for name in content.fields if name.startswith("market.")}, key=int)
        for name, prefix in [(market, f"market.{market}") for market in told] or [(str(client), "valid")]:
            sums = _sums(content, prefix)
            markets[name] = {"users": sums.users, **_means(sums)}
    return markets


def _sums(content: Content, split: str) -> RankSums:
    prefix = f"{split}."
    return RankSums.from_dict(
        {name.removeprefix(prefix): value for name, value in content.fields.items() if name.startswith(prefix)}
    )
