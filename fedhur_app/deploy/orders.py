"""What the operator does on the server: make the SuperLink's list of devices that of the folder, start runs.

With a connection that is written into the server's folder, so that Flower's own command `flwr` can be used as well:
`FLWR_HOME=server/flwr flwr list deployment`.
"""

import contextlib
import hashlib
import io
import json
import re
import subprocess
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhur_app.deploy.errors import DeployError
from fedhur_app.deploy.reach import problem_of
from fedhur_app.deploy.settings import ServerFolder
from fedhur_app.deploy.supervisor import start_process
from fedhur_app.files import read_json, write_json, write_text
from fedhur_app.flower_runner import COMPLETED, app_folder, environment, toml_text

if TYPE_CHECKING:
    from flwr.cli.typing import SuperLinkConnection

CONNECTION = "deployment"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BOX = re.compile("[\u2500-\u257f]")
_RUN_ID = re.compile(r"started run (\d+)")
_COMMAND_SECONDS = 120.0

Say = Callable[[str], None]


def sync_devices(server: ServerFolder, say: Say) -> None:
    """Make the SuperLink's list of devices that of `keys/`.

    New keys are registered, changed ones take the place of the old, devices without a file are shut out. What is
    registered is remembered in devices.json: name -> Flower's number and a hash of the key.

    Args:
        server: The server's folder; its SuperLink must be running here.
        say: Called with a line for each change.

    Raises:
        DeployError: The SuperLink does not answer or refuses.
    """
    with _Control(_connect(server)) as control:
        _sync(server, control, say)


def _sync(server: ServerFolder, control: "_Control", say: Say) -> None:
    file = server.folder / "devices.json"
    known = read_json(file)
    alive = control.devices()
    present = {path.stem: _hash(path) for path in sorted(server.public_keys.glob("*.pub"))}
    for name, entry in list(known.items()):
        if entry["node"] in alive and present.get(name) == entry["key"]:
            continue
        if entry["node"] in alive:
            control.unregister(entry["node"])
            say(f"{name}: its old key was removed" if name in present else f"{name}: removed")
        del known[name]
        write_json(file, known)
    for name, key in present.items():
        if name not in known:
            known[name] = {"node": control.register(server.public_keys / f"{name}.pub", name), "key": key}
            write_json(file, known)
            say(f"{name}: registered")
    say(f"{len(known)} devices are registered: {', '.join(sorted(known)) or 'none'}")


def remove_device(server: ServerFolder, name: str, say: Say) -> None:
    """Shut a device out: its key file goes, and the SuperLink forgets it.

    Raises:
        DeployError: No such device; see :func:`sync_devices`.
    """
    path = server.public_keys / f"{name}.pub"
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in server.public_keys.glob("*.pub")))
        raise DeployError(f"there is no device {name!r} in {server.public_keys}: {names}")
    path.unlink()
    sync_devices(server, say)


def device_count(server: ServerFolder) -> int:
    """Number of devices whose keys the server's folder holds."""
    return len(list(server.public_keys.glob("*.pub")))


def run_deployed(server: ServerFolder, run_config: Mapping[str, str | int], on_line: Say) -> str:
    """Run the app on the devices and wait for the end. Ctrl-C stops the run.

    Args:
        server: The server's folder; its SuperLink must be running here.
        run_config: Values for the app's run-config.
        on_line: Called with each line of output.

    Returns:
        Why the run failed; empty if it completed.

    Raises:
        DeployError: The SuperLink does not answer, or refuses the run.
    """
    flwr = _Flwr(server)
    file = server.home / "run-config.toml"
    write_text(file, toml_text(run_config))
    run_id = ""
    last: deque[str] = deque(maxlen=15)
    command = flwr.command("run", str(app_folder()), CONNECTION, "--stream", "--run-config", str(file))
    process = start_process(command, server.folder, flwr.environment)
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = _ANSI.sub("", raw).rstrip()
            if not run_id and (found := _RUN_ID.search(line)):
                run_id = found[1]
            last.append(line)
            on_line(line)
        process.wait()
    except BaseException:
        process.kill()
        if run_id:
            on_line("stopping the run")
            with contextlib.suppress(DeployError, subprocess.TimeoutExpired):
                flwr.json("stop", run_id)
        raise
    if not run_id:
        raise DeployError(f"Flower did not start the run: {' '.join(_BOX.sub(' ', ' '.join(last)).split())}")
    try:
        run = flwr.json("list", "--run-id", run_id)["runs"][0]
    except DeployError as error:
        if problem := problem_of(_address(server), server.authority):
            raise DeployError(
                f"the SuperLink ended during the run ({problem}); its start.sh or service says why. Start it "
                "again, then continue the run"
            ) from error
        raise
    status, details = str(run["status"]), _ANSI.sub("", str(run.get("status-details") or "")).strip()
    if status == COMPLETED:
        return ""
    return f"Flower's status of run {run_id} is {status}" if details in ("", "N/A") else details


