"""One stage, nothing is exchanged: see client_app/algorithms/popularity.py."""

from server_app.strategies.local import Server

__all__ = ["Server"]
