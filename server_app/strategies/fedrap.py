"""FedRAP (Li et al., ICLR 2024): the plain mean of the shared item tables C_k; private ones stay on the clients."""

from server_app.strategies.mixing import MixingStrategy


class Server(MixingStrategy):
    """Mean of the tables, `W = 1/K` (`fedavg.weighting: uniform`)."""
