"""Fine-tuning across markets: first the source market alone, then the others go on from its best item table.

There is one model. While the others train, the source has to use what has become of its table, with the user vectors
that it had: what it loses is *source degradation*. Several other markets train in every round and their tables are
averaged; with one other market this is plain fine-tuning.
"""

from typing import Any

import numpy as np

from fedhur_app.config import Settings
from fedhur_app.protocol import Content
from server_app.checkpoint import RunFolder
from server_app.stages import RunError, say
from server_app.strategies.base import Fleet
from server_app.strategies.mixing import MixingStrategy, Tables, tables_below


class Server(MixingStrategy):
    """Two phases; all markets take part in all rounds, but only some train.

    Attributes:
        source: The market that begins.
        switched: The last round of the first phase; 0 before it is over.
        source_table: The source's table of its best round.
        restore: Once the others have begun, and until the source has answered: the round of the model that it must go
            back to.
    """

    def __init__(self, settings: Settings, fleet: Fleet, folder: RunFolder | None = None) -> None:
        super().__init__(settings, fleet, folder)
        wanted = settings.finetune.source
        if wanted is not None and wanted not in fleet.nodes:
            raise RunError(f"finetune.source is market {wanted}, but there are markets 0 to {fleet.clients[-1]}")
        if len(fleet.nodes) < 2:
            raise RunError("finetune needs a source and at least one other market, but there is one client")
        self.source = max(fleet.clients, key=lambda c: fleet.interactions[c]) if wanted is None else wanted
        self.switched = 0
        self.source_table: Tables | None = None
        self.restore = 0

    def judged(self) -> list[int]:
        """Validation of the source chooses the model of the first phase, that of the others the final one."""
        return [client for client in self.fleet.clients if (client == self.source) != bool(self.switched)]

    def finished(self) -> bool:
        """Before the last round in the second phase only."""
        return super().finished() if self.switched else self.progress.round >= self.settings.rounds

    def configure_items(self, round_: int, clients: list[int]) -> Content | dict[int, Content]:
        """The table for markets that do not hold it, and who is to train."""
        progress = self.progress
        if not self.switched and progress.best_round == progress.round:
            self.source_table = self.table
        settings = self.settings
        most = settings.finetune.source_rounds or max(1, settings.rounds // 2)
        stale = progress.round - progress.best_round >= settings.patience
        if not self.switched and (stale or progress.round >= most):
            self.restore = progress.best_round
            say("markets other than %d go on from its table of round %d", self.source, self.restore)
            self.table, self.up_to_date = self.source_table, set()
            self.switched = progress.round
            progress.best_round, progress.best_value, progress.sums = progress.round, -1.0, {}
        training = set(self.judged())
        contents = super().configure_items(round_, clients)
        return {
            client: Content(
                {"train": client in training, "restore": self.restore if client == self.source else 0},
                (contents if isinstance(contents, Content) else contents[client]).arrays,
            )
            for client in clients
        }

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any] | None:
        """The mean table of those who trained; the present one stays where nobody did."""
        if self.source in replies:
            self.restore = 0
        uploads = {client: content for client, content in replies.items() if "table" in content.arrays}
        if uploads:
            super().aggregate_items(round_, uploads)
        elif self.table is None:
            raise RunError(
                f"round {round_}: the source, market {self.source}, did not answer, and there is no table yet"
            )
        return {"phase": "others" if self.switched else "source"}

    def state(self) -> dict[str, np.ndarray]:
        """The shared table, the source's best one and the phase."""
        best = {f"source/{name}": tensor.numpy() for name, tensor in (self.source_table or {}).items()}
        return super().state() | best | {"switched": np.array(self.switched), "restore": np.array(self.restore)}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of :meth:`state`."""
        super().load_state(arrays)
        self.switched, self.restore = int(arrays["switched"]), int(arrays["restore"])
        self.source_table = tables_below(arrays, "source")
