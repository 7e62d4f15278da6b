import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedhur_app.evaluation.ranking import RankSums, rank_sums, rank_users
from fedhur_app.models.mf import MatrixFactorization
from fedhur_app.models.negatives import NegativeSampler
from fedhur_app.models.training import TrainingOptions, train_locally
from tests.models.helpers import generator, user_items

METRICS = ["recall", "precision", "f1", "mrr", "ndcg", "hit"]  # with an @k


def nothing(n_users):
    return user_items([[]] * n_users)


def table_scores(scores):
    return lambda users: torch.as_tensor(scores, dtype=torch.float64)[users]


def scores_of_list(ranking, n_items):
    """Scores by which the items of ``ranking`` come first, in that order."""
    scores = np.zeros(n_items)
    scores[ranking] = np.arange(len(ranking), 0, -1)
    return table_scores(scores[None])


def random_data(n_users=60, n_items=80, seed=0):
    rng = np.random.default_rng(seed)
    seen, truth = [], []
    for user in range(n_users):
        n_seen, n_truth = rng.integers(0, 30), 0 if user % 7 == 3 else rng.integers(1, 25)
        items = rng.permutation(n_items)
        seen.append(items[:n_seen])
        truth.append(items[n_seen : n_seen + n_truth])
    return user_items(seen), user_items(truth), rng.normal(size=(n_users, n_items))


def test_one_hit_of_three_in_a_list_of_two():
    # truth {a, b, c}, list [a, x], k = 2
    means = rank_sums(scores_of_list([0, 3], 6), nothing(1), user_items([{0, 1, 2}]), 2, n_items=6).means()
    assert means["ndcg@2"] == pytest.approx(1 / (1 + 1 / math.log2(3)), rel=1e-12)
    assert means["ndcg@2"] == pytest.approx(0.6131, abs=5e-5)
    assert means["recall@2"] == pytest.approx(1 / 3)
    assert means["precision@2"] == pytest.approx(1 / 2)
    assert means["f1@2"] == pytest.approx(2 / (2 + 3))
    assert (means["mrr@2"], means["hit@2"]) == (1.0, 1.0)


@pytest.mark.parametrize("k", [4, 10])
def test_truth_at_rank_four(k):
    # item numbers are far from rank order: a metric that walks through a set of ids would fail
    scores = scores_of_list([900, 7, 6, 5], 1000)
    means = rank_sums(scores, nothing(1), user_items([{5}]), k, n_items=1000).means()
    assert means[f"ndcg@{k}"] == pytest.approx(1 / math.log2(5), rel=1e-12)
    assert means[f"ndcg@{k}"] == pytest.approx(0.4307, abs=5e-5)
    assert means[f"mrr@{k}"] == 0.25
    assert rank_sums(scores, nothing(1), user_items([{5}]), 3, n_items=1000).means()["mrr@3"] == 0.0


def test_the_ideal_has_at_most_k_items():
    means = rank_sums(scores_of_list([0, 1], 9), nothing(1), user_items([range(5)]), 2, n_items=9).means()
    assert means["ndcg@2"] == 1.0
    assert means["recall@2"] == pytest.approx(2 / 5)


def test_f1_is_the_harmonic_mean_of_the_means():
    # user 0: precision 1, recall 1/2; user 1: precision 0, recall 0
    scores = table_scores([[2.0, 1.0, 0.0, 0.0, 0.0]] * 2)
    sums = rank_sums(scores, nothing(2), user_items([{0, 1, 3, 4}, {3}]), 2, n_items=5)
    assert sums.means()["f1@2"] == pytest.approx(2 * 0.5 * 0.25 / 0.75)


def test_seen_items_of_all_splits_are_left_out_of_the_ranking():
    scores = scores_of_list([0, 1, 2, 3], 5)
    train, validation, truth = user_items([{0}]), user_items([{2}]), user_items([{3}])
    one = rank_sums(scores, train, truth, 4, n_items=5)
    both = rank_sums(scores, [train, validation], truth, 4, n_items=5)
    assert (one.mrr, both.mrr) == (1 / 3, 1 / 2)


def test_users_without_truth_items_do_not_count():
    scores = table_scores([[3.0, 2.0, 1.0]] * 3)
    sums = rank_sums(scores, user_items([[], {0}, []]), user_items([[], {2}, []]), 2, n_items=3)
    assert (sums.users, sums.recall, sums.mrr) == (1.0, 1.0, 0.5)


