"""/v1/completions: the engine's own tokens, in OpenAI's form, whole and in pieces."""

import asyncio
from typing import Any

import pytest

from engine.test_llm import demo
from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.engine.outputs import CompletionOutput
from server.asking import Answer, Client, nothing_runs, run, serving

PROMPT = "def fibonacci(n):"
GREEDY = {"temperature": 0, "ignore_eos": True}


def engines_own(prompt: Any, **params: Any) -> CompletionOutput:
    sampling = SamplingParams(temperature=0, ignore_eos=True, **params)
    with LLM(demo(), max_model_len=256, kv_cache_memory_bytes="64MB", max_num_seqs=8) as llm:
        return llm.generate([prompt], sampling)[0]


def texts(answer: Answer) -> dict[int, str]:
    """Of a stream, by choice."""
    found: dict[int, str] = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


async def both(client: Client, **fields: Any) -> tuple[Any, Answer]:
    body = {"prompt": PROMPT, **GREEDY, **fields}
    whole = await client.post("/v1/completions", body)
    assert whole.status == 200, whole.body
    streamed = await client.post("/v1/completions", {**body, "stream": True})
    assert streamed.status == 200
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.events[-1] == "[DONE]"
    return whole.json, streamed


def test_the_text_is_the_engines_whole_or_in_pieces(llm: AsyncLLM) -> None:
    expected = engines_own(PROMPT, max_tokens=24)

    async def ask() -> None:
        async with serving(llm=llm) as client:
            whole, streamed = await both(client, max_tokens=24, return_token_ids=True)
            choice = whole["choices"][0]
            assert choice["text"] == expected.text
            assert tuple(choice["token_ids"]) == expected.token_ids
            assert tuple(choice["prompt_token_ids"]) == expected.prompt_token_ids
            assert choice["finish_reason"] == "length"
            assert whole["object"] == "text_completion"
            assert whole["model"] == "demo"
            assert whole["usage"] == {
                "prompt_tokens": len(expected.prompt_token_ids),
                "completion_tokens": 24,
                "total_tokens": len(expected.prompt_token_ids) + 24,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            assert texts(streamed) == {0: expected.text}
            chunks = streamed.events[:-1]
            assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
            assert all("usage" not in chunk for chunk in chunks)
            assert len({chunk["id"] for chunk in chunks}) == 1

    run(ask())


def test_sixteen_tokens_where_nobody_says_how_many(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            whole, _ = await both(client)
            assert whole["usage"]["completion_tokens"] == 16
            short, _ = await both(client, prompt=[5] * 250)  # the context leaves six
            assert short["usage"]["completion_tokens"] == 6

    run(ask())


def test_several_prompts_and_choices_are_numbered_through(llm: AsyncLLM) -> None:
    prompts = [PROMPT, "class Queue:", "import os"]
    expected = [engines_own(prompt, max_tokens=6).text for prompt in prompts]

    async def ask() -> None:
        async with serving(llm=llm) as client:
            whole, streamed = await both(client, prompt=prompts, max_tokens=6, n=2)
            assert [c["index"] for c in whole["choices"]] == list(range(6))
            by_choice = [text for text in expected for _ in range(2)]
            assert [c["text"] for c in whole["choices"]] == by_choice
            assert texts(streamed) == dict(enumerate(by_choice))

    run(ask())


def test_usage_comes_last_or_with_every_chunk(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            own: dict[str, Any] = {"prompt": list(range(20, 40)), "max_tokens": 5}
            _, last = await both(client, **own, stream_options={"include_usage": True})
            *chunks, usage, _ = last.events
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == 5
            assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
            assert all("usage" not in chunk for chunk in chunks)
            options = {"include_usage": True, "continuous_usage_stats": True}
            _, every = await both(client, **own, stream_options=options)
            counts = [event["usage"]["completion_tokens"] for event in every.events[:-1]]
            assert counts == sorted(counts)
            assert counts[-1] == 5

    run(ask())


def test_echo_and_logprobs_are_those_of_the_engine(llm: AsyncLLM) -> None:
    expected = engines_own(PROMPT, max_tokens=4, logprobs=3, prompt_logprobs=3)

    async def ask() -> None:
        async with serving(llm=llm) as client:
            as_ids, _ = await both(
                client, max_tokens=4, logprobs=3, echo=True, return_tokens_as_token_ids=True
            )
            whole, streamed = await both(client, max_tokens=4, logprobs=3, echo=True)
            named = as_ids["choices"][0]["logprobs"]
            assert all(name.startswith("token_id:") for name in named["tokens"])
            assert named["text_offset"] == whole["choices"][0]["logprobs"]["text_offset"]
            choice = whole["choices"][0]
            assert choice["text"] == PROMPT + expected.text
            said = choice["logprobs"]
            tokens = [*expected.prompt_logprobs, *expected.choices[0].logprobs]
            assert said["token_logprobs"] == [None, *(token.logprob for token in tokens)]
            assert "".join(said["tokens"]) == PROMPT + expected.text
            ends = [o + len(t) for o, t in zip(said["text_offset"], said["tokens"], strict=True)]
            assert said["text_offset"] == [0, *ends[:-1]]
            for token, top in zip(tokens, said["top_logprobs"][1:], strict=True):
                assert set(top.values()) >= {logprob for _, logprob in token.top[:3]}
                assert max(top.values()) == token.top[0][1]
            pieces = [event["choices"][0]["logprobs"] for event in streamed.events[:-1]]
            for name in said:
                assert [item for piece in pieces for item in piece[name]] == said[name]

    run(ask())


def test_a_prompt_is_scored_without_generating(llm: AsyncLLM) -> None:
    """What lm-eval's ``local-completions`` asks for a loglikelihood."""
    expected = engines_own(PROMPT, max_tokens=1, prompt_logprobs=1)

    async def ask() -> None:
        async with serving(llm=llm) as client:
            whole, _ = await both(client, max_tokens=0, echo=True, logprobs=1)
            choice = whole["choices"][0]
            assert choice["text"] == PROMPT
            scores = [token.logprob for token in expected.prompt_logprobs]
            assert choice["logprobs"]["token_logprobs"] == [None, *scores]
            assert whole["usage"]["completion_tokens"] == 0

    run(ask())


def test_stop_strings_seeds_biases_and_forms_reach_the_engine() -> None:
    expected = engines_own(PROMPT, max_tokens=24)
    stop = expected.text[6:8]

    async def ask() -> None:
        # A prompt that was found is computed in other pieces, which rounds otherwise in bfloat16.
        async with serving(enable_prefix_caching=False) as client:
            stopped, streamed = await both(client, max_tokens=24, stop=stop)
            assert stopped["choices"][0]["text"] == expected.text.split(stop)[0]
            assert stopped["choices"][0]["finish_reason"] == "stop"
            assert texts(streamed)[0] == stopped["choices"][0]["text"]
            drawn = [
                (await both(client, max_tokens=12, temperature=1.0, seed=seed))[0]["choices"][0]
                for seed in (7, 7, 8)
            ]
            assert drawn[0] == drawn[1] != drawn[2]
            forced, _ = await both(client, max_tokens=1, logit_bias={"17": 100})
            assert forced["choices"][0]["text"] == demo().tokenizer.decode([17])
            chosen, _ = await both(client, structured_outputs={"choice": ["yes", "no"]})
            assert chosen["choices"][0]["text"] in ("yes", "no")
            number, _ = await both(
                client,
                max_tokens=40,
                ignore_eos=False,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "boolean"}},
                },
            )
            assert number["choices"][0]["text"].strip() in ("true", "false")

    run(ask())


