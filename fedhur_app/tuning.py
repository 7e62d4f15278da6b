"""Hyper-parameter search (`fedhur tune`): Optuna proposes settings, runs of the local runtime are judged by validation.

Trials are drawn and finished in batches. The draws of a batch depend on the seed, the number of its first trial and
the trials before it, and on nothing else: they are made in a copy of the study in memory. The journal on disk gets
finished trials only, in order, once their batch has ended. So an interrupted study draws its last batch again, finds
what had ended already (`trial.json`), runs the rest, and is the same study as one that was never interrupted.

Test metrics lie in the trials' own `result.json`; nothing here reads them.
"""

import json
import os
import re
import shlex
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from fedhur_app.compute import resolve_device
from fedhur_app.config import ConfigError, Settings, conf_folder, flatten, load_settings, parse_overrides, parse_yaml
from fedhur_app.data.experiment import OWN_DATA, prepare_data
from fedhur_app.files import read_json, write_json, write_text
from fedhur_app.reporting.tables import Table, to_csv, to_markdown
from fedhur_app.search_space import Space, decode, encode, load_space, suggest
from fedhur_app.seeding import numpy_generator
from fedhur_app.sweep import (
    OF_EVERY_RUN,
    Ended,
    Say,
    SweepError,
    as_json,
    collected_signals,
    locked,
    run_all,
    run_command,
    set_items,
    shown,
)

SHOWN_TRIALS = 10  # rows of summary.md
FEWEST_STARTUP_TRIALS = 5

_SAVED_MARK = " tuned on "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


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
        return load_settings(self.dataset, self.strategy, self.seed, shlex.join([*self.changes, *set_items(values)]))


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


def tune(search: Search, trials: int, folder: Path, say: Say) -> Study:
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
        KeyboardInterrupt: A signal stopped the search: Ctrl-C, SIGTERM or SIGHUP.
    """
    for key in flatten(parse_overrides(shlex.join(search.changes))):
        if key in OF_EVERY_RUN:
            raise SweepError(f"--set {key} has no effect here: it is {OF_EVERY_RUN[key]} in every trial; leave it out")
    own = search.settings({})
    space = load_space(search.strategy, search.dataset, search.changes)
    if own.dataset.name == OWN_DATA:
        raise SweepError(f"{OWN_DATA} lies on the devices: settings can only be tuned on data that are here")
    resolve_device(own.device)
    with locked(folder, "tune") as lock:
        jobs, startup_trials = _open(folder, search, space, own, trials)
        prepare_data(own)  # once, and not by all trials of the first batch at the same time
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = _journal(folder)
        values = flatten(own.model_dump())
        default = {key: values[key] for key in space}
        outside = [key for key in space if not space[key].contains(default[key])]
        study = Study(replace(search, jobs=jobs), space, f"ndcg@{own.evaluation.k}", outside, [])

        def stored() -> Study:
            return replace(study, trials=[_from_stored(trial, space) for trial in journal.trials])

        if journal.trials:
            say(f"going on after {len(journal.trials)} finished trials")
        elif outside:
            say(f"the strategy's own values are not tried: {_outside_text(outside, own)}")
        with collected_signals() as signals:
            while (done := len(journal.trials)) < trials:
                start = done - done % jobs
                sampler = _sampler(search, startup_trials, start)
                batch = draw(space, journal.trials[:start], sampler, jobs, None if outside else default)
                wanted = {trial.number: decode(space, trial.params) for trial in batch[done - start : trials - start]}
                ended = _run_batch(stored(), folder, wanted, trials, lock, signals, say)
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
        scratch.enqueue_trial(encode(space, first))
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


def _open(folder: Path, search: Search, space: Space, own: Settings, trials: int) -> tuple[int, int]:
    """Write study.yaml, or compare with the one that is there.

    Returns:
        Trials side by side, and trials that are drawn at random before TPE sets in: as the study began.

    Raises:
        SweepError: The study there is another one; the text names the difference.
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
        raise SweepError(f"{path} is damaged or of another version of fedhur: choose another --output")
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
            raise _other_study(folder, f"another search space: {key} had {as_json(before)}, now has {as_json(now)}")
    # Settings that one of the two versions of conf/ does not know cannot be compared.
    old, new = flatten(there["settings"]), flatten(content["settings"])
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key]:
            raise _other_study(folder, f"{key}={as_json(old[key])}, which conf/ now has as {as_json(new[key])}")
    return there["jobs"], there["startup_trials"]


def _other_study(folder: Path, difference: str) -> SweepError:
    return SweepError(f"{folder} holds a study with {difference}: give the same again, or choose another --output")


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
    return Trial(stored.number, decode(space, stored.params), state, stored.value, **stored.user_attrs)


# --- trials -------------------------------------------------------------------------------------------------------


def trial_command(search: Search, values: Mapping[str, Any], folder: Path) -> list[str]:
    """The command that runs one trial into `folder`."""
    changes = [*search.changes, *set_items(values), *set_items(OF_EVERY_RUN)]
    return run_command(search.dataset, search.strategy, search.seed, folder, changes)


