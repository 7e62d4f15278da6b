"""Matrix factorisation with closed-form gradients (eq. 1), and the losses on scores that all models share."""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import softplus

Loss = Literal["bpr", "bce", "mse", "elementwise"]


def score_loss(loss: Loss, s_i: Tensor, s_j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A loss on scores and its derivatives; the formulas stand at :class:`MatrixFactorization`.

    Args:
        loss: ``bpr``, ``bce`` or ``mse``; ``elementwise`` is no function of scores.
        s_i: Scores of the ``n`` positives, (n,) or (n, 1).
        s_j: Scores of their negatives, same shape.

    Returns:
        The mean over the triples, a scalar, and its derivatives by ``s_i`` and ``s_j``, of their shape.

    Raises:
        ValueError: For ``elementwise``.
    """
    n = len(s_i)
    if loss == "bpr":
        g_j = torch.sigmoid(s_j - s_i) / n
        return softplus(s_j - s_i).mean(), -g_j, g_j
    if loss == "bce":
        value = (softplus(-s_i).mean() + softplus(s_j).mean()) / 2
        return value, -torch.sigmoid(-s_i) / (2 * n), torch.sigmoid(s_j) / (2 * n)
    if loss == "mse":
        return ((s_i - 1).square().mean() + s_j.square().mean()) / 2, (s_i - 1) / n, s_j / n
    raise ValueError(f"the loss {loss!r} is not a function of scores: choose bpr, bce or mse")


class MatrixFactorization:
    """Scores are dot products of a private user table and an item table, ``s_ui = p_u . e_i``.

    With a bias they are ``s_ui = p_u . e_i + b_u``. It moves all of a user's scores alike, so it changes no
    ranking, but ``bce`` and ``mse``, whose targets are absolute, fit better with it.

    With ``i`` a positive and ``j`` a negative of user ``u``, the loss of one triple is

    * ``bpr``: ``softplus(s_uj - s_ui)`` (Rendle et al. 2009);
    * ``bce``: ``softplus(-s_ui) / 2 + softplus(s_uj) / 2``, cross-entropy on raw scores with targets 1 and 0;
    * ``mse``: ``(s_ui - 1)^2 / 2 + s_uj^2 / 2``;
    * ``elementwise``: ``mean_c (p_uc e_ic - 1)^2 / 2 + mean_c (p_uc e_jc)^2 / 2``, what the published code of
      FedCIA trains: the targets hold for every coordinate ``c``, not for their sum.

    Weight decay belongs to the optimiser.

    Args:
        users: (U, d) floating point, trained in place.
        items: (I, d), same type and device, trained in place.
        loss: One of the names above.
        bias: (U,), the users' biases, same type and device, trained in place; none by default.

    Raises:
        ValueError: For tables that do not fit each other, an unknown loss, or a bias with ``elementwise``,
            whose targets are on products of coordinates and not on scores.
    """

    def __init__(self, users: Tensor, items: Tensor, loss: Loss = "bpr", bias: Tensor | None = None) -> None:
        if users.ndim != 2 or items.ndim != 2 or users.shape[1] != items.shape[1]:
            raise ValueError(
                f"user table {tuple(users.shape)} and item table {tuple(items.shape)} must be (U, d) and "
                "(I, d) with the same width d"
            )
        if users.dtype != items.dtype or not users.is_floating_point():
            raise ValueError(f"both tables must have one floating type, not {users.dtype} and {items.dtype}")
        if loss not in get_args(Loss):
            raise ValueError(f"unknown loss {loss!r}: choose one of {', '.join(get_args(Loss))}")
        if bias is not None:
            if bias.shape != users.shape[:1] or bias.dtype != users.dtype:
                raise ValueError(
                    f"user bias {tuple(bias.shape)} of {bias.dtype} must be ({len(users)},) of {users.dtype}, one "
                    "number for every row of the user table"
                )
            if loss == "elementwise":
                raise ValueError("a user bias does not go with the loss 'elementwise': choose bpr, bce or mse")
        self.users = users
        self.items = items
        self.loss: Loss = loss
        self.bias = bias

    @classmethod
    def initialise(
        cls,
        n_users: int,
        n_items: int,
        dim: int,
        std: float,
        user_generator: torch.Generator,
        item_generator: torch.Generator,
        loss: Loss = "bpr",
        user_bias: bool = False,
    ) -> "MatrixFactorization":
        """A model with float32 tables drawn from ``N(0, std^2)``, and with biases of zero if ``user_bias``.

        The tables have a generator each, so that clients can start from one item table (a generator with the
        same state on all of them) and private user tables.
        """
        users = torch.randn(n_users, dim, generator=user_generator) * std
        items = torch.randn(n_items, dim, generator=item_generator) * std
        return cls(users, items, loss, torch.zeros(n_users) if user_bias else None)

    def parameters(self) -> dict[str, Tensor]:
        """The two tables, ``"users"`` (U, d) and ``"items"`` (I, d), and any ``"user_bias"`` (U,); not copies."""
        tables = {"users": self.users, "items": self.items}
        return tables if self.bias is None else tables | {"user_bias": self.bias}

    def loss_and_gradients(
        self, users: Tensor, positives: Tensor, negatives: Tensor
    ) -> tuple[float, dict[str, Tensor]]:
        """Mean loss of a batch of triples (n,) and its gradients; see :class:`Recommender`."""
        # index_select: six times faster than self.items[positives] on a CPU.
        p = self.users.index_select(0, users)
        e_i, e_j = self.items.index_select(0, positives), self.items.index_select(0, negatives)
        if self.loss == "elementwise":
            over_i, over_j = p * e_i - 1, p * e_j  # (n, d), residuals per coordinate
            loss = (over_i.square().mean() + over_j.square().mean()) / 2
            g_i, g_j = over_i / over_i.numel(), over_j / over_j.numel()
        else:
            s_i, s_j = (p * e_i).sum(1, keepdim=True), (p * e_j).sum(1, keepdim=True)  # (n, 1)
            if self.bias is not None:
                b = self.bias.index_select(0, users)[:, None]
                s_i, s_j = s_i + b, s_j + b
            loss, g_i, g_j = score_loss(self.loss, s_i, s_j)
        # g_i, g_j: derivatives by the score (n, 1), or by each coordinate's product (n, d).
        user_gradient = torch.zeros_like(self.users).index_add_(0, users, torch.addcmul(g_i * e_i, g_j, e_j))
        item_gradient = torch.zeros_like(self.items)
        item_gradient.index_add_(0, positives, g_i * p).index_add_(0, negatives, g_j * p)
        gradients = {"users": user_gradient, "items": item_gradient}
        if self.bias is not None:
            # For bpr g_i is -g_j: the gradient is exactly 0.
            gradients["user_bias"] = torch.zeros_like(self.bias).index_add_(0, users, (g_i + g_j)[:, 0])
        return loss.item(), gradients

    def scores(self, users: Tensor) -> Tensor:
        """Dot products (n, I) of the users (n,) with all items, in float64, plus the users' biases if any."""
        users = users.to(self.users.device)
        scores = self.users[users].double() @ self.items.double().T
        return scores if self.bias is None else scores + self.bias[users].double()[:, None]

    def item_vectors(self) -> Tensor:
        """The item table (I, d) itself."""
        return self.items
