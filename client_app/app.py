"""The ClientApp: one handler a stage. In simulation and on a device alike."""

import os
import secrets
from collections.abc import Callable
from functools import lru_cache
from logging import ERROR
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from client_app.algorithms import client_algorithm
from client_app.device import Device, Entered, LostError, sizes
from client_app.device_folder import NodeError
from client_app.state import ClientState, StateError, StateFolder, get_place, set_place
from fedhur_app.compute import resolve_device
from fedhur_app.config import from_json
from fedhur_app.data.errors import DataError
from fedhur_app.data.own_rows import Rows
from fedhur_app.data.shards import Shard, load_shard, shard_path
from fedhur_app.fingerprint import code_fingerprint
from fedhur_app.memory import peak_memory_mib
from fedhur_app.models.training import DivergedError
from fedhur_app.parallel import threads
from fedhur_app.protocol import Content, Stage, bytes_by_record, decode, encode

# Ray reads this before it starts its workers: it keeps them from hiding the GPUs, and a warning from the log.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Handshake: who is here, with which code and how much data; on a resume, reload the private state."""
    request = decode(message.content)
    reply = Content({"code": code_fingerprint()})
    if request.fields["code"] == reply.fields["code"] and _on_device(context):
        reply = _without_private_text(lambda: Content(reply.fields | Device(context).hello()), reply)
    elif request.fields["code"] == reply.fields["code"]:
        places = ("data", "checkpoint", "states")
        set_place(context, {key: str(request.fields[key]) for key in places if key in request.fields})
        shard = _simulated_shard(context)
        reply.fields |= {"client": shard.client, **sizes(shard)}
        folder = _simulated_folder(context)
        resume_round = int(request.fields.get("resume_round", 0))
        if folder is not None and resume_round:
            state = folder.load(shard.client, resume_round)
            reply.fields["restored"] = state is not None
            if state is not None:
                reply.fields["trained_round"] = state.numbers.get("trained_round", 0)
                state.to_context(context)
    return Message(encode(reply), reply_to=message)


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Second part of the handshake with nodes that bring their own data: take a place in the run."""
    request = decode(message.content)
    if not _on_device(context):
        raise NodeError("this node brings no data (data-path in its node config), so it cannot join a run of own-data")
    reply = Content({key: request.fields[key] for key in ("client", "round")} | {"stage": Stage.JOIN})
    reply = _without_private_text(lambda: Device(context).join(request), reply)
    return Message(encode(reply), reply_to=message)


def _without_private_text(answer: Callable[[], Content], failed: Content) -> Content:
    """An answer or, where the node's own files or settings are at fault, the kind of the fault.

    An exception would travel to the server with its text, which may quote rows and names of files.
    """
    try:
        return answer()
    except (DataError, NodeError, StateError, LostError, OSError) as error:
        log(ERROR, "%s", error)
        what = {DataError: "its data", NodeError: "its node config", OSError: "a file"}.get(
            type(error), "its state-dir"
        )
        text = f"{what} cannot be used ({type(error).__name__}); its own log says why"
        return Content(failed.fields | {"problem": text})


@app.train("items")
def items(message: Message, context: Context) -> Message:
    """Stage 1: train, upload."""
    return _run(Stage.ITEMS, message, context)


@app.query("utility")
def utility(message: Message, context: Context) -> Message:
    """Stage 2: the utility query."""
    return _run(Stage.UTILITY, message, context)


@app.train("personalize")
def personalize(message: Message, context: Context) -> Message:
    """Stage 3: take the server's answer, rank the validation rows."""
    return _run(Stage.PERSONALIZE, message, context)


@app.train("regularized")
def regularized(message: Message, context: Context) -> Message:
    """FeCoSR's only stage: train with a pull to the consensus, upload the difference, rank the validation rows."""
    return _run(Stage.REGULARIZED, message, context)


@app.evaluate("rank")
def rank(message: Message, context: Context) -> Message:
    """After the last round: rank the test rows."""
    return _run(Stage.RANK, message, context)


