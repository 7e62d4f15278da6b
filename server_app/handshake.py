"""The handshake: which nodes are there, who is which client, do they run the same code and mean the same items.

In a simulation that is one stage, `query.hello`. Nodes that bring their own data say their name there and take their
place with a second one, `query.join`: the server numbers the names and tells each node its number, the settings and,
where the node does not hold it, the catalogue. Before any later round, nodes that were restarted and know too little of
the run join again, and nodes that come late join where there is room.
"""

import json
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedhur_app.config import DEFAULT_RUN_CONFIG, Settings
from fedhur_app.data.attributes import load_attributes
from fedhur_app.data.item_catalogue import Catalogue, read_catalogue
from fedhur_app.data.shards import PreparedData
from fedhur_app.files import read_json, write_json
from fedhur_app.fingerprint import code_fingerprint
from fedhur_app.protocol import Content, Stage
from server_app.checkpoint import CheckpointError, RunFolder
from server_app.stages import RunError, StageRunner, say
from server_app.strategies.base import Fleet, Progress

# A simulation's nodes are all there within a moment: a count that stands still for so long is the final one.
SETTLED_SECONDS = 3.0
# A node that was refused in the middle of a run is asked again after so many rounds.
REFUSED_ROUNDS = 5

Fields = Mapping[str, Any]


def meet(
    grid: Grid,
    settings: Settings,
    data: PreparedData,
    folder: RunFolder,
    progress: Progress | None,
    config: dict[str, Any],
) -> Fleet:
    """Wait for the nodes of a simulation and learn who is who.

    Raises:
        RunError: The number of nodes is wrong, they run other code, two claim the same client, or their catalogues
            differ.
    """
    ids = _wait_for_nodes(grid, data.clients, settings, config, simulated=True)
    request = Content(
        {
            "code": code_fingerprint(),
            "data": str(data.folder),
            "checkpoint": str(folder.checkpoint),
            "states": str(folder.states),
            "resume_round": progress.round if progress else 0,
        }
    )
    hellos = _greet(grid, ids, request, 1.0, settings)
    _check_code(hellos.values())
    by_client: dict[int, int] = {}
    for node, fields in hellos.items():
        if "client" not in fields:
            raise RunError(
                f"node {node} ({fields.get('name')}) brings its own rows: they take part in runs of own-data only"
            )
        client = int(fields["client"])
        if client in by_client:
            raise RunError(
                f"two nodes ({by_client[client]} and {node}) both claim to be client {client}: give each SuperNode "
                "its own data (data-path in its node config)"
            )
        by_client[client] = node
    n_items = _one_size(hellos.values())
    restored = {int(fields["client"]) for fields in hellos.values() if fields.get("restored")}
    lost = sorted(set(progress.sums) - restored) if progress else []
    if progress and lost:
        raise RunError(
            f"no private state of client {lost[0]} as of round {progress.round} in {folder.checkpoint}: the run "
            "cannot be resumed"
        )
    for fields in hellos.values() if progress else ():
        client, found = int(fields["client"]), int(fields.get("trained_round", 0))
        known = progress.trained.get(client, 0) if progress else 0
        if found < known:
            _say_older(f"client {client}", found, known)
    return Fleet(
        nodes=dict(sorted(by_client.items())),
        n_items=n_items,
        valid_users={int(fields["client"]): int(fields["valid_users"]) for fields in hellos.values()},
        interactions={int(fields["client"]): int(fields["interactions"]) for fields in hellos.values()},
        attributes=_attributes(settings, data),
    )


