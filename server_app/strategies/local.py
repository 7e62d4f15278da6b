"""No exchange: one stage a round, nothing is aggregated. The lower reference."""

from fedhur_app.protocol import Stage
from server_app.strategies.base import StagedStrategy


class Server(StagedStrategy):
    """Clients train alone; the server only pools their metrics."""

    stages = (Stage.ITEMS,)
