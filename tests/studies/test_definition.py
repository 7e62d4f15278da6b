from pathlib import Path

import pytest

from fedhur_app.config import ConfigError, available, data_sets
from fedhur_app.studies.definition import Definition, load_study, read_study, study_names
from fedhur_app.studies.plan import plan

MINIMAL = """
title: A title
question: A question?
datasets: {one: {dataset: synthetic}, two: {dataset: synthetic, set: [rounds=7]}}
seeds: [1, 2]
set: [rounds=9, min_rounds=1]
parts:
  wide: &wide [model.dim=32]
arms:
  - {name: plain}
  - {name: other, strategy: fedavg, set: [*wide, "train.lr=0.3"], x: 2, only: [two]}
"""


def read(folder: Path, text: str) -> Definition:
    (folder / "mine.yaml").write_text(text)
    return read_study(folder / "mine.yaml")


@pytest.mark.parametrize("name", study_names())
def test_every_arm_of_every_study_has_valid_settings(name, tmp_path):
    definition = load_study(name)
    # A data set that is not imported here says nothing about settings.
    known = set(data_sets())
    datasets = {
        label: data if data.dataset in known else data.model_copy(update={"dataset": "ml-1m"})
        for label, data in definition.datasets.items()
    }
    definition = definition.model_copy(update={"datasets": datasets})
    for version in (definition, definition.smaller()):
        runs = plan(version, tmp_path)
        assert {run.arm.name for run in runs} == {arm.name for arm in version.arms}
        assert len({run.folder for run in runs}) == len(runs)
        assert {run.settings.evaluation.per_user for run in runs} == {True}
    quick = plan(definition.smaller(), tmp_path)
    assert all(run.settings.rounds <= 2 and run.dataset in available("dataset") for run in quick)


def test_settings_of_the_arm_come_last_and_aliases_are_joined(tmp_path):
    runs = {(run.data, run.arm.name, run.seed): run for run in plan(read(tmp_path, MINIMAL), tmp_path)}
    assert sorted(runs) == [
        ("one", "plain", 1), ("one", "plain", 2), ("two", "other", 1), ("two", "other", 2), ("two", "plain", 1),
        ("two", "plain", 2),
    ]  # fmt: skip
    settings = runs["two", "other", 2].settings
    assert (settings.rounds, settings.model.dim, settings.train.lr, settings.seed) == (7, 32, 0.3, 2)
    assert (settings.algorithm, settings.server.threads) == ("fedavg", 1)
    assert runs["one", "plain", 1].settings.rounds == 9
    assert runs["two", "other", 2].folder == tmp_path / "runs" / "two" / "other" / "seed-2"


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("title: A title", "titel: A title", ["'title' is missing", "unknown key 'titel'; did you mean 'title'"]),
        ("strategy: fedavg", "stratgy: fedavg", ["arm 'other'", "stratgy", "did you mean 'strategy'"]),
        ("name: plain", "name: a/b", ["arm 'a/b': name is 'a/b'", "names a folder"]),
        ("[*wide,", "[*wide, oops,", ["arm 'other': set", "'oops'", "section.key=value"]),
        ("seeds: [1, 2]", "seeds: [one]", ["seeds.0 is 'one'", "integer"]),
        ("name: other", "name: plain", ["arm 'plain' is named twice"]),
        ("only: [two]", "only: [tow]", ["arm 'other'", "'tow'", "did you mean 'two'"]),
        ("title: A", "against: plane\ntitle: A", ["against names 'plane'", "did you mean 'plain'"]),
        ("title: A", "figures: [sweep]\ntitle: A", ["figure sweep needs axis"]),
        ("title: A", "tables: [gain]\ntitle: A", ["gain needs gain"]),
        ("title: A", "quick: {arms: [all]}\ntitle: A", ["quick.arms names 'all'"]),
        ("title: A", "title: [A", ["is not valid YAML"]),
        ("x: 2", "x: .nan", ["arm 'other': x", "finite"]),
        ("x: 2", "worker: dropuots", ["no such worker; did you mean 'dropouts'?"]),
        ("name: other", "name: Plain", ["arm 'Plain' is named twice (or another differs in capitals only)"]),
        ("title: A", "quick: {arms: []}\ntitle: A", ["quick.arms"]),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(old, new, parts, tmp_path):
    assert old in MINIMAL
    with pytest.raises(ConfigError) as error:
        read(tmp_path, MINIMAL.replace(old, new))
    for part in [str(tmp_path / "mine.yaml"), *parts]:
        assert part in str(error.value)


def test_an_unknown_study_or_setting_is_named(tmp_path):
    with pytest.raises(ConfigError, match="unknown study 'relation'; did you mean 'relations'"):
        load_study("relation")
    with pytest.raises(ConfigError, match=r"arm other on data two: unknown setting 'train\.lrr'"):
        plan(read(tmp_path, MINIMAL.replace("train.lr=0.3", "train.lrr=0.3")), tmp_path)
    with pytest.raises(ConfigError, match=r"arms plain and other cannot be compared: evaluation\.k"):
        plan(read(tmp_path, MINIMAL.replace("train.lr=0.3", "evaluation.k=3")), tmp_path)
    with pytest.raises(ConfigError, match="seed -1"):
        plan(read(tmp_path, MINIMAL.replace("[1, 2]", "[1, -1]")), tmp_path)


def test_the_small_version_keeps_named_arms_and_what_refers_to_them(tmp_path):
    text = MINIMAL + "against: other\ngain: [plain, other]\nquick: {arms: [plain], seeds: [5], set: [rounds=3]}\n"
    small = read(tmp_path, text).smaller()
    assert ([arm.name for arm in small.arms], small.seeds, small.gain, small.against) == (
        ["plain"],
        [5],
        ["plain"],
        None,
    )
    (run,) = plan(small, tmp_path)
    assert (run.data, run.dataset, run.settings.rounds) == ("synthetic", "synthetic", 3)


def test_some_arms_of_a_study():
    study = load_study("main").with_arms(["fedavg", "fedhur"])
    assert [arm.name for arm in study.arms] == ["fedhur", "fedavg"]
    assert (study.against, study.gain) == ("fedhur", ["fedavg"])
    assert load_study("main").with_arms(["ease"]).against is None
    with pytest.raises(ConfigError, match=r"no arm 'fedvag'; its arms are fedhur-als, "):
        load_study("main").with_arms(["fedvag"])
