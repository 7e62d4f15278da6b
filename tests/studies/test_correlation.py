import re
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch

from fedhur_app.config import ConfigError, load_settings
from fedhur_app.data.shards import Shard, UserItems
from fedhur_app.relations.alignment import PersonalFilter
from fedhur_app.relations.filters import group_filters, local_grams, mean_gram_eigenpairs
from fedhur_app.relations.hierarchy import Hierarchy, Level, build_hierarchy
from fedhur_app.studies import association, pair_scores
from fedhur_app.studies import correlation as study
from fedhur_app.studies.pair_gains import METRICS, PARTS, TargetUsers, item_filter, level_filter
from fedhur_app.studies.workers import correlation as worker
from tests.relations.brute import assignment, scatter, tables
from tests.running import SMALL, history, result, run

ITEMS, WIDTH, CLIENTS, USERS = 14, 3, 4, 3
K = 4


# --- gains against dense matrices -----------------------------------------------------------------------------------


def shard(client):
    rng = np.random.default_rng(client)
    rows = [rng.permutation(ITEMS)[:9] for _ in range(USERS)]
    cut = {"train": (0, 5), "valid": (5, 7), "test": (7, 9)}
    parts = {}
    for name, (first, last) in cut.items():
        own = [np.sort(row[first:last]) for row in rows]
        if name == "valid" and client == 1:
            own[0] = own[0][:0]  # a user without validation rows is no part of the mean
        parts[name] = UserItems(np.concatenate([[0], np.cumsum([len(each) for each in own])]), np.concatenate(own))
    return Shard(client, ITEMS, np.arange(USERS), **parts)


def brute_metrics(scores, seen, truth):
    """Recall, MRR, NDCG at K of one user by a plain sort."""
    ranked = [item for item in np.argsort(-scores) if item not in set(seen)][:K]
    hits = [item in set(truth) for item in ranked]
    gain = sum(1 / np.log2(rank + 2) for rank, hit in enumerate(hits) if hit)
    ideal = sum(1 / np.log2(rank + 2) for rank in range(min(K, len(truth))))
    return [sum(hits) / len(truth), 1 / (hits.index(True) + 1) if any(hits) else 0.0, gain / ideal]


def brute_gains(matrix, shard_, users, items, refit):
    """Means over a target's users with its table fitted to a dense matrix, (parts, metrics)."""
    values, vectors = np.linalg.eigh(matrix)
    table = vectors[:, -WIDTH:] * np.sqrt(np.clip(values[-WIDTH:], 0, None))
    left, _, right = np.linalg.svd(table.T @ items)
    table = table @ left @ right
    if refit.enabled:
        scaled = table * np.sqrt(ITEMS) / np.linalg.norm(table)
        rows = [scaled[shard_.train.of(user)] for user in range(USERS)]
        ridge = refit.unobserved_weight * scaled.T @ scaled + refit.l2 * np.eye(WIDTH)
        users = np.stack([np.linalg.solve(ridge + x.T @ x, x.sum(0)) for x in rows])
    scores = users @ table.T
    found = np.zeros((3, 3))
    for number, part in enumerate(PARTS):
        told = []
        for user in range(USERS):
            seen = np.concatenate([getattr(shard_, before).of(user) for before in PARTS[:number]] or [[]])
            truth = getattr(shard_, part).of(user)
            if len(truth):
                told.append(brute_metrics(scores[user], seen, truth))
        found[number] = np.mean(told, axis=0)
    return found