def test_the_second_who_begins_alike_says_what_was_cached(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            long = [7, 8, 9] * 20
            first, _ = await both(client, prompt=long, max_tokens=2)
            second, _ = await both(client, prompt=[*long, 11], max_tokens=2)
            salted, _ = await both(client, prompt=long, max_tokens=2, cache_salt="mine")
            cached = [
                answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                for answer in (first, second, salted)
            ]
            assert cached == [0, 48, 0]  # whole blocks

    run(ask())


def test_a_prompt_is_cut_where_that_is_asked_for(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            cut = await client.post(
                "/v1/completions",
                {"prompt": list(range(10, 40)), "truncate_prompt_tokens": 5, "max_tokens": 1,
                 "return_token_ids": True},
            )  # fmt: skip
            assert cut.json["choices"][0]["prompt_token_ids"] == list(range(35, 40))
            long = await client.post(
                "/v1/completions",
                {"prompt": [5] * 999, "truncate_prompt_tokens": -1, "max_tokens": 1},
            )
            assert long.json["usage"]["prompt_tokens"] == 255

    run(ask())


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, None),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [[1], "a"]}, 200, None),
        ({"prompt": [10**6]}, 400, None),
        ({"prompt": [True]}, 400, "prompt[0]"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"max_tokens": 1.5}, 400, "max_tokens"),
        ({"max_tokens": None}, 200, None),
        ({"n": 0}, 400, "n"),
        ({"n": 10**6}, 400, "n"),
        ({"best_of": 10**6}, 400, "best_of"),
        ({"best_of": 1}, 200, None),
        ({"logprobs": 10**6}, 400, "logprobs"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"frequency_penalty": 3}, 400, "frequency_penalty"),
        ({"seed": 2**70}, 400, "seed"),
        ({"stop": ["a"] * 1000}, 400, "stop"),
        ({"stop": "a" * 5000}, 400, "stop"),
        ({"stop": [""]}, 400, None),
        ({"bad_words": ["a"] * 1000}, 400, "bad_words"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, None),
        ({"logit_bias": {"1": 1000}}, 400, "logit_bias[...]"),
        ({"cache_hint": "ends"}, 200, None),
        ({"cache_hint": "keep"}, 400, "cache_hint"),
        ({"cache_hint": {"seconds": 60}}, 200, None),
        ({"cache_hint": {"seconds": 0}}, 400, "cache_hint.seconds"),
        ({"cache_hint": {"seconds": 86_401}}, 400, "cache_hint.seconds"),
        ({"cache_hint": {"seconds": 60, "num_tokens": 0}}, 400, "cache_hint.num_tokens"),
        ({"prompt_cache_retention": "24h"}, 200, None),
        ({"prompt_cache_retention": "48h"}, 400, "prompt_cache_retention"),
        ({"prompt_cache_options": {"ttl": "30m"}}, 200, None),
        ({"prompt_cache_options": {"ttl": "31m"}}, 400, "prompt_cache_options.ttl"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"cache_salt": "a" * 5000}, 400, "cache_salt"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"allowed_token_ids": [3]}, 200, None),
        ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, 400, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [4096]}, 400, None),
        *(({name: "a"}, 400, name) for name in ("lora", "lora_path", "lora_request")),
        ({"best_of": 2}, 400, "best_of"),
        ({"length_penalty": 2}, 400, "length_penalty"),
        ({"early_stopping": True}, 400, "early_stopping"),
        *(
            ({"use_beam_search": True, name: value}, status, name if status == 400 else None)
            for name, value, status in (
                ("n", 4, 200),
                ("temperature", 0, 200),
                ("seed", 1, 200),
                ("top_p", 1, 200),
                ("stop", [], 200),
                ("early_stopping", "never", 200),
                ("temperature", 0.5, 400),
                ("stream", True, 400),
                ("top_p", 0.5, 400),
                ("stop", ["a"], 400),
                ("logprobs", 1, 400),
                ("prompt_logprobs", 1, 400),
                ("allowed_token_ids", [3], 400),
                ("logit_bias", {"3": 1}, 400),
                ("min_tokens", 1, 400),
                ("skip_special_tokens", False, 400),
                ("best_of", 129, 400),
                ("best_of", 0, 400),
                ("length_penalty", 1e9, 400),
                ("early_stopping", "soon", 400),
            )
        ),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, 400, "best_of"),
        (
            {"use_beam_search": True, "structured_outputs": {"regex": "a"}},
            400,
            "structured_outputs",
        ),
        ({"use_beam_search": False, "length_penalty": 1, "kv_transfer_params": None}, 200, None),
        ({"model": "gpt-9"}, 404, "model"),
        ({"priority": 2**40}, 400, "priority"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"structured_outputs": {"regex": "("}}, 400, None),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, 400, None),
    ],
)
def test_every_field_has_bounds(
    llm: AsyncLLM, fields: dict[str, Any], status: int, param: str | None
) -> None:
    answer = _asked(llm, {"prompt": PROMPT, "max_tokens": 2, **fields})
    assert answer.status == status, answer.body
    if status != 200:
        assert answer.error["param"] == param, answer.error
        assert answer.error["message"]
        assert set(answer.error) == {"message", "type", "param", "code"}


