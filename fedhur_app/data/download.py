"""Downloads that go on where they stopped, are verified, and are either whole or absent.

What arrives grows in `<target>.part`. Beside it `<target>.part.json` remembers which version of the file that is: its
address, its length and what the server calls it (ETag, Last-Modified). Both stay when the connection is lost or the
process is killed, and the next call asks for the rest only (HTTP Range, RFC 9110 section 14), on condition that the
file is still the same (If-Range, section 13.1.5). The target appears by one rename, after its checksum was right.
"""

import contextlib
import email.message
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhur_app.data.errors import DataError
from fedhur_app.files import read_json, write_json

TIMEOUT_SECONDS = 15.0  # to connect, and between two pieces
WAITS = (1.0, 3.0, 10.0)  # seconds before another try, as long as nothing more arrives
LONGEST_WAIT = 60.0  # that a server may ask for
TEXT_BYTES = 1 << 16  # at most, of a published checksum
SPARE_BYTES = 1 << 24  # of the disk that a download leaves free
CHUNK = 1 << 18
POLL_SECONDS = 0.1

Say = Callable[[str], object]
# Takes the bytes that are there and how many there will be, None where the server does not say.
Meter = Callable[[int, int | None], object]


class DownloadError(DataError):
    """An address did not give the file; the text says which address and why. Another address may."""


