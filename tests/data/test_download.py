"""Downloads against a server in this process that can do all that real ones do to a download."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedhur_app.data import download as module
from fedhur_app.data.download import DownloadError, download, only_one, published_md5, wrong
from fedhur_app.data.errors import DataError
from fedhur_app.data.meter import lines, meter
from tests.data.web import CONTENT

NO_WAITS = (0.0, 0.0, 0.0)


@pytest.fixture
def get(web, tmp_path):
    """Download the file of `web` to downloads/a.zip; `said` are the lines for people."""
    said = []
    target = tmp_path / "downloads" / "a.zip"

    def call(**options):
        options = {"say": said.append, "waits": NO_WAITS} | options
        return download(options.pop("url", web.url), target, **options)

    call.said, call.target, call.part = said, target, target.with_name("a.zip.part")
    return call


def left(get):
    return sorted(path.name for path in get.target.parent.iterdir())


def sums(content=CONTENT):
    return f"md5:{hashlib.md5(content).hexdigest()}", f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("checksum", ["", *sums()])
@pytest.mark.parametrize("announce", [True, False])
def test_a_file_arrives_whole_and_nothing_else_stays(web, get, checksum, announce):
    web.announce = announce
    assert get(checksum=checksum, size=len(CONTENT)) == get.target
    assert get.target.read_bytes() == CONTENT
    assert left(get) == ["a.zip"]
    assert web.asked == [("/a.zip", None)]
    get(checksum=checksum)
    assert len(web.asked) == 1, "what is there and right is not downloaded again"


@pytest.mark.parametrize("named", [{"etag": '"1"'}, {"etag": "", "modified": "Tue, 01 Dec 2009 00:00:00 GMT"}])
def test_a_lost_connection_is_taken_up_where_it_broke(web, get, named):
    vars(web).update(named)
    web.cut, web.cuts = 300_000, 2
    get()
    assert get.target.read_bytes() == CONTENT
    assert [asked[1] for asked in web.asked] == [None, "bytes=300000-", "bytes=600000-"]
    assert any("the connection was lost after 0.3 MiB of 1.0 MiB; trying again" in line for line in get.said)
    assert any("going on with" in line for line in get.said)


def test_what_arrived_stays_for_the_next_call(web, get):
    web.cut = 100_000
    web.etag = ""
    with pytest.raises(DownloadError, match=r"the connection was lost.*what has arrived \(100000 bytes\) stays in"):
        get()
    assert get.part.stat().st_size == 100_000
    assert len(web.asked) == 4, "one call and one for each wait: without a version no part could be asked for"
    assert not get.target.exists()


def test_a_call_goes_on_from_the_part_of_a_call_before(web, get):
    web.cut, web.cuts = 500_000, 1
    with pytest.raises(DownloadError):
        get(waits=())
    assert left(get) == ["a.zip.part", "a.zip.part.json"]
    get()
    assert get.target.read_bytes() == CONTENT
    assert web.asked[-1] == ("/a.zip", "bytes=500000-")


def test_slow_progress_never_exhausts_the_tries(web, get):
    web.cut = 100_000
    get(checksum=sums()[1])
    assert len(web.asked) == 11
    assert get.target.read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over_and_gives_up_in_the_end(web, get):
    web.ranges = False
    web.cut, web.cuts = 400_000, 1
    get()
    assert get.target.read_bytes() == CONTENT
    get.target.unlink()
    web.cuts, web.asked = 10**9, []
    with pytest.raises(DownloadError, match="the connection was lost"):
        get()
    assert len(web.asked) == 4


def test_a_part_of_another_version_is_thrown_away(web, get):
    web.cut, web.cuts = 300_000, 1
    with pytest.raises(DownloadError):
        get(waits=())
    newer = CONTENT[::-1]
    web.files["/a.zip"], web.etag = newer, '"2"'
    get()
    assert get.target.read_bytes() == newer
    assert web.asked[-1] == ("/a.zip", "bytes=300000-"), "asked for the rest of the old one, got all of the new one"


def test_a_part_of_another_address_is_thrown_away(web, get):
    web.files["/mirror.zip"] = CONTENT[::-1]
    web.cut, web.cuts = 300_000, 1
    with pytest.raises(DownloadError):
        get(waits=())
    get(url=f"{web.address}/mirror.zip")
    assert get.target.read_bytes() == CONTENT[::-1]
    assert web.asked[-1] == ("/mirror.zip", None)


@pytest.mark.parametrize("etag", ["", 'W/"1"'])
def test_without_a_version_only_a_checksum_allows_to_go_on(web, get, etag):
    web.etag, web.cut, web.cuts = etag, 300_000, 1
    get(checksum=sums()[0])
    assert web.asked[-1][1] == "bytes=300000-"
    get.target.unlink()
    web.cuts = 1
    get()
    assert web.asked[-1][1] is None


def test_a_mixture_of_two_versions_is_noticed_and_loaded_anew(web, get):
    web.etag, web.cut, web.cuts = "", 300_000, 1
    checksum = sums(CONTENT[::-1])[1]
    with pytest.raises(DownloadError):
        get(waits=(), checksum=checksum)
    web.files["/a.zip"] = CONTENT[::-1]
    get(checksum=checksum)
    assert get.target.read_bytes() == CONTENT[::-1]
    assert any("in several parts is wrong" in line for line in get.said)


@pytest.mark.parametrize("length", [len(CONTENT) + 1, len(CONTENT)])
def test_a_part_that_is_longer_or_complete(web, get, length):
    web.cut, web.cuts = 300_000, 1
    with pytest.raises(DownloadError):
        get(waits=())
    get.part.write_bytes((CONTENT + b"x")[:length])
    get()
    assert get.target.read_bytes() == CONTENT
    assert len(web.asked) == (2 if length == len(CONTENT) else 3)


def test_a_part_without_a_note_or_with_a_damaged_one_is_not_trusted(web, get):
    get.target.parent.mkdir()
    for note in (None, "{", '{"url": 3}', "[]"):
        get.part.write_bytes(b"old" * 1000)
        if note is not None:
            get.part.with_name("a.zip.part.json").write_text(note)
        get()
        assert get.target.read_bytes() == CONTENT
        get.target.unlink()
    assert {asked[1] for asked in web.asked} == {None}


def test_a_server_that_sends_another_piece_is_not_believed(web, get):
    web.cut, web.cuts, web.shift = 300_000, 1, 5
    get()
    assert get.target.read_bytes() == CONTENT
    assert web.asked[-1][1] is None


def test_a_wrong_checksum_is_said_and_leaves_nothing(web, get):
    md5, sha256 = sums(b"something else")
    for checksum in (md5, sha256):
        with pytest.raises(DownloadError, match=rf"{web.url} sent a wrong file: wrong checksum.*{checksum[-9:]}"):
            get(checksum=checksum)
        assert left(get) == []


def test_a_web_page_instead_of_an_archive_is_called_one(web, get):
    web.files["/a.zip"] = b"\n<html>log in</html>"
    with pytest.raises(DownloadError, match="it is a web page"):
        get(checksum=sums()[0])
    assert left(get) == []


def test_another_length_is_refused_before_anything_is_loaded(web, get):
    with pytest.raises(DownloadError, match=f"offers {len(CONTENT)} bytes where 77 are expected"):
        get(size=77)
    assert left(get) == []
    web.announce = False
    with pytest.raises(DownloadError, match=f"it has {len(CONTENT)} bytes and should have 77"):
        get(size=77)
    assert left(get) == []


def test_too_little_room_is_said_before_anything_is_loaded(web, get, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(DataError, match=r"1.0 MiB are needed in .*downloads, and 1.0 MiB are free: make room"):
        get()
    assert left(get) == []


def test_a_disk_that_fills_up_keeps_what_arrived(web, get, monkeypatch):
    def full(done, total):
        if done >= 1 << 19:
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"No space left on device.*make room"):
        get(meter=full)
    assert get.part.stat().st_size >= 1 << 19
    get()
    assert get.target.read_bytes() == CONTENT
    assert web.asked[-1][1].startswith("bytes=")


def test_a_folder_that_cannot_be_written_is_named(web, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/a.zip"):
        download(web.url, tmp_path / "file" / "a.zip", say=lambda line: None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_keeps_what_arrived(web, get, error):
    def stop(done, total):
        raise error

    with pytest.raises(error):
        get(meter=stop)
    arrived = get.part.stat().st_size
    assert 0 < arrived < len(CONTENT)
    assert any("stays; the same command goes on" in line for line in get.said) == (error is KeyboardInterrupt)
    assert left(get) == ["a.zip.part", "a.zip.part.json"]
    get()
    assert get.target.read_bytes() == CONTENT
    assert web.asked[-1][1] == f"bytes={arrived}-"


@pytest.mark.parametrize("code", [403, 404, 410])
def test_a_refusal_is_final(web, get, code):
    web.codes = [code]
    with pytest.raises(DownloadError, match=rf"{web.url}: the server answers {code} "):
        get()
    assert len(web.asked) == 1


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_trouble_of_the_server_is_waited_for(web, get, code):
    web.codes = [code] * 3
    get()
    assert len(web.asked) == 4
    assert sum(f"the server answers {code}" in line for line in get.said) == 3
    get.target.unlink()
    web.codes = [code] * 4
    with pytest.raises(DownloadError, match=f"the server answers {code}"):
        get()


def test_an_address_that_is_not_reachable_is_tried_once(get):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DownloadError, match=rf"127.0.0.1:{port}/a.zip: not reachable \(Connection refused\)$"):
        get(url=f"http://127.0.0.1:{port}/a.zip")
    assert get.said == []


def test_a_server_that_falls_silent_is_left(web, get, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.1)
    web.pause = 0.4
    with pytest.raises(DownloadError, match="timed out"):
        get(waits=())


def test_a_file_that_is_there_and_wrong_is_replaced(web, get):
    get.target.parent.mkdir()
    get.target.write_bytes(b"half")
    get(checksum=sums()[0])
    assert get.target.read_bytes() == CONTENT
    assert any("is downloaded again" in line for line in get.said)


def test_an_empty_file_is_a_file(web, get):
    web.files["/a.zip"] = b""
    assert get(checksum=sums(b"")[1], size=0).read_bytes() == b""


def test_the_meter_sees_every_byte_and_the_start_of_a_part(web, get):
    seen = []
    web.cut, web.cuts = 300_000, 1
    get(meter=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert {total for _, total in seen} == {len(CONTENT)}


def test_wrong_says_what_is_wrong(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    # The digests of "abc" in RFC 1321 and FIPS 180-2.
    md5 = "md5:900150983cd24fb0d6963f7d28e17f72"
    sha256 = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    for checksum in ("", md5, sha256):
        assert wrong(path, checksum) == wrong(path, checksum, 3) == ""
        assert wrong(path, checksum, 4) == "it has 3 bytes and should have 4"
    assert md5[4:] in wrong(path, "md5:" + "0" * 32)


@pytest.mark.parametrize("form", ["MD5 (a.zip) = {}\n", "{}  a.zip\n", "{}"])
def test_a_published_checksum_is_read_in_both_forms(web, form):
    md5 = sums()[0].removeprefix("md5:")
    web.files["/a.zip.md5"] = form.format(md5.upper()).encode()
    assert published_md5(f"{web.url}.md5") == f"md5:{md5}"


def test_a_published_checksum_that_cannot_be_had_is_an_error(web):
    web.files["/page.md5"] = b"<html>"
    with pytest.raises(DownloadError, match="holds no MD5"):
        published_md5(f"{web.address}/page.md5")
    with pytest.raises(DownloadError, match="404"):
        published_md5(f"{web.address}/none.md5")
    web.codes = [503]
    with pytest.raises(DownloadError, match=r"cannot be read.*503"):
        published_md5(f"{web.address}/page.md5")


def test_two_threads_at_once_download_once(web, get):
    web.pause = 0.01
    results = []
    threads = [threading.Thread(target=lambda: results.append(get(checksum=sums()[1]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [get.target] * 4
    assert len(web.asked) == 1
    assert left(get) == ["a.zip"]
    assert any("another process is at work on a.zip" in line for line in get.said)


def _download_in_process(url, target, checksum):
    download(url, target, checksum, say=lambda line: None)


def test_a_killed_process_leaves_a_part_and_no_lock(web, get):
    web.pause = 0.05
    process = multiprocessing.get_context("fork").Process(
        target=_download_in_process, args=(web.url, get.target, sums()[1])
    )
    process.start()
    deadline = time.monotonic() + 10
    while not (get.part.exists() and get.part.stat().st_size > 1 << 17):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not get.target.exists()
    assert json.loads(get.part.with_name("a.zip.part.json").read_text())["etag"] == '"1"'
    web.pause = 0.0
    get(checksum=sums()[1])
    assert get.target.read_bytes() == CONTENT
    assert web.asked[-1][1].startswith("bytes=")
    assert get.said[0].startswith("going on with"), "nothing to wait for"
    assert left(get) == ["a.zip"]


def test_a_lock_is_for_one_at_a_time(tmp_path):
    inside, most, told = [], [], []

    def work():
        with only_one(tmp_path / "x.lock", told.append):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 6
    assert list(tmp_path.iterdir()) == []


def test_lines_come_now_and_then_with_speed_and_time_left():
    said, now = [], [0.0]
    show = lines("x.zip", said.append, 10.0, lambda: now[0])
    mebi = 1 << 20
    for now[0], done in ((0, 10), (4, 20), (10, 30), (15, 40), (20, 50)):
        show(done * mebi, 90 * mebi)
    # 10 MiB were there before: 20 MiB in 10 s, then 40 MiB in 20 s.
    assert said == [
        "x.zip: 30.0 of 90.0 MiB, 2.0 MiB/s, 30 s left",
        "x.zip: 50.0 of 90.0 MiB, 2.0 MiB/s, 20 s left",
    ]
    show(5 * mebi, None)
    now[0] = 30
    show(15 * mebi, None)
    assert said[2:] == ["x.zip: 15.0 MiB, 1.0 MiB/s"]


def test_a_terminal_shows_a_bar_and_says_nothing(capsys):
    said = []
    console = Console(force_terminal=True, width=120, legacy_windows=False, color_system=None)
    with meter("x.zip", said.append, console) as show:
        show(1 << 20, 4 << 20)
        show(2 << 20, 4 << 20)
    shown = capsys.readouterr().out
    assert "x.zip" in shown
    assert "2.0/4.0 MiB" in shown
    assert said == []
    with meter("x.zip", said.append, Console(force_terminal=False)) as show:
        show(1, 2)
    assert (said, capsys.readouterr().out) == ([], "")
