"""One stage, nothing is exchanged: see client_app/algorithms/ease.py."""

from server_app.strategies.local import Server

__all__ = ["Server"]
