"""FedAvg with private user parameters (FedMF; FedNCF with `model.kind: ncf`): the averages replace the local ones."""

import torch

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.protocol import Arrays


class Client(ClientAlgorithm):
    """Uploads what is shared and takes the mean."""

    def upload(self) -> Arrays:
        """The shared parameters and, for `fedavg.row_masked`, how often each item was trained on."""
        arrays = super().upload()
        if self.settings.fedavg.row_masked:
            assert self.report is not None
            arrays["counts"] = {"items": self.report.item_counts.to(torch.int32)}
        return arrays
