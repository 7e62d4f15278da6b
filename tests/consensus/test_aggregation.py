import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean
from torch import Tensor

from fedhur_app.consensus.aggregation import shrunk_to_attributes, trimmed_step, weighted_step


def upload(items: list[int], rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    return torch.tensor(items), torch.tensor(rows)


# Three markets, three items of which nobody trained the last.
UPLOADS = [
    upload([0, 1], [[1.0, 2.0], [4.0, 0.0]]),
    upload([0], [[3.0, -2.0]]),
    upload([0], [[8.0, 9.0]]),
]


def test_mean_by_hand() -> None:
    step = weighted_step(3, UPLOADS, torch.tensor([1.0, 1.0, 2.0]))
    assert step.tolist() == [[5.0, 4.5], [4.0, 0.0], [0.0, 0.0]]


def test_median_by_hand() -> None:
    assert trimmed_step(3, UPLOADS, 0.5).tolist() == [[3.0, 2.0], [4.0, 0.0], [0.0, 0.0]]


def test_nothing_trimmed_is_the_mean() -> None:
    assert torch.allclose(trimmed_step(3, UPLOADS, 0.0), weighted_step(3, UPLOADS, torch.ones(3)))


@given(st.data())
def test_trimmed_means_against_scipy_and_numpy(data: st.DataObject) -> None:
    markets = data.draw(st.integers(1, 7))
    trim = data.draw(st.sampled_from([0.0, 0.1, 0.2, 0.34, 0.49, 0.5]))
    values = np.array(
        [data.draw(st.lists(st.floats(-1e3, 1e3, width=32), min_size=6, max_size=6)) for _ in range(markets)]
    ).reshape(markets, 3, 2)
    present = np.array([data.draw(st.lists(st.booleans(), min_size=3, max_size=3)) for _ in range(markets)])
    uploads = [
        (torch.tensor(np.flatnonzero(p)), torch.tensor(v[p]).float()) for v, p in zip(values, present, strict=True)
    ]
    step = trimmed_step(3, uploads, trim)
    for item in range(3):
        chosen = values[present[:, item], item]
        if not len(chosen):
            expected = np.zeros(2)
        elif trim == 0.5:
            expected = np.median(chosen, axis=0)
        else:
            at_least_one = 1 / len(chosen) if trim > 0 and len(chosen) > 2 else 0.0
            expected = trim_mean(chosen, max(trim, at_least_one), axis=0)
        assert step[item].numpy() == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_blocks_of_items_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    uploads = [(torch.arange(50), torch.randn(50, 3, generator=generator)) for _ in range(4)]
    whole = trimmed_step(50, uploads, 0.3)
    monkeypatch.setattr("fedhur_app.consensus.aggregation._BLOCK_BYTES", 8 * 3 * 4 * 7)
    assert torch.equal(trimmed_step(50, uploads, 0.3), whole)


def test_robust_steps_ignore_one_exploding_market_and_the_mean_does_not() -> None:
    generator = torch.Generator().manual_seed(1)
    good = [(torch.arange(10), torch.randn(10, 3, generator=generator)) for _ in range(4)]
    bad = (torch.arange(10), torch.full((10, 3), 1e6))
    largest = max(float(rows.abs().max()) for _, rows in good)
    assert weighted_step(10, [*good, bad], torch.ones(5)).abs().min() > 1e5
    for trim in (0.2, 0.5):
        assert trimmed_step(10, [*good, bad], trim).abs().max() <= largest


KINDS = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def test_without_evidence_an_item_is_the_mean_of_its_kind() -> None:
    table = torch.tensor([[2.0], [9.0], [5.0], [9.0]])
    evidence = torch.tensor([1000.0, 0.0, 1000.0, 0.0])
    shrunk = shrunk_to_attributes(table, evidence, KINDS, 1e-9)
    # The fit has a ridge of one observation: 2 * 1000/1001 and 5 * 1000/1001; two kinds mean half of each.
    one, two = 2 * 1000 / 1001, 5 * 1000 / 1001
    assert shrunk[:, 0].tolist() == pytest.approx([2.0, one, 5.0, (one + two) / 2], rel=1e-5)


def test_with_much_evidence_an_item_stays() -> None:
    table = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(shrunk_to_attributes(table, torch.full((4,), 1e9), KINDS, 1.0), table, atol=1e-5)
    assert torch.equal(shrunk_to_attributes(table, torch.zeros(4), KINDS, 0.0), table)