def test_adapters_are_refused_with_the_reason(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                refused = await client.post(path, {"lora_name": "a", "lora_path": "/a"})
                assert refused.status == 404
                assert "merge the adapter into them" in refused.error["message"]
            refused = await client.post("/v1/completions", {"prompt": "a", "lora_request": {}})
            assert "merge the adapter into them" in refused.error["message"]

    run(ask())


def test_beams_are_the_engines_own(llm: AsyncLLM) -> None:
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=12, length_penalty=0.5)
    with LLM(demo(), max_model_len=256, kv_cache_memory_bytes="64MB", max_num_seqs=8) as own:
        (found,) = own.beam_search(PROMPT, params)

    async def ask() -> None:
        searched = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5}
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **searched}
        async with serving(llm=llm) as client:
            answer = (await client.post("/v1/completions", {**body, "return_token_ids": True})).json
            choices = answer["choices"]
            assert [choice["text"] for choice in choices] == [c.text for c in found.choices]
            assert [tuple(c["token_ids"]) for c in choices] == [c.token_ids for c in found.choices]
            told = [choice["finish_reason"] for choice in choices]
            assert told == [choice.finish_reason for choice in found.choices]
            tokens = sum(len(choice.token_ids) for choice in found.choices)
            assert answer["usage"]["completion_tokens"] == tokens
            several = (await client.post("/v1/completions", {**body, "prompt": [PROMPT] * 2})).json
            assert [c["text"] for c in several["choices"]] == [c.text for c in found.choices] * 2
            chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **searched}
            refused = await client.post("/v1/chat/completions", chat)
            assert "chat_stop_strings" in refused.error["message"]
            client.service.chat._stop = ()
            said = await client.post("/v1/chat/completions", chat)
            assert said.status == 200, said.body
            texts = [choice["message"]["content"] for choice in said.json["choices"]]
            assert len(set(texts)) == len(texts) == 2
            refused = await client.post("/v1/messages", {**chat, "n": 1})
            assert (refused.status, refused.json["type"]) == (400, "error")
            call = client.call("/v1/completions", {**body, "max_tokens": 200, "ignore_eos": True})
            async with asyncio.timeout(20):  # all of its beams have begun
                while (
                    not client.service.admission.num_under_way
                    or client.service.admission.num_queued
                ):
                    await asyncio.sleep(0.001)
            call.leave()
            await call.task
            await nothing_runs(client)

    run(ask())


