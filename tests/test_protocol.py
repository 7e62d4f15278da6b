"""Messages: what goes in comes out, and the bytes counted are the bytes held."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhur_app.protocol import Content, ProtocolError, bytes_by_record, decode, encode


@given(
    st.dictionaries(
        st.text("abc.", min_size=1),
        st.one_of(
            st.booleans(),
            st.integers(-(2**62), 2**62),
            st.floats(allow_nan=False),
            st.text(min_size=1),
        ),
        max_size=5,
    )
)
def test_fields_survive(fields):
    assert decode(encode(Content(fields))).fields == fields


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (5, 2)])
def test_arrays_survive_with_shape_and_type(dtype, shape):
    tensor = (torch.arange(int(np.prod(shape)), dtype=torch.float64) * 1.5).reshape(shape).to(dtype)
    back = decode(encode(Content(arrays={"record": {"x": tensor}}))).record("record")["x"]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_non_contiguous_tensors_and_numpy_values():
    tensor = torch.arange(6.0).reshape(2, 3).T
    content = Content({"n": np.int64(3), "x": np.float32(0.5), "none": None, "empty": ""}, {"r": {"t": tensor}})
    back = decode(encode(content))
    assert torch.equal(back.record("r")["t"], tensor)
    assert back.fields == {"n": 3, "x": 0.5}


def test_fields_of_other_types_are_refused():
    with pytest.raises(TypeError, match="list"):
        encode(Content({"x": [1, 2]}))


def test_bytes_are_those_of_the_arrays_and_a_header():
    table = torch.zeros(1682, 128)
    counted = bytes_by_record(encode(Content({"round": 3}, {"table": {"items": table}})))
    assert counted["table"] == 1682 * 128 * 4 + 128 + len("items")
    assert counted["fields"] == 8 + len("round")


def test_missing_records_are_named():
    with pytest.raises(ProtocolError, match=r"no record 'filter'; it holds \['table'\]"):
        Content(arrays={"table": {}}).record("filter")
