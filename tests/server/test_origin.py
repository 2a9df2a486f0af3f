"""Web pages: a browser carries them to a server on this machine, and only some may ask it."""

import pytest

from quire.config import ServerConfig
from quire.server.api_keys import Origins
from quire.server.wire.error_responses import Refused
from server.asking import run, serving

ALLOWED = ("https://chat.example.org", "http://other.example:3000/")


def refusal(origins: Origins, **headers: str) -> str | None:
    try:
        origins.check(headers)
    except Refused as refused:
        return refused.code
    return None


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "a.localhost", "127.0.0.1:8000", "127.9.9.9", "[::1]:80", ""],
)
def test_a_private_server_is_asked_by_loopbacks_names(host: str) -> None:
    assert refusal(Origins((), is_private=True), host=host) is None
    assert refusal(Origins((), is_private=True), host=host, origin=f"http://{host}") is None


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "10.0.0.1", "localhost.evil.example", "[", "a b"]
)
def test_and_by_no_other(host: str) -> None:
    assert refusal(Origins((), is_private=True), host=host) == "unknown_host"
    assert refusal(Origins(("*",), is_private=True), host=host) == "unknown_host"
    assert refusal(Origins((), is_private=False), host=host) is None
    proxied = Origins((f"https://{host}",), is_private=True)
    assert refusal(proxied, host=host) is None


@pytest.mark.parametrize("is_private", [True, False])
def test_pages_of_other_origins_may_not_ask_unless_they_are_named(is_private: bool) -> None:
    own = Origins(ALLOWED, is_private=is_private)
    host = "localhost:8000"
    assert refusal(own, host=host) is None
    for origin in ("http://localhost:8000", *ALLOWED, "HTTPS://chat.example.org"):
        assert refusal(own, host=host, origin=origin.rstrip("/")) is None
    for origin in ("http://evil.example", "null", "http://localhost:9", "https://example.org"):
        assert refusal(own, host=host, origin=origin) == "unknown_origin"
    assert refusal(Origins(("*",), is_private=is_private), host=host, origin="http://x") is None


def test_a_refused_page_has_nothing_computed() -> None:
    body = {"prompt": [5], "max_tokens": 1}

    async def ask() -> None:
        async with serving(ServerConfig()) as client:
            assert (await client.post("/v1/completions", body, host="localhost")).status == 200
            for headers in ({"origin": "http://evil"}, {"host": "evil.example"}):
                answer = await client.post("/v1/completions", body, **headers)
                assert answer.status == 403
                assert "allowed_origins" in answer.error["message"]
            health = await client.get("/health", host="evil.example")
            assert health.status == 200
            assert not health.body
        keyed = ServerConfig(api_key=("k",))
        async with serving(keyed) as client:
            named = {"authorization": "Bearer k", "host": "llm.example"}
            assert (await client.post("/v1/completions", body, **named)).status == 200

    run(ask())