def _run_batch(
    study: Study,
    folder: Path,
    wanted: dict[int, dict[str, Any]],
    total: int,
    lock: int,
    signals: list[int],
    say: Say,
) -> dict[int, Trial]:
    """Run the trials of a batch side by side, but for those that had ended before an interruption.

    Args:
        study: The trials before the batch.
        folder: Of the study.
        wanted: Values by number of the trial.
        total: Trials of the whole search, for the lines that are said.
        lock: Descriptor that trials inherit.
        signals: Those that came; one of them stops the trials.
        say: Takes a line as each trial ends.

    Returns:
        The finished trials by number.

    Raises:
        KeyboardInterrupt: A signal stopped trials.
    """
    finished: dict[int, Trial] = {}
    waiting: dict[Path, int] = {}

    def finish(trial: Trial, output: Path) -> None:
        write_json(output / "trial.json", asdict(trial))
        finished[trial.number] = trial
        so_far = replace(study, trials=[*study.trials, *finished.values()])
        say(_line(so_far, trial, total))

    def command(output: Path) -> list[str]:
        return trial_command(study.search, wanted[waiting[output]], output)

    def ended(run: Ended) -> None:
        number = waiting[run.folder]
        finish(_outcome(number, wanted[number], study.metric, run), run.folder)

    for number, values in wanted.items():
        output = folder / "trials" / f"{number:05d}"
        before = read_json(output / "trial.json")
        if before.get("values") == values:
            finished[number] = Trial(**before)
            continue
        try:
            study.search.settings(values)
        except ConfigError as error:  # values that are possible one by one, but not together
            finish(Trial(number, values, "FAIL", None, None, 0.0, str(error)), output)
        else:
            waiting[output] = number
    if run_all(waiting, command, len(waiting), ended, lock, signals, say):
        raise KeyboardInterrupt
    return finished


def _outcome(number: int, values: dict[str, Any], metric: str, run: Ended) -> Trial:
    """What a run that has ended says about its validation."""
    result = read_json(run.folder / "result.json")
    if result.get("status") == "completed":
        value = result["validation"].get(metric)
        if value is not None:
            return Trial(number, values, "COMPLETE", value, result["best_round"], run.seconds, "")
        reason = "no user has validation items"
    else:
        reason = result.get("reason") or run.reason
    return Trial(number, values, "FAIL", None, None, run.seconds, reason)


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
    (:data:`OF_EVERY_RUN`).

    Raises:
        SweepError: No trial succeeded.
    """
    search, best = study.search, study.best
    if best is None:
        raise SweepError("no trial succeeded: there are no best values")
    own = parse_yaml((conf_folder() / "strategy" / f"{search.strategy}.yaml").read_text(encoding="utf-8"))
    given = flatten(own or {}) | flatten(parse_overrides(shlex.join(search.changes)))
    settings = flatten(search.settings(best.values).model_dump())
    content: dict[str, Any] = {}
    for key in dict.fromkeys(["algorithm", *given, *study.space]):
        *path, leaf = key.split(".")
        node = content
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = settings[key]
    head = f"# {_title(study)}, validation {study.metric} {best.value:.4f}\n"
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def saved_path(name: str) -> Path:
    """Where the best values go as a strategy of their own.

    Args:
        name: Such as `tuned/ml-100k/fedavg`.

    Raises:
        SweepError: No name of a strategy, or that of one which was not written by a search.
    """
    if not _NAME.fullmatch(name):
        raise SweepError(f"--save {name!r} is no name of a strategy: give one such as tuned/ml-100k/fedavg")
    path = conf_folder() / "strategy" / f"{name}.yaml"
    if path.is_file() and _SAVED_MARK not in path.read_text(encoding="utf-8").partition("\n")[0]:
        raise SweepError(f"--save {name!r} would overwrite {path}, which no search has written: choose another name")
    return path


def _title(study: Study) -> str:
    search = study.search
    count = f"{len(study.trials)} trial{'s' if len(study.trials) != 1 else ''}"
    return f"{search.strategy}{_SAVED_MARK}{search.dataset}: {count} ({search.sampler}, seed {search.seed})"


def _csv(study: Study) -> str:
    return to_csv(
        ["number", "state", "value", "best_round", "seconds", *study.space, "reason"],
        [
            [t.number, t.state, t.value, t.best_round, f"{t.seconds:.1f}", *map(shown, t.values.values()), t.reason]
            for t in study.trials
        ],
    )


def _summary(study: Study) -> str:
    notes = [own_values_text(study)]
    if study.best:
        notes.append(f"{best_text(study)}. The highest of several values is an optimistic estimate.")
    complete = [trial for trial in study.trials if trial.value is not None]
    failed = len(study.trials) - len(complete)
    if failed:
        notes.append(f"{failed} failed; trials.csv says why.")
    rows = [
        [str(t.number), f"{t.value:.4f}", str(t.best_round), f"{t.seconds:.0f}", *map(_brief, t.values.values())]
        for t in sorted(complete, key=lambda trial: (-(trial.value or 0.0), trial.number))[:SHOWN_TRIALS]
    ]
    head = ["trial", f"validation {study.metric}", "best round", "seconds", *study.space]
    title = f"The best trials by the validation {study.metric} of their best round"
    return to_markdown(_title(study), [Table(title, head, rows, 0, set())] if rows else [], notes)


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
    values = flatten(own.model_dump())
    named = values_text({key: values[key] for key in outside})
    return f"{named} lie{'s' if len(outside) == 1 else ''} outside the search space"


def values_text(values: Mapping[str, Any]) -> str:
    """Values for people, such as `train.epochs=2 train.lr=0.05`."""
    return " ".join(f"{key}={_brief(value)}" for key, value in values.items())


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else shown(value)