def test_nobody_to_evaluate():
    sums = rank_sums(table_scores(np.zeros((2, 3))), nothing(2), nothing(2), 10, n_items=3)
    assert sums == RankSums.zero(10)
    assert all(math.isnan(value) for value in sums.means().values())


def test_a_list_never_holds_seen_items_even_when_nothing_else_is_left():
    # two unseen items, one of them the truth, with the lowest scores of all; k is larger than the catalogue
    scores = table_scores([[9.0, 8.0, 7.0, -5.0, -6.0]])
    ranks = rank_users(scores, user_items([{0, 1, 2}]), user_items([{4}]), 10, n_items=5)
    assert (ranks.mrr[0], ranks.recall[0], ranks.precision[0]) == (0.5, 1.0, 0.1)


def test_equal_scores_are_near_chance_on_items_sorted_by_popularity():
    rng = np.random.default_rng(0)
    n_users, n_items, k = 200, 500, 10
    popularity = 1 / np.arange(1, n_items + 1)
    truth = user_items(
        [rng.choice(n_items, 20, replace=False, p=popularity / popularity.sum()) for _ in range(n_users)]
    )
    flat = table_scores(np.zeros((n_users, n_items)))
    by_seed = [
        rank_sums(flat, nothing(n_users), truth, k, n_items=n_items, tie_seed=s).means()["recall@10"] for s in range(20)
    ]
    in_order = table_scores(np.tile(-np.arange(n_items, dtype=float), (n_users, 1)))
    popular = rank_sums(in_order, nothing(n_users), truth, k, n_items=n_items).means()["recall@10"]
    assert popular > 0.2
    assert np.mean(by_seed) == pytest.approx(k / n_items, rel=0.5)
    assert by_seed[0] < popular / 4  # the seed that is used unless told otherwise


def test_ties_follow_one_permutation_whatever_else_is_in_the_batch():
    # Users 0 and 2 tie over all items, user 1 over none, user 3 only across the end of the list.
    tied = np.zeros(30)
    border = np.zeros(30)
    border[:4] = [9, 8, 7, 6]
    scores = table_scores(np.stack([tied, np.arange(30.0), tied, border]))
    order = [
        next(
            item
            for item in range(30)
            if rank_sums(scores_one, nothing(1), user_items([{item}]), k, n_items=30).mrr == 1 / k
        )
        for k in range(1, 6)
        for scores_one in [table_scores(tied[None])]
    ]
    assert len(set(order)) == 5
    truth = user_items([{order[4]}, {29}, {order[4]}, {next(i for i in order if i > 3)}])
    ranks = rank_users(scores, nothing(4), truth, 5, n_items=30)
    assert ranks.mrr.tolist() == [1 / 5, 1.0, 1 / 5, 1 / 5]


def test_scores_are_compared_as_float32():
    # The two differ by less than float32 can hold: a tie, so that kernels which round differently agree.
    noise = np.zeros((1, 40))
    noise[0] = 1 + 1e-12 * np.arange(40)
    truth = user_items([range(20)])
    a = rank_sums(table_scores(noise), nothing(1), truth, n_items=40)
    b = rank_sums(table_scores(noise[:, ::-1].copy()), nothing(1), truth, n_items=40)
    assert a == b == rank_sums(table_scores(np.ones((1, 40))), nothing(1), truth, n_items=40)


@pytest.mark.parametrize("quantum", [None, 1.0])
def test_the_batch_size_does_not_change_a_bit(quantum):
    seen, truth, _ = random_data()
    model = MatrixFactorization.initialise(60, 80, 16, 1.0, generator(1), generator(2))
    if quantum:
        model.users.round_()
        model.items.round_()  # many ties
    results = [rank_users(model.scores, seen, truth, n_items=80, batch_bytes=size) for size in (1, 3000, 7777, 1 << 26)]
    for other in results[1:]:
        for name in ("users", "recall", "precision", "mrr", "ndcg", "hit", "auc"):
            assert np.array_equal(getattr(results[0], name), getattr(other, name))
        assert other.sums() == results[0].sums()


def test_batches_stay_within_their_bytes():
    seen, truth, scores = random_data()
    sizes = []

    def scores_of(users):
        sizes.append(len(users))
        return table_scores(scores)(users)

    rank_sums(scores_of, seen, truth, n_items=80, batch_bytes=80 * 12 * 8)
    assert max(sizes) == 8
    assert sum(sizes) == (np.asarray(truth.counts) > 0).sum()


