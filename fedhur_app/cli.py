"""The `fedhur` command: run, compare, study, report, markets, tune, data, deploy, strategies, recommend, export.

Heavy packages (torch, Flower, the data code) are imported where they are used, so that `--help` is quick.
"""

import contextlib
import errno
import json
import logging
import shlex
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
import typer.core
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedhur_app import __version__
from fedhur_app.deploy.commands import app as deploy_app
from fedhur_app.flower_runner import FOR_PEOPLE, FlowerError

if TYPE_CHECKING:
    import click

    from fedhur_app.config import Settings

KEPT_LINES = 200
POLL_SECONDS = 0.3


class UsageError(ValueError):
    """Options that do not fit together or to the files; the text says what to do."""


class _Group(typer.core.TyperGroup):
    """The commands, with readable errors."""

    def invoke(self, ctx: "click.Context") -> Any:
        with _readable_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _readable_errors() -> Iterator[None]:
    """Expected errors become one red line and exit status 2; any other keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        err.print("stopped", style="yellow")
        sys.exit(130)
    except Exception as error:
        if not _expected(error):
            raise
        err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)


def _expected(error: Exception) -> bool:
    from fedhur_app.config import ConfigError
    from fedhur_app.data.errors import DataError
    from fedhur_app.deploy.errors import DeployError

    kinds = (UsageError, ConfigError, DataError, DeployError, FlowerError)
    files = (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError)
    return isinstance(error, (*kinds, *files)) or (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Federated recommendation on Flower: FedHUR, FedCIA, FedAvg and more.",
)
data_app = typer.Typer(no_args_is_help=True, help="Fetch, import, list and describe data sets.")
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of conf/, e.g. train.lr=0.05. Repeatable."),
]


def main() -> None:
    """Entry point of the `fedhur` command."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"fedhur {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    dataset: Annotated[str | None, typer.Option(help="A data set of `fedhur data list` (default: ml-100k).")] = None,
    strategy: Annotated[str | None, typer.Option(help="A file in conf/strategy/ (default: fedhur).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the whole run (default: 1).")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds at most (lowers min_rounds too).")] = None,
    set_: SetOption = None,
    runtime: Annotated[
        Literal["flower", "local"], typer.Option(help="flower: `flwr run` with Ray; local: in this process.")
    ] = "flower",
    output: Annotated[
        Path | None,
        typer.Option(help="Output folder (default: runs/<dataset>-<strategy>-seed<seed>-<time>)."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Output folder of an earlier run, to continue it with its settings.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show all output of Flower and the app.")] = False,
) -> None:
    """Train and test a strategy on a data set and show the result."""
    changes = list(set_ or [])
    if resume is not None:
        if output is not None and output.expanduser().resolve() != resume.expanduser().resolve():
            raise UsageError("--output contradicts --resume: a resumed run goes on in its own folder")
        folder = resume.expanduser().resolve()
        settings, overrides = resumed_settings(folder, dataset, strategy, seed, rounds, changes)
        run_config = run_config_of(settings.dataset.name, settings, overrides, folder, resume=True)
    else:
        dataset = dataset or "ml-100k"
        strategy = strategy or "fedhur"
        settings, overrides = new_settings(dataset, strategy, 1 if seed is None else seed, rounds, changes)
        folder = output_folder(output, dataset, settings)
        run_config = run_config_of(dataset, settings, overrides, folder, resume=False)
    raise typer.Exit(execute(run_config, settings, folder, runtime, verbose))


@app.command()
def tune(
    trials: Annotated[int, typer.Option(min=1, help="Number of trials, those of an interrupted search included.")],
    dataset: Annotated[str, typer.Option(help="A data set of `fedhur data list`.")] = "ml-100k",
    strategy: Annotated[str, typer.Option(help="A file in conf/strategy/ that has one in conf/search/.")] = "fedhur",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search and of every run.")] = 1,
    sampler: Annotated[Literal["tpe", "random"], typer.Option(help="How values are proposed.")] = "tpe",
    jobs: Annotated[int | None, typer.Option(min=1, help="Trials side by side (default: one a core).")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Output folder (default: runs/tune-<dataset>-<strategy>-seed<seed>).")
    ] = None,
    save: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also write the best values to conf/strategy/NAME.yaml.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Search good settings of a strategy by validation; the same command again goes on after an interruption."""
    from fedhur_app import tuning
    from fedhur_app.files import write_text

    saved = None if save is None else tuning.saved_path(save)
    search = tuning.Search(dataset, strategy, seed, sampler, tuple(set_ or []), jobs)
    default = Path("runs") / f"tune-{dataset}-{strategy}-seed{seed}".replace("/", "-")
    folder = output_folder(output or default, dataset, search.settings({}))
    _plain(f"output: {folder}")
    try:
        study = tuning.tune(search, trials, folder, _plain)
    except KeyboardInterrupt:
        options = {"dataset": dataset, "strategy": strategy, "trials": trials, "seed": seed, "sampler": sampler}
        options |= {"jobs": jobs, "output": folder, "save": save}
        words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        words += [word for change in set_ or [] for word in ("--set", change)]
        err.print("stopped; finished trials are kept", style="yellow")
        err.print(f"continue with: fedhur tune {shlex.join(words)}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    _plain(tuning.own_values_text(study))
    if study.best is None:
        why = f"all {len(study.trials)} trials failed, the last one because: {study.trials[-1].reason}"
        err.print(why, style="red", markup=False, soft_wrap=True)
        _plain(f"output: {folder}")
        raise typer.Exit(1)
    _plain(tuning.best_text(study))
    if saved is not None:
        write_text(saved, tuning.best_yaml(study))
        _plain(f"saved: {saved} (--strategy {save})")
    _plain(f"output: {folder}")


@app.command()
def compare(
    names: Annotated[str, typer.Option("--strategies", metavar="A,B,...", help="Files in conf/strategy/.")],
    dataset: Annotated[str, typer.Option(help="A data set of `fedhur data list`.")] = "ml-100k",
    seeds: Annotated[str, typer.Option(metavar="N,N,...", help="Every strategy runs with each.")] = "1,2,3,4,5",
    set_: SetOption = None,
    runtime: Annotated[
        Literal["local", "flower"], typer.Option(help="local: one process a run; flower: `flwr run` with Ray.")
    ] = "local",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once (default: one a core; 1 with --runtime flower).")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Output folder (default: runs/compare-<dataset>-<time>). Completed runs in it are kept."),
    ] = None,
) -> None:
    """Run strategies with several seeds; write tables of means, intervals and paired tests."""
    import os

    from fedhur_app import compare as comparison

    if output is None:
        output = Path("runs") / f"compare-{dataset}-{now_text()}".replace("/", "-")
    folder, changes = output.expanduser().resolve(), list(set_ or [])
    runs = comparison.plan(dataset, _listed(names), _numbers(seeds), changes, folder)
    jobs = jobs or (1 if runtime == "flower" else os.cpu_count() or 1)
    raise typer.Exit(comparison.compare(runs, folder, changes, runtime, jobs, _plain))


@app.command()
def markets(
    dataset: Annotated[str, typer.Option(help="A data set whose users have markets.")],
    seeds: Annotated[str, typer.Option(metavar="N,N,...", help="Every strategy runs with each.")] = "1,2,3",
    names: Annotated[
        str,
        typer.Option(
            "--strategies", metavar="A,B,...", help="Files in conf/strategy/, one of them such as independent."
        ),
    ] = "independent,finetune,joint,fedavg,fecosr",
    tuned: Annotated[bool, typer.Option("--tuned", help="Use tuned/<dataset>/<name> where there is one.")] = False,
    picture: Annotated[Literal["pca", "tsne"], typer.Option(help="How item tables are drawn.")] = "pca",
    set_: SetOption = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once (default: one a core).")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Output folder (default: runs/markets-<dataset>-<time>). Completed runs in it are kept."),
    ] = None,
) -> None:
    """Show what sharing does to each market: who gains, who loses against training alone."""
    import os

    from fedhur_app import compare as comparison
    from fedhur_app import markets as study

    if output is None:
        output = Path("runs") / f"markets-{dataset}-{now_text()}".replace("/", "-")
    folder, changes = output.expanduser().resolve(), list(set_ or [])
    strategies = study.tuned(dataset, _listed(names), _plain) if tuned else _listed(names)
    what = study.command(picture)
    runs = comparison.plan(dataset, strategies, _numbers(seeds), changes, folder, what)
    study.check(runs)
    raise typer.Exit(comparison.compare(runs, folder, changes, "local", jobs or os.cpu_count() or 1, _plain, what))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, comparisons and studies.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write, such as report.html.")],
    title: Annotated[str, typer.Option(help="Title of the page (default: what was found).")] = "",
) -> None:
    """Make one HTML page of any runs, comparisons and studies; it needs no network and no other file."""
    from fedhur_app.files import write_text
    from fedhur_app.reporting.page import collect
    from fedhur_app.reporting.page_html import to_page

    file = output.expanduser().resolve()
    if file.is_dir():
        raise UsageError(f"{file} is a folder; --output names the page to write, such as {file / 'report.html'}")
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is no ordinary file; --output names the page to write, such as report.html")
    command = shlex.join(["fedhur", "report", *map(str, folders), "--output", str(output)])
    page = collect([folder.expanduser() for folder in folders], title)
    for problem in page.problems:
        err.print(f"{problem.where}: {problem.what}", style="yellow", markup=False, soft_wrap=True)
    if not page.runs and not page.documents:
        raise UsageError(f"no run, comparison or study is in {', '.join(map(str, folders))}: no page was written")
    write_text(file, to_page(page, command))
    studies = sum(document.kind == "study" for document in page.documents)
    others = _many(len(page.documents) - studies, "other report", "other reports")
    _plain(f"{_many(len(page.runs), 'run', 'runs')}, {_many(studies, 'study', 'studies')}, {others}")
    _plain(f"page: {file} ({_bytes(file.stat().st_size)})")


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


@app.command()
def study(
    name: Annotated[str | None, typer.Argument(help="A file in conf/study/; without it all are listed.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The small version: seconds, to see that it works.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Output folder (default: studies/<name>[-quick]). Completed runs in it are kept."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once (default: one a core).")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="N,N,...", help="In place of the study's.")] = None,
    arms: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only these of its arms, in the order of the file.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Make no runs, only the report of those that are there.")
    ] = False,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of another study, whose runs of the same settings are copied. May be repeated."),
    ] = None,
) -> None:
    """Run a study: many runs that answer one question, with tables, tests and figures."""
    import os

    from fedhur_app.studies.definition import load_study, study_names

    if name is None:
        if quick or output or jobs or seeds or arms or report_only or reuse:
            raise UsageError(f"name a study before its options: {', '.join(study_names())}")
        _list_studies()
        return
    from fedhur_app.studies import runner

    definition = load_study(name)
    if quick:
        definition = definition.smaller()
    if seeds is not None:
        definition = definition.model_copy(update={"seeds": _numbers(seeds)})
    if arms is not None:
        definition = definition.with_arms([arm.strip() for arm in arms.split(",") if arm.strip()])
    folder = (output or Path("studies") / f"{name}{'-quick' if quick else ''}").expanduser().resolve()
    words = ["fedhur", "study", name, *(["--quick"] if quick else []), *(["--seeds", seeds] if seeds else [])]
    words += ["--arms", arms] if arms else []
    made = runner.Making(name, shlex.join(words), quick)
    jobs = jobs or os.cpu_count() or 1
    raise typer.Exit(runner.study(definition, made, folder, jobs, _plain, report_only, reuse or ()))


def _list_studies() -> None:
    from fedhur_app.config import ConfigError
    from fedhur_app.studies.definition import load_study, study_names

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    wrong = []
    for name in study_names():
        try:
            table.add_row(*map(Text, (name, load_study(name).question)))
        except ConfigError as error:
            wrong.append(error)
    out.print(table)
    if wrong:
        raise UsageError("; ".join(map(str, wrong)))


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _listed(text)]
    except ValueError as error:
        raise UsageError(f"--seeds {text}: seeds are whole numbers with commas between them, such as 1,2,3") from error


@app.command()
def recommend(
    state_dir: Annotated[Path, typer.Option(help="The node's state-dir.")],
    data_path: Annotated[Path, typer.Option(help="The node's rows as they are now; what the user has is left out.")],
    user: Annotated[str, typer.Option(help="Id of the user in the node's rows.")],
    top: Annotated[int, typer.Option(min=1, help="Length of the list.")] = 10,
    run: Annotated[
        str, typer.Option(help="The first letters of a run's name, for its model (default: the newest run's).")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """On a device: the best items for one of its users, by the local model alone."""
    from fedhur_app.recommending import open_model

    answer = open_model(state_dir, run).recommend(user, data_path, top)
    if as_json:
        _plain(json.dumps(answer.as_dict(), indent=1, ensure_ascii=False))
        return
    if not answer.items:
        _plain(f"user {user} has all {answer.seen} items of the catalogue: nothing is left to recommend")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("rank", "item", "title", "score"):
        table.add_column(head, justify="right" if head in ("rank", "score") else "left")
    for each in answer.items:
        table.add_row(*map(Text, (str(each.rank), each.item, each.title, f"{each.score:.4f}")))
    out.print(table)
    _plain(f"user {user}: {answer.known}; {answer.seen} items left out; model: {answer.model}")


@app.command()
def export(
    state_dir: Annotated[Path, typer.Option(help="The node's state-dir.")],
    to: Annotated[Path, typer.Option(help="File to write, such as model.safetensors; its card gets .md.")],
    items_only: Annotated[bool, typer.Option("--items-only", help="Leave out what belongs to users.")] = False,
    run: Annotated[
        str, typer.Option(help="The first letters of a run's name, for its model (default: the newest run's).")
    ] = "",
) -> None:
    """On a device: write its model as safetensors, with a card that says what it is and what left the device."""
    from fedhur_app.recommending import open_model

    card = open_model(state_dir, run).export(to, items_only)
    _plain(f"model: {to}")
    _plain(f"card: {card}")


@app.command()
def strategies() -> None:
    """List the strategies of conf/strategy/."""
    from fedhur_app.config import available, conf_folder

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name in available("strategy"):
        lines = (conf_folder() / "strategy" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        about = next((line.lstrip("# ") for line in lines if line.startswith("#")), "")
        table.add_row(name, about)
    out.print(table)


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Such as ml-1m; see `fedhur data list`.")],
    file: Annotated[
        Path | None, typer.Option(help="The archive, downloaded by hand; it is verified as a download is.")
    ] = None,
) -> None:
    """Download a data set, unless it is there already; an interrupted download goes on where it stopped."""
    from fedhur_app.data import catalog

    folder = catalog.fetch(name, say=_plain, file=file)
    _plain(f"{name}: {folder}")


@data_app.command("list")
def list_() -> None:
    """List the data sets that are known by name, and those that were imported."""
    from fedhur_app.data import catalog, listing

    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("name", "about", "download", "state"):
        table.add_column(head, no_wrap=head in ("name", "download"), justify="right" if head == "download" else "left")
    for each in [*listing.known(), *listing.imported()]:
        table.add_row(*map(Text, (each.name, each.about, each.download, each.state)))
    out.print(table)
    _plain(f"data sets are kept in {catalog.data_home()}")


@data_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file of interactions, or a folder that holds a known one.")],
    name: Annotated[str, typer.Option(help="What the data set is to be called.")],
    form: Annotated[
        Literal[
            "auto",
            "movielens",
            "csv",
            "inter",
            "amazon",
            "bookcrossing",
            "lastfm",
            "sequence",
            "parquet",
            "npz",
            "matrices",
        ],
        typer.Option("--format", help="Form of the file (docs/data.md)."),
    ] = "auto",
    user_col: Annotated[str | None, typer.Option(help="Column of users: name, or number from 1 on.")] = None,
    item_col: Annotated[str | None, typer.Option(help="Column of items.")] = None,
    rating_col: Annotated[str | None, typer.Option(help="Column of ratings.")] = None,
    time_col: Annotated[str | None, typer.Option(help="Column of times.")] = None,
    market_col: Annotated[str | None, typer.Option(help="Column of markets, of FILE or of the file of users.")] = None,
    split_col: Annotated[str | None, typer.Option(help="Column with train, valid or test.")] = None,
    min_rating: Annotated[float | None, typer.Option(help="Leave out interactions rated lower.")] = None,
    implicit_zeros: Annotated[
        Literal["keep", "drop"], typer.Option(help="Rating 0 (Book-Crossing: implicit): keep or leave out.")
    ] = "keep",
    k_core: Annotated[
        str, typer.Option(help="U,I: only users with U items and items with I users at least, again and again.")
    ] = "0,0",
    dedupe: Annotated[
        Literal["last", "first", "max"], typer.Option(help="Of a repeated user and item: latest, earliest, best rated.")
    ] = "last",
    items: Annotated[Path | None, typer.Option(help="Catalogue: ids, titles and genres of items.")] = None,
    users: Annotated[Path | None, typer.Option(help="Users: zip code, age, gender, occupation, market.")] = None,
    on_bad_line: Annotated[
        Literal["error", "skip"], typer.Option(help="Damaged lines: stop, or leave out and count.")
    ] = "error",
    keep_catalogue: Annotated[
        bool, typer.Option("--keep-catalogue", help="npz and matrices: also the published items that nobody has.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an imported data set of that name.")] = False,
) -> None:
    """Take a file of interactions in, so that `--dataset NAME` means it."""
    from fedhur_app.data import importing

    options = importing.ImportOptions(
        format=form,
        user_col=user_col,
        item_col=item_col,
        rating_col=rating_col,
        time_col=time_col,
        market_col=market_col,
        split_col=split_col,
        min_rating=min_rating,
        implicit_zeros=implicit_zeros,
        k_core=importing.parse_k_core(k_core),
        dedupe=dedupe,
        items=items,
        users=users,
        on_bad_line=on_bad_line,
        keep_catalogue=keep_catalogue,
    )
    importing.check_name(name, force=force)
    imported = importing.import_file(file, name, options)
    folder = importing.save_imported(imported, force=force)
    for line in [*imported.report.lines(), f"{name} is in {folder}", *importing.next_steps(imported.data)]:
        _plain(line)


@data_app.command()
def describe(
    name: Annotated[str, typer.Argument(metavar="NAME|DIR", help="A data set, or a folder of prepared shards.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of split and clients.")] = 1,
    set_: SetOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a picture (.png, .svg or .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the sizes of every client.")] = False,
) -> None:
    """Count users, items, interactions, the parts of the split and the clients, and how much clients differ."""
    from fedhur_app.config import data_sets, load_settings
    from fedhur_app.data.describe import as_dict, render
    from fedhur_app.data.describe import describe as count
    from fedhur_app.data.experiment import load_interactions_of
    from fedhur_app.data.partition import assign_clients
    from fedhur_app.data.profile import profile, profile_prepared
    from fedhur_app.data.split import split_labels

    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {plot}: pictures are .png, .svg or .pdf")
    if name not in data_sets() and Path(name).is_dir():
        found = profile_prepared(Path(name))
    else:
        settings = load_settings(name, seed=seed, overrides=shlex.join(set_ or []))
        data = load_interactions_of(settings)
        split, clients = settings.dataset.split, settings.dataset.clients
        labels = split_labels(data, split.kind, split.ratios, seed)
        found = profile(
            data, labels, assign_clients(data, labels, clients.kind, clients.number, seed, **clients.options)
        )
    described = count(found)
    _plain(json.dumps(as_dict(described), indent=1) if as_json else render(described))
    if plot is not None:
        from fedhur_app.reporting.data_picture import draw_data

        draw_data(found, plot)
        err.print(f"picture: {plot}", markup=False, soft_wrap=True)


def _plain(line: str) -> None:
    out.print(line, markup=False, soft_wrap=True)


def new_settings(
    dataset: str, strategy: str, seed: int, rounds: int | None, changes: list[str]
) -> "tuple[Settings, str]":
    """Settings of a new run and the text of the run-config key `overrides` that leads to them.

    Args:
        dataset: A file in conf/dataset/.
        strategy: A file in conf/strategy/.
        seed: Seed of the run.
        rounds: Overrides the setting of that name, and lowers `min_rounds` to it where needed.
        changes: Items `key=value`.

    Raises:
        ConfigError: An unknown name or key, an impossible value.
    """
    from fedhur_app.config import load_settings

    if rounds is not None:
        # min_rounds is known only once all is composed, which fails where it is above rounds.
        many = load_settings(dataset, strategy, seed, shlex.join([*changes, f"rounds={10**9}"]))
        changes = [*changes, f"rounds={rounds}"]
        if many.min_rounds > rounds:
            changes.append(f"min_rounds={rounds}")
    overrides = shlex.join(changes)
    return load_settings(dataset, strategy, seed, overrides), overrides


def resumed_settings(
    folder: Path,
    dataset: str | None,
    strategy: str | None,
    seed: int | None,
    rounds: int | None,
    changes: list[str],
) -> "tuple[Settings, str]":
    """Settings of the run in `folder`, and the overrides that resuming it takes (more rounds, or none).

    Raises:
        UsageError: Nothing to resume, or an option that contradicts the run's config.yaml.
    """
    from fedhur_app.config import flatten, parse_overrides, read_config_file
    from fedhur_app.files import read_json

    settings = read_config_file(folder / "config.yaml")
    if not (folder / "checkpoint").is_dir():
        raise UsageError(f"{folder} holds no checkpoint: the run ended before its first round; start it anew")
    wanted = flatten(parse_overrides(shlex.join(changes)))
    named = {"dataset.name": dataset, "strategy": strategy, "seed": seed, "rounds": rounds}
    wanted |= {key: value for key, value in named.items() if value is not None}
    present = flatten(settings.model_dump())
    for key, value in wanted.items():
        if key not in present:
            raise UsageError(f"there is no setting {key!r} in {folder / 'config.yaml'}")
        if key != "rounds" and value != present[key]:
            raise UsageError(
                f"{key}={value} contradicts the run in {folder}, which has {key}={present[key]}: "
                "a resumed run keeps its settings; start a new one for others"
            )
    more = wanted.get("rounds", settings.rounds)
    if not isinstance(more, int) or more < settings.rounds:
        raise UsageError(f"rounds={more}: a resumed run's rounds ({settings.rounds}) can only be raised")
    result = read_json(folder / "result.json")
    # A completed run that was continued with more rounds and interrupted has the result of before.
    continued = result.get("max_rounds", settings.rounds) < settings.rounds
    completed = result.get("status") == "completed" and not continued
    if completed and result["rounds"] < settings.rounds:
        raise UsageError(
            f"the run in {folder} stopped early after round {result['rounds']} (patience {settings.patience}): more "
            "rounds would not change that; start a new run with a larger patience"
        )
    if more == settings.rounds and completed:
        raise UsageError(f"the run in {folder} is completed; give --rounds above {settings.rounds} to go on")
    if more == settings.rounds:
        return settings, ""
    return settings.model_copy(update={"rounds": more}), f"rounds={more}"


def output_folder(output: Path | None, dataset: str, settings: "Settings") -> Path:
    """The absolute output folder of a new run.

    Raises:
        UsageError: It holds a run already, or is a file.
    """
    if output is None:
        name = f"{dataset}-{settings.strategy}-seed{settings.seed}-{now_text()}".replace("/", "-")
        return _make_folder(Path("runs").resolve(), name)
    folder = output.expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; the output must be a folder")
    for name in ("result.json", "history.jsonl"):
        if (folder / name).exists():
            raise UsageError(
                f"{folder} already holds a run ({name}): choose another --output, "
                f"or continue it with --resume {shlex.quote(str(folder))}"
            )
    return folder


def now_text() -> str:
    """This moment (UTC) as part of a folder's name."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def _make_folder(parent: Path, name: str) -> Path:
    """Make `parent/name`, or with a number behind it: runs that start in the same second must not share a folder."""
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(folder, error) from error
        return folder
    raise UsageError(f"{parent} already holds a thousand folders named {name}: give --output")


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write to {folder} ({error.strerror}): give --output a folder that can be written")


def run_config_of(
    dataset: str, settings: "Settings", overrides: str, folder: Path, *, resume: bool
) -> dict[str, str | int]:
    """Values for the app's run-config."""
    return {
        "dataset": dataset,
        "strategy": settings.strategy,
        "seed": settings.seed,
        "overrides": overrides,
        "output-dir": str(folder),
        "resume": str(folder) if resume else "",
    }


def execute(
    run_config: dict[str, str | int],
    settings: "Settings",
    folder: Path,
    runtime: str,
    verbose: bool,
    start: "Callable[[dict[str, str | int], Callable[[str], None]], str] | None" = None,
    command: str = "fedhur run",
) -> int:
    """Run, follow, show the result.

    Args:
        run_config: Values for the app's run-config.
        settings: The settings that they lead to.
        folder: Output folder.
        runtime: `flower` or `local`.
        verbose: Whether to show all output.
        start: In place of both runtimes: takes the run-config and what to do with a line of output, says why it failed.
        command: What continues a run with `--resume`.

    Returns:
        The exit status: 0 only if the run completed and wrote its result, 130 after Ctrl-C.
    """
    from fedhur_app.files import read_json

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    result_file, log_file = folder / "result.json", folder / "run.log"
    before = _changed_at(result_file)
    _plain(f"output: {folder}")
    metric = f"ndcg@{settings.evaluation.k}"
    failure = ""
    stopped = False
    with (
        log_file.open("a", encoding="utf-8") as log,
        LiveView(out, settings.rounds, metric, verbose, log) as view,
        HistoryFollower(folder / "history.jsonl", view.show_rounds),
    ):
        try:
            if start is not None:
                failure = start(run_config, view.line)
            elif runtime == "flower":
                failure = _run_flower(run_config, settings, view.line)
            else:
                _run_local(run_config, view.line)
        except KeyboardInterrupt:
            stopped = True
        except Exception as error:
            # What ends the server is in result.json, traceback and all; anything else must not get lost here.
            if not _expected(error) and _changed_at(result_file) == before:
                raise
            failure = str(error) or type(error).__name__
    # A result.json of before a resume says nothing about this run.
    result = read_json(result_file) if _changed_at(result_file) != before else {}
    if not failure and not stopped and result.get("status") == "completed":
        show_result(out, result, folder)
        return 0
    if not result_file.exists():
        # The server was killed before it could say anything.
        from fedhur_app.files import write_json

        said = "stopped by Ctrl-C" if stopped else failure or "it ended without writing a result"
        write_json(result_file, {"status": "failed", **_identity(settings), "reason": said})
    if stopped:
        err.print("stopped by Ctrl-C", style="yellow")
    else:
        view.show_hidden()
        reason = result.get("reason") if result.get("status") == "failed" else None
        err.print(
            f"the run failed: {reason or failure or 'it ended without writing a result'}",
            style="red",
            markup=False,
            soft_wrap=True,
        )
        err.print(f"log: {log_file}", markup=False, soft_wrap=True)
    if (folder / "checkpoint" / "server.npz").is_file() and "cannot be resumed" not in failure:
        err.print(f"continue with: {command} --resume {shlex.quote(str(folder))}", markup=False, soft_wrap=True)
    _plain(f"output: {folder}")
    return 130 if stopped else 1


def _identity(settings: "Settings") -> dict[str, str | int]:
    return {"dataset": settings.dataset.name, "strategy": settings.strategy, "seed": settings.seed}


def _run_flower(run_config: dict[str, str | int], settings: "Settings", on_line: Callable[[str], None]) -> str:
    """Run under Flower; the text says why it failed, empty if it did not."""
    from fedhur_app.data.experiment import number_of_clients
    from fedhur_app.flower_runner import client_resources, run_flower

    clients = number_of_clients(settings)
    on_line(f"{FOR_PEOPLE}starting Flower with {clients} virtual clients")
    cpus, gpus = client_resources(settings.device, clients)
    if gpus == 0 and settings.device == "auto" and _sees_gpu():
        # Ray leaves the GPU visible to workers without a share of it: they must be told not to take it.
        run_config = {**run_config, "overrides": f"{run_config['overrides']} device=cpu"}
    outcome = run_flower(run_config, clients, cpus_per_client=cpus, gpus_per_client=gpus, on_line=on_line)
    if outcome.completed:
        return ""
    return outcome.details or f"Flower ended with status {outcome.status}"


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_local(run_config: dict[str, str | int], on_line: Callable[[str], None]) -> None:
    from flwr.common.logger import FLOWER_LOGGER

    from fedhur_app.runtime import run_local

    with _heard(FLOWER_LOGGER, on_line):
        run_local(run_config)


@contextlib.contextmanager
def _heard(logger: logging.Logger, on_line: Callable[[str], None]) -> Iterator[None]:
    """Give a logger's lines to `on_line` instead of to its own handlers."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            on_line(record.getMessage())

    old = logger.handlers[:]
    logger.handlers[:] = [Handler()]
    try:
        yield
    finally:
        logger.handlers[:] = old


class HistoryFollower:
    """Watches a run's history.jsonl in a thread and hands over all its rounds whenever it changed.

    Args:
        path: The file; it need not exist yet.
        on_change: Called with the rounds, in order; half-written lines are left for later.
    """

    def __init__(self, path: Path, on_change: Callable[[list[dict[str, Any]]], None]) -> None:
        self._path = path
        self._on_change = on_change
        self._seen: tuple[int, int] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="history", daemon=True)

    def __enter__(self) -> "HistoryFollower":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()  # what was written since the last look

    def _watch(self) -> None:
        while not self._end.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_size) == self._seen:
                return
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        self._seen = (stat.st_mtime_ns, stat.st_size)
        rounds = []
        for line in text.splitlines():
            # A damaged line is the server's to complain about; the bar only leaves it out.
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if isinstance(entry, dict) and "round" in entry:
                    rounds.append(entry)
        self._on_change(rounds)


class LiveView:
    """What a person sees of a run: a line a stage and, in a terminal, a bar over rounds below them.

    Where the console is no terminal there is no bar: the server's own lines tell the score of each round.

    Args:
        console: Where to print.
        rounds: Rounds at most.
        metric: Name of the validation metric to show.
        verbose: Also show the lines that are not marked for people.
        log: Gets every line.
    """

    def __init__(self, console: Console, rounds: int, metric: str, verbose: bool, log: TextIO) -> None:
        self._console = console
        self._metric = metric
        self._verbose = verbose
        self._log = log
        self._hidden: deque[str] = deque(maxlen=KEPT_LINES)
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[best]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("rounds", total=rounds, best="waiting for the first round")

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def line(self, line: str) -> None:
        """Take one line of the run's output."""
        self._log.write(line + "\n")
        self._log.flush()
        _, mark, text = line.partition(FOR_PEOPLE)
        if mark and not text.startswith("output: "):  # the command has its own line for that
            self._console.print(text, markup=False, soft_wrap=True)
        elif self._verbose:
            self._console.print(line, markup=False, soft_wrap=True, style="dim")
        elif line and not mark:
            self._hidden.append(line)

    def show_rounds(self, rounds: list[dict[str, Any]]) -> None:
        """Take all rounds of the history so far."""
        if not rounds:
            return
        scored = [
            (entry["validation"][self._metric], entry["round"])
            for entry in rounds
            if entry.get("validation", {}).get(self._metric) is not None
        ]
        text = ""
        if scored:
            best, best_round = max(scored, key=lambda pair: (pair[0], -pair[1]))
            text = f"best validation {self._metric} {best:.4f} (round {best_round})"
        self._bar.update(self._task, completed=rounds[-1]["round"], best=text)

    def show_hidden(self) -> None:
        """Print the last lines that were not shown: they may explain a failure."""
        for line in self._hidden:
            self._console.print(line, markup=False, soft_wrap=True, style="dim")
        self._hidden.clear()


def show_result(console: Console, result: dict[str, Any], folder: Path) -> None:
    """Print the table of a completed run.

    Args:
        console: Where to print.
        result: Content of result.json.
        folder: Output folder of the run.
    """
    table = Table(title=f"{result['strategy']} on {result['dataset']}, seed {result['seed']}")
    table.add_column("metric")
    table.add_column("validation", justify="right")
    table.add_column("test", justify="right")
    for name, value in result["test"].items():
        table.add_row(name, _metric_text(result["validation"].get(name)), _metric_text(value))
    console.print(table)
    best = f"best round {result['best_round']} of {result['rounds']}"
    if result.get("selection") == "client":
        best = f"each client's own best of {result['rounds']} rounds"
    console.print(f"{best}, {result['users_evaluated']} users tested")
    console.print(
        f"sent by clients {_bytes(result['bytes_up'])}, to clients {_bytes(result['bytes_down'])}, "
        f"{result['seconds']:.1f} s"
    )
    peaks = [f"{who} {value:.0f} MiB" for who, value in result.get("peak_memory_mib", {}).items() if value is not None]
    if peaks:
        console.print(f"peak memory: {', '.join(peaks)}")
    console.print(f"output: {folder}", markup=False, soft_wrap=True)


def _metric_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    main()
