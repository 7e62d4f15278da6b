"""Recommendations on the device, from what a node learnt in a federation, and the model as a file of its own.

Nothing here needs a network or a server: everything is read from a node's `state-dir`.

    model = open_model(Path("state"))
    answer = model.recommend("196", Path("ratings.csv"), top=10)
    model.export(Path("model.safetensors"))
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import fedhur_app
from fedhur_app.config import Settings, from_json
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.item_catalogue import Catalogue
from fedhur_app.data.own_rows import Rows, as_client, match_rows, read_own, rows_key, rows_of_shard, shard_file
from fedhur_app.data.shards import Shard, UserItems, load_shard
from fedhur_app.evaluation.ranking import best_items
from fedhur_app.files import replacing, write_text
from fedhur_app.models.mf import MatrixFactorization
from fedhur_app.models.refit import refit_users
from fedhur_app.parallel import threads

if TYPE_CHECKING:
    from client_app.device_folder import DeviceFolder, DeviceRun, Membership
    from client_app.state import ClientState


@dataclass(frozen=True)
class Suggestion:
    """One item of a list.

    Attributes:
        rank: From 1 on.
        item: Its original id.
        title: What it is called, "" where nobody knows.
        score: What the model gives it; comparable within the list only.
    """

    rank: int
    item: str
    title: str
    score: float


@dataclass(frozen=True)
class Answer:
    """A user's list.

    Attributes:
        user: The user's original id.
        known: How the model knows the user: `trained`, or `folded in` (its vector was computed now, from its items).
        seen: Items that were left out because the user has them.
        items: The list, best first; empty where the user has everything.
        model: Which model ranked: strategy, round and run.
    """

    user: str
    known: str
    seen: int
    items: tuple[Suggestion, ...]
    model: str

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def open_model(state_dir: Path, run: str = "") -> "LocalModel":
    """The newest model in a node's `state-dir`.

    Args:
        state_dir: The folder.
        run: How the name of the run begins that it was learnt in; by default that of the newest.

    Raises:
        DataError: There is none that can be read.
    """
    from client_app.device_folder import DeviceFolder
    from client_app.state import StateError

    home = DeviceFolder(Path(state_dir).expanduser())
    if not home.path.is_dir():
        raise DataError(f"--state-dir {state_dir}: there is no such folder")
    damaged, others = 0, []
    for held in home.runs():
        membership = held.membership()
        if membership is None:
            continue
        if not membership.run.startswith(run):
            others.append(membership.run)
            continue
        for found in held.states.newest(membership.client, 10**9):
            if isinstance(found, StateError):
                damaged += 1
            elif "model" in found[0].arrays:
                return LocalModel(home, held, membership, found[0])
    why = f" ({damaged} damaged)" if damaged else ""
    if others:
        raise DataError(f"--run {run}: {state_dir} holds no model of it{why}; its runs are {', '.join(others)}")
    raise DataError(f"--state-dir {state_dir} holds no model{why}: it is filled when the node takes part in a run")


@dataclass(frozen=True)
class LocalModel:
    """What a node learnt.

    Attributes:
        home: Its `state-dir`.
        run: Folder of the run in which it learnt it.
        membership: What the node was in that run.
        state: Its private state.
    """

    home: "DeviceFolder"
    run: "DeviceRun"
    membership: "Membership"
    state: "ClientState"

    @cached_property
    def settings(self) -> Settings:
        """Settings of the run."""
        return from_json(self.membership.settings)

    @cached_property
    def catalogue(self) -> Catalogue | None:
        """The federation's items; None where the node never learnt their ids."""
        held = self.home.catalogue()
        return held if held and held.fingerprint == self.membership.catalogue else None

    @cached_property
    def _tested(self) -> dict[str, Tensor] | None:
        """The model that was tested at the end of the run; None where there was no test, or it is lost."""
        from client_app.algorithms.base import StaleRequestError

        tested = self.state.numbers.get("tested_round")
        nobody = UserItems(np.array([0]), np.array([], dtype=np.int64))
        shard = Shard(self.membership.client, 0, np.array([], dtype=np.int64), nobody, nobody, nobody)
        try:
            best: dict[str, Tensor] | None = self._algorithm(shard).best_model(tested) if tested else None
        except StaleRequestError:
            best = None
        return best

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The model: the one that was tested or, without a test, the present one."""
        return self.state.arrays["model"] if self._tested is None else self._tested

    @property
    def round(self) -> int:
        """Round of the model; in a run with `evaluation.selection: client` the node's own best one."""
        numbers = self.state.numbers
        if self._tested is None:
            return numbers.get("trained_round", 0)
        own = self.settings.evaluation.selection == "client" and "best" in self.state.arrays
        return numbers["best_round"] if own else numbers["tested_round"]

    # --- lists --------------------------------------------------------------------------------------------------

    def recommend(self, user: str, data_path: Path, top: int = 10) -> Answer:
        """The best items that a user does not have.

        A user whom the model was trained on has a vector of its own. For any other one is computed from its items, in
        closed form (:func:`fedhur_app.models.refit.refit_users`); models without parameters count its rows instead.

        Args:
            user: Original id; with a prepared shard the number of the user.
            data_path: The node's rows as they are now: what the user has is left out.
            top: Length of the list.

        Raises:
            DataError: Nothing is known about the user; files that cannot be read or do not belong together.
        """
        if top < 1:
            raise DataError(f"--top {top}: a list has at least one item")
        found = shard_file(data_path)
        shard = None if found is None else rows_of_shard(load_shard(found))
        data = read_own(data_path, self.membership.options) if shard is None else None
        rows = self._rows(data_path, data, shard)
        items, has = (set(), False) if data is None else self._items_of(user, data)
        place = rows.users.index(user) if user in rows.users else None
        if place is not None:
            for part in (rows.shard.train, rows.shard.valid, rows.shard.test):
                items |= set(part.of(place).tolist())
        if place is None and not has:
            raise DataError(f"nothing is known about user {user!r}: neither {data_path} nor the model has it")
        if not items:
            raise DataError(
                f"nothing is known about user {user!r}: none of its items is in the catalogue of the federation"
            )
        seen = np.array(sorted(items), dtype=np.int64)
        with threads(1):
            trained = place is not None and rows.shard.train.counts[place] > 0
            scores = self._scores(rows.shard, place) if trained and place is not None else self._folded(rows, seen)
            best = best_items(scores, seen, top)
        titles = self._titles(data)
        listed = (
            Suggestion(rank, self._id(item), titles(item), float(scores[item]))
            for rank, item in enumerate(best.tolist(), start=1)
        )
        known = "trained" if trained else "folded in"
        model = f"{self.settings.strategy}, round {self.round}, run {self.membership.run}"
        return Answer(user, known, len(seen), tuple(listed), model)

    def _rows(self, data_path: Path, data: Interactions | None, shard: Rows | None) -> Rows:
        """The rows that the model was trained on."""
        if not self.membership.rows:
            if shard is None:
                raise DataError(f"--data-path {data_path}: this model was trained on a prepared shard; give that")
            self._check_model(shard)
            return shard
        if shard is not None or data is None:
            raise DataError(f"--data-path {data_path}: this model was trained on a file of rows, not a prepared shard")
        rows = self._kept_rows()
        if rows is None:
            if self.catalogue is None:
                raise DataError(f"{self.home.path} has lost the catalogue: let the node take part in a run again")
            split, seed = self.settings.dataset.split, self.settings.seed
            if rows_key(data_path, self.membership.options, self.catalogue, split, seed) != self.membership.rows:
                raise DataError(
                    f"{self.home.path} has lost the rows of the model, and {data_path} has changed since: let the node "
                    "take part in a run again"
                )
            rows = as_client(match_rows(data, self.catalogue, split, seed), self.membership.client)
        self._check_model(rows)
        return rows

    def _kept_rows(self) -> Rows | None:
        rows = self.home.rows(self.membership.rows) if self.membership.rows else None
        return rows and as_client(rows, self.membership.client)

    def _check_model(self, rows: Rows) -> None:
        users = self.state.arrays["model"].get("users")
        if users is not None and len(users) != rows.shard.n_users:
            raise DataError(
                f"the model has {len(users)} users and the rows have {rows.shard.n_users}: they do not belong together"
            )

    def _items_of(self, user: str, data: Interactions) -> tuple[set[int], bool]:
        """Numbers of the items of a user that the catalogue has, and whether the user has any items at all."""
        if self.catalogue is None:
            raise DataError(f"{self.home.path} has lost the catalogue: let the node take part in a run again")
        own = data.items[data.user_ids[data.users] == user]
        numbers = self.catalogue.numbers(data.item_ids[own].tolist())
        return set(numbers[numbers >= 0].tolist()), len(own) > 0

    def _algorithm(self, shard: Shard) -> Any:
        from client_app.algorithms import client_algorithm

        return client_algorithm(self.settings.algorithm)(
            self.settings, shard, self.state.copy(), self.state.numbers["trained_round"], torch.device("cpu")
        )

    def _scores(self, shard: Shard, user: int) -> Tensor:
        """Scores of all items (I,) for a local user, as the app ranks them."""
        scores: Tensor = self._algorithm(shard).scores(self.parameters)(torch.tensor([user]))[0]
        return scores.cpu()

    def _folded(self, rows: Rows, items: np.ndarray) -> Tensor:
        """Scores (I,) for a user who has these items and no vector."""
        shard, parameters = rows.shard, self.parameters
        if "items" not in parameters:
            # The model is made of rows: so is what it says about one user more.
            return self._scores(_with_user(shard, items), shard.n_users)
        vectors = self._algorithm(shard).build(parameters).item_vectors()
        if vectors is None:
            raise DataError(
                f"this model (model.kind {self.settings.model.kind}) knows only the users that it was trained on: its "
                "scores are no dot products, from which a vector could be computed"
            )
        refit = self.settings.user_refit
        one = UserItems(np.array([0, len(items)]), items)
        users = refit_users(vectors, one, refit.unobserved_weight, refit.l2)
        return MatrixFactorization(users, vectors).scores(torch.tensor([0]))[0]

    def _id(self, item: int) -> str:
        return self.catalogue.ids[item] if self.catalogue else str(item)

    def _titles(self, data: Interactions | None) -> Any:
        """Title by item number: the federation's, else the node's own."""
        own: dict[str, str] = {}
        if data is not None and data.item_titles is not None:
            own = dict(zip(data.item_ids.tolist(), data.item_titles.tolist(), strict=True))
        return lambda item: (self.catalogue.title(item) if self.catalogue else "") or own.get(self._id(item), "")

    # --- export -------------------------------------------------------------------------------------------------

    def export(self, path: Path, items_only: bool = False) -> Path:
        """Write the model in the form of safetensors, and a card about it beside it.

        The file's metadata name the run, the round, the kind of model and, as JSON, the ids of rows: `item_ids` (if
        known) and `user_ids`.

        Args:
            path: The file, such as model.safetensors; the card is the same with .md.
            items_only: Leave out everything that belongs to users.

        Returns:
            The card.

        Raises:
            DataError: The model has no parameters.
        """
        from safetensors.torch import save_file

        rows = self._kept_rows()
        kept = {
            name: table.contiguous()
            for name, table in self.parameters.items()
            if not (items_only and _is_private(name))
        }
        if not kept:
            raise DataError(
                f"{self.settings.algorithm} has no parameters to export: its lists are computed from rows, see "
                "`fedhur recommend`"
            )
        about = {
            "format": "pt",
            "fedhur": fedhur_app.__version__,
            "strategy": self.settings.strategy,
            "model": self.settings.model.model_dump_json(),
            "run": self.membership.run,
            "round": str(self.round),
            "node": self.membership.name,
        }
        if self.catalogue:
            about["item_ids"] = json.dumps(self.catalogue.ids, ensure_ascii=False)
        if rows is not None and not items_only:
            about["user_ids"] = json.dumps(rows.users, ensure_ascii=False)
        with replacing(path) as temporary:
            save_file(kept, temporary, metadata=about)
        card = path.with_suffix(".md")
        write_text(card, self.card(kept, rows))
        return card

    def card(self, tables: dict[str, Tensor], rows: Rows | None) -> str:
        """What the model was trained on, how good it is, what left the device: Markdown without any row."""
        settings, report = self.settings, self.run.report()
        lines = [
            f"# Model of node {self.membership.name}",
            "",
            f"Trained by FedHUR {fedhur_app.__version__}, strategy `{settings.strategy}` (algorithm "
            f"`{settings.algorithm}`, `model.kind: {settings.model.kind}`, width {settings.model.dim}, seed "
            f"{settings.seed}), run `{self.membership.run}`, as client {self.membership.client} of "
            f"{self.membership.clients}. The model is that of round {self.round}.",
            "",
            "## Trained on",
            "",
        ]
        if rows is None:
            lines.append("- a prepared shard, which lies elsewhere")
        else:
            train, valid, test = (len(part) for part in (rows.shard.train, rows.shard.valid, rows.shard.test))
            lines += [
                f"- {rows.shard.n_users} users of this node, {train} training interactions ({valid} validate, {test} "
                f"test; split `{settings.dataset.split.kind}`)",
                f"- a catalogue of {rows.shard.n_items} items (`{self.membership.catalogue}`)",
                f"- left out: {rows.unknown_interactions} interactions with {rows.unknown_items} items that are not in "
                "the catalogue",
            ]
        lines += ["", "## Quality", "", "Of this node's own users only.", ""]
        for split, name in (("valid", "validation"), ("test", "test")):
            if split in report:
                told = {key: value for key, value in report[split].items() if key not in ("users", "round")}
                values = ", ".join(f"{key} {value:.4f}" for key, value in told.items()) or "no user to measure"
                lines.append(f"- {name}, round {report[split]['round']}, {report[split]['users']} users: {values}")
        lines += [
            "",
            "## What left the device",
            "",
            "User vectors, interactions and ids of users and items never did. Bytes by record, all messages of the run "
            "together (docs/protocol.md says what each record is):",
            "",
            "| stage | messages | bytes |",
            "|---|---|---|",
        ]
        for stage, sent in report.get("sent", {}).items():
            sizes = ", ".join(f"`{name}` {size}" for name, size in sent["bytes"].items())
            lines.append(f"| `{stage}` | {sent['messages']} | {sizes or 'nothing'} |")
        lines += ["", "## In the file", "", "| tensor | shape | |", "|---|---|---|"]
        for name, table in tables.items():
            private = "private" if _is_private(name) else ""
            lines.append(f"| `{name}` | {' x '.join(map(str, table.shape))} | {private} |")
        if any(map(_is_private, tables)):
            lines += [
                "",
                "Private tensors never left the device: they say what its users like. `--items-only` omits them.",
            ]
        return "\n".join(lines) + "\n"


def _is_private(name: str) -> bool:
    """Whether a parameter belongs to users, or is an item table that a strategy keeps on the device (FedRAP)."""
    return name.startswith(("user", "private"))


def _with_user(shard: Shard, items: np.ndarray) -> Shard:
    """The shard with one user more, who has these items."""

    def longer(part: UserItems, more: np.ndarray) -> UserItems:
        return UserItems(np.append(part.indptr, part.indptr[-1] + len(more)), np.concatenate([part.items, more]))

    nothing = items[:0]
    users = np.append(shard.users, shard.users.max(initial=-1) + 1)
    return replace(
        shard,
        users=users,
        train=longer(shard.train, items),
        valid=longer(shard.valid, nothing),
        test=longer(shard.test, nothing),
        markets=None,
    )
