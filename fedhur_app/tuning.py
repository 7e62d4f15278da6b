"""Hyper-parameter search (`fedhur tune`): Optuna proposes settings, runs of the local runtime are judged by validation.

Trials are drawn and finished in batches. The draws of a batch depend on the seed, the number of its first trial and
the trials before it, and on nothing else: they are made in a copy of the study in memory. The journal on disk gets
finished trials only, in order, once their batch has ended. So an interrupted study draws its last batch again, finds
what had ended already (`trial.json`), runs the rest, and is the same study as one that was never interrupted.

Test metrics lie in the trials' own `result.json`; nothing here reads them.
"""

import contextlib
import csv
import fcntl
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from fedhur_app.compute import resolve_device
from fedhur_app.config import ConfigError, Settings, conf_folder, load_settings, nearest, parse_overrides, parse_yaml
from fedhur_app.data.experiment import OWN_DATA, prepare_data
from fedhur_app.files import write_json, write_text
from fedhur_app.flower_runner import _signals_raise
from fedhur_app.seeding import numpy_generator

# Of every trial: many run side by side, and none is ever resumed.
TRIAL_OVERRIDES = {"server.threads": 1, "server.checkpoint_every": 0}
POLL_SECONDS = 0.1
STOP_SECONDS = 5.0  # between asking trials to end and forcing them
SHOWN_TRIALS = 10  # rows of summary.md
FEWEST_STARTUP_TRIALS = 5

# Trials with other values of these would not be judged by the same measure.
_MEASURE = ("dataset", "evaluation")
_SAVED_MARK = " tuned on "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


class StudyError(ConfigError):
    """A study that cannot be made or does not fit the command; the text says what to do."""


