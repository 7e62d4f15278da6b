"""A node that brings its own data: who it is, which rows it has, what it remembers of a run.

The server gives a run a name of its own and sends it with every request. A node that holds nothing of that run in its
memory was restarted. It then takes what it needs from its `state-dir`, if the state there is one that the server knows
of: the last round in which this client trained travels with the requests. Else it says that it is lost, and the server
has it join again.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context
from flwr.common.logger import log

from client_app.algorithms import client_algorithm
from client_app.device_folder import NAME, DeviceFolder, DeviceRun, Membership, NodeError
from client_app.state import ClientState, StateError, get_place, set_place
from fedhur_app.config import Settings, from_json
from fedhur_app.data.errors import DataError
from fedhur_app.data.item_catalogue import Catalogue
from fedhur_app.data.own_rows import (
    Rows,
    as_client,
    match_rows,
    options_of_node,
    read_own,
    rows_key,
    rows_of_shard,
    shard_file,
)
from fedhur_app.data.shards import Shard, load_shard
from fedhur_app.evaluation.ranking import RankSums
from fedhur_app.protocol import Content, Stage

# Stages that begin from what a client learnt in rounds before, and not in the same round.
_FRESH = (Stage.ITEMS, Stage.REGULARIZED, Stage.RANK, Stage.CHECKPOINT)
_CATALOGUE = "catalogue"
_LAST = 10**9


class LostError(RuntimeError):
    """This node does not know what it needs to know about the run; it has to join again."""


@dataclass
class Entered:
    """A node within a run.

    Attributes:
        rows: Its rows, under its number.
        state: Its private state.
        membership: What it is; None where the server keeps no roll (it prepared the data itself).
        restored: Round of the state that was read from the disk after a restart, None without one.
    """

    rows: Rows
    state: ClientState
    membership: Membership | None = None
    restored: int | None = None

    def remember(self, context: Context) -> None:
        """Put all into the node's memory (called only when a stage ended well)."""
        self.state.to_context(context)
        if self.membership is not None:
            set_place(context, {"membership": self.membership.to_json()})


