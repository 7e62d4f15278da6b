"""Runs the Flower app of a checkout under `flwr run`, in a SuperLink of its own that is gone afterwards.

Why its own: `flwr run` reuses a left-over SuperLink on Flower's default port whatever it belongs to, and the
Ray workers import their code from the folder in which that SuperLink was started. Here the SuperLink has its
own FLWR_HOME, port, Ray folder and working directory, so nothing of another project is met or touched.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

FOR_PEOPLE = "fedhur | "  # marks the lines of a run's output that are for people; the server uses it too
CONNECTION = "fedhur"
COMPLETED = "finished:completed"
START_TIMEOUT = 90.0  # seconds: a cold start imports much
STATUS_TIMEOUT = 20.0
STOP_TIMEOUT = 30.0
PATIENCE = 5.0  # between asking processes to end and forcing them
GIB = 2**30
CLIENT_GPU_BYTES = int(1.5 * GIB)  # a client process: its CUDA context and its tables

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BOX = re.compile("[\u2500-\u257f]")  # Flower's error texts are drawn in boxes
_RUN_ID = re.compile(r"started run (\d+)")
# Ray puts Unix sockets ~70 characters below its folder; a socket's path may have ~100.
_LONGEST_TEMP = 25


class FlowerError(RuntimeError):
    """Flower could not be started or driven; the text says what to do."""


@dataclass(frozen=True)
class FlowerOutcome:
    """How a Flower run ended.

    Attributes:
        run_id: Flower's number of the run.
        status: Flower's status, such as `finished:completed` or `finished:failed`.
        details: Flower's explanation, empty for a completed run.
        exit_ok: Whether `flwr run --stream` itself ended with 0 (it also does so when the app failed).
    """

    run_id: int
    status: str
    details: str
    exit_ok: bool

    @property
    def completed(self) -> bool:
        """Whether Flower calls the run completed. The app's own result decides whether it was a success."""
        return self.exit_ok and self.status == COMPLETED


def app_folder() -> Path:
    """Folder of the checkout that this package belongs to: the one that holds the app's pyproject.toml.

    Raises:
        FlowerError: The package was installed without its checkout.
    """
    folder = Path(__file__).resolve().parent.parent
    if (folder / "pyproject.toml").is_file() and (folder / "server_app").is_dir():
        return folder
    raise FlowerError(
        f"{folder} is not a checkout of FedHUR (no pyproject.toml): `flwr run` needs the app's sources. "
        "Clone the repository and install it with `pip install -e .`, or use --runtime local"
    )


_this_checkout = app_folder  # `run_flower` has an argument of the same name