def check_server(server: ServerFolder) -> None:
    """See that the SuperLink of a folder answers.

    Raises:
        DeployError: Nobody answers, or somebody else.
    """
    if problem := problem_of(_address(server), server.authority):
        raise DeployError(f"the SuperLink of {server.folder} cannot be asked: {problem}")


def _address(server: ServerFolder) -> str:
    host = server.host if server.host not in ("0.0.0.0", "::", "") else "127.0.0.1"
    return f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"


def _connect(server: ServerFolder) -> "SuperLinkConnection":
    """Flower's connection to the SuperLink of a folder, also written down for the command `flwr`.

    Raises:
        DeployError: Nobody answers, or somebody else.
    """
    from flwr.cli.typing import SuperLinkConnection

    server.home.mkdir(mode=0o700, exist_ok=True)
    check_server(server)
    address = _address(server)
    # Flower wants a whole path here: the file is written anew each time, the folder may have moved.
    connection = {"address": address, "root-certificates": str(server.authority)}
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{toml_text(connection)}'
    write_text(server.home / "config.toml", text)
    return SuperLinkConnection(CONNECTION, address, str(server.authority))


class _Control:
    """The SuperLink's list of devices. What `flwr supernode` does, in one process: each start of it takes seconds."""

    def __init__(self, connection: "SuperLinkConnection") -> None:
        from flwr.cli.utils import init_http_client_from_connection

        with contextlib.redirect_stdout(io.StringIO()):  # it names the connection
            self._client = init_http_client_from_connection(connection)

    def __enter__(self) -> "_Control":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def devices(self) -> set[str]:
        """Flower's numbers of the devices that are registered."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with _refusals():
            nodes = self._client.ListNodes(ListNodesRequest()).nodes_info
        return {str(node.node_id) for node in nodes if node.status != "unregistered"}

    def register(self, key: Path, name: str) -> str:
        """Let a device in; returns Flower's number of it."""
        import click
        from flwr.cli.supernode.register import try_load_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest

        try:
            content = try_load_public_key(key)
        except (click.ClickException, SystemExit) as error:
            raise DeployError(f"{key} is no public key of a device (ECDSA, as OpenSSH writes it)") from error
        with _refusals(f"{name}: "):
            answer = self._client.RegisterNode(RegisterNodeRequest(public_key=content, name=name))
        return str(answer.node_id)

    def unregister(self, number: str) -> None:
        """Shut a device out."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        with _refusals():
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=int(number)))


@contextlib.contextmanager
def _refusals(what: str = "") -> Iterator[None]:
    """Errors of the SuperLink as errors for people."""
    import httpx
    from flwr.supercore.error import FlowerError

    try:
        yield
    except httpx.HTTPStatusError as error:
        said = FlowerError.from_json(error.response.text)
        words = f"{said.message} {said.public_details or ''}".strip() if said else error.response.text.strip()
        raise DeployError(f"{what}the SuperLink refuses: {words or error}") from error
    except httpx.HTTPError as error:
        raise DeployError(f"{what}the SuperLink does not answer: {error}") from error


class _Flwr:
    """The command `flwr` with a connection to the SuperLink of a folder."""

    def __init__(self, server: ServerFolder) -> None:
        _connect(server)
        self._scripts = Path(sysconfig.get_path("scripts"))
        self.environment = environment(server.home, self._scripts)

    def command(self, *arguments: str) -> list[str]:
        """A whole command line."""
        return [str(self._scripts / "flwr"), *arguments]

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a command that answers in JSON.

        Raises:
            DeployError: It failed; with what it says.
        """
        done = subprocess.run(
            self.command(*arguments, "--format", "json", CONNECTION),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_SECONDS,
        )
        said = done.stdout[done.stdout.find("{") :] if "{" in done.stdout else ""
        try:
            answer: dict[str, Any] = json.loads(said)
        except ValueError:
            answer = {}
        if done.returncode or not answer.get("success", "runs" in answer):
            words = str(answer.get("error-message") or " ".join(_BOX.sub(" ", done.stdout + done.stderr).split()))
            raise DeployError(f"`flwr {' '.join(arguments)}` failed: {words}")
        return answer


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