class Device:
    """The node of one message.

    Args:
        context: Flower's.

    Raises:
        NodeError: The node config is impossible.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        config = context.node_config
        self.path = Path(str(config["data-path"])).expanduser()
        own = config.get("state-dir")
        self.home = DeviceFolder(Path(str(own)).expanduser().absolute()) if own else None
        self.options = options_of_node(config)

    # --- handshake ----------------------------------------------------------------------------------------------

    def name(self) -> str:
        """What the server calls this node."""
        given = self.context.node_config.get("client")
        if given is None:
            return self.home.name() if self.home else f"node-{self.context.node_id}"
        name = str(given)
        if not NAME.fullmatch(name):
            raise NodeError(
                f"client of the node config is {name!r}: a name has letters, digits, dots, dashes and underscores, "
                "at most 64"
            )
        return name

    def hello(self) -> dict[str, Any]:
        """First answer: the name, the catalogue that the node holds and, with a prepared shard, its number and size."""
        held = self.home.catalogue() if self.home else None
        fields: dict[str, Any] = {"name": self.name(), "catalogue": held.fingerprint if held else None}
        found = shard_file(self.path)
        if found is not None:
            shard = _load(found)
            fields |= {"client": shard.client, **sizes(shard)}
        elif not self.path.exists():
            raise DataError(f"data-path {self.path} does not exist")
        return fields

    def join(self, request: Content) -> Content:
        """Second answer: the node takes its place in the run; counts only go back."""
        fields = request.fields
        settings = from_json(str(fields["settings"]))
        client, round_, trained = (int(fields[key]) for key in ("client", "round", "trained"))
        catalogue = self._take_catalogue(request)
        key, rows = self._join_rows(catalogue, settings)
        membership = Membership(
            run=str(fields["run"]),
            client=client,
            clients=int(fields["clients"]),
            name=self.name(),
            catalogue=catalogue.fingerprint if catalogue else "",
            rows=key,
            settings=settings.to_json(),
            options=self.options,
        )
        rows = as_client(rows, client)
        run = self.home.enter_run(membership) if self.home else None
        state, how, why = None, "new", ""
        if run is not None:
            run.states.forget_after(client, round_)
            if trained or round_:
                state, why = _newest(run, membership, rows, round_)
                how = str(state.numbers["trained_round"]) if state else how
            elif settings.client.continue_:
                state, why = self._continued(membership, rows, settings)
                how = "continued" if state else how
        elif trained or settings.client.continue_:
            why = "it has no state-dir"
        state = state or ClientState()
        kept = state.numbers.get("trained_round", 0)
        if kept < trained:
            # What it learnt since is gone: no model of those rounds may be passed off as this one.
            state.numbers |= {"kept": kept, "lost": trained}
        if run is not None and state.numbers:
            run.states.save(state, client, round_, _about(membership, rows), settings.server.checkpoint_every)
        Entered(rows, state, membership).remember(self.context)
        return Content(
            {
                "client": client,
                "round": round_,
                "stage": Stage.JOIN,
                "catalogue": membership.catalogue,
                **sizes(rows.shard),
                "unknown_items": rows.unknown_items,
                "unknown_interactions": rows.unknown_interactions,
                "restored": how,
                "trained_round": kept,
                "why": why,
            }
        )

    def _take_catalogue(self, request: Content) -> Catalogue | None:
        """The catalogue of the run: as it came, or the one that the node holds; None where the run has none."""
        wanted = str(request.fields.get("catalogue", ""))
        if not wanted:
            return None
        if "catalogue" in request.arrays:
            catalogue = Catalogue.from_bytes(request.record("catalogue")["json"].numpy().tobytes())
            if self.home:
                self.home.save_catalogue(catalogue)
            else:
                self.context.state[_CATALOGUE] = ConfigRecord({"json": catalogue.to_bytes()})
        else:
            catalogue = self._catalogue(wanted)
        if catalogue.fingerprint != wanted:
            raise DataError(f"the catalogue that came ({catalogue.fingerprint}) is not that of the run ({wanted})")
        return catalogue

    def _catalogue(self, fingerprint: str) -> Catalogue:
        """The catalogue that the node holds."""
        if self.home:
            held = self.home.catalogue()
        else:
            record = self.context.state.config_records.get(_CATALOGUE)
            held = Catalogue.from_bytes(bytes(record["json"])) if record else None  # type: ignore[arg-type]
        if held is None or held.fingerprint != fingerprint:
            raise LostError("this node no longer holds the catalogue of the run")
        return held

    def _join_rows(self, catalogue: Catalogue | None, settings: Settings) -> tuple[str, Rows]:
        """Key and rows: a shard as it is; a file as it was matched before, or matched anew where anything changed."""
        found = shard_file(self.path)
        if found is not None:
            shard = _load(found)
            if catalogue is not None and shard.n_items != len(catalogue):
                raise DataError(
                    f"the node's prepared shard is of a catalogue of {shard.n_items} items, that of the run has "
                    f"{len(catalogue)}"
                )
            return "", rows_of_shard(shard)
        if catalogue is None:
            raise DataError("the node's rows are a file, and the run has no catalogue to match it with")
        key = rows_key(self.path, self.options, catalogue, settings.dataset.split, settings.seed)
        rows = self.home.rows(key) if self.home else None
        if rows is None:
            rows = match_rows(read_own(self.path, self.options), catalogue, settings.dataset.split, settings.seed)
            if self.home:
                self.home.save_rows(key, rows)
        return key, rows

    def _continued(self, membership: Membership, rows: Rows, settings: Settings) -> tuple[ClientState | None, str]:
        """Model and optimiser of the node's newest run before this one, or why not."""
        assert self.home is not None
        why = "it has no state of an earlier run"
        for run in self.home.runs():
            before = run.membership()
            if before is None or before.run == membership.run:
                continue
            for found in run.states.newest(before.client, _LAST):
                if isinstance(found, StateError):
                    why = "its state of the earlier run is damaged"
                    continue
                earlier, about = found
                wanted = _about(membership, rows)
                parts = {"name": "name", "catalogue": "catalogue", "users": "list of users"}
                other = [text for part, text in parts.items() if about.get(part) != wanted[part]]
                if other:
                    return None, f"the state of its earlier run has another {' and another '.join(other)}"
                fresh = client_algorithm(settings.algorithm)(
                    settings, rows.shard, ClientState(), 1, torch.device("cpu")
                ).state
                model = earlier.arrays.get("model", {})
                if _shapes(model) != _shapes(fresh.arrays["model"]) or not model:
                    return None, "the model of its earlier run has other tables"
                kept = {name: earlier.arrays[name] for name in ("model", "optimizer") if name in earlier.arrays}
                return ClientState(kept, fresh.numbers), ""
        return None, why

    # --- stages -------------------------------------------------------------------------------------------------

    def enter(self, request: Content, stage: str, round_: int) -> Entered:
        """What this node needs for a stage, from its memory or, after a restart, from its disk.

        Raises:
            LostError: The node has to join again.
        """
        run = str(request.fields.get("run", ""))
        if not run:
            found = shard_file(self.path)
            if found is None:
                raise LostError("this node has not joined a run, and its rows are no prepared shard")
            return Entered(rows_of_shard(_load(found)), ClientState.from_context(self.context))
        membership = Membership.from_json(get_place(self.context).get("membership", ""))
        if membership is not None and membership.run == run:
            return Entered(self._rows(membership), ClientState.from_context(self.context), membership)
        if self.home is None:
            raise LostError("this node was restarted and has no state-dir, so it knows nothing of the run")
        folder = self.home.run(run)
        membership = folder.membership() if folder else None
        if folder is None or membership is None or membership.run != run:
            raise LostError("this node's state-dir holds nothing of the run")
        rows = self._rows(membership)
        state, why = _newest(folder, membership, rows, round_)
        state = state or ClientState()
        kept, trained = state.numbers.get("trained_round", 0), int(request.fields.get("trained", 0))
        if stage in _FRESH and kept < trained:
            what = f"its newest usable state is of round {kept}" if kept else "it has no usable state"
            raise LostError(
                f"this node was restarted; {what}, and it last trained in round {trained}{why and f' ({why})'}"
            )
        return Entered(rows, state, membership, kept)

    def keep(self, entered: Entered, stage: str, round_: int, reply: Content, sent: Mapping[str, int]) -> None:
        """Write the state to the disk, before the answer leaves, and note what leaves.

        Args:
            entered: The node, with its state after the stage.
            stage: The stage.
            round_: Its round.
            reply: The answer.
            sent: Bytes of the answer by record.
        """
        membership = entered.membership
        if self.home is None or membership is None:
            return
        run = self.home.run(membership.run) or self.home.enter_run(membership)
        every = from_json(membership.settings).server.checkpoint_every
        about = _about(membership, entered.rows)
        run.states.save(entered.state, membership.client, round_, about, every)
        report = run.report() or {"sent": {}}
        of_stage = report["sent"].setdefault(stage, {"messages": 0, "bytes": {}})
        of_stage["messages"] += 1
        of_stage["bytes"] = {name: of_stage["bytes"].get(name, 0) + size for name, size in sent.items()}
        for split in ("valid", "test"):
            told = {
                name.removeprefix(f"{split}."): float(value)
                for name, value in reply.fields.items()
                if name.startswith(f"{split}.")
            }
            if told:
                sums = RankSums.from_dict(told)
                report[split] = {"users": int(sums.users), "round": round_} | (sums.means() if sums.users else {})
        run.write_report(report)

    def _rows(self, membership: Membership) -> Rows:
        """The rows that the node joined with."""
        if not membership.rows:
            found = shard_file(self.path)
            if found is None:
                raise LostError("the prepared shard that this node joined with is gone")
            return as_client(rows_of_shard(_load(found)), membership.client)
        rows = self.home.rows(membership.rows) if self.home else None
        if rows is None:
            catalogue = self._catalogue(membership.catalogue)
            settings = from_json(membership.settings)
            split, seed = settings.dataset.split, settings.seed
            if rows_key(self.path, self.options, catalogue, split, seed) != membership.rows:
                raise LostError("the file of this node's rows has changed since it joined the run")
            rows = match_rows(read_own(self.path, self.options), catalogue, split, seed)
            if self.home:
                self.home.save_rows(membership.rows, rows)
        return as_client(rows, membership.client)