def toml_text(values: Mapping[str, str | int | float | bool]) -> str:
    """A run-config as TOML. In a file any text survives; Flower's own `key="value"` parser loses quotes."""
    lines = []
    for key, value in values.items():
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{key} = {text}\n")
    return "".join(lines)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_gpu_memory() -> list[int]:
    """Free bytes of each CUDA device, empty without one.

    Asked in a process of its own: a CUDA context here would hold half a GiB of the device for the whole run.
    """
    code = (
        "import json; from torch import cuda; count = cuda.device_count() if cuda.is_available() else 0;"
        "print(json.dumps([cuda.mem_get_info(device)[0] for device in range(count)]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise FlowerError(f"the GPU cannot be asked for its memory: {_last_line(answer.stderr)}")
    memory: list[int] = json.loads(answer.stdout.splitlines()[-1])
    return memory


def client_resources(device: str, num_clients: int, bytes_per_client: int = CLIENT_GPU_BYTES) -> tuple[int, float]:
    """CPUs and share of a GPU that a simulated client is given.

    The share limits how many client processes run at once on a GPU, so that their memory fits.

    Args:
        device: `auto`, `cpu` or `cuda` (setting `device`).
        num_clients: Clients of the run; there are never more processes than that.
        bytes_per_client: GPU memory of one client process.

    Raises:
        FlowerError: `cuda` is wanted and there is no GPU, or not memory enough for one client.
    """
    if device == "cpu":
        return 1, 0.0
    free = free_gpu_memory()
    if not free:
        if device == "cuda":
            raise FlowerError("device=cuda, but PyTorch finds no CUDA device here: use device=cpu or auto")
        return 1, 0.0
    per_gpu = min(free) // bytes_per_client
    if per_gpu < 1:
        if device == "cuda":
            raise FlowerError(
                f"device=cuda, but a GPU has {min(free) / GIB:.1f} GiB free and a client needs "
                f"{bytes_per_client / GIB:.1f} GiB: free some, or use device=cpu"
            )
        return 1, 0.0
    wanted = -(-min(os.cpu_count() or 1, num_clients) // len(free))
    # Ray counts ten-thousandths of a GPU; rounding up would lose a client.
    return 1, int(10_000 / min(per_gpu, wanted)) / 10_000


def run_flower(
    run_config: dict[str, str | int],
    num_supernodes: int,
    *,
    cpus_per_client: int = 1,
    gpus_per_client: float = 0.0,
    on_line: Callable[[str], None],
    app_folder: Path | None = None,
) -> FlowerOutcome:
    """Run the Flower app and wait for its end.

    Ctrl-C, SIGTERM and SIGHUP stop the run. However this function is left, its SuperLink, Ray and all their
    processes are gone, also if this process is killed outright.

    Args:
        run_config: Values for the app's run-config. Its keys must be in the app's pyproject.toml.
        num_supernodes: Number of simulated clients.
        cpus_per_client: CPUs that Ray reserves for a client; decides how many run at once.
        gpus_per_client: Share of a GPU that Ray reserves for a client.
        on_line: Called with each line of output, without colours.
        app_folder: Folder of the app; the checkout of this package by default.

    Raises:
        FlowerError: The SuperLink did not start, or Flower refused the run.
    """
    folder = (app_folder or _this_checkout()).resolve()
    with signals_raise(), _SuperLink(folder, on_line) as link:
        config_file = link.home / "run-config.toml"
        config_file.write_text(toml_text(run_config), encoding="utf-8")
        federation = (
            f"num-supernodes={num_supernodes} client-resources-num-cpus={cpus_per_client} "
            f"client-resources-num-gpus={float(gpus_per_client)} init-args-log-to-driver=false"
        )
        outcome = link.run(config_file, federation)
        if not outcome.completed:
            for line in link.log_tail(30):
                on_line(f"superlink | {line}")
        return outcome


class _SuperLink:
    """A SuperLink in simulation mode for one run: `with _SuperLink(...) as link: link.run(...)`."""

    def __init__(self, folder: Path, on_line: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_line = on_line
        self._scripts = Path(sysconfig.get_path("scripts"))
        for command in ("flwr", "flower-superlink"):
            if not (self._scripts / command).is_file():
                raise FlowerError(
                    f"{self._scripts / command} does not exist: install Flower into this environment with "
                    "`pip install -e .`"
                )
        self._process: subprocess.Popen[bytes] | None = None
        self._driver: subprocess.Popen[str] | None = None  # `flwr run`
        self._guard: subprocess.Popen[str] | None = None
        self._sessions: set[int] = set()
        self._running: int | None = None  # the run that would have to be stopped

    def __enter__(self) -> "_SuperLink":
        self.home = _temporary_folder()
        self._log = self.home / "superlink.log"
        self._environment = environment(self.home, self._scripts)
        self._guard = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(self.home)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _start(self) -> None:
        for _ in range(3):  # between choosing a port and using it another program may have taken it
            port = free_port()
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        str(self._scripts / "flower-superlink"),
                        *("--insecure", "--simulation", "--disable-runtime-dependency-installation"),
                        *("--host", "127.0.0.1", "--port", str(port)),
                    ],
                    cwd=self._folder,  # Ray's workers import the app from here
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._note_session(self._process.pid)
            if self._wait_until_ready(port):
                break
        else:
            raise FlowerError(f"the SuperLink ended at its start: {' / '.join(self.log_tail(8))}")
        self._note_sessions()
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n',
            encoding="utf-8",
        )

    def _wait_until_ready(self, port: int) -> bool:
        """True once the SuperLink answers, False if it ended."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT
        # No proxy: a company's proxy would be asked for 127.0.0.1.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            with contextlib.suppress(urllib.error.URLError, OSError):
                opener.open(f"http://127.0.0.1:{port}/health", timeout=2).close()
                return self._process.poll() is None
            time.sleep(0.1)
        raise FlowerError(
            f"the SuperLink did not answer on port {port} within {START_TIMEOUT:.0f} s: {' / '.join(self.log_tail(8))}"
        )

    def run(self, config_file: Path, federation: str) -> FlowerOutcome:
        """Start the run, pass its output on, and ask for its status."""
        command = self._flwr(
            "run", str(self._folder), CONNECTION, "--stream",
            "--run-config", str(config_file), "--federation-config", federation,
        )  # fmt: skip
        last: deque[str] = deque(maxlen=15)
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,  # also makes line ends of the carriage returns of progress bars
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for this process, which then stops the run in order
        )
        self._driver = process
        self._note_session(process.pid)
        assert process.stdout is not None
        with process.stdout:
            for raw in process.stdout:
                line = _ANSI.sub("", raw).rstrip()
                if self._running is None and (found := _RUN_ID.search(line)):
                    self._running = int(found[1])
                last.append(line)
                self._on_line(line)
        exit_ok = process.wait() == 0
        if self._running is None:
            words = _BOX.sub(" ", " ".join(last)).split()
            raise FlowerError(f"Flower did not start the run: {' '.join(words)}")
        return self._outcome(self._running, exit_ok)

    def _outcome(self, run_id: int, exit_ok: bool) -> FlowerOutcome:
        deadline = time.monotonic() + STATUS_TIMEOUT
        while True:
            answer = self._ask("list", "--run-id", str(run_id), "--format", "json", CONNECTION)
            try:
                run = json.loads(answer.stdout)["runs"][0]
            except (ValueError, LookupError) as error:
                raise FlowerError(
                    f"Flower does not tell the status of run {run_id}: "
                    f"{(answer.stdout or answer.stderr).strip()}. "
                    f"The SuperLink's log ends with: {' / '.join(self.log_tail(4))}"
                ) from error
            status = str(run["status"])
            if status.startswith("finished") or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        if status.startswith("finished"):
            self._running = None
        details = str(run.get("status-details") or "")
        details = "" if details == "N/A" else _ANSI.sub("", details).strip()
        if not status.startswith("finished"):
            details = details or "the log ended while the run was still going on; it was stopped"
        return FlowerOutcome(run_id, status, details, exit_ok)

    def log_tail(self, count: int) -> list[str]:
        """The last lines of the SuperLink's own log."""
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in _ANSI.sub("", text).splitlines() if line.strip()][-count:]

    def _flwr(self, *arguments: str) -> list[str]:
        return [str(self._scripts / "flwr"), *arguments]

    def _ask(self, *arguments: str, timeout: float = 120.0) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self._flwr(*arguments),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            start_new_session=True,
        )

    def _note_sessions(self) -> None:
        """Remember the sessions of all processes below the SuperLink: they outlive a lost parent."""
        assert self._process is not None
        for pid in _below(self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._note_session(os.getsid(pid))

    def _note_session(self, session: int) -> None:
        if session in self._sessions:
            return
        self._sessions.add(session)
        assert self._guard is not None
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # without its guard the run still works
            self._guard.stdin.write(f"{session}\n")
            self._guard.stdin.flush()

    def _close(self) -> None:
        try:
            self._stop_gently()
        except KeyboardInterrupt:
            pass  # a second Ctrl-C: no more patience, but nothing is left behind either
        finally:
            end_sessions(self._sessions)
            for child in (self._process, self._driver):
                if child is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(timeout=5)
            shutil.rmtree(self.home, ignore_errors=True)
            if self._guard is not None:
                self._guard.kill()
                self._guard.communicate()

    def _stop_gently(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        self._note_sessions()
        if self._running is not None:
            self._on_line(f"{FOR_PEOPLE}stopping the run")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ask("stop", str(self._running), CONNECTION, timeout=STOP_TIMEOUT)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def end_sessions(sessions: set[int]) -> None:
    """End all processes of some sessions: first asked, then forced."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + PATIENCE
        for pid in _alive(sessions):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while _alive(sessions) and time.monotonic() < deadline:
            time.sleep(0.05)


def _alive(sessions: set[int]) -> list[int]:
    found = []
    for pid in _process_table():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) in sessions:
                found.append(pid)
    return found


def _stand_guard() -> None:
    """Wait for the death of the process that writes session numbers to stdin, then end those sessions.

    A run whose starter was killed would otherwise go on, and write to an output folder that is being resumed.
    """
    sessions = {int(line) for line in sys.stdin}  # ends with the writer
    end_sessions(sessions)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def environment(home: Path, scripts: Path) -> dict[str, str]:
    """Variables for Flower's processes: their home and commands, no calls home, no colours, no foreign Ray cluster."""
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_TMPDIR": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)]),  # no venv is activated
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }
    # With this variable Ray would join the cluster of another program.
    environment.pop("RAY_ADDRESS", None)
    return environment


def _temporary_folder() -> Path:
    base = tempfile.gettempdir()
    if len(base) > _LONGEST_TEMP and os.access("/tmp", os.W_OK):
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="fedhur-", dir=base)).resolve()


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process through SystemExit, so that the cleaning up takes place."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    old = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            old[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _process_table() -> dict[int, int]:
    """Parent of each living process (zombies are not living)."""
    proc = Path("/proc")
    table = {}
    if (proc / "self" / "stat").exists():
        for entry in proc.iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # "pid (name with anything) state parent ..."
                    state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                    if state not in "ZX":
                        table[int(entry.name)] = int(parent)
        return table
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        pid, parent, state = line.split()
        if not state.startswith("Z"):
            table[int(pid)] = int(parent)
    return table


def _below(root: int) -> list[int]:
    """The living descendants of a process."""
    table = _process_table()
    found: list[int] = []
    layer = {root}
    while layer:
        layer = {pid for pid, parent in table.items() if parent in layer}
        found += layer
    return found


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    _stand_guard()
