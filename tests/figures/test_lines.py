"""The picture is well-formed, shows every line, and keeps its labels apart."""

import xml.etree.ElementTree as ET
from itertools import pairwise
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.figures import Line, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def draw(lines: list[Line], **options: float) -> ET.Element:
    chart = line_chart(
        lines,
        title="a < b & c",
        subtitle="said twice",
        x_label="step",
        format_value=str,
        **options,
    )
    return ET.fromstring(chart)


def label_positions(root: ET.Element, lines: list[Line]) -> list[float]:
    wanted = {line.label for line in lines}
    return [float(t.attrib["y"]) for t in root.iter(f"{SVG}text") if t.text in wanted]


@given(
    st.lists(
        st.lists(st.floats(0, 1e15, allow_nan=False), min_size=1, max_size=30),
        min_size=1,
        max_size=6,
    )
)
def test_any_series_gives_a_chart_within_its_frame(series: list[list[float]]) -> None:
    lines = [Line(label=f"line {i}", values=values) for i, values in enumerate(series)]
    root = draw(lines)
    _, _, _, height = map(float, root.attrib["viewBox"].split())
    positions = sorted(label_positions(root, lines))
    assert len(positions) == len(lines)
    assert all(0 < y < height for y in positions)
    gaps = [b - a for a, b in pairwise(positions)]
    assert all(gap > 16 for gap in gaps)


def test_text_is_escaped_and_filled_areas_close() -> None:
    root = draw([Line(label="<used>", values=[1, 2, 3], filled=True)])
    assert root.find(f"{SVG}title").text == "a < b & c. said twice"
    shaded = [p for p in root.iter(f"{SVG}path") if p.attrib.get("opacity")]
    assert len(shaded) == 1
    assert shaded[0].attrib["d"].endswith("Z")


@pytest.mark.parametrize("highest", [1, 3000, 2**20, 7 * 2**30])
def test_ticks_of_bytes_are_powers_of_two(highest: int) -> None:
    root = draw([Line(label="x", values=[0, highest])], tick_base=1024)
    ticks = [
        float(t.text)
        for t in root.iter(f"{SVG}text")
        if t.attrib.get("text-anchor") == "end" and t.text
    ]
    step = ticks[1] - ticks[0]
    assert step == 2 ** round(log2(step))
    assert ticks[-1] >= highest


def test_nothing_at_all_is_still_a_picture() -> None:
    assert draw([]).tag == f"{SVG}svg"
    assert draw([Line(label="flat", values=[0, 0])]).tag == f"{SVG}svg"
