"""Clients of every odd kind finish a run: field cases 6, 9, 12, 14 and 20."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from client_app.state import ClientState
from fedhur_app import runtime
from fedhur_app.config import load_settings
from fedhur_app.data import experiment
from fedhur_app.data.experiment import prepare_data
from fedhur_app.data.interactions import from_raw
from fedhur_app.data.shards import load_shard, shard_path
from fedhur_app.data.split import split_labels
from fedhur_app.models.factory import initial_parameters
from fedhur_app.protocol import Content
from fedhur_app.seeding import torch_generator
from server_app.strategies.base import Fleet
from server_app.strategies.fedavg import Server as FedAvg
from tests.running import FEDERATED, SMALL, history, result, run


@pytest.fixture
def odd_data(monkeypatch):
    """Eight users: one who saw everything, ones with 1, 2 and 3 rows, four ordinary ones; an item seen by one only."""
    items = 12
    rows = [(0, item) for item in range(items)] + [(1, 3), (2, 1), (2, 5), (3, 0), (3, 2), (3, 4)]
    generator = np.random.default_rng(0)
    for user in range(4, 8):
        rows += [(user, int(item)) for item in generator.choice(items - 1, 6, replace=False)]
    users, items_of = np.array(rows).T
    data = from_raw("synthetic", users, items_of, timestamps=np.arange(len(rows)))
    monkeypatch.setattr(experiment, "load_interactions_of", lambda settings: data)
    return data


@pytest.mark.parametrize(
    ("strategy", "split"),
    [
        *((strategy, "random") for strategy in FEDERATED),
        *itertools.product(["local", "fedavg", "fedhur"], ["user-ratio", "leave-one-out", "temporal"]),
    ],
)
def test_one_user_a_client_with_none_one_and_all_items(strategy, split, odd_data, tmp_path):
    run(
        tmp_path,
        strategy,
        f"rounds=2 min_rounds=1 dataset.split.kind={split} dataset.clients.kind=one-user dataset.clients.number=8",
    )
    outcome = result(tmp_path)
    assert outcome["status"] == "completed"
    assert 0 < outcome["users_evaluated"] <= 8
    for line in history(tmp_path):
        assert line["clients"] == 8
        assert np.isfinite(line["loss"])


def test_a_user_who_has_seen_everything_is_skipped_and_counted(odd_data, tmp_path):
    run(
        tmp_path,
        "fedavg",
        "rounds=1 min_rounds=1 dataset.split.ratios=[1.0,0.0,0.0] dataset.clients.kind=one-user "
        "dataset.clients.number=8",
    )
    line = history(tmp_path)[0]
    assert line["skipped_users"] == 1
    assert line["examples"] == len(odd_data) - 12


def test_without_any_validation_item_the_last_model_counts(odd_data, tmp_path):
    run(tmp_path, "fedhur", "rounds=3 min_rounds=1 dataset.split.ratios=[0.8,0.0,0.2] dataset.clients.number=2")
    outcome = result(tmp_path)
    assert outcome["rounds"] == outcome["best_round"] == 3
    assert set(outcome["validation"].values()) == {None}
    assert outcome["test"]["ndcg@10"] is not None


def test_without_any_test_item_the_result_is_null_not_zero(odd_data, tmp_path):
    run(tmp_path, "fedavg", "rounds=1 min_rounds=1 dataset.split.ratios=[0.8,0.2,0.0] dataset.clients.number=2")
    assert result(tmp_path)["users_evaluated"] == 0
    assert set(result(tmp_path)["test"].values()) == {None}


AS_PUBLISHED = "rounds=2 min_rounds=1 dataset.split.kind=published dataset.clients.kind=published"


def giant_and_tiny():
    """Client 0 with 12 users of 7 rows beside clients of one user each.

    Their users have one training row (client 1), one and one to test (2), all items in training (3), two and one to
    validate (4), and no row at all (5).
    """
    items = 12
    generator = np.random.default_rng(0)
    rows = []
    for user in range(12):
        rows += [
            (user, int(item), label)
            for item, label in zip(generator.permutation(items), (0, 0, 0, 0, 0, 1, 2), strict=False)
        ]
    rows += [(12, 3, 0), (13, 1, 0), (13, 5, 2)] + [(14, item, 0) for item in range(items)]
    rows += [(15, 0, 0), (15, 2, 0), (15, 7, 1)]
    users, items_of, labels = np.array(rows).T
    data = from_raw("synthetic", users, items_of, labels=labels)
    return replace(data, user_ids=np.arange(17).astype(str), owner=np.array([0] * 12 + [1, 2, 3, 4, 5]))


def use(monkeypatch, data):
    monkeypatch.setattr(experiment, "load_interactions_of", lambda settings: data)


def finite_states(grid):
    """No client ends with a number that is not finite."""
    for context in grid.contexts.values():
        for tables in ClientState.from_context(context).arrays.values():
            assert all(bool(torch.isfinite(table).all()) for table in tables.values() if table.is_floating_point())


@pytest.mark.parametrize("strategy", ["fedhur", "fedcia", "fedavg", "fedrap", "gpfedrec", "lightgcn-fedhur"])
def test_a_giant_client_beside_clients_with_none_one_and_two_interactions(strategy, tmp_path, monkeypatch):
    use(monkeypatch, giant_and_tiny())
    finite_states(run(tmp_path, strategy, AS_PUBLISHED))
    outcome = result(tmp_path)
    # Twelve users of the giant and the one of client 2 have something to test.
    assert (outcome["status"], outcome["users_evaluated"]) == ("completed", 13)
    assert all(0 <= value <= 1 for value in outcome["test"].values())
    for line in history(tmp_path):
        # 12 x 5 rows of the giant, 1, 1 and 2; the user who has seen everything cannot train and is counted.
        assert (line["clients"], line["examples"], line["skipped_users"]) == (6, 64, 1)
        assert np.isfinite(line["loss"])


@pytest.mark.parametrize("strategy", ["fedhur", "fedcia", "fedavg", "fedrap", "fedca"])
def test_a_client_without_rows_changes_nothing_for_the_others(strategy, tmp_path, monkeypatch):
    data = giant_and_tiny()
    outcomes = []
    for name, users in (("with", 17), ("without", 16)):
        use(monkeypatch, replace(data, user_ids=data.user_ids[:users], owner=data.owner[:users]))
        run(tmp_path / name, strategy, AS_PUBLISHED)
        outcome = result(tmp_path / name)
        losses = [line["loss"] for line in history(tmp_path / name)]
        outcomes.append((outcome["test"], outcome["validation"], outcome["users_evaluated"], losses))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("strategy", ["fedhur", "fedavg"])
def test_nobody_has_anything_to_train_on(strategy, tmp_path, monkeypatch):
    data = giant_and_tiny()
    use(monkeypatch, replace(data, labels=np.full(len(data), 2, dtype=np.int8)))
    grid = run(tmp_path, strategy, AS_PUBLISHED)
    finite_states(grid)
    outcome = result(tmp_path)
    assert (outcome["status"], outcome["users_evaluated"]) == ("completed", 16)
    for line in history(tmp_path):
        assert (line["examples"], line["loss"]) == (0, 0.0)
    if strategy == "fedavg":
        # Weights of zero only: the first table, the same at all clients, stays.
        settings = load_settings("synthetic", "fedavg", overrides=f"{SMALL} {AS_PUBLISHED}")
        draws = [torch_generator(settings.seed, f"init-{what}") for what in ("users", "items", "network")]
        first = initial_parameters(settings.model, 1, data.n_items, *draws)["items"]
        for context in grid.contexts.values():
            assert torch.equal(ClientState.from_context(context).arrays["model"]["items"], first)


@pytest.mark.parametrize("kind", ["temporal-global", "dirichlet"])
def test_users_without_training_rows_are_tested_like_all_others(kind, odd_data, tmp_path):
    change = "dataset.split.kind=temporal-global" if kind == "temporal-global" else "dataset.clients.kind=dirichlet"
    run(
        tmp_path,
        "fedavg",
        f"rounds=1 min_rounds=1 {change} dataset.clients.number=3 dataset.split.ratios=[0.5,0.1,0.4]",
    )
    settings = load_settings("synthetic", "fedavg", overrides=f"{change} dataset.split.ratios=[0.5,0.1,0.4]")
    labels = split_labels(odd_data, settings.dataset.split.kind, settings.dataset.split.ratios)
    tested = np.unique(odd_data.users[labels == 2])
    assert result(tmp_path)["users_evaluated"] == len(tested)
    if kind == "temporal-global":
        assert len(np.setdiff1d(tested, odd_data.users[labels == 0])) > 0


def reply(examples, value):
    return Content({"examples": examples}, {"table": {"items": torch.full((2, 3), value)}})


def fedavg(weighting="examples"):
    settings = load_settings("synthetic", "fedavg", overrides=f"fedavg.weighting={weighting}")
    return FedAvg(settings, Fleet({0: 0, 1: 1, 2: 2}, 2, dict.fromkeys(range(3), 1)))


def test_fedavg_weighs_by_examples_and_ignores_weights_of_zero():
    server = fedavg()
    server.aggregate_items(1, {0: reply(1, 1.0), 1: reply(3, 5.0), 2: reply(0, 1e30)})
    assert torch.equal(server.table["items"], torch.full((2, 3), 4.0))
    uniform = fedavg("uniform")
    uniform.aggregate_items(1, {0: reply(1, 1.0), 1: reply(3, 5.0), 2: reply(0, 1e30)})
    assert torch.equal(uniform.table["items"], torch.full((2, 3), 3.0))


def test_fedavg_with_weights_of_zero_only_keeps_the_old_model():
    server = fedavg()
    server.aggregate_items(1, {0: reply(2, 7.0)})
    server.aggregate_items(2, {0: reply(0, 1.0), 1: reply(0, 2.0)})
    assert torch.equal(server.table["items"], torch.full((2, 3), 7.0))


def test_fedavg_gives_a_client_that_missed_the_average_the_table_with_the_call_to_train():
    server = fedavg()
    server.aggregate_items(1, {0: reply(1, 1.0), 1: reply(1, 3.0)})
    server.aggregate_personalize(1, {0: Content()})
    contents = server.configure_items(2, [0, 1, 2])
    assert "table" not in contents[0].arrays
    for client in (1, 2):
        assert torch.equal(contents[client].record("table")["items"], torch.full((2, 3), 2.0))


def user_rows(context):
    """Bytes of every row of the client's private user tables."""
    model = ClientState.from_context(context).arrays.get("model", {})
    tables = [table for name, table in model.items() if name.startswith("user") and table.ndim == 2]
    return [row.numpy().tobytes() for table in tables for row in table if row.any()]