# --- the space ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choices:
    """A setting that takes one of some values (any YAML values)."""

    values: tuple[Any, ...]

    def contains(self, value: Any) -> bool:
        """Whether `value` is one of the choices; 1 and true are different values."""
        return _text(value) in map(_text, self.values)

    def plain(self) -> list[Any]:
        """As in the YAML file."""
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """A setting that takes a number between two bounds.

    Attributes:
        low: Smallest value.
        high: Largest value.
        log: Whether the logarithm is drawn evenly.
        step: Distance of neighbouring values from `low` on; None: any number, or any whole number.
    """

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are drawn."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    def contains(self, value: Any) -> bool:
        """Whether `value` can be drawn."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        step = self.step or (1 if self.whole else None)
        return step is None or _is_multiple(value - self.low, step)

    def plain(self) -> dict[str, Any]:
        """As in the YAML file, without what has its default."""
        content: dict[str, Any] = {"low": self.low, "high": self.high}
        return content | ({"log": True} if self.log else {}) | ({} if self.step is None else {"step": self.step})


Space = dict[str, Choices | Range]


def load_space(strategy: str, dataset: str = "ml-100k", changes: Sequence[str] = ()) -> Space:
    """The settings that are tried for a strategy, from conf/search/<strategy>.yaml.

    Every choice and both ends of every range are tried out: beside the strategy's other values they must give valid
    settings. Combinations of several values can be checked only when they are drawn.

    Args:
        strategy: Name of a file in conf/strategy/ and in conf/search/.
        dataset: Name of a file in conf/dataset/.
        changes: Items `key=value` that hold for all trials. Settings among them are fixed: they leave the space.

    Returns:
        By dotted setting, in alphabetical order; values have the type that the setting has.

    Raises:
        ConfigError: There is no such file, or an entry has a wrong form, an unknown setting or an impossible value;
            the text names it.
    """
    load_settings(dataset, strategy, overrides=shlex.join(changes))
    folder = conf_folder() / "search"
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    path = folder / f"{strategy}.yaml"
    if strategy not in names:
        raise ConfigError(
            f"strategy {strategy!r} has no search space: {path} does not exist{nearest(strategy, names) or '.'} "
            f"Strategies that have one: {', '.join(names)}"
        )
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path} must hold a mapping from settings to what is tried for them")

    def compose(key: str, value: Any) -> Any:
        """The value as the setting takes it."""
        try:
            settings = load_settings(dataset, strategy, overrides=shlex.join([*changes, *_items({key: value})]))
        except ConfigError as error:
            raise ConfigError(f"{path}, {key}={_text(value)}: {error}") from error
        return _setting(settings, key)

    fixed = _leaves(parse_overrides(shlex.join(changes)))
    space: Space = {}
    for key in sorted(map(str, content)):
        if key.split(".")[0] in _MEASURE:
            raise ConfigError(f"{path}: {key} cannot be searched, its values are not judged by the same measure")
        if key in TRIAL_OVERRIDES:
            raise ConfigError(f"{path}: {key} cannot be searched, it is {TRIAL_OVERRIDES[key]} in every trial")
        entry = _entry(f"{path}: {key}", content.get(key))
        if key not in fixed:
            space[key] = _typed(f"{path}: {key}", entry, partial(compose, key))
    if not space:
        raise ConfigError(f"nothing is left to search: --set fixes every setting of {path}")
    return space


def _entry(where: str, entry: Any) -> Choices | Range:
    """One entry of the file, its form checked."""
    if isinstance(entry, list) and entry:
        return Choices(tuple(entry))
    form = "a list of choices, or a range such as {low: 0.01, high: 1.0, log: true} or {low: 1, high: 9, step: 2}"
    if not isinstance(entry, dict) or not {"low", "high"} <= entry.keys() <= {"low", "high", "log", "step"}:
        raise ConfigError(f"{where} must have {form}, not {entry!r}")
    low, high, log, step = entry["low"], entry["high"], entry.get("log", False), entry.get("step")
    for name, number in (("low", low), ("high", high), ("step", 1 if step is None else step)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ConfigError(f"{where}: {name} is {number!r}, it must be a number")
    if not isinstance(log, bool):
        raise ConfigError(f"{where}: log is {log!r}, it must be true or false")
    if low > high:
        raise ConfigError(f"{where}: low ({low}) is above high ({high})")
    if log and low <= 0:
        raise ConfigError(f"{where}: a logarithmic range needs low above 0, not {low}")
    if step is not None and (log or step <= 0 or not _is_multiple(high - low, step)):
        raise ConfigError(f"{where}: step must be above 0, lead from low to high in whole steps, and goes without log")
    return Range(low, high, log, step)


def _typed(where: str, entry: Choices | Range, compose: Callable[[Any], Any]) -> Choices | Range:
    """An entry with values as the setting takes them, each of them tried out by `compose`."""
    if isinstance(entry, Choices):
        values = tuple(map(compose, entry.values))
        if any(isinstance(value, dict) for value in values):
            raise ConfigError(f"{where} is a section: name the settings in it one by one")
        if len(set(map(_text, values))) < len(values):
            raise ConfigError(f"{where} has a choice twice")
        return Choices(values)
    ends = compose(entry.low), compose(entry.high)
    if entry.whole and entry.step is None and isinstance(ends[0], float):
        raise ConfigError(
            f"{where} is a real number, and a range with whole ends tries whole numbers only: write {ends[0]} and "
            f"{ends[1]}, or add step: 1"
        )
    return entry


def suggest(trial: optuna.trial.BaseTrial, space: Space) -> dict[str, Any]:
    """Let a trial choose a value for every setting of a space.

    Args:
        trial: An Optuna trial. Choices reach it as JSON texts, since Optuna stores lists and nulls badly.
        space: From :func:`load_space`.

    Returns:
        Value by dotted setting.
    """
    values: dict[str, Any] = {}
    for key, entry in space.items():
        if isinstance(entry, Choices):
            values[key] = json.loads(trial.suggest_categorical(key, list(map(_text, entry.values))))
        elif entry.whole:
            values[key] = trial.suggest_int(
                key, int(entry.low), int(entry.high), step=int(entry.step or 1), log=entry.log
            )
        else:
            values[key] = trial.suggest_float(key, entry.low, entry.high, step=entry.step, log=entry.log)
    return values


def _encode(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as Optuna's parameters."""
    encoded: dict[str, Any] = {}
    for key, entry in space.items():
        value = values[key]
        encoded[key] = _text(value) if isinstance(entry, Choices) else int(value) if entry.whole else float(value)
    return encoded


