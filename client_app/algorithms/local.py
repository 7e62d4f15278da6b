"""No exchange: every client trains alone. The lower reference."""

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.protocol import Arrays


class Client(ClientAlgorithm):
    """Uploads nothing."""

    def upload(self) -> Arrays:
        """Nothing leaves the device."""
        return {}
