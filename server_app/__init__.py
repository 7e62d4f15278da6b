"""The Flower ServerApp: rounds, stages, checkpoints, results."""
