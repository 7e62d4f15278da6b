"""One stage, nothing is exchanged: see client_app/algorithms/gfcf.py."""

from server_app.strategies.local import Server

__all__ = ["Server"]