class Register:
    """Nodes that bring their own data: their names and numbers, from the first handshake to the last round.

    Args:
        grid: Flower's connection to the nodes.
        settings: The run's settings.
        folder: Folder of the run; names and numbers are kept there for a resume.
        progress: What a resumed run has behind it.

    Raises:
        DataError: The catalogue cannot be read.
        CheckpointError: A resumed run has no list of its clients.
    """

    def __init__(self, grid: Grid, settings: Settings, folder: RunFolder, progress: Progress | None) -> None:
        self.grid = grid
        self.settings = settings
        self.progress = progress or Progress()
        self._file = folder.path / "clients.json"
        kept = read_json(self._file) if progress else {}
        if progress and not kept:
            raise CheckpointError(f"{self._file} is missing or damaged: the run cannot be resumed; start it anew")
        self.run: str = kept.get("run") or secrets.token_hex(8)
        self.numbers: dict[str, int] = dict(kept.get("clients", {}))
        path = settings.dataset.catalogue
        self.catalogue: Catalogue | None = read_catalogue(Path(path).expanduser()) if path else None
        self.fleet = Fleet({}, 0, {}, {}, run=self.run)
        self._refused: dict[int, int] = {}  # node -> the round before which it was refused

    def follow(self, progress: Progress) -> None:
        """Look at what the rounds lead to: what nodes are told when they join again depends on it."""
        self.progress = progress

    # --- at the start -------------------------------------------------------------------------------------------

    def meet(self) -> Fleet:
        """Wait for the nodes, number them, let them join.

        Raises:
            RunError: Too few nodes, other code, two nodes with one name or number, rows or catalogues that do not fit.
        """
        settings = self.settings
        expected, least = settings.dataset.clients.number, settings.server.min_clients
        ids = _wait_for_nodes(self.grid, expected, settings, {}, simulated=False)
        quorum = 1.0 if least is None else min(1.0, least / len(ids))
        hellos = _greet(self.grid, ids, self._hello(), quorum, settings)
        _check_code(hellos.values())
        for node, fields in hellos.items():
            self._check(node, fields)
        by_name = self._distinct(hellos)
        self._number(by_name, hellos)
        members = {self.numbers[name]: node for name, node in by_name.items()}
        resumed = self.progress.round > 0
        runner = StageRunner(self.grid, members, quorum, settings.server.stage_timeout, self.progress.trained)
        joined = self._join(runner, {client: hellos[node] for client, node in members.items()}, self.progress.round)
        problems = {client: self._problem(fields) for client, fields in joined.items()}
        # All at once: each is mended on another machine, by somebody else.
        if wrong := [f"{self._who(client)}: {problem}" for client, problem in problems.items() if problem]:
            raise RunError("; ".join(wrong))
        self.fleet = Fleet(self.fleet.nodes, _one_size(joined.values()), {}, {}, run=self.run)
        for client, fields in joined.items():
            self._enter(client, members[client], fields, said=resumed or settings.client.continue_)
        if len(members) < expected:
            say("%d of %d clients are there; others may join before any round", len(members), expected, level=WARNING)
        self._save()
        return self.fleet

    def _hello(self) -> Content:
        return Content({"code": code_fingerprint(), "run": self.run})

    def _check(self, node: int, fields: Fields) -> None:
        if "problem" in fields:
            raise RunError(f"node {node}: {fields['problem']}")
        if "name" not in fields:
            raise RunError(f"node {node} brings no rows: give its SuperNode a data-path in --node-config")
        if "client" not in fields and self.catalogue is None:
            raise RunError(
                f"node {fields['name']} reads its rows from a file, whose items the server does not know: set "
                "dataset.catalogue to the federation's items, or give the node a prepared shard"
            )

    def _distinct(self, hellos: Mapping[int, Fields]) -> dict[str, int]:
        """Node by name."""
        by_name: dict[str, int] = {}
        for node, fields in hellos.items():
            name = str(fields["name"])
            if name in by_name:
                raise RunError(
                    f"two nodes ({by_name[name]} and {node}) both claim to be {name!r}: give each a name of its own "
                    "(`name` in node.toml, or client in the node config), or a state-dir of its own"
                )
            by_name[name] = node
        return by_name

    def _number(self, by_name: Mapping[str, int], hellos: Mapping[int, Fields]) -> None:
        """Give every name a number: a shard's own, else the next free one in the order of the names."""
        for name in sorted(by_name):
            fields = hellos[by_name[name]]
            if "client" in fields:
                self._claim(name, int(fields["client"]), by_name)
        for name in sorted(by_name):
            if name not in self.numbers:
                self.numbers[name] = self._free_number()
        if len(self.numbers) > self.settings.dataset.clients.number:
            raise RunError(
                f"the run has {self.settings.dataset.clients.number} clients (dataset.clients.number), and these are "
                f"{len(self.numbers)} names: {', '.join(sorted(self.numbers))}"
            )

    def _claim(self, name: str, client: int, by_name: Mapping[str, int]) -> None:
        for other, number in self.numbers.items():
            if number == client and other != name:
                raise RunError(
                    f"two nodes ({other}: {by_name.get(other, 'away')}; {name}: {by_name[name]}) both claim to be "
                    f"client {client}: give each SuperNode its own data (data-path in its node config)"
                )
        if self.numbers.setdefault(name, client) != client:
            raise RunError(f"{name} was client {self.numbers[name]} in this run, and its shard is that of {client}")

    def _free_number(self) -> int:
        taken = set(self.numbers.values())
        return next(number for number in range(len(taken) + 1) if number not in taken)

    # --- joining ------------------------------------------------------------------------------------------------

    def _join(self, runner: StageRunner, hellos: Mapping[int, Fields], round_: int) -> dict[int, Fields]:
        """Call clients to join.

        Args:
            runner: Sends the calls.
            hellos: Client -> what its node said of itself; {} where that is not known.
            round_: The last round that is over.

        Returns:
            Client -> its answer, of those that answered.
        """
        fingerprint = self.catalogue.fingerprint if self.catalogue else ""
        common = {
            "run": self.run,
            "round": round_,
            "clients": self.settings.dataset.clients.number,
            "settings": self.settings.for_clients(),
            "catalogue": fingerprint,
        }
        requests = {}
        for client, fields in hellos.items():
            request = Content(common | {"client": client})
            if self.catalogue and fields.get("catalogue") != fingerprint:
                content = np.frombuffer(self.catalogue.to_bytes(), dtype=np.uint8)
                request.arrays["catalogue"] = {"json": torch.from_numpy(content.copy())}
            requests[client] = request
        result = runner.call(Stage.JOIN, round_, requests, "join")
        return {client: content.fields for client, content in result.replies.items()}

    def _problem(self, fields: Fields) -> str:
        """Why an answer to the call to join is none."""
        if "problem" in fields:
            return str(fields["problem"])
        wanted = len(self.catalogue) if self.catalogue else self.fleet.n_items
        if wanted and fields["n_items"] != wanted:
            return f"its rows are of a catalogue of {fields['n_items']} items, that of the run has {wanted}"
        if fields.get("catalogue", "") != (self.catalogue.fingerprint if self.catalogue else ""):
            return "it holds another catalogue than the run's"
        return ""

    def _enter(self, client: int, node: int, fields: Fields, said: bool) -> None:
        """Put a client into the fleet; say what it goes on from, where that is worth saying."""
        self.fleet.nodes[client] = node
        self.fleet.valid_users[client] = int(fields["valid_users"])
        self.fleet.interactions[client] = int(fields["interactions"])
        if fields.get("unknown_items"):
            say(
                "%s: %d of its items (%d interactions) are not in the catalogue and stay with it",
                self._who(client),
                fields["unknown_items"],
                fields["unknown_interactions"],
            )
        if not said:
            return
        how, found, known = str(fields["restored"]), int(fields["trained_round"]), self.progress.trained.get(client, 0)
        why = f" ({fields['why']})" if fields.get("why") else ""
        if how == "new":
            say("%s starts as new%s", self._who(client), why, level=WARNING if known else INFO)
        elif how == "continued":
            say("%s goes on from the model of its last run", self._who(client))
        elif found < known:
            _say_older(self._who(client), found, known)

    def _who(self, client: int) -> str:
        name = next((name for name, number in self.numbers.items() if number == client), "")
        return f"client {client} ({name})"

    def _save(self) -> None:
        write_json(self._file, {"run": self.run, "clients": self.numbers})

    # --- between rounds -----------------------------------------------------------------------------------------

    def before_round(self, runner: StageRunner, round_: int) -> dict[int, str]:
        """Let lost nodes join again, and new ones join; see :class:`server_app.strategies.base.Roll`."""
        calls: dict[int, Fields] = {client: {} for client in runner.lost if client in self.fleet.nodes}
        before = dict(self.fleet.nodes)
        calls |= self._newcomers()
        runner.lost.clear()
        if not calls:
            return {}
        some = StageRunner(self.grid, self.fleet.nodes, 0.0, self.settings.server.stage_timeout, self.progress.trained)
        answers = self._join(some, calls, round_ - 1)
        joined = {}
        for client in calls:
            fields = answers.get(client)
            problem = "it did not answer the call to join" if fields is None else self._problem(fields)
            if fields is None or problem:
                say("%s is left out: %s", self._who(client), problem, level=WARNING)
                self._leave(client, before)
                continue
            self._enter(client, self.fleet.nodes[client], fields, said=True)
            joined[client] = str(fields["restored"])
        for client in joined:
            say("%s joined before round %d: %s", self._who(client), round_, joined[client])
        self._save()
        return joined

    def _leave(self, client: int, before: Mapping[int, int]) -> None:
        """Undo the entry of a client that could not join: it keeps its place if it had one."""
        node = self.fleet.nodes.pop(client)
        if client in before:
            self.fleet.nodes[client] = before[client]
        else:
            self._refused[node] = self.progress.round

    def _newcomers(self) -> dict[int, Fields]:
        """Clients behind nodes that were not there before: restarted under another number of Flower, or late.

        Whoever was refused is asked again some rounds later: its owner may have mended the reason, and Flower gives a
        device the same number again.
        """
        present, now = set(self.grid.get_node_ids()), self.progress.round
        waiting = {node for node, refused in self._refused.items() if now - refused < REFUSED_ROUNDS}
        unknown = sorted(present - set(self.fleet.nodes.values()) - waiting)
        if not unknown:
            return {}
        hellos = _greet(self.grid, unknown, self._hello(), 0.0, self.settings)
        self._refused |= dict.fromkeys(set(unknown) - set(hellos), now)  # each may have cost the stage's whole time
        calls: dict[int, Fields] = {}
        for node, fields in hellos.items():
            try:
                _check_code([fields])
                self._check(node, fields)
                client = self._place_of(fields, node, present)
            except RunError as error:
                say("node %d is refused: %s", node, error, level=WARNING)
                self._refused[node] = now
                continue
            self.fleet.nodes[client] = node
            calls[client] = fields
        return calls

    def _place_of(self, fields: Fields, node: int, present: set[int]) -> int:
        """The number of a node that comes in the middle of the run."""
        name = str(fields["name"])
        client = self.numbers.get(name)
        if client is not None and self.fleet.nodes.get(client) in present:
            raise RunError(f"another node, {self.fleet.nodes[client]}, is {name!r} already")
        if "client" in fields:
            self._claim(name, int(fields["client"]), {name: node})
        if name not in self.numbers:
            if len(self.numbers) >= self.settings.dataset.clients.number:
                raise RunError(f"there is no room for {name!r}: all clients (dataset.clients.number) have names")
            self.numbers[name] = self._free_number()
        return self.numbers[name]


