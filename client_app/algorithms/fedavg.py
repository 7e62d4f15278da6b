"""FedAvg with private user tables (FedMF): the averaged item table replaces the local one."""

from client_app.algorithms.base import ClientAlgorithm


class Client(ClientAlgorithm):
    """Everything is the default: upload E_k, take the mean."""
