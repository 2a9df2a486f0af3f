"""The pages on planning show what the commands print, and all that the tables hold."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from quire.cli import main
from quire.planner.hardware import DEVICES
from quire.planner.subject import published_models
from quire.spec import ModelSpec
from quire.units import format_count

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "guides" / "planning.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```text\n\$ quire (plan [^\n]*)\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_what_the_guide_shows_is_what_is_printed(
    command: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["quire", *command.split()])
    with suppress(SystemExit):
        main()
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(printed).strip("\n") == shown.rstrip("\n")


def test_the_guide_shows_some() -> None:
    assert len(SHOWN) >= 2


def test_the_reference_has_every_model_and_every_device() -> None:
    page = (DOCS / "reference" / "planning.md").read_text(encoding="utf-8")
    table = published_models()
    for model in table.models:
        size = format_count(ModelSpec.from_config(model.config).bytes_per_token)
        assert re.search(rf"\| `{re.escape(model.name)}` \|.*\| {size} \|", page), model.name
        assert model.source in page
    for name, device in DEVICES.items():
        assert f"| `{name}` | {device.name} |" in page
    assert table.read_on in page