@pytest.mark.parametrize("strategy", FEDERATED)
def test_no_message_holds_a_user_vector_or_a_list_of_items(strategy, tmp_path, monkeypatch):
    """Field case 20: what leaves a client is searched for its user vectors, item lists and user numbers."""
    replies = []
    answer = runtime.LocalGrid._answer

    def spy(grid, message, context, fault):
        reply = answer(grid, message, context, fault)
        for name, record in reply.content.array_records.items():
            for array in record.values():
                replies.append((name, array.numpy(), context))
        return reply

    monkeypatch.setattr(runtime.LocalGrid, "_answer", spy)
    grid = run(tmp_path, strategy, "rounds=2 min_rounds=1")
    assert (load_settings("synthetic", strategy).algorithm in ("local", "gfcf")) == (not replies)
    allowed = {"table", "queries", "basis", "factors", "difference"}
    settings = load_settings("synthetic", strategy, overrides=SMALL)
    for name, array, context in replies:
        assert name in allowed
        held = array.tobytes()
        assert not any(vector in held for vector in user_rows(context))
        if name == "difference" and array.dtype.kind == "i":
            # FeCoSR names the items it trained on: those of its users among negatives, most of all other items here.
            shard = load_shard(shard_path(prepare_data(settings).folder, context.node_config["partition-id"]))
            others = np.setdiff1d(np.arange(shard.n_items), shard.train.items)
            assert np.isin(others, array).mean() > 0.5
        else:
            assert array.dtype.kind == "f"
    server_files = [path for path in tmp_path.rglob("*") if path.is_file() and "clients" not in path.parts]
    assert {path.name for path in server_files} == {"config.yaml", "history.jsonl", "result.json", "server.npz"}
    vectors = [vector for context in grid.contexts.values() for vector in user_rows(context)]
    for path in server_files:
        content = path.read_bytes()
        assert not any(vector in content for vector in vectors)
