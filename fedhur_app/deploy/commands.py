"""`fedhur deploy ...`."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Run on real devices: make a deployment, start its parts, run on it.")

_Deployment = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the deployment.")]
_Server = Annotated[Path, typer.Argument(metavar="SERVER", help="The folder server/ of a deployment.")]
_Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="NAME|IP", help="How devices reach the server, the one they use first. Repeatable."),
]
_Names = Annotated[
    str, typer.Option(metavar="A,B,...", help="Names of the devices (default: client-1, client-2, ...).")
]
_Days = Annotated[int, typer.Option(min=1, help="Validity of the server's certificate.")]
_Root = Annotated[str, typer.Option(help="Folder on the machines that the systemd units speak of.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of conf/, e.g. train.lr=0.05. Repeatable."),
]


@app.command()
def init(
    folder: _Deployment,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of devices (default: 1).")] = None,
    names: _Names = "",
    host: _Hosts = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the server.")] = 9092,
    node_port: Annotated[int, typer.Option(min=1, max=65000, help="Of the first device, on its loopback.")] = 9094,
    days: _Days = 825,
    root: _Root = "/opt/fedhur",
    force: Annotated[bool, typer.Option("--force", help="Replace a deployment and all its keys.")] = False,
) -> None:
    """Make certificates, keys, settings, start scripts and systemd units, a folder for each machine."""
    from fedhur_app.deploy import layout

    wanted = _wanted(names, clients, ())
    layout.init(folder, wanted, host or (), port=port, node_port=node_port, days=days, root=root, force=force)
    typer.echo(f"{folder}: the server and {len(wanted)} devices ({', '.join(wanted)})")
    typer.echo(f"what goes where and what to do next: {folder / 'README.md'}")


@app.command()
def add(
    folder: _Deployment,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of further devices (default: 1).")] = None,
    names: _Names = "",
    root: _Root = "/opt/fedhur",
) -> None:
    """Make the folders and keys of further devices."""
    from fedhur_app.deploy import layout

    wanted = _wanted(names, clients, layout.client_names(folder))
    layout.add(folder, wanted, root)
    for name in wanted:
        typer.echo(f"{name}: copy {folder / 'clients' / name} to the device, {name}.pub of server/keys/ to the server")
    typer.echo("then, on the server: fedhur deploy register server")


@app.command()
def rotate(folder: _Deployment, name: Annotated[str, typer.Argument(help="Name of the device.")]) -> None:
    """Make a new key for a device."""
    from fedhur_app.deploy import layout

    layout.rotate(folder, name)
    typer.echo(
        f"new key: copy {folder / 'clients' / name / 'node.key'} to the device, {name}.pub of server/keys/ to the"
    )
    typer.echo("server; there: fedhur deploy register server; then start the device again")


@app.command()
def certificate(folder: _Deployment, host: _Hosts = None, days: _Days = 825) -> None:
    """Make a new certificate of the server (it expires, or the server gets another name)."""
    from fedhur_app.deploy import layout

    layout.certificate(folder, host or (), days)
    typer.echo(f"copy server.crt and server.key of {folder / 'server'} to the server and start it again")


@app.command()
def start(
    folder: Annotated[Path, typer.Argument(help="Folder of the server or of a device (start.sh says this).")],
) -> None:
    """Start the SuperLink or the SuperNode of a folder, and keep it alive."""
    from fedhur_app.deploy import supervisor
    from fedhur_app.deploy.settings import NodeFolder, read_folder
    from fedhur_app.flower_runner import signals_raise

    found = read_folder(folder)
    with signals_raise():
        if isinstance(found, NodeFolder):
            supervisor.run_node(found, _say)
        else:
            supervisor.run_server(found, _say)


@app.command()
def register(server: _Server) -> None:
    """Tell the running SuperLink the keys of server/keys/: new, changed and removed ones."""
    from fedhur_app.deploy.orders import sync_devices
    from fedhur_app.deploy.settings import read_server

    sync_devices(read_server(server), typer.echo)


@app.command()
def remove(server: _Server, name: Annotated[str, typer.Argument(help="Name of the device.")]) -> None:
    """Shut a device out."""
    from fedhur_app.deploy.orders import remove_device
    from fedhur_app.deploy.settings import read_server

    remove_device(read_server(server), name, typer.echo)


@app.command()
def split(
    dataset: Annotated[str, typer.Argument(help="A file in conf/dataset/, or an imported data set.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A deployment, or where the clients' folders go.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of split and clients.")] = 1,
    set_: _Set = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files that lie there.")] = False,
) -> None:
    """Cut a data set into the folders of devices, for a trial."""
    from fedhur_app.config import load_settings
    from fedhur_app.deploy.split import split_data

    settings = load_settings(dataset, seed=seed, overrides=shlex.join(set_ or []))
    for place in split_data(settings, folder, force):
        typer.echo(str(place))
    if (folder / "server").is_dir():
        where = shlex.quote(str(folder / "server"))
        typer.echo(f"train on the same split: fedhur deploy run {where} --set dataset.split.kind=published")


@app.command()
def run(
    server: _Server,
    strategy: Annotated[str | None, typer.Option(help="A file in conf/strategy/ (default: fedhur).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the run (default: 1).")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds at most (lowers min_rounds too).")] = None,
    set_: _Set = None,
    output: Annotated[Path | None, typer.Option(help="Output folder (default: in SERVER/runs/).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Output folder of an earlier run, to continue it.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show all output of Flower and the app.")] = False,
) -> None:
    """Train on the devices; on the server, whose SuperLink must be running."""
    from fedhur_app import cli
    from fedhur_app.config import OWN_DATA
    from fedhur_app.data.item_catalogue import read_catalogue
    from fedhur_app.deploy.orders import check_server, device_count, run_deployed
    from fedhur_app.deploy.settings import read_server
    from fedhur_app.flower_runner import signals_raise

    where = read_server(server)
    check_server(where)  # before a folder is made for nothing
    changes = list(set_ or [])
    if resume is None:
        if not any(change.startswith("dataset.clients.number=") for change in changes):
            changes.append(f"dataset.clients.number={device_count(where)}")
        if where.catalogue.is_file() and not any(change.startswith("dataset.catalogue=") for change in changes):
            changes.append(f"dataset.catalogue={where.catalogue}")
        settings, overrides = cli.new_settings(
            OWN_DATA, strategy or "fedhur", 1 if seed is None else seed, rounds, changes
        )
        if settings.dataset.catalogue:
            read_catalogue(Path(settings.dataset.catalogue).expanduser())  # a mistake in it is told at once
        default = where.folder / "runs" / f"{settings.strategy}-seed{settings.seed}-{cli.now_text()}".replace("/", "-")
        folder = cli.output_folder(output or default, OWN_DATA, settings)
    else:
        folder = resume.expanduser().resolve()
        settings, overrides = cli.resumed_settings(folder, None, strategy, seed, rounds, changes)
    run_config = cli.run_config_of(OWN_DATA, settings, overrides, folder, resume=resume is not None)

    again = f"fedhur deploy run {shlex.quote(str(server))}"

    def begin(config: dict[str, str | int], on_line: Callable[[str], None]) -> str:
        # A run that nobody follows any more would go on, and a second one could be started in its folder.
        with signals_raise():
            return run_deployed(where, config, on_line)

    raise typer.Exit(cli.execute(run_config, settings, folder, "deployment", verbose, begin, again))


def _wanted(names: str, clients: int | None, taken: list[str] | tuple[str, ...]) -> list[str]:
    from fedhur_app.deploy.errors import DeployError
    from fedhur_app.deploy.layout import numbered

    listed = [name.strip() for name in names.split(",") if name.strip()]
    if listed and clients not in (None, len(listed)):
        raise DeployError(f"--clients {clients} and {len(listed)} --names contradict each other: leave out --clients")
    return listed or numbered(clients or 1, taken)


def _say(line: str) -> None:
    typer.echo(line)  # flushes: a service's log must not lag behind