def _greet(grid: Grid, ids: Iterable[int], request: Content, quorum: float, settings: Settings) -> dict[int, Fields]:
    """Say hello; what each node says, by node.

    Raises:
        RunError: Too few answer.
    """
    # Clients are not known yet: nodes are numbered in the order in which Flower lists them.
    nodes = dict(enumerate(ids))
    runner = StageRunner(grid, nodes, quorum, settings.server.stage_timeout)
    try:
        result = runner.call(Stage.HELLO, 0, dict.fromkeys(nodes, request), "hello")
    except RunError as error:
        raise RunError(
            f"the handshake failed: {error}. If clients do not know the handshake, they run another app: a SuperLink "
            "that was started in another folder serves that folder's client code. Stop it and start again from this "
            "project's folder"
        ) from error
    return {nodes[number]: content.fields for number, content in result.replies.items()}


def _check_code(hellos: Iterable[Fields]) -> None:
    """Refuse nodes that run other code.

    Raises:
        RunError: One does.
    """
    codes = {str(fields["code"]) for fields in hellos} - {code_fingerprint()}
    if codes:
        raise RunError(
            f"clients run other code ({', '.join(sorted(codes))}) than the server ({code_fingerprint()}): a "
            "SuperLink or SuperNode from another folder or version is in use. Stop it, start it again from this "
            "project's folder and run again"
        )


