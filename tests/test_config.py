"""Settings: composition, types, errors for people."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhur_app.config import (
    DEFAULT_RUN_CONFIG,
    ConfigError,
    available,
    conf_folder,
    from_json,
    load_settings,
    parse_overrides,
    parse_yaml,
    read_config_file,
    settings_of_run,
)


def test_every_dataset_and_strategy_file_composes():
    for dataset in available("dataset"):
        for strategy in available("strategy"):
            if dataset == "own-data" and load_settings("synthetic", strategy).centralised:
                with pytest.raises(ConfigError, match="needs all data in one place"):
                    load_settings(dataset, strategy)
                continue
            settings = load_settings(dataset, strategy)
            assert settings.strategy == strategy
            assert settings.dataset.name == dataset


def test_order_of_composition_base_then_dataset_then_strategy_then_overrides():
    assert load_settings("ml-100k", "fedcia").relation.kind == "none"
    assert load_settings("synthetic", "fedavg").model.dim == 16
    assert load_settings("synthetic", "fedavg", overrides="model.dim=7").model.dim == 7


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.0e-3", ".001", "1e-03"])
def test_scientific_notation_is_a_number(text):
    assert parse_yaml(text) == 0.001
    assert load_settings(overrides=f"train.lr={text}").train.lr == 0.001


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_any_python_float_survives_an_override(value):
    assert parse_overrides(f"train.lr={value!r}") == {"train": {"lr": value}}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.lrr=1", ["train.lrr", "did you mean 'train.lr'"]),
        ("train.lr=abc", ["train.lr", "'abc'", "number"]),
        ("train.lr=-1", ["train.lr", "-1", "greater than 0"]),
        ("model.dim=0", ["model.dim", "0", "greater than or equal to 1"]),
        ("model.dim=2.5", ["model.dim", "2.5", "integer"]),
        ("rounds=true", ["rounds", "True", "integer"]),
        ("train.loss=bp", ["train.loss", "'bp'", "'bpr'", "'mse'"]),
        ("train=3", ["train", "3", "section", "batch_size"]),
        ("relation.kind=utilty", ["relation.kind", "'utilty'", "did you mean 'utility'"]),
        ("fraction_train=0", ["fraction_train", "0", "greater than 0"]),
        ("train.lr=.inf", ["train.lr", "finite"]),
        ("dataset.split.ratios=[0.5,0.5,0.5]", ["dataset.split", "sum to 1"]),
        ("dataset.clients.kind=country", ["dataset.clients.kind", "'country'", "'market'"]),
        ("dataset.clients.kind=dirichlett", ["dataset.clients.kind", "did you mean 'dirichlet'"]),
        ("dataset.split.kind=temporal-globl", ["dataset.split.kind", "did you mean 'temporal-global'"]),
        ("dataset.clients.alpha=0", ["dataset.clients.alpha", "0.001"]),
        ("dataset.clients.kind=column", ["dataset.clients", "needs dataset.clients.column"]),
        ("dataset.clients.kind=file", ["dataset.clients", "needs dataset.clients.file"]),
        (
            "dataset.clients.kind=file dataset.clients.file=a.csv",
            ["file is 'a.csv'", f"whole path, such as {Path('a.csv').absolute()}"],
        ),
        (
            "dataset.markets.users=[5]",
            ["dataset.markets", "users has 1", "interactions_per_user 2", "one number a market"],
        ),
        ("dataset.markets.users=[5,0]", ["dataset.markets.users.1", "0", "greater than or equal to 1"]),
        ("dataset.markets.shift=1.5", ["dataset.markets.shift", "1.5", "less than or equal to 1"]),
        ("hierarchy.branching=[2,2]", ["residual.beta", "3 values", "2 levels"]),
        ("hierarchy.branching=[2,2,2,2,2,2]", ["hierarchy.branching", "at most 5"]),
        ("min_rounds=500", ["min_rounds", "500", "rounds"]),
        ("privacy.laplace_scale=0.1", ["laplace_scale", "relation.kind=none"]),
        ("residual.item_level=3", ["residual.item_level", "3", "levels"]),
        ("score.steps=0", ["score.steps", "0"]),
        ("strategy=fedavg", ["strategy", "--strategy"]),
        ("seed=3", ["seed", "--seed"]),
        ("novalue", ["novalue", "section.key=value"]),
        ("a.b=[1", ["a.b=[1", "YAML"]),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_allowed(override, parts):
    with pytest.raises(ConfigError) as error:
        load_settings(strategy="fedhur-paper", overrides=override)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("kind", ["one-user", "market", "published"])
def test_data_on_devices_cannot_decide_the_number_of_clients(kind):
    with pytest.raises(ConfigError, match=f"kind {kind} reads the number of clients out of the data, which own-data"):
        load_settings("own-data", overrides=f"dataset.clients.kind={kind}")


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'ml-100k'"):
        load_settings("ml100k")
    with pytest.raises(ConfigError, match="did you mean 'fedcia'"):
        load_settings(strategy="fedci")


def test_quoted_override_values_may_hold_blanks():
    assert parse_overrides("""a.b='{"x": 1, "y": 2}' c=3""") == {"a": {"b": {"x": 1, "y": 2}}, "c": 3}


def test_settings_travel_as_json_and_as_yaml(tmp_path: Path):
    settings = load_settings("synthetic", "fedhur", seed=3, overrides="residual.peers=4")
    assert from_json(settings.to_json()) == settings
    (tmp_path / "config.yaml").write_text(settings.to_yaml())
    assert read_config_file(tmp_path / "config.yaml") == settings


def test_a_resumed_run_keeps_its_settings_and_takes_overrides(tmp_path: Path):
    settings = load_settings("synthetic", "fedavg", seed=3, overrides="train.lr=0.2")
    (tmp_path / "config.yaml").write_text(settings.to_yaml())
    config = {**DEFAULT_RUN_CONFIG, "resume": str(tmp_path), "overrides": "rounds=40"}
    assert settings_of_run(config) == settings.model_copy(update={"rounds": 40})


def test_seed_must_be_a_whole_number():
    for seed in ("x", 1.5, True, -1):
        with pytest.raises(ConfigError, match="seed"):
            settings_of_run({**DEFAULT_RUN_CONFIG, "seed": seed})


def test_run_config_of_the_local_runtime_is_that_of_pyproject():
    pyproject = tomllib.loads((conf_folder().parent / "pyproject.toml").read_text())
    assert pyproject["tool"]["flwr"]["app"]["config"] == DEFAULT_RUN_CONFIG


def test_uv_leaves_every_dependency_to_the_installed_environment():
    pyproject = tomllib.loads((conf_folder().parent / "pyproject.toml").read_text())
    wanted = [*pyproject["project"]["dependencies"]]
    for extra in pyproject["project"]["optional-dependencies"].values():
        wanted += extra
    names = {entry.split("[")[0].split(">")[0].split("<")[0].split("=")[0].lower() for entry in wanted}
    assert names <= set(pyproject["tool"]["uv"]["exclude-dependencies"])
