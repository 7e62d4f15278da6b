"""What would help a client: the direction that lowers its own reconstruction error, as a query (eq. 10-17).

All functions work on one block or on many, padded with zeros: a padded row or column gives zeros.
"""

from typing import Literal

import torch

from fedhur_app.relations.hierarchy import Level
from fedhur_app.seeding import torch_generator

UtilityForm = Literal["symmetric", "local", "right", "left"]


def reconstruction_objective(means: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """``J(F) = 1/2 ||Z^T - Z^T F||_F^2`` (eq. 10) of means ``Z (..., b, d)``, filters ``F (..., b, b)``."""
    transposed = means.transpose(-1, -2)
    return (transposed - transposed @ filters).square().sum(dim=(-2, -1)) / 2


def utility(gram: torch.Tensor, public: torch.Tensor, form: UtilityForm = "symmetric") -> torch.Tensor:
    """Utility ``U``: the symmetrised negative gradient of ``J`` at the public filter (eq. 11-16).

    With ``H = Z Z^T`` the negative gradient is ``H - H F_g``, and ``U = H - (H F_g + F_g H) / 2``.

    Args:
        gram: ``H (..., b, b)`` of the client.
        public: ``F_g (..., b, b)``.
        form: ``symmetric`` is eq. 16. For the study of the query: ``local`` is ``H``, ``right`` is ``H - H
            F_g``, ``left`` is ``H - F_g H``.

    Returns:
        ``(..., b, b)``.

    Raises:
        ValueError: For an unknown form.
    """
    if form == "local":
        return gram
    if form == "right":
        return gram - gram @ public
    if form == "left":
        return gram - public @ gram
    if form == "symmetric":
        product = gram @ public
        return gram - (product + product.transpose(-1, -2)) / 2
    raise ValueError(f"There is no utility form {form!r}; choose 'symmetric', 'local', 'right' or 'left'.")


def projection(level: Level, width: int, seed: int, level_number: int) -> torch.Tensor:
    """Gaussian projection ``P (B, b, q)`` of one level, the same for all clients that know the seed.

    Args:
        level: The level; rows of padding are zero.
        width: ``q``, the number of directions.
        seed: Broadcast by the server.
        level_number: Of the level, so that levels of one shape differ.
    """
    generator = torch_generator(seed, f"projection of level {level_number}")
    return (
        torch.randn(*level.members.shape, width, generator=generator).to(level.members.device) * level.mask[..., None]
    )


def queries(utilities: torch.Tensor, projections: torch.Tensor, normalise: bool = True) -> torch.Tensor:
    """Queries ``Q``: the columns of ``U P`` scaled to unit length (eq. 17); a zero column stays zero.

    Args:
        utilities: ``U (..., b, b)``.
        projections: ``P (..., b, q)``.
        normalise: False gives the sketch ``U P`` itself, which cosine matching needs; energies of it weigh a
            direction by the square of its length.

    Returns:
        ``(..., b, q)``.
    """
    sketch = utilities @ projections
    if not normalise:
        return sketch
    norms = sketch.norm(dim=-2, keepdim=True)
    return torch.where(norms > torch.finfo(norms.dtype).tiny, sketch / norms, 0)
