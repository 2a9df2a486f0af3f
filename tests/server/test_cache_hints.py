"""Anthropic's cache_control and OpenAI's retention: what is kept of a prompt, and what is said."""

from typing import Any

import pytest

from quire import AsyncLLM
from quire.chat import cache_marks
from quire.chat.cache_marks import anthropic_marks
from quire.config import ServerConfig
from quire.errors import RequestError
from quire.kv.retention import RetainedBlocks
from server.asking import Client, run, serving
from server.test_messages import TEMPLATE, num_tokens

CONFIG = ServerConfig(chat_template=TEMPLATE, api_key=("alice-key", "bob-key"))
BLOCK = 16
SYSTEM = "Write Python. " + "Say why, and use plain words for it. " * 6
QUESTION = "def fibonacci(n): what is wrong with " + "this function of mine? " * 6
FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def text(content: str, mark: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": content, **({"cache_control": mark} if mark else {})}


def body(system: Any, content: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "system": system,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
        "temperature": 0,
        **fields,
    }


def whole(num: int) -> int:
    return num // BLOCK * BLOCK


async def usage(client: Client, asked: dict[str, Any]) -> Any:
    answer = await client.post("/v1/messages", asked)
    assert answer.status == 200, answer.body
    assert "x-ignored-fields" not in answer.headers
    return answer.json["usage"]


async def forgotten(client: Client) -> None:
    assert await client.service.engine.reset_prefix_cache()


def test_blocks_that_are_marked_are_kept_and_counted_by_their_time(llm: AsyncLLM) -> None:
    prompt = f"# system: {SYSTEM}\n# user: {QUESTION}\n# assistant: "
    length, of_system = num_tokens(prompt), num_tokens(f"# system: {SYSTEM}\n")

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            await forgotten(client)
            found = await usage(client, body([text(SYSTEM, HOUR)], [text(QUESTION, FIVE)]))
            in_1h = found["cache_creation"]["ephemeral_1h_input_tokens"]
            in_5m = found["cache_creation"]["ephemeral_5m_input_tokens"]
            # The next user's words begin alike, too.
            assert of_system - BLOCK < in_1h <= of_system + 8
            assert in_1h + in_5m == found["cache_creation_input_tokens"] == whole(length)
            assert found["cache_read_input_tokens"] == 0
            assert found["input_tokens"] == length - whole(length)
            # Asked again, all that is kept has been there.
            again = await usage(client, body([text(SYSTEM, HOUR)], [text(QUESTION, FIVE)]))
            assert again["cache_creation_input_tokens"] == 0
            assert again["cache_read_input_tokens"] == whole(length)
            assert again["input_tokens"] == length - whole(length)
            # Another key has a cache of its own.
            other = await usage(anonymous.with_key("bob-key"), body(SYSTEM, QUESTION))
            assert other["cache_read_input_tokens"] == 0
            assert other["cache_creation_input_tokens"] == 0

    run(ask())


def test_a_mark_may_be_on_tools_results_earlier_turns_or_the_request(llm: AsyncLLM) -> None:
    tool = {"name": "add", "description": "Adds. " * 20, "input_schema": {"type": "object"}}
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("3 " * 40, FIVE)]}
    turns = [
        {"role": "user", "content": [text(QUESTION)]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "It is three."},
        {"role": "user", "content": "And then?"},
    ]

    async def kept(client: Client, **fields: Any) -> int:
        await forgotten(client)
        found = await usage(client, body(SYSTEM, "Hello.") | fields)
        count: int = found["cache_creation_input_tokens"]
        assert count + found["input_tokens"] == sum(await counted(client, fields))
        return count

    async def counted(client: Client, fields: dict[str, Any]) -> list[int]:
        asked = {**body(SYSTEM, "Hello."), **fields}
        asked = {k: v for k, v in asked.items() if k in ("model", "system", "messages", "tools")}
        answer = await client.post("/v1/messages/count_tokens", asked)
        return [answer.json["input_tokens"]]

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            (all_of_it,) = await counted(client, {"messages": turns})
            assert await kept(client, messages=turns, cache_control=FIVE) == whole(all_of_it)
            before = await kept(client, messages=turns)
            (short,) = await counted(client, {"messages": turns[:3]})
            assert whole(short) - BLOCK <= before <= whole(short)
            # This template writes no tools, so that their mark is of what follows them.
            assert await kept(client, tools=[{**tool, "cache_control": FIVE}]) >= BLOCK
            assert await kept(client) == 0

    run(ask())


