"""A deployment on the loopback interface, with processes that can be killed: made and started by the written files."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedhur_app.config import load_settings
from fedhur_app.data.importing import ImportOptions, import_file, save_imported
from fedhur_app.deploy import layout
from fedhur_app.deploy.reach import problem_of
from fedhur_app.deploy.split import split_data
from fedhur_app.flower_runner import _alive, _below, _process_table, end_sessions, free_port

FEDHUR = Path(sys.executable).parent / "fedhur"
NAMES = ["anna", "bert", "carl"]
SETTINGS = (
    "model.dim=8 score.steps=3 hierarchy.branching=[4,4] hierarchy.flat_groups=16 "
    # Two stages a round instead of three: each costs seconds. The third is tested with the local runtime.
    "relation.kind=similarity"
)
ROUNDS = 5
USERS, ITEMS = 45, 60
# Nobody else writes these.
MARK = "zq7Plant"
PATIENCE = 600.0  # seconds for anything to happen on a machine with much else to do


def end_sessions_now(sessions: set[int]) -> None:
    """Kill -9 all processes of some sessions."""
    for pid in _alive(sessions):
        os.kill(pid, signal.SIGKILL)


def wait_until(what: Callable[[], bool], about: str, seconds: float = PATIENCE) -> None:
    """Look several times a second until something is so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {about}"
        time.sleep(0.1)


class Devices:
    """A deployment whose server and devices run as processes of this machine.

    Args:
        folder: Where `fedhur deploy init` writes.
        names: Names of the devices.
        node_config: More lines of [node-config] in every node.toml.
    """

    def __init__(self, folder: Path, names: list[str], node_config: str = "") -> None:
        self.folder, self.names = folder, names
        self.server = folder / "server"
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        layout.init(folder, names, port=self.port)
        for name in names:
            self.finish(name, node_config)

    def place(self, name: str) -> Path:
        """The folder of a device, or of the server."""
        return self.server if name == "server" else self.folder / "clients" / name

    def finish(self, name: str, node_config: str = "") -> None:
        """Give a device a port that is free, and more settings."""
        file = self.place(name) / "node.toml"
        text = re.sub(r"(?m)^port = \d+", f"port = {free_port()}", file.read_text())
        file.write_text(text + node_config)

    def start(self, name: str, environment: dict[str, str] | None = None) -> None:
        """Run the start.sh of a device or of the server."""
        with self.log_file(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["sh", str(self.place(name) / "start.sh")],
                env={**os.environ, "FEDHUR": str(FEDHUR), "OMP_NUM_THREADS": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log_file(self, name: str) -> Path:
        """Where the output of a start.sh goes."""
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        """The output of a start.sh so far."""
        return self.log_file(name).read_text(errors="replace")

    def wait_for(self, name: str, text: str) -> None:
        """Wait for a text in the output of a start.sh."""
        process = self._processes[name]
        wait_until(lambda: text in self.log(name) or process.poll() is not None, f"{text!r} in the log of {name}")
        assert text in self.log(name), self.log(name)

    def wait_for_server(self) -> None:
        """Wait until the SuperLink answers."""
        address, process = f"127.0.0.1:{self.port}", self._processes["server"]
        wait_until(
            lambda: not problem_of(address, self.server / "ca.crt") or process.poll() is not None,
            "the SuperLink answers",
        )
        assert process.poll() is None, self.log("server")

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """`fedhur deploy ...`, to its end."""
        return subprocess.run([str(FEDHUR), "deploy", *arguments], capture_output=True, text=True, timeout=600)

    def pids(self, name: str, command: str) -> list[int]:
        """The processes below a start.sh whose command line holds a text."""
        found = []
        for pid in _below(self._processes[name].pid):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if command in line:
                found.append(pid)
        return found

    def working(self, name: str) -> list[int]:
        """The ClientApps of a device: children of the process that waits for messages."""
        waiting = self.pids(name, "deploy/warm.py")
        return [pid for pid in waiting if _process_table().get(pid) in waiting]

    def kill(self, name: str, command: str) -> None:
        """Kill -9 the processes below a start.sh whose command line holds a text."""
        pids = self.pids(name, command)
        assert pids, f"{name} has no process {command}"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def power_off(self, name: str) -> None:
        """Kill -9 everything below a start.sh, itself included: nobody is left to say good-bye."""
        process = self._processes.pop(name)
        end_sessions_now({os.getsid(pid) for pid in [process.pid, *_below(process.pid)]})
        process.wait()

    def stop(self, *names: str) -> None:
        """SIGTERM to start.sh of these (by default of all), and wait until nothing of them is left."""
        chosen = {name: self._processes.pop(name) for name in names or list(self._processes)}
        sessions = set()
        for process in chosen.values():
            for pid in [process.pid, *_below(process.pid)]:
                try:
                    sessions.add(os.getsid(pid))
                except ProcessLookupError:
                    continue
            process.terminate()
        end = time.monotonic() + 60
        for process in chosen.values():
            try:
                process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        end_sessions(sessions)

    def another(self, name: str, like: str) -> None:
        """A further device with the key and the rows of another."""
        shutil.copytree(self.place(like), self.place(name), ignore=shutil.ignore_patterns("flwr", ".lock", "state"))
        self.finish(name)


class Run:
    """`fedhur deploy run` in the background."""

    def __init__(self, devices: Devices, output: Path, *more: str, fresh: bool = True) -> None:
        options = [f"--set={item}" for item in [*settings_list(), "dataset.split.kind=published"]] if fresh else []
        self.output = output
        self._process = subprocess.Popen(
            [str(FEDHUR), "deploy", "run", str(devices.server), *options, "--output", str(output), "--verbose", *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def log(self) -> str:
        path = self.output / "run.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.log() or self._process.poll() is not None, f"{text!r} in the log of the run")
        assert text in self.log()

    def end(self) -> tuple[int, str]:
        """Wait for the end; exit status and what was printed."""
        said, _ = self._process.communicate(timeout=600)
        return self._process.returncode, said


def plant(folder: Path) -> str:
    """Import a data set whose ids, titles and times can be recognised anywhere; returns its name."""
    generator = np.random.default_rng(5)
    rows, name = [], "planted"
    for user in range(USERS):
        for item in generator.choice(ITEMS, 12, replace=False):
            rows.append(f"{MARK}User{user:03d},{MARK}Item{item:03d},{1_876_543_000 + len(rows)}")
    (folder / "rows.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    titles = [f"{MARK}Item{item:03d},{MARK}Title{item:03d}" for item in range(ITEMS)]
    (folder / "items.csv").write_text("item,title\n" + "\n".join(titles) + "\n")
    save_imported(import_file(folder / "rows.csv", name, ImportOptions(items=folder / "items.csv")))
    return name


def settings_list() -> list[str]:
    return [*SETTINGS.split(), f"rounds={ROUNDS}", f"min_rounds={ROUNDS}"]


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The rows that a device was given."""
    with (folder / "data" / "interactions.csv").open() as file:
        return list(csv.DictReader(file))


def planted(folder: Path, node_config: str = "") -> Devices:
    """A deployment of three devices with rows of the planted data set; nothing runs yet."""
    made = Devices(folder / "d", NAMES, node_config)
    split_data(load_settings(plant(folder), overrides=f"dataset.clients.number={len(NAMES)}"), made.folder)
    return made


def start_all(devices: Devices) -> None:
    """Start the server and all devices, and register them."""
    for name in ("server", *NAMES):
        devices.start(name)
    devices.wait_for_server()
    done = devices.command("register", str(devices.server))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        devices.wait_for(name, "SuperNode ID:")
