"""Rounds without waiting: the server takes each answer as it arrives and calls that client again at once.

A "round" is then at least as many answers as the round has clients; calls that are still under way belong to the next
one. What arrives when depends on the clients' speed, so such a run does not repeat bit by bit, and what is under way
when a run is killed is lost and asked for again. Of a client that answered twice in a round, the round's line in the
history has the last answer; bytes are those of all.
"""

import time
from typing import TYPE_CHECKING

from server_app.stages import Call, StageResult, StageRunner

if TYPE_CHECKING:
    from server_app.strategies.fecosr import Server

_POLL_SECONDS = 0.05


class AsynchronousRound:
    """The calls that are under way."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.versions: dict[int, int] = {}
        self.closing = False

    def collect(self, server: "Server", runner: StageRunner, round_: int) -> StageResult:
        """Call everybody who is idle, then take at least as many answers as there are clients in the round.

        In the last round, and in the one that closes a run which stops early, nobody is called again and all answers
        are waited for.

        Raises:
            QuorumError: Too few different clients have answered.
        """
        start = time.perf_counter()
        result, label = StageResult(*server.stages), server.label(round_)
        clients = server.sample(round_)
        busy = {call.client for call in self.calls.values()}
        last = self.closing or round_ == server.settings.rounds
        if not self.closing:
            self._call(server, runner, round_, [client for client in clients if client not in busy], result)
        taken = 0
        while (last or taken < len(clients)) and self.calls:
            answered = runner.pull(self.calls, result)
            for client, content in answered:
                server.note_validation({client: content})  # the round's own note has a client's last answer only
                server.take(client, content, server.version - self.versions.pop(client))
                taken += 1
                if not last and taken < len(clients):
                    self._call(server, runner, round_, [client], result)
            if not answered and self.calls:
                time.sleep(_POLL_SECONDS)
        result.seconds = time.perf_counter() - start
        runner.report(result, len(clients), label)
        if not self.closing:
            runner.check_quorum(result, len(clients), label)
        self.closing = False
        return result

    def _call(
        self, server: "Server", runner: StageRunner, round_: int, clients: list[int], result: StageResult
    ) -> None:
        contents = server.configure_regularized(round_, clients)
        assert isinstance(contents, dict)
        save = server.saves(round_)
        requests = {
            client: server.request(content, round_, finish=True, save=save) for client, content in contents.items()
        }
        self.versions |= dict.fromkeys(clients, server.version)
        self.calls |= runner.push(result.stage, round_, requests, result)
