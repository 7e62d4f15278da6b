"""Deployments without Flower's processes: keys, folders, what is said when something is wrong, a data set cut up."""

import asyncio
import configparser
import contextlib
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from flwr.app import Message
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.config import parse_config_args
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from typer.testing import CliRunner

from fedhur_app import flower_runner
from fedhur_app.cli import app
from fedhur_app.config import load_settings
from fedhur_app.data.experiment import load_interactions_of, prepare_data
from fedhur_app.data.item_catalogue import read_catalogue
from fedhur_app.data.own_rows import match_rows, read_own
from fedhur_app.data.shards import load_shard, shard_path
from fedhur_app.deploy import keys, layout, orders, supervisor, warm
from fedhur_app.deploy.errors import DeployError
from fedhur_app.deploy.reach import problem_of, split_address
from fedhur_app.deploy.settings import NodeFolder, read_folder, read_node, read_server
from fedhur_app.deploy.split import split_data
from fedhur_app.deploy.superlink import OperatorsOnly
from fedhur_app.deploy.supervisor import Ending, explain_node, explain_server
from fedhur_app.protocol import Content, Stage, encode
from server_app import stages

SMALL = "dataset.synthetic.users=30 dataset.synthetic.items=40 dataset.clients.number=3"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deployment with a space")
    layout.init(folder, ["client-1", "client-2", "client-3"], ["fed.example.org", "192.0.2.7", "::1"])
    return folder


@pytest.fixture
def deployment(tmp_path) -> Path:
    """One that a test may change."""
    layout.init(tmp_path / "d", ["a", "b"])
    return tmp_path / "d"


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["deploy", *map(str, arguments)])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def verified(folder: Path, host: x509.DNSName | x509.IPAddress, when: datetime | None = None) -> None:
    """The rules of web browsers, in an implementation that is not OpenSSL's."""
    authority = x509.load_pem_x509_certificate((folder / "ca" / "ca.crt").read_bytes())
    leaf = x509.load_pem_x509_certificate((folder / "server" / "server.crt").read_bytes())
    policy = PolicyBuilder().store(Store([authority]))
    (policy.time(when) if when else policy).build_server_verifier(host).verify(leaf, [])


def test_the_certificate_is_good_for_the_hosts_given_and_for_this_machine(made):
    import ipaddress

    for name in ("fed.example.org", "localhost"):
        verified(made, x509.DNSName(name))
    for address in ("192.0.2.7", "127.0.0.1", "::1"):
        verified(made, x509.IPAddress(ipaddress.ip_address(address)))
    with pytest.raises(VerificationError):
        verified(made, x509.DNSName("evil.example.org"))


def test_the_certificate_ends_when_it_was_told_to(tmp_path):
    layout.init(tmp_path, ["a"], days=10)
    now = datetime.now(UTC).replace(tzinfo=None)
    verified(tmp_path, x509.DNSName("localhost"), now + timedelta(days=9))
    with pytest.raises(VerificationError):
        verified(tmp_path, x509.DNSName("localhost"), now + timedelta(days=11))


def test_private_keys_are_for_their_owner_only_and_lie_where_they_belong(made):
    private = sorted(made.rglob("*.key"))
    assert [str(path.relative_to(made)) for path in private] == [
        "ca/ca.key",
        *(f"clients/client-{number}/node.key" for number in (1, 2, 3)),
        "server/server.key",
    ]
    assert {mode(path) for path in private} == {0o600}
    assert {mode(made / name) for name in ("ca", "server", "clients")} == {0o700}


def test_flower_takes_the_devices_keys(made):
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    seen = set()
    for name in layout.client_names(made):
        private = load_ssh_private_key((made / "clients" / name / "node.key").read_bytes(), None)
        public = try_load_public_key(made / "server" / "keys" / f"{name}.pub")
        assert public == public_key_to_bytes(private.public_key())
        assert private.public_key().curve.name == "secp384r1"
        seen.add(public)
    assert len(seen) == 3


