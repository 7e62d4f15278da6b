"""Typed settings: composition of conf/ (base + data set + strategy + overrides), validation, errors for people.

The server resolves the settings once and ships them in every message as JSON; clients never read conf/.
Every setting has its default and its explanation in conf/base.yaml; here are the types and the bounds.
"""

import difflib
import json
import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


# With this data set every node brings its own rows (`data-path` in its node config) and the server holds none.
OWN_DATA = "own-data"

# Kinds of clients whose number is read out of the data (a test compares them with the functions).
KINDS_OF_DATA = ("one-user", "market", "column", "file", "published")

# Algorithms whose local training is the recommendation loss alone.
_CLOSED_FORM = ("fedhur", "fedavg", "local", "fedca", "finetune")
# Models that an algorithm can train, where it cannot train every kind.
_MODEL_KINDS = {
    "fedhur": ("mf", "lightgcn"),
    "pfedrec": ("mf",),
    "fedrap": ("mf",),
    "gpfedrec": ("mf", "mlp"),
    "fedca": ("mf", "mlp"),
    "cofedrec": ("mf",),
    "fecosr": ("mf", "mlp", "lightgcn"),
}

# As in pyproject.toml ([tool.flwr.app.config]); a test keeps the two equal.
DEFAULT_RUN_CONFIG: dict[str, Any] = {
    "dataset": "ml-100k",
    "strategy": "fedhur",
    "seed": 1,
    "overrides": "",
    "output-dir": "",
    "resume": "",
}


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or impossible; the text names it and what is allowed."""


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values are not silently converted, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True, serialize_by_alias=True)


class SplitSettings(Section):
    """How interactions are divided into training, validation and test rows."""

    kind: Literal["random", "user-ratio", "leave-one-out", "temporal", "temporal-global", "published"]
    ratios: list[NonNegative] = Field(min_length=3, max_length=3)

    @model_validator(mode="after")
    def _sum_to_one(self) -> "SplitSettings":
        if abs(sum(self.ratios) - 1.0) > 1e-6 or self.ratios[0] <= 0:
            raise ValueError("the three ratios (train, validation, test) must sum to 1, training above 0")
        return self


class ClientsSettings(Section):
    """How users are divided among clients."""

    kind: Literal["id", "random", "taste", "dirichlet", "one-user", "market", "column", "file", "published"]
    number: Positive
    alpha: Annotated[float, Field(ge=1e-3, le=1e6)]
    column: str
    column_prefix: Annotated[int, Field(ge=0)]
    min_users: Positive
    file: str

    @model_validator(mode="after")
    def _complete(self) -> "ClientsSettings":
        if self.kind == "column" and not self.column:
            raise ValueError(
                "kind column needs dataset.clients.column, the name of a column of the users, such as zip_code"
            )
        if self.kind == "file":
            if not self.file:
                raise ValueError(
                    "kind file needs dataset.clients.file, a file with a line `user id, client name` a user"
                )
            path = Path(self.file).expanduser()
            if not path.is_absolute():
                raise ValueError(
                    f"file is {self.file!r}: processes of a run may start in other folders, so give the whole path, "
                    f"such as {path.absolute()}"
                )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """All settings but kind and number, by name."""
        return self.model_dump(exclude={"kind", "number"})


class SyntheticSettings(Section):
    """The generator behind the data set `synthetic`."""

    users: Positive
    items: Positive
    interactions_per_user: Positive
    branching: list[Positive] = Field(min_length=1)
    popularity_skew: NonNegative


class MarketsSettings(Section):
    """The generator behind the data set `markets-synthetic`."""

    users: list[Positive] = Field(min_length=1)
    interactions_per_user: list[Positive] = Field(min_length=1)
    items: Positive
    dim: Positive
    shift: Annotated[float, Field(ge=0.0, le=1.0)]
    own_items: Annotated[float, Field(ge=0.0, le=1.0)]
    popularity_skew: NonNegative
    sharpness: NonNegative

    @model_validator(mode="after")
    def _one_number_a_market(self) -> "MarketsSettings":
        if len(self.users) != len(self.interactions_per_user):
            raise ValueError(
                f"users has {len(self.users)} numbers and interactions_per_user {len(self.interactions_per_user)}: "
                "give both one number a market"
            )
        return self


class DatasetSettings(Section):
    """Which data, how split, how shared out."""

    name: str
    catalogue: str | None
    split: SplitSettings
    clients: ClientsSettings
    synthetic: SyntheticSettings
    markets: MarketsSettings

    @model_validator(mode="after")
    def _whole_path(self) -> "DatasetSettings":
        if self.catalogue is None:
            return self
        if self.name != OWN_DATA:
            raise ValueError(f"catalogue belongs to data set {OWN_DATA}; {self.name} knows its items")
        path = Path(self.catalogue).expanduser()
        if not path.is_absolute():
            raise ValueError(
                f"catalogue is {self.catalogue!r}: the server may start in another folder, so give the whole path, "
                f"such as {path.absolute()}"
            )
        return self


class ModelSettings(Section):
    """The local recommender."""

    kind: Literal["mf", "lightgcn", "ncf", "mlp"]
    dim: Positive
    init_std: PositiveFloat
    same_init: bool
    user_bias: bool
    layers: Annotated[int, Field(ge=0)]
    hidden: list[Positive] = Field(min_length=1)


class TrainSettings(Section):
    """Local training (eq. 1)."""

    solver: Literal["gradient", "als"]
    loss: Literal["bpr", "bce", "mse", "elementwise"]
    optimizer: Literal["adam", "sgd"]
    lr: PositiveFloat
    item_lr_factor: PositiveFloat
    lr_decay: Fraction
    weight_decay: NonNegative
    epochs: Positive
    tolerance: NonNegative
    batch_size: Positive
    negatives: Positive
    keep_optimizer_state: bool


class AlsSettings(Section):
    """Local training in closed form (`train.solver: als`)."""

    unobserved_weight: PositiveFloat
    l2: PositiveFloat
    anchor: Literal["zero", "received"]


class UserRefitSettings(Section):
    """Closed-form user vectors for ranking only."""

    enabled: bool
    unobserved_weight: PositiveFloat
    l2: PositiveFloat


class HierarchySettings(Section):
    """The tree of item groups (server k-means)."""

    branching: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, max_length=5)
    flat: bool
    flat_groups: Positive
    refresh_every: Positive
    features: Literal["mean", "spectral"]
    smoothing: Annotated[float, Field(ge=0, lt=1)]


class RelationSettings(Section):
    """Who helps whom, for which group of items (eq. 10-19)."""

    kind: Literal["none", "similarity", "complementarity", "both", "utility"]
    match: Literal["energy", "cosine"]
    query: Literal["symmetric", "local", "right", "left"]
    query_width: Positive
    query_norm: Literal["columns", "none"]
    filter_scale: Literal["none", "spectral"]
    client_scale: Literal["none", "unit"]
    include_self: bool


class ScoreSettings(Section):
    """Correction of the scores by the shared scorer and their softmax (eq. 20-22)."""

    features: Literal["all", "total", "no-total", "no-scale", "no-direction", "direction"]
    correction: NonNegative
    hidden: Positive
    lr: PositiveFloat
    steps: Positive
    batch: Positive
    timing: Literal["previous", "same"]
    per_level: bool
    analytic: bool
    standardize: bool
    tau: PositiveFloat


class ResidualSettings(Section):
    """What travels from the useful clients to the target (eq. 23-24)."""

    kind: Literal["group", "item"]
    beta: list[NonNegative] = Field(min_length=1, max_length=5)
    inherit: list[NonNegative] | None
    center: bool
    max_ratio: PositiveFloat | None
    gamma: Annotated[float, Field(ge=0.0, le=1.0)]
    span: Literal["shared", "own"]
    item_level: Annotated[int, Field(ge=0, le=4)]
    peers: Positive | None
    coarse_parameter_levels: list[Positive]


class AlignSettings(Section):
    """Fitting the item table to the personal filter (eq. 25)."""

    solver: Literal["exact", "gd", "reference"]
    rank: Positive | None
    steps: Positive
    step_size: PositiveFloat


class FedAvgSettings(Section):
    """Parameter averaging."""

    weighting: Literal["examples", "uniform"]
    row_masked: bool


class FedRapSettings(Section):
    """FedRAP (Li et al. 2024): shared and private item tables."""

    separation: NonNegative
    sparsity: NonNegative
    curriculum: bool
    bounded: bool


class GpFedRecSettings(Section):
    """GPFedRec (Zhang et al. 2024): a graph of clients."""

    regularisation: NonNegative
    metric: Literal["cosine", "repo"]
    centre: bool
    threshold: NonNegative
    neighbours: Positive | None
    hops: Positive


class FedCaSettings(Section):
    """FedCA (Zhang et al. 2024): composite aggregation."""

    alpha: NonNegative
    beta: NonNegative
    swapped: bool
    similarity: Literal["aligned", "repo"]
    complementarity: Literal["outside", "aligned", "repo"]
    components: Positive
    keep: Annotated[float, Field(ge=0.0, le=1.0)]


class CoFedRecSettings(Section):
    """CoFedRec (He et al. 2024): groups of clients that agree on a cluster of items."""

    clusters: Positive
    contrast: NonNegative
    temperature: PositiveFloat
    groups: Positive


class GfcfSettings(Section):
    """GFCF (Shen et al. 2021): a graph filter without training."""

    singular_vectors: Positive
    ideal_weight: NonNegative
    server_weight: NonNegative
    rank: Positive | None


class EaseSettings(Section):
    """EASE (Steck 2019): a linear item model in closed form."""

    l2: Annotated[float, Field(ge=1e-3, allow_inf_nan=False)]


class MarketModel(Section):
    """What one market trains where it differs from `model`."""

    kind: Literal["mf", "mlp", "lightgcn"] | None = None
    dim: Positive | None = None


class JoinSettings(Section):
    """A market that joins late."""

    market: Annotated[int, Field(ge=0)]
    round: Annotated[int, Field(ge=2)]
    warm: bool = True
    boost: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 10.0


class FeCoSRSettings(Section):
    """FeCoSR: markets keep their models and are pulled to a common item table G."""

    regulariser: Literal["mse", "kl", "contrastive", "relation"]
    strength: NonNegative
    schedule: Literal["constant", "decay", "size", "adaptive"]
    decay: Fraction
    temperature: PositiveFloat
    adversary: NonNegative
    weighting: Literal["uniform", "examples", "median", "trimmed"]
    trim: Annotated[float, Field(ge=0.0, le=0.5)]
    server_lr: PositiveFloat
    update_every: Positive
    selective: bool
    dim: Positive | None
    attribute_prior: NonNegative
    models: list[MarketModel] | None
    top_rows: Fraction | None
    bits: Literal[8, 32]
    asynchronous: bool
    staleness: NonNegative
    join: JoinSettings | None

    def model_of(self, market: int, model: ModelSettings) -> ModelSettings:
        """The model that a market trains."""
        if self.models is None:
            return model
        own = {key: value for key, value in self.models[market].model_dump().items() if value is not None}
        return model.model_copy(update=own)

    def problem(self, model: ModelSettings, rounds: int) -> str | None:
        """Why these settings contradict each other or what they meet, or None."""
        widths = {self.dim or model.dim, *(own.dim or model.dim for own in self.models or [MarketModel()])}
        if self.regulariser != "relation" and len(widths) > 1:
            return (
                f"fecosr.regulariser {self.regulariser} compares tables of one width, but model.dim, fecosr.dim and "
                f"fecosr.models give {', '.join(map(str, sorted(widths)))}: choose relation, which has no width"
            )
        if self.regulariser != "relation" and not model.same_init:
            return (
                f"fecosr.regulariser {self.regulariser} compares tables coordinate by coordinate, so all must "
                "start from "
                "one: set model.same_init=true, or choose relation"
            )
        if self.adversary > 0 and self.regulariser == "relation":
            return (
                "fecosr.adversary compares coordinates, which fecosr.regulariser relation leaves free: choose "
                "mse, kl or "
                "contrastive, or adversary 0"
            )
        if self.update_every > rounds:
            return f"fecosr.update_every ({self.update_every}) is above rounds ({rounds}): G would never move"
        if self.join and self.join.round > rounds:
            return f"fecosr.join names round {self.join.round}, but there are {rounds} rounds"
        if self.asynchronous and self.weighting in ("median", "trimmed"):
            return (
                f"fecosr.weighting {self.weighting} compares the answers of a round, and with fecosr.asynchronous the "
                "server takes them one by one: choose uniform or examples"
            )
        if self.asynchronous and self.update_every > 1:
            return "fecosr.update_every waits for whole rounds, and fecosr.asynchronous has none: set it to 1"
        return None

    def kinds(self, model: ModelSettings) -> set[str]:
        """The kinds of model that the markets train."""
        return {own.kind or model.kind for own in self.models} if self.models else {model.kind}


class FinetuneSettings(Section):
    """Cross-market reference: a model of the source market, then fine-tuned on the others."""

    source: Annotated[int, Field(ge=0)] | None
    source_rounds: Positive | None


class PrivacySettings(Section):
    """Noise on what is uploaded. It is not differential privacy: nothing is clipped and no budget is kept."""

    laplace_scale: NonNegative


class EvaluationSettings(Section):
    """Ranking metrics."""

    k: Positive
    batch_mib: PositiveFloat
    per_user: bool
    per_client: bool
    selection: Literal["pooled", "client"]


class ClientSettings(Section):
    """What nodes with their own data do at the start of a run."""

    continue_: bool = Field(alias="continue")


class ServerSettings(Section):
    """Rounds on an unreliable network."""

    quorum: Fraction
    stage_timeout: PositiveFloat
    connect_timeout: PositiveFloat
    min_clients: Positive | None
    checkpoint_every: Annotated[int, Field(ge=0)]
    threads: Annotated[int, Field(ge=0)]
    tensorboard: bool


class Settings(Section):
    """Everything that decides a run."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    strategy: str
    algorithm: str
    rounds: Positive
    min_rounds: Positive
    patience: Positive
    fraction_train: Fraction
    centralised: bool
    device: Literal["auto", "cpu", "cuda"]
    dataset: DatasetSettings
    model: ModelSettings
    train: TrainSettings
    als: AlsSettings
    user_refit: UserRefitSettings
    hierarchy: HierarchySettings
    relation: RelationSettings
    score: ScoreSettings
    residual: ResidualSettings
    align: AlignSettings
    fedavg: FedAvgSettings
    fedrap: FedRapSettings
    gpfedrec: GpFedRecSettings
    fedca: FedCaSettings
    cofedrec: CoFedRecSettings
    gfcf: GfcfSettings
    ease: EaseSettings
    fecosr: FeCoSRSettings
    finetune: FinetuneSettings
    privacy: PrivacySettings
    evaluation: EvaluationSettings
    client: ClientSettings
    server: ServerSettings

    @property
    def levels(self) -> int:
        """Number of levels of the hierarchy in use."""
        return 1 if self.hierarchy.flat else len(self.hierarchy.branching)

    @property
    def rank(self) -> int:
        """Number of eigenpairs of the global filter that travel (`align.rank`, by default the width)."""
        return self.align.rank or self.model.dim

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        if self.algorithm == "fedhur" and self.relation.kind != "none":
            for name, values in (("beta", self.residual.beta), ("inherit", self.residual.inherit)):
                if values is not None and len(values) != self.levels:
                    raise ValueError(
                        f"residual.{name} has {len(values)} values, the hierarchy has {self.levels} levels "
                        "(hierarchy.branching, or 1 with hierarchy.flat): give one value a level"
                    )
            bad = [level for level in self.residual.coarse_parameter_levels if level > self.levels]
            if bad:
                raise ValueError(f"residual.coarse_parameter_levels names level {bad[0]}; there are {self.levels}")
            if self.residual.item_level >= self.levels:
                raise ValueError(
                    f"residual.item_level is {self.residual.item_level}: a group's peers are found by what its "
                    f"children show, so it must lie below the {self.levels} levels of the hierarchy (0 is the whole "
                    "catalogue as one group)"
                )
            if self.privacy.laplace_scale > 0:
                raise ValueError(
                    "privacy.laplace_scale works with relation.kind=none only: relations need the item tables, "
                    "a noisy Gram matrix has none"
                )
        if self.algorithm != "fedhur" and self.privacy.laplace_scale > 0:
            raise ValueError(
                f"privacy.laplace_scale is noise on FedCIA's Gram matrix: strategy {self.strategy} uploads none, and "
                "nothing would be protected"
            )
        if self.fedavg.row_masked and self.algorithm != "fedavg":
            raise ValueError(f"fedavg.row_masked works with algorithm fedavg only, not {self.algorithm}")
        if self.user_refit.enabled and self.algorithm in ("gfcf", "fedcia_gfcf", "ease", "popularity"):
            raise ValueError(f"user_refit needs an item table, and {self.algorithm} has none")
        if self.train.lr * self.train.lr_decay ** (self.rounds - 1) < 1e-30:
            raise ValueError(f"train.lr_decay {self.train.lr_decay} leaves no learning rate after {self.rounds} rounds")
        kinds = _MODEL_KINDS.get(self.algorithm)
        if kinds and self.model.kind not in kinds:
            raise ValueError(
                f"algorithm {self.algorithm} trains model.kind {' or '.join(kinds)}, not {self.model.kind}"
            )
        if self.algorithm == "fecosr":
            self._check_markets()
        if self.algorithm == "finetune" and (self.rounds < 2 or self.fraction_train < 1):
            raise ValueError(
                "finetune asks all markets in every round, first the source's rounds and then the others': it needs "
                "fraction_train=1 and two rounds at least"
            )
        source_rounds = self.finetune.source_rounds
        if self.algorithm == "finetune" and source_rounds is not None and source_rounds >= self.rounds:
            raise ValueError(
                f"finetune.source_rounds ({source_rounds}) leaves no round of {self.rounds} for the other markets"
            )
        if self.algorithm == "finetune" and self.evaluation.selection == "client":
            raise ValueError(
                "evaluation.selection client would let the source keep the model it had before it was fine-tuned: "
                "finetune replaces it, set evaluation.selection=pooled"
            )
        trained = self.fecosr.kinds(self.model) if self.algorithm == "fecosr" else {self.model.kind}
        for kind in sorted(trained & {"ncf", "mlp"}):
            if self.train.loss not in ("bpr", "bce"):
                raise ValueError(f"train.loss is {self.train.loss}, but model.kind {kind} has bpr and bce only")
            if self.user_refit.enabled:
                raise ValueError(
                    f"user_refit needs scores that are dot products, which those of model.kind {kind} are not: set "
                    "user_refit.enabled=false"
                )
        if self.train.solver == "als" and (
            self.algorithm not in _CLOSED_FORM or self.model.kind != "mf" or self.model.user_bias
        ):
            raise ValueError(
                "train.solver als fits plain matrix factorisation (model.kind mf without user_bias) and nothing beside "
                f"it; it works with algorithm {', '.join(_CLOSED_FORM)}, and this is {self.algorithm}, model.kind "
                f"{self.model.kind}"
            )
        if self.model.user_bias and self.model.kind != "mf":
            raise ValueError(f"model.user_bias belongs to model.kind mf, not {self.model.kind}")
        if self.model.user_bias and self.train.loss == "elementwise":
            raise ValueError("model.user_bias has no meaning for train.loss elementwise, which has no scores")
        if self.centralised and self.dataset.name == OWN_DATA:
            raise ValueError(
                f"strategy {self.strategy} is centralised: it needs all data in one place, and own-data leaves them "
                "on the devices"
            )
        if self.dataset.name == OWN_DATA and self.dataset.clients.kind in KINDS_OF_DATA:
            raise ValueError(
                f"dataset.clients.kind {self.dataset.clients.kind} reads the number of clients out of the data, "
                "which own-data leaves on the devices: keep kind id and set dataset.clients.number to the number of "
                "SuperNodes"
            )
        if self.evaluation.per_user and self.dataset.name == OWN_DATA:
            raise ValueError("evaluation.per_user would send every user's metrics from the devices: not with own-data")
        self._check_nodes()
        if self.min_rounds > self.rounds:
            raise ValueError(f"min_rounds ({self.min_rounds}) is above rounds ({self.rounds})")
        return self

    def _check_nodes(self) -> None:
        """Settings that only nodes with their own data can follow."""
        few = self.server.min_clients
        if self.dataset.name != OWN_DATA:
            if self.client.continue_ or few is not None:
                name = "server.min_clients" if few is not None else "client.continue"
                raise ValueError(f"{name} is for nodes that bring their own data: it works with {OWN_DATA} only")
            return
        if few is not None and few > self.dataset.clients.number:
            raise ValueError(
                f"server.min_clients ({few}) is above dataset.clients.number ({self.dataset.clients.number})"
            )
        if few is not None and self.algorithm in ("fecosr", "finetune"):
            raise ValueError(
                f"server.min_clients lets clients join late, and {self.algorithm} must know all markets when it "
                "begins: set it to null"
            )

    def _check_markets(self) -> None:
        """Settings of FeCoSR and what they meet elsewhere."""
        if problem := self.fecosr.problem(self.model, self.rounds):
            raise ValueError(problem)
        own_choice = self.evaluation.selection == "client"
        if self.fecosr.join and not own_choice:
            raise ValueError(
                "fecosr.join needs evaluation.selection=client: pooled validation changes when a market joins, "
                "which would "
                "decide the best round of the others"
            )
        if not self.fecosr.asynchronous:
            return
        if not own_choice:
            raise ValueError(
                "fecosr.asynchronous needs evaluation.selection=client: its rounds end while markets are still "
                "training, so "
                "no model is that of a common round"
            )
        if self.fraction_train < 1:
            raise ValueError("fecosr.asynchronous calls every market that is idle: fraction_train must be 1")
        if self.server.checkpoint_every > 1:
            raise ValueError(
                "fecosr.asynchronous needs server.checkpoint_every 1 (or 0, none): answers of several rounds "
                "mix, and a "
                "resume could miss a market's state"
            )

    def to_json(self) -> str:
        """Compact JSON for messages; :func:`from_json` reads it back."""
        return self.model_dump_json()

    def for_clients(self) -> str:
        """JSON of what clients are told: everything but where files lie on the server."""
        return self.model_copy(update={"dataset": self.dataset.model_copy(update={"catalogue": None})}).to_json()

    def to_yaml(self) -> str:
        """YAML for people (`config.yaml` of a run)."""
        return yaml.safe_dump(json.loads(self.model_dump_json()), sort_keys=False)