def test_sums_of_clients_pool_to_those_of_all_users():
    seen, truth, scores = random_data()
    whole = rank_sums(table_scores(scores), seen, truth, n_items=80)
    pooled = RankSums.zero(10)
    for first in range(0, 60, 9):
        rows = range(first, min(first + 9, 60))
        pooled += rank_sums(
            table_scores(scores[first:]),
            user_items([seen.of(u) for u in rows]),
            user_items([truth.of(u) for u in rows]),
            n_items=80,
        )
    assert pooled.users == whole.users
    assert pooled.means() == pytest.approx(whole.means(), rel=1e-13)


def test_per_user_values_belong_to_their_users():
    seen, truth, scores = random_data()
    ranks = rank_users(table_scores(scores), seen, truth, n_items=80)
    assert ranks.users.tolist() == np.flatnonzero(truth.counts).tolist()
    for position in (0, 5, -1):
        user = ranks.users[position]
        alone = rank_users(
            table_scores(scores[user][None]),
            user_items([seen.of(user)]),
            user_items([truth.of(user)]),
            n_items=80,
        )
        assert [ranks.ndcg[position], ranks.recall[position]] == [alone.ndcg[0], alone.recall[0]]


def test_the_model_s_scores_are_left_alone():
    seen, truth, scores = random_data()
    kept = torch.from_numpy(scores).float()
    before = kept.clone()
    rank_sums(lambda users: kept[users[0] : users[-1] + 1][users - users[0]], seen, truth, n_items=80)
    full = user_items([[0, 1]] * 60), user_items([[2]] * 60)
    rank_sums(lambda users: kept, *full, n_items=80)
    assert torch.equal(kept, before)


@st.composite
def problems(draw):
    n_items, n_users = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    label = st.sampled_from(["seen", "truth", "other"])
    labels = draw(st.lists(st.lists(label, min_size=n_items, max_size=n_items), min_size=n_users, max_size=n_users))
    score = st.sampled_from([-1.5, 0.0, -0.0, 0.25, 2.0])
    scores = draw(st.lists(st.lists(score, min_size=n_items, max_size=n_items), min_size=n_users, max_size=n_users))
    return labels, np.array(scores), draw(st.integers(1, 11))


@cache
def tie_places(n_items):
    """The tie order of a catalogue seen from outside: the rank of each item among equal scores."""
    flat = table_scores(np.zeros((1, n_items)))
    return {
        item: 1 / rank_users(flat, nothing(1), user_items([{item}]), n_items, n_items=n_items).mrr[0]
        for item in range(n_items)
    }


@settings(max_examples=100, deadline=None)
@given(problems())
def test_bounds_and_agreement_with_a_plain_loop(problem):
    labels, scores, k = problem
    n_items = scores.shape[1]
    split = {
        name: user_items([[i for i, x in enumerate(row) if x == name] for row in labels]) for name in ("seen", "truth")
    }
    ranks = rank_users(table_scores(scores), split["seen"], split["truth"], k, n_items=n_items)
    means = ranks.sums().means()
    assert list(means) == [*(f"{name}@{k}" for name in METRICS), "auc"]
    assert all(0 <= value <= 1 or ranks.users.size == 0 for value in means.values())

    place = tie_places(n_items)
    for position, user in enumerate(ranks.users):
        candidates = [i for i in range(n_items) if labels[user][i] != "seen"]
        best = sorted(candidates, key=lambda i: (-scores[user][i], place[i]))[:k]
        gains = [labels[user][i] == "truth" for i in best]
        n_truth = labels[user].count("truth")
        ideal = sum(1 / math.log2(r + 2) for r in range(min(k, n_truth)))
        assert ranks.recall[position] == pytest.approx(sum(gains) / n_truth)
        assert ranks.precision[position] == pytest.approx(sum(gains) / k)
        assert ranks.mrr[position] == pytest.approx(1 / (gains.index(True) + 1) if any(gains) else 0)
        assert ranks.ndcg[position] == pytest.approx(sum(g / math.log2(r + 2) for r, g in enumerate(gains)) / ideal)
        pairs = [
            (scores[user][i], scores[user][j])
            for i in candidates
            for j in candidates
            if labels[user][i] == "truth" and labels[user][j] == "other"
        ]
        right = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)
        assert ranks.auc[position] == (right / len(pairs) if pairs else 0.5)


