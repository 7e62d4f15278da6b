from itertools import pairwise

import pytest
import torch

from fedhur_app.consensus.compression import compress, decompress
from fedhur_app.protocol import Content, bytes_by_record, decode, encode

GENERATOR_SEED = 5


def rows(number: int = 20, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    return torch.arange(number) * 3, torch.randn(number, width, generator=generator)


def test_everything_in_full_is_lossless() -> None:
    items, differences = rows()
    back = decompress(compress(items, differences, None, 32))
    assert torch.equal(back[0], items)
    assert torch.equal(back[1], differences)


def test_eight_bits_err_by_half_a_step_at_most() -> None:
    items, differences = rows()
    _, back = decompress(compress(items, differences, None, 8))
    step = differences.abs().amax(dim=1, keepdim=True) / 127
    assert ((back - differences).abs() <= step * 0.5001).all()


def test_a_row_of_zeros_stays_zero() -> None:
    assert decompress(compress(torch.tensor([4]), torch.zeros(1, 3), None, 8))[1].tolist() == [[0.0, 0.0, 0.0]]


def test_top_rows_are_those_that_differ_most() -> None:
    items, differences = torch.tensor([2, 5, 7, 9]), torch.tensor([[1.0], [-4.0], [3.0], [0.5]])
    record = compress(items, differences, 0.5, 32)
    assert record["items"].tolist() == [5, 7]
    assert record["rows"].tolist() == [[-4.0], [3.0]]
    assert compress(items, differences, 0.01, 32)["items"].tolist() == [5]


def test_nothing_trained_is_an_empty_record() -> None:
    items, back = decompress(compress(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3), 0.1, 8))
    assert items.shape == (0,)
    assert back.shape == (0, 3)


def test_bytes_on_the_wire() -> None:
    items, differences = rows(100, 64)
    sizes = {}
    for name, options in {"full": (None, 32), "small": (0.1, 8)}.items():
        message = encode(Content({}, {"difference": compress(items, differences, *options)}))
        sizes[name] = bytes_by_record(message)["difference"]
        assert decode(message).record("difference")["rows"].shape[1] == 64
    # 100 rows of 64 float32 and an int32 against 10 of 64 int8, an int32 and a float32, with headers.
    assert sizes["full"] == pytest.approx(100 * (64 * 4 + 4), rel=0.02)
    assert sizes["small"] == pytest.approx(10 * (64 + 8), abs=600)


@pytest.mark.parametrize(("top_rows", "bits"), [(0.25, 32), (0.25, 8), (None, 8)])
def test_what_an_upload_leaves_out_is_in_the_next_one(top_rows: float | None, bits: int) -> None:
    """One market that stands still: G reaches its table, with no memory of errors."""
    items, table = rows()
    common = torch.zeros_like(table)
    errors = []
    for _ in range(12):
        sent, difference = decompress(compress(torch.arange(len(items)), table - common, top_rows, bits))
        common[sent] += difference
        errors.append(float((table - common).norm()))
    assert errors[-1] < 1e-4 * float(table.norm())
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(errors))
