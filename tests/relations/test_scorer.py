import numpy as np
import pytest
import torch

from fedhur_app.relations.scorer import Scorer


def data(rows=2000, columns=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows // 2, columns, generator=generator)
    return x, x[..., 0] * 0.8 - x[..., 1].abs()


def test_scorer_learns():
    x, y = data()
    scorer = Scorer(4, lr=0.01, steps=100, batch=256, seed=1)
    generator = torch.Generator().manual_seed(1)
    losses = [scorer.fit(x, y, generator) for _ in range(6)]
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


@pytest.mark.parametrize("before", [0, 2])
def test_scorer_resumes_to_the_last_bit(before):
    x, y = data()
    straight = Scorer(4, steps=5, seed=1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(before):
        straight.fit(x, y, generator)
    resumed = Scorer(4, steps=5, seed=99)
    saved = {name: np.load(_through_disk(array)) for name, array in straight.state().items()}
    resumed.load(saved)
    later = torch.Generator()
    later.set_state(generator.get_state())
    for _ in range(3):
        assert straight.fit(x, y, generator) == resumed.fit(x, y, later)
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
    scorer.fit(x, y, torch.Generator().manual_seed(0))
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
    with pytest.raises(ValueError, match="2000 and 1000"):
        Scorer(4).fit(x, y[:1], torch.Generator())
    with pytest.raises(ValueError, match=r"0\.weight.*\(32, 5\)"):
        Scorer(5).load(Scorer(4).state())
    state = Scorer(4).state()
    del state["3.second"]
    with pytest.raises(ValueError, match=r"3\.second"):
        Scorer(4).load(state)
