"""The whole application in one process: the same ServerApp and ClientApp as under Flower, without Ray.

For tests, sweeps and debugging. What Flower promises is kept: messages are values (arrays in them are immutable
bytes), a client's state changes only if its handler returns, unknown nodes are dropped silently.
"""

import traceback
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedhur_app.compute import resolve_device
from fedhur_app.config import DEFAULT_RUN_CONFIG, OWN_DATA, ConfigError, settings_of_run
from fedhur_app.data.experiment import number_of_clients
from fedhur_app.parallel import cores, in_order, threads
from fedhur_app.protocol import InProcessContext

RUN_ID = 1
_FIRST_NODE = 1000

# Called with (message, client number) before a client gets a message; returns None, "drop" (no answer comes) or
# "raise" (the client fails). Tests use it to play unreliable clients.
Fault = Callable[[Message, int], str | None]
# What a node runs: the ClientApp, or something around it.
Client = Callable[[Message, Context], Message]
# What a node has to do for a message; no answer is one that never comes.
Work = Callable[[], Message | None]


class LocalGrid(Grid):
    """A Flower Grid whose nodes live in this process.

    Args:
        client_app: What each node runs.
        num_nodes: Number of nodes; node i has `partition-id` i.
        run_config: The run config that every context carries.
        fault: Plays unreliable clients, see :data:`Fault`.
        node_config: Extra node config by partition, for clients that bring their own data.
        workers: Nodes that may be at work at once (in threads). The answers are the same with any number.
    """

    def __init__(
        self,
        client_app: Client,
        num_nodes: int,
        run_config: dict[str, Any],
        fault: Fault | None = None,
        node_config: Callable[[int], dict[str, Any]] | None = None,
        workers: int = 1,
    ) -> None:
        # Flower 1.42 lets only a known task create messages.
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = RUN_ID
        self._run = Run.create_empty(run_id=RUN_ID)
        self.client_app = client_app
        self.fault = fault
        self.workers = workers
        self.contexts = {
            _FIRST_NODE + i: InProcessContext(
                RUN_ID,
                _FIRST_NODE + i,
                {"partition-id": i, "num-partitions": num_nodes, **(node_config(i) if node_config else {})},
                RecordDict(),
                dict(run_config),
            )
            for i in range(num_nodes)
        }
        self._replies: dict[str, Message] = {}
        self._pushed = 0

    def set_run(self, run: Run) -> None:
        """Flower's interface; the run never changes here."""
        self._run = run

    @property
    def run(self) -> Run:
        """Flower's interface."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Flower's interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes are always there."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the addressed nodes answer, one after the other."""
        pushed = []
        for message in messages:
            work = self._take(message)
            if work is not None:
                pushed.append(message.metadata.message_id)
                answer = work()
                if answer is not None:
                    self._replies[message.metadata.message_id] = answer
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to `message_ids` that are there."""
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Flower's interface: answers come in the order of the messages, of which a few at a time are in memory."""
        work = (taken for message in messages if (taken := self._take(message)) is not None)
        # What a client finds when it starts and restores when it ends is the whole process's: it must always be 1.
        with threads(1):
            yield from (answer for answer in in_order(_call, work, self.workers) if answer is not None)

    def _take(self, message: Message) -> Work | None:
        """What the addressed node has to do; None where there is no such node."""
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return None
        self._pushed += 1
        message.metadata.__dict__["_message_id"] = f"message-{self._pushed}"
        fault = self.fault(message, int(context.node_config["partition-id"])) if self.fault else None
        return lambda: None if fault == "drop" else self._answer(message, context, fault)

    def _answer(self, message: Message, context: Context, fault: str | None) -> Message:
        state = RecordDict(dict(context.state))
        try:
            if fault == "raise":
                raise RuntimeError("injected fault")
            return self.client_app(message, context)
        except Exception as error:
            context.state = state
            return Message(Error(2, f"{traceback.format_exc()}\n{error}"), reply_to=message)


def _call(work: Work) -> Message | None:
    return work()


def run_local(run_config: dict[str, Any], fault: Fault | None = None) -> LocalGrid:
    """Run the application once, in this process.

    Args:
        run_config: Some or all of the run-config keys of pyproject.toml (`dataset`, `strategy`, `seed`,
            `overrides`, `output-dir`, `resume`).
        fault: Plays unreliable clients.

    Returns:
        The grid with the clients' contexts as they are at the end.

    Raises:
        Exception: Whatever ends the run; `result.json` in the output directory says the same.
    """
    from client_app.app import app as client_app
    from server_app.app import app as server_app

    config = {**DEFAULT_RUN_CONFIG, **run_config}
    settings = settings_of_run(config)
    if settings.dataset.name == OWN_DATA:
        raise ConfigError(
            f"{OWN_DATA} means rows on devices: it runs with a SuperLink and SuperNodes, not in one process"
        )
    device = resolve_device(settings.device)  # a missing GPU is an error here, not one of every client
    workers = cores(settings.server.threads) if device.type == "cpu" else 1
    grid = LocalGrid(client_app, number_of_clients(settings), config, fault, workers=workers)
    server_app(grid, Context(RUN_ID, RUN_ID, {}, RecordDict(), config))
    return grid
