"""A process that has PyTorch and Flower in memory and becomes the ClientApp of a message by forking.

Flower starts a new process for every message, and most of a stage goes by while that imports the same packages again:
seconds on a PC, much more on a small device. This file is run by its path and never imports FedHUR's own modules: they
come with each run. The `flwr-clientapp` that is first in the SuperNode's PATH hands its arguments over here, and does
without where nobody listens.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys

SOCKET = "FEDHUR_WARM"  # variable with the socket's path
# Flower's SuperNode does not notice it, and the server would wait for the answer to the end of the stage.
KILLED = "a ClientApp was ended by signal"
# What every ClientApp of this project imports.
PRELOADED = (
    "torch",
    "numpy",
    "scipy.sparse",
    "scipy.special",
    "polars",
    "pydantic",
    "yaml",
    "flwr.app",
    "flwr.clientapp",
    "flwr.supernode.cli",
)
COMMAND = r"""#!/bin/sh
'''exec' "{python}" -I -S "$0" "$@"
' '''
import json, os, socket, sys
try:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ["FEDHUR_WARM"])
        link.sendall(json.dumps(sys.argv[1:]).encode())
except (KeyError, OSError):
    os.execv({command}, [{command}, *sys.argv[1:]])
"""


def command_text(python: str, command: str) -> str:
    """The script that stands in for `flwr-clientapp`.

    Args:
        python: Interpreter.
        command: The real `flwr-clientapp`.
    """
    return COMMAND.replace("{python}", python).replace("{command}", repr(command))


def _report_killed(*_: object) -> None:
    """Wait for the children that have ended, and say which of them did not end by themselves."""
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            if os.WIFSIGNALED(status):
                print(f"{KILLED} {os.WTERMSIG(status)}", flush=True)


def serve(path: str) -> None:
    """Listen on a socket for ever; each connection brings the arguments of one `flwr-clientapp`."""
    with socket.socket(socket.AF_UNIX) as server:
        for name in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # the pages stay shared with the children
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen()
        signal.signal(signal.SIGCHLD, _report_killed)
        while True:
            link, _ = server.accept()
            with link, link.makefile("rb") as content:
                arguments = json.loads(content.read())
            if os.fork() == 0:
                break
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from flwr.supernode.cli import flwr_clientapp

    sys.argv = ["flwr-clientapp", *arguments]
    flwr_clientapp()


if __name__ == "__main__":
    serve(sys.argv[1])
