"""FedRAP (Li et al., ICLR 2024) on the client: scores `p_u . (d_i + c_i) + b_u` with D private and C shared.

Loss of a batch with distinct items B: `BCE - lambda_t s(mean (D_B - C_B)^2) + mu_t mean |C_B|`. The curriculum is
`lambda_t = lambda tanh(t / 10)`, `mu_t` likewise, `t` the round; the published code computes it and then reads the
constants (`fedrap.curriculum: false`). The separation term has no lower bound in the paper (`s(m) = m`,
`fedrap.bounded: false`); here `s(m) = 1 - exp(-m)`, which is the same for small m.
"""

import math

import torch
from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from fedhur_app.config import FedRapSettings
from fedhur_app.models.fedrap import AdditiveFactorization
from fedhur_app.models.training import ExtraGradient
from fedhur_app.seeding import torch_generator


class Client(ClientAlgorithm):
    """Shares C; keeps P, b and D."""

    def initial_model(self) -> dict[str, Tensor]:
        """The tables of MF, C among them, and D from the same distribution."""
        model = self.settings.model
        generator = torch_generator(self.seed, "init-private-items", client=self.shard.client)
        private = torch.randn(self.shard.n_items, model.dim, generator=generator) * model.init_std
        return super().initial_model() | {"private_items": private}

    def build(self, parameters: dict[str, Tensor]) -> AdditiveFactorization:
        """The model of two item tables."""
        copies = {name: tensor.to(self.device, copy=True) for name, tensor in parameters.items()}
        return AdditiveFactorization(copies, self.settings.train.loss)

    def shared(self) -> list[str]:
        """C only."""
        return ["items"]

    def extra_term(self) -> ExtraGradient:
        """Separation of the tables and sparsity of C on the items of a batch."""
        settings, round_ = self.settings.fedrap, self.round

        def term(parameters: dict[str, Tensor], batch: Tensor) -> tuple[float, dict[str, Tensor]]:
            return regulariser(settings, round_, parameters["items"], parameters["private_items"], batch)

        return term


def regulariser(
    settings: FedRapSettings, round_: int, shared: Tensor, private: Tensor, batch: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """The two terms and their gradients.

    Args:
        settings: Weights and forms.
        round_: Round t >= 1 of the curriculum.
        shared: C (I, d).
        private: D (I, d).
        batch: Distinct items (b,) of the batch.

    Returns:
        The value and the gradients (I, d) of `items` and `private_items`.
    """
    growth = math.tanh(round_ / 10) if settings.curriculum else 1.0
    separation, sparsity = settings.separation * growth, settings.sparsity * growth
    rows = shared.index_select(0, batch)
    apart = private.index_select(0, batch) - rows
    distance = apart.square().mean()
    slope = torch.exp(-distance) if settings.bounded else torch.ones_like(distance)
    push = -torch.expm1(-distance) if settings.bounded else distance
    value = -separation * push + sparsity * rows.abs().mean()
    by_private = (-2 * separation * slope / apart.numel()) * apart
    by_shared = (sparsity / rows.numel()) * rows.sign() - by_private
    gradients = {}
    for name, table, gradient in (("items", shared, by_shared), ("private_items", private, by_private)):
        gradients[name] = torch.zeros_like(table).index_copy_(0, batch, gradient)
    return float(value), gradients
