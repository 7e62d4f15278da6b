"""From settings to a recommender: which model, drawn how, around which tensors."""

import torch
from torch import Tensor

from fedhur_app.config import ModelSettings
from fedhur_app.data.shards import UserItems
from fedhur_app.models.base import Recommender
from fedhur_app.models.lightgcn import LightGCN
from fedhur_app.models.mf import Loss, MatrixFactorization
from fedhur_app.models.ncf import NeuralCollaborativeFiltering


def initial_parameters(
    model: ModelSettings,
    n_users: int,
    n_items: int,
    user_generator: torch.Generator,
    item_generator: torch.Generator,
    network_generator: torch.Generator,
) -> dict[str, Tensor]:
    """Parameters before the first round, float32: tables from ``N(0, init_std^2)``, networks by their fan-in.

    Args:
        model: Kind and sizes.
        n_users: Users of the client, ``U``.
        n_items: Items of the catalogue, ``I``.
        user_generator: Draws what belongs to the client's users.
        item_generator: Draws item tables.
        network_generator: Draws network weights, which clients that average them must start with in common.
    """
    if model.kind in ("ncf", "mlp"):
        return NeuralCollaborativeFiltering.initialise(
            n_users,
            n_items,
            model.dim,
            model.hidden,
            model.init_std,
            model.kind == "ncf",
            user_generator,
            item_generator,
            network_generator,
            loss="bce",
        ).parameters()
    # LightGCN trains the same two tables, as the ego vectors of its graph.
    return MatrixFactorization.initialise(
        n_users, n_items, model.dim, model.init_std, user_generator, item_generator, user_bias=model.user_bias
    ).parameters()


def recommender(model: ModelSettings, loss: Loss, parameters: dict[str, Tensor], train: UserItems) -> Recommender:
    """The model around `parameters`, which it trains in place.

    Args:
        model: Kind and sizes.
        loss: Of the triples.
        parameters: As :func:`initial_parameters` makes them.
        train: The client's training rows, the graph of LightGCN.
    """
    if model.kind in ("ncf", "mlp"):
        return NeuralCollaborativeFiltering(parameters, model.kind == "ncf", loss)
    if model.kind == "lightgcn":
        return LightGCN(parameters["users"], parameters["items"], train, model.layers, loss)
    return MatrixFactorization(parameters["users"], parameters["items"], loss, bias=parameters.get("user_bias"))
