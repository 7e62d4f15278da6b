"""Spans: what is recorded, and how the moments of a round are divided."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import spans
from benchmarks.spans import WAITING, Recorder, Span, attribute, read_spans, recording


class Shop:
    """Something to be recorded."""

    clock = 0

    def sell(self, times: int) -> int:
        Shop.clock += 1
        return sum(self.count(number) for number in range(times))

    def count(self, number: int) -> int:
        Shop.clock += 3
        return number

    def fail(self) -> None:
        Shop.clock += 2
        raise RuntimeError("sold out")

    @classmethod
    def open(cls) -> str:
        cls.clock += 5
        return cls.__name__


SELL, COUNT, FAIL, OPEN = (f"{__name__}:Shop.{method}" for method in ("sell", "count", "fail", "open"))


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """A recorder whose clock only the shop moves."""
    Shop.clock = 0
    monkeypatch.setattr(spans, "time", SimpleNamespace(monotonic=lambda: Shop.clock))
    recorder = Recorder(tmp_path)
    yield recorder
    recorder.close()


def test_a_span_knows_what_is_its_own(recorder, tmp_path):
    with recording(recorder, [(SELL, "sell"), (COUNT, lambda _, number: f"count {number}")]):
        assert Shop().sell(2) == 1
    found = [(span.name, span.start, span.end, span.own) for span in read_spans(tmp_path)]
    assert sorted(found) == [("count 0", 1, 4, 3), ("count 1", 4, 7, 3), ("sell", 0, 7, 1)]


def test_a_call_that_fails_is_recorded_and_fails(recorder, tmp_path):
    with recording(recorder, [(FAIL, "fail")]), pytest.raises(RuntimeError, match="sold out"):
        Shop().fail()
    assert [(span.name, span.seconds) for span in read_spans(tmp_path)] == [("fail", 2)]


def test_functions_are_as_before_when_the_block_ends(recorder, tmp_path):
    before = dict(vars(Shop))
    with recording(recorder, [(OPEN, "open"), (COUNT, "count")]):
        assert vars(Shop)["count"] is not before["count"]
        assert Shop.open() == "Shop"
    assert {name: vars(Shop)[name] for name in ("open", "count")} == {name: before[name] for name in ("open", "count")}
    assert [span.name for span in read_spans(tmp_path)] == ["open"]
    Shop.open()
    assert len(read_spans(tmp_path)) == 1


@pytest.mark.parametrize("target", [f"{__name__}:Shop.buy", f"{__name__}:Market.sell", f"{__name__}:sell"])
def test_a_function_that_is_gone_is_named(recorder, target):
    with (
        pytest.raises(AttributeError, match=rf"times {target}, .*benchmarks/probe\.py"),
        recording(recorder, [(target, "x")]),
    ):
        pass


def test_files_of_several_processes_are_read_together(tmp_path):
    (tmp_path / "1.jsonl").write_text(json.dumps(["late", "1/1", 5.0, 6.0, 1.0]) + "\n")
    (tmp_path / "2.jsonl").write_text(json.dumps(["early", "2/1", 1.0, 3.0, 2.0]) + "\n")
    assert [(span.name, span.thread) for span in read_spans(tmp_path)] == [("early", "2/1"), ("late", "1/1")]


def span(name: str, thread: str, start: float, end: float) -> Span:
    return Span(name, thread, start, end, end - start)


def test_one_lane_goes_to_its_innermost_span():
    found = attribute([span("outer", "a", 0, 10), span("inner", "a", 2, 5)], 0, 12, ["a"])
    assert found == {"outer": 7, "inner": 3, WAITING: 2}


def test_an_idle_lane_goes_to_what_others_do_or_waits():
    # Two workers: a works throughout, b from 4 on; the server's process packs from 0 to 2, and waits all the time.
    spans = [span("fit", "a", 0, 10), span("fit", "b", 4, 10), span("pack", "s", 0, 2), span("call", "s", 0, 10)]
    spans[2:] = [spans[3], spans[2]]
    assert attribute(spans, 0, 10, ["a", "b"], ["call"]) == {"fit": 8, "pack": 1, WAITING: 1}


def test_spans_are_cut_at_the_edges():
    assert attribute([span("long", "a", -5, 50)], 10, 14, ["a"]) == {"long": 4}
    assert attribute([], 10, 14, ["a"]) == {WAITING: 4}


@st.composite
def threads(draw):
    """Nested spans with whole-numbered edges on three threads; names tell them apart."""
    found = []
    for thread in "abs":

        def grow(first: int, last: int, depth: int, thread: str = thread) -> None:
            while first < last and depth < 3 and draw(st.booleans()):
                start = draw(st.integers(first, last - 1))
                end = draw(st.integers(start + 1, last))
                found.append(span(f"{thread}{len(found)}", thread, start, end))
                grow(start, end, depth + 1)
                first = end

        grow(0, 12, 0)
    return found


@given(threads(), st.integers(0, 5), st.integers(6, 12))
def test_moments_are_divided_as_one_by_one(found, start, end):
    expected: dict[str, float] = {}
    for tick in range(start, end):
        # The innermost span is the one that was found last of those that are open.
        open_ = {each.thread: each.name for each in found if each.start <= tick < each.end}
        for lane in "ab":
            name = open_.get(lane) or open_.get("s") or WAITING
            expected[name] = expected.get(name, 0) + 0.5
    assert attribute(found, start, end, ["a", "b"]) == pytest.approx(expected)
