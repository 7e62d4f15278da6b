"""What a market uploads in fewer bytes: only the rows that differ most, and 8 bits a number.

Error feedback, the memory of what a compressed upload left out, needs no memory here. A market uploads its difference
from G, `Delta = E - G`, and not a step: what was left out of `C(Delta)` is still in the next difference, since
`E' - (G + C(Delta)) = (E' - E) + (Delta - C(Delta))`. Adding it once more would count it twice.
"""

import torch
from torch import Tensor


def compress(items: Tensor, rows: Tensor, top_rows: float | None, bits: int) -> dict[str, Tensor]:
    """The record that travels.

    Args:
        items: (n,) int64, distinct, rising.
        rows: (n, d) float32, the differences of these items.
        top_rows: Share of the rows that travel, those of the largest norm (at least one); None: all.
        bits: 32, or 8: every row as integers -127..127 times one float32 scale, its largest magnitude / 127.

    Returns:
        `items` int32 (m,), `rows` float32 or int8 (m, d), and with 8 bits `scale` float32 (m,).
    """
    if top_rows is not None and len(items):
        number = max(1, round(top_rows * len(items)))
        best = rows.norm(dim=1).topk(number).indices.sort().values
        items, rows = items[best], rows[best]
    record = {"items": items.to(torch.int32)}
    if bits == 32:
        return record | {"rows": rows}
    scale = rows.abs().amax(dim=1).div(127)
    return record | {"rows": (rows / scale.clamp_min(1e-38)[:, None]).round().to(torch.int8), "scale": scale}


def decompress(record: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The items (m,) int64 and their differences (m, d) float32."""
    rows = record["rows"].float()
    if "scale" in record:
        rows = rows * record["scale"][:, None]
    return record["items"].long(), rows
