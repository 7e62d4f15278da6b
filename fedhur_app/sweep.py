"""Many `fedhur run` at once, each in a process and a folder of its own, below a folder that nobody else works in.

Signals are collected and looked at between two steps: one that raised an exception anywhere could hit between the
start of a process and its being noted, and leave that process behind.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fedhur_app.config import ConfigError

# One thread: runs share the cores. No checkpoints: a run that was cut off starts anew.
OF_EVERY_RUN = {"server.threads": 1, "server.checkpoint_every": 0}
OUTPUT_LOG = "output.log"  # what a run's process printed; in every folder that was made here
POLL_SECONDS = 0.05
STOP_SECONDS = 60.0  # a run under Flower ends its SuperLink in that time

Say = Callable[[str], object]


class SweepError(ConfigError):
    """Runs that cannot be made as asked, or an output folder that does not fit; the text says what to do."""


@dataclass(frozen=True)
class Ended:
    """A run whose process has ended.

    Attributes:
        folder: Output folder of the run.
        status: Exit status of the process; below 0 the signal that ended it.
        seconds: Wall time of the process.
    """

    folder: Path
    status: int
    seconds: float

    @property
    def reason(self) -> str:
        """Why the run left no result, as far as its process tells; one line."""
        if self.status < 0:
            return f"its process was ended by {signal.Signals(-self.status).name}"
        lines = (self.folder / OUTPUT_LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last or f"its process ended with status {self.status}"


def as_json(value: Any) -> str:
    """A setting's value as JSON, which is also YAML. What JSON does not know is no value, and becomes a text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def shown(value: Any) -> str:
    """A setting's value for people."""
    return value if isinstance(value, str) else as_json(value)


def set_items(values: Mapping[str, Any]) -> list[str]:
    """Values by dotted setting as items of `--set`."""
    return [f"{key}={as_json(value)}" for key, value in values.items()]


def run_command(
    dataset: str, strategy: str, seed: int, folder: Path, changes: Iterable[str], runtime: str = "local"
) -> list[str]:
    """The command of one run into `folder`; `changes` are items of `--set`."""
    options = run_options(dataset, strategy, seed, folder, changes)
    return [*module_command("fedhur_app.cli"), "run", "--runtime", runtime, *options]


def module_command(module: str) -> list[str]:
    """The beginning of a command that runs a module."""
    # -P: the code of this process, whatever the working directory holds.
    return [sys.executable, "-P", "-m", module]


def run_options(dataset: str, strategy: str, seed: int, folder: Path, changes: Iterable[str]) -> list[str]:
    """The options that say which run it is, of `fedhur run` and of the workers of studies."""
    return [
        *("--dataset", dataset, "--strategy", strategy, "--seed", str(seed), "--output", str(folder)),
        *(word for change in changes for word in ("--set", change)),
    ]


@contextlib.contextmanager
def locked(folder: Path, command: str) -> Iterator[int]:
    """Keep other sweeps out of a folder, which is made if absent; gives the descriptor that holds the lock.

    The runs inherit the lock: should this process be killed, it lasts until the last of them has ended.

    Raises:
        SweepError: Another one is at work there, or the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SweepError(f"cannot write to {folder} ({error.strerror}): choose another --output") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SweepError(
                f"another `fedhur {command}`, or a run that one left behind, is at work in {folder}: wait for its "
                "end, or choose another --output"
            ) from error
        except OSError:
            pass  # a file system without locks: then nobody is kept out
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list instead of being ended by them between two statements."""
    received: list[int] = []

    def collect(number: int, _: FrameType | None) -> None:
        received.append(number)

    def ignore(number: int, _: FrameType | None) -> None:
        # What this process ignores (SIGINT in the background of a script, SIGHUP under nohup) the runs would ignore
        # for good; what it handles they may handle.
        pass

    old = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            ignored = signal.getsignal(number) is signal.SIG_IGN
            old[number] = signal.signal(number, ignore if ignored else collect)
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run_all(
    folders: Iterable[Path],
    command: Callable[[Path], list[str]],
    jobs: int,
    ended: Callable[[Ended], None],
    lock: int,
    signals: Sequence[int],
    say: Say,
) -> bool:
    """Run one command a folder, `jobs` at once. However this function is left, no process is left behind.

    Args:
        folders: Output folders of the runs, in the order in which they start. What they hold is removed.
        command: The command of the run into a folder.
        jobs: Runs at once, >= 1.
        ended: Takes each run as it ends, but not those that a signal stops.
        lock: From :func:`locked`.
        signals: From :func:`collected_signals`; one of them stops the runs, another one kills them.
        say: Takes a line for people.

    Returns:
        Whether a signal kept a run from being made.
    """
    waiting, running = deque(folders), dict[Path, tuple[subprocess.Popen[bytes], float]]()
    try:
        while (waiting or running) and not signals:
            while waiting and len(running) < jobs:
                folder = waiting.popleft()
                running[folder] = _start(folder, command(folder), lock), time.perf_counter()
            time.sleep(POLL_SECONDS)
            for folder, (process, started) in list(running.items()):
                if process.poll() is not None:
                    del running[folder]
                    ended(Ended(folder, process.returncode, time.perf_counter() - started))
    finally:
        if running:
            with contextlib.suppress(OSError):  # a closed pipe must not keep the runs alive
                say(f"stopping {len(running)} runs")
            _stop([process for process, _ in running.values()], signals)
    return bool(waiting or running)


def _start(folder: Path, command: list[str], lock: int) -> "subprocess.Popen[bytes]":
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    with (folder / OUTPUT_LOG).open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C is for this process, which then stops the runs
        )


def _stop(processes: "list[subprocess.Popen[bytes]]", signals: Sequence[int]) -> None:
    """End processes: first asked, then, or after another signal, forced."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline, before = time.monotonic() + STOP_SECONDS, len(signals)
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or len(signals) > before:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
