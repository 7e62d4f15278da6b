"""The ServerApp: resolve the settings, meet the clients, run the strategy, write the result."""

import os
import platform
import shutil
import time
import traceback
from importlib.metadata import version
from logging import ERROR
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedhur_app
from fedhur_app.config import ConfigError, Settings, settings_of_run
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.shards import PreparedData
from fedhur_app.files import write_text
from fedhur_app.fingerprint import code_fingerprint
from fedhur_app.memory import peak_memory_mib
from server_app.checkpoint import CheckpointError, RunFolder
from server_app.handshake import Register, meet
from server_app.live import live_view
from server_app.stages import say
from server_app.strategies import server_strategy
from server_app.strategies.base import Outcome, Progress

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
    folder.write_result(completed(settings, outcome))
    k = settings.evaluation.k
    value = outcome.test[f"ndcg@{k}"]
    quality = "no client has test items" if value is None else f"test ndcg@{k} {value:.4f}"
    own_best = settings.evaluation.selection == "client"
    say("%s (%s)", quality, "each client's own best round" if own_best else f"model of round {outcome.best_round}")
    say("output: %s", folder.path)


def completed(settings: Settings, outcome: Outcome) -> dict[str, Any]:
    """What result.json says of a run that went to its end."""
    return {
        "status": "completed",
        "dataset": settings.dataset.name,
        "strategy": settings.strategy,
        "seed": settings.seed,
        "rounds": outcome.rounds,
        "max_rounds": settings.rounds,
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
        write_config(folder, settings, None)
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
    register: Register | None = None
    if data is None:
        register = Register(grid, settings, folder, progress)
        fleet = register.meet()
    else:
        shutil.rmtree(folder.states, ignore_errors=True)  # of a run that was killed
        fleet = meet(grid, settings, data, folder, progress, config)
    strategy = server_strategy(settings.algorithm)(settings, fleet, folder)
    strategy.on_round = on_round
    if progress:
        strategy.resume(progress, arrays)
        folder.rewrite_history(folder.read_history(progress.round))
        say("resumed after round %d", progress.round)
    else:
        folder.rewrite_history([])
    if register:
        register.follow(strategy.progress)
        strategy.roll = register
    write_config(folder, settings, data)
    try:
        return strategy.start(grid)
    finally:
        shutil.rmtree(folder.states, ignore_errors=True)


def write_config(folder: RunFolder, settings: Settings, data: PreparedData | None) -> None:
    """Write config.yaml: resolved settings, versions, and which data."""
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
