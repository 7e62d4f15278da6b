"""The files of a deployment that are text: settings, start script, systemd unit, README."""

from collections.abc import Sequence

START = """#!/bin/sh
# Starts what lies in this folder and keeps it alive. Ctrl-C or SIGTERM ends it.
# FEDHUR may name the command, such as /opt/fedhur/venv/bin/fedhur; by default it is looked for in PATH.
cd "$(dirname "$0")" || exit 1
exec "${FEDHUR:-fedhur}" deploy start .
"""

SERVER = """# The server of a FedHUR deployment. Paths are relative to this folder.
host = "0.0.0.0"    # address to listen on
port = {port}
# Who may start runs and register devices: the server itself, and the networks listed here, such as "10.0.0.5/32".
# Everybody else can only do what a registered device does. Whoever gives orders here runs code on all devices.
operators = []
"""

NODE = """# One device of a FedHUR deployment. Paths are relative to this folder.
name = "{name}"
superlink = "{superlink}"    # the server; its certificate must name this host
port = {port}    # on the loopback interface; each SuperNode of one machine needs its own
data-path = "data"    # folder or file with this client's rows
state-dir = "state"    # its private state: user vectors, own tables. Never leaves the device; back it up
warm = true    # keep PyTorch in memory between messages (some 250 MB), so that each takes seconds less

# More of Flower's node config, such as seed-secret = 0 (a run that repeats, and hides less; see docs/deployment.md)
[node-config]
"""

UNIT = """[Unit]
Description=FedHUR {what}
Wants=network-online.target
After=network-online.target

[Service]
User=fedhur
Group=fedhur
WorkingDirectory={folder}
Environment=FEDHUR={root}/venv/bin/fedhur
ExecStart=/bin/sh {folder}/start.sh
Restart=always
RestartSec=5
# 2: a mistake in the settings, which a restart does not mend
RestartPreventExitStatus=2
KillMode=mixed
TimeoutStopSec=60
UMask=0077

NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ReadWritePaths={folder}
ProtectHome=yes
PrivateTmp=yes
# Leave the next line out to compute on a GPU.
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""

README = """# A FedHUR deployment

Made by `fedhur deploy init` for {count} devices. docs/deployment.md of FedHUR explains every step.

| folder | goes to | private there |
|---|---|---|
| `ca/` | nowhere: keep it offline. It makes further certificates. | `ca.key` |
| `server/` | the server | `server.key` |
| `clients/<name>/` | that device, and no other | `node.key`, later `data/` and `state/` |

Devices: {names}. They reach the server at `{superlink}`; its certificate is good for {hosts}.

On every machine: the same version of FedHUR (`pip install -e .` in a checkout, in a virtual environment of its own).

1. Copy `server/` to the server, each folder of `clients/` to its device (`rsync -a` keeps the modes), then delete the
   copies here but for `ca/`.
2. On the server: `sh server/start.sh`, or as a service (below). Port {port} must be reachable from the devices.
3. On the server, in a second terminal: `fedhur deploy register server`. It tells the SuperLink the public keys of
   `server/keys/`.
4. On each device: put the client's rows into `data/`, then `sh start.sh`.
5. On the server: `fedhur deploy run server --strategy fedhur`. Results lie in `server/runs/`.

As services, with the folders in `{root}/` and the environment in `{root}/venv`:

    sudo useradd --system --home {root} fedhur
    sudo chown -R fedhur: {root}/server        # on a device: {root}/<name>
    sudo cp {root}/server/fedhur-server.service /etc/systemd/system/
    sudo systemctl enable --now fedhur-server  # on a device: fedhur-<name>
    journalctl -u fedhur-server -f

Later, all in this folder (with `ca/`): `fedhur deploy add . --clients 1` makes the folder of one more device,
`fedhur deploy rotate . NAME` a new key for one, `fedhur deploy certificate . --host NAME` a new certificate of the
server. `fedhur deploy remove server NAME`, on the server, shuts a device out.
"""


def server_toml(port: int) -> str:
    """superlink.toml."""
    return SERVER.format(port=port)


def node_toml(name: str, superlink: str, port: int) -> str:
    """node.toml."""
    return NODE.format(name=name, superlink=superlink, port=port)


def unit(what: str, name: str, root: str) -> str:
    """A systemd unit for the folder `root`/`name`."""
    return UNIT.format(what=what, folder=f"{root}/{name}", root=root)


def readme(names: Sequence[str], superlink: str, hosts: Sequence[str], port: int, root: str) -> str:
    """README.md of the deployment."""
    return README.format(
        count=len(names), names=", ".join(names), superlink=superlink, hosts=", ".join(hosts), port=port, root=root
    )
