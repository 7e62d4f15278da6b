"""Starts the SuperLink or the SuperNode of a folder and keeps it alive; says in plain words why it does not run.

A SuperNode that died without a good-bye (kill -9, a crash) is still "online" for the server for up to a minute: the
round waits for it, and its next start is refused. The device keeps its number while it is online, and signs off in the
name of the dead one before it starts again.
"""

import fcntl
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedhur_app.deploy import warm
from fedhur_app.deploy.errors import DeployError
from fedhur_app.deploy.reach import problem_of, release
from fedhur_app.deploy.settings import NodeFolder, ServerFolder
from fedhur_app.files import write_text
from fedhur_app.flower_runner import end_sessions, environment, toml_text

RETRY_SECONDS = 5.0
# The ServerApp looks for answers several times a second. It must see the device gone, or it would wait for an answer
# that never comes.
AWAY_SECONDS = 3.0
HEARTBEAT_SECONDS = 60.0  # after so long without a sign of life the server lets a device go by itself
STOP_SECONDS = 20.0

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NODE_ID = re.compile(r"SuperNode ID: (\d+)")

Say = Callable[[str], None]
_pause = time.sleep


@dataclass(frozen=True)
class Ending:
    """How a process ended: its exit status and its last lines."""

    status: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The last lines as one text, for searching."""
        return " ".join(" ".join(self.lines).split())


def run_server(server: ServerFolder, say: Say) -> None:
    """Run the SuperLink for ever; it is started again whenever it ends.

    Raises:
        DeployError: It cannot run with these settings.
    """
    with _alone(server.folder):
        server.home.mkdir(mode=0o700, exist_ok=True)
        command = [
            *(sys.executable, "-m", "fedhur_app.deploy.superlink", ",".join(server.operators) or "-"),
            *("--ssl-ca-certfile", str(server.authority)),
            *("--ssl-certfile", str(server.certificate), "--ssl-keyfile", str(server.key)),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--host", server.host, "--port", str(server.port), "--database", str(server.database)),
        ]
        while True:
            say(f"starting the SuperLink on {server.host}:{server.port}")
            ending = _run(command, server.folder, server.home, say)
            if explained := explain_server(ending, server):
                raise DeployError(explained)
            say(f"the SuperLink ended ({_how(ending.status)}); it starts again in {RETRY_SECONDS:.0f} s")
            _pause(RETRY_SECONDS)


def run_node(node: NodeFolder, say: Say) -> None:
    """Run the SuperNode for ever: wait for the server, start, explain and try again whenever it ends.

    Raises:
        DeployError: It cannot run with these settings.
    """
    with _alone(node.folder):
        node.home.mkdir(mode=0o700, exist_ok=True)
        config = node.home / "node-config.toml"
        write_text(config, toml_text(node.node_config()))
        online = node.home / "online"  # Flower's number of this device while its SuperNode runs
        command = [
            *(str(_scripts() / "flower-supernode"), "--superlink", node.superlink),
            *("--root-certificates", str(node.authority), "--auth-supernode-private-key", str(node.key)),
            *("--host", "127.0.0.1", "--port", str(node.port), "--node-config", str(config)),
        ]
        refused_since: float | None = None
        running: list[subprocess.Popen[str]] = []

        def heard_of_clientapps(line: str) -> None:
            say(line)
            if line.startswith(warm.KILLED):
                say("the SuperNode has to start anew, or the server would wait for that answer")
                for process in running:
                    process.kill()

        while True:
            _wait_for_server(node, say)
            if online.exists():
                _sign_off(node, online, say)
            say(f"starting the SuperNode of {node.name}, server {node.superlink}")

            def heard(line: str) -> None:
                nonlocal refused_since
                say(line)
                if found := _NODE_ID.search(line):
                    refused_since = None
                    write_text(online, found[1])

            running.clear()
            with _warm(node, heard_of_clientapps) as variables:
                ending = _run(command, node.folder, node.home, heard, variables, running)
            if refused(ending):
                refused_since = refused_since or time.monotonic()
            waited = time.monotonic() - refused_since if refused_since else 0.0
            explained, retry = explain_node(ending, node, waited)
            if not retry:
                raise DeployError(explained)
            say(f"{explained}; next try in {RETRY_SECONDS:.0f} s")
            _pause(RETRY_SECONDS)


def refused(ending: Ending) -> bool:
    """Whether the server did not let the device in."""
    return "code: 2004" in ending.text or "Failed to activate SuperNode" in ending.text


def explain_node(ending: Ending, node: NodeFolder, refused_seconds: float = 0.0) -> tuple[str, bool]:
    """Why a SuperNode ended, and whether another try makes sense.

    Args:
        ending: How it ended.
        node: The device.
        refused_seconds: How long the server has been refusing it.
    """
    text = ending.text
    if ending.status < 0:  # whatever it said before: this did not end it
        return f"the SuperNode of {node.name} ended ({_how(ending.status)})", True
    if refused(ending):
        if refused_seconds < HEARTBEAT_SECONDS:
            return (
                f"the server refuses {node.name}: either its key is not registered (on the server: `fedhur deploy "
                "register server`), or the server still waits for a sign of life of its last start (a minute at most)",
                True,
            )
        return (
            f"the server refuses the key of {node.name}: it is not registered, was removed, or another machine uses it "
            f"now. On the server: put {node.name}.pub into server/keys/ and run `fedhur deploy register server`; each "
            "device needs a folder of its own",
            True,
        )
    if "address already in use" in text:
        return (
            f"port {node.port} of this machine is in use (another SuperNode?): choose another `port` in "
            f"{node.folder / 'node.toml'}",
            False,
        )
    if "Unable to parse the private key" in text:
        return _damaged_key(node), False
    if "Invalid SuperNode authentication" in text or "401 Unauthorized" in text:
        return (
            "the server no longer accepts this device's signature: its key was removed, or the clocks of device and "
            "server differ by more than some seconds (set both by NTP)",
            True,
        )
    if "SSL/TLS handshake error" in text or "CERTIFICATE_VERIFY_FAILED" in text:
        return f"the server's certificate does not fit {node.authority}", True  # the next look says why
    return f"the SuperNode of {node.name} ended ({_how(ending.status)})", True


def explain_server(ending: Ending, server: ServerFolder) -> str:
    """Why a SuperLink cannot run; empty where another try makes sense."""
    text = ending.text
    if "address already in use" in text:
        return (
            f"port {server.port} of this machine is in use (another SuperLink?): stop the other one, or choose "
            f"another `port` in {server.folder / 'superlink.toml'} and in every node.toml"
        )
    if "superlink.toml: operators" in text:
        return text[text.rindex("superlink.toml: operators") :]
    if "KEY_VALUES_MISMATCH" in text:
        return f"{server.certificate} and {server.key} do not belong together: copy both again"
    return ""


def _damaged_key(node: NodeFolder) -> str:
    return f"{node.key} is damaged: make a new key with `fedhur deploy rotate`, copy it here, register it"


def _wait_for_server(node: NodeFolder, say: Say) -> None:
    """Return once the server answers as it should; each new problem is said once."""
    last = ""
    while problem := problem_of(node.superlink, node.authority):
        if problem != last:
            say(f"{problem} (looking again every {RETRY_SECONDS:.0f} s)")
            last = problem
        _pause(RETRY_SECONDS)


def _sign_off(node: NodeFolder, online: Path, say: Say) -> None:
    """Tell the server that the SuperNode of before is gone, and stay away until everybody has seen it."""
    number = online.read_text(encoding="utf-8").strip()
    try:
        told = number.isdigit() and release(node.superlink, node.authority, node.key, int(number))
    except ValueError:
        raise DeployError(_damaged_key(node)) from None
    if told:
        say(f"the SuperNode of before did not say good-bye; the server was told, next start in {AWAY_SECONDS:.0f} s")
        _pause(AWAY_SECONDS)
    online.unlink(missing_ok=True)


@contextmanager
def _warm(node: NodeFolder, heard: Say) -> Iterator[dict[str, str]]:
    """Have a process at hand that becomes the ClientApp of each message (see :mod:`fedhur_app.deploy.warm`).

    Yields:
        Variables by which a SuperNode finds it.
    """
    if not node.warm:
        yield {}
        return
    script = node.home / "bin" / "flwr-clientapp"
    write_text(script, warm.command_text(sys.executable, str(_scripts() / "flwr-clientapp")))
    script.chmod(0o755)
    variables = environment(node.home, _scripts())
    with tempfile.TemporaryDirectory(prefix="fedhur-") as folder:  # the path of a socket must be short
        path = str(Path(folder) / "warm")
        # -P: the modules beside the script must not be found by their bare names.
        process = start_process(
            [sys.executable, "-P", str(Path(warm.__file__).resolve()), path], node.folder, variables
        )
        reader = threading.Thread(target=_read, args=(process, deque(maxlen=1), heard), name="clientapp", daemon=True)
        reader.start()
        try:
            yield {warm.SOCKET: path, "PATH": os.pathsep.join([str(script.parent), variables["PATH"]])}
        finally:
            end_sessions({process.pid})
            process.wait()
            reader.join(timeout=5)


def start_process(command: list[str], folder: Path, variables: dict[str, str]) -> "subprocess.Popen[str]":
    """Start a process in a session of its own, whose output can be read line by line."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C is for this process, which ends the other with all that it started
    )


