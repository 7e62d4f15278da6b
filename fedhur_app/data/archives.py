"""Archives that publishers offer: where they are, how they are verified, what they hold."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedhur_app.data.download import DownloadError, Say, download, published_md5, wrong
from fedhur_app.data.errors import DataError
from fedhur_app.data.interactions import Interactions
from fedhur_app.data.meter import meter


@dataclass(frozen=True)
class Archive:
    """A file that a publisher offers.

    Attributes:
        addresses: Where it is, tried in turn. Mirrors and addresses without encryption do no harm: the checksum tells.
        checksum: `md5:` or `sha256:` and digits.
        size: In bytes; None where no source for it is known.
        changes: The publisher replaces the file under its name from time to time, and keeps its MD5 at
            `<address>.md5`. Then `checksum` and `size` are those of the version that this entry was written for.
    """

    addresses: tuple[str, ...]
    checksum: str
    size: int | None = None
    changes: bool = False

    @property
    def file(self) -> str:
        """Name of the file, as people get it who download it by hand."""
        return self.addresses[0].rsplit("/", 1)[1]


@dataclass(frozen=True)
class Verified:
    """An archive on the disk that is what it should be.

    Attributes:
        path: Where it lies.
        source: The address or file that it came from.
        expected: It is the version that its entry was written for.
    """

    path: Path
    source: str
    expected: bool


@dataclass(frozen=True)
class Counts:
    """What a data set holds as published; None where no source for a number is known.

    Attributes:
        users: Users with interactions.
        items: Items with interactions.
        interactions: Pairs of a user and an item, each counted once.
        missing: Share of each number that may be missing after reading.
    """

    users: int | None
    items: int | None
    interactions: int | None
    missing: float = 0.0

    def as_card(self) -> dict[str, int]:
        """The known numbers, ready for JSON."""
        numbers = {"users": self.users, "items": self.items, "interactions": self.interactions}
        return {what: number for what, number in numbers.items() if number is not None}

    def difference(self, data: Interactions) -> str:
        """In which numbers a data set differs from these, in words; "" if in none."""
        found = {"users": data.n_users, "items": len(np.unique(data.items)), "interactions": len(data)}
        return ", ".join(
            f"{found[what]} {what} where {expected} are published"
            for what, expected in self.as_card().items()
            if not expected * (1 - self.missing) <= found[what] <= expected
        )


@dataclass(frozen=True)
class Reading:
    """How an archive becomes a data set.

    Attributes:
        options: Arguments of :class:`fedhur_app.data.importing.ImportOptions`.
        filters: More of them, which leave something out; applied after the counts were compared.
        counts: What is in the archive without the filters.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    filters: Mapping[str, Any] = field(default_factory=dict)
    counts: Counts | None = None


def obtain(archive: Archive, folder: Path, say: Say, file: Path | None = None) -> Verified:
    """Get an archive from the first address that gives the right one, or from the disk.

    Args:
        archive: What is wanted.
        folder: For downloads. A file that was given stays where it is.
        say: Takes each line that people should read.
        file: The archive, where somebody downloaded it by hand.

    Raises:
        DownloadError: No address gave it; the text has the reason of each.
        DataError: The given file is missing or wrong.
    """
    if file is not None:
        return _from_disk(archive, file, say)
    reasons = []
    for address in archive.addresses:
        size = None if archive.changes else archive.size
        try:
            with meter(archive.file, say) as show:
                checksum = _checksum(archive, address, say)
                path = download(address, folder / archive.file, checksum, size, say, show)
        except DownloadError as error:
            reasons.append(str(error))
        else:
            return Verified(path, address, _is_expected(archive, path, say))
    raise DownloadError("\n".join(reasons))


def _from_disk(archive: Archive, file: Path, say: Say) -> Verified:
    if not file.is_file():
        raise DataError(f"{file} is {'a folder' if file.is_dir() else 'not there'}; give the archive {archive.file}")
    try:
        problem = wrong(file, archive.checksum, archive.size)
        if problem and archive.changes:
            problem = wrong(file, _checksum(archive, archive.addresses[0], say))
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from error
    if problem:
        raise DataError(f"{file} is not {archive.file} as published: {problem}")
    return Verified(file, str(file), _is_expected(archive, file, say))


def _checksum(archive: Archive, address: str, say: Say) -> str:
    """The checksum to verify with: that of today where the archive changes."""
    if not archive.changes:
        return archive.checksum
    try:
        return published_md5(f"{address}.md5")
    except DownloadError as error:
        say(f"{error}; {archive.file} is compared with the version that FedHUR knows")
        return archive.checksum


def _is_expected(archive: Archive, path: Path, say: Say) -> bool:
    if not archive.changes or not wrong(path, archive.checksum, archive.size):
        return True
    say(
        f"the publisher has changed {archive.file} since FedHUR was written: results on it cannot be compared with "
        "those on the version before"
    )
    return False


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def by_hand(name: str, archive: Archive) -> str:
    """What people can do where no address works."""
    return (
        f"Check the network and try again; or get {archive.file} in another way, and run: "
        f"fedhur data fetch {name} --file PATH/{archive.file}"
    )
