"""Fine-tuning across markets, on the client: trains when it is its turn, and uses the common item table always."""

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.protocol import Arrays, Content


class Client(ClientAlgorithm):
    """The server says who trains."""

    def items(self, request: Content) -> Content:
        """When the others begin, go back to the source's best model first: it is what they begin with."""
        restore = int(request.fields["restore"])
        if restore and self.state.numbers["trained_round"]:
            self.set_model(self.best_model(restore))
        self.trains = bool(request.fields["train"])
        return super().items(request)

    def train(self) -> dict[str, float | int]:
        """Local epochs, or nothing."""
        return super().train() if self.trains else {"examples": 0, "loss_sum": 0.0, "skipped_users": 0}

    def upload(self) -> Arrays:
        """The item table of a market that trained."""
        return super().upload() if self.trains else {}
