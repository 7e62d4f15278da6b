"""Values against torch's own losses or the literal formula, gradients against autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, mse_loss, normalize

from fedhur_app.consensus.adversary import deceive, initial_adversary
from fedhur_app.consensus.regularisers import regulariser

TEMPERATURE = 0.7


def tables(rows: int = 5, width: int = 3, common_width: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    own = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    common = torch.randn(rows, common_width, generator=generator, dtype=torch.float64)
    return own, common


def literal(kind: str, own: Tensor, common: Tensor) -> Tensor:
    if kind == "mse":
        return mse_loss(own, common)
    if kind == "kl":
        return kl_div(
            (own / TEMPERATURE).log_softmax(1),
            (common / TEMPERATURE).log_softmax(1),
            reduction="batchmean",
            log_target=True,
        )
    if kind == "contrastive":
        scores = normalize(own) @ normalize(common).T / TEMPERATURE
        return cross_entropy(scores, torch.arange(len(own)))
    return (own @ own.T - common @ common.T).square().mean()


@pytest.mark.parametrize("kind", ["mse", "kl", "contrastive", "relation"])
def test_value_and_gradient(kind: str) -> None:
    own, common = tables()
    leaf = own.clone().requires_grad_()
    expected = literal(kind, leaf, common)
    expected.backward()
    value, gradient = regulariser(kind, TEMPERATURE)(own, common)
    assert value == pytest.approx(float(expected), rel=1e-12)
    assert torch.allclose(gradient, leaf.grad, atol=1e-14)


def test_relation_needs_no_common_width() -> None:
    own, common = tables(width=3, common_width=2)
    leaf = own.clone().requires_grad_()
    expected = literal("relation", leaf, common)
    expected.backward()
    value, gradient = regulariser("relation", TEMPERATURE)(own, common)
    assert value == pytest.approx(float(expected), rel=1e-12)
    assert torch.allclose(gradient, leaf.grad, atol=1e-14)


@pytest.mark.parametrize("kind", ["mse", "kl", "relation"])
def test_nothing_pulls_at_the_consensus(kind: str) -> None:
    own, _ = tables()
    value, gradient = regulariser(kind, TEMPERATURE)(own, own.clone())
    assert value == pytest.approx(0, abs=1e-15)
    assert gradient.abs().max() < 1e-14


def test_contrastive_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    own, common = tables(rows=23)
    whole = regulariser("contrastive", TEMPERATURE)(own, common)
    monkeypatch.setattr("fedhur_app.consensus.regularisers._BLOCK_BYTES", 4 * 23 * 8)
    value, gradient = regulariser("contrastive", TEMPERATURE)(own, common)
    assert value == pytest.approx(whole[0], rel=1e-12)
    assert torch.allclose(gradient, whole[1], atol=1e-14)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="choose mse, kl, contrastive or relation"):
        regulariser("l2", 1.0)


def test_deceiving_has_the_gradient_of_its_loss_with_the_scale_held_fixed() -> None:
    own, common = tables()
    weights = {k: v.double() for k, v in initial_adversary(3, torch.Generator().manual_seed(1)).items()}
    value, gradient = deceive(weights, own, common)  # weights are now those after the step
    scale = torch.cat([own, common]).square().mean().sqrt()
    leaf = own.clone().requires_grad_()
    hidden = (leaf / scale) @ weights["hidden"].T + weights["hidden_bias"]
    expected = torch.nn.functional.softplus(hidden.relu() @ weights["output"] + weights["output_bias"]).mean()
    expected.backward()
    assert value == pytest.approx(float(expected), rel=1e-12)
    assert torch.allclose(gradient, leaf.grad, atol=1e-14)


def test_an_adversary_learns_what_differs_and_not_what_does_not() -> None:
    generator = torch.Generator().manual_seed(1)
    own, same = torch.randn(400, 4, generator=generator) + 2, torch.randn(400, 4, generator=generator) + 2
    for other, low, high in ((same, 0.6, 0.8), (same - 4, 2.0, 100.0)):
        weights = initial_adversary(4, torch.Generator().manual_seed(1))
        for _ in range(300):
            loss, _ = deceive(weights, own, other)
        # Rows it knows for the market's own cost the market much; those it cannot tell cost log 2.
        assert low < loss < high
