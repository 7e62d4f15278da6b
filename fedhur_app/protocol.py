"""The messages between server and clients: names, contents, encoding, bytes. The only core file that imports flwr.

A message holds one record of plain values (`fields`) and any number of named array records (docs/protocol.md lists
them stage by stage). Both directions have the same form, so one encoder, one decoder and one byte counter serve all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from torch import Tensor

from fedhur_app.files import ARRAY_HEADERS

PROTOCOL_VERSION = 1
FIELDS = "fields"

Scalar = bool | int | float | str
Arrays = dict[str, dict[str, Tensor]]


class Stage:
    """Message types, in the order in which a round uses them (Flower's form: kind.name)."""

    HELLO = "query.hello"
    JOIN = "query.join"
    ITEMS = "train.items"
    UTILITY = "query.utility"
    PERSONALIZE = "train.personalize"
    REGULARIZED = "train.regularized"
    RANK = "evaluate.rank"
    CHECKPOINT = "query.checkpoint"


STAGES = (
    Stage.HELLO,
    Stage.JOIN,
    Stage.ITEMS,
    Stage.UTILITY,
    Stage.PERSONALIZE,
    Stage.REGULARIZED,
    Stage.RANK,
    Stage.CHECKPOINT,
)


class InProcessContext(Context):
    """Context of a node in this process: its client may keep an object between messages instead of encoded records.

    Encoding and decoding the private state took half of a round's time. Whoever uses `live` must treat what is in it
    as values: a handler that fails must leave it as it was.
    """

    live: Any = None


class ProtocolError(ValueError):
    """A message that does not hold what its stage requires."""


@dataclass
class Content:
    """What a request or a reply says.

    Attributes:
        fields: Plain values. Numbers of numpy are accepted and converted; None is left out.
        arrays: Record name -> array name -> tensor (CPU).
    """

    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)

    def record(self, name: str) -> dict[str, Tensor]:
        """The array record `name`.

        Raises:
            ProtocolError: The message has none.
        """
        if name not in self.arrays:
            raise ProtocolError(f"the message holds no record {name!r}; it holds {sorted(self.arrays)}")
        return self.arrays[name]


def _plain(value: Any) -> Scalar:
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, bool | int | float | str):
        raise TypeError(f"a message field must be bool, int, float or str, not {type(value).__name__}")
    return value


def array_record(tensors: Mapping[str, Tensor | np.ndarray]) -> ArrayRecord:
    """Pack named tensors into a Flower record (copied to the CPU, contiguous)."""
    packed = {}
    for name, value in tensors.items():
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        packed[name] = Array(np.ascontiguousarray(array).reshape(array.shape))
    return ArrayRecord(packed)


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    """Unpack a record into tensors of their own memory.

    The copy is deliberate: arrays read from a byte buffer are not aligned as torch aligns its own, and some BLAS
    kernels round differently on unaligned input, which would break bit-equal runs.
    """
    return {name: torch.tensor(_values(array)) for name, array in record.items()}


def _values(array: Array) -> np.ndarray:
    with ARRAY_HEADERS:
        return array.numpy()


def encode(content: Content) -> RecordDict:
    """Turn `content` into the records of a Flower message."""
    records: dict[str, ArrayRecord | ConfigRecord] = {
        FIELDS: ConfigRecord(
            {key: _plain(value) for key, value in content.fields.items() if value is not None and value != ""}
        )
    }
    for name, tensors in content.arrays.items():
        records[name] = array_record(tensors)
    return RecordDict(cast(dict, records))


def decode(records: RecordDict) -> Content:
    """The inverse of :func:`encode`.

    Raises:
        ProtocolError: The records were not made by :func:`encode`.
    """
    if FIELDS not in records.config_records:
        raise ProtocolError(f"the message has no record {FIELDS!r}; it holds {sorted(records)}")
    return Content(
        dict(records.config_records[FIELDS]),
        {name: tensors_of(record) for name, record in records.array_records.items()},
    )


def with_field(records: RecordDict, key: str, value: Scalar) -> RecordDict:
    """A message with one more plain value; the arrays are shared with `records`, not copied."""
    fields = ConfigRecord({**records.config_records[FIELDS], key: value})
    return RecordDict({**records, FIELDS: fields})


def bytes_by_record(records: RecordDict) -> dict[str, int]:
    """Payload bytes of a message, record by record, as Flower counts them.

    Array data include the 128-byte header that numpy's format puts before each array.
    """
    return {name: record.count_bytes() for name, record in records.items()}