def _decode(space: Space, params: Mapping[str, Any]) -> dict[str, Any]:
    """Values from Optuna's parameters."""
    return {key: json.loads(params[key]) if isinstance(space[key], Choices) else params[key] for key in space}


# --- a study ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """What decides a study.

    Attributes:
        dataset: Name of a file in conf/dataset/.
        strategy: Name of a file in conf/strategy/ that has a file in conf/search/.
        seed: Seed of the draws, and of every run.
        sampler: `tpe`, or `random` for draws that learn nothing.
        changes: Items `key=value` that hold for all trials.
        jobs: Trials side by side, a batch. None: as the study has it, one a core in a new study.
    """

    dataset: str
    strategy: str
    seed: int = 1
    sampler: Literal["tpe", "random"] = "tpe"
    changes: tuple[str, ...] = ()
    jobs: int | None = None

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Settings of a run with these values (without what only trials have).

        Raises:
            ConfigError: They are impossible.
        """
        return load_settings(self.dataset, self.strategy, self.seed, shlex.join([*self.changes, *_items(values)]))


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        number: From 0.
        values: Value by dotted setting of the space.
        state: COMPLETE or FAIL.
        value: Validation NDCG of the best round; None for a failed trial.
        best_round: That round; None for a failed trial.
        seconds: Wall time of the run.
        reason: Why it failed, else empty.
    """

    number: int
    values: dict[str, Any]
    state: Literal["COMPLETE", "FAIL"]
    value: float | None
    best_round: int | None
    seconds: float
    reason: str


@dataclass(frozen=True)
class Study:
    """The trials of a study, and what they were made for.

    Attributes:
        search: What decides the study.
        space: What was tried.
        metric: Name of the validation metric that judges.
        outside: Settings whose value in the strategy lies outside the space; if there are none, trial 0 has the
            strategy's own values.
        trials: The finished trials, by number.
    """

    search: Search
    space: Space
    metric: str
    outside: list[str]
    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        """The trial of the highest value, the first of several; None if all failed."""
        complete = [trial for trial in self.trials if trial.value is not None]
        return max(complete, key=lambda trial: (trial.value, -trial.number), default=None)


def tune(search: Search, trials: int, folder: Path, say: Callable[[str], None]) -> Study:
    """Make a study of `trials` finished trials in `folder`, or go on with the one that is there.

    After every batch `folder` holds trials.csv, summary.md and, once a trial succeeded, best.yaml. A trial that fails
    is recorded with its reason and does not end the search. However this function is left, no trial runs on.

    Args:
        search: What decides the study.
        trials: Number of trials, those that are there already included.
        folder: Absolute output folder.
        say: Takes each line for people.

    Returns:
        The study, which may have more trials than were asked for.

    Raises:
        ConfigError: Impossible settings or space; a study in `folder` that another command made.
        DataError: The data cannot be had.
    """
    for key in _leaves(parse_overrides(shlex.join(search.changes))):
        if key in TRIAL_OVERRIDES:
            raise StudyError(
                f"--set {key} has no effect here: it is {TRIAL_OVERRIDES[key]} in every trial; leave it out"
            )
    own = search.settings({})
    space = load_space(search.strategy, search.dataset, search.changes)
    if own.dataset.name == OWN_DATA:
        raise StudyError(f"{OWN_DATA} lies on the devices: settings can only be tuned on data that are here")
    resolve_device(own.device)
    folder.mkdir(parents=True, exist_ok=True)
    with _signals_raise(), _lock(folder) as lock:
        jobs, startup_trials = _open(folder, search, space, own, trials)
        prepare_data(own)  # once, and not by all trials of the first batch at the same time
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = _journal(folder)
        default = {key: _setting(own, key) for key in space}
        outside = [key for key in space if not space[key].contains(default[key])]
        study = Study(replace(search, jobs=jobs), space, f"ndcg@{own.evaluation.k}", outside, [])

        def stored() -> Study:
            return replace(study, trials=[_from_stored(trial, space) for trial in journal.trials])

        if journal.trials:
            say(f"going on after {len(journal.trials)} finished trials")
        elif outside:
            say(f"the strategy's own values are not tried: {_outside_text(outside, own)}")
        while (done := len(journal.trials)) < trials:
            start = done - done % jobs
            sampler = _sampler(search, startup_trials, start)
            batch = draw(space, journal.trials[:start], sampler, jobs, None if outside else default)
            wanted = {trial.number: _decode(space, trial.params) for trial in batch[done - start : trials - start]}
            ended = _run_batch(stored(), folder, wanted, trials, lock, say)
            for trial in batch:
                if trial.number in ended:
                    journal.add_trial(_to_stored(ended[trial.number], trial))
            write_outputs(stored(), folder)
        write_outputs(stored(), folder)
        return stored()


def draw(
    space: Space,
    history: list[FrozenTrial],
    sampler: optuna.samplers.BaseSampler,
    size: int,
    first: Mapping[str, Any] | None,
) -> list[optuna.Trial]:
    """The trials of one batch. Nothing is written: the same arguments give the same trials.

    Args:
        space: What is tried.
        history: All trials before the batch.
        sampler: Fresh, with the seed of this batch.
        size: Number of trials.
        first: Values of the very first trial of a study; None to draw it too.
    """
    scratch = optuna.create_study(direction="maximize", sampler=sampler)
    scratch.add_trials(history)
    if first is not None and not history:
        scratch.enqueue_trial(_encode(space, first))
    batch = []
    for _ in range(size):
        trial = scratch.ask()
        suggest(trial, space)
        batch.append(trial)
    return batch


def _sampler(search: Search, startup_trials: int, start: int) -> optuna.samplers.BaseSampler:
    """The sampler of the batch that begins with trial `start`."""
    seed = int(numpy_generator(search.seed, "tuning", start).integers(2**31))
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        # Optuna 4 calls this option experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup_trials, constant_liar=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[int]:
    """Keep other processes out of a study's folder; gives the descriptor that holds the lock.

    Trials inherit it, so that trials which outlive a killed search keep a second one out until they have ended.
    """
    with (folder / "study.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StudyError(
                f"another `fedhur tune`, or a trial that one left behind, is at work in {folder}: wait for its end, or "
                "choose another --output"
            ) from error
        yield file.fileno()


def _open(folder: Path, search: Search, space: Space, own: Settings, trials: int) -> tuple[int, int]:
    """Write study.yaml, or compare with the one that is there.

    Returns:
        Trials side by side, and trials that are drawn at random before TPE sets in: as the study began.

    Raises:
        StudyError: The study there is another one; the text names the difference.
    """
    path = folder / "study.yaml"
    content: dict[str, Any] = {
        "dataset": search.dataset,
        "strategy": search.strategy,
        "seed": search.seed,
        "sampler": search.sampler,
        "jobs": search.jobs or os.cpu_count() or 1,
        "startup_trials": max(FEWEST_STARTUP_TRIALS, trials // 3),
        "set": list(search.changes),
        "space": {key: entry.plain() for key, entry in space.items()},
        "settings": json.loads(own.to_json()),
    }
    if not path.is_file():
        write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
        return content["jobs"], content["startup_trials"]
    there = parse_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(there, dict) or there.keys() != content.keys():
        raise StudyError(f"{path} is damaged or of another version of fedhur: choose another --output")
    if search.jobs is None:
        content["jobs"] = there["jobs"]
    for name in ("dataset", "strategy", "seed", "sampler", "jobs"):
        if content[name] != there[name]:
            raise _other_study(folder, f"{name} {there[name]}, not {content[name]}")
    if parse_overrides(shlex.join(there["set"])) != parse_overrides(shlex.join(search.changes)):
        sets = [" ".join(f"--set {shlex.quote(item)}" for item in items) for items in (there["set"], search.changes)]
        raise _other_study(folder, f"{sets[0] or 'no --set'}, not {sets[1] or 'none'}")
    for key in sorted(there["space"].keys() | space.keys()):
        before, now = (one["space"].get(key, "nothing") for one in (there, content))
        if before != now:
            raise _other_study(folder, f"another search space: {key} had {_text(before)}, now has {_text(now)}")
    # Settings that one of the two versions of conf/ does not know cannot be compared.
    old, new = _leaves(there["settings"]), _leaves(content["settings"])
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key]:
            raise _other_study(folder, f"{key}={_text(old[key])}, which conf/ now has as {_text(new[key])}")
    return there["jobs"], there["startup_trials"]


def _other_study(folder: Path, difference: str) -> StudyError:
    return StudyError(f"{folder} holds a study with {difference}: give the same again, or choose another --output")


def _journal(folder: Path) -> optuna.Study:
    """Optuna's study on disk: finished trials, in order."""
    path = folder / "study.log"
    if path.is_file():
        # Of a line that was cut off by a loss of power Optuna would make one damaged line with the next.
        whole = path.read_bytes().rpartition(b"\n")
        if whole[2]:
            os.truncate(path, len(whole[0]) + len(whole[1]))
    storage = JournalStorage(JournalFileBackend(str(path)))
    return optuna.create_study(storage=storage, study_name="fedhur", direction="maximize", load_if_exists=True)


