"""Training of a local recommender on one client's interactions (eq. 1)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from fedhur_app.data.shards import UserItems
from fedhur_app.finite import all_finite
from fedhur_app.models.base import Recommender
from fedhur_app.models.negatives import NegativeSampler
from fedhur_app.models.optimizers import Optimizer, OptimizerName

ExtraGradient = Callable[[dict[str, Tensor], Tensor], tuple[float, dict[str, Tensor]]]


class DivergedError(RuntimeError):
    """Training left the finite numbers; the tables of the model are then useless and must be discarded."""


@dataclass(frozen=True)
class TrainingOptions:
    """How a client trains in one round.

    Attributes:
        epochs: Passes over the client's interactions, >= 1; every pass draws fresh negatives.
        tolerance: End the passes once the mean loss changes by a smaller share than this from one to the next; 0
            never does.
        batch_size: Triples (user, positive, negative) per step; the last batch of a pass may be smaller.
        optimizer: ``adam`` (torch's defaults beside the two numbers below) or ``sgd`` without momentum.
        lr: Step size, > 0.
        item_lr_factor: Item tables (parameters with `items` in their name) learn with ``lr`` times this, > 0.
        weight_decay: L2 coefficient, added to the gradient as torch's optimisers do, on all rows of all
            tables.
        negatives: Negatives per positive, >= 1: an epoch shows every interaction that many times.
        keep_optimizer_state: Go on with the moments of the previous call; otherwise they start from zero
            each time.
    """

    epochs: int = 1
    tolerance: float = 0.0
    batch_size: int = 4096
    optimizer: OptimizerName = "adam"
    lr: float = 0.1
    item_lr_factor: float = 1.0
    weight_decay: float = 0.0
    negatives: int = 1
    keep_optimizer_state: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "negatives"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.optimizer not in get_args(OptimizerName):
            raise ValueError(
                f"unknown optimizer {self.optimizer!r}: choose one of {', '.join(get_args(OptimizerName))}"
            )
        for name in ("lr", "item_lr_factor"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("weight_decay", "tolerance"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")


@dataclass(frozen=True)
class TrainingReport:
    """What one call of :func:`train_locally` did.

    Attributes:
        loss_sum: ``loss_mean * examples``; clients pool as ``sum(loss_sum) / sum(examples)``.
        loss_mean: Mean recommendation loss over the last epoch, each batch as it was before its step (with
            ``alternate``: before the second step); 0 without examples. Neither weight decay nor the extra term is
            in it.
        first_epoch_mean: The same over the first epoch.
        extra_mean: Mean over the last epoch's batches of the extra term, 0 without one.
        examples: Interactions trained on, ``n_k``: those of users for whom a negative exists.
        skipped_users: Users left out because they have seen every item.
        item_counts: (I,) int64, how often each item was trained on as a positive or a negative, over all epochs.
        optimizer_state: State to hand to the next call, by ``"<optimizer>/<parameter>/<entry>"``; empty if it
            is not kept.
    """

    loss_sum: float
    loss_mean: float
    first_epoch_mean: float
    extra_mean: float
    examples: int
    skipped_users: int
    item_counts: Tensor
    optimizer_state: dict[str, Tensor]


def train_locally(
    model: Recommender,
    train: UserItems,
    sampler: NegativeSampler,
    options: TrainingOptions,
    generator: torch.Generator,
    optimizer_state: dict[str, Tensor] | None = None,
    extra_gradient: ExtraGradient | None = None,
    frozen: frozenset[str] = frozenset(),
    alternate: bool = False,
) -> TrainingReport:
    """Train a model in place on one client's interactions.

    Every epoch draws fresh negatives, shuffles the triples and goes through them in batches. A client
    without a trainable interaction changes nothing and draws nothing.

    Args:
        model: The local model; its tables change in place.
        train: The client's training interactions.
        sampler: Negatives for the same interactions.
        options: Epochs, step size and so on.
        generator: CPU generator of the negatives and of the order.
        optimizer_state: ``optimizer_state`` of the previous report; never changed here.
        extra_gradient: Adds a term to the objective. Called for every batch with the model's parameters and
            the batch's distinct items (positives and negatives, rising); returns its value and its gradients
            by parameter name (parameters it leaves out have none).
        frozen: Names of parameters to hold fixed; their optimiser state is handed on untouched.
        alternate: Step the user parameters (names that begin with `user`) of each batch first, then, with gradients
            at the new point, all others (PFedRec's two steps); the extra term goes with the second step.

    Returns:
        Losses, counts and the optimiser state.

    Raises:
        DivergedError: At the first loss, or the first epoch after which a table, is not finite.
        ValueError: For an optimiser state that does not fit, or an unknown name in ``frozen``.
    """
    parameters = model.parameters()
    if unknown := frozen - parameters.keys():
        raise ValueError(f"cannot freeze {sorted(unknown)}: the parameters are {sorted(parameters)}")
    trained = {name: tensor for name, tensor in parameters.items() if name not in frozen}
    state_before = optimizer_state if optimizer_state is not None and options.keep_optimizer_state else {}

    users, positives = (torch.as_tensor(column, dtype=torch.int64) for column in train.pairs())
    keep = sampler.trainable[users]
    users, positives = users[keep], positives[keep]
    examples = len(users)
    item_counts = torch.zeros(sampler.n_items, dtype=torch.int64)
    if examples == 0 or not trained:
        return TrainingReport(0.0, 0.0, 0.0, 0.0, 0, sampler.skipped_users, item_counts, dict(state_before))

    steps = _steps(trained, options, alternate, state_before)
    users, positives = users.repeat(options.negatives), positives.repeat(options.negatives)
    device = next(iter(trained.values())).device

    epoch_means: list[float] = []
    extra_mean = 0.0
    for epoch in range(options.epochs):
        negatives = sampler.sample(users, generator)
        item_counts += torch.bincount(positives, minlength=sampler.n_items)
        item_counts += torch.bincount(negatives, minlength=sampler.n_items)
        order = torch.randperm(len(users), generator=generator)
        triples = torch.stack([users, positives, negatives])[:, order].to(device)
        loss_sum, extras = 0.0, []
        for batch in triples.split(options.batch_size, dim=1):
            for number, optimizers in enumerate(steps, 1):
                loss, gradients = model.loss_and_gradients(batch[0], batch[1], batch[2])
                objective = loss
                if extra_gradient is not None and number == len(steps):
                    extra, extra_gradients = extra_gradient(parameters, torch.unique(batch[1:]))
                    extras.append(extra)
                    objective += extra
                    for name, gradient in extra_gradients.items():
                        gradients[name] = gradients[name] + gradient
                if not math.isfinite(objective):
                    raise DivergedError(_diverged(f"the loss became {objective}", epoch, options))
                for optimizer in optimizers:
                    optimizer.step(gradients)
            loss_sum += loss * batch.shape[1]
        for name, tensor in trained.items():
            if not all_finite(tensor):
                raise DivergedError(
                    _diverged(f"the table {name!r} is no longer finite (last loss {loss:.3g})", epoch, options)
                )
        epoch_means.append(loss_sum / len(users))
        extra_mean = math.fsum(extras) / len(extras) if extras else 0.0
        if epoch and abs(epoch_means[-1] - epoch_means[-2]) < options.tolerance * abs(epoch_means[-2]):
            break

    state_after: dict[str, Tensor] = {}
    for optimizer in (optimizer for optimizers in steps for optimizer in optimizers):
        state_after |= optimizer.state()
    return TrainingReport(
        loss_sum=epoch_means[-1] * examples,
        loss_mean=epoch_means[-1],
        first_epoch_mean=epoch_means[0],
        extra_mean=extra_mean,
        examples=examples,
        skipped_users=sampler.skipped_users,
        item_counts=item_counts,
        optimizer_state=state_after if options.keep_optimizer_state else {},
    )


def _steps(
    trained: dict[str, Tensor], options: TrainingOptions, alternate: bool, state: dict[str, Tensor]
) -> list[list[Optimizer]]:
    """The optimisers of each step of a batch: one for the parameters that share a step and a learning rate."""
    grouped: dict[tuple[bool, bool], list[str]] = {}
    for name in trained:
        second = alternate and not name.startswith("user")
        grouped.setdefault((second, "items" in name and options.item_lr_factor != 1.0), []).append(name)
    rest = {key: value for key, value in state.items() if key.split("/")[1] not in trained}
    steps: dict[bool, list[Optimizer]] = {}
    for (second, scaled), names in sorted(grouped.items()):
        own = {key: value for key, value in state.items() if key.split("/")[1] in names}
        lr = options.lr * options.item_lr_factor if scaled else options.lr
        optimizer = Optimizer(
            options.optimizer, {name: trained[name] for name in names}, lr, options.weight_decay, own | rest
        )
        steps.setdefault(second, []).append(optimizer)
    return [steps[second] for second in sorted(steps)]


def _diverged(what: str, epoch: int, options: TrainingOptions) -> str:
    return (
        f"local training diverged: {what} in epoch {epoch + 1} of {options.epochs} with optimizer "
        f"{options.optimizer} and lr {options.lr:g}; lower the learning rate"
    )
