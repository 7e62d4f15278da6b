"""Where the mathematics runs."""

import torch

from fedhur_app.config import ConfigError


def resolve_device(setting: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means in this process.

    Raises:
        ConfigError: `cuda` was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("setting 'device' is 'cuda', but torch sees no CUDA device here: set device=auto or cpu")
    return torch.device("cuda" if setting != "cpu" and available else "cpu")
