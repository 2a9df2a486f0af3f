"""The page that plans a fleet: what needs no trace is made again, and is what the page says."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet_page", ROOT / "tools" / "fleet_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(tool: ModuleType) -> str:
    return str(tool.PAGE.read_text(encoding="utf-8"))


def test_what_needs_no_trace_is_what_the_page_says(tool: ModuleType, page: str) -> None:
    assert {"plans", "fleet", "limits", "about-routing"} <= set(tool.TRACE_FREE)
    for name in tool.TRACE_FREE:
        assert tool.SECTIONS[name](ROOT, page) == tool.section(page, name), name


# Names, and figures that are no result: the page's own title and its chapters.
_NAMES = re.compile(
    r"10⁸|H[12]00|Llama-3\.[13]-\d+B|DeepSeek-V3|`[^`]*`|\]\([^)]*\)|decision \d+|step \d|^## \d\.",
    re.MULTILINE,
)


def test_a_figure_stands_in_what_is_made_and_nowhere_else(tool: ModuleType, page: str) -> None:
    """So that no sentence can say other than the tables: those with figures are made of them."""
    prose = re.sub(r"<!-- fleet: .*?<!-- end -->", "", page, flags=re.DOTALL)
    prose = re.sub(r"```.*?```", "", prose, flags=re.DOTALL)
    left = _NAMES.sub("", prose)
    assert re.findall(r"[^\n]*\d[^\n]*", left) == []


def test_a_sweep_ends_behind_what_is_not_carried(tool: ModuleType, page: str) -> None:
    for name in ("rates-8b", "rates-70b"):
        rows = tool.cells(page, name)
        for strategy in {row[0] for row in rows}:
            shares = [float(row[3].rstrip("%")) for row in rows if row[0] == strategy]
            met = [share >= 100 * tool.GOOD_FRACTION for share in shares]
            assert met[0], f"{strategy} carries not even the first rate: begin lower"
            assert met.count(False) == 2
            assert not met[-1]


def test_the_limit_is_said_by_the_tables(tool: ModuleType) -> None:
    plans = "| model | devices | bytes a token | weights | KV memory | a | b | c | d |\n|-|\n"
    plans += "| `Llama-3.1-8B` | 1 | 2 | 3 | 4 | 30 | 300 | 400 | 350 |\n"
    head = "| strategy | rate | requests/s | good | p50 | p99 | tpot | most | used | x |\n|-|\n"
    rows = "".join(
        f"| {name} | 1 | 1 | 99% | 1 s | 1 s | 1 ms | {most} | {used} | 0 |\n"
        for name, most, used in (
            ("contiguous", 30, "7%"),
            ("growing", 90, "90%"),
            ("paged", 9, "99%"),
        )
    )
    page = "".join(
        f"<!-- fleet: {name} -->\n{text}<!-- end -->\n"
        for name, text in (("plans", plans), ("rates-8b", head + rows))
    )
    said = tool.SECTIONS["limits"](ROOT, page).splitlines()
    assert "at most 30 sequences" in said[0]
    assert "memory is the limit" in said[0]
    assert "7% are used" in said[0]
    assert "computing is" in said[1]
    assert "90% are used" in said[1]


def test_every_section_is_made(tool: ModuleType, page: str) -> None:
    for name in tool.SECTIONS:
        assert tool.section(page, name).strip(), f"{name} is empty: tools/fleet_page.py --write"
    assert page.count("<!-- fleet: ") == len(tool.SECTIONS)


def test_what_is_carried_ends_at_the_first_rate_that_is_missed(tool: ModuleType) -> None:
    rows = [
        ("paged", "1", "5.00", "100.0%"),
        ("paged", "2", "10.00", "99.0%"),
        ("paged", "3", "15.00", "98.9%"),
        ("paged", "4", "20.00", "100.0%"),
        ("growing", "1", "5.00", "12.0%"),
    ]
    table = tool.table(("strategy", "rate", "requests/s", "within the goals"), rows)
    page = f"<!-- fleet: x -->\n{table}<!-- end -->"
    assert tool.carried(page, "x", "paged") == 10
    assert tool.carried(page, "x", "growing") == 0
    assert tool.carried(page, "x", "virtual") == 0


def test_a_section_that_is_not_there_is_named(tool: ModuleType) -> None:
    with pytest.raises(LookupError, match="'curve'"):
        tool.section("nothing", "curve")


def test_traces_are_asked_for(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet_page.py", "curve"])
    assert tool.main() == 2
    assert "curve: give --traces" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["fleet_page.py", "moon"])
    assert tool.main() == 2
    assert "no section moon" in capsys.readouterr().err