@app.query("checkpoint")
def checkpoint(message: Message, context: Context) -> Message:
    """Write the private state as it is (for a client that did not see the last stage of its round)."""
    request = decode(message.content)
    round_ = int(request.fields["round"])
    who = {"round": round_, "stage": Stage.CHECKPOINT}
    try:
        entered = _enter(request, Stage.CHECKPOINT, round_, context)
    except LostError as error:
        return Message(encode(Content({**who, "lost": str(error)})), reply_to=message)
    client = entered.rows.shard.client
    reply = Content({**who, "client": client, "restored": entered.restored})
    if _on_device(context):
        Device(context).keep(entered, Stage.CHECKPOINT, round_, reply, {})
        entered.remember(context)
    elif (folder := _simulated_folder(context)) is not None:
        folder.save(entered.state, client, round_)
    return Message(encode(reply), reply_to=message)


def _run(stage: str, message: Message, context: Context) -> Message:
    request = decode(message.content)
    settings = from_json(str(request.fields["settings"]))
    round_ = int(request.fields["round"])
    if stage == Stage.RANK and settings.evaluation.per_user and _on_device(context):
        raise PermissionError("evaluation.per_user is refused: this node does not send the metrics of single users")
    try:
        entered = _enter(request, stage, round_, context)
    except LostError as error:
        # An answer, not an exception: the server has this node join again.
        return Message(encode(Content({"round": round_, "stage": stage, "lost": str(error)})), reply_to=message)
    shard, state = entered.rows.shard, entered.state
    who = {"client": shard.client, "round": round_, "stage": stage}
    with threads(1):
        if "secret" not in state.numbers:
            state.numbers["secret"] = _secret(context)
        algorithm = client_algorithm(settings.algorithm)(
            settings, shard, state, round_, resolve_device(settings.device)
        )
        try:
            if stage in (Stage.ITEMS, Stage.REGULARIZED):
                reply = algorithm.items(request)
            elif stage == Stage.UTILITY:
                reply = algorithm.utility(request)
            elif stage == Stage.PERSONALIZE:
                reply = algorithm.personalize(request)
            else:
                reply = algorithm.test(request)
                reply.fields["peak_memory_mib"] = peak_memory_mib()
            if request.fields.get("finish"):
                reply.fields |= algorithm.finish()
        except DivergedError as error:
            # An answer, not an exception: the server must tell this apart from a client that broke.
            return Message(encode(Content({**who, "diverged": str(error)})), reply_to=message)
    reply.fields |= who | {"restored": entered.restored}
    answer = Message(encode(reply), reply_to=message)
    if _on_device(context):
        if stage == Stage.RANK:
            state.numbers["tested_round"] = int(request.fields["best_round"])
        # On the disk before anything else knows of it: what the server sees answered is never lost.
        Device(context).keep(entered, stage, round_, reply, bytes_by_record(answer.content))
    elif request.fields.get("save") and (folder := _simulated_folder(context)) is not None:
        folder.save(state, shard.client, round_)
    entered.remember(context)
    return answer


def _enter(request: Content, stage: str, round_: int, context: Context) -> Entered:
    """Rows and state of this node."""
    if _on_device(context):
        return Device(context).enter(request, stage, round_)
    shard = _simulated_shard(context)
    return Entered(Rows(shard, ()), ClientState.from_context(context))


def _on_device(context: Context) -> bool:
    """Whether this node brings its own data. Only a simulated node follows paths that the server names."""
    return "data-path" in context.node_config


def _secret(context: Context) -> int:
    """What this node mixes into all its draws: nothing in a simulation, 62 random bits on a device.

    The node config may set it (`seed-secret`), to repeat a run on devices whose owners agree to that.
    """
    if not _on_device(context):
        return 0
    return int(context.node_config.get("seed-secret", secrets.randbits(62)))


def _simulated_shard(context: Context) -> Shard:
    place = get_place(context)
    if "data" not in place:
        raise RuntimeError(
            "this node knows no data: the server named none in the handshake, and its node config has no data-path"
        )
    return _load(shard_path(Path(place["data"]), int(context.node_config["partition-id"])))


@lru_cache(maxsize=256)
def _load(path: Path) -> Shard:
    # Shards never change once written, so the actors of a simulation may share them between messages.
    return load_shard(path)


def _simulated_folder(context: Context) -> StateFolder | None:
    folder = get_place(context).get("checkpoint")
    return StateFolder(Path(folder) / "clients", durable=False) if folder else None
