"""Supervised contrast and FedRAP's regulariser against autograd."""

import math

import pytest
import torch

from client_app.algorithms.fedrap import regulariser
from fedhur_app.config import load_settings
from fedhur_app.models import contrast
from fedhur_app.models.contrast import supervised_contrast


def naive_contrast(table, labels, temperature):
    unit = table / table.norm(dim=1, keepdim=True)
    total = torch.zeros((), dtype=table.dtype)
    for i in range(len(table)):
        others = [a for a in range(len(table)) if a != i]
        peers = [a for a in others if labels[a] == labels[i]]
        scores = {a: unit[i] @ unit[a] / temperature for a in others}
        log_sum = torch.logsumexp(torch.stack([scores[a] for a in others]), 0)
        if peers:
            total = total - (temperature / 0.5) * torch.stack([scores[a] - log_sum for a in peers]).mean()
    return total / len(table)


@pytest.mark.parametrize("block_bytes", [1, 32 << 20])
def test_supervised_contrast_and_its_gradient(block_bytes, monkeypatch):
    monkeypatch.setattr(contrast, "_BLOCK_BYTES", block_bytes)  # 1: a row at a time
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(15, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 6, (15,), generator=generator)
    labels[0] = 99  # alone in its cluster
    expected = naive_contrast(table, labels, 0.1)
    expected.backward()
    value, gradient = supervised_contrast(table.detach(), labels, 0.1)
    assert value == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(gradient, table.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("round_", [1, 25])
def test_fedrap_regulariser_and_its_gradients(bounded, round_):
    settings = load_settings(
        "synthetic",
        "fedrap",
        overrides=f"fedrap.separation=0.7 fedrap.sparsity=0.3 fedrap.bounded={str(bounded).lower()}",
    ).fedrap
    generator = torch.Generator().manual_seed(2)
    shared, private = (
        torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    batch = torch.tensor([0, 2, 5])
    distance = (private[batch] - shared[batch]).square().mean()
    growth = math.tanh(round_ / 10)
    push = 1 - torch.exp(-distance) if bounded else distance
    expected = growth * (-0.7 * push + 0.3 * shared[batch].abs().mean())
    expected.backward()
    value, gradients = regulariser(settings, round_, shared.detach(), private.detach(), batch)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradients["items"], shared.grad)
    torch.testing.assert_close(gradients["private_items"], private.grad)


def test_fedrap_without_the_curriculum_has_constant_weights_and_a_bound():
    settings = load_settings(
        "synthetic", "fedrap", overrides="fedrap.curriculum=false fedrap.sparsity=0.0 fedrap.separation=0.5"
    ).fedrap
    far = torch.full((4, 2), 1e3)
    first, later = (regulariser(settings, t, -far, far, torch.arange(4))[0] for t in (1, 50))
    assert first == later == pytest.approx(-0.5)
