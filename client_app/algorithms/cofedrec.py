"""CoFedRec (He et al., WWW 2024) on the client: PFedRec's model and steps, and a contrastive term on item clusters."""

import itertools
import math

from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.models.contrast import supervised_contrast
from fedhur_app.models.training import ExtraGradient
from fedhur_app.protocol import Content


class Client(ClientAlgorithm):
    """Keeps its own table unless it was in a group of the round."""

    alternate = True

    def apply(self, request: Content) -> dict[str, float | int]:
        """Keep the item clusters for the next round; take the group's table where one came."""
        self.state.arrays["labels"] = request.record("labels")
        if "table" in request.arrays:
            self.set_model(request.record("table"))
        return {}

    def extra_term(self) -> ExtraGradient | None:
        """Rows of one cluster attract each other, once an epoch (the published code: every batch); none in round 1."""
        settings, train = self.settings.cofedrec, self.settings.train
        if "labels" not in self.state.arrays or settings.contrast == 0:
            return None
        labels = self.state.arrays["labels"]["items"].to(self.device)
        counts = self.shard.train.counts
        examples = int(counts[counts < self.shard.n_items].sum())  # who has seen every item is not trained on
        batches = max(1, math.ceil(examples * train.negatives / train.batch_size))
        calls = itertools.count()

        def term(parameters: dict[str, Tensor], batch: Tensor) -> tuple[float, dict[str, Tensor]]:
            if next(calls) % batches:
                return 0.0, {}
            value, gradient = supervised_contrast(parameters["items"], labels, settings.temperature)
            return settings.contrast * value, {"items": settings.contrast * gradient}

        return term