def test_a_deployment_is_not_overwritten(deployment):
    key = (deployment / "clients" / "a" / "node.key").read_bytes()
    done = invoke("init", deployment, "--clients", 2)
    assert done.exit_code == 2
    assert "holds a deployment" in done.stderr
    assert (deployment / "clients" / "a" / "node.key").read_bytes() == key
    assert invoke("init", deployment, "--names", "a,c", "--force").exit_code == 0
    assert (deployment / "clients" / "a" / "node.key").read_bytes() != key
    assert layout.client_names(deployment) == ["a", "c"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--names", "a,a"], "both be called 'a'"),
        (["--names", "../x"], "cannot be a device's name"),
        (["--names", "a b"], "cannot be a device's name"),
        (["--host", "https://fed.example.org"], "without https://"),
        (["--host", "fed.example.org:9092"], "without a port"),
        (["--root", "opt"], "begins with /"),
        (["--clients", 3, "--names", "x,y"], "contradict each other"),
    ],
)
def test_impossible_options_write_nothing(tmp_path, options, words):
    done = invoke("init", tmp_path / "d", *options)
    assert done.exit_code == 2
    assert words in done.stderr
    assert not (tmp_path / "d").exists()


def test_many_clients_keep_the_order_of_their_numbers():
    names = layout.numbered(12)
    assert names == sorted(names)
    assert (names[0], names[11]) == ("client-01", "client-12")
    assert layout.numbered(2, ["client-1", "client-3"]) == ["client-2", "client-4"]


def test_a_later_device_gets_a_port_of_its_own_and_no_name_twice(deployment):
    assert invoke("add", deployment, "--clients", 2).exit_code == 0
    nodes = [read_node(deployment / "clients" / name) for name in layout.client_names(deployment)]
    assert [node.name for node in nodes] == ["a", "b", "client-1", "client-2"]
    assert [node.port for node in nodes] == [9094, 9095, 9096, 9097]
    assert {node.superlink for node in nodes} == {"localhost:9092"}
    assert len(list((deployment / "server" / "keys").glob("*.pub"))) == 4
    done = invoke("add", deployment, "--names", "b")
    assert done.exit_code == 2
    assert "already" in done.stderr


def test_a_new_key_of_a_device_belongs_to_its_new_public_key(deployment):
    before = (deployment / "server" / "keys" / "a.pub").read_bytes()
    assert invoke("rotate", deployment, "a").exit_code == 0
    public = (deployment / "server" / "keys" / "a.pub").read_bytes()
    private = load_ssh_private_key((deployment / "clients" / "a" / "node.key").read_bytes(), None)
    assert public != before
    assert load_ssh_public_key(public) == private.public_key()
    assert "no device 'z'" in invoke("rotate", deployment, "z").stderr


def test_settings_are_read_back_wherever_the_folder_went(made, tmp_path):
    moved = tmp_path / "elsewhere"
    subprocess.run(["cp", "-a", str(made / "clients" / "client-2"), str(moved)], check=True)
    node = read_folder(moved)
    assert isinstance(node, NodeFolder)
    assert (node.name, node.superlink, node.port) == ("client-2", "fed.example.org:9092", 9095)
    assert (node.data, node.state) == (moved / "data", moved / "state")
    assert read_server(made) == read_folder(made / "server")


def test_flower_reads_any_path_from_the_node_config(tmp_path):
    from fedhur_app.flower_runner import toml_text

    odd = tmp_path / "a 'quoted' \"folder\" = x"
    node = NodeFolder(tmp_path, "a", "h:1", 2, odd, tmp_path, extra={"seed-secret": 0, "exact": True})
    file = tmp_path / "config.toml"
    file.write_text(toml_text(node.node_config()))
    assert parse_config_args([str(file)]) == {
        "client": "a",
        "data-path": str(odd),
        "state-dir": str(tmp_path),
        "seed-secret": 0,
        "exact": True,
    }


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "a"', "", "'name' is missing"),
        ("port = 9094", 'port = "9094"', "must be a number"),
        ("port = 9094", "port = 9094\nprot = 1", "unknown entry 'prot'"),
        ('name = "a"', "name = a", "is no TOML"),
        ("[node-config]", "[node-config]\nx = [1]", "[node-config] x"),
    ],
)
def test_mistakes_in_settings_are_named(deployment, old, new, words):
    file = deployment / "clients" / "a" / "node.toml"
    file.write_text(file.read_text().replace(old, new))
    done = invoke("start", deployment / "clients" / "a")
    assert done.exit_code == 2
    assert words in done.stderr
    assert "node.toml" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[node-config]", "[node-config]\nitem_col = 'sku'", "unknown entry 'item_col'; did you mean 'item-col'?"),
        ('name = "a"', 'name = "a b"', "name = 'a b' cannot be a device's name"),
        ("port = 9094", "port = 99999", "must be between 1 and 65535"),
    ],
)
def test_settings_that_only_a_run_would_trip_over_are_refused_at_the_start(deployment, old, new, words):
    file = deployment / "clients" / "a" / "node.toml"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(DeployError, match=re.escape(words)):
        read_node(deployment / "clients" / "a")