@pytest.mark.parametrize("refit", [True, False])
def test_gains_are_those_of_dense_filters(refit):
    settings = load_settings(
        "synthetic", "fedhur", 1, {"evaluation": {"k": K}, "user_refit": {"enabled": refit}, "model": {"dim": WIDTH}}
    )
    all_tables = tables(CLIENTS, ITEMS, WIDTH)
    hierarchy = build_hierarchy(all_tables.mean(0), (2, 3), 0)
    vectors, values = mean_gram_eigenpairs(list(all_tables), WIDTH)
    common = (vectors * values) @ vectors.T
    targets = [1, 3]
    shards = [shard(target) for target in targets]
    users = list(torch.randn(len(targets), USERS, WIDTH, generator=torch.Generator().manual_seed(7)).double())
    measured = TargetUsers.of(settings, shards, users, [all_tables[target] for target in targets])
    grams = [torch.stack(each) for each in zip(*(local_grams(t, hierarchy) for t in all_tables), strict=True)]

    def check(filter_, matrix):
        found = measured.measure(filter_)
        assert found.shape == (len(targets), len(PARTS), len(METRICS))
        for row, target in enumerate(targets):
            expected = brute_gains(
                matrix.numpy(), shards[row], users[row].numpy(), all_tables[target].numpy(), settings.user_refit
            )
            np.testing.assert_allclose(found[row], expected, atol=1e-9)

    check(PersonalFilter(vectors, values), common)
    for index, level in enumerate(hierarchy.levels):
        a = assignment(level)
        for candidate in range(CLIENTS):
            residual = grams[index][candidate] - grams[index].mean(0)
            added = 0.5 * a @ scatter(residual, level) @ a.T
            check(level_filter(vectors, values, hierarchy, index, residual, 0.5), common + added)
    for table in all_tables:
        check(item_filter(vectors, values, table, 0.3), 0.7 * common + 0.3 * table @ table.T)


def test_a_target_without_rows_has_no_gain():
    settings = load_settings("synthetic", "fedhur", 1, {"model": {"dim": WIDTH}})
    nobody = UserItems(np.zeros(USERS + 1, dtype=int), np.zeros(0, dtype=int))
    whole = shard(0)
    without = Shard(0, ITEMS, whole.users, whole.train, nobody, whole.test)
    table = tables(1, ITEMS, WIDTH)[0]
    vectors, values = mean_gram_eigenpairs([table], WIDTH)
    found = TargetUsers.of(settings, [without], [table[:USERS]], [table]).measure(PersonalFilter(vectors, values))
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(found[0, [0, 2]]).all()


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "relation",
    [
        {},
        {"query": "left"},
        {"query": "right"},
        {"query": "local", "query_norm": "none"},
        {"filter_scale": "spectral", "client_scale": "unit"},
    ],
)
def test_scores_of_items_are_those_of_a_level_in_which_every_item_is_a_group(relation, monkeypatch):
    settings = load_settings("synthetic", "fedhur", 1, {"model": {"dim": WIDTH}, "relation": relation})
    scales = settings.relation.client_scale, settings.relation.filter_scale
    all_tables = tables(CLIENTS, ITEMS, WIDTH)
    single = Hierarchy((Level.from_labels(torch.arange(ITEMS), torch.zeros(ITEMS, dtype=torch.long)),))
    draw = pair_scores.projection
    monkeypatch.setattr(pair_scores, "projection", lambda level, width, seed, _: draw(level, width, seed, 0).double())
    filters = group_filters(all_tables, single, [1.0], *scales)

    def scorer(features):
        return features.square().sum(-1)

    expected = pair_scores.level_scores(filters, single, 0, [1, 2], settings, 5, scorer)
    found = pair_scores.item_scores(list(all_tables), [1, 2], settings, 5, scorer)
    assert set(found) == set(expected) == set(pair_scores.SCORES)
    for name, scores in found.items():
        torch.testing.assert_close(scores, expected[name], atol=1e-6, rtol=1e-6)


def test_scores_of_a_level_are_means_over_its_blocks_of_standardised_scores():
    settings = load_settings("synthetic", "fedhur", 1, {"model": {"dim": WIDTH}})
    all_tables = tables(CLIENTS, ITEMS, WIDTH).float()
    hierarchy = build_hierarchy(all_tables.mean(0), (2, 3), 0)
    filters = group_filters(all_tables, hierarchy, [1.0, 1.0])
    found = pair_scores.level_scores(filters, hierarchy, 1, [2], settings, 5, None)
    assert "corrected" not in found
    expected = np.zeros(CLIENTS)
    for block in range(len(hierarchy.levels[1].members)):
        grams = [gram.numpy().ravel() for gram in filters.grams[1][:, block]]
        cosines = [np.dot(grams[2], g) / np.linalg.norm(grams[2]) / np.linalg.norm(g) for g in grams]
        expected += (cosines - np.mean(cosines)) / np.std(cosines) / len(hierarchy.levels[1].members)
    np.testing.assert_allclose(found["similarity"][0].numpy(), expected, atol=1e-4)


