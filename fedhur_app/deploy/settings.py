"""What the files superlink.toml and node.toml say: one folder of a deployment, wherever it was copied to.

Paths in them are relative to the file's own folder, so that a folder can be moved.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhur_app.deploy.errors import DeployError

SERVER_FILE, NODE_FILE = "superlink.toml", "node.toml"
_Value = str | int | float | bool
_NODE_KEYS = {"name": str, "superlink": str, "port": int, "data-path": str, "state-dir": str}
_SERVER_KEYS = {"host": str, "port": int, "operators": list}
# Entries of the node config that FedHUR knows (docs/protocol.md). Others are allowed: an own strategy may read them.
_KNOWN = (
    *("client", "data-path", "state-dir", "seed-secret", "data-format", "user-col", "item-col", "rating-col"),
    *("time-col", "split-col", "min-rating", "on-bad-line"),
)
# Names of devices, as the handshake of a run takes them.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class NodeFolder:
    """The folder of one device.

    Attributes:
        folder: Absolute path.
        name: Name of the client.
        superlink: Address of the server, `host:port`.
        port: Port on the device's loopback interface, for Flower's own processes there.
        data: Folder or file with the client's rows.
        state: Folder of its private state.
        warm: Whether a process with PyTorch in memory (some 250 MB) waits for messages: stages take less time.
        extra: More entries of Flower's node config, as they are.
    """

    folder: Path
    name: str
    superlink: str
    port: int
    data: Path
    state: Path
    warm: bool = True
    extra: dict[str, _Value] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """Flower's own files (FLWR_HOME)."""
        return self.folder / "flwr"

    @property
    def authority(self) -> Path:
        """Certificate by which the server is known."""
        return self.folder / "ca.crt"

    @property
    def key(self) -> Path:
        """The device's private key."""
        return self.folder / "node.key"

    def node_config(self) -> dict[str, _Value]:
        """What Flower hands to the ClientApp on this device."""
        own: dict[str, _Value] = {
            "client": self.name,
            "data-path": str(self.data),
            "state-dir": str(self.state),
        }
        return own | self.extra


@dataclass(frozen=True)
class ServerFolder:
    """The folder of the server.

    Attributes:
        folder: Absolute path.
        host: Address to listen on.
        port: Port of all of Flower's interfaces.
        operators: Networks that may give orders (start runs, register devices), beside the server itself.
    """

    folder: Path
    host: str
    port: int
    operators: tuple[str, ...] = ()

    @property
    def home(self) -> Path:
        """Flower's own files (FLWR_HOME), the operator's connection among them."""
        return self.folder / "flwr"

    @property
    def authority(self) -> Path:
        """Certificate of the authority."""
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        """The server's private key."""
        return self.folder / "server.key"

    @property
    def public_keys(self) -> Path:
        """Folder with the public key of each device, `<name>.pub`."""
        return self.folder / "keys"

    @property
    def catalogue(self) -> Path:
        """The federation's items, by which devices number theirs; absent until somebody puts them there."""
        return self.folder / "items.csv"

    @property
    def database(self) -> Path:
        """What the SuperLink remembers."""
        return self.folder / "superlink.db"


def read_folder(folder: Path) -> NodeFolder | ServerFolder:
    """What kind of folder this is, and its settings.

    Raises:
        DeployError: Neither kind, or a file with mistakes.
    """
    folder = folder.expanduser().resolve()
    if (folder / NODE_FILE).is_file():
        return read_node(folder)
    if (folder / SERVER_FILE).is_file():
        return read_server(folder)
    raise DeployError(
        f"{folder} holds neither {NODE_FILE} (a device) nor {SERVER_FILE} (the server): give one of the folders that "
        "`fedhur deploy init` wrote"
    )


def read_node(folder: Path) -> NodeFolder:
    """The settings of a device's folder.

    Raises:
        DeployError: A missing file, or one with mistakes.
    """
    folder = folder.expanduser().resolve()
    content = _read(folder / NODE_FILE, _NODE_KEYS, ("node-config", "warm"))
    extra = content.get("node-config", {})
    if wrong := [key for key, value in extra.items() if not isinstance(value, _Value)]:
        raise DeployError(f"{folder / NODE_FILE}: [node-config] {wrong[0]} must be a text, a number, true or false")
    for key in set(extra) - set(_KNOWN):
        if near := difflib.get_close_matches(key.lower().replace("_", "-"), _KNOWN, 1, 0.8):
            raise DeployError(f"{folder / NODE_FILE}: [node-config] unknown entry {key!r}; did you mean {near[0]!r}?")
    if not NAME.fullmatch(content["name"]):
        raise DeployError(
            f"{folder / NODE_FILE}: name = {content['name']!r} cannot be a device's name: letters, digits, '.', '_' "
            "and '-', 63 at most"
        )
    if not isinstance(content.get("warm", True), bool):
        raise DeployError(f"{folder / NODE_FILE}: warm must be true or false")
    _need(folder, ("ca.crt", "node.key"), "copy the device's whole folder again")
    return NodeFolder(
        folder,
        content["name"],
        content["superlink"],
        content["port"],
        folder / Path(content["data-path"]).expanduser(),
        folder / Path(content["state-dir"]).expanduser(),
        content.get("warm", True),
        extra,
    )


def read_server(folder: Path) -> ServerFolder:
    """The settings of the server's folder; the deployment's own folder, in which it lies, will do as well.

    Raises:
        DeployError: A missing file, or one with mistakes.
    """
    folder = folder.expanduser().resolve()
    if not (folder / SERVER_FILE).is_file() and (folder / "server" / SERVER_FILE).is_file():
        folder = folder / "server"
    content = _read(folder / SERVER_FILE, _SERVER_KEYS, ())
    _need(folder, ("ca.crt", "server.crt", "server.key"), "copy the server's whole folder again")
    return ServerFolder(folder, content["host"], content["port"], tuple(content["operators"]))


def _read(path: Path, keys: dict[str, type], optional: tuple[str, ...]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DeployError(f"{path} does not exist: make a deployment with `fedhur deploy init`") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeployError(f"{path} is no TOML: {error}") from error
    for key, kind in keys.items():
        if key not in content:
            raise DeployError(f"{path}: the entry {key!r} is missing")
        if not isinstance(content[key], kind):
            raise DeployError(f"{path}: {key} = {content[key]!r} must be a {_WORDS[kind]}")
    if not 0 < content["port"] < 65536:
        raise DeployError(f"{path}: port = {content['port']} must be between 1 and 65535")
    if unknown := sorted(set(content) - set(keys) - set(optional)):
        raise DeployError(f"{path}: unknown entry {unknown[0]!r}; known are {', '.join([*keys, *optional])}")
    return content


_WORDS = {str: "text in quotes", int: "number", list: "list in brackets"}


def _need(folder: Path, names: tuple[str, ...], then: str) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise DeployError(f"{folder / name} does not exist: {then}")