def _to_stored(trial: Trial, drawn: optuna.Trial) -> FrozenTrial:
    return optuna.trial.create_trial(
        state=TrialState[trial.state],
        value=trial.value,
        params=drawn.params,
        distributions=drawn.distributions,
        user_attrs={"best_round": trial.best_round, "seconds": trial.seconds, "reason": trial.reason},
    )


def _from_stored(stored: FrozenTrial, space: Space) -> Trial:
    state: Literal["COMPLETE", "FAIL"] = "COMPLETE" if stored.state == TrialState.COMPLETE else "FAIL"
    return Trial(stored.number, _decode(space, stored.params), state, stored.value, **stored.user_attrs)


# --- trials -------------------------------------------------------------------------------------------------------


def trial_command(search: Search, values: Mapping[str, Any], folder: Path) -> list[str]:
    """The command that runs one trial into `folder`."""
    command = [
        *(sys.executable, "-P", "-m", "fedhur_app.cli", "run", "--runtime", "local"),
        *("--dataset", search.dataset, "--strategy", search.strategy),
        *("--seed", str(search.seed), "--output", str(folder)),
    ]
    for item in [*search.changes, *_items(values), *_items(TRIAL_OVERRIDES)]:
        command += ["--set", item]
    return command


def trial_folder(folder: Path, number: int) -> Path:
    """Output folder of a trial's run."""
    return folder / "trials" / f"{number:05d}"