def _one_size(answers: Iterable[Fields]) -> int:
    """The size of the catalogue that all mean."""
    catalogues = Counter(int(fields["n_items"]) for fields in answers)
    if len(catalogues) != 1:
        raise RunError(f"the clients' catalogues differ in size ({sorted(catalogues)} items): they must be the same")
    return next(iter(catalogues))


def _say_older(who: str, found: int, known: int) -> None:
    say(
        "%s goes on with its state of round %d, it last trained in round %d and did not save that: the history will "
        "differ from that of an unbroken run",
        who,
        found,
        known,
        level=WARNING,
    )


def _attributes(settings: Settings, data: PreparedData) -> Tensor | None:
    """What the catalogue says about items, (I, a); None where it says nothing or the run does not ask."""
    wanted = settings.algorithm == "fecosr" and settings.fecosr.attribute_prior > 0
    attributes = load_attributes(data.folder) if wanted else None
    return None if attributes is None else torch.from_numpy(attributes.toarray())


def _wait_for_nodes(
    grid: Grid, expected: int, settings: Settings, config: dict[str, Any], simulated: bool
) -> list[int]:
    start = changed = time.monotonic()
    ids: list[int] = []
    while True:
        found = sorted(grid.get_node_ids())
        now = time.monotonic()
        if len(found) != len(ids):
            ids, changed = found, now
        if len(ids) == expected and now - changed >= 0.2:
            return ids
        if simulated and ids and now - changed > SETTLED_SECONDS:
            break
        if now - start > settings.server.connect_timeout:
            break
        time.sleep(0.1)
    if simulated:
        options = f"num-supernodes={expected} client-resources-num-cpus=1"
        given = " ".join(
            f"{key}={json.dumps(config[key])}"
            for key, default in DEFAULT_RUN_CONFIG.items()
            if key in ("dataset", "strategy") or config[key] != default
        )
        what = f'--run-config {shlex.quote(given)} --federation-config "{options}"'
        raise RunError(
            f"data set {settings.dataset.name!r} has {expected} clients, but there are {len(ids)} SuperNodes. "
            f"Run: flwr run . --stream {what}"
        )
    least = settings.server.min_clients
    if least is not None and least <= len(ids) <= expected:
        return ids
    wanted = f"{expected} clients are expected (dataset.clients.number)" + (
        "" if least is None else f", {least} at least (server.min_clients)"
    )
    raise RunError(
        f"{wanted}, {len(ids)} SuperNodes are connected after {settings.server.connect_timeout:g} s: start or stop "
        f"SuperNodes, or set dataset.clients.number={len(ids)}"
    )
