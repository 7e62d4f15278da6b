"""What a study asks and runs: conf/study/<name>.yaml, typed and checked. docs/studies.md explains every key."""

import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from fedhur_app.config import ConfigError, Section, conf_folder, nearest, parse_yaml

Figure = Literal["convergence", "sweep", "bytes", "gain"]
Extra = Literal["traffic", "gain", "fairness"]
Metric = Literal["ndcg", "recall", "mrr"]

# Names become folders.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$")]
_IN_WORDS = {"string_pattern_mismatch": "letters, digits and . + - _ only, since it names a folder"}


def _flat(value: Any) -> Any:
    """Lists in lists as one list: YAML's aliases put the items of one list into another."""
    if not isinstance(value, list):
        return value
    return [item for each in value for item in (_flat(each) if isinstance(each, list) else [each])]


Changes = Annotated[list[Annotated[str, Field(pattern=r"^[^=\s]+=")]], BeforeValidator(_flat)]
_IN_WORDS |= {"changes": "settings are texts of the form section.key=value"}


class Data(Section):
    """Data that all arms run on.

    Attributes:
        dataset: A file in conf/dataset/, or an imported data set.
        changes: Settings (`set`) of the runs on it.
    """

    dataset: str
    changes: Changes = Field(default=[], alias="set")


class Arm(Section):
    """One thing to compare.

    Attributes:
        name: Its name, also of its folder.
        strategy: A file in conf/strategy/; None: the study's.
        changes: Settings (`set`) of its runs, after all others.
        x: Its place on the axis of a sweep; None: a reference, which is drawn as a level line.
        series: Which line of a sweep it belongs to.
        paper: What the paper reports for it, by metric, on the first of the study's data.
        worker: A module of fedhur_app/studies/workers/ that makes its runs; None: `fedhur run`.
        options: Words for the worker.
        only: Labels of the data that it runs on; empty: all.
    """

    name: Name
    strategy: str | None = None
    changes: Changes = Field(default=[], alias="set")
    x: Annotated[float, Field(allow_inf_nan=False)] | None = None
    series: str = ""
    paper: dict[Metric, float] = Field(default={})
    worker: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    options: list[str] = Field(default=[])
    only: list[str] = Field(default=[])

    @field_validator("worker")
    @classmethod
    def _there_is(cls, worker: str | None) -> str | None:
        if worker is not None and worker not in (known := _workers()):
            raise ValueError(f"there is no such worker{nearest(worker, known)}; there are {', '.join(known)}")
        return worker

    def runs_on(self, data: str) -> bool:
        """Whether it runs on the data of a label."""
        return not self.only or data in self.only


class Axis(Section):
    """The axis of a sweep.

    Attributes:
        label: What it shows, with its unit.
        scale: How it is divided.
    """

    label: str
    scale: Literal["linear", "log", "log2"] = "linear"


# A run of these settings takes less than a second.
TINY = (
    *("dataset.synthetic.users=40", "dataset.synthetic.items=60", "dataset.synthetic.interactions_per_user=12"),
    *("dataset.clients.number=4", "model.dim=8", "rounds=2", "min_rounds=1", "score.steps=3", "relation.query_width=3"),
)


class Quick(Section):
    """What the small version of a study has in place of the study's own.

    Attributes:
        datasets: Data, in place of all.
        seeds: Seeds.
        arms: Names of the arms that are kept; None: all.
        changes: Settings (`set`) of all runs, after the study's.
    """

    datasets: dict[Name, Data] = Field(default_factory=lambda: {"synthetic": Data(dataset="synthetic")}, min_length=1)
    seeds: list[int] = Field(default=[1, 2], min_length=1)
    arms: Annotated[list[str], Field(min_length=1)] | None = None
    changes: Changes = Field(default=list(TINY), alias="set")


