"""The ClientApp: one handler a stage. In simulation and on a device alike."""

import os
import secrets
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.algorithms import client_algorithm
from client_app.state import ClientState, StateFolder, get_place, set_place
from fedhur_app.compute import resolve_device, threads
from fedhur_app.config import from_json
from fedhur_app.data.shards import Shard, load_shard, shard_path
from fedhur_app.fingerprint import code_fingerprint
from fedhur_app.memory import peak_memory_mib
from fedhur_app.models.training import DivergedError
from fedhur_app.protocol import Content, Stage, decode, encode

# Ray reads this before it starts its workers: it keeps them from hiding the GPUs, and a warning from the log.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Handshake: who is here, with which code and how much data; on a resume, reload the private state."""
    request = decode(message.content)
    reply = Content({"code": code_fingerprint()})
    if request.fields["code"] == reply.fields["code"]:
        set_place(context, {key: str(request.fields[key]) for key in ("data", "checkpoint") if key in request.fields})
        shard = _shard(context)
        reply.fields |= {
            "client": shard.client,
            "n_items": shard.n_items,
            "users": shard.n_users,
            "interactions": len(shard.train),
            "valid_users": int((shard.valid.counts > 0).sum()),
            "test_users": int((shard.test.counts > 0).sum()),
        }
        folder = _state_folder(context)
        resume_round = int(request.fields.get("resume_round", 0))
        if folder is not None and resume_round:
            state = folder.load(shard.client, resume_round)
            reply.fields["restored"] = state is not None
            if state is not None:
                reply.fields["trained_round"] = state.numbers.get("trained_round", 0)
                state.to_context(context)
    return Message(encode(reply), reply_to=message)


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
    shard = _shard(context)
    folder = _state_folder(context)
    if folder is not None:
        folder.save(ClientState.from_context(context), shard.client, int(request.fields["round"]))
    fields = {"client": shard.client, "round": request.fields["round"], "stage": Stage.CHECKPOINT}
    return Message(encode(Content(fields)), reply_to=message)


def _run(stage: str, message: Message, context: Context) -> Message:
    request = decode(message.content)
    settings = from_json(str(request.fields["settings"]))
    round_ = int(request.fields["round"])
    shard = _shard(context)
    who = {"client": shard.client, "round": round_, "stage": stage}
    if stage == Stage.RANK and settings.evaluation.per_user and _on_device(context):
        raise PermissionError("evaluation.per_user is refused: this node does not send the metrics of single users")
    with threads(1):
        state = ClientState.from_context(context)
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
    state.to_context(context)
    folder = _state_folder(context)
    if folder is not None and request.fields.get("save"):
        folder.save(state, shard.client, round_)
    reply.fields |= who
    return Message(encode(reply), reply_to=message)


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


def _shard(context: Context) -> Shard:
    if _on_device(context):
        path = Path(str(context.node_config["data-path"]))
        return _load(path / "shard.npz" if path.is_dir() else path)
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


def _state_folder(context: Context) -> StateFolder | None:
    if _on_device(context):
        own = context.node_config.get("state-dir")
        return StateFolder(Path(str(own)), durable=True) if own else None
    folder = get_place(context).get("checkpoint")
    return StateFolder(Path(folder) / "clients", durable=False) if folder else None