def test_a_folder_that_is_none_and_one_that_lacks_its_key(deployment, tmp_path):
    assert "holds neither node.toml" in invoke("start", tmp_path).stderr
    (deployment / "clients" / "a" / "node.key").unlink()
    assert "node.key does not exist" in invoke("start", deployment / "clients" / "a").stderr


def test_start_scripts_start_their_own_folder(made, tmp_path):
    spy = tmp_path / "spy"
    spy.write_text('#!/bin/sh\necho "$@" in "$(pwd)"\n')
    spy.chmod(0o755)
    for folder in (made / "server", made / "clients" / "client-1"):
        done = subprocess.run(
            ["sh", str(folder / "start.sh")], env={**os.environ, "FEDHUR": str(spy)}, capture_output=True, text=True
        )
        assert done.stdout == f"deploy start . in {folder}\n"


def test_units_run_the_script_as_a_user_without_rights(made):
    for path, folder in (
        (made / "server" / "fedhur-server.service", "/opt/fedhur/server"),
        (made / "clients" / "client-1" / "fedhur-client-1.service", "/opt/fedhur/client-1"),
    ):
        unit = configparser.ConfigParser(strict=True)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(path)
        service = unit["Service"]
        assert service["ExecStart"] == f"/bin/sh {folder}/start.sh"
        assert service["ReadWritePaths"] == service["WorkingDirectory"] == folder
        assert service["User"] == "fedhur"
        assert (service["ProtectSystem"], service["NoNewPrivileges"], service["UMask"]) == ("strict", "yes", "0077")


# ---- is the server there, and the right one


