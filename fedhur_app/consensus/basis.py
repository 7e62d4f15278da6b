"""Tables of different widths, or of no common coordinates: compared and moved by what items are to each other."""

import math

import torch
from torch import Tensor

from fedhur_app.consensus.regularisers import sum_of_squares


def map_to_common(own: Tensor, common: Tensor) -> Tensor:
    """The map T (d, g) with `E T (E T)^T` as near to `E E^T` as width g allows, and `E T` as near to G as that allows.

    `T = V Q`: V the min(d, g) leading right singular vectors of E (padded with zero columns), Q the rotation that
    brings `E V` nearest to G (orthogonal Procrustes, Schoenemann 1966). For equal widths T is a rotation.

    Args:
        own: E (n, d), the rows of the items in question.
        common: G (n, g), theirs.
    """
    width, wanted = own.shape[1], common.shape[1]
    wide = own.double()
    vectors = torch.linalg.eigh(wide.T @ wide).eigenvectors.flip(1)  # falling eigenvalues
    leading = torch.zeros(width, wanted, dtype=torch.float64)
    kept = min(width, wanted)
    leading[:, :kept] = vectors[:, :kept]
    left, _, right = torch.linalg.svd((wide @ leading).T @ common.double())
    return (leading @ left @ right).to(own.dtype)


def table_from_common(common: Tensor, width: int) -> Tensor:
    """A table (I, width) with the item relations of G (I, g) as well as that width can hold them.

    A wider table has zero columns left over, a narrower one G's leading principal coordinates.
    """
    if width >= common.shape[1]:
        return torch.nn.functional.pad(common, (0, width - common.shape[1]))
    wide = common.double()
    vectors = torch.linalg.eigh(wide.T @ wide).eigenvectors.flip(1)
    return (wide @ vectors[:, :width]).to(common.dtype)


def distance(own: Tensor, common: Tensor) -> float:
    """`|E - G| / |G|` for tables of one width (0 for equal ones; of a G of zeros: 0 if E is too, else infinite)."""
    return _ratio(sum_of_squares(own - common), sum_of_squares(common))


def relation_distance(own: Tensor, common: Tensor) -> float:
    """`|E E^T - G G^T| / |G G^T|`, whatever the widths."""
    wide, other = own.double(), common.double()
    reference = sum_of_squares(other.T @ other)
    apart = sum_of_squares(wide.T @ wide) - 2 * sum_of_squares(other.T @ wide) + reference
    return _ratio(max(apart, 0.0), reference)


def _ratio(squared: float, reference: float) -> float:
    if reference == 0:
        return 0.0 if squared == 0 else math.inf
    return math.sqrt(squared / reference)