# --- associations against scipy -------------------------------------------------------------------------------------


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 30)) + 100
    y = 0.5 * x + rng.normal(size=x.shape)
    y = np.round(y, 1)  # ties
    x[0, 3] = y[1, 5] = np.nan
    return x, y


def test_correlations_within_and_over_targets_are_those_of_scipy(arrays):
    from scipy import stats

    x, y = arrays
    there = ~(np.isnan(x) | np.isnan(y))
    for own, other in (
        (association.row_pearson, stats.pearsonr),
        (association.row_spearman, stats.spearmanr),
    ):
        expected = [other(a[t], b[t])[0] for a, b, t in zip(x, y, there, strict=True)]
        np.testing.assert_allclose(own(x, y), expected, atol=1e-9)
    for own, other in (
        (association.pooled_pearson, stats.pearsonr),
        (association.pooled_spearman, stats.spearmanr),
    ):
        assert own(x, y).value == pytest.approx(other(x[there], y[there])[0], abs=1e-9)
        assert own(x, y).low < own(x, y).value < own(x, y).high


def test_bootstrap_interval_is_that_of_scipy(arrays):
    from scipy import stats

    values = association.row_pearson(*arrays)
    own = association.mean_interval(values)
    other = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=1).confidence_interval
    assert own.value == pytest.approx(values.mean())
    assert own.low == pytest.approx(other.low, abs=0.15 * (other.high - other.low))
    assert own.high == pytest.approx(other.high, abs=0.15 * (other.high - other.low))
    assert own == association.mean_interval(values)
    assert own != association.mean_interval(values, seed=1)


def test_bootstrap_of_all_pairs_draws_whole_targets():
    # Within every target nothing correlates: all of it lies between two targets, and a draw may take one of them only.
    x = np.array([[0.0, 1.0, 0.0, 1.0], [10.0, 11.0, 10.0, 11.0]])
    y = np.array([[0.0, 0.0, 1.0, 1.0], [10.0, 10.0, 11.0, 11.0]])
    found = association.pooled_pearson(x, y)
    assert found.value > 0.98
    assert found.low == pytest.approx(0, abs=1e-9)


def test_what_cannot_be_told_is_left_out():
    x, y = np.array([[1.0, 2.0], [3.0, 3.0], [np.nan, 1.0]]), np.array([[5.0, 7.0], [1.0, 2.0], [1.0, 2.0]])
    np.testing.assert_array_equal(association.row_pearson(x, y), [1.0, np.nan, np.nan])
    assert association.mean_interval(association.row_pearson(x, y)).n == 1
    assert np.isnan(association.mean_interval(np.array([np.nan])).value)
    assert np.isnan(association.mean_interval(np.array([0.5])).low)


def test_shares_that_hurt():
    scores = np.array([[5.0, 4, 3, 2, 1], [1.0, 2, 3, 4, np.nan]])
    gains = np.array([[-1.0, 1, 0, -2, 3], [-1.0, -1, -1, 0.5, -9]])
    assert association.hurting(gains).tolist() == [0.4, 0.8]
    assert association.top_hurting(scores, gains, 0.4).tolist() == [0.5, 0.5]


# --- report ---------------------------------------------------------------------------------------------------------


def planted(folder, seed):
    """Files of a run in which the energy is the gain, and similarity its opposite; a target's own row says nonsense."""
    rng = np.random.default_rng(seed)
    shown = ["test.ndcg", "valid.ndcg", "train.mrr"]
    rows = []
    for round_ in (1, 3):
        for level in ("1", "item"):
            for target in (0, 4):
                for candidate in range(20):
                    gain = rng.normal() if candidate != target else -50.0
                    scores = [gain if candidate != target else 50.0, "", rng.normal(), -gain, rng.normal()]
                    rows.append([round_, level, target, candidate, *scores, *[gain] * len(shown)])
    head = [*(name for name in worker.HEADER if not name.startswith("gain.")), *(f"gain.{name}" for name in shown)]
    text = "\n".join([",".join(head), *(",".join(map(str, row)) for row in rows)])
    folder.mkdir(parents=True)
    (folder / "pairs.csv").write_text(text + "\n")
    return SimpleNamespace(folder=folder)


