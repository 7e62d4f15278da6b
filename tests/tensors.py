"""What the tests of memory look at: the sizes of the tensors that a block of code makes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Within the block, notes the largest tensor that any operation returned.

    Attributes:
        numbers: Its number of entries.
        bytes: Of the largest in bytes, which may be another one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result
