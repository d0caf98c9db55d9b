"""The charts as SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from mlxrun.evals.reports import charts


def numbers(svg: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf'\b{name}="([-\d.]+)"', svg)]


def test_an_interval_is_drawn_to_scale() -> None:
    svg = charts.draw_interval(0.5, (0.25, 1.0), (0.0, 1.0), '50 % <of> "lines"')
    ElementTree.fromstring(svg)
    (middle,) = numbers(svg, "cx")
    whisker = re.search(r'class="whisker" x1="([\d.]+)" x2="([\d.]+)"', svg)
    assert whisker is not None and middle == charts.PLOT_WIDTH / 2
    low, high = map(float, whisker.groups())
    assert high == charts.PLOT_WIDTH - 6 and middle - low == pytest.approx((high - middle) / 2)
    assert "aria-label" in svg and "<of>" not in svg


def test_an_axis_around_zero_has_signs() -> None:
    assert re.findall(">([^<]+)</text>", charts.draw_axis((-0.05, 0.05))) == ["−5", "−2.5", "0", "2.5", "5"]
    assert "zero-line" in charts.draw_interval(0.0, None, (-0.05, 0.05), "")


def test_shares_fill_the_bar() -> None:
    svg = charts.draw_shares([("good", 3), ("cut", 0), ("failed", 1)], "3 and 1")
    ElementTree.fromstring(svg)
    assert numbers(svg, "width")[-2:] == [75.0, 25.0] or sum(numbers(svg, "width")) == 100.0
    assert 'class="cut"' not in svg
    ElementTree.fromstring(charts.draw_shares([("good", 0)], "none"))


def test_a_series_with_gaps_is_drawn_in_parts() -> None:
    svg = charts.draw_series([[1.0, None, 3.0, 2.0]], 60.0, "tokens", top=5.0, resumes=[30.0])
    ElementTree.fromstring(svg)
    assert svg.count('class="line"') == 2 and svg.count('class="resume"') == 1 and svg.count("<circle") == 1
    assert not re.search("nan|inf|None", svg)


def test_a_band_lies_above_its_line() -> None:
    svg = charts.draw_series([[1.0, 1.0], [4.0, 4.0]], 9.0, "latency", top=5.0)
    area = re.search(r'class="area" d="M([^"]+)Z"', svg)
    assert area is not None
    heights = [float(point.split()[1]) for point in area[1].split("L")]
    assert heights[0] == heights[1] < heights[2] == heights[3]


@pytest.mark.parametrize(
    "value, top", [(0, 1), (0.03, 0.05), (1, 1), (1.1, 2), (37, 50), (99, 100), (5001, 10000)]
)
def test_scales_end_at_round_numbers(value: float, top: float) -> None:
    assert charts.choose_top(value) == pytest.approx(top)


def test_seconds_in_words() -> None:
    found = [charts.format_seconds(value) for value in (0.42, 12, 119, 200, 7500)]
    assert found == ["0.42 s", "12 s", "119 s", "3 min 20 s", "2 h 5 min"]
