"""Where text comes from: plain and compressed files, members of archives; their encoding; batches of whole lines."""

import bz2
import codecs
import fnmatch
import gzip
import hashlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from fedhur_app.data.errors import DataError

CHUNK = 1 << 24
SAMPLE = 1 << 16
# What decompressors answer to damaged files.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError, ValueError)
_BINARY_STARTS = {
    b"PAR1": "a Parquet file: give it with --format parquet",
    b"PK\x03\x04": "an archive (.zip, .npz, .xlsx)",
    b"\x93NUMPY": "a NumPy array: an .npz with the arrays user and item is needed",
    b"SQLite format 3": "an SQLite database: write its table as CSV",
    b"\xd0\xcf\x11\xe0": "an old Office file: save the table as CSV",
    b"%PDF": "a PDF",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it first",
    b"\xfd7zXZ": "compressed by xz: unpack it first",
    b"7z\xbc\xaf": "a 7z archive: unpack it first",
    b"\x89PNG": "a picture",
}
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f\x1b")) + b"\x7f"


@dataclass(frozen=True)
class Source:
    """A file, or a member of a zip archive; .gz and .bz2 are unpacked while they are read.

    Attributes:
        path: The file.
        member: Name in the archive, "" for a file that is none.
    """

    path: Path
    member: str = ""

    def __str__(self) -> str:
        return f"{self.path} ({self.member})" if self.member else f"{self.path}"

    @property
    def name(self) -> str:
        """Name of the file or member without folders and without .gz or .bz2."""
        name = PurePosixPath(self.member).name if self.member else self.path.name
        return name.removesuffix(".gz").removesuffix(".bz2")

    def beside(self, *patterns: str) -> "Source | None":
        """The first file in the same folder (or archive) whose name is like one of `patterns`, also compressed.

        Capital letters do not matter.
        """
        if self.member:
            folder = PurePosixPath(self.member).parent
            found = [Source(self.path, each) for each in _members(self.path) if PurePosixPath(each).parent == folder]
        else:
            found = [Source(each) for each in sorted(self.path.parent.iterdir()) if each.is_file()]
        for pattern in patterns:
            for source in found:
                if fnmatch.fnmatchcase(source.name.lower(), pattern.lower()) and source != self:
                    return source
        return None

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The content without its compression.

        Raises:
            DataError: The file cannot be opened, or is damaged (also while it is read).
        """
        try:
            if self.member:
                with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
                    yield file
                return
            with self.path.open("rb") as plain:
                start = plain.read(3)
                plain.seek(0)
                if start[:2] == b"\x1f\x8b":
                    with gzip.open(plain) as unpacked:
                        yield unpacked  # type: ignore[misc]
                elif start == b"BZh":
                    with bz2.open(plain) as unpacked:
                        yield unpacked
                else:
                    yield plain
        except (DataError, UnicodeDecodeError):
            raise
        except PermissionError:
            raise DataError(f"{self} cannot be read: no permission") from None
        except _DAMAGED as error:
            raise DataError(f"{self} is damaged or cannot be unpacked ({error}); get the file again") from error

    def sha256(self) -> str:
        """SHA-256 of the file as it lies on the disk."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def find_source(path: Path, known: Sequence[str] = ()) -> Source:
    """The source that a path means.

    Args:
        path: A file; of an archive the only member is meant, else the only one like a pattern in `known`.
        known: Patterns for names of files.

    Raises:
        DataError: No such file, a folder, an archive in which no member is the obvious one.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder; a file is needed")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if start != b"PK\x03\x04":
        return Source(path)
    members = _members(path)
    if not members:
        raise DataError(f"{path}: the archive is empty")
    if "[Content_Types].xml" in members:
        raise DataError(f"{path} is a workbook or another document of Office: save the table as CSV")
    if len(members) == 1:
        return Source(path, members[0])
    for pattern in known:
        found = [name for name in members if fnmatch.fnmatchcase(PurePosixPath(name).name.lower(), pattern.lower())]
        if len(found) == 1:
            return Source(path, found[0])
    shown = ", ".join(members[:8]) + (", ..." if len(members) > 8 else "")
    raise DataError(f"{path}: which of its {len(members)} files holds the interactions? ({shown}) Unpack it first")


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except _DAMAGED as error:
        raise DataError(f"{path} is damaged or cannot be unpacked ({error}); get the file again") from error
    return [name for name in names if not name.endswith("/") and not name.startswith("__MACOSX/")]


@dataclass(frozen=True)
class Text:
    """A source of which encoding and line end are known.

    Attributes:
        source: Where it comes from.
        encoding: Of Python, such as utf-8-sig.
        line_end: Line feed, or carriage return where no line ends otherwise; both together count as line feed.
    """

    source: Source
    encoding: str
    line_end: str = "\n"

    def batches(self, size: int = CHUNK) -> Iterator[str]:
        """Whole lines, many at once, with line ends between them; no line end after the last line of a batch."""
        decoder = codecs.getincrementaldecoder(self.encoding)()
        rest = ""
        with self.source.open() as file:
            while chunk := file.read(size):
                text = rest + decoder.decode(chunk)
                whole, end, rest = text.rpartition(self.line_end)
                if end:
                    yield whole
            rest += decoder.decode(b"", final=True)
        if rest:
            yield rest

    def sample(self, lines: int = 200) -> list[str]:
        """The first lines that are not blank; the last one only if it is whole."""
        with self.source.open() as file:
            content = file.read(SAMPLE)
            more = bool(file.read(1))
        text = codecs.getincrementaldecoder(self.encoding)().decode(content, final=not more)
        found = text.split(self.line_end)
        if more and len(found) > 1:
            found.pop()
        return [line for line in (row.removesuffix("\r") for row in found) if line.strip()][:lines]


def open_text(source: Source, only_utf_8: bool = False) -> Text:
    """Find the encoding of a text: UTF-8 with or without a mark, UTF-16 with a mark, else Latin-1.

    The whole file is looked at, since a title in its last line may decide. Text of which more letters are in UTF-8 than
    are not is damaged UTF-8: as Latin-1 all these letters would come out wrong, without a word.

    Args:
        source: What to read.
        only_utf_8: Accept no other encoding.

    Raises:
        DataError: The file is empty, or is no text, or not in UTF-8 though it should be, or only partly in UTF-8.
    """
    with source.open() as file:
        start = file.read(SAMPLE)
        _refuse_binary(source, start)
        if start[:2] in _UTF_16:
            return _checked(Text(source, "utf-16", _line_end(start.decode("utf-16", "ignore"))))
        line_end = _line_end(start.decode("latin-1"))
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        chunk, lines, blank, letters = start, 0, True, 0
        while chunk:
            blank = blank and not chunk.strip(b" \t\r\n\xef\xbb\xbf")
            try:
                if not chunk.isascii() or decoder.getstate() != (b"", 0):
                    letters += _beyond_ascii(decoder.decode(chunk))
            except UnicodeDecodeError as error:
                line = lines + error.object.count(b"\n", 0, error.start) + 1
                if only_utf_8 or start.startswith(codecs.BOM_UTF8):
                    raise DataError(f"{source}, line {line}: not utf-8 text; is it Latin-1?") from error
                around = error.object.decode("utf-8", "replace")
                wrong = around.count(_REPLACED)
                if letters + _beyond_ascii(around) - wrong > wrong:
                    raise DataError(
                        f"{source}, line {line}: not UTF-8 text, though other lines are; correct it, or write all "
                        "lines in one encoding"
                    ) from error
                return Text(source, "latin-1", line_end)
            lines += chunk.count(b"\n")
            chunk = file.read(CHUNK)
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return Text(source, "latin-1", line_end)
    if blank:
        raise DataError(f"{source} is empty")
    return Text(source, "utf-8-sig", line_end)


_REPLACED = "\ufffd"


def _beyond_ascii(text: str) -> int:
    """Number of characters beyond ASCII."""
    return len(text) - len(text.encode("ascii", "ignore"))


def _refuse_binary(source: Source, start: bytes) -> None:
    for mark, what in _BINARY_STARTS.items():
        if start.startswith(mark):
            raise DataError(f"{source} is not a text file: it is {what}")
    controls = len(start) - len(start.translate(None, _CONTROLS))
    if start[:2] not in _UTF_16 and controls > 0.1 * len(start):
        raise DataError(f"{source} is not a text file (it holds zero bytes or other control characters)")


def _line_end(text: str) -> str:
    return "\r" if "\n" not in text and "\r" in text.rstrip("\r") else "\n"


def _checked(text: Text) -> Text:
    lines, blank = 0, True
    try:
        for batch in text.batches():
            lines += batch.count(text.line_end) + 1
            blank = blank and not batch.strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{text.source}, after line {lines}: not {text.encoding} text") from error
    if blank:
        raise DataError(f"{text.source} is empty")
    return text