@pytest.mark.parametrize(
    ("mark", "where"),
    [
        ("ephemeral", "messages[0].content[0].cache_control"),
        ({"type": "for ever"}, "messages[0].content[0].cache_control"),
        ({"type": "ephemeral", "ttl": "2h"}, "messages[0].content[0].cache_control"),
        ({"type": "ephemeral", "ttl": 300}, "messages[0].content[0].cache_control"),
    ],
)
def test_a_mark_that_is_none_is_refused(llm: AsyncLLM, mark: Any, where: str) -> None:
    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            answer = await client.post("/v1/messages", body(SYSTEM, [text(QUESTION, mark)]))
            assert answer.status == 400
            assert where in answer.error["message"]
            five = [text(str(at), FIVE) for at in range(5)]
            answer = await client.post("/v1/messages", body(SYSTEM, five))
            assert answer.status == 400
            assert "on 5 blocks: a request may mark 4" in answer.error["message"]

    run(ask())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_openais_breakpoints_are_kept_and_the_last_ones_count(llm: AsyncLLM, path: str) -> None:
    name, kind = ("input", "input_text") if "responses" in path else ("messages", "text")
    most = "max_output_tokens" if "responses" in path else "max_tokens"

    def turn(role: str, words: str, mark: Any = None) -> dict[str, Any]:
        part = {"type": kind, "text": words}
        return {
            "role": role,
            "content": [part if mark is None else {**part, "prompt_cache_breakpoint": mark}],
        }

    of_system = num_tokens(f"# system: {SYSTEM}\n")
    length = num_tokens(f"# system: {SYSTEM}\n# user: {QUESTION}\n# assistant: ")
    mark = {"mode": "explicit"}

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")

            async def kept(*turns: dict[str, Any], **fields: Any) -> tuple[int, set[float]]:
                await forgotten(client)
                asked = {"model": "demo", name: [*turns], most: 2, **fields}
                answer = await client.post(path, asked)
                assert answer.status == 200, answer.body
                usage = answer.json["usage"]
                details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
                policy = client.service.engine.llm.accounting.pools[0].evictable  # type: ignore[attr-defined]
                times = policy._until_s[policy._grant_of > 0] - policy._clock()
                return details.get("cache_write_tokens", 0), {*(times // 60).round().tolist()}

            question = turn("user", QUESTION)
            count, minutes = await kept(turn("system", SYSTEM, mark), question)
            assert of_system - BLOCK < count <= of_system + 8  # the next user's words begin alike
            assert minutes == {29}
            longer = {**mark, "ttl": "12h"}
            count, minutes = await kept(turn("system", SYSTEM), turn("user", QUESTION, longer))
            assert (count, minutes) == (whole(length), {719})
            # All is asked for besides, and of six marks the last three are kept.
            turns = [turn("user", f"{number} {QUESTION[:40]}", mark) for number in range(6)]
            count, minutes = await kept(*turns, prompt_cache_retention="24h")
            assert count > 6 * 16
            assert minutes == {1439}
            first, *_ = turns
            for wrong in ("explicit", {"mode": "implicit"}, {**mark, "ttl": "1h"}):
                broken = {**first, "content": [{**first["content"][0]}]}
                broken["content"][0]["prompt_cache_breakpoint"] = wrong
                answer = await client.post(path, {"model": "demo", name: [broken], most: 2})
                assert answer.status == 400
                assert "[0].content[0].prompt_cache_breakpoint" in answer.error["message"]

    run(ask())


def test_too_many_marks_are_refused_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read with all that comes before it: eight thousand took 46 seconds."""
    read: list[Any] = []
    monkeypatch.setattr(cache_marks, "from_anthropic", lambda *given, **_: read.append(given))
    turns = [{"role": "user", "content": [text(QUESTION, FIVE)] * 8}] * 100
    with pytest.raises(RequestError, match="on 802 blocks: a request may mark 4"):
        anthropic_marks(turns, system=[text(SYSTEM, HOUR)], whole=FIVE)
    assert not read


def test_results_within_results_are_not_looked_into() -> None:
    """Deep nesting would end the stack; a tool's result holds no other."""
    block: dict[str, Any] = text("deep", FIVE)
    for _ in range(3_000):
        block = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert not anthropic_marks([{"role": "user", "content": [block]}])


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2},
        ),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 2}),
    ],
)
def test_openais_retention_is_heeded_and_counted(
    llm: AsyncLLM, path: str, asked: dict[str, Any]
) -> None:
    def details(answer: Any) -> dict[str, int]:
        usage = answer.json["usage"]
        found: dict[str, int] = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return found

    async def ask() -> None:
        async with serving(CONFIG, llm=llm) as anonymous:
            client = anonymous.with_key("alice-key")
            for fields, seconds in (
                ({"prompt_cache_retention": "24h"}, 86_400),
                ({"prompt_cache_options": {"ttl": "30m"}}, 1800),
                ({"cache_hint": {"seconds": 60, "num_tokens": 40}}, 60),
                ({"cache_hint": {"seconds": 60}, "prompt_cache_retention": "24h"}, 60),
            ):
                await forgotten(client)
                answer = await client.post(path, {**asked, "model": "demo", **fields})
                assert answer.status == 200, answer.body
                usage = answer.json["usage"]
                length = usage.get("prompt_tokens") or usage["input_tokens"]
                wanted = 40 if "num_tokens" in str(fields) else length
                assert details(answer) == {"cached_tokens": 0, "cache_write_tokens": whole(wanted)}
                policy = client.service.engine.llm.accounting.pools[0].evictable  # type: ignore[attr-defined]
                assert isinstance(policy, RetainedBlocks)
                (until_s,) = {*policy._until_s[policy._grant_of > 0].tolist()}
                assert until_s == pytest.approx(policy._clock() + seconds, abs=30)
            await forgotten(client)
            for fields in (
                {"prompt_cache_retention": "in_memory"},
                {"prompt_cache_options": {"ttl": "30m", "mode": "explicit"}},
                {"prompt_cache_key": "k"},
            ):
                answer = await client.post(path, {**asked, "model": "demo", **fields})
                assert not details(answer).get("cache_write_tokens")

    run(ask())
