"""A server in this process that can do all that real ones do to a download."""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedhur_app.data.archives import Archive
from fedhur_app.data.catalog import DATASETS

CONTENT = bytes(range(256)) * 4096  # 1 MiB


@dataclass
class Web:
    """A server of files and what it does to them.

    Attributes:
        files: Content by path.
        ranges: Whether it answers requests for a part.
        etag: Version of the files; "" for a server that names none.
        modified: The same as a date.
        cut: Close the connection after so many bytes of an answer's body; 0: never.
        cuts: How often it still does.
        announce: Whether it says how long an answer is.
        codes: Status of the next requests, instead of a file.
        shift: Answer with bytes that begin so many too late.
        pause: Seconds before each 64 KiB.
        asked: Path and range of each request.
    """

    files: dict[str, bytes] = field(default_factory=lambda: {"/a.zip": CONTENT})
    ranges: bool = True
    etag: str = '"1"'
    modified: str = ""
    cut: int = 0
    cuts: int = 10**9
    announce: bool = True
    codes: list[int] = field(default_factory=list)
    shift: int = 0
    pause: float = 0.0
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""

    @property
    def url(self):
        return f"{self.address}/a.zip"

    def body_of(self, asked_path, headers):
        """Status, headers and body of an answer, as RFC 9110 has it."""
        content = self.files.get(asked_path)
        if content is None:
            return 404, {}, b""
        named = {"ETag": self.etag, "Last-Modified": self.modified}
        named = {key: value for key, value in named.items() if value}
        wanted = re.fullmatch(r"bytes=(\d+)-", headers.get("Range") or "")
        condition = headers.get("If-Range")
        strong = [value for value in (self.etag, self.modified) if value and not value.startswith("W/")]
        if not (self.ranges and wanted and (condition is None or condition in strong)):
            return 200, named, content
        start = int(wanted[1])
        if start >= len(content):
            return 416, named | {"Content-Range": f"bytes */{len(content)}"}, b""
        start += self.shift
        named["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return 206, named, content[start:]


def handler_of(web):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            web.asked.append((self.path, self.headers.get("Range")))
            if web.codes:
                self.send_response(web.codes.pop(0))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status, headers, body = web.body_of(self.path, self.headers)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if web.announce:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if web.cut and web.cuts > 0 and len(body) > web.cut:
                web.cuts -= 1
                body = body[: web.cut]
            try:
                for start in range(0, len(body), 1 << 16):
                    time.sleep(web.pause)
                    self.wfile.write(body[start : start + (1 << 16)])
                    self.wfile.flush()
            except OSError:
                pass  # the client went away
            self.close_connection = True

        def log_message(self, *_):
            pass

    return Handler


@contextmanager
def serving() -> Iterator[Web]:
    """A server on the loopback for the time of the block."""
    served = Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(served))
    served.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def offer(web, monkeypatch, name, content, reading=None, **changes):
    """Let the server have `content` as the archive of a data set, whose entry knows its checksum and size."""
    entry = DATASETS[name]
    address = f"{web.address}/{entry.archive.file}"
    web.files[f"/{entry.archive.file}"] = content
    archive = Archive((address,), f"md5:{hashlib.md5(content).hexdigest()}", len(content))
    entry = replace(entry, archive=replace(archive, **changes), reading=reading or entry.reading)
    monkeypatch.setitem(DATASETS, name, entry)
    return archive


def unreachable(monkeypatch, name="ml-100k"):
    """Nobody answers at the address of the archive."""
    entry = DATASETS[name]
    archive = replace(entry.archive, addresses=(f"http://127.0.0.1:1/{entry.archive.file}",))
    monkeypatch.setitem(DATASETS, name, replace(entry, archive=archive))


def everything(folder):
    """Names of all files and folders below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
