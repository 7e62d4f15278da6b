"""The ServerApp: resolve the settings, meet the clients, run the strategy, write the result."""

import json
import os
import platform
import shlex
import time
import traceback
from importlib.metadata import version
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

import fedhur_app
from fedhur_app.config import DEFAULT_RUN_CONFIG, ConfigError, Settings, settings_of_run
from fedhur_app.data.attributes import load_attributes
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.shards import PreparedData
from fedhur_app.files import write_text
from fedhur_app.fingerprint import code_fingerprint
from fedhur_app.memory import peak_memory_mib
from fedhur_app.protocol import Content, Stage
from server_app.checkpoint import CheckpointError, RunFolder
from server_app.live import live_view
from server_app.stages import RunError, StageRunner, say
from server_app.strategies import server_strategy
from server_app.strategies.base import Fleet, Outcome, Progress

app = ServerApp()

# A simulation's nodes are all there within a moment: a count that stands still for so long is the final one.
SETTLED_SECONDS = 3.0


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of `flwr run` and of the local runtime."""
    start = time.perf_counter()
    config = dict(context.run_config)
    resume = str(config["resume"])
    output = str(config["output-dir"]) or resume or f"runs/{context.run_id}"
    folder = RunFolder(Path(output).expanduser().resolve())
    identity: dict[str, Any] = {
        "dataset": config["dataset"],
        "strategy": config["strategy"],
        "seed": config["seed"],
    }
    say("output: %s", folder.path)
    try:
        settings = settings_of_run(config)
        if resume and folder.path != Path(resume).expanduser().resolve():
            raise ConfigError(
                f"resume is {resume!r} and output-dir {output!r}: a resumed run goes on in its own folder, leave "
                "output-dir empty"
            )
        if not resume and folder.read_history(settings.rounds):
            raise CheckpointError(f"{folder.path} already holds a run: choose another output-dir, or resume it")
        identity = {
            "dataset": settings.dataset.name,
            "strategy": settings.strategy,
            "seed": settings.seed,
        }
        outcome = _run(grid, settings, folder, config)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "stopped by Ctrl-C" if interrupted else str(error) or type(error).__name__
        failure = {
            "status": "failed",
            **identity,
            "reason": reason,
            "error": type(error).__name__,
            "traceback": traceback.format_exc(),
            "seconds": time.perf_counter() - start,
            "versions": versions(),
        }
        # A run that never got going says nothing about the one whose files lie there.
        others = isinstance(error, CheckpointError | ConfigError) and (folder.history.is_file() or bool(resume))
        if not others:
            folder.write_result(failure)
        say("failed: %s", reason, level=ERROR)
        say("output: %s", folder.path)
        raise
    folder.write_result(
        {
            "status": "completed",
            **identity,
            "rounds": outcome.rounds,
            "best_round": outcome.best_round,
            "selection": settings.evaluation.selection,
            "validation": outcome.validation,
            "test": outcome.test,
            "users_evaluated": outcome.users_evaluated,
            "bytes_up": outcome.bytes_up,
            "bytes_down": outcome.bytes_down,
            "seconds": outcome.seconds,
            "peak_memory_mib": {"server": peak_memory_mib(), "client": outcome.client_memory_mib},
            "absent_at_test": {str(client): reason for client, reason in outcome.absent_at_test.items()},
            "versions": versions(),
        }
    )
    k = settings.evaluation.k
    value = outcome.test[f"ndcg@{k}"]
    quality = "no client has test items" if value is None else f"test ndcg@{k} {value:.4f}"
    own_best = settings.evaluation.selection == "client"
    say("%s (%s)", quality, "each client's own best round" if own_best else f"model of round {outcome.best_round}")
    say("output: %s", folder.path)


def versions() -> dict[str, str]:
    """Versions of what decides the numbers, for config.yaml and result.json."""
    packages = ("flwr", "torch", "numpy", "scipy", "scikit-learn")
    return {
        "fedhur": fedhur_app.__version__,
        "code": code_fingerprint(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        **{package: version(package) for package in packages},
    }


def _run(grid: Grid, settings: Settings, folder: RunFolder, config: dict[str, Any]) -> Outcome:
    resume = str(config["resume"])
    if not resume:
        _write_config(folder, settings, None)
    data = prepare_data(settings)
    if resume and data:
        _check_data(folder, data)
    progress: Progress | None = None
    arrays: dict[str, np.ndarray] = {}
    if resume:
        plain, arrays = folder.load_server()
        progress = Progress.from_plain(plain)
    on_round = live_view(settings, folder, progress.round if progress else 0, data.markets if data else ())
    if settings.centralised:
        say("all data in one place, as one client: %s is a reference, not a federated method", settings.strategy)
    fleet = meet(grid, settings, data, folder, progress, config)
    strategy = server_strategy(settings.algorithm)(settings, fleet, folder)
    strategy.on_round = on_round
    if progress:
        strategy.resume(progress, arrays)
        folder.rewrite_history(folder.read_history(progress.round))
        say("resumed after round %d", progress.round)
    else:
        folder.rewrite_history([])
    _write_config(folder, settings, data)
    return strategy.start(grid)


def _write_config(folder: RunFolder, settings: Settings, data: PreparedData | None) -> None:
    about: dict[str, Any] | str = "not on the server"
    if data:
        about = {"fingerprint": data.fingerprint, "folder": str(data.folder), "markets": list(data.markets)}
    content = {
        "settings": yaml.safe_load(settings.to_yaml()),
        "data": about,
        "versions": versions(),
    }
    write_text(folder.config, yaml.safe_dump(content, sort_keys=False))


def _check_data(folder: RunFolder, data: PreparedData) -> None:
    """A run goes on with the data it began with."""
    before = yaml.safe_load(folder.config.read_text(encoding="utf-8"))["data"]
    if isinstance(before, dict) and before["fingerprint"] != data.fingerprint:
        raise CheckpointError(
            f"the data set has changed since the run in {folder.path} began (fingerprint {before['fingerprint']}, now "
            f"{data.fingerprint}): the run cannot be resumed"
        )


def meet(
    grid: Grid,
    settings: Settings,
    data: PreparedData | None,
    folder: RunFolder,
    progress: Progress | None,
    config: dict[str, Any],
) -> Fleet:
    """Wait for the nodes and learn who is who.

    Raises:
        RunError: The number of nodes is wrong, they run other code, two claim the same client, or their catalogues
            differ.
    """
    expected = data.clients if data else settings.dataset.clients.number
    ids = _wait_for_nodes(grid, expected, settings, config, simulated=data is not None)
    request = Content(
        {
            "code": code_fingerprint(),
            "data": str(data.folder) if data else None,
            "checkpoint": str(folder.checkpoint),
            "resume_round": progress.round if progress else 0,
        }
    )
    # Clients are not known yet: nodes are numbered in the order in which Flower lists them.
    nodes = dict(enumerate(ids))
    runner = StageRunner(grid, nodes, 1.0, settings.server.stage_timeout)
    try:
        result = runner.call(Stage.HELLO, 0, dict.fromkeys(nodes, request), "hello")
    except RunError as error:
        raise RunError(
            f"the handshake failed: {error}. If clients do not know the handshake, they run another app: a SuperLink "
            "that was started in another folder serves that folder's client code. Stop it and start again from this "
            "project's folder"
        ) from error
    hellos = {nodes[number]: content.fields for number, content in result.replies.items()}
    codes = {str(fields["code"]) for fields in hellos.values()} - {code_fingerprint()}
    if codes:
        raise RunError(
            f"clients run other code ({', '.join(sorted(codes))}) than the server ({code_fingerprint()}): a "
            "SuperLink or SuperNode from another folder or version is in use. Stop it, start it again from this "
            "project's folder and run again"
        )
    by_client: dict[int, int] = {}
    for node, fields in hellos.items():
        client = int(fields["client"])
        if client in by_client:
            raise RunError(
                f"two nodes ({by_client[client]} and {node}) both claim to be client {client}: give each SuperNode "
                "its own data (data-path in its node config)"
            )
        by_client[client] = node
    catalogues = {int(fields["n_items"]) for fields in hellos.values()}
    if len(catalogues) != 1:
        raise RunError(f"the clients' catalogues differ in size ({sorted(catalogues)} items): they must be the same")
    restored = {int(fields["client"]) for fields in hellos.values() if fields.get("restored")}
    lost = sorted(set(progress.sums) - restored) if progress and data else []
    if progress and lost:
        raise RunError(
            f"no private state of client {lost[0]} as of round {progress.round} in {folder.checkpoint}: the run "
            "cannot be resumed"
        )
    for fields in hellos.values() if progress else ():
        client, found = int(fields["client"]), int(fields.get("trained_round", 0))
        known = progress.trained.get(client, 0) if progress else 0
        if found < known:
            say(
                "client %d goes on with its state of round %d, it last trained in round %d and did not save that: the "
                "history will differ from that of an unbroken run",
                client,
                found,
                known,
                level=WARNING,
            )
    return Fleet(
        nodes=dict(sorted(by_client.items())),
        n_items=catalogues.pop(),
        valid_users={int(fields["client"]): int(fields["valid_users"]) for fields in hellos.values()},
        interactions={int(fields["client"]): int(fields["interactions"]) for fields in hellos.values()},
        attributes=_attributes(settings, data),
    )


def _attributes(settings: Settings, data: PreparedData | None) -> Tensor | None:
    """What the catalogue says about items, (I, a); None where it says nothing or the run does not ask."""
    wanted = settings.algorithm == "fecosr" and settings.fecosr.attribute_prior > 0
    attributes = load_attributes(data.folder) if data and wanted else None
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
    raise RunError(
        f"{expected} clients are expected (dataset.clients.number), {len(ids)} SuperNodes are connected after "
        f"{settings.server.connect_timeout:g} s: start or stop SuperNodes, or set dataset.clients.number={len(ids)}"
    )
