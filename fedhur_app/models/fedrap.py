"""The model of FedRAP: one score from two item tables, a shared and a private one."""

from torch import Tensor

from fedhur_app.models.mf import Loss, MatrixFactorization


class AdditiveFactorization:
    """Scores `s_ui = p_u . (c_i + d_i) + b_u` (Li et al., ICLR 2024).

    Args:
        parameters: `users` (U, d), `items` C (I, d), `private_items` D (I, d) and, where users have one, `user_bias`
            (U,); trained in place.
        loss: As for :class:`MatrixFactorization`.
    """

    def __init__(self, parameters: dict[str, Tensor], loss: Loss) -> None:
        shared, private = parameters["items"], parameters["private_items"]
        if shared.shape != private.shape:
            raise ValueError(
                f"items {tuple(shared.shape)} and private_items {tuple(private.shape)} must be of one shape"
            )
        self._parameters = parameters
        self._loss: Loss = loss

    def parameters(self) -> dict[str, Tensor]:
        """The tables; not copies."""
        return self._parameters

    def loss_and_gradients(
        self, users: Tensor, positives: Tensor, negatives: Tensor
    ) -> tuple[float, dict[str, Tensor]]:
        """As that of MF on the sum of the tables, which has the same gradient by each of them."""
        loss, gradients = self._sum().loss_and_gradients(users, positives, negatives)
        return loss, gradients | {"private_items": gradients["items"]}

    def scores(self, users: Tensor) -> Tensor:
        """Raw scores (n, I), float64, of the users (n,)."""
        return self._sum().scores(users)

    def item_vectors(self) -> Tensor:
        """C + D (I, d)."""
        return self._parameters["items"] + self._parameters["private_items"]

    def _sum(self) -> MatrixFactorization:
        bias = self._parameters.get("user_bias")
        return MatrixFactorization(self._parameters["users"], self.item_vectors(), self._loss, bias=bias)