def sizes(shard: Shard) -> dict[str, int]:
    """What the server may know about a client's rows."""
    return {
        "n_items": shard.n_items,
        "users": shard.n_users,
        "interactions": len(shard.train),
        "valid_users": int((shard.valid.counts > 0).sum()),
        "test_users": int((shard.test.counts > 0).sum()),
    }


@lru_cache(maxsize=256)
def _load(path: Path) -> Shard:
    # Prepared shards never change.
    return load_shard(path)


def _about(membership: Membership, rows: Rows) -> dict[str, str]:
    """What a state belongs to."""
    settings = from_json(membership.settings)
    deciding = [settings.algorithm, settings.model.model_dump(), settings.fecosr.model_dump()]
    return {
        "run": membership.run,
        "name": membership.name,
        "catalogue": membership.catalogue,
        "users": rows.users_fingerprint,
        "settings": hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:16],
    }


def _newest(run: DeviceRun, membership: Membership, rows: Rows, round_: int) -> tuple[ClientState | None, str]:
    """The newest state of a run that is not younger than `round_` and is whole and this client's; why not another."""
    why: list[str] = []
    wanted = _about(membership, rows)
    for found in run.states.newest(membership.client, round_):
        if isinstance(found, StateError):
            log(WARNING, "%s", found)
            why.append("a newer one is damaged")
        elif found[1] != wanted:
            why.append("a newer one belongs to another run, node, catalogue, data or model")
        else:
            return found[0], "; ".join(dict.fromkeys(why))
    return None, "; ".join(dict.fromkeys(why)).replace("a newer one", "one")


def _shapes(tables: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(table.shape) for name, table in tables.items()}