def test_a_score_that_is_the_gain_has_correlation_one_and_finds_nobody_who_hurts(tmp_path):
    runs = [planted(tmp_path / "runs" / "id" / "default" / f"seed-{seed}", seed) for seed in (1, 2)]
    text = study.report(runs, tmp_path)
    frame = pl.read_csv(tmp_path / "correlation.csv", schema_overrides={"round": pl.String}, infer_schema_length=None)
    same = frame.filter(pl.col("score_level") == pl.col("gain_level"))
    energy = same.filter(pl.col("score") == "energy")
    assert set(energy["round"]) == {"1", "3", "all"}
    for name in ("pearson", "spearman", "pooled_pearson", "pooled_spearman"):
        for end in ("", "_low", "_high"):
            np.testing.assert_allclose(energy[name + end], 1.0, atol=1e-9)
            if end == "":
                np.testing.assert_allclose(same.filter(pl.col("score") == "similarity")[name], -1.0, atol=1e-9)
    assert energy["top_hurts"].to_list() == [0.0] * len(energy)
    assert energy["all_hurt"].min() > 0.2
    assert set(energy["targets"]) == {4}
    assert "corrected" not in set(frame["score"])
    assert abs(frame.filter(score="energy", score_level="1", gain_level="item")["pearson"].mean()) < 0.5
    assert re.search(r"test NDCG +\| utility +\| +\.3224 +\| +\.3376", text)  # the paper's
    for name in ("correlations", "gain-by-score"):
        assert (tmp_path / f"{name}-id-default.png").stat().st_size > 10_000


# --- worker ---------------------------------------------------------------------------------------------------------


def words(output, *options, strategy="fedhur"):
    changes = f"{SMALL} hierarchy.branching=[3,2] server.threads=1"
    return [
        *("--dataset", "synthetic", "--strategy", strategy, "--seed", "2", "--output", str(output)),
        *(word for change in changes.split() for word in ("--set", change)),
        *("--rounds", "1,2", "--targets", "2", *options),
    ]


def test_the_worker_tries_all_candidates_and_leaves_the_run_as_it_is(tmp_path):
    worker.main(words(tmp_path / "looked"))
    run(tmp_path / "plain", "fedhur", "hierarchy.branching=[3,2] server.threads=1 rounds=2 min_rounds=2", seed=2)
    assert history(tmp_path / "looked") == history(tmp_path / "plain")
    told = result(tmp_path / "looked")
    assert told["test"] == result(tmp_path / "plain")["test"]
    assert told["targets"] == worker.sample_targets(range(6), 2, 2)
    frame = pl.read_csv(
        tmp_path / "looked" / "pairs.csv", schema_overrides={"level": pl.String}, infer_schema_length=None
    )
    pairs = frame.select("round", "level", "target", "candidate").rows()
    assert sorted(pairs) == sorted(
        (round_, level, target, candidate)
        for round_ in (1, 2)
        for level in ("1", "2", "item")
        for target in told["targets"]
        for candidate in range(6)
    )
    assert frame.filter(round=1)["score.corrected"].is_null().all()
    assert frame.filter(round=2).null_count().sum_horizontal().item() == 0
    assert frame["gain.test.ndcg"].abs().max() > 0
    base = pl.read_csv(tmp_path / "looked" / "base.csv")
    assert len(base) == 2 * 2 * 9
    assert base["value"].is_between(0, 1).all()


@pytest.mark.parametrize(
    ("strategy", "options", "said"), [("fedavg", [], "strategy fedavg"), ("fedhur", ["--rounds", "0"], "--rounds 0")]
)
def test_what_cannot_be_tried_is_refused_and_noted(tmp_path, strategy, options, said):
    with pytest.raises(ConfigError, match=said):
        worker.main(words(tmp_path / "run", *options, strategy=strategy))
    assert result(tmp_path / "run")["status"] == "failed"
