"""What a search tries (conf/search/<strategy>.yaml), and its values as Optuna's parameters."""

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import optuna
import yaml

from fedhur_app.config import ConfigError, conf_folder, flatten, load_settings, nearest, parse_overrides, parse_yaml
from fedhur_app.sweep import OF_EVERY_RUN, as_json, set_items

_MEASURE = ("dataset", "evaluation")  # trials with other values of these would not be judged by the same measure


@dataclass(frozen=True)
class Choices:
    """A setting that takes one of some values (any YAML values)."""

    values: tuple[Any, ...]

    def contains(self, value: Any) -> bool:
        """Whether `value` is one of the choices; 1 and true are different values."""
        return as_json(value) in map(as_json, self.values)

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
            settings = load_settings(dataset, strategy, overrides=shlex.join([*changes, *set_items({key: value})]))
        except ConfigError as error:
            raise ConfigError(f"{path}, {key}={as_json(value)}: {error}") from error
        values = flatten(settings.model_dump())
        if key not in values:
            raise ConfigError(f"{path}: {key} is a section: name the settings in it one by one")
        return values[key]

    fixed = flatten(parse_overrides(shlex.join(changes)))
    space: Space = {}
    for key in sorted(map(str, content)):
        if key.split(".")[0] in _MEASURE:
            raise ConfigError(f"{path}: {key} cannot be searched, its values are not judged by the same measure")
        if key in OF_EVERY_RUN:
            raise ConfigError(f"{path}: {key} cannot be searched, it is {OF_EVERY_RUN[key]} in every trial")
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
        if len(set(map(as_json, values))) < len(values):
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
            values[key] = json.loads(trial.suggest_categorical(key, list(map(as_json, entry.values))))
        elif entry.whole:
            values[key] = trial.suggest_int(
                key, int(entry.low), int(entry.high), step=int(entry.step or 1), log=entry.log
            )
        else:
            values[key] = trial.suggest_float(key, entry.low, entry.high, step=entry.step, log=entry.log)
    return values


def encode(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as Optuna's parameters."""
    encoded: dict[str, Any] = {}
    for key, entry in space.items():
        value = values[key]
        encoded[key] = as_json(value) if isinstance(entry, Choices) else int(value) if entry.whole else float(value)
    return encoded


def decode(space: Space, params: Mapping[str, Any]) -> dict[str, Any]:
    """Values from Optuna's parameters."""
    return {key: json.loads(params[key]) if isinstance(space[key], Choices) else params[key] for key in space}


def _is_multiple(distance: float, step: float) -> bool:
    return abs(distance / step - round(distance / step)) < 1e-9
