"""The pictures of the strategies are those of runs with the code as it is."""

import xml.etree.ElementTree as ET

import pytest

from quire.memory import HostMemory
from tools.strategy_pictures import ABOUT, FOLDER, pictures

SVG = "{http://www.w3.org/2000/svg}"


pytestmark = pytest.mark.skipif(
    HostMemory().page_bytes != 4096 or HostMemory().cannot_share is not None,
    reason="the pictures are of a system with pages of 4 KiB, which can be shown twice",
)


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return dict(pictures())


def test_the_pictures_in_the_documentation_are_of_this_code(drawn: dict[str, str]) -> None:
    assert sorted(drawn) == sorted(f"strategy-{name}.svg" for name in ABOUT)
    stale = [name for name, text in drawn.items() if (FOLDER / name).read_text("utf-8") != text]
    assert not stale, f"python tools/strategy_pictures.py draws {', '.join(stale)} anew"


def test_each_is_an_svg_in_light_and_dark_with_the_four_moments(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        root = ET.fromstring(text)
        assert root.tag == f"{SVG}svg", name
        assert "prefers-color-scheme: dark" in text
        words = [each.text or "" for each in root.iter(f"{SVG}text")]
        assert [each[0] for each in words if each[1:3] == ". "] == list("1234")
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for rect in root.iter(f"{SVG}rect"):  # nothing is drawn outside
            x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
            assert x >= 0
            assert x + w <= width
            assert y + h <= height
