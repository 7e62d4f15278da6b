"""FedCIA without parameters (Han et al., SIGIR 2025) on the server: the mean of the clients' GFCF filters."""

from typing import Any

from torch import Tensor

from fedhur_app.models.item_filters import FilterFactors, mean_filter
from fedhur_app.protocol import Content
from server_app.strategies.base import StagedStrategy


class Server(StagedStrategy):
    """One round is all: filters do not change."""

    def aggregate_items(self, round_: int, replies: dict[int, Content]) -> dict[str, Any]:
        """The mean filter in at most `gfcf.rank` columns."""
        settings = self.settings.gfcf
        factors = [FilterFactors(**content.record("factors")) for content in replies.values()]
        self.filter: tuple[Tensor, Tensor] = mean_filter(
            factors, settings.singular_vectors, settings.ideal_weight, settings.rank
        )
        return {"filter_columns": self.filter[0].shape[1]}

    def configure_personalize(self, round_: int, clients: list[int]) -> Content:
        """The same filter for everybody."""
        left, right = self.filter
        return Content(arrays={"filter": {"left": left, "right": right}})