class _Lost(Exception):
    """A try failed and another one may succeed.

    Attributes:
        unreachable: No connection came about at all.
        wait: Seconds that the server asks to wait.
    """

    def __init__(self, reason: str, unreachable: bool = False, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.unreachable = unreachable
        self.wait = wait


@dataclass(frozen=True)
class _Part:
    """What has arrived of a file, and of which version of it."""

    path: Path
    note: Path

    @classmethod
    def of(cls, target: Path) -> "_Part":
        return cls(target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json"))

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def version(self) -> dict[str, Any]:
        return read_json(self.note)

    def begin(self, version: dict[str, Any]) -> None:
        """Start from nothing. The part is emptied first: what a note says then never goes with another version."""
        self.path.write_bytes(b"")
        write_json(self.note, version)

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


def download(
    url: str,
    target: Path,
    checksum: str = "",
    size: int | None = None,
    say: Say = print,
    meter: Meter | None = None,
    waits: Sequence[float] = WAITS,
) -> Path:
    """Download a file, or the rest of it, and verify it. A target that is there and right stays.

    Only one process at a time downloads a target; others wait for it.

    Args:
        url: Where the file is.
        target: Where it shall be; its folder is made.
        checksum: `md5:` or `sha256:` and hexadecimal digits; "" where unknown.
        size: Bytes that it must have; None where unknown.
        say: Takes each line that people should read.
        meter: Takes the bytes that are there and the bytes that there will be, again and again.
        waits: Seconds before each further try while nothing more arrives.

    Returns:
        The target.

    Raises:
        DownloadError: The address does not answer, has no such file, or has another one. What has arrived stays for
            the next call, unless it is wrong.
        DataError: The target cannot be written.
    """
    with _writing(target), only_one(target.with_name(f"{target.name}.lock"), say):
        if target.exists():
            problem = wrong(target, checksum, size)
            if not problem:
                return target
            say(f"{target} is not what it should be ({problem}) and is downloaded again")
            target.unlink()
        part = _Part.of(target)
        resumed = part.size() > 0
        _receive_all(url, part, checksum, size, say, meter, waits)
        problem = wrong(part.path, checksum, size)
        if problem and resumed:
            say(f"what arrived from {url} in several parts is wrong ({problem}); starting over")
            part.drop()
            _receive_all(url, part, checksum, size, say, meter, waits)
            problem = wrong(part.path, checksum, size)
        if problem:
            part.drop()
            raise DownloadError(f"{url} sent a wrong file: {problem}; it was deleted")
        os.replace(part.path, target)
        part.drop()
    return target


def wrong(path: Path, checksum: str = "", size: int | None = None) -> str:
    """What is wrong with a file, in words; "" if nothing is.

    Args:
        path: The file.
        checksum: `md5:` or `sha256:` and hexadecimal digits; "" is not compared.
        size: Its length in bytes; None is not compared.
    """
    with path.open("rb") as file:
        page = " (it is a web page, perhaps that of a login)" if file.read(512).lstrip()[:1] == b"<" else ""
        if size is not None and (found := path.stat().st_size) != size:
            return f"it has {found} bytes and should have {size}{page}"
        if checksum:
            algorithm, _, expected = checksum.partition(":")
            file.seek(0)
            digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
            if digest != expected:
                return f"wrong checksum, its {algorithm} is {digest} and should be {expected}{page}"
    return ""


def published_md5(url: str) -> str:
    """The checksum that a publisher keeps in a small text file beside an archive, as `md5:<digits>`.

    Raises:
        DownloadError: The file cannot be had, or holds no MD5.
    """
    try:
        with _open(url, {}) as answer:
            text = answer.read(TEXT_BYTES).decode("ascii", "replace")
    except (_Lost, OSError, http.client.HTTPException) as error:
        raise DownloadError(f"{url} cannot be read ({_reason(error)})") from error
    # `MD5 (name) = digits` or `digits  name`.
    if (found := re.search(r"\b[0-9a-fA-F]{32}\b", text)) is None:
        raise DownloadError(f"{url} holds no MD5")
    return f"md5:{found[0].lower()}"


@contextmanager
def only_one(lock: Path, say: Say) -> Iterator[None]:
    """Let one process at a time into the block; others wait. A killed process leaves no lock behind.

    Args:
        lock: A file that is made for the time of the block; its folder is made if absent.
        say: Is told, once, that there is something to wait for.
    """
    handle = _lock(lock, say)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _lock(lock: Path, say: Say) -> int:
    told = False
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if not told:
                say(f"another process is at work on {lock.stem}; waiting for its end")
                told = True
            time.sleep(POLL_SECONDS)
            continue
        except OSError:
            return handle  # a file system without locks: then nobody is kept out
        # The one before may have deleted the file between opening and locking: then this lock keeps nobody out.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
        os.close(handle)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Errors of the disk, in words; those of the network never get here."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {target} ({error.strerror or error}): make room or get the permission, or set FEDHUR_DATA "
            "to another folder. What has arrived stays, and the next try goes on from there"
        ) from error


def _receive_all(
    url: str,
    part: _Part,
    checksum: str,
    size: int | None,
    say: Say,
    meter: Meter | None,
    waits: Sequence[float],
) -> None:
    """Ask until the whole file is there, and give up after as many tries in a row as there are waits."""
    start = most = part.size()
    failures = 0
    while True:
        try:
            _receive(url, part, checksum, size, say, meter)
            return
        except KeyboardInterrupt:
            say(f"what has arrived ({_mebibytes(part.size())}) stays; the same command goes on from there")
            raise
        except _Lost as lost:
            if part.size() > most:
                most, failures = part.size(), 0
            # An address that cannot be reached at all will not be in some seconds; one that was a moment ago may.
            if failures == len(waits) or (lost.unreachable and most == start):
                kept = f"; what has arrived ({_mebibytes(part.size())}) stays in {part.path} for the next try"
                raise DownloadError(f"{url}: {lost}{kept if part.size() else ''}") from lost.__cause__
            wait = max(waits[failures], min(lost.wait, LONGEST_WAIT))
            failures += 1
            say(f"{url}: {lost}; trying again in {wait:g} seconds")
            time.sleep(wait)


def _receive(url: str, part: _Part, checksum: str, size: int | None, say: Say, meter: Meter | None) -> None:
    """One request for what is missing; what arrives is kept.

    Raises:
        _Lost: Another try may get more.
        DownloadError: It may not.
    """
    have = part.size()
    condition = _range(url, part, have, checksum) if have else {}
    try:
        answer = _open(url, condition)
    except _Lost as lost:
        error = lost.__cause__
        if not (condition and isinstance(error, urllib.error.HTTPError) and error.code == 416):
            raise
        # Nothing comes after what is there: that is all of it, or too much.
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return
        part.drop()
        raise _Lost("what has arrived is longer than the file") from error
    with answer:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
        if answer.status == 206:
            total = _number(found[2]) if found else None
            if not (condition and found and int(found[1]) == have and total == part.version().get("total")):
                part.drop()
                raise _Lost("the server sent another piece than was asked for")
            say(f"going on with {url} after {_mebibytes(have)}")
        else:
            have = 0
            total = _number(answer.headers.get("Content-Length"))
        _check(url, have, total, size, part.path.parent)
        if have == 0:
            part.begin(_version(url, total, answer.headers))
        with part.path.open("ab") as file:
            for chunk in _pieces(answer):
                file.write(chunk)
                have += len(chunk)
                if meter is not None:
                    meter(have, total)
        if total is not None and have < total:
            raise _Lost(f"the connection was lost after {_mebibytes(have)} of {_mebibytes(total)}")


def _open(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Send a request and wait for the beginning of the answer.

    Raises:
        _Lost: No answer, or one that may be another in a moment.
        DownloadError: The server refuses.
    """
    # Identity: an archive that the server compresses for the way would have another length.
    always = {"User-Agent": "fedhur", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=always | headers)
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"the server answers {error.code} {error.reason}"
        if error.code in (408, 416, 425, 429) or error.code >= 500:
            raise _Lost(reason, wait=float(_number(error.headers.get("Retry-After")) or 0)) from error
        raise DownloadError(f"{url}: {reason}") from error
    except urllib.error.URLError as error:
        raise _Lost(f"not reachable ({_reason(error)})", unreachable=True) from error
    except (OSError, http.client.HTTPException) as error:
        raise _Lost(f"no answer ({_reason(error)})") from error


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            # Not read(), which would lose what it has when the connection ends.
            piece = answer.read1(CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _Lost(f"the connection was lost ({_reason(error)})") from error
        if not piece:
            return
        yield piece


def _range(url: str, part: _Part, have: int, checksum: str) -> dict[str, str]:
    """Headers that ask for the rest of this version; {} where nobody could tell a mixture of two versions."""
    version = part.version()
    if version.get("url") != url:
        return {}
    # A weak ETag (W/) does not promise equal bytes, so that it is no condition for a range.
    etag = str(version.get("etag") or "")
    condition = etag if etag and not etag.startswith("W/") else version.get("modified")
    if condition:
        return {"Range": f"bytes={have}-", "If-Range": str(condition)}
    return {"Range": f"bytes={have}-"} if checksum else {}


def _version(url: str, total: int | None, headers: email.message.Message) -> dict[str, Any]:
    return {"url": url, "total": total, "etag": headers.get("ETag"), "modified": headers.get("Last-Modified")}


def _check(url: str, have: int, total: int | None, size: int | None, folder: Path) -> None:
    """Refuse before the first byte what cannot be right or has no room."""
    if total is None:
        return
    if size is not None and total != size:
        raise DownloadError(
            f"{url} offers {total} bytes where {size} are expected: another version, or the page of a login"
        )
    free = shutil.disk_usage(folder).free
    if total - have + SPARE_BYTES > free:
        raise DataError(
            f"{url}: {_mebibytes(total - have)} are needed in {folder}, and {_mebibytes(free)} are free: make room, "
            "or set FEDHUR_DATA to a folder on another disk"
        )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 / 10 else f"{count} bytes"


def _reason(error: BaseException) -> str:
    """The bottom of an error in words."""
    inner = getattr(error, "reason", None) or error
    return str(getattr(inner, "strerror", None) or inner) or type(inner).__name__
