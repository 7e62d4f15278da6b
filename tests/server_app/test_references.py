"""Centralised references, recommenders without training, metrics of single users, leaks."""

import numpy as np
import pytest

from fedhur_app.config import ConfigError, load_settings
from fedhur_app.data.experiment import load_interactions_of, number_of_clients, prepare_data
from fedhur_app.data.shards import load_shard, shard_path
from fedhur_app.data.split import split_labels
from fedhur_app.evaluation.ranking import METRICS, metric_label
from tests.running import FEDERATED, SMALL, STRATEGIES, history, killed_and_resumed, numbers, result, run

CENTRALISED = [name for name in STRATEGIES if name not in FEDERATED]


def test_the_centralised_references_are_these():
    assert CENTRALISED == ["central", "ease", "gfcf", "joint", "popularity"]


@pytest.mark.parametrize("strategy", CENTRALISED)
def test_a_centralised_run_has_one_client_and_the_test_rows_of_the_federated_one(strategy, tmp_path):
    run(tmp_path / "together", strategy)
    run(tmp_path / "apart", "local", "rounds=1 min_rounds=1")
    assert result(tmp_path / "together")["users_evaluated"] == result(tmp_path / "apart")["users_evaluated"]
    together, apart = (load_settings("synthetic", name, overrides=SMALL) for name in (strategy, "local"))
    assert (number_of_clients(together), number_of_clients(apart)) == (1, 6)
    whole = load_shard(shard_path(prepare_data(together).folder, 0))
    shards = [load_shard(shard_path(prepare_data(apart).folder, k)) for k in range(6)]
    for part in ("train", "valid", "test"):
        pooled = [getattr(shard, part).of(user).tolist() for shard in shards for user in range(shard.n_users)]
        owners = np.concatenate([shard.users for shard in shards])
        alone = [getattr(whole, part).of(int(np.flatnonzero(whole.users == user)[0])).tolist() for user in owners]
        assert pooled == alone


def test_a_centralised_strategy_refuses_data_that_stay_on_devices():
    with pytest.raises(ConfigError, match="needs all data in one place"):
        load_settings("own-data", "ease")


def test_popularity_is_a_brute_force_count(tmp_path):
    run(tmp_path, "popularity")
    settings = load_settings("synthetic", "popularity", overrides=SMALL)
    data = load_interactions_of(settings)
    labels = split_labels(data, settings.dataset.split.kind, settings.dataset.split.ratios, settings.seed)
    counts = np.bincount(data.items[labels == 0], minlength=data.n_items)
    hits, positions = [], 0
    for user in range(data.n_users):
        own = data.users == user
        truth = set(data.items[own & (labels == 2)].tolist())
        unseen = np.setdiff1d(np.arange(data.n_items), data.items[own & (labels < 2)])
        if truth:
            # With ties at the tenth place any order counts: bounds from the best and the worst.
            ordered = counts[unseen]
            cut = np.sort(ordered)[-10]
            sure = sum(counts[item] > cut for item in truth)
            maybe = sum(counts[item] >= cut for item in truth)
            hits.append((sure / len(truth), min(maybe, 10) / len(truth)))
            positions += 1
    low, high = np.mean(hits, axis=0)
    assert positions == result(tmp_path)["users_evaluated"]
    assert low <= result(tmp_path)["test"]["recall@10"] <= high
    assert high - low < 0.25, "the bounds must say something"


def test_fedcia_without_parameters_lies_between_alone_and_together(tmp_path):
    values = {}
    for name in ("gfcf-local", "fedcia_gfcf", "gfcf"):
        run(tmp_path / name, name, "dataset.synthetic.users=300 dataset.clients.number=30")
        values[name] = result(tmp_path / name)["test"]["ndcg@10"]
    assert values["gfcf-local"] < values["fedcia_gfcf"] < values["gfcf"] + 0.02
    assert history(tmp_path / "fedcia_gfcf")[0]["filter_columns"] <= 80


def test_clients_without_the_mean_filter_rank_with_their_own(tmp_path):
    run(tmp_path / "some", "fedcia_gfcf", "fraction_train=0.3")
    run(tmp_path / "all", "fedcia_gfcf")
    run(tmp_path / "alone", "gfcf-local")
    some, everybody, alone = (result(tmp_path / name) for name in ("some", "all", "alone"))
    assert some["users_evaluated"] == everybody["users_evaluated"]
    assert some["absent_at_test"] == {}
    assert some["test"] not in (everybody["test"], alone["test"])


@pytest.mark.parametrize("strategy", ["fedavg", "gfcf"])
def test_metrics_of_single_users_pool_to_those_of_the_run(strategy, tmp_path):
    run(tmp_path, strategy, "evaluation.per_user=true rounds=1 min_rounds=1")
    outcome = result(tmp_path)
    with np.load(tmp_path / "users.npz") as stored:
        users = dict(stored)
    assert len(users["user"]) == outcome["users_evaluated"]
    assert (np.diff(users["user"]) > 0).all()
    assert set(users) == {"user", "client", "interactions", *METRICS}
    for name in METRICS:
        assert users[name].mean() == pytest.approx(outcome["test"][metric_label(name, 10)], abs=1e-12)


def test_without_being_asked_no_client_sends_metrics_of_single_users(tmp_path):
    run(tmp_path, "fedavg", "rounds=1 min_rounds=1")
    assert not (tmp_path / "users.npz").exists()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nobody_beats_chance_on_data_without_structure(strategy, tmp_path):
    """Leak test: where users pick items at random there is nothing to learn but the rows to be found."""
    run(
        tmp_path,
        strategy,
        "rounds=2 min_rounds=1 dataset.synthetic.users=240 dataset.synthetic.items=60 "
        "dataset.synthetic.branching=[1] dataset.synthetic.popularity_skew=0.0 dataset.clients.number=6",
    )
    # About 60 - 10 items are left to rank; 240 users with 2.4 test items: a standard error of .016.
    assert result(tmp_path)["test"]["recall@10"] == pytest.approx(10 / 50, abs=0.065)


@pytest.mark.parametrize(
    "strategy", ["pfedrec", "fedrap", "gpfedrec", "fedca", "cofedrec", "fedncf", "fedcia_gfcf", "lightgcn-fedcia"]
)
def test_half_of_the_clients_a_kill_and_a_resume(strategy, tmp_path):
    options = "rounds=4 min_rounds=4 fraction_train=0.5"
    run(tmp_path / "whole", strategy, options)
    killed_and_resumed(tmp_path / "killed", strategy, options, 3)
    assert history(tmp_path / "killed") == history(tmp_path / "whole")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


@pytest.mark.parametrize(
    ("strategy", "overrides", "message"),
    [
        ("fedhur", "model.kind=ncf", "model.kind mf or lightgcn, not ncf"),
        ("fedncf", "train.loss=mse", "has bpr and bce only"),
        ("fedncf", "user_refit.enabled=true", "dot products"),
        ("lightgcn-fedavg", "model.user_bias=true", "belongs to model.kind mf"),
        ("pfedrec", "train.loss=elementwise", "no meaning for train.loss elementwise"),
        ("pfedrec", "fedavg.row_masked=true", "works with algorithm fedavg only"),
        ("fedcia_gfcf", "privacy.laplace_scale=1.0", "nothing would be protected"),
        ("gfcf", "user_refit.enabled=true", "needs an item table"),
        ("fedavg", "train.lr_decay=1e-12", "leaves no learning rate"),
    ],
)
def test_models_and_settings_that_do_not_go_together_are_refused(strategy, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_settings("synthetic", strategy, overrides=overrides)
