"""The items of a federation: which there are, in which order, what they are called. All nodes agree on one."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedhur_app.data.errors import DataError
from fedhur_app.data.formats import read_item_file
from fedhur_app.data.interactions import Interactions, in_order
from fedhur_app.data.store import is_data_set, load_interactions
from fedhur_app.files import write_durably


@dataclass(frozen=True)
class Catalogue:
    """Items by number.

    Attributes:
        ids: The original id of item 0, 1, ...
        titles: Title of each item, "" where unknown; () where no titles are known.
    """

    ids: tuple[str, ...]
    titles: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of items."""
        return len(self.ids)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with ids, their order and titles."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    @cached_property
    def _number(self) -> dict[str, int]:
        return {item: number for number, item in enumerate(self.ids)}

    def numbers(self, ids: Sequence[str]) -> np.ndarray:
        """Number of each of some ids, -1 for those that are not in the catalogue: int64 (n,)."""
        return np.fromiter((self._number.get(item, -1) for item in ids), dtype=np.int64, count=len(ids))

    def title(self, item: int) -> str:
        """Title of an item by number, "" where it is unknown."""
        return self.titles[item] if self.titles else ""

    def to_bytes(self) -> bytes:
        """For a message or a file."""
        return json.dumps({"ids": self.ids, "titles": self.titles}, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Catalogue":
        """The inverse of :meth:`to_bytes`.

        Raises:
            DataError: The content is something else.
        """
        try:
            plain = json.loads(content)
            catalogue = cls(tuple(map(str, plain["ids"])), tuple(map(str, plain["titles"])))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError("the catalogue is damaged") from error
        if len(set(catalogue.ids)) != len(catalogue.ids) or len(catalogue.titles) not in (0, len(catalogue.ids)):
            raise DataError("the catalogue contradicts itself: an id occurs twice, or titles are missing")
        return catalogue

    def save(self, path: Path) -> None:
        """Write the catalogue to a file, whole or not at all."""
        write_durably(path, self.to_bytes())


def read_catalogue(path: Path) -> Catalogue:
    """The catalogue that a federation's server reads (`dataset.catalogue`).

    Args:
        path: The folder of a data set (imported or fetched), a file of items such as u.item or movies.csv, or a text
            file with one id a line. Ids are numbered as everywhere: by value if all are whole numbers, else as text.

    Raises:
        DataError: There is no such file, or it names no item.
    """
    if not path.exists():
        raise DataError(f"dataset.catalogue: {path} does not exist")
    if path.is_dir():
        if not is_data_set(path):
            raise DataError(f"dataset.catalogue: {path} is a folder, but not that of a data set: give a file of items")
        return catalogue_of(load_interactions(path))
    items = read_item_file(path)
    if not items.ids:
        raise DataError(f"dataset.catalogue: {path} names no item")
    ids = tuple(in_order(items.ids))
    return Catalogue(ids, tuple(items.titles.get(item, "") for item in ids) if items.titles else ())


def catalogue_of(data: Interactions) -> Catalogue:
    """The items of a data set."""
    titles = () if data.item_titles is None else tuple(data.item_titles.tolist())
    return Catalogue(tuple(data.item_ids.tolist()), titles)
