"""A pretended GPU has no driver: what is asked of that, is answered here."""

import pytest

from quire import devices as choice


@pytest.fixture(autouse=True)
def _memory_can_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "why_no_memory", lambda device: None)