@contextlib.contextmanager
def listening(folder: Path | None) -> Iterator[int]:
    """A server with the certificate of a deployment, or one that speaks plain text."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = None
        if folder is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server" / "server.crt", folder / "server" / "server.key")

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with contextlib.suppress(OSError), connection:
                        if context is None:
                            connection.recv(100)
                            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        else:
                            context.wrap_socket(connection, server_side=True).close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_the_right_server_has_no_problem(made):
    with listening(made) as port:
        assert problem_of(f"localhost:{port}", made / "clients" / "client-1" / "ca.crt") == ""
        assert problem_of(f"127.0.0.1:{port}", made / "ca" / "ca.crt") == ""


def test_a_server_of_another_authority(made, deployment):
    with listening(deployment) as port:
        problem = problem_of(f"localhost:{port}", made / "ca" / "ca.crt")
    assert "was not signed by the authority" in problem
    assert "copy ca/ca.crt here" in problem


def test_a_server_under_a_name_that_its_certificate_lacks(deployment):
    keys.make_server_certificate(
        deployment / "server" / "server.crt",
        deployment / "server" / "server.key",
        ["fed.example.org"],
        10,
        deployment / "ca" / "ca.crt",
        deployment / "ca" / "ca.key",
    )
    with listening(deployment) as port:
        problem = problem_of(f"localhost:{port}", deployment / "ca" / "ca.crt")
    assert "good for other names only" in problem
    assert "fedhur deploy certificate DIR --host localhost" in problem


def test_an_expired_certificate(deployment):
    layout.certificate(deployment, [], days=0)
    time.sleep(1.1)  # certificates count in seconds
    with listening(deployment) as port:
        assert "has expired" in problem_of(f"localhost:{port}", deployment / "ca" / "ca.crt")


def test_a_server_without_tls(made):
    with listening(None) as port:
        problem = problem_of(f"localhost:{port}", made / "ca" / "ca.crt")
    assert "speaks plain text, not TLS" in problem
    assert "server/start.sh" in problem


def test_nobody_there(made):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "nothing listens" in problem_of(f"127.0.0.1:{port}", made / "ca" / "ca.crt")


def test_a_damaged_authority(made, tmp_path):
    (tmp_path / "ca.crt").write_text("nothing")
    with pytest.raises(DeployError, match="is no certificate"):
        problem_of("localhost:1", tmp_path / "ca.crt")


def test_addresses():
    assert split_address("fed.example.org:9092") == ("fed.example.org", 9092)
    assert split_address("[::1]:9") == ("::1", 9)
    for wrong in ("fed.example.org", "https://fed.example.org:1", "a:0", "a:b", ":1"):
        with pytest.raises(DeployError, match="host:port"):
            split_address(wrong)


# ---- who may give orders


def answered(path: str, client: str | None, server: str = "10.0.0.1", operators: tuple[str, ...] = ()) -> int:
    sent: list[Any] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    scope = {"type": "http", "path": path, "client": (client, 5) if client else None, "server": (server, 1)}
    asyncio.run(OperatorsOnly(behind, list(operators))(scope, receive, send))
    return int(sent[0]["status"])


def test_only_operators_give_orders():
    for path in ("/v1/control/start-run", "/v1/runtime/push-messages", "/docs", "/"):
        assert answered(path, "203.0.113.9") == 403
        assert answered(path, None) == 403
        assert answered(path, "127.0.0.1") == answered(path, "::1") == answered(path, "::ffff:127.0.0.1") == 200
        assert answered(path, "10.0.0.1") == 200  # the server's own address
        assert answered(path, "10.0.0.2") == 403
        assert answered(path, "10.0.0.2", operators=("10.0.0.2/31",)) == 200
        assert answered(path, "10.0.0.4", operators=("10.0.0.2/31",)) == 403


def test_devices_reach_their_own_interface_from_everywhere():
    assert answered("/v1/fleet/pull-messages", "203.0.113.9") == 200
    assert answered("/health", "203.0.113.9") == 200
    assert answered("/v1/fleetcontrol", "203.0.113.9") == 403


def test_a_network_that_is_none():
    with pytest.raises(DeployError, match="operators"):
        OperatorsOnly(None, ["10.0.0.1/8"])  # type: ignore[arg-type]


# ---- keeping alive


@pytest.fixture
def fake(deployment, tmp_path, monkeypatch) -> tuple[NodeFolder, Path]:
    """A device whose `flower-supernode` is a script; waiting takes no time, and the fifth wait ends it all."""
    scripts = tmp_path / "bin"
    scripts.mkdir()
    monkeypatch.setattr(supervisor, "_scripts", lambda: scripts)
    monkeypatch.setattr(supervisor, "problem_of", lambda address, authority: "")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            raise SystemExit(0)

    monkeypatch.setattr(supervisor, "_pause", sleep)
    return read_node(deployment / "clients" / "a"), scripts / "flower-supernode"


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_killed_supernode_signs_off_and_starts_again(fake, monkeypatch):
    node, script = fake
    write_script(script, 'echo "INFO : SuperNode ID: 77"; kill -9 $$')
    told: list[int] = []
    monkeypatch.setattr(supervisor, "release", lambda a, b, c, number: told.append(number) or True)
    said: list[str] = []
    with pytest.raises(SystemExit):
        supervisor.run_node(node, said.append)
    assert told == [77, 77]
    assert sum("killed by signal 9" in line for line in said) == 3
    assert sum("did not say good-bye" in line for line in said) == 2


def test_a_refused_device_is_told_what_to_do_and_goes_on_trying(fake, monkeypatch):
    node, script = fake
    write_script(script, 'echo "Exit Code: 305"; echo "[code: 2004] Failed to activate SuperNode."; exit 1')
    clock = iter(range(0, 10**6, 25))
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: float(next(clock)))
    said: list[str] = []
    with pytest.raises(SystemExit):
        supervisor.run_node(node, said.append)
    explained = [line for line in said if line.startswith("the server refuses")]
    assert len(explained) == 5
    assert "fedhur deploy register server" in explained[0]
    assert "a minute at most" in explained[0]
    assert "the server refuses the key of a: it is not registered" in explained[-1]


def test_what_cannot_get_better_ends(fake):
    node, script = fake
    write_script(script, 'echo "ERROR: [Errno 98] error while attempting to bind on address: address already in use"')
    with pytest.raises(DeployError, match="port 9094 of this machine is in use"):
        supervisor.run_node(node, lambda line: None)


def test_a_damaged_key_is_named_when_the_dead_supernode_cannot_sign_off(fake):
    node, _ = fake
    node.home.mkdir()
    (node.home / "online").write_text("77")
    node.key.write_text("damaged")
    with pytest.raises(DeployError, match=r"node.key is damaged: make a new key"):
        supervisor.run_node(node, lambda line: None)


def test_a_stopped_supervisor_leaves_nobody_behind(fake, monkeypatch):
    node, script = fake
    pids = script.with_name("pids")
    write_script(script, f'sleep 60 & echo $$ $! > "{pids}"; echo ready; wait')

    def wait(process: Any, *arguments: Any) -> int:
        while not pids.exists() or not pids.read_text().strip():
            pass
        raise SystemExit(143)

    original = subprocess.Popen.wait
    calls: list[Any] = []

    def first_raises(process: Any, timeout: float | None = None) -> int:
        calls.append(process)
        return wait(process) if len(calls) == 1 else original(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", first_raises)
    with pytest.raises(SystemExit):
        supervisor.run_node(node, lambda line: None)
    assert not set(map(int, pids.read_text().split())) & set(flower_runner._process_table())


def test_one_folder_runs_once(deployment):
    folder = deployment / "clients" / "a"
    with supervisor._alone(folder), pytest.raises(DeployError, match="is running already"), supervisor._alone(folder):
        pass


def test_other_endings_are_explained(made):
    node, server = read_node(made / "clients" / "client-1"), read_server(made)
    text, again = explain_node(Ending(1, ("Unable to parse the private key file.",)), node)
    assert "deploy rotate" in text
    assert not again
    text, again = explain_node(Ending(1, ("SuperNode ID: 4401740123", "a fault")), node)
    assert "exit status 1" in text
    text, again = explain_node(Ending(1, ("Client error '401 Unauthorized' for url",)), node)
    assert "clocks" in text
    text, again = explain_node(Ending(1, ("Invalid SuperNode authentication",)), node)
    assert "clocks" in text
    assert again
    killed = Ending(-9, ("SuperNode ID: 4401740123", "address already in use"))
    assert explain_node(killed, node) == ("the SuperNode of client-1 ended (killed by signal 9)", True)
    assert "port 9092" in explain_server(Ending(1, ("address already", "in use")), server)
    assert "belong together" in explain_server(Ending(1, ("[SSL: KEY_VALUES_MISMATCH]",)), server)
    assert explain_server(Ending(-9, ("anything",)), server) == ""


# ---- the list of devices


class FakeControl:
    """The SuperLink's list of devices."""

    def __init__(self) -> None:
        self.registered: dict[str, bytes] = {}
        self.count = 0

    def __enter__(self) -> "FakeControl":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def devices(self) -> set[str]:
        return set(self.registered)

    def register(self, key: Path, name: str) -> str:
        self.count += 1
        self.registered[str(self.count)] = key.read_bytes()
        return str(self.count)

    def unregister(self, number: str) -> None:
        del self.registered[number]


