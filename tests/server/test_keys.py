"""Keys: who is let in, and whose cache it is. No route is open by accident."""

import contextlib
import hmac
from typing import Any

import pytest
from starlette.routing import Route

from quire import AsyncLLM
from quire.config import ServerConfig
from quire.server import api_keys as keys_module
from quire.server.api_keys import Keys
from quire.server.dashboard.page_routes import FILES
from quire.server.endpoints.tokens import tokenize
from quire.server.routes import Operation
from quire.server.wire.error_responses import Refused
from server.asking import Client, run, serving

OPEN = {"/health", "/ping", *FILES}  # the page's files say nothing of any client
KEYED = ServerConfig(api_key=("alice-key", "bob-key"))
PROMPT = list(range(20, 84))  # four blocks: all but the last token can be found


def test_every_route_but_the_open_ones_wants_a_key() -> None:
    async def ask() -> None:
        async with serving(KEYED) as client:
            seen = set()
            for route in client.app.routes:
                assert isinstance(route, Route), route
                path = route.path.replace("{name:path}", "demo").replace("{id}", "x")
                for method in sorted((route.methods or set()) - {"HEAD"}):
                    for headers in ({}, {"authorization": "Bearer wrong"}, {"x_api_key": "bob"}):
                        call = client.call(path, {}, method=method, **headers)
                        answer = await call.whole()
                        if route.path in OPEN:
                            assert answer.status == 200
                            seen.add(route.path)
                        else:
                            assert answer.status == 401, (route.path, method, headers)
            assert seen == OPEN

    run(ask())


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/v1//models", "/v1/models/", "/v1/./models", "/health/../v1/models"),
        *("/V1/models", "/v1/models/..", "/health//", "/%76%31/models", "/v1/models;/health"),
        *("/health/v1/models", "/ping/../metrics", "\\v1\\models", "/v1/models\0", ""),
    ],
)
def test_no_spelling_of_a_path_leads_around_the_guard(llm: AsyncLLM, path: str) -> None:
    async def ask() -> None:
        async with serving(KEYED, llm=llm) as client:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "TRACE"):
                answer = await client.call(path, method=method).whole()
                assert answer.status in (401, 404, 405, 307), answer.body
                assert b"demo" not in answer.body

    run(ask())


def test_both_ways_of_sending_a_key_are_understood() -> None:
    known = Keys(["alice-key", "bob-key"])
    alice = known.caller({"authorization": "Bearer alice-key"})
    assert known.caller({"x-api-key": "alice-key"}) == alice
    assert known.caller({"authorization": "bearer  alice-key "}) == alice
    bob = known.caller({"x-api-key": "bob-key"})
    assert bob != alice
    assert alice.salt != bob.salt
    assert alice.keys("x").of_root() not in (bob.keys("x").of_root(), alice.keys(None).of_root())
    for headers in ({}, {"authorization": "Basic alice-key"}, {"authorization": "Bearer "},
                    {"x-api-key": "\udcff"}, {"authorization": "Bearer alice-ke"}):  # fmt: skip
        with pytest.raises(Refused) as refused:
            known.caller(headers)
        assert refused.value.status == 401


def test_each_key_is_compared_whole_whatever_the_others_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return hmac.compare_digest(given, known)

    monkeypatch.setattr(keys_module, "compare_digest", compare)
    known = Keys(["first", "second", "third"])
    for key in ("first", "third", "none", "x" * 10_000):
        compared.clear()
        with contextlib.suppress(Refused):
            known.caller({"x-api-key": key})
        assert len(compared) == 3
        assert {len(part) for pair in compared for part in pair} == {32}


def test_without_keys_each_caller_is_let_in_and_shares() -> None:
    open_to_all = Keys([])
    known = open_to_all.caller({}, "admin")
    assert known == open_to_all.caller({"x-api-key": "anything"}, "all")
    assert known.is_admin


