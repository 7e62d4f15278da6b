import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from fedhur_app.relations.ridge_scorer import _RIDGE, RidgeScorer


def filled(scorer: RidgeScorer, x: torch.Tensor, y: torch.Tensor):
    rows = scorer.draw(y.numel(), torch.Generator().manual_seed(2))
    rows.collect(0, x, y)
    return rows


def test_the_fit_is_ridge_regression_on_the_chosen_rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 150, 4, generator=generator)
    y = x @ torch.tensor([0.8, -0.3, 0.0, 2.0]) + 0.1 * torch.randn(2, 150, generator=generator)
    scorer = RidgeScorer(4, steps=3, batch=40)
    assert float(scorer.predict(x).abs().max()) == 0.0
    error = scorer.fit(filled(scorer, x, y))
    chosen = torch.randint(300, (40,), generator=(again := torch.Generator().manual_seed(2)))
    chosen = torch.cat([chosen, *(torch.randint(300, (40,), generator=again) for _ in range(2))])
    rows, goal = x.flatten(0, 1)[chosen].double().numpy(), y.flatten()[chosen].double().numpy()
    other = Ridge(alpha=_RIDGE * len(rows), fit_intercept=False).fit(rows, goal)
    np.testing.assert_allclose(scorer.weights.numpy(), other.coef_, rtol=1e-5)
    assert error == pytest.approx(np.mean((other.predict(rows) - goal) ** 2), rel=1e-6)
    np.testing.assert_allclose(scorer.predict(x).flatten().numpy(), other.predict(x.flatten(0, 1).numpy()), rtol=1e-4)


def test_features_that_depend_on_each_other_have_a_solution():
    x = torch.ones(1, 20, 3)
    scorer = RidgeScorer(3, steps=1, batch=20)
    assert scorer.fit(filled(scorer, x, torch.ones(1, 20))) < 1e-3


def test_a_state_of_other_features_is_refused():
    scorer, other = RidgeScorer(3, 1, 1), RidgeScorer(3, 1, 1)
    scorer.weights = torch.tensor([1.0, 2.0, 3.0])
    other.load(scorer.state())
    assert torch.equal(other.weights, scorer.weights)
    with pytest.raises(ValueError, match=r"shape \(4,\), but \(3,\) was found"):
        RidgeScorer(4, 1, 1).load(scorer.state())
    with pytest.raises(ValueError, match="nothing was found"):
        other.load({})