def test_the_superlinks_list_follows_the_folder(deployment, monkeypatch):
    control = FakeControl()
    monkeypatch.setattr(orders, "_connect", lambda server: None)
    monkeypatch.setattr(orders, "_Control", lambda connection: control)
    server = read_server(deployment)

    def keys_there() -> list[bytes]:
        return sorted(path.read_bytes() for path in server.public_keys.glob("*.pub"))

    said: list[str] = []
    for change in (
        lambda: None,
        lambda: layout.add(deployment, ["c"]),
        lambda: layout.rotate(deployment, "a"),
        lambda: (server.public_keys / "b.pub").unlink(),
        lambda: control.registered.clear(),  # the database was lost
    ):
        change()
        orders.sync_devices(server, said.append)
        assert sorted(control.registered.values()) == keys_there()
    orders.remove_device(server, "c", said.append)
    assert list(control.registered.values()) == [(server.public_keys / "a.pub").read_bytes()]
    assert "b: removed" in said
    assert "a: its old key was removed" in said
    with pytest.raises(DeployError, match="no device 'c'"):
        orders.remove_device(server, "c", said.append)
    before = control.count
    orders.sync_devices(server, said.append)
    assert control.count == before


def test_orders_to_a_superlink_that_is_not_there(deployment):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    file = deployment / "server" / "superlink.toml"
    file.write_text(file.read_text().replace("9092", str(port)))
    for order in ("register", "run"):
        done = invoke(order, deployment / "server")
        assert done.exit_code == 2
        assert "nothing listens" in done.stderr
        assert "superlink.toml" in done.stderr
    assert not (deployment / "server" / "runs").exists()


