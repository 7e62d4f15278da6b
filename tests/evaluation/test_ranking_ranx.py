"""The same metrics by another library; apart from the rest because importing ranx takes seconds."""

import numpy as np
import pytest
import torch
from ranx import Qrels, Run, evaluate

from fedhur_app.evaluation.ranking import rank_users
from tests.models.helpers import user_items


@pytest.mark.parametrize("k", [3, 10])
def test_agrees_with_ranx(k):
    rng = np.random.default_rng(k)
    n_users, n_items = 80, 50
    scores = rng.normal(size=(n_users, n_items))
    seen, truth = [], []
    for user in range(n_users):
        items = rng.permutation(n_items)
        n_seen = 46 if user == 5 else rng.integers(0, 20)  # user 5 has fewer unseen items than k
        n_truth = 0 if user % 6 == 1 else rng.integers(1, 4 if user == 5 else 25)
        seen.append(items[:n_seen])
        truth.append(items[n_seen : n_seen + n_truth])
    ours = rank_users(
        lambda users: torch.from_numpy(scores)[users], user_items(seen), user_items(truth), k, n_items=n_items
    )

    counted = [str(u) for u in range(n_users) if len(truth[u])]
    qrels = Qrels({u: {str(i): 1 for i in truth[int(u)]} for u in counted})
    run = Run({u: {str(i): scores[int(u), i] for i in range(n_items) if i not in set(seen[int(u)])} for u in counted})
    names = {"recall": "recall", "precision": "precision", "mrr": "mrr", "ndcg": "ndcg", "hit": "hit_rate"}
    theirs = evaluate(qrels, run, [f"{name}@{k}" for name in names.values()], return_mean=False)
    order = np.argsort([int(u) for u in qrels.qrels])  # ranx sorts users as strings
    assert ours.users.tolist() == sorted(int(u) for u in qrels.qrels)
    for name, other in names.items():
        np.testing.assert_allclose(getattr(ours, name), theirs[f"{other}@{k}"][order], rtol=1e-12, err_msg=name)
    means = evaluate(qrels, run, [f"{name}@{k}" for name in names.values()])
    for name, other in names.items():
        assert ours.sums().means()[f"{name}@{k}"] == pytest.approx(means[f"{other}@{k}"], rel=1e-12)
