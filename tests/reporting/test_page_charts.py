import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhur_app.reporting.page_charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    Mark,
    dot_chart,
    line_chart,
    log_ticks,
    scatter_chart,
    ticks,
)

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.13, 0.24, [0.1, 0.15, 0.2, 0.25]),
        (1, 30, [0, 10, 20, 30]),
        (0.5, 0.5, [0.44, 0.46, 0.48, 0.5, 0.52, 0.54, 0.56]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e6))
def test_ticks_cover_all_values_in_equal_steps(low: float, length: float) -> None:
    found = ticks(low, low + length)
    assert 2 <= len(found) <= 8
    step = found[1] - found[0]
    assert np.diff(found) == pytest.approx(step, rel=1e-3)
    assert found[0] <= low + step * 1e-3
    assert found[-1] >= low + length - step * 1e-3


@given(st.floats(1e-6, 1e6), st.floats(20, 1e6))
def test_logarithmic_ticks_are_rising_powers_and_their_parts(low: float, ratio: float) -> None:
    found = log_ticks(low, low * ratio)
    assert found[0] <= low * 1.001
    assert found[-1] >= low * ratio * 0.999
    assert found == sorted(found)
    assert {f"{tick:e}"[0] for tick in found} <= {"1", "2", "5"}


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def places(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", text)]


def test_a_line_goes_through_its_points_and_its_band_through_the_extremes() -> None:
    points = [(1, 0.0, 0.0, 0.0), (2, 0.5, 0.4, 0.6), (3, 1.0, 1.0, 1.0)]
    text = line_chart("x", [Line(0, "<a>", points)], "round", "ndcg", "Title", "Says")
    chart = parsed(text)
    line = chart.find(f".//{SPACE}polyline")
    assert line is not None
    bottom, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    centre = (LEFT + WIDTH - RIGHT) / 2
    assert places(line.attrib["points"]) == [(LEFT, bottom), (centre, middle), (WIDTH - RIGHT, TOP)]
    band = chart.find(f".//{SPACE}polygon")
    assert band is not None
    height = HEIGHT - BOTTOM - TOP
    upper, lower = places(band.attrib["points"])[1], places(band.attrib["points"])[4]
    assert upper == (centre, pytest.approx(middle - height / 10, abs=0.06))
    assert lower == (centre, pytest.approx(middle + height / 10, abs=0.06))
    assert [each.text for each in chart.findall(f"{SPACE}title")] == ["Title"]
    assert [each.text for each in chart.findall(f"{SPACE}desc")] == ["Says"]
    words = [each.text for each in chart.iter(f"{SPACE}text")]
    assert words == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0", "1", "2", "3", "ndcg", "round"]


def test_one_round_is_a_point_and_hidden_lines_are_off() -> None:
    one, other = Line(0, "a", [(1, 0.5, 0.5, 0.5)]), Line(8, "b", [(1, 0.2, 0.2, 0.2)], shown=False)
    chart = parsed(line_chart("x", [one, other], "round", "ndcg", "t", "d"))
    series = [group.attrib for group in chart.iter(f"{SPACE}g")]
    assert [each["class"] for each in series] == ["series s0", "series s1 off"]
    assert len(list(chart.iter(f"{SPACE}circle"))) == 1  # the second has another colour and another shape
    assert chart.find(f".//{SPACE}polyline") is None


def test_bytes_that_differ_much_have_a_logarithmic_axis() -> None:
    marks = [Mark(number, "a", [x], [0.5], "a") for number, x in enumerate((1.0, 10.0, 100.0))]
    text = scatter_chart("x", marks, "MiB", "ndcg", "t", "d")
    across = [float(each.attrib["cx"]) for each in parsed(text).iter(f"{SPACE}circle")]
    assert across == pytest.approx([LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT], abs=0.1)
    assert "MiB, logarithmic" in text
    assert "logarithmic" not in scatter_chart("x", [Mark(0, "a", [0.0, 5.0], [0.1, 0.1], "a")], "MiB", "n", "t", "d")


def test_each_row_of_dots_has_one_a_value_and_a_bar_at_the_mean() -> None:
    chart = parsed(
        dot_chart("x", [Mark(0, "a" * 90, [0.0, 1.0], [], "a"), Mark(1, "b", [0.5], [], "b")], "n", "t", "d")
    )
    dots = [float(each.attrib["cx"]) for each in chart.iter(f"{SPACE}circle")]
    bars = [float(e.attrib["x1"]) for e in chart.iter(f"{SPACE}line") if e.attrib["class"] == "mean"]
    assert len(dots) == 3
    assert bars == pytest.approx([(dots[0] + dots[1]) / 2, dots[2]], abs=0.1)
    assert bars[0] == bars[1]
