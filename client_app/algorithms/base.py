"""What every client does: train on its own rows, upload, take the server's answer, rank its own users.

A strategy overrides the hooks at the end of the class (what is shared, `receive`, `upload`, `apply`, a term of the
loss); the order of things, the best model and the stale-answer checks stand here once.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from client_app.state import ClientState
from fedhur_app.config import Settings
from fedhur_app.data.shards import Shard, UserItems
from fedhur_app.evaluation.ranking import METRICS, NonFiniteScoresError, RankSums, UserRanks, rank_users
from fedhur_app.finite import all_finite
from fedhur_app.models.als import train_implicit
from fedhur_app.models.base import Recommender
from fedhur_app.models.factory import initial_parameters, recommender
from fedhur_app.models.mf import MatrixFactorization
from fedhur_app.models.negatives import NegativeSampler
from fedhur_app.models.refit import refit_users
from fedhur_app.models.training import (
    DivergedError,
    ExtraGradient,
    TrainingOptions,
    TrainingReport,
    train_locally,
)
from fedhur_app.protocol import Arrays, Content
from fedhur_app.seeding import torch_generator


class StaleRequestError(RuntimeError):
    """The server asks for a later stage of a round whose earlier stage this client did not see."""


class ClientAlgorithm:
    """One client in one message.

    Args:
        settings: The run's settings, as the server sent them.
        shard: The client's rows.
        state: Its private state; changed in place, kept by the caller only if the stage succeeds.
        round_: Round of the message.
        device: Where to compute.
    """

    # Whether a batch steps the user parameters first and the rest afterwards (two gradients a batch).
    alternate = False

    def __init__(self, settings: Settings, shard: Shard, state: ClientState, round_: int, device: torch.device) -> None:
        self.settings = settings
        self.shard = shard
        self.state = state
        self.round = round_
        self.device = device
        self.report: TrainingReport | None = None
        # On a device the state holds a secret that the server does not know: without it, whoever knows the run's seed
        # could regenerate the first tables and read interactions out of an upload. In a simulation it is 0.
        self.seed = settings.seed | state.numbers.get("secret", 0) << 32
        if "model" not in state.arrays:
            state.arrays["model"] = self.initial_model()
            start = {"client": shard.client, "trained_round": 0, "finished_round": 0, "best_round": 0}
            state.numbers = start | state.numbers

    # --- stages -------------------------------------------------------------------------------------------------

    def items(self, request: Content) -> Content:
        """Stage 1: local training, upload of what the strategy shares."""
        self.keep_best(int(request.fields.get("best_round", 0)))
        self.receive(request)
        fields = self.train()
        self.state.numbers["trained_round"] = self.round
        return Content(fields, self.upload())

    def utility(self, request: Content) -> Content:
        """Stage 2 of strategies that have one."""
        raise NotImplementedError(f"{type(self).__module__} has no utility stage")

    def personalize(self, request: Content) -> Content:
        """Last stage: take the server's answer."""
        self.require_trained()
        return Content(self.apply(request))

    def finish(self) -> dict[str, float | int]:
        """End of the round: rank the validation rows; returns sums over the client's users."""
        self.check_finite("after the last stage")
        self.state.numbers["finished_round"] = self.round
        ranks = self.rank("valid", self.state.arrays["model"])
        sums = ranks.sums()
        if self.settings.evaluation.selection == "client":
            self._keep_own_best(sums)
        fields = _prefixed("valid", sums)
        if self.settings.evaluation.per_client and self.settings.centralised and self.shard.markets is not None:
            markets = self.shard.markets[ranks.users]
            for market in np.unique(self.shard.markets):
                fields |= _prefixed(f"market.{market}", ranks.of(markets == market).sums())
        return fields

    def test(self, request: Content) -> Content:
        """Rank the test rows with the model of the best validation round."""
        best_round = int(request.fields["best_round"])
        ranks = self.rank("test", self.best_model(best_round))
        reply = Content(_prefixed("test", ranks.sums()))
        if self.settings.evaluation.per_user:
            columns = {
                "user": self.shard.users[ranks.users],
                "client": np.full(len(ranks.users), self.shard.client),
                "interactions": self.shard.train.counts[ranks.users],
            }
            if self.shard.markets is not None:
                columns["market"] = self.shard.markets[ranks.users]
            columns |= {name: getattr(ranks, name) for name in METRICS}
            reply.arrays["users"] = {name: torch.from_numpy(column) for name, column in columns.items()}
        return reply

    # --- local model --------------------------------------------------------------------------------------------

    def initial_model(self) -> dict[str, Tensor]:
        """Parameters before the first round, for MF `users` (U x d) and `items` (I x d)."""
        client = self.shard.client
        # Equal tables for all clients need the seed that all know.
        items = (self.settings.seed, 0) if self.settings.model.same_init else (self.seed, client)
        return initial_parameters(
            self.settings.model,
            self.shard.n_users,
            self.shard.n_items,
            user_generator=torch_generator(self.seed, "init-users", client=client),
            item_generator=torch_generator(items[0], "init-items", client=items[1]),
            network_generator=torch_generator(self.settings.seed, "init-network"),
        )

    def build(self, parameters: dict[str, Tensor]) -> Recommender:
        """The recommender around copies of `parameters` on this client's device."""
        copies = {name: tensor.to(self.device, copy=True) for name, tensor in parameters.items()}
        return recommender(self.settings.model, self.settings.train.loss, copies, self.shard.train)

    def train(self) -> dict[str, float | int]:
        """Local epochs on the training rows (eq. 1); returns the counts and losses that the server may know."""
        settings = self.settings.train
        if settings.solver == "als":
            return self._train_closed_form()
        options = TrainingOptions(
            epochs=settings.epochs,
            tolerance=settings.tolerance,
            batch_size=settings.batch_size,
            optimizer=settings.optimizer,
            lr=settings.lr * settings.lr_decay ** (self.round - 1),
            item_lr_factor=settings.item_lr_factor,
            weight_decay=settings.weight_decay,
            negatives=settings.negatives,
            keep_optimizer_state=settings.keep_optimizer_state,
        )
        model = self.build(self.state.arrays["model"])
        self.report = train_locally(
            model,
            self.shard.train,
            NegativeSampler(self.shard.train, self.shard.n_items),
            options,
            torch_generator(self.seed, "training", self.round, self.shard.client),
            self.state.arrays.get("optimizer"),
            self.extra_term(),
            alternate=self.alternate,
        )
        self.set_model(model.parameters())
        if settings.keep_optimizer_state:
            moments = self.report.optimizer_state
            self.state.arrays["optimizer"] = {key: value.cpu() for key, value in moments.items()}
        return _told(self.report)

    def _train_closed_form(self) -> dict[str, float | int]:
        als = self.settings.als
        users, items, self.report = train_implicit(
            self.state.arrays["model"]["items"].to(self.device),
            self.shard.train,
            self.settings.train.epochs,
            als.unobserved_weight,
            als.l2,
            anchored=als.anchor == "received",
        )
        if self.report.examples:
            self.set_model({"users": users, "items": items})
        return _told(self.report)

    def set_model(self, parameters: dict[str, Tensor]) -> None:
        """Replace (some of) the model's parameters."""
        model = self.state.arrays["model"]
        self.state.arrays["model"] = model | {name: value.cpu() for name, value in parameters.items()}

    def require_trained(self) -> None:
        """Refuse a later stage of a round in which this client did not train (it was restarted or cut off)."""
        trained = self.state.numbers["trained_round"]
        if trained != self.round:
            raise StaleRequestError(
                f"client {self.shard.client}: round {self.round} asks for a later stage, but this client last "
                f"trained in round {trained}; it joins again in the next round"
            )

    def check_finite(self, when: str) -> None:
        """Stop before a NaN or an infinity reaches the server or the disk."""
        for name, table in self.state.arrays["model"].items():
            if not all_finite(table):
                raise DivergedError(f"the table {name!r} is not finite {when}")

    # --- best model and ranking ---------------------------------------------------------------------------------

    def keep_best(self, best_round: int) -> None:
        """Before training: remember the present model if the server's best round is this model's.

        The present model is as it was at the end of `best_round` exactly if this client has not trained since. What
        was kept of an earlier best round stays where the present model never got the server's last answer.
        """
        if self.settings.evaluation.selection == "client":
            return
        numbers = self.state.numbers
        after = numbers["best_round"] < best_round and numbers["trained_round"] <= best_round
        if after and not self._is_gone(best_round):
            self.state.arrays["best"] = dict(self._last_whole_model())
            numbers["best_round"] = best_round

    def _last_whole_model(self) -> dict[str, Tensor]:
        """The present model, or the kept one if the present one comes fresh from local training.

        A table that only this client's rows have formed ranks far worse than what the last stage makes of it; a client
        that missed that stage is better served by an earlier round.
        """
        numbers, model = self.state.numbers, self.state.arrays["model"]
        whole = numbers["finished_round"] == numbers["trained_round"]
        return model if whole else self.state.arrays.get("best", model)

    def _is_gone(self, round_: int) -> bool:
        """Whether a device lost its model of a round, having trained since the state that it went on from."""
        return self.state.numbers.get("kept", 0) < round_ <= self.state.numbers.get("lost", 0)

    def _keep_own_best(self, sums: RankSums) -> None:
        """After ranking: keep the model if its validation is this client's best; the latest, where it has none."""
        best = self.state.arrays.get("best_validation", {"ndcg": torch.tensor(-1.0, dtype=torch.float64)})
        if sums.users == 0 or sums.ndcg > float(best["ndcg"]):
            self.state.arrays["best"] = dict(self.state.arrays["model"])
            self.state.arrays["best_validation"] = {"ndcg": torch.tensor(sums.ndcg, dtype=torch.float64)}
            self.state.numbers["best_round"] = self.round

    def best_model(self, best_round: int) -> dict[str, Tensor]:
        """The model as it was at the end of `best_round`, or of the client's own best round.

        A client that missed the last stage of the round has that of the best round before, if it kept one.
        """
        if self.settings.evaluation.selection == "client":
            return self.state.arrays.get("best", self.state.arrays["model"])
        numbers = self.state.numbers
        if self._is_gone(best_round):
            raise StaleRequestError(
                f"client {self.shard.client}: the model of round {best_round} was asked for, this client lost what it "
                f"had learnt after round {numbers['kept']}"
            )
        if numbers["trained_round"] <= best_round:
            return self._last_whole_model()
        if numbers["best_round"] != best_round:
            raise StaleRequestError(
                f"client {self.shard.client}: the model of round {best_round} was asked for, this client kept that "
                f"of round {numbers['best_round']}"
            )
        return self.state.arrays["best"]

    def scores(self, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Function from users (n,) to raw scores (n, I), with closed-form user vectors where settings say so."""
        model = self.build(parameters)
        refit = self.settings.user_refit
        if refit.enabled:
            items = model.item_vectors()
            assert items is not None, "settings refuse user_refit for models whose scores are no dot products"
            users = refit_users(items, self.shard.train, refit.unobserved_weight, refit.l2)
            return MatrixFactorization(users, items).scores
        return model.scores

    def rank(self, split: str, parameters: dict[str, Tensor]) -> UserRanks:
        """Ranking metrics of the client's users; test ranking also masks validation items."""
        truth: UserItems = getattr(self.shard, split)
        seen = [self.shard.train] if split == "valid" else [self.shard.train, self.shard.valid]
        evaluation = self.settings.evaluation
        try:
            return rank_users(
                self.scores(parameters),
                seen,
                truth,
                k=evaluation.k,
                n_items=self.shard.n_items,
                batch_bytes=int(evaluation.batch_mib * 2**20),
            )
        except NonFiniteScoresError as error:
            raise DivergedError(str(error)) from error

    # --- hooks of a strategy ------------------------------------------------------------------------------------

    def shared(self) -> list[str]:
        """Names of the parameters that leave the device; by default all that do not belong to its users."""
        return [name for name in self.state.arrays["model"] if not name.startswith("user")]

    def extra_term(self) -> ExtraGradient | None:
        """A term to add to the loss of local training; by default none."""
        return None

    def receive(self, request: Content) -> None:
        """Take what came with the call to train; by default the shared parameters, where they came."""
        if "table" in request.arrays:
            self.set_model(request.record("table"))

    def upload(self) -> Arrays:
        """What leaves the device after training; by default the shared parameters, for MF the item table E_k."""
        return {"table": {name: self.state.arrays["model"][name] for name in self.shared()}}

    def apply(self, request: Content) -> dict[str, float | int]:
        """Take the last answer of the round; returns fields for the reply. By default it replaces what is shared."""
        self.set_model(request.record("table"))
        return {}


def _told(report: TrainingReport) -> dict[str, float | int]:
    return {"examples": report.examples, "loss_sum": report.loss_sum, "skipped_users": report.skipped_users}


def _prefixed(split: str, sums: RankSums) -> dict[str, float | int]:
    return {f"{split}.{name}": value for name, value in sums.to_dict().items()}