def _run_batch(
    study: Study,
    folder: Path,
    wanted: dict[int, dict[str, Any]],
    total: int,
    lock: int,
    say: Callable[[str], None],
) -> dict[int, Trial]:
    """Run the trials of a batch side by side, but for those that had ended before an interruption.

    Args:
        study: The trials before the batch.
        folder: Of the study.
        wanted: Values by number of the trial.
        total: Trials of the whole search, for the lines that are said.
        lock: Descriptor that trials inherit.
        say: Takes a line as each trial ends.

    Returns:
        The finished trials by number.
    """
    ended: dict[int, Trial] = {}
    running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}

    def finish(trial: Trial) -> None:
        write_json(trial_folder(folder, trial.number) / "trial.json", asdict(trial))
        ended[trial.number] = trial
        so_far = replace(study, trials=[*study.trials, *ended.values()])
        say(_line(so_far, trial, total))

    try:
        for number, values in wanted.items():
            output = trial_folder(folder, number)
            before = _read_json(output / "trial.json")
            if before.get("values") == values:
                ended[number] = Trial(**before)
                continue
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir(parents=True)
            try:
                study.search.settings(values)
            except ConfigError as error:  # values that are possible one by one, but not together
                finish(Trial(number, values, "FAIL", None, None, 0.0, str(error)))
                continue
            with (output / "stderr.log").open("wb") as stderr:
                process = subprocess.Popen(
                    trial_command(study.search, values, output),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=_environment(),
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C is for this process, which then stops the trials
                )
            running[number] = process, time.perf_counter()
        while running:
            time.sleep(POLL_SECONDS)
            for number, (process, started) in list(running.items()):
                if process.poll() is not None:
                    del running[number]
                    seconds = time.perf_counter() - started
                    output = trial_folder(folder, number)
                    finish(_outcome(number, wanted[number], output, study.metric, process.returncode, seconds))
    finally:
        _stop([process for process, _ in running.values()])
    return ended