# libyaml reads ten times as fast where it is there.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.1 as PyYAML reads it, except that `1e-3` is a number (PyYAML takes it for a string)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
# Integers first: the float pattern above also matches them.
_Loader.yaml_implicit_resolvers = {
    key: sorted(value, key=lambda item: item[0] == "tag:yaml.org,2002:float")
    for key, value in _Loader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> Any:
    """Parse YAML with numbers such as `1e-3` read as numbers."""
    return yaml.load(text, Loader=_Loader)


def conf_folder() -> Path:
    """Folder of the YAML files: beside the packages in a checkout or a Flower app bundle, inside in a wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "conf", package / "conf"):
        if (folder / "base.yaml").is_file():
            return folder
    raise ConfigError(f"conf/base.yaml is neither in {package.parent} nor in {package}: reinstall the package")


def available(kind: Literal["dataset", "strategy"]) -> list[str]:
    """Names of the data sets or strategies that have a YAML file in conf/."""
    folder = conf_folder() / kind
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def data_sets() -> list[str]:
    """Names of the data sets that a run may use: those with a YAML file in conf/, and those that people imported."""
    from fedhur_app.data.catalog import imported

    return sorted({*available("dataset"), *imported()})


def nearest(word: str, candidates: list[str]) -> str:
    """The part of an error text that suggests the nearest of `candidates` to `word` (empty if none is near)."""
    near = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _read(kind: Literal["dataset", "strategy"], name: str) -> dict[str, Any]:
    names = available(kind)
    if name not in names:
        names = data_sets() if kind == "dataset" else names
        if name in names:  # imported: its name says all
            return {"dataset": {"name": name}}
        raise ConfigError(f"unknown {kind} {name!r}{nearest(name, names) or '.'} Known: {', '.join(names)}")
    return _read_file(conf_folder() / kind / f"{name}.yaml")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, found {type(content).__name__}")
    return content


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def parse_overrides(text: str) -> dict[str, Any]:
    """Overrides such as ``train.lr=1e-2 hierarchy.branching=[8,8]`` as a nested mapping.

    Items are separated by blanks as in a shell, so a value with blanks is quoted. Values are YAML.

    Raises:
        ConfigError: An item without `=` or an unreadable value.
    """
    nested: dict[str, Any] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides {text!r} cannot be read: {error}") from error
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {word!r} is not of the form section.key=value")
        try:
            parsed = parse_yaml(value)
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or "unreadable"
            raise ConfigError(f"the value of override {word!r} is not valid YAML: {problem}") from error
        *path, leaf = key.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"override {word!r}: {part!r} was given a value and is used as a section")
        node[leaf] = parsed
    return nested


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a nested mapping by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        for annotation in (field.annotation, *get_args(field.annotation)):  # also sections that may be null
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                keys += _known_keys(annotation, f"{prefix}{name}.")
        keys.append(prefix + (field.alias or name))
    return keys


def _explain(error: ValidationError) -> ConfigError:
    known = _known_keys(Settings)
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown setting {key!r}{nearest(key, known)}")
        elif item["type"] == "missing":
            lines.append(f"setting {key!r} is missing")
        elif item["type"] == "model_type":
            inside = [name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}.")]
            lines.append(f"setting {key!r} is {item['input']!r}: it is a section, with {', '.join(inside)}")
        elif item["type"] == "literal_error":
            allowed = str(item["ctx"]["expected"])
            near = nearest(str(item["input"]), re.findall(r"'([^']*)'", allowed))
            lines.append(f"setting {key!r} is {item['input']!r}: it must be {allowed}{near}")
        elif not key:
            lines.append(item["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"setting {key!r} is {item['input']!r}: {item['msg'].removeprefix('Value error, ')}")
    return ConfigError("; ".join(lines))


def validate(content: dict[str, Any]) -> Settings:
    """Check a complete mapping of settings.

    Raises:
        ConfigError: Naming every wrong key, its value and what is allowed.
    """
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        raise _explain(error) from error


def load_settings(
    dataset: str = "ml-100k",
    strategy: str = "fedhur",
    seed: int = 1,
    overrides: str | dict[str, Any] = "",
) -> Settings:
    """Compose the settings of a run: conf/base.yaml, then the data set's, then the strategy's, then overrides.

    Args:
        dataset: Name of a file in conf/dataset/.
        strategy: Name of a file in conf/strategy/.
        seed: Seed of the run: split, partition, initialisation, negatives, projections.
        overrides: Dotted settings as in :func:`parse_overrides`, or a nested mapping.

    Raises:
        ConfigError: An unknown name, key or an impossible value.
    """
    content = _read_file(conf_folder() / "base.yaml")
    content = _merge(content, _read("dataset", dataset))
    content = _merge(content, _read("strategy", strategy))
    content = _merge(content, {"seed": seed, "strategy": strategy})
    change = parse_overrides(overrides) if isinstance(overrides, str) else overrides
    for key in ("strategy", "seed"):
        if key in change:
            raise ConfigError(f"override {key}={change[key]!r}: give the {key} itself (--{key}, or the run-config key)")
    return validate(_merge(content, change))


@lru_cache(maxsize=8)
def from_json(text: str) -> Settings:
    """Settings from the JSON that a message carries (cached: every message of a run carries the same)."""
    return validate(json.loads(text))


def read_config_file(path: Path) -> Settings:
    """Settings of an earlier run from its `config.yaml`."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: it is not the output folder of a run")
    content = _read_file(path)
    return validate(content.get("settings", content))


def read_market_names(path: Path) -> list[str]:
    """Names of the markets by number from a run's `config.yaml`; empty where the data set has no markets."""
    data = _read_file(path).get("data")
    names = data.get("markets") if isinstance(data, dict) else None
    return [str(name) for name in names or []]


def settings_of_run(run_config: Mapping[str, Any]) -> Settings:
    """Settings that a Flower run config means (`dataset`, `strategy`, `seed`, `overrides`, `resume`).

    With `resume` they are those of the resumed run's config.yaml, changed by the overrides only.

    Raises:
        ConfigError: As :func:`load_settings`; a seed that is not a whole number.
    """
    overrides = str(run_config["overrides"])
    resume = str(run_config["resume"])
    if resume:
        content = read_config_file(Path(resume).expanduser() / "config.yaml").model_dump()
        return validate(_merge(content, parse_overrides(overrides)))
    seed = run_config["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"setting 'seed' is {seed!r}: it must be a whole number >= 0")
    return load_settings(str(run_config["dataset"]), str(run_config["strategy"]), seed, overrides)
