"""What a local recommender is: named tables, a loss with its gradients, raw scores."""

from typing import Protocol

from torch import Tensor


class Recommender(Protocol):
    """A model of one client's ``U`` users over the ``I`` items of the catalogue.

    Users are the client's own, numbered ``0..U-1``; items carry the numbers of the catalogue, ``0..I-1``.
    """

    def parameters(self) -> dict[str, Tensor]:
        """The trained tensors by name: the model's own storage, so writing into them trains the model.

        ``"users"`` (U, d) is private to the client, ``"items"`` (I, d) the item table; others may follow. The
        names of all parameters that are private to the client's users, and so must never leave it, begin
        with ``"user"``; no others do.
        """
        ...

    def loss_and_gradients(
        self, users: Tensor, positives: Tensor, negatives: Tensor
    ) -> tuple[float, dict[str, Tensor]]:
        """Mean loss of a batch and its gradients.

        Args:
            users: (n,) int64, rows of the user table; repeats are allowed, as in the two others.
            positives: (n,) int64, an item of each user's training set.
            negatives: (n,) int64, an item outside each user's training set.

        Returns:
            The mean loss over the batch and, for every parameter by name, a gradient of its shape.
        """
        ...

    def scores(self, users: Tensor) -> Tensor:
        """Scores of all items, (n, I) float64, for the users (n,): raw, since a sigmoid makes ties."""
        ...

    def item_vectors(self) -> Tensor | None:
        """The table (I, d) whose dot products with a user's vector are the user's scores, up to a constant.

        None where scores are no dot products, as in a neural network. It can differ from the parameter
        ``"items"`` (propagated over a graph, for example), and may share its storage or not: do not write
        into it.
        """
        ...
