"""FeCoSR on the server: a global item table G that regularises the markets' models and is nobody's model itself.

`G_i <- G_i + eta sum_k w_k Delta_ki` for every item i over the markets that trained it, the weights summing to 1 over
those (or a coordinate-wise median or trimmed mean of the differences).
"""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhur_app.config import JoinSettings, Settings
from fedhur_app.consensus.aggregation import shrunk_to_attributes, trimmed_step, weighted_step
from fedhur_app.consensus.compression import decompress
from fedhur_app.protocol import Content, Stage
from fedhur_app.seeding import torch_generator
from server_app.checkpoint import RunFolder
from server_app.stages import RunError, StageRunner
from server_app.strategies.asynchronous import AsynchronousRound
from server_app.strategies.base import Fleet, StagedStrategy


class Server(StagedStrategy):
    """Keeps G.

    Attributes:
        common: G (I, g) as markets get it.
        raw: G (I, g) before it is drawn to the items' attributes; the same table where it is not.
        version: Steps that G has made.
        holds: Market -> version of G that it holds.
        losses: Market -> its mean training loss when it last answered.
        sent: (K, I) bool, which market ever sent which item.
        in_flight: Calls of an asynchronous run that have not been answered yet.
    """

    stages = (Stage.REGULARIZED,)

    def __init__(self, settings: Settings, fleet: Fleet, folder: RunFolder | None = None) -> None:
        super().__init__(settings, fleet, folder)
        own, join = settings.fecosr, settings.fecosr.join
        if own.models is not None and len(own.models) != len(fleet.nodes):
            raise RunError(f"fecosr.models names {len(own.models)} models, but there are {len(fleet.nodes)} markets")
        if join and (join.market not in fleet.nodes or len(fleet.nodes) < 2):
            raise RunError(
                f"fecosr.join names market {join.market}; the markets are {fleet.clients[0]} to "
                f"{fleet.clients[-1]}, and one other must be there before"
            )
        if own.attribute_prior > 0 and fleet.attributes is None:
            raise RunError(
                f"fecosr.attribute_prior needs item attributes such as genres, and data set {settings.dataset.name} "
                "has none: set it to 0"
            )
        # The markets' own first table (model.same_init): G and they then have the same coordinates.
        width = own.dim or settings.model.dim
        generator = torch_generator(settings.seed, "init-items")
        self.common = torch.randn(fleet.n_items, width, generator=generator) * settings.model.init_std
        self.raw = self.common
        self.version = 0
        self.holds: dict[int, int] = {}
        self.losses: dict[int, float] = {}
        self.sent = torch.zeros(len(fleet.nodes), fleet.n_items, dtype=torch.bool)
        self.in_flight = AsynchronousRound()

    # --- rounds -------------------------------------------------------------------------------------------------

    def sample(self, round_: int) -> list[int]:
        """Without the market that has not joined yet; with it in the round in which it joins."""
        join = self.settings.fecosr.join
        clients = super().sample(round_)
        if join and round_ < join.round:
            others = [client for client in self.fleet.clients if client != join.market]
            return [client for client in clients if client != join.market] or others[:1]
        if join and round_ == join.round:
            return sorted({*clients, join.market})
        return clients

    def finished(self) -> bool:
        """Not before a market that joins late has had its rounds."""
        join = self.settings.fecosr.join
        if join and self.progress.round < min(join.round + self.settings.patience, self.settings.rounds):
            return False
        over = super().finished()
        if over and self.in_flight.calls and self.progress.round < self.settings.rounds:
            # One more round, for those who are still training: what is tested must have been validated.
            self.in_flight.closing = True
            return False
        return over

    def run_round(self, runner: StageRunner, round_: int) -> None:
        """One round; in an asynchronous run as many answers as there are markets."""
        if not self.settings.fecosr.asynchronous:
            super().run_round(runner, round_)
            return
        start = time.perf_counter()
        result = self.in_flight.collect(self, runner, round_)
        statistics = {"consensus": {"version": self.version, **_reports(result.replies)}}
        self.close_round(runner, round_, [result], statistics, {}, start)

    def configure_regularized(self, round_: int, clients: list[int]) -> Content | dict[int, Content]:
        """G for markets that do not hold the present one, and each market's lambda."""
        contents = {}
        for client in clients:
            fields = {
                "strength": self.strength(round_, client),
                "upload": round_ % self.settings.fecosr.update_every == 0,
                "join": self._warm_join(client) is not None,
            }
            stale = self.holds.get(client) != self.version
            contents[client] = Content(fields, {"global": {"items": self.common}} if stale else {})
        return contents

    def aggregate_regularized(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """The step of G, if this is a round for one."""
        self.holds |= dict.fromkeys(replies, self.version)
        moves = round_ % self.settings.fecosr.update_every == 0
        left_out = self._left_out(replies) if moves else set()
        uploads = {
            client: decompress(content.record("difference"))
            for client, content in replies.items()
            if client not in left_out and "difference" in content.arrays
        }
        uploads = {client: upload for client, upload in uploads.items() if len(upload[0])}
        if uploads:
            self._move(self._step(uploads), {client: items for client, (items, _) in uploads.items()})
        return {"consensus": {"version": self.version, "left_out": sorted(left_out), **_reports(replies)}}

    def take(self, client: int, content: Content, staleness: int) -> None:
        """The step of G for one answer of an asynchronous run: `(1 + staleness)^-a w_k` of its difference.

        Args:
            client: Who answered; `w_k` is its weight among all markets.
            content: Its answer.
            staleness: Steps that G has made since this market was called.
        """
        self.holds[client] = self.version - staleness
        left_out = self._left_out({client: content})
        items, rows = decompress(content.record("difference"))
        if left_out or not len(items):
            return
        discount = (1 + staleness) ** -self.settings.fecosr.staleness
        weight = float(self._weights([client], self.fleet.clients)[0]) * discount
        step = torch.zeros_like(self.common).index_add_(0, items, rows, alpha=weight)
        self._move(step, {client: items}, weight)

    # --- pieces -------------------------------------------------------------------------------------------------

    def strength(self, round_: int, client: int) -> float:
        """lambda_k of a round: by the schedule, and higher for a market that has just joined.

        `size` is `lambda * mean(n) / n_k`: with a loss that is a mean over n_k examples this is the same prior for all.
        """
        settings = self.settings.fecosr
        strength = settings.strength
        if settings.schedule == "decay":
            strength *= settings.decay ** (round_ - 1)
        elif settings.schedule == "size":
            sizes = self.fleet.interactions
            strength *= sum(sizes.values()) / len(sizes) / max(sizes[client], 1)
        join = self._warm_join(client)
        if join:
            strength *= max(1.0, join.boost * 0.5 ** (round_ - join.round))
        return strength

    def _warm_join(self, client: int) -> JoinSettings | None:
        """How a market joins that starts from G; the market knows whether it has trained before, and then does not."""
        join = self.settings.fecosr.join
        return join if join and join.warm and client == join.market else None

    def _left_out(self, replies: dict[int, Content]) -> set[int]:
        """Markets whose loss did not fall since the last step that they answered for, where these are not wanted."""
        rising = set()
        for client, content in replies.items():
            loss = float(content.fields["loss_sum"]) / max(int(content.fields["examples"]), 1)
            if client in self.losses and loss >= self.losses[client]:
                rising.add(client)
            self.losses[client] = loss
        return rising if self.settings.fecosr.selective else set()

    def _weights(self, clients: list[int], among: list[int]) -> Tensor:
        """Weights (K,) of `clients` that sum to 1 over the markets `among`."""
        by_size = self.settings.fecosr.weighting == "examples"
        sizes = {client: float(self.fleet.interactions[client]) if by_size else 1.0 for client in among}
        total = sum(sizes.values()) or 1.0
        return torch.tensor([sizes[client] / total for client in clients], dtype=torch.float64)

    def _step(self, uploads: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        settings, differences = self.settings.fecosr, list(uploads.values())
        if settings.weighting in ("median", "trimmed"):
            trim = 0.5 if settings.weighting == "median" else settings.trim
            return trimmed_step(self.fleet.n_items, differences, trim)
        return weighted_step(self.fleet.n_items, differences, self._weights(list(uploads), list(uploads)))

    def _move(self, step: Tensor, items: dict[int, Tensor], weight: float = 1.0) -> None:
        """`G <- G + eta step`, then drawn to the items' attributes if settings say so.

        Markets upload differences from the G that they were sent. What attributes added to that is taken out again, by
        the weight of the step, from the rows that were sent: else G would be drawn to its genres once more every time.

        Args:
            step: (I, g), weighted differences.
            items: Market -> the items that it sent.
            weight: What the weights of the step sum to.
        """
        settings = self.settings.fecosr
        touched = torch.zeros(self.fleet.n_items, dtype=torch.bool)
        for client, numbers in items.items():
            self.sent[self.fleet.clients.index(client), numbers] = True
            touched[numbers] = True
        step = step + weight * touched[:, None] * (self.common - self.raw)
        self.raw = self.common = self.raw + settings.server_lr * step
        if settings.attribute_prior > 0:
            assert self.fleet.attributes is not None
            evidence = self.sent.sum(dim=0)
            self.common = shrunk_to_attributes(self.raw, evidence, self.fleet.attributes, settings.attribute_prior)
        self.version += 1

    def forget(self, client: int) -> None:
        """It gets G with the next call to train."""
        self.holds.pop(client, None)

    # --- resume -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """G, who holds which version, losses and who sent what."""
        return {
            "global/items": self.common.numpy(),
            "raw": self.raw.numpy(),
            "version": np.array(self.version),
            "holds": np.array(sorted(self.holds.items()), dtype=np.int64).reshape(-1, 2),
            "losses": np.array(sorted(self.losses.items()), dtype=np.float64).reshape(-1, 2),
            "sent": self.sent.numpy(),
        }

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of :meth:`state`."""
        self.common, self.raw = torch.tensor(arrays["global/items"]), torch.tensor(arrays["raw"])
        self.version = int(arrays["version"])
        self.holds = {int(client): int(version) for client, version in arrays["holds"]}
        self.losses = {int(client): float(loss) for client, loss in arrays["losses"]}
        self.sent = torch.tensor(arrays["sent"])


def _reports(replies: dict[int, Content]) -> dict[str, dict[str, float]]:
    """What markets say about their pull, by market as text."""
    told = {str(client): content.fields for client, content in replies.items()}
    return {
        name: {client: float(fields[name]) for client, fields in told.items() if name in fields}
        for name in ("strength", "distance")
    }