@pytest.mark.parametrize(
    ("clients", "admins", "sent", "refused"),
    [
        # (what is refused with the key that is sent, by access)
        ((), (), None, {}),
        (("a",), (), None, {"key": 401, "all": 401, "admin": 401}),
        (("a",), (), "a", {"admin": 403}),  # the only key: there is nothing of others to see
        (("a", "b"), (), "a", {"all": 403, "admin": 403}),
        (("a",), ("root",), "a", {"all": 403, "admin": 403}),
        (("a",), ("root",), "root", {}),
        (("a",), ("root",), "roo", {"key": 401, "all": 401, "admin": 401}),
        ((), ("root",), None, {"all": 401, "admin": 401}),
        ((), ("root",), "anything", {"all": 401, "admin": 401}),
        ((), ("root",), "root", {}),
        (("a", "root"), ("root",), "root", {}),
        (("a", "a"), (), "a", {"admin": 403}),
    ],
)
def test_which_key_reaches_how_far(
    clients: tuple[str, ...], admins: tuple[str, ...], sent: str | None, refused: dict[str, int]
) -> None:
    known, headers = Keys(clients, admins), {} if sent is None else {"x-api-key": sent}
    for access in ("key", "all", "admin"):
        if access not in refused:
            known.caller(headers, access)
            continue
        with pytest.raises(Refused) as caught:
            known.caller(headers, access)
        assert caught.value.status == refused[access]
        if caught.value.status == 403 and not admins:
            assert "--admin-api-key" in caught.value.message


def test_no_tenant_is_another_not_even_without_a_key() -> None:
    known = Keys(["alice", "bob"], ["root"])
    callers = [known.caller({"x-api-key": key}) for key in ("root", "alice", "bob")]
    callers.append(Keys([], ["root"]).caller({}))
    for part in ("number", "salt"):
        assert len({getattr(caller, part) for caller in callers}) == len(callers)


def test_an_operation_says_which_key_it_needs_and_its_body_is_not_read_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quire.server import app as app_module

    own = app_module._operations

    def with_admins(*arguments: Any) -> list[Operation]:
        return [Operation("/administer", tokenize, ("POST",), access="admin"), *own(*arguments)]

    monkeypatch.setattr(app_module, "_operations", with_admins)
    config = ServerConfig(api_key=("alice-key",), admin_api_key=("root-key",))

    async def ask() -> None:
        async with serving(config) as stranger:
            alice, root = stranger.with_key("alice-key"), stranger.with_key("root-key")
            for client, path, status in (
                *((stranger, path, 401) for path in ("/administer", "/tokenize")),
                (alice, "/administer", 403),
                (alice, "/tokenize", 200),
                *((root, path, 200) for path in ("/administer", "/tokenize")),
            ):
                answer = await client.post(path, {"prompt": "a"})
                assert answer.status == status, (path, answer.body)
            assert (await alice.post("/administer", b"no JSON")).status == 403
            assert (await alice.get("/metrics")).status == 403
            assert (await root.get("/metrics")).status == 200
        async with serving(KEYED) as stranger:
            answer = await stranger.with_key("alice-key").post("/administer", {"prompt": "a"})
            assert (answer.status, answer.error["code"]) == (403, "admin_key_needed")
            assert "--admin-api-key" in answer.error["message"]
        async with serving() as client:
            assert (await client.post("/administer", {"prompt": "a"})).status == 200

    run(ask())


def test_tenants_never_hit_each_others_prefixes() -> None:
    async def cached(client: Client, **fields: Any) -> int:
        body = {"prompt": PROMPT, "max_tokens": 1, **fields}
        answer = await client.post("/v1/completions", body)
        assert answer.status == 200
        details: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return details

    async def ask() -> None:
        async with serving(KEYED) as stranger:
            alice, bob = stranger.with_key("alice-key"), stranger.with_key("bob-key")
            assert await cached(alice) == 0
            assert await cached(bob) == 0
            assert await cached(alice) == len(PROMPT) - 1
            assert await cached(bob) == len(PROMPT) - 1
            # A salt divides one tenant's cache; another's cannot be reached with any.
            assert await cached(alice, cache_salt="x") == 0
            assert await cached(alice, cache_salt="x") == len(PROMPT) - 1
            assert await cached(bob, cache_salt="x") == 0
            for caller in stranger.service.keys._callers:
                assert await cached(bob, cache_salt=caller.salt) == 0

    run(ask())


def test_metrics_can_be_left_open() -> None:
    async def ask() -> None:
        async with serving(ServerConfig(api_key=("k",), unguarded_metrics=True)) as client:
            answer = await client.get("/metrics")
            assert answer.status == 200
            assert b"vllm:num_requests_running" in answer.body
            assert (await client.get("/v1/models")).status == 401

    run(ask())
