import numpy as np
import pytest
import torch

from fedhur_app.relations.scorer import Scorer


def data(rows=2000, columns=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows // 2, columns, generator=generator)
    return x, x[..., 0] * 0.8 - x[..., 1].abs()


def fit(scorer, x, y, generator):
    rows = scorer.draw(y.numel(), generator)
    rows.collect(0, x, y)
    return scorer.fit(rows)


def test_scorer_learns():
    x, y = data()
    scorer = Scorer(4, lr=0.01, steps=100, batch=256, seed=1)
    generator = torch.Generator().manual_seed(1)
    losses = [fit(scorer, x, y, generator) for _ in range(6)]
    variance = float(y.var())
    assert losses[-1] < 0.1 * losses[0]
    assert float((scorer.predict(x) - y).square().mean()) < 0.03 * variance


def test_predict_keeps_leading_shapes_and_does_not_depend_on_chunks(monkeypatch):
    x, _ = data()
    scorer = Scorer(4)
    whole = scorer.predict(x.reshape(2, 10, 100, 4))
    assert whole.shape == (2, 10, 100)
    assert not whole.requires_grad
    monkeypatch.setattr("fedhur_app.relations.scorer._ROWS", 7)
    torch.testing.assert_close(scorer.predict(x).flatten(), whole.flatten())
    first, bias, last, offset = (torch.from_numpy(scorer.state()[f"{number}.weight"]) for number in range(4))
    expected = (x @ first.T + bias).clamp_min(0) @ last.T + offset
    torch.testing.assert_close(whole.flatten(), expected.flatten())


def test_rows_may_pass_by_in_parts_and_in_any_order():
    x, y = data()
    rows, goal = x.flatten(0, 1), y.flatten()
    whole, parts = Scorer(4, steps=7, batch=50, seed=1), Scorer(4, steps=7, batch=50, seed=1)
    picked = whole.draw(2000, torch.Generator().manual_seed(2))
    picked.collect(0, x, y)
    in_parts = parts.draw(2000, torch.Generator().manual_seed(2))
    for first in (700, 0, 1999, 1, 300):
        last = {700: 1999, 0: 1, 1999: 2000, 1: 300, 300: 700}[first]
        in_parts.collect(first, rows[first:last], goal[first:last])
    again = torch.Generator().manual_seed(2)
    for first, second in zip(picked.batches(), in_parts.batches(), strict=True):
        expected = torch.randint(2000, (50,), generator=again)
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        assert torch.equal(first[0], rows[expected])
        assert torch.equal(first[1], goal[expected])
    assert whole.fit(picked) == parts.fit(in_parts)
    assert torch.equal(whole.predict(x), parts.predict(x))


@pytest.mark.parametrize("before", [0, 2])
def test_scorer_resumes_to_the_last_bit(before):
    x, y = data()
    straight = Scorer(4, steps=5, seed=1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(before):
        fit(straight, x, y, generator)
    resumed = Scorer(4, steps=5, seed=99)
    saved = {name: np.load(_through_disk(array)) for name, array in straight.state().items()}
    resumed.load(saved)
    later = torch.Generator()
    later.set_state(generator.get_state())
    for _ in range(3):
        assert fit(straight, x, y, generator) == fit(resumed, x, y, later)
    for name, array in straight.state().items():
        assert np.array_equal(array, resumed.state()[name]), name
    assert torch.equal(straight.predict(x), resumed.predict(x))


def _through_disk(array):
    import io

    buffer = io.BytesIO()
    np.save(buffer, array)
    buffer.seek(0)
    return buffer


def test_state_is_a_copy_and_holds_the_moments():
    x, y = data()
    scorer = Scorer(4, steps=2)
    early = scorer.state()
    assert (early["0.second"] == 0).all()
    kept = early["0.weight"].copy()
    fit(scorer, x, y, torch.Generator().manual_seed(0))
    assert np.array_equal(early["0.weight"], kept)
    late = scorer.state()
    assert not np.array_equal(late["0.weight"], kept)
    assert (late["0.second"] > 0).any()
    assert late["0.steps"].tolist() == [2.0]


def test_the_seed_decides_the_weights_without_global_state():
    before = torch.get_rng_state()
    first, second, other = Scorer(4, seed=1), Scorer(4, seed=1), Scorer(4, seed=2)
    x, _ = data()
    assert torch.equal(first.predict(x), second.predict(x))
    assert not torch.equal(first.predict(x), other.predict(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_say_what_does_not_fit():
    x, y = data()
    scorer = Scorer(4)
    with pytest.raises(ValueError, match="2000 and 1000"):
        scorer.draw(2000, torch.Generator()).collect(0, x, y[:1])
    with pytest.raises(ValueError, match="at least one row"):
        scorer.draw(0, torch.Generator())
    missing = scorer.draw(2000, torch.Generator())
    missing.collect(0, x[:1], y[:1])
    with pytest.raises(ValueError, match=r"has seen \d+ of the 100000 rows"):
        scorer.fit(missing)
    with pytest.raises(ValueError, match=r"0\.weight.*\(32, 5\)"):
        Scorer(5).load(Scorer(4).state())
    state = Scorer(4).state()
    del state["3.second"]
    with pytest.raises(ValueError, match=r"3\.second"):
        Scorer(4).load(state)
