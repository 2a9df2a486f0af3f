"""Which key is sent to which server."""

from pathlib import Path

import pytest

from quire.config.keys import is_loopback, key_for
from quire.errors import ConfigError

VARIABLES = ("QUIRE_API_KEY", "QUIRE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL")


@pytest.mark.parametrize(
    ("url", "said", "key"),
    [
        ("http://127.0.0.1:8000", {}, None),
        ("http://127.0.0.1:8000", {"QUIRE_API_KEY": "q", "OPENAI_API_KEY": "o"}, "q"),
        ("localhost:8000", {"QUIRE_API_KEY": "q"}, "q"),
        ("http://[::1]:8000/v1", {"QUIRE_API_KEY": "q"}, "q"),
        ("unix:/run/quire.sock", {"QUIRE_API_KEY": "q"}, "q"),
        ("http://127.0.0.1:8000", {"OPENAI_API_KEY": "o"}, None),
        ("http://llm.example.org", {"QUIRE_API_KEY": "q", "OPENAI_API_KEY": "o"}, None),
        ("http://localhost.example.org", {"QUIRE_API_KEY": "q"}, None),
        (
            "https://llm.example.org/v1",
            {"QUIRE_API_KEY": "q", "QUIRE_URL": "https://llm.example.org:443"},
            "q",
        ),
        (  # in the clear it could be read on the way
            "http://llm.example.org",
            {"QUIRE_API_KEY": "q", "QUIRE_URL": "https://llm.example.org"},
            None,
        ),
        ("https://api.openai.com/v1", {"OPENAI_API_KEY": "o"}, "o"),
        ("http://api.openai.com/v1", {"OPENAI_API_KEY": "o"}, None),
        (
            "http://10.0.0.5:8000",
            {"OPENAI_API_KEY": "o", "OPENAI_BASE_URL": "http://10.0.0.5:8000/v1"},
            "o",
        ),
        (
            "https://api.openai.com/v1",
            {"OPENAI_API_KEY": "o", "OPENAI_BASE_URL": "http://10.0.0.5:8000/v1"},
            None,
        ),
    ],
)
def test_a_key_of_the_environment_is_sent_to_its_own_server(
    url: str, said: dict[str, str], key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in said.items():
        monkeypatch.setenv(variable, value)
    assert key_for(url) == key
    assert key_for(url, "told") == "told"


def test_a_key_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the test\nfirst\nsecond\n", encoding="utf-8")
    assert key_for("http://elsewhere", f"@{path}") == "first"


def test_a_key_that_no_header_carries_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "se cret")
    with pytest.raises(ConfigError, match="QUIRE_API_KEY must be printable") as caught:
        key_for("http://localhost")
    assert "se cret" not in str(caught.value)


def test_names_of_this_machine() -> None:
    assert all(is_loopback(name) for name in ("localhost", "a.localhost", "127.0.0.9", "::1"))
    assert not any(
        is_loopback(name) for name in ("", "10.0.0.1", "localhost.example.org", "0.0.0.0")
    )
