"""Where the seconds of a round go: stages, shares, the naive form of the same, and what bounds each step.

    python -m benchmarks.speed                              # FedHUR on ML-100K, in one process and under Flower
    python -m benchmarks.speed --output docs/results/speed.md
    python -m benchmarks.speed --strategy tuned/ml-100k/fedcia --dim 64 --runtimes local
    python -m benchmarks.speed --quick                      # synthetic data, seconds: to see that it works

Nothing of the app is changed for it: functions are timed from outside (`benchmarks.probe`). Every number of a report
comes from one call of this command, the ratios too. The clients compute on the CPU.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks import naive
from benchmarks.bounds import Sizes, Work, counted
from benchmarks.measuring import Rates, machine_rates
from benchmarks.speed_report import FLOWER, LOCAL, SINGLE, Measured, report
from benchmarks.timed_runs import WARM_UP, TimedRun, run_config, timed_flower, timed_local
from fedhur_app.config import ConfigError, Settings, load_settings
from fedhur_app.data.experiment import number_of_clients, prepare_data
from fedhur_app.data.shards import load_shard, shard_path
from fedhur_app.files import write_text
from fedhur_app.parallel import cores

RUNTIMES = ("local", "flower")
_QUICK = [
    "dataset.synthetic.users=60",
    "dataset.synthetic.items=80",
    "dataset.synthetic.interactions_per_user=12",
    "relation.query_width=3",
    "score.steps=3",
    "align.steps=10",
]


@dataclass(frozen=True)
class Request:
    """What is measured.

    Attributes:
        dataset: A file in conf/dataset/.
        strategy: A file in conf/strategy/.
        seed: Of all runs.
        overrides: Text of the run-config key.
        runtimes: Some of :data:`RUNTIMES`.
    """

    dataset: str
    strategy: str
    seed: int
    overrides: str
    runtimes: tuple[str, ...]

    def settings(self, more: str = "") -> Settings:
        """The settings, with more overrides."""
        return load_settings(self.dataset, self.strategy, self.seed, f"{self.overrides} {more}")


def measure(request: Request, rates: Rates) -> Measured:
    """Make all runs and comparisons.

    Args:
        request: What to measure.
        rates: Of this machine.
    """
    settings, one_thread = request.settings(), "server.threads=1"
    runs: dict[str, TimedRun] = {}
    with tempfile.TemporaryDirectory() as temporary:

        def prepared(name: str, more: str = "") -> tuple[dict[str, str | int], Settings, Path]:
            folder = Path(temporary) / name
            config = run_config(request.dataset, settings, f"{request.overrides} {more}", folder)
            return config, settings, folder

        # Counts, rates and naive forms are those of one thread: this run is always made.
        runs[SINGLE] = timed_local(*prepared("single", one_thread))
        if "local" in request.runtimes and cores(settings.server.threads) > 1:
            runs[LOCAL] = timed_local(*prepared("local"))
        if "flower" in request.runtimes:
            runs[FLOWER] = timed_flower(*prepared("flower"), number_of_clients(settings))
    single = request.settings(one_thread)
    uploads = list(runs[SINGLE].uploads.values())
    comparisons = naive.compare(single, uploads) if naive.covered(single) else []
    client, server, n_items = _counts(single, runs[SINGLE])
    return Measured(settings, runs, comparisons, client, server, rates, n_items)


def _counts(settings: Settings, run: TimedRun) -> tuple[dict[str, Work], dict[str, Work], int]:
    """What an average client and the server have to do, and the number of items."""
    data = prepare_data(settings)
    if data is None:
        raise ValueError("own-data lie on devices: choose a data set that this machine has")
    # As many groups at each level as there were in the last round, in equal blocks.
    groups = [1, *run.history[-1].get("groups", [])]
    levels = [(above, -(-below // above)) for above, below in pairwise(groups)]
    sums: dict[str, Work] = {}
    server: dict[str, Work] = {}
    for number in range(data.clients):
        shard = load_shard(shard_path(data.folder, number))
        users, ranked = shard.train.counts.tolist(), int((shard.valid.counts > 0).sum())
        sizes = Sizes(data.n_items, data.clients, settings.model.dim, settings.rank, users, ranked, levels)
        own, server = counted(sizes, settings)
        sums = {step: sums.get(step, Work()) + work for step, work in own.items()}
    return {step: work.of_each(data.clients) for step, work in sums.items()}, server, data.n_items


def request_of(arguments: argparse.Namespace) -> Request:
    """What the command line asks for; `--quick` changes what is left to its default."""
    quick = arguments.quick
    dataset = arguments.dataset or ("synthetic" if quick else "ml-100k")
    strategy = arguments.strategy or ("fedhur" if quick else "tuned/ml-100k/fedhur")
    clients = arguments.clients or (6 if quick else 100)
    dim = arguments.dim or (8 if quick else 128)
    rounds = arguments.rounds or (2 if quick else 4)
    if rounds <= WARM_UP:
        raise SystemExit(
            f"--rounds {rounds}: {WARM_UP} is left out as warm-up, so there must be at least {WARM_UP + 1}"
        )
    changes = _QUICK if quick else []
    fixed = [f"dataset.clients.number={clients}", f"model.dim={dim}", f"rounds={rounds}", f"min_rounds={rounds}"]
    overrides = shlex.join([*changes, *fixed, "device=cpu", *arguments.set])
    runtimes = tuple((arguments.runtimes or ("local" if quick else ",".join(RUNTIMES))).split(","))
    if unknown := set(runtimes) - set(RUNTIMES):
        raise SystemExit(f"--runtimes has {', '.join(sorted(unknown))}: choose among {', '.join(RUNTIMES)}")
    return Request(dataset, strategy, arguments.seed, overrides, runtimes)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the report, write it."""
    words = sys.argv[1:] if words is None else list(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", help="a data set (default: ml-100k)")
    parser.add_argument("--strategy", help="a file in conf/strategy/ (default: tuned/ml-100k/fedhur)")
    parser.add_argument("--clients", type=int, help="number of clients (default: 100)")
    parser.add_argument("--dim", type=int, help="width of the tables (default: 128)")
    parser.add_argument("--rounds", type=int, help="rounds, the first is left out (default: 4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of conf/; repeatable"
    )
    parser.add_argument("--runtimes", help="local, flower or both (default: local,flower; with --quick local)")
    parser.add_argument("--output", type=Path, help="file for the report")
    parser.add_argument("--quick", action="store_true", help="small synthetic data, to see that it works")
    arguments = parser.parse_args(words)
    if arguments.output and arguments.output.exists() and not arguments.output.is_file():
        raise SystemExit(f"--output {arguments.output} is no file: name the file for the report")
    request = request_of(arguments)
    try:
        request.settings()
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    rates = machine_rates(128, 4, 2) if arguments.quick else machine_rates()
    text = report(measure(request, rates), shlex.join(["python", "-m", "benchmarks.speed", *words]))
    print(text)
    if arguments.output:
        write_text(arguments.output, text)


if __name__ == "__main__":
    main()
