"""The guide to planning shows what the commands print.

tests/test_site.py holds the tables of the reference and of the simulator's page.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from quire.cli import main

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "guides" / "planning.md").read_text(encoding="utf-8")


def _tool() -> ModuleType:
    path = DOCS.parent / "tools" / "planning_pages.py"
    spec = importlib.util.spec_from_file_location("planning_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _tool()
SHOWN = TOOL.SHOWN.findall(GUIDE)


@pytest.mark.parametrize(("command", "begins", "shown"), SHOWN, ids=[each[0] for each in SHOWN])
def test_what_the_guide_shows_is_what_is_printed(
    command: str,
    begins: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["quire", *command.split()])
    with suppress(SystemExit):
        main()
    printed = TOOL.from_line(capsys.readouterr().out, begins or None)
    assert printed == shown.rstrip("\n")


def test_the_guide_says_what_a_token_takes() -> None:
    token, rate = TOOL.computed()
    assert f"in {token} µs in steps of 512, which\na tier of less than {rate} GB/s" in GUIDE


def test_the_guide_shows_some() -> None:
    assert len(SHOWN) >= 3


def test_the_reference_has_a_model_of_the_table() -> None:
    text = (DOCS / "reference" / "planning.md").read_text(encoding="utf-8")
    assert "| `openai/gpt-oss-120b` |" in text
