"""Makes the folders of a deployment, each ready to be copied to its machine.

`ca/` (offline), `server/`, `clients/<name>/`, README.md; see :mod:`fedhur_app.deploy.texts` for the files in them.
"""

import ipaddress
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedhur_app.deploy import keys, texts
from fedhur_app.deploy.errors import DeployError
from fedhur_app.deploy.settings import NAME, NODE_FILE, SERVER_FILE, read_node
from fedhur_app.files import replacing, write_text

LOCAL_HOSTS = ("localhost", "127.0.0.1")
PORT = 9092
NODE_PORT = 9094  # of the first device; the others count on, so that all of them can be tried on one machine
DAYS = 825
AUTHORITY_DAYS = 3650
ROOT = "/opt/fedhur"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def init(
    folder: Path,
    names: Sequence[str],
    hosts: Sequence[str] = (),
    *,
    port: int = PORT,
    node_port: int = NODE_PORT,
    days: int = DAYS,
    root: str = ROOT,
    force: bool = False,
) -> None:
    """Make a deployment.

    Args:
        folder: Where; made if absent.
        names: Names of the devices.
        hosts: Names and addresses by which devices reach the server, the one they use first.
        port: Of the server.
        node_port: Of the first device on its loopback interface.
        days: Validity of the server's certificate; the authority's is ten years or that, if longer.
        root: Folder on the machines that the systemd units speak of.
        force: Replace a deployment that lies there: all its keys are lost.

    Raises:
        DeployError: Something lies there already; a name that cannot be used.
    """
    folder = folder.expanduser().resolve()
    check_names(names)
    for host in hosts:
        check_host(host)
    if not root.startswith("/") or re.search(r"\s", root):
        raise DeployError(f"--root {root}: systemd needs a path that begins with / and has no spaces")
    parts = [folder / name for name in ("ca", "server", "clients")]
    if present := [part for part in parts if part.exists()]:
        if not force:
            raise DeployError(
                f"{present[0]} exists: {folder} holds a deployment, whose keys are in use. Choose another folder, add "
                "devices with `fedhur deploy add`, or replace it and all its keys with --force"
            )
        for part in present:
            shutil.rmtree(part)
    for part in parts:
        part.mkdir(parents=True, mode=0o700)
    all_hosts = list(dict.fromkeys([*hosts, *LOCAL_HOSTS]))
    server = folder / "server"
    keys.make_authority(folder / "ca" / "ca.crt", folder / "ca" / "ca.key", max(days, AUTHORITY_DAYS))
    shutil.copyfile(folder / "ca" / "ca.crt", server / "ca.crt")
    _server_certificate(folder, all_hosts, days)
    (server / "keys").mkdir()
    write_text(server / SERVER_FILE, texts.server_toml(port))
    _write_script(server / "start.sh")
    write_text(server / "fedhur-server.service", texts.unit("server", "server", root))
    superlink = f"{_bracketed(all_hosts[0])}:{port}"
    for number, name in enumerate(names):
        _make_node(folder, name, superlink, node_port + number, root)
    write_text(folder / "README.md", texts.readme(names, superlink, all_hosts, port, root))


def add(folder: Path, names: Sequence[str], root: str = ROOT) -> None:
    """Make the folders and keys of further devices; addresses are those of the devices that are there.

    Raises:
        DeployError: No deployment, a name that is taken or cannot be used.
    """
    folder = _deployment(folder)
    check_names(names)
    present = client_names(folder)
    if taken := [name for name in names if name in present or (folder / "server" / "keys" / f"{name}.pub").exists()]:
        raise DeployError(f"there is a device {taken[0]!r} already in {folder}")
    nodes = [read_node(folder / "clients" / name) for name in present]
    if not nodes:
        raise DeployError(f"{folder / 'clients'} is empty: there is no device to take the server's address from")
    port = max(node.port for node in nodes)
    for number, name in enumerate(names, start=1):
        _make_node(folder, name, nodes[0].superlink, port + number, root)