def test_a_catalogue_that_cannot_be_read_starts_no_run(deployment, monkeypatch):
    monkeypatch.setattr(orders, "problem_of", lambda address, authority: "")
    monkeypatch.setattr(orders, "run_deployed", lambda server, config, on_line: "a run was started")
    (deployment / "server" / "items.csv").write_text("sku,name\nB-17,The Map\n")
    done = invoke("run", deployment / "server")
    assert done.exit_code == 2
    assert "items.csv, line 1: there is no column" in done.stderr
    assert not (deployment / "server" / "runs").exists()


class FakeFlwr:
    """The command `flwr` of a SuperLink: starts a run by a script, and knows nothing of it afterwards."""

    environment: ClassVar[dict[str, str]] = dict(os.environ)

    def __init__(self, server: Any) -> None:
        server.home.mkdir(exist_ok=True)

    def command(self, *arguments: str) -> list[str]:
        return ["echo", "Successfully started run 7"]

    def json(self, *arguments: str) -> dict[str, Any]:
        raise DeployError("`flwr list` failed: Connection to the SuperLink is unavailable.")


def test_a_superlink_that_ended_during_the_run_is_named(deployment, monkeypatch):
    monkeypatch.setattr(orders, "_Flwr", FakeFlwr)
    monkeypatch.setattr(orders, "problem_of", lambda address, authority: "nothing listens")
    with pytest.raises(DeployError, match=r"the SuperLink ended during the run \(nothing listens\)"):
        orders.run_deployed(read_server(deployment), {}, lambda line: None)


def test_a_run_is_stopped_when_its_command_is_told_to_end(deployment, monkeypatch):
    stopped: list[int] = []

    def until_told(*_: Any) -> str:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except SystemExit as end:
            stopped.append(int(str(end.code)))
            raise
        return "nobody told it"

    monkeypatch.setattr(orders, "problem_of", lambda address, authority: "")
    monkeypatch.setattr(orders, "run_deployed", until_told)
    earlier = signal.signal(signal.SIGTERM, lambda *_: None)  # if nobody takes the signal, only this test fails
    try:
        done = invoke("run", deployment / "server", "--output", deployment / "run")
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert stopped == [128 + signal.SIGTERM]
    assert done.exit_code == 128 + signal.SIGTERM


WARM = """
import os, signal, sys, types
from fedhur_app.deploy import warm
warm.PRELOADED = ()
def clientapp():
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print("ended by itself", flush=True)
    os._exit(0)
sys.modules["flwr.supernode.cli"] = types.SimpleNamespace(flwr_clientapp=clientapp)
warm.serve(sys.argv[1])
"""


