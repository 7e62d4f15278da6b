"""FeCoSR on the client, a market: its own model is trained with a pull to the global item table G and never replaced.

`L_k = L_local(D_k) + lambda_k R(E_k[B], G[B])`, B the distinct items of a batch. Up goes the difference between the
market's item table and G on the items it trained on in this round, as positives or as negatives. With the regulariser
`relation` tables have no common coordinates: the difference is then taken in those of G (consensus/basis.py).
"""

import math

import torch
from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from client_app.state import ClientState
from fedhur_app.config import Settings
from fedhur_app.consensus.adversary import deceive, initial_adversary
from fedhur_app.consensus.basis import distance, map_to_common, relation_distance, table_from_common
from fedhur_app.consensus.compression import compress
from fedhur_app.consensus.regularisers import regulariser
from fedhur_app.data.shards import Shard
from fedhur_app.models.training import ExtraGradient
from fedhur_app.protocol import Arrays, Content
from fedhur_app.seeding import torch_generator


class Client(ClientAlgorithm):
    """Keeps everything; uploads a difference."""

    def __init__(self, settings: Settings, shard: Shard, state: ClientState, round_: int, device: torch.device) -> None:
        own = settings.fecosr.model_of(shard.client, settings.model)
        super().__init__(settings.model_copy(update={"model": own}), shard, state, round_, device)
        self.strength = 0.0
        self.uploads = True

    @property
    def common(self) -> Tensor:
        """G (I, g) as this market last got it."""
        return self.state.arrays["global"]["items"]

    def receive(self, request: Content) -> None:
        """Take G, where it came; a market that joins starts from it."""
        if "global" in request.arrays:
            self.state.arrays["global"] = request.record("global")
        self.uploads = bool(request.fields["upload"])
        if request.fields.get("join") and not self.state.numbers["trained_round"]:
            # Copied: this market's table must not share its memory with G.
            self.set_model({"items": table_from_common(self.common, self.settings.model.dim).clone()})
        self.strength = float(request.fields["strength"])
        if self.settings.fecosr.schedule == "adaptive":
            self.strength /= 1 + self.distance()

    def distance(self) -> float:
        """How far the market's table is from G, relative to G."""
        own = self.state.arrays["model"]["items"]
        measure = relation_distance if self.settings.fecosr.regulariser == "relation" else distance
        return measure(own, self.common)

    def train(self) -> dict[str, float | int]:
        """Counts and losses, with what the pull was."""
        fields = super().train()
        apart = self.distance()
        return fields | {"strength": self.strength} | ({"distance": apart} if math.isfinite(apart) else {})

    def extra_term(self) -> ExtraGradient | None:
        """The pull to G, and the adversary's part; none where both weigh nothing."""
        settings = self.settings.fecosr
        pull = regulariser(settings.regulariser, settings.temperature)
        common = self.common.to(self.device)
        adversary = self._adversary() if settings.adversary > 0 else {}
        if self.strength == 0 and not adversary:
            return None

        def term(parameters: dict[str, Tensor], batch: Tensor) -> tuple[float, dict[str, Tensor]]:
            table = parameters["items"]
            own, target = table.index_select(0, batch), common.index_select(0, batch)
            value, by_own = 0.0, torch.zeros_like(own)
            if self.strength > 0:
                distance_, gradient = pull(own, target)
                value, by_own = self.strength * distance_, self.strength * gradient
            if adversary:
                deceived, gradient = deceive(adversary, own, target)
                value += settings.adversary * deceived
                by_own.add_(gradient, alpha=settings.adversary)
            return value, {"items": torch.zeros_like(table).index_copy_(0, batch, by_own)}

        return term

    def _adversary(self) -> dict[str, Tensor]:
        """This round's copy of the adversary, which the state then keeps."""
        if "adversary" in self.state.arrays:
            kept = self.state.arrays["adversary"]
        else:
            generator = torch_generator(self.seed, "adversary", client=self.shard.client)
            kept = initial_adversary(self.settings.model.dim, generator)
        weights = {name: tensor.to(self.device, copy=True) for name, tensor in kept.items()}
        self.state.arrays["adversary"] = weights
        return weights

    def upload(self) -> Arrays:
        """`E_k - G` on the items trained on; nothing in rounds in which G stays as it is."""
        if not self.uploads:
            return {}
        assert self.report is not None
        settings = self.settings.fecosr
        items = self.report.item_counts.nonzero()[:, 0]
        own, common = self.state.arrays["model"]["items"][items], self.common[items]
        if settings.regulariser == "relation" and len(items):
            own = own @ map_to_common(own, common)
        return {"difference": compress(items, own - common, settings.top_rows, settings.bits)}