def test_what_can_never_fit_is_said_with_the_sum(llm: AsyncLLM) -> None:
    answer = _asked(llm, {"prompt": [5] * 100, "max_tokens": 157})
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    for number in ("157", "100", "257", "256", "156"):
        assert number in answer.error["message"]
    answer = _asked(llm, {"prompt": [5] * 300})
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"


def test_fields_that_mean_nothing_are_named(llm: AsyncLLM) -> None:
    answer = _asked(llm, {"prompt": PROMPT, "max_tokens": 1, "foo": 1, "a\nb": 2})
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"] == "foo"


def _asked(llm: AsyncLLM, body: Any) -> Answer:
    async def ask() -> Answer:
        async with serving(llm=llm) as client:
            return await client.post("/v1/completions", body)

    return run(ask())


def test_what_a_text_stopped_at_is_said(llm: AsyncLLM) -> None:
    expected = engines_own(PROMPT, max_tokens=24)
    stop, token = expected.text[6:8], expected.token_ids[5]

    async def ask() -> None:
        async with serving(llm=llm) as client:
            for fields, said in (
                ({"stop": ["\u2603", stop]}, stop),
                ({"stop_token_ids": [token]}, token),
                ({"stop": "\u2603"}, None),
            ):
                whole, streamed = await both(client, max_tokens=24, **fields)
                assert whole["choices"][0]["stop_reason"] == said
                reasons = [event["choices"][0]["stop_reason"] for event in streamed.events[:-1]]
                assert reasons[-1] == said
                assert set(reasons[:-1]) <= {None}

    run(ask())