def test_auc_is_that_of_scikit_learn():
    seen, truth, scores = random_data()
    scores = np.round(scores, 1)  # with ties
    seen = [seen, user_items([[] if u % 2 else truth_free(seen, truth, u)[:3] for u in range(60)])]
    ranks = rank_users(table_scores(scores), seen, truth, n_items=80)
    for user, value in zip(ranks.users, ranks.auc, strict=True):
        unseen = np.setdiff1d(np.arange(80), np.concatenate([split.of(user) for split in seen]))
        expected = roc_auc_score(np.isin(unseen, truth.of(user)), scores[user][unseen])
        assert value == pytest.approx(expected, rel=1e-12)


def truth_free(seen, truth, user):
    """Items that the user has neither seen nor in the truth."""
    return np.setdiff1d(np.arange(80), np.concatenate([seen.of(user), truth.of(user)]))


def test_auc_of_extremes():
    up = table_scores(np.tile(np.arange(6.0), (4, 1)))
    best, worst, seen_best, all_true = {4, 5}, {0, 1}, {4}, {1, 2, 3, 4, 5}
    seen = user_items([set(), set(), {5}, {0}])
    ranks = rank_users(up, seen, user_items([best, worst, seen_best, all_true]), 1, n_items=6)
    assert ranks.auc.tolist() == [1.0, 0.0, 1.0, 0.5]  # the last has nothing to be compared with
    flat = rank_users(table_scores(np.ones((4, 6))), seen, user_items([best, worst, seen_best, all_true]), n_items=6)
    assert flat.auc.tolist() == [0.5] * 4


def test_auc_compares_scores_as_float32():
    scores = table_scores([[1.0, 1 + 1e-12, 1 - 1e-12]])
    assert rank_users(scores, nothing(1), user_items([{2}]), n_items=3).auc.tolist() == [0.5]


def test_without_federation_nobody_scores_near_one():
    # Field case 14: interactions without any structure. Negatives that spare held-out items would make the
    # model find exactly those: 1.0.
    rng = np.random.default_rng(2)
    rows = [rng.permutation(60) for _ in range(40)]
    train, truth = user_items([r[:15] for r in rows]), user_items([r[15:25] for r in rows])
    model = MatrixFactorization.initialise(40, 60, 32, 0.1, generator(1), generator(2))
    options = TrainingOptions(epochs=150, batch_size=200, lr=0.05)
    report = train_locally(model, train, NegativeSampler(train, 60), options, generator(3))
    means = rank_sums(model.scores, train, truth, n_items=60).means()
    assert report.loss_mean < 0.2  # it did learn its training items
    assert rank_sums(model.scores, nothing(40), train, n_items=60).means()["ndcg@10"] > 0.95
    assert means["ndcg@10"] < 0.4  # chance is 10/45


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e39])
def test_scores_that_are_not_finite_are_an_error(value):
    scores = np.zeros((2, 5))
    scores[1, 3] = value
    with pytest.raises(ValueError, match="1 of 10 scores are not finite"):
        rank_sums(table_scores(scores), nothing(2), user_items([{0}, {1}]), n_items=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must be at least 1"),
        ({"scores_of": table_scores(np.zeros((2, 4)))}, r"shape \(2, 5\), got \(2, 4\)"),
        ({"seen": nothing(3)}, "seen items of 3 users"),
        ({"seen": user_items([{5}, []])}, r"0\.\.4"),
        ({"seen": [nothing(2), user_items([{1}, {1}])]}, "1 truth interactions are also among the seen"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    usual = {"scores_of": table_scores(np.zeros((2, 5))), "seen": nothing(2), "truth": user_items([{0}, {1}])}
    with pytest.raises(ValueError, match=message):
        rank_sums(**(usual | arguments), n_items=5)


def test_sums_travel_as_plain_floats():
    seen, truth, scores = random_data()
    sums = rank_sums(table_scores(scores), seen, truth, n_items=80)
    values = sums.to_dict()
    assert {type(value) for value in values.values()} == {float}
    assert RankSums.from_dict(values) == sums
    assert isinstance(RankSums.from_dict(values).k, int)
    del values["mrr"]
    with pytest.raises(ValueError, match="lack mrr"):
        RankSums.from_dict(values)
    with pytest.raises(ValueError, match="k=10 and at k=5"):
        sums + replace(sums, k=5)