def _environment() -> dict[str, str]:
    """For trials: the code of this process, whatever the working directory holds."""
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _outcome(number: int, values: dict[str, Any], output: Path, metric: str, status: int, seconds: float) -> Trial:
    """What a run that has ended says about its validation."""
    result = _read_json(output / "result.json")
    if result.get("status") == "completed":
        value = result["validation"].get(metric)
        if value is not None:
            return Trial(number, values, "COMPLETE", value, result["best_round"], seconds, "")
        reason = "no user has validation items"
    elif status < 0:
        reason = f"the run was ended by {signal.Signals(-status).name}"
    else:
        lines = (output / "stderr.log").read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        reason = result.get("reason") or last or f"the run ended with status {status} and without a result"
    return Trial(number, values, "FAIL", None, None, seconds, reason)


def _line(study: Study, trial: Trial, total: int) -> str:
    """What is said when `trial`, the last one of `study`, has ended."""
    best = study.best
    if trial.value is None or best is None:
        outcome = f"failed ({textwrap.shorten(trial.reason, 160)})"
    else:
        outcome = f"validation {study.metric} {trial.value:.4f} (best {best.value:.4f})"
    place = f"[{len(study.trials)}/{total}]"
    return f"{place} trial {trial.number}: {outcome} {trial.seconds:.0f} s  {values_text(trial.values)}"


# --- what a study leaves ------------------------------------------------------------------------------------------


def write_outputs(study: Study, folder: Path) -> None:
    """Write trials.csv, summary.md and, if a trial succeeded, best.yaml into the study's folder."""
    write_text(folder / "trials.csv", _csv(study))
    write_text(folder / "summary.md", _summary(study))
    if study.best:
        write_text(folder / "best.yaml", best_yaml(study))


def best_yaml(study: Study) -> str:
    """The best trial as a strategy: its own YAML with the items of --set and the best values.

    With it as conf/strategy/<name>.yaml a run has the settings of the best trial, but for those of all trials
    (:data:`TRIAL_OVERRIDES`).

    Raises:
        StudyError: No trial succeeded.
    """
    search, best = study.search, study.best
    if best is None:
        raise StudyError("no trial succeeded: there are no best values")
    own = parse_yaml((conf_folder() / "strategy" / f"{search.strategy}.yaml").read_text(encoding="utf-8"))
    given = _leaves(own or {}) | _leaves(parse_overrides(shlex.join(search.changes)))
    settings = search.settings(best.values)
    content: dict[str, Any] = {}
    for key in dict.fromkeys(["algorithm", *given, *study.space]):
        *path, leaf = key.split(".")
        node = content
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = _setting(settings, key)
    head = f"# {_title(study)}, validation {study.metric} {best.value:.4f}\n"
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def saved_path(name: str) -> Path:
    """Where the best values go as a strategy of their own.

    Args:
        name: Such as `tuned/ml-100k/fedavg`.

    Raises:
        StudyError: No name of a strategy, or that of one which was not written by a search.
    """
    if not _NAME.fullmatch(name):
        raise StudyError(f"--save {name!r} is no name of a strategy: give one such as tuned/ml-100k/fedavg")
    path = conf_folder() / "strategy" / f"{name}.yaml"
    if path.is_file() and _SAVED_MARK not in path.read_text(encoding="utf-8").partition("\n")[0]:
        raise StudyError(f"--save {name!r} would overwrite {path}, which no search has written: choose another name")
    return path


