"""FedHUR: federated recommendation on Flower. What is computed lives here; see docs/architecture.md."""

__version__ = "0.1.0"
