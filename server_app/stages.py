"""One stage of a round: fan-out, collect, classify, quorum, order, bytes. Every message goes through here."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.superlink.grid.http_grid import HttpGrid

from fedhur_app.finite import all_finite
from fedhur_app.protocol import Content, ProtocolError, Stage, bytes_by_record, decode, encode, with_field

# Marks the lines that are for the person who watches the run (the command line shows these only).
FOR_PEOPLE = "fedhur | "
POLL_SECONDS = 0.3  # between looks for answers of devices


class RunError(RuntimeError):
    """The run cannot go on; the text says why, where and what to do."""


class QuorumError(RunError):
    """Too few clients answered a stage."""


class DeadWorkerError(RunError):
    """A Ray worker died: Flower's simulation cannot recover from that."""


class DivergedRunError(RunError):
    """A client's model, or what it sent, is not finite."""


def say(text: str, *arguments: object, level: int = INFO) -> None:
    """Write one line for the person who watches the run."""
    log(level, FOR_PEOPLE + text, *arguments)


class PerClient(Mapping[int, Content]):
    """Contents by client that are made when they are asked for, and then forgotten.

    So those of thousands of clients are never in memory together, unless the grid holds them.

    Args:
        clients: Who gets one.
        make: Client -> its content, a new object.
    """

    def __init__(self, clients: Iterable[int], make: Callable[[int], Content]) -> None:
        self._clients = dict.fromkeys(clients)
        self._make = make

    def __getitem__(self, client: int) -> Content:
        if client not in self._clients:
            raise KeyError(client)
        return self._make(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


@dataclass
class StageResult:
    """What came back from one stage.

    Attributes:
        replies: Client -> its answer, in the order of client numbers (float sums must not depend on arrival).
        absent: Client -> why it is not among the replies.
        bytes_down: Record name -> bytes over all requests of the stage.
        bytes_up: Record name -> bytes over all accepted replies.
        seconds: Wall time of the stage.
    """

    stage: str
    replies: dict[int, Content] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Call:
    """A request whose answer is still to come.

    Attributes:
        client: Who was asked.
        round: Round of the request.
        sent: Time on the monotonic clock, seconds.
    """

    client: int
    round: int
    sent: float


class StageRunner:
    """Sends the requests of a stage and returns the answers by client.

    Args:
        grid: Flower's connection to the nodes.
        nodes: Client number -> Flower node id.
        quorum: Share of a stage's clients that must answer.
        timeout: Seconds that a stage may take.
        trained: Client -> the last round in which it is known to have trained. Where it is given each request says it,
            so that a node that was restarted can tell whether the state on its disk is the right one.

    Attributes:
        lost: Clients whose nodes said that they know too little of the run, and why.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: dict[int, int],
        quorum: float,
        timeout: float,
        trained: Mapping[int, int] | None = None,
    ) -> None:
        self.grid = grid
        self.nodes = nodes
        self.quorum = quorum
        self.timeout = timeout
        self.trained = trained
        self.lost: dict[int, str] = {}

    def call(
        self, stage: str, round_: int, requests: Mapping[int, Content], label: str, quorum: float | None = None
    ) -> StageResult:
        """Run one stage.

        Args:
            stage: Message type, one of :class:`Stage`.
            round_: Round number; answers of another round are refused.
            requests: Client -> content. Equal objects are encoded once.
            label: What the log line calls the round.
            quorum: Instead of the runner's own.

        Raises:
            QuorumError: Fewer clients than the quorum answered.
            DeadWorkerError: A Ray worker died.
            DivergedRunError: An answer says or shows that a model is not finite.
        """
        start = time.perf_counter()
        result = StageResult(stage)
        messages = self._messages(stage, round_, requests, result)
        clients = {self.nodes[client]: client for client in requests}
        errors: dict[int, str] = {}
        for node, message in self._exchange(messages):
            if node in clients:
                self._accept(message, clients[node], round_, result, errors)
            elif message.has_error():
                _check_worker(message.error.reason or "")
        result.replies = dict(sorted(result.replies.items()))
        result.absent = {
            client: errors.get(client, f"no answer within {self.timeout:g} s")
            for client in sorted(requests)
            if client not in result.replies
        }
        result.seconds = time.perf_counter() - start
        self.report(result, len(requests), label)
        self.check_quorum(result, len(requests), label, quorum)
        return result

    def _exchange(self, messages: Iterator[Message]) -> Iterator[tuple[int, Message]]:
        """Send messages and wait for the answers, or for the end of the time; yields nodes and their answers."""
        if not isinstance(self.grid, HttpGrid):
            for answer in self.grid.send_and_receive(messages, timeout=self.timeout):
                yield answer.metadata.src_node_id, answer
            return
        # A deployment's grid goes over its messages twice, and would look for answers only every three seconds.
        sent = list(messages)
        nodes = [message.metadata.dst_node_id for message in sent]
        waiting = {key: node for key, node in zip(self.grid.push_messages(sent), nodes, strict=True) if key}
        del sent
        end = time.monotonic() + self.timeout
        while waiting and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            for answer in self.grid.pull_messages(list(waiting)):
                # That a device is gone is said by the SuperLink: only the number of the message tells which device.
                node = waiting.pop(answer.metadata.reply_to_message_id, answer.metadata.src_node_id)
                yield node, answer

    def check_quorum(self, result: StageResult, asked: int, label: str, quorum: float | None = None) -> None:
        """Raise QuorumError if fewer of the `asked` clients answered than the quorum (the runner's own by default)."""
        needed = math.ceil(round((self.quorum if quorum is None else quorum) * asked, 9))
        if len(result.replies) < needed:
            raise QuorumError(
                f"{label}, {result.stage}: {len(result.replies)} of {asked} clients answered, {needed} are needed "
                f"(server.quorum). Absent: {_name(result.absent)}"
            )

    def push(self, stage: str, round_: int, requests: Mapping[int, Content], result: StageResult) -> dict[str, Call]:
        """Send requests without waiting; the bytes count for `result`. Returns the calls by message id."""
        calls = {}
        for client, content in sorted(requests.items()):
            messages = list(self._messages(stage, round_, {client: content}, result))
            for message_id in self.grid.push_messages(messages):
                calls[message_id] = Call(client, round_, time.monotonic())
        return calls

    def pull(self, calls: dict[str, Call], result: StageResult) -> list[tuple[int, Content]]:
        """Take what has arrived of `calls`, which are then removed from it, as are those whose time is over.

        Returns:
            Clients and their answers, those that came together in the order of client numbers; `result` has them too
            (the last one of each client), and who is absent why.

        Raises:
            DeadWorkerError: As :meth:`call`.
            DivergedRunError: As :meth:`call`.
        """
        answered: list[tuple[int, Content]] = []
        for message in self.grid.pull_messages(list(calls)):
            call = calls.pop(message.metadata.reply_to_message_id, None)
            if call is not None and self._accept(message, call.client, call.round, result, result.absent):
                answered.append((call.client, result.replies[call.client]))
        late = [key for key, call in calls.items() if time.monotonic() - call.sent > self.timeout]
        for key in late:
            result.absent[calls.pop(key).client] = f"no answer within {self.timeout:g} s"
        return sorted(answered, key=lambda pair: pair[0])

    def _accept(self, message: Message, client: int, round_: int, result: StageResult, errors: dict[int, str]) -> bool:
        """Put a client's answer into `result`, or say in `errors` why it is none."""
        if message.has_error():
            reason = message.error.reason or f"error code {message.error.code}"
            _check_worker(reason)
            errors[client] = _last_line(reason)
            return False
        try:
            content = decode(message.content)
        except ProtocolError as error:
            errors[client] = str(error)
            return False
        if "lost" in content.fields:
            self.lost[client] = errors[client] = str(content.fields["lost"])
            return False
        problem = _refusal(content, client, result.stage, round_)
        if problem:
            errors[client] = problem
            return False
        _check_finite(content, client, result.stage, round_)
        result.replies[client] = content
        _add(result.bytes_up, bytes_by_record(message.content))
        return True

    def _messages(
        self, stage: str, round_: int, requests: Mapping[int, Content], result: StageResult
    ) -> Iterator[Message]:
        """The messages, each encoded when it is taken: in one process they need not all be in memory at once."""
        # Contents made on demand are nobody else's, and to count them would be to make them.
        uses = Counter[int]() if isinstance(requests, PerClient) else Counter(map(id, requests.values()))
        shared: dict[int, RecordDict] = {}
        for client in sorted(requests):
            content = requests[client]
            key = id(content)
            encoded = shared[key] if key in shared else encode(content)
            if uses[key] > 1:
                shared[key] = encoded
            if self.trained is not None:
                encoded = with_field(encoded, "trained", self.trained.get(client, 0))
            _add(result.bytes_down, bytes_by_record(encoded))
            yield Message(encoded, self.nodes[client], stage, ttl=self.timeout, group_id=f"round-{round_}")

    def report(self, result: StageResult, asked: int, label: str) -> None:
        """The log line of a stage."""
        say(
            "%s | %s | %d/%d clients | %.1f s | up %s, down %s",
            label,
            result.stage,
            len(result.replies),
            asked,
            result.seconds,
            mebibytes(sum(result.bytes_up.values())),
            mebibytes(sum(result.bytes_down.values())),
        )
        if result.absent:
            say("%s | %s | absent: %s", label, result.stage, _name(result.absent), level=WARNING)


def mebibytes(number: int) -> str:
    """`number` bytes as text in MiB."""
    return f"{number / 2**20:.2f} MiB"


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, number in more.items():
        total[name] = total.get(name, 0) + number


def _check_worker(reason: str) -> None:
    if any(name in reason for name in ("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError")):
        raise DeadWorkerError(
            "a Ray worker process died (killed, or out of memory?); Flower's simulation cannot replace it, so the "
            "run ends here. Start it again with --resume, with fewer clients at once if memory ran out"
        )


def _last_line(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return (lines[-1] if lines else "unknown error")[-300:]


def _refusal(content: Content, client: int, stage: str, round_: int) -> str:
    fields = content.fields
    if stage == Stage.HELLO:
        return ""
    if (fields.get("round"), fields.get("stage")) != (round_, stage):
        return f"stale answer refused: it belongs to round {fields.get('round')}, stage {fields.get('stage')}"
    if fields.get("client") != client:
        return f"answer refused: it names client {fields.get('client')}"
    return ""


def _check_finite(content: Content, client: int, stage: str, round_: int) -> None:
    problem = content.fields.get("diverged")
    if not problem:
        numbers = {name: value for name, value in content.fields.items() if isinstance(value, float)}
        arrays = {
            f"{record}/{name}": tensor
            for record, tensors in content.arrays.items()
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        bad = [name for name, value in numbers.items() if value != value or abs(value) == float("inf")]
        bad += [name for name, tensor in arrays.items() if not all_finite(tensor)]
        problem = f"{bad[0]} is not finite" if bad else ""
    if problem:
        raise DivergedRunError(
            f"client {client}, round {round_}, {stage}: {problem}. Lower train.lr; the last good checkpoint is kept"
        )


def _name(absent: dict[int, str], most: int = 5) -> str:
    shown = [f"client {client} ({reason})" for client, reason in list(absent.items())[:most]]
    more = len(absent) - most
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