def test_the_death_of_a_clientapp_is_reported(tmp_path):
    path = tmp_path / "s"
    process = subprocess.Popen(
        [sys.executable, "-c", WARM, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    try:
        assert process.stdout is not None
        for how, said in (("well", "ended by itself"), ("killed", f"{warm.KILLED} 9"), ("well", "ended by itself")):
            end = time.monotonic() + 60
            while True:
                with socket.socket(socket.AF_UNIX) as link:
                    try:
                        link.connect(str(path))
                    except OSError:
                        assert time.monotonic() < end
                        time.sleep(0.05)
                        continue
                    link.sendall(f'["{how}"]'.encode())
                break
            assert process.stdout.readline().strip() == said
    finally:
        process.kill()
        process.wait()


def test_a_supernode_whose_clientapp_was_killed_starts_anew(fake, monkeypatch):
    node, script = fake
    write_script(script, "echo 'SuperNode ID: 77'; exec sleep 600")
    monkeypatch.setattr(supervisor, "release", lambda *_: True)

    @contextlib.contextmanager
    def killed_soon(_: NodeFolder, heard: Callable[[str], None]) -> Iterator[dict[str, str]]:
        timer = threading.Timer(0.5, heard, [f"{warm.KILLED} 9"])
        timer.start()
        yield {}
        timer.join()

    monkeypatch.setattr(supervisor, "_warm", killed_soon)
    said: list[str] = []
    with pytest.raises(SystemExit):
        supervisor.run_node(node, said.append)
    assert said.count("starting the SuperNode of a, server " + node.superlink) >= 2
    assert any("killed by signal 9" in line for line in said)
    assert any("the server was told" in line for line in said)


# ---- a data set for a trial


def test_devices_read_the_rows_that_the_simulation_has(tmp_path):
    settings = load_settings("synthetic", overrides=SMALL)
    prepared, data = prepare_data(settings), load_interactions_of(settings)
    assert prepared is not None
    folders = split_data(settings, tmp_path / "d")
    assert [folder.name for folder in folders] == ["client-1", "client-2", "client-3"]
    catalogue = read_catalogue(tmp_path / "d" / "items.csv")
    assert catalogue.ids == tuple(data.item_ids.tolist())
    assert catalogue.titles == tuple(data.item_titles.tolist())
    own_split = settings.dataset.split.model_copy(update={"kind": "published"})
    for client, folder in enumerate(folders):
        assert mode(folder / "interactions.csv") == 0o600
        rows = match_rows(read_own(folder, {}), catalogue, own_split, settings.seed)
        simulated = load_shard(shard_path(prepared.folder, client))
        assert rows.users == tuple(data.user_ids[simulated.users].tolist())
        assert rows.unknown_items == 0
        for part in ("train", "valid", "test"):
            own, other = getattr(rows.shard, part), getattr(simulated, part)
            assert np.array_equal(own.indptr, other.indptr)
            assert np.array_equal(own.items, other.items)


def test_rows_go_to_the_devices_of_a_deployment(made):
    done = invoke("split", "synthetic", made, *(f"--set={item}" for item in SMALL.split()))
    assert done.exit_code == 0, done.stderr
    assert f"fedhur deploy run '{made / 'server'}' --set dataset.split.kind=published" in done.stdout
    assert (made / "clients" / "client-2" / "data" / "interactions.csv").is_file()
    assert read_server(made / "server").catalogue.is_file()
    again = invoke("split", "synthetic", made, *(f"--set={item}" for item in SMALL.split()))
    assert "--force" in again.stderr
    other = invoke("split", "synthetic", made, "--force", "--set=dataset.clients.number=4")
    assert "--set dataset.clients.number=3" in other.stderr
    assert "name the data set" in invoke("split", "own-data", made).stderr


# ---- messages to devices


def test_all_messages_reach_devices_although_their_grid_goes_over_them_twice(monkeypatch):
    """Flower's grid for devices first numbers the messages, then sends them."""
    monkeypatch.setattr(stages, "POLL_SECONDS", 0.0)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    class Grid(HttpGrid):
        def __init__(self) -> None:
            self.asked = 0

        def push_messages(self, messages: Any) -> list[str]:
            assert len(list(messages)) == len(list(messages)) == 2
            self.sent = {f"m{message.metadata.dst_node_id}": message for message in messages}
            return list(self.sent)

        def pull_messages(self, message_ids: Any) -> list[Message]:
            self.asked += 1
            found = []
            for key in sorted(message_ids)[:1] if self.asked > 2 else []:  # one at a time, and not at once
                message = self.sent[key]
                message.metadata.__dict__["_message_id"] = key
                client = message.metadata.dst_node_id - 10
                fields = {"round": 1, "stage": Stage.ITEMS, "client": client}
                found.append(Message(encode(Content(fields)), reply_to=message))
            return found

    result = stages.StageRunner(Grid(), {0: 10, 1: 11}, 1.0, 5.0).call(
        Stage.ITEMS, 1, {0: Content({}), 1: Content({})}, "round 1"
    )
    assert list(result.replies) == [0, 1]
