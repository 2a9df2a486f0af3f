"""/v1/embeddings and /v1/score: the engine's own embeddings, in the forms of OpenAI and vLLM."""

import asyncio
import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.config import ServerConfig
from quire.server.endpoints import embeddings as module
from server.asking import Client, nothing_runs, run, serving

AT, SCORE = "/v1/embeddings", "/v1/score"
TEXTS = ["def f(x):", "def g(x):", "import os"]


async def own(client: Client, *prompts: Any) -> list[Any]:
    """What the engine gives in Python."""
    llm = client.service.engine
    return [each.embedding for each in await llm.inspect(lambda inner, _: inner.embed(prompts))]


def test_they_are_the_engines_own_in_each_form() -> None:
    async def ask() -> None:
        async with serving() as client:
            ids = client.service.texts.encode(TEXTS[0], add_special_tokens=True)
            wanted = await own(client, *TEXTS)
            for given, expected, num_tokens in (
                (TEXTS[0], wanted[:1], 5),
                (ids, wanted[:1], 5),
                (TEXTS, wanted, 12),
                ([ids, ids], wanted[:1] * 2, 10),
            ):
                answer = (await client.post(AT, {"input": given, "user": "me"})).json
                assert (answer["object"], answer["model"]) == ("list", "demo")
                assert [each["index"] for each in answer["data"]] == list(range(len(expected)))
                assert {each["object"] for each in answer["data"]} == {"embedding"}
                for each, vector in zip(answer["data"], expected, strict=True):
                    np.testing.assert_allclose(each["embedding"], vector, atol=1e-5)
                usage = answer["usage"]
                assert usage["prompt_tokens"] == usage["total_tokens"] == num_tokens
            body = {"input": TEXTS[0], "encoding_format": "base64"}
            packed = (await client.post(AT, body)).json["data"][0]["embedding"]
            numbers = np.frombuffer(base64.b64decode(packed), "<f4")
            np.testing.assert_allclose(numbers, wanted[0], atol=1e-5)
            longer = (await client.post(AT, {"input": TEXTS[0], "normalize": False})).json
            assert abs(np.linalg.norm(longer["data"][0]["embedding"]) - 1) > 0.1
            cut = (await client.post(AT, {"input": ids, "truncate_prompt_tokens": 1})).json
            assert cut["usage"]["prompt_tokens"] == 1
            cut = (await client.post(AT, {"input": [7] * 300, "truncate_prompt_tokens": -1})).json
            assert cut["usage"]["prompt_tokens"] == 256  # all: nothing is generated behind it

    run(ask())


def test_scores_are_those_of_their_embeddings() -> None:
    async def ask() -> None:
        async with serving() as client:
            a, b, c = await own(client, *TEXTS)
            for body, wanted in (
                ({"text_1": TEXTS[0], "text_2": TEXTS[1:]}, [a @ b, a @ c]),
                ({"text_1": TEXTS, "text_2": TEXTS}, [1, 1, 1]),
                ({"queries": [TEXTS[1]], "documents": TEXTS[2]}, [b @ c]),
            ):
                answer = await client.post(SCORE, body)
                assert answer.status == 200, answer.body
                assert "x-ignored-fields" not in answer.headers
                found = [each["score"] for each in answer.json["data"]]
                assert found == pytest.approx(wanted, abs=1e-5)

    run(ask())


def test_what_cannot_be_is_refused_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (AT, {}, "input"),
        (AT, {"input": []}, "input"),
        (AT, {"input": [[]]}, "empty"),
        (AT, {"input": [1, "a"]}, "input"),
        (AT, {"input": [[1.5]]}, "input"),
        (AT, {"input": ["a"] * 1025}, "1,024"),
        (AT, {"input": [4096]}, "token id 4096"),
        (AT, {"input": [7] * 257}, "256"),
        (AT, {"input": "word " * 100_000}, "256"),
        (AT, {"input": "a", "dimensions": 3}, "dimensions=3"),
        (AT, {"input": "a", "dimensions": 2**30}, "numbers"),
        (AT, {"input": "a", "dimensions": 0}, "dimensions"),
        (AT, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (AT, {"input": "a", "model": "another"}, "another"),
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "2 texts"),
        (SCORE, {"text_1": [], "text_2": ["c"]}, "text_1"),
        (SCORE, {"text_1": ["a"], "text_2": ["c"] * 1025}, "text_2"),
        (SCORE, {"text_1": ["a"], "text_2": ["c"] * 1024}, "1 and 1,024 texts"),
        (SCORE, {"text_1": ["a" * 10**6], "text_2": ["c"]}, "256"),
    ]

    async def ask() -> None:
        async with serving() as client:
            for path, body, said in wrong:
                refused = await client.post(path, body)
                assert refused.status == (404 if "model" in body else 400), (body, refused.body)
                assert said in refused.error["message"], (body, refused.error)
            monkeypatch.setattr(module, "_MOST_FLOATS", 600)
            body: dict[str, Any] = {"input": [[5]] * 5}
            assert "base64" in (await client.post(AT, body)).error["message"]
            assert (await client.post(AT, {**body, "encoding_format": "base64"})).status == 200
            maker = client.service.engine.llm._maker
            barred = replace(maker.facts.embeddings, why_not="it is an encoder-decoder")
            maker.facts = replace(maker.facts, embeddings=barred)
            for path, body in ((AT, {"input": "a"}), (SCORE, {"text_1": "a", "text_2": "b"})):
                refused = await client.post(path, body)
                assert refused.status == 400
                assert "demo has no embeddings: it is an enc" in refused.error["message"]
            assert client.service.admission.num_under_way == 0
            assert (await client.service.engine.usage()).num_sequences == 0

    run(ask())


def test_a_client_that_leaves_ends_it_and_keys_share_nothing() -> None:
    config = ServerConfig(api_key=("alice-key", "bob-key"), max_num_reqs_per_key=1)
    several = {"input": [[7 + n] * 250 for n in range(64)]}

    async def ask() -> None:
        async with serving(config, max_num_batched_tokens=16) as keyless:
            alice, bob = keyless.with_key("alice-key"), keyless.with_key("bob-key")
            call = alice.call(AT, several)
            async with asyncio.timeout(20):
                while not (await alice.service.engine.usage()).num_sequences:
                    await asyncio.sleep(0.001)
            refused = await alice.post(AT, {"input": "a"})
            assert (refused.status, refused.error["code"]) == (429, "max_num_reqs_per_key")
            call.leave()
            await call.task
            await nothing_runs(alice)
            assert alice.service.engine.llm.statistics.num_finished["abort"] > 50
            for client, cached in ((alice, 0), (alice, 47), (bob, 0)):
                answer = await client.post(AT, {"input": [9] * 48, "cache_salt": "mine"})
                assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            asleep = keyless.service
            asleep.admission.sleeping = True
            assert (await alice.post(AT, {"input": "a"})).status == 503

    run(ask())