def rotate(folder: Path, name: str) -> None:
    """Make a new key pair for a device, in the place of the old one.

    Raises:
        DeployError: No deployment or device of that name.
    """
    folder = _deployment(folder)
    node = folder / "clients" / name
    if not (node / NODE_FILE).is_file():
        raise DeployError(f"there is no device {name!r} in {folder / 'clients'}: {', '.join(client_names(folder))}")
    keys.make_device_key(node / "node.key", folder / "server" / "keys" / f"{name}.pub", name)


def certificate(folder: Path, hosts: Sequence[str], days: int = DAYS) -> None:
    """Make a new certificate and key of the server, by the same authority: devices need nothing new.

    Args:
        folder: The deployment, with `ca/`.
        hosts: Names and addresses of the server, in place of those of before.
        days: Validity.

    Raises:
        DeployError: No deployment, or a host that cannot be used.
    """
    folder = _deployment(folder)
    for host in hosts:
        check_host(host)
    _server_certificate(folder, list(dict.fromkeys([*hosts, *LOCAL_HOSTS])), days)


def client_names(folder: Path) -> list[str]:
    """Names of the devices whose folders lie in a deployment, in order of name."""
    return sorted(path.parent.name for path in (folder / "clients").glob(f"*/{NODE_FILE}"))


def numbered(count: int, after: Sequence[str] = ()) -> list[str]:
    """Names for `count` devices: client-1, client-2, ..., all of one length, that are not among `after`.

    Args:
        count: How many.
        after: Names that are taken.
    """
    width = len(str(count + len(after)))
    names: list[str] = []
    number = 1
    while len(names) < count:
        name = f"client-{number:0{width}d}"
        if name not in after:
            names.append(name)
        number += 1
    return names


def check_names(names: Sequence[str]) -> None:
    """Refuse names that no file, unit or message could carry.

    Raises:
        DeployError: None, a double or an odd name.
    """
    if not names:
        raise DeployError("a deployment needs a device at least")
    for place, name in enumerate(names):
        if not NAME.fullmatch(name):
            raise DeployError(f"{name!r} cannot be a device's name: letters, digits, '.', '_' and '-', 63 at most")
        if name in names[:place]:
            raise DeployError(f"two devices cannot both be called {name!r}")


def check_host(host: str) -> None:
    """Refuse what is neither a host name nor an IP address.

    Raises:
        DeployError: With what is expected.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST.fullmatch(host) or len(host) > 253:
            raise DeployError(
                f"--host {host}: give a host name or an IP address, without https:// and without a port"
            ) from None


def _deployment(folder: Path) -> Path:
    folder = folder.expanduser().resolve()
    if not (folder / "ca" / "ca.key").is_file():
        raise DeployError(f"{folder} holds no deployment with its ca/: make one with `fedhur deploy init {folder}`")
    return folder


def _server_certificate(folder: Path, hosts: Sequence[str], days: int) -> None:
    server, authority = folder / "server", folder / "ca"
    keys.make_server_certificate(
        server / "server.crt", server / "server.key", hosts, days, authority / "ca.crt", authority / "ca.key"
    )


def _make_node(folder: Path, name: str, superlink: str, port: int, root: str) -> None:
    node = folder / "clients" / name
    for part in (node, node / "data", node / "state"):
        part.mkdir(mode=0o700)
    shutil.copyfile(folder / "ca" / "ca.crt", node / "ca.crt")
    keys.make_device_key(node / "node.key", folder / "server" / "keys" / f"{name}.pub", name)
    write_text(node / NODE_FILE, texts.node_toml(name, superlink, port))
    _write_script(node / "start.sh")
    write_text(node / f"fedhur-{name}.service", texts.unit(f"device {name}", name, root))


def _write_script(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text(texts.START, encoding="utf-8")
        temporary.chmod(0o755)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