class Definition(Section):
    """A study.

    Attributes:
        title: One line.
        question: What it is to answer, one or two sentences.
        datasets: Label -> data; every arm runs on each.
        seeds: Every arm runs with each.
        strategy: Of arms that name none.
        changes: Settings (`set`) of all runs.
        arms: What is compared.
        metric: That figures show and tables sort by.
        axis: Of a sweep; None: no sweep.
        against: The arm that all others are tested against; None: no tests.
        gain: Arms over which the gain of single clients and users is measured.
        tables: Tables beside those that every study has.
        figures: Figures to draw.
        notes: Lines for the report.
        quick: The small version.
    """

    title: str
    question: str
    datasets: dict[Name, Data] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    strategy: str = "fedhur"
    changes: Changes = Field(default=[], alias="set")
    arms: list[Arm] = Field(min_length=1)
    metric: Metric = "ndcg"
    axis: Axis | None = None
    against: str | None = None
    gain: list[str] = Field(default=[])
    tables: list[Extra] = Field(default=[])
    figures: list[Figure] = Field(default=["convergence"])
    notes: list[str] = Field(default=[])
    quick: Quick = Field(default_factory=Quick)

    @model_validator(mode="after")
    def _consistent(self) -> "Definition":
        names = [arm.name for arm in self.arms]
        for arm in self.arms:
            for label in arm.only:
                if label not in self.datasets:
                    raise ValueError(
                        f"arm {arm.name!r}: only names {label!r}, which is no data{nearest(label, list(self.datasets))}"
                    )
        # Where the file system knows no capitals two such arms would share a folder.
        folders = [name.lower() for name in names]
        if twice := [name for i, name in enumerate(names) if folders[i] in folders[:i]]:
            raise ValueError(f"arm {twice[0]!r} is named twice (or another differs in capitals only)")
        wanted = {"against": [self.against] if self.against else [], "gain": self.gain, "quick.arms": self.quick.arms}
        for key, arms in wanted.items():
            for name in arms or []:
                if name not in names:
                    raise ValueError(f"{key} names {name!r}, which is no arm{nearest(name, names)}")
        if "sweep" in self.figures and (self.axis is None or all(arm.x is None for arm in self.arms)):
            raise ValueError("figure sweep needs axis, and x of the arms")
        for figure_or_table in ("gain", "fairness"):
            if figure_or_table in (*self.figures, *self.tables) and not self.gain:
                raise ValueError(f"{figure_or_table} needs gain, the arms over which gain is measured")
        return self

    def arms_on(self, data: str) -> list[Arm]:
        """The arms that run on the data of a label."""
        return [arm for arm in self.arms if arm.runs_on(data)]

    def with_arms(self, names: Sequence[str]) -> "Definition":
        """The study with some of its arms only, in the order of the file; tests and gains against others fall away.

        Raises:
            ConfigError: None is named, or one that the study does not have.
        """
        known = [arm.name for arm in self.arms]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            what = f"has no arm {unknown[0]!r}" if unknown else "needs an arm at least"
            raise ConfigError(f"--arms: the study {what}; its arms are {', '.join(known)}")
        return self._narrowed([arm for arm in self.arms if arm.name in names])

    def smaller(self) -> "Definition":
        """The version that `--quick` runs."""
        quick = self.quick
        kept = [
            # The paper's numbers are for the study's data, not for these.
            arm.model_copy(update={"only": [], "paper": {}})
            for arm in self.arms
            if quick.arms is None or arm.name in quick.arms
        ]
        changes = [*self.changes, *quick.changes]
        return self._narrowed(kept).model_copy(
            update={"datasets": quick.datasets, "seeds": quick.seeds, "changes": changes}
        )

    def _narrowed(self, arms: list[Arm]) -> "Definition":
        """With these arms only, and nothing measured against any other."""
        names = [arm.name for arm in arms]
        used = {label: data for label, data in self.datasets.items() if any(arm.runs_on(label) for arm in arms)}
        return self.model_copy(
            update={
                "datasets": used,
                "arms": arms,
                "against": self.against if self.against in names else None,
                "gain": [name for name in self.gain if name in names],
            }
        )


def _workers() -> list[str]:
    """Names of the modules in fedhur_app/studies/workers/."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "workers")]))


def study_names() -> list[str]:
    """Names of the studies in conf/study/."""
    return sorted(path.stem for path in (conf_folder() / "study").glob("*.yaml"))


def load_study(name: str) -> Definition:
    """Read conf/study/<name>.yaml.

    Raises:
        ConfigError: An unknown name; a key that is unknown, missing or of the wrong form, named with the file.
    """
    names = study_names()
    if name not in names:
        raise ConfigError(f"unknown study {name!r}{nearest(name, names) or '.'} Known: {', '.join(names)}")
    return read_study(conf_folder() / "study" / f"{name}.yaml")


def read_study(path: Path) -> Definition:
    """Read a study's file.

    Raises:
        ConfigError: As :func:`load_study`.
    """
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping with the keys of a study, found {type(content).__name__}")
    # Lists that are written once and used by several arms; by now the aliases are resolved.
    content.pop("parts", None)
    try:
        return Definition.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(_in_words(item, content) for item in error.errors())}") from error


def _in_words(error: Any, content: dict[str, Any]) -> str:
    place = error["loc"]
    key = ".".join(str(part) for part in place)
    if place[:1] == ("arms",) and len(place) > 1 and isinstance(arm := content["arms"][place[1]], dict):
        key = f"arm {arm.get('name', place[1] + 1)!r}: {'.'.join(str(part) for part in place[2:])}"
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{nearest(str(place[-1]), _KEYS)}"
    if error["type"] == "missing":
        return f"{key!r} is missing"
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        said = _IN_WORDS["changes" if "set" in place else "string_pattern_mismatch"]
    return f"{key} is {error['input']!r}: {said}" if key else said


_KEYS = sorted(
    {info.alias or name for kind in (Definition, Data, Arm, Axis, Quick) for name, info in kind.model_fields.items()}
)
