"""GPFedRec (Zhang et al., KDD 2024) on the client: the loss pulls the item table to what the client graph says.

`BCE + r mean (E_k - R_k)^2` over the whole table, `r` = `gpfedrec.regularisation`, `R_k` the server's graph-guided
table for this client. User vectors and the network (`model.kind: mlp`; in shard form one a client) are private. A round
starts from the server's common table; users are ranked with the table that was trained.
"""

from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.models.training import ExtraGradient
from fedhur_app.protocol import Content


class Client(ClientAlgorithm):
    """Shares the item table only; keeps the server's answer for the next round."""

    def shared(self) -> list[str]:
        """The item table."""
        return ["items"]

    def receive(self, request: Content) -> None:
        """Start from the common table: the one that just came, or the one of the last answer."""
        start = self.state.arrays.pop("start", {})
        self.set_model(request.arrays.get("table", start))

    def apply(self, request: Content) -> dict[str, float | int]:
        """Keep the common table and this client's graph-guided one; the trained table stays the one to rank with."""
        self.state.arrays["start"] = request.record("table")
        self.state.arrays["guide"] = request.record("guide")
        return {}

    def extra_term(self) -> ExtraGradient | None:
        """The pull to the graph-guided table; none before there is one."""
        if "guide" not in self.state.arrays:
            return None
        guide = self.state.arrays["guide"]["items"].to(self.device)
        strength = self.settings.gpfedrec.regularisation

        def term(parameters: dict[str, Tensor], batch: Tensor) -> tuple[float, dict[str, Tensor]]:
            apart = parameters["items"] - guide
            return strength * float(apart.square().mean()), {"items": (2 * strength / apart.numel()) * apart}

        return term
