from functools import lru_cache
from typing import Any

import optuna
import pytest

from fedhur_app import config
from fedhur_app.config import ConfigError, conf_folder, flatten, load_settings
from fedhur_app.search_space import Choices, Range, load_space, suggest


@pytest.mark.parametrize(
    ("entry", "inside", "outside"),
    [
        (Choices((None, 1, "a", [1, 2])), [None, 1, "a", [1, 2]], [True, 2, "1", [2, 1]]),
        (Range(1, 9), [1, 9, 3.0], [0, 10, 1.5, None, True, "3"]),
        (Range(0.0, 1.0), [0, 1.0, 0.123], [-0.1, 1.01, None]),
        (Range(1, 9, step=4), [1, 5, 9], [2, 7]),
        (Range(0, 1, step=0.1), [0.3, 0.7, 1], [0.35]),
    ],
)
def test_what_lies_in_an_entry(entry: Choices | Range, inside: list[Any], outside: list[Any]) -> None:
    assert [value for value in inside if not entry.contains(value)] == []
    assert [value for value in outside if entry.contains(value)] == []


def test_suggested_values_have_the_kind_of_their_range() -> None:
    space = {"a": Range(1, 3), "b": Range(1.0, 3.0), "c": Range(1, 3, step=0.5), "d": Choices(([1], None))}
    fixed = optuna.trial.FixedTrial({"a": 2, "b": 2.0, "c": 1.5, "d": "null"})
    values = suggest(fixed, space)
    assert values == {"a": 2, "b": 2.0, "c": 1.5, "d": None}
    assert [type(value) for value in values.values()] == [int, float, float, type(None)]


def test_the_missing_space_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"Strategies that have one: .*fedavg, .*fedcia, .*local"):
        load_space("fedhur-paper")


def test_every_space_of_conf_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_read_file", lru_cache(config._read_file))  # the same three files for every value
    folder = conf_folder() / "search"
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    assert {"local", "fedavg", "fedcia", "fedhur"} <= set(names)
    for name in names:
        own = flatten(load_settings(strategy=name).model_dump())
        # A search begins with the strategy's own values.
        assert [key for key, entry in load_space(name).items() if not entry.contains(own[key])] == []
