"""The page that plans a fleet: what needs no trace is made again, and is what the page says."""

import importlib.util
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


@pytest.mark.parametrize("name", ["day", "plans", "fleet"])
def test_what_needs_no_trace_is_what_the_page_says(tool: ModuleType, page: str, name: str) -> None:
    assert name in tool.TRACE_FREE
    assert tool.SECTIONS[name](ROOT, page) == tool.section(page, name)


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
