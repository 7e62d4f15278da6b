"""What of a run is timed: names of functions of both halves of the app, and what each counts as.

Under Flower this module is the app that runs: `server` and `client` are the app's own with the timing around them.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from benchmarks.spans import WAITING, Name, Recorder, recording
from client_app.algorithms import client_algorithm
from fedhur_app.config import settings_of_run
from server_app.strategies import server_strategy

# Where processes under Flower write their spans, and the run's algorithm: Ray's workers know nothing else of the run.
FOLDER, ALGORITHM = "FEDHUR_SPANS", "FEDHUR_SPANS_ALGORITHM"

CLIENT = "client compute"
SERVER = "server compute"
SERIALISATION = "serialisation"
FILES = "checkpoint files"
TRANSPORT = "transport and waiting"
SHARES = (CLIENT, SERVER, SERIALISATION, FILES, TRANSPORT)

ROUND, CALL, MESSAGE = "round", "call ", "messages, settings, state"
TRAINING, QUERY, FIT, USERS, RANKING = "training", "utility query", "fit", "user vectors", "ranking"
CLIENT_STEPS = (TRAINING, QUERY, FIT, USERS, RANKING, MESSAGE)
PACKING = (
    "records to tensors, clients",
    "tensors to records, clients",
    "state from Flower's context",
    "state to Flower's context",
    "records to tensors, server",
    "tensors to records, server",
    "counting bytes",
    "Ray's pickling",
)
EIGENPAIRS, HIERARCHY, GROUPS, ENERGIES, SCORES, FILTERS = (
    "S_g and its eigenpairs",
    "item groups",
    "group filters",
    "energies",
    "scorer and weights",
    "personal filters",
)
SERVER_STEPS = (EIGENPAIRS, HIERARCHY, GROUPS, ENERGIES, SCORES, FILTERS)

# Step of a client -> method of its algorithm, wherever in its line of classes.
_METHODS = {"train": TRAINING, "utility": QUERY, "apply": FIT, "rank": RANKING}
_CLIENT: tuple[tuple[str, Name], ...] = (
    ("flwr.clientapp.client_app:ClientApp.__call__", MESSAGE),
    ("client_app.app:decode", PACKING[0]),
    ("client_app.app:encode", PACKING[1]),
    ("client_app.state:ClientState.from_context", PACKING[2]),
    ("client_app.state:ClientState.to_context", PACKING[3]),
    ("client_app.state:StateFolder.save", "clients' files"),
    ("client_app.algorithms.base:refit_users", USERS),
)
_SERVER: tuple[tuple[str, Name], ...] = (
    ("server_app.strategies.base:StagedStrategy.run_round", ROUND),
    ("server_app.stages:StageRunner.call", lambda runner, stage, *_, **__: f"{CALL}{stage}"),
    ("server_app.stages:encode", PACKING[5]),
    ("server_app.stages:decode", PACKING[4]),
    ("server_app.stages:bytes_by_record", PACKING[6]),
    ("server_app.strategies.base:StagedStrategy.close_round", "end of the round"),
    ("server_app.checkpoint:RunFolder.save_server", "server's files"),
)
_FEDHUR: tuple[tuple[str, Name], ...] = (
    ("server_app.strategies.fedhur:mean_gram_eigenpairs", EIGENPAIRS),
    ("server_app.strategies.fedhur:build_hierarchy", HIERARCHY),
    ("server_app.strategies.fedhur:group_filters", GROUPS),
    ("server_app.strategies.fedhur:energy_scores", ENERGIES),
    ("server_app.strategies.fedhur:Server._corrected", SCORES),
    ("server_app.strategies.fedhur:weights", SCORES),
    ("fedhur_app.relations.scorer:Scorer.fit", SCORES),
    ("server_app.strategies.fedhur:shared_basis_filters", FILTERS),
)
_RAY: tuple[tuple[str, Name], ...] = (
    ("ray._private.serialization:SerializationContext.serialize", PACKING[-1]),
    ("ray._private.serialization:SerializationContext.deserialize_objects", PACKING[-1]),
)

# Span -> share of the round; what is not here is the server's.
_SHARES = {
    **dict.fromkeys(CLIENT_STEPS, CLIENT),
    **dict.fromkeys(PACKING, SERIALISATION),
    "clients' files": FILES,
    "server's files": FILES,
    WAITING: TRANSPORT,
}


def share_of(name: str) -> str:
    """Which of :data:`SHARES` a span counts for."""
    return _SHARES.get(name, SERVER)


def client_targets(algorithm: str) -> Iterator[tuple[str, Name]]:
    """Functions of the client half of an algorithm, and what their spans are called."""
    yield from _CLIENT
    for kind in client_algorithm(algorithm).__mro__[:-1]:
        for method, name in _METHODS.items():
            if method in vars(kind):
                yield f"{kind.__module__}:{kind.__qualname__}.{method}", name


def server_targets(algorithm: str) -> Iterator[tuple[str, Name]]:
    """Functions of the server half of an algorithm, and what their spans are called."""
    yield from _SERVER
    for kind in server_strategy(algorithm).__mro__[:-1]:
        for method in vars(kind):
            if method.startswith(("configure_", "aggregate_")):
                yield f"{kind.__module__}:{kind.__qualname__}.{method}", method
        if kind.__module__ == "server_app.strategies.fedhur":
            yield from _FEDHUR


@lru_cache(maxsize=1)
def _recorder() -> Recorder:
    return Recorder(Path(os.environ[FOLDER]))


@lru_cache(maxsize=1)
def _record_client() -> ExitStack:
    """Begin to record in this worker, once: it ends with the process."""
    stack = ExitStack()
    stack.enter_context(recording(_recorder(), [*client_targets(os.environ[ALGORITHM]), *_RAY]))
    return stack


server = ServerApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    from server_app.app import app

    algorithm = settings_of_run(dict(context.run_config)).algorithm
    with recording(_recorder(), [*server_targets(algorithm), *_RAY]):
        app(grid, context)


class _RecordedClient(ClientApp):
    """The client app, with the timing put around its functions before its first message."""

    def __call__(self, message: Message, context: Context) -> Message:
        _record_client()
        from client_app.app import app

        answer: Any = app(message, context)
        return answer


client = _RecordedClient()