def _run(
    command: list[str],
    folder: Path,
    home: Path,
    heard: Say,
    more: dict[str, str] | None = None,
    running: "list[subprocess.Popen[str]] | None" = None,
) -> Ending:
    """Run a process to its end and hand its lines over; if we are told to stop, stop it first.

    The process is put into `running`, so that others can end it.
    """
    variables = environment(home, _scripts()) | (more or {})
    # Between looks for work that is to be started, seconds; Flower's own is 1. Each look costs some CPU.
    variables.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.5")
    last: deque[str] = deque(maxlen=40)
    process = start_process(command, folder, variables)
    if running is not None:
        running.append(process)
    reader = threading.Thread(target=_read, args=(process, last, heard), name="output", daemon=True)
    reader.start()
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
                (home / "online").unlink(missing_ok=True)  # it said good-bye itself
            except subprocess.TimeoutExpired:
                process.kill()
        # Also ends what a killed process left behind, a ClientApp at work above all: it holds the pipe open.
        end_sessions({process.pid})
    reader.join(timeout=5)
    return Ending(status, tuple(last))


def _read(process: "subprocess.Popen[str]", last: deque[str], heard: Say) -> None:
    assert process.stdout is not None
    with process.stdout:
        for raw in process.stdout:
            line = _ANSI.sub("", raw).rstrip()
            last.append(line)
            heard(line)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: two SuperNodes with one key would throw each other out."""
    path = folder / ".lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DeployError(f"{folder} is running already: stop that start.sh or service first") from None
        yield


def _scripts() -> Path:
    return Path(sysconfig.get_path("scripts"))


def _how(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
