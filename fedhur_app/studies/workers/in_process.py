"""Pieces of a run in this process, for workers that watch or change its clients or its server.

A worker is a command, `python -P -m fedhur_app.studies.workers.NAME --dataset D --strategy S --seed N --output DIR
[--set K=V ...]` with options of its own. It leaves an ordinary run folder and files beside it; `result.json` comes
last.
"""

import argparse
import contextlib
import shlex
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhur_app.config import ConfigError, Settings, settings_of_run
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.shards import PreparedData
from fedhur_app.files import read_json
from fedhur_app.runtime import Client, LocalGrid
from server_app.app import completed, versions, write_config
from server_app.checkpoint import RunFolder
from server_app.handshake import meet
from server_app.strategies import server_strategy
from server_app.strategies.base import StagedStrategy


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all workers have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--dataset", required=True, help="a file in conf/dataset/")
    options.add_argument("--strategy", required=True, help="a file in conf/strategy/")
    options.add_argument("--seed", type=int, default=1, help="seed of the whole run")
    options.add_argument("--output", type=Path, required=True, help="output folder")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    return options


def run_config(options: argparse.Namespace, more: Sequence[str] = ()) -> dict[str, Any]:
    """The run config that the common options mean; `more` are further items of `--set`, which win."""
    return {
        "dataset": options.dataset,
        "strategy": options.strategy,
        "seed": options.seed,
        "overrides": shlex.join([*options.set, *more]),
        "output-dir": str(options.output.expanduser().resolve()),
        "resume": "",
    }


@dataclass(frozen=True)
class LocalRun:
    """A run that is ready to start: the clients have been met.

    Attributes:
        settings: Its settings.
        data: Where its shards lie.
        folder: Where it writes.
        grid: Its nodes.
        strategy: The server's half.
    """

    settings: Settings
    data: PreparedData
    folder: RunFolder
    grid: LocalGrid
    strategy: StagedStrategy

    def start(self, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run all rounds and the test; returns what result.json will say, with the entries of `more`."""
        return completed(self.settings, self.strategy.start(self.grid)) | (more or {})


def settings_of_all_rounds(config: dict[str, Any], rounds: int | None = None) -> tuple[Settings, dict[str, Any]]:
    """Settings of a run that never stops early and keeps no checkpoint, and the run config that leads to them.

    What is watched happens in rounds that are fixed beforehand, and there is nothing to resume from.

    Args:
        config: From :func:`run_config`.
        rounds: How many; None: as many as the settings say.
    """
    if rounds is None:
        rounds = settings_of_run(_changed(config, "min_rounds=1")).rounds
    config = _changed(config, f"rounds={rounds}", f"min_rounds={rounds}", "server.checkpoint_every=0")
    return settings_of_run(config), config


def _changed(config: dict[str, Any], *changes: str) -> dict[str, Any]:
    return config | {"overrides": f"{config['overrides']} {shlex.join(changes)}".strip()}


def build(
    settings: Settings,
    config: dict[str, Any],
    client: Client | None = None,
    server: type[StagedStrategy] | None = None,
    data: PreparedData | None = None,
) -> LocalRun:
    """Prepare the data, meet the clients, make the server's half.

    Args:
        settings: The run's settings.
        config: The run config that they come from.
        client: What the nodes run; None: the ClientApp.
        server: The server's half; None: that of the algorithm.
        data: The shards; None: as the settings say.

    Raises:
        ConfigError: The output folder holds a run already, or the nodes bring their own data.
    """
    from client_app.app import app as client_app

    folder = RunFolder(Path(config["output-dir"]))
    if folder.history.is_file():
        raise ConfigError(f"{folder.path} already holds a run: choose another --output")
    data = data or prepare_data(settings)
    if data is None:
        raise ConfigError(f"{settings.dataset.name} means rows on devices: a study needs the data here")
    grid = LocalGrid(client or client_app, data.clients, config)
    write_config(folder, settings, data)
    fleet = meet(grid, settings, data, folder, None, config)
    strategy = (server or server_strategy(settings.algorithm))(settings, fleet, folder)
    return LocalRun(settings, data, folder, grid, strategy)


@contextlib.contextmanager
def failures_written(options: argparse.Namespace) -> Iterator[None]:
    """Say in result.json why a worker failed, unless a run lies there that this one only found."""
    start = time.perf_counter()
    folder = RunFolder(options.output.expanduser().resolve())
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, ConfigError) and read_json(folder.result)):
            folder.write_result(
                {
                    "status": "failed",
                    "dataset": options.dataset,
                    "strategy": options.strategy,
                    "seed": options.seed,
                    "reason": str(error) or type(error).__name__,
                    "error": type(error).__name__,
                    "traceback": traceback.format_exc(),
                    "seconds": time.perf_counter() - start,
                    "versions": versions(),
                }
            )
        raise