def _title(study: Study) -> str:
    search = study.search
    count = f"{len(study.trials)} trial{'s' if len(study.trials) != 1 else ''}"
    return f"{search.strategy}{_SAVED_MARK}{search.dataset}: {count} ({search.sampler}, seed {search.seed})"


def _csv(study: Study) -> str:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["number", "state", "value", "best_round", "seconds", *study.space, "reason"])
    for trial in study.trials:
        values = [_shown(trial.values[key]) for key in study.space]
        seconds = f"{trial.seconds:.1f}"
        writer.writerow([trial.number, trial.state, trial.value, trial.best_round, seconds, *values, trial.reason])
    return table.getvalue()


def _summary(study: Study) -> str:
    failed = [trial for trial in study.trials if trial.value is None]
    lines = [f"# {_title(study)}", "", f"Judged by the validation {study.metric} of each trial's best round.", ""]
    lines += [f"- {own_values_text(study)}"]
    if study.best:
        lines += [f"- {best_text(study)}. The highest of several values is an optimistic estimate."]
    if failed:
        lines += [f"- {len(failed)} failed; trials.csv says why."]
    if study.best:
        names = ["trial", f"validation {study.metric}", "best round", "seconds", *study.space]
        lines += ["", f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
        complete = [trial for trial in study.trials if trial.value is not None]
        for trial in sorted(complete, key=lambda trial: (-(trial.value or 0.0), trial.number))[:SHOWN_TRIALS]:
            cells = [trial.number, f"{trial.value:.4f}", trial.best_round, f"{trial.seconds:.0f}"]
            cells += [_brief(trial.values[key]) for key in study.space]
            lines += [f"| {' | '.join(map(str, cells))} |"]
    return "\n".join(lines) + "\n"


def best_text(study: Study) -> str:
    """The best trial in a sentence without its full stop; empty if there is none."""
    best = study.best
    if best is None:
        return ""
    return f"Best: trial {best.number}, {best.value:.4f}, {values_text(best.values)}"


def own_values_text(study: Study) -> str:
    """What came of the strategy's own values, in a sentence."""
    if study.outside:
        return f"The strategy's own values were not tried: {_outside_text(study.outside, study.search.settings({}))}."
    own = study.trials[0]
    outcome = "failed" if own.value is None else f"{own.value:.4f}"
    return f"The strategy's own values (trial 0): {outcome}, {values_text(own.values)}."


def _outside_text(outside: list[str], own: Settings) -> str:
    values = values_text({key: _setting(own, key) for key in outside})
    return f"{values} lie{'s' if len(outside) == 1 else ''} outside the search space"


def values_text(values: Mapping[str, Any]) -> str:
    """Values for people, such as `train.epochs=2 train.lr=0.05`."""
    return " ".join(f"{key}={_brief(value)}" for key, value in values.items())


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _shown(value)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    """JSON, which is also YAML. What JSON does not know is no value of any setting, and becomes a text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _items(values: Mapping[str, Any]) -> list[str]:
    """Values as items of --set."""
    return [f"{key}={_text(value)}" for key, value in values.items()]


def _setting(settings: Settings, key: str) -> Any:
    value: Any = settings.model_dump()
    for part in key.split("."):
        value = value[part]
    return value


def _leaves(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted setting."""
    leaves: dict[str, Any] = {}
    for key, value in nested.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def _is_multiple(distance: float, step: float) -> bool:
    return abs(distance / step - round(distance / step)) < 1e-9


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}
