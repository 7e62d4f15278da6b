"""Neural collaborative filtering (He et al. 2017), in the two forms that FedNCF federates."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedhur_app.models.mf import Loss, score_loss

_LOSSES = ("bpr", "bce")
# Activations of one block of users while scoring: small enough for the cache of a core, 0.3 s against 0.45 s with
# 32 MiB for 943 users x 1682 items.
_BLOCK_BYTES = 4 << 20


class NeuralCollaborativeFiltering:
    """Scores are logits of a network on a user's and an item's vectors.

    * NeuMF (``gmf=True``): ``s_ui = w . [p_u * q_i; m_ui] + b`` with ``m_ui`` the output of a ReLU network on
      ``[p'_u; q'_i]``, where ``p'``, ``q'`` are tables of its own (He et al. 2017, eq. 12, without pre-training);
    * the MLP alone (``gmf=False``): ``s_ui = w . m_ui + b`` on ``[p_u; q_i]`` (ibid., eq. 10).

    Perifanis & Efraimidis (FedNCF, 2022) federate the item tables and the network and keep the user tables.

    Parameters, with ``h`` the widths of the hidden layers and ``d`` that of the tables:

    ========================================  ==============================================================
    ``users`` (U, d), ``items`` (I, d)        the only tables, or with ``gmf`` those of the product
    ``users_mlp`` (U, d), ``items_mlp``       with ``gmf``: the tables of the network
    ``mlp.0.weight`` (h_0, 2d)                user half first
    ``mlp.k.weight`` (h_k, h_(k-1))           for every further layer
    ``mlp.k.bias`` (h_k,)                     for every layer
    ``output.weight`` (1, d + h_last)         product half first; (1, h_last) without ``gmf``
    ``output.bias`` (1,)
    ========================================  ==============================================================

    Args:
        parameters: Exactly these tensors, of one floating type and on one device, trained in place.
        gmf: Which of the two forms.
        loss: ``bpr`` or ``bce``, as in :class:`~fedhur_app.models.mf.MatrixFactorization`.

    Raises:
        ValueError: For tensors that are missing, unknown or do not fit, or for another loss.
    """

    def __init__(self, parameters: Mapping[str, Tensor], gmf: bool = True, loss: Loss = "bpr") -> None:
        if loss not in _LOSSES:
            raise ValueError(f"the loss {loss!r} does not go with a neural network: choose {' or '.join(_LOSSES)}")
        self.gmf = gmf
        self.loss: Loss = loss
        self._depth = sum(f"mlp.{k}.weight" in parameters for k in range(len(parameters)))
        _check(parameters, gmf, self._depth)
        self._parameters = dict(parameters)
        self._mlp_tables = ("users_mlp", "items_mlp") if gmf else ("users", "items")

    @classmethod
    def initialise(
        cls,
        n_users: int,
        n_items: int,
        dim: int,
        hidden: Sequence[int],
        std: float,
        gmf: bool,
        user_generator: torch.Generator,
        item_generator: torch.Generator,
        network_generator: torch.Generator,
        loss: Loss = "bpr",
    ) -> "NeuralCollaborativeFiltering":
        """A float32 model with tables from ``N(0, std^2)``.

        Hidden weights are uniform on ``+-sqrt(6 / fan_in)`` (He et al. 2015, for ReLU), the output's on
        ``+-1 / sqrt(fan_in)``, biases zero. Tables of users, tables of items and the network have a generator
        each, so that clients can start from the same items and network and private user tables.

        Args:
            n_users: ``U``.
            n_items: ``I``.
            dim: ``d``, width of every table.
            hidden: ``h``, widths of the hidden layers, first to last.
            std: Standard deviation of the tables.
            gmf: Which of the two forms.
            user_generator: CPU generator of the user tables; likewise the others.
            item_generator: Of the item tables.
            network_generator: Of the weights.
            loss: ``bpr`` or ``bce``.

        Raises:
            ValueError: For no hidden layer or one without units, or for another loss.
        """
        if not hidden or min(hidden) < 1:
            raise ValueError(f"the network needs one hidden layer or more of at least one unit, not {list(hidden)}")
        parameters = {}
        for suffix in ("", "_mlp") if gmf else ("",):
            parameters[f"users{suffix}"] = torch.randn(n_users, dim, generator=user_generator) * std
            parameters[f"items{suffix}"] = torch.randn(n_items, dim, generator=item_generator) * std
        width = 2 * dim
        for k, units in enumerate(hidden):
            bound = math.sqrt(6 / width)
            weight = torch.empty(units, width).uniform_(-bound, bound, generator=network_generator)
            parameters |= {f"mlp.{k}.weight": weight, f"mlp.{k}.bias": torch.zeros(units)}
            width = units
        width += dim if gmf else 0
        bound = 1 / math.sqrt(width)
        parameters["output.weight"] = torch.empty(1, width).uniform_(-bound, bound, generator=network_generator)
        parameters["output.bias"] = torch.zeros(1)
        return cls(parameters, gmf, loss)

    def parameters(self) -> dict[str, Tensor]:
        """The tensors of the table above by name; not copies."""
        return dict(self._parameters)

    def loss_and_gradients(
        self, users: Tensor, positives: Tensor, negatives: Tensor
    ) -> tuple[float, dict[str, Tensor]]:
        """Mean loss of a batch of triples (n,) and its gradients; see :class:`Recommender`.

        For ``bpr`` the gradient of ``output.bias`` is exactly zero: only differences of scores matter.
        """
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self._parameters.items()}
        n = len(users)
        both = torch.cat([positives, negatives])
        user_table, item_table = self._mlp_tables
        user_weight, item_weight = _halves(leaves)
        user_part = linear(leaves[user_table].index_select(0, users), user_weight, leaves["mlp.0.bias"])
        item_part = linear(leaves[item_table].index_select(0, both), item_weight)
        product_weight, hidden_weight = self._output(leaves)
        logits = self._hidden(leaves, user_part + item_part.view(2, n, -1)) @ hidden_weight  # (2, n)
        if self.gmf:
            product = leaves["users"].index_select(0, users) * leaves["items"].index_select(0, both).view(2, n, -1)
            logits = logits + product @ product_weight
        if self.loss != "bpr":  # there the bias would get rounding errors, which Adam blows up to full steps
            logits = logits + leaves["output.bias"]

        s_i, s_j = logits.detach()
        loss, g_i, g_j = score_loss(self.loss, s_i, s_j)
        # A scalar with the loss's gradient. Handing g to autograd as `grad_outputs` imports sympy, 0.6 s.
        along = (logits * torch.stack([g_i, g_j])).sum()
        gradients = torch.autograd.grad(along, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return loss.item(), dict(zip(leaves, gradients, strict=True))

    def scores(self, users: Tensor) -> Tensor:
        """Logits (n, I) of the users (n,) for all items, in float64.

        The first layer acts on users and items apart, ``W [p; q] = W_p p + W_q q``, so that the widest thing
        formed is (block, I, max h), for as many users at a time as fit into 4 MiB (one at least). All of it is
        float64: float32 products depend in their last bits on how many users are scored together, these do
        not any more once they are rounded to float32.
        """
        t = {name: tensor.double() for name, tensor in self._parameters.items()}
        users = users.to(t["users"].device)
        user_table, item_table = self._mlp_tables
        user_weight, item_weight = _halves(t)
        user_part = linear(t[user_table][users], user_weight, t["mlp.0.bias"])  # (n, h_0)
        item_part = linear(t[item_table], item_weight)  # (I, h_0)
        product_weight, hidden_weight = self._output(t)
        n_items = len(item_part)
        scores = t["output.bias"].repeat(len(users), n_items)
        if self.gmf:
            scores.addmm_(t["users"][users] * product_weight, t["items"].T)
        widest = max(len(t[f"mlp.{k}.bias"]) for k in range(self._depth))
        block = max(1, _BLOCK_BYTES // (8 * max(1, n_items) * widest))
        for rows, part in zip(scores.split(block), user_part.split(block), strict=True):
            rows += self._hidden(t, part[:, None] + item_part) @ hidden_weight
        return scores

    def item_vectors(self) -> None:
        """None: the scores are no dot products."""
        return None

    def _hidden(self, t: dict[str, Tensor], first: Tensor) -> Tensor:
        """Last hidden layer (..., h_last) from the first one's values before its ReLU (..., h_0), which it changes."""
        hidden = first.relu_()
        for k in range(1, self._depth):
            hidden = linear(hidden, t[f"mlp.{k}.weight"], t[f"mlp.{k}.bias"]).relu_()
        return hidden

    def _output(self, t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Output weights of the product (d,), or (0,) without ``gmf``, and of the last hidden layer (h_last,)."""
        weight = t["output.weight"][0]
        d = t["users"].shape[1] if self.gmf else 0
        return weight[:d], weight[d:]


def _halves(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The first layer's weights of the user's and of the item's vector, (h_0, d) each."""
    user_half, item_half = t["mlp.0.weight"].chunk(2, dim=1)
    return user_half, item_half


def _check(parameters: Mapping[str, Tensor], gmf: bool, depth: int) -> None:
    """Raise a ValueError unless names, shapes and types are those of the class's docstring."""
    form = "NeuMF" if gmf else "the MLP alone"
    names = ["users", "items", *(["users_mlp", "items_mlp"] if gmf else [])]
    for k in range(max(1, depth)):
        names += [f"mlp.{k}.weight", f"mlp.{k}.bias"]
    names += ["output.weight", "output.bias"]
    if missing := [name for name in names if name not in parameters]:
        raise ValueError(f"the parameters of {form} lack {', '.join(missing)}")
    if unknown := [name for name in parameters if name not in names]:
        raise ValueError(f"{form} has no parameter {', '.join(unknown)}")

    dtype = parameters["users"].dtype
    for name, shape in _shapes(parameters, gmf, depth):
        tensor = parameters[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"the parameter {name!r} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype != dtype or not tensor.is_floating_point():
            raise ValueError(
                f"the parameter {name!r} is {tensor.dtype}: all must have one floating type, and 'users' is {dtype}"
            )


def _shapes(parameters: Mapping[str, Tensor], gmf: bool, depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every name and the shape that it must have, given ``U``, ``d``, ``I`` and ``h`` as the tensors say."""

    def size(name: str, axis: int) -> int:
        shape = parameters[name].shape
        return shape[axis] if axis < len(shape) else -1  # fits nothing

    d = size("users", 1)
    for table in ("users", "items"):
        yield table, (size(table, 0), d)
        if gmf:
            yield f"{table}_mlp", (size(table, 0), d)
    width = 2 * d
    for k in range(depth):
        units = size(f"mlp.{k}.weight", 0)
        yield f"mlp.{k}.weight", (units, width)
        yield f"mlp.{k}.bias", (units,)
        width = units
    yield "output.weight", (1, width + d if gmf else width)
    yield "output.bias", (1,)
