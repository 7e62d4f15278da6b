"""Adam and SGD on named tensors, by torch's functional forms.

`torch.optim.Optimizer` objects import the whole compiler stack at their first use, three seconds that every Ray
worker (and on a device every message) would pay. The functions behind them do not, and their state is plain tensors.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

OptimizerName = Literal["adam", "sgd"]


class Optimizer:
    """Steps on `parameters`, in place.

    Args:
        kind: `adam` (betas 0.9 and 0.999, epsilon 1e-8) or `sgd` (no momentum).
        parameters: Tensors by name.
        lr: Learning rate.
        weight_decay: L2 penalty, added to the gradients.
        state: What :meth:`state` gave earlier; never changed, copied. Entries of tensors that are not among
            `parameters` are handed on untouched.

    Raises:
        ValueError: The state is of another optimiser or of other shapes.
    """

    def __init__(
        self,
        kind: OptimizerName,
        parameters: dict[str, Tensor],
        lr: float,
        weight_decay: float = 0.0,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        self.kind = kind
        self.parameters = parameters
        self.lr = lr
        self.weight_decay = weight_decay
        self._kept = dict(state or {})
        self._check()
        self._first: dict[str, Tensor] = {}
        self._second: dict[str, Tensor] = {}
        self._steps: dict[str, Tensor] = {}
        if kind == "adam":
            for name, tensor in parameters.items():
                self._first[name] = self._restored(name, "exp_avg", torch.zeros_like(tensor))
                self._second[name] = self._restored(name, "exp_avg_sq", torch.zeros_like(tensor))
                self._steps[name] = self._restored(name, "step", torch.zeros((), device=tensor.device))

    def step(self, gradients: dict[str, Tensor]) -> None:
        """One step along `gradients`, which has an entry for every parameter."""
        names = list(self.parameters)
        tensors = list(self.parameters.values())
        along = [gradients[name] for name in names]
        if self.kind == "adam":
            # fused: one pass over each table, 0.2 ms against 3.9 ms for 1682 x 128 on one CPU thread.
            adam(
                tensors,
                along,
                [self._first[name] for name in names],
                [self._second[name] for name in names],
                [],
                [self._steps[name] for name in names],
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self.lr,
                weight_decay=self.weight_decay,
                eps=1e-8,
                maximize=False,
            )
        else:
            sgd(
                tensors,
                along,
                [None] * len(tensors),
                fused=True,
                weight_decay=self.weight_decay,
                momentum=0.0,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts under keys such as `adam/items/exp_avg`; SGD has none."""
        flat = dict(self._kept)
        for entry, tensors in (("exp_avg", self._first), ("exp_avg_sq", self._second), ("step", self._steps)):
            flat |= {f"{self.kind}/{name}/{entry}": tensor for name, tensor in tensors.items()}
        return flat

    def _restored(self, name: str, entry: str, default: Tensor) -> Tensor:
        stored = self._kept.get(f"{self.kind}/{name}/{entry}")
        return default if stored is None else stored.to(default.device, copy=True)

    def _check(self) -> None:
        for key, value in self._kept.items():
            kind, name, entry = key.split("/")
            if kind != self.kind:
                raise ValueError(f"the optimiser state holds {key!r}, but the optimizer is {self.kind}")
            tensor = self.parameters.get(name)
            if tensor is not None and entry != "step" and value.shape != tensor.shape:
                raise ValueError(
                    f"optimiser state {key!r} has shape {tuple(value.shape)}, its table {tuple(tensor.shape)}"
                )
