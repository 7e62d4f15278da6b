"""Seconds of named functions, recorded from outside: functions are wrapped by name, and no code of the app changes.

Every process of a run writes its spans into a file of its own; their times come from the machine's monotonic clock, so
that spans of all processes of one machine can be set beside each other.
"""

import functools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from typing import Any

WAITING = "waiting"  # nobody of a run does anything that is recorded

Name = str | Callable[..., str]  # of a span: fixed, or made of the function's arguments


@dataclass(frozen=True)
class Span:
    """One call of a recorded function.

    Attributes:
        name: What was recorded.
        thread: Process and thread.
        start: Monotonic seconds.
        end: Monotonic seconds.
        own: Seconds without those of spans inside it.
    """

    name: str
    thread: str
    start: float
    end: float
    own: float

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start


class Recorder:
    """Writes the spans of this process into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def wrap(self, function: Callable[..., Any], name: Name) -> Callable[..., Any]:
        """`function`, with a span for each call."""

        @functools.wraps(function)
        def recorded(*arguments: Any, **options: Any) -> Any:
            # Seconds of the spans inside each open span, and the spans that are not yet written.
            inside: list[float] = self._of_thread.__dict__.setdefault("inside", [])
            done: list[tuple[Any, ...]] = self._of_thread.__dict__.setdefault("done", [])
            inside.append(0.0)
            start = time.monotonic()
            try:
                return function(*arguments, **options)
            finally:
                end = time.monotonic()
                own = end - start - inside.pop()
                done.append((name if isinstance(name, str) else name(*arguments, **options), start, end, own))
                if inside:
                    inside[-1] += end - start
                else:  # writing is no part of any span
                    self._write(done)

        return recorded

    def _write(self, done: list[tuple[Any, ...]]) -> None:
        thread = f"{os.getpid()}/{threading.get_ident()}"
        text = "".join(json.dumps([name, thread, *times]) + "\n" for name, *times in done)
        done.clear()
        with self._lock:
            self._file.write(text)
            self._file.flush()  # Flower kills its workers in the end

    def close(self) -> None:
        """Nothing is recorded any more."""
        self._file.close()


@contextmanager
def replaced(owner: Any, attribute: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Change a function of a module or a class for the length of a block."""
    before = getattr_static(owner, attribute)
    if isinstance(before, classmethod):
        after: Any = classmethod(change(before.__func__))
    else:
        after = change(before)
    setattr(owner, attribute, after)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def resolve(target: str) -> tuple[Any, str]:
    """Owner and attribute of `module:function` or `module:Class.method`, where the owner itself defines it.

    Raises:
        AttributeError: There is no such function.
    """
    module, _, path = target.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = import_module(module)
    for parent in parents:
        owner = getattr(owner, parent, None)
    if attribute not in vars(owner or object):
        raise AttributeError(
            f"the benchmark times {target}, which is not there any more: correct its name in benchmarks/probe.py"
        )
    return owner, attribute


@contextmanager
def recording(recorder: Recorder, targets: Iterable[tuple[str, Name]]) -> Iterator[None]:
    """Record functions, given as for :func:`resolve` with the names of their spans, for the length of a block."""
    with ExitStack() as stack:
        for target, name in targets:
            wrap = functools.partial(recorder.wrap, name=name)
            stack.enter_context(replaced(*resolve(target), wrap))
        yield


def read_spans(folder: Path) -> list[Span]:
    """All spans that processes wrote into `folder`, by start."""
    lines = (line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines())
    return sorted((Span(*json.loads(line)) for line in lines), key=lambda span: span.start)


def attribute(
    spans: Iterable[Span], start: float, end: float, lanes: Iterable[str], idle: Iterable[str] = ()
) -> dict[str, float]:
    """Divide the time from `start` to `end` among what was going on.

    Each moment is divided equally among the lanes, the threads that work side by side. What a lane has of it goes to
    the innermost span that is open in it; where none is, to what other threads do at that moment (equally); where these
    do nothing either, to :data:`WAITING`. So the parts sum to `end - start`, whatever runs side by side.

    Args:
        spans: Of all threads.
        start: Monotonic seconds.
        end: Monotonic seconds.
        lanes: Threads that work side by side, at least one.
        idle: Names of spans in which a thread itself does nothing.

    Returns:
        Seconds by name of span.
    """
    workers = sorted(set(lanes))
    pauses = set(idle)
    events: list[tuple[float, int, float, Span]] = []
    for span in spans:
        if span.end > start and span.start < end:
            # What ends comes before what starts; of equal starts the longer span is the outer one.
            events.append((max(span.start, start), 1, -span.end, span))
            events.append((min(span.end, end), 0, -span.start, span))
    events.sort(key=lambda event: event[:3])
    open_: dict[str, list[Span]] = defaultdict(list)
    parts: dict[str, float] = defaultdict(float)
    now = start
    for moment, begins, _, span in events:
        if moment > now:
            _share(parts, moment - now, open_, workers, pauses)
            now = moment
        if begins:
            open_[span.thread].append(span)
        else:
            open_[span.thread].remove(span)
    if end > now:
        _share(parts, end - now, open_, workers, pauses)
    return dict(parts)


def _share(
    parts: dict[str, float], seconds: float, open_: dict[str, list[Span]], workers: list[str], pauses: set[str]
) -> None:
    """Add one moment, in which nothing begins or ends, to `parts`."""
    active = {thread: stack[-1].name for thread, stack in open_.items() if stack and stack[-1].name not in pauses}
    others = [name for thread, name in active.items() if thread not in workers] or [WAITING]
    for worker in workers:
        names = [active[worker]] if worker in active else others
        for name in names:
            parts[name] += seconds / len(workers) / len(names)
