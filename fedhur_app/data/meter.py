"""How far a download is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedhur_app.data.download import Meter, Say

LINE_SECONDS = 10.0


@contextmanager
def meter(name: str, say: Say, console: Console | None = None) -> Iterator[Meter]:
    """Show the progress of one download for the time of the block.

    Args:
        name: What is downloaded.
        say: Takes the lines where there is no terminal.
        console: Where a bar may be drawn; the standard error stream by default.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lines(name, say)
        return
    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        before: int | None = None

        def show(done: int, total: int | None) -> None:
            nonlocal before
            if before is None or done < before:
                # What was there at the beginning took no time: it must not count as speed.
                bar.reset(task, completed=done, total=total)
            bar.update(task, completed=done, total=total)
            before = done

        yield show


def lines(name: str, say: Say, seconds: float = LINE_SECONDS, clock: Callable[[], float] = time.monotonic) -> Meter:
    """A meter that says a line every so many seconds: bytes, speed, time left."""
    start: tuple[float, int] | None = None
    last = 0.0

    def show(done: int, total: int | None) -> None:
        nonlocal start, last
        now = clock()
        if start is None or done < start[1]:
            start, last = (now, done), now
        if now - last < seconds:
            return
        last = now
        speed = (done - start[1]) / (now - start[0])
        text = f"{name}: {done / 2**20:.1f}"
        if total is not None:
            text += f" of {total / 2**20:.1f}"
        text += f" MiB, {speed / 2**20:.1f} MiB/s"
        if total is not None and speed > 0:
            text += f", {(total - done) / speed:.0f} s left"
        say(text)

    return show
