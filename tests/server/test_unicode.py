"""Text in pieces is the whole text: characters are not torn, and nothing of a stop gets out."""

from typing import Any

import pytest

from quire import AsyncLLM
from server.asking import Answer, Client, run, serving

AT = "/v1/completions"
REPLACEMENT = "\ufffd"
WORDS = ["👩‍💻", "é", "日本語", "x", "🇩🇪", "ß\u0301", "\u200d"]
FORMS = [
    {"regex": f"({'|'.join(WORDS)}){{12}}"},
    {"regex": "[😀-🙏]{9}"},
    {"regex": "[\u0600-\u06ff\u4e00-\u9fff]{9}"},
]


async def streamed(client: Client, slow: bool = False, **fields: Any) -> tuple[str, Answer]:
    call = client.call(AT, {"prompt": "def", **fields, "stream": True})
    if slow:
        await call.until(1)
        call.reads.clear()
        await client.post(AT, {"prompt": "def", "max_tokens": 30})
        call.reads.set()
    answer = await call.whole()
    assert answer.events[-1] == "[DONE]", answer.body
    return "".join(e["choices"][0]["text"] for e in answer.events[:-1]), answer


@pytest.mark.parametrize("slow", [False, True])
def test_characters_of_several_tokens_come_whole(slow: bool, llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            for seed, form in enumerate(FORMS):
                fields = {"structured_outputs": form, "seed": seed, "max_tokens": 200}
                whole = (await client.post(AT, {"prompt": "def", **fields})).json
                text, answer = await streamed(client, slow, **fields)
                assert text == whole["choices"][0]["text"]
                assert text
                assert REPLACEMENT not in text
                for event in answer.events[:-1]:
                    assert REPLACEMENT not in event["choices"][0]["text"]

    run(ask())


def test_a_text_that_ends_within_a_character_says_so_at_its_end_only(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            torn = 0
            for most in range(1, 12):
                fields = {"structured_outputs": FORMS[1], "seed": 3, "max_tokens": most}
                whole = (await client.post(AT, {"prompt": "def", **fields})).json
                text, answer = await streamed(client, **fields)
                assert text == whole["choices"][0]["text"]
                assert REPLACEMENT not in text.rstrip(REPLACEMENT)
                torn += REPLACEMENT in text
                pieces = [event["choices"][0]["text"] for event in answer.events[:-1]]
                assert not any(REPLACEMENT in piece for piece in pieces[:-1])
            assert torn > 3

    run(ask())


def test_bytes_that_are_no_text_come_as_the_tokenizer_reads_them(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            tokenizer = client.service.engine.llm.tokenizer
            for seed in range(5):
                fields = {"temperature": 50.0, "seed": seed, "max_tokens": 40, "ignore_eos": True}
                body = {"prompt": "def", **fields, "return_token_ids": True}
                choice = (await client.post(AT, body)).json["choices"][0]
                text, _ = await streamed(client, seed % 2 == 0, **fields)
                assert text == choice["text"]
                assert text == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)

    run(ask())


def test_no_part_of_a_stop_gets_out_before_it_is_whole(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with serving(llm=llm) as client:
            fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
            body = {"prompt": "def", **fields}
            whole = (await client.post(AT, body)).json["choices"][0]["text"]
            form = {"structured_outputs": FORMS[0], "seed": 1, "max_tokens": 200}
            wide = (await client.post(AT, {"prompt": "def", **form})).json["choices"][0]["text"]
            for text, own in ((whole, fields), (wide, form)):
                for begin in range(2, len(text) - 8, 13):
                    for length in (1, 3, 7):
                        stop = text[begin : begin + length]
                        for includes in (False, True):
                            stopped, answer = await streamed(
                                client, **own, stop=[stop, "never"],
                                include_stop_str_in_output=includes,
                            )  # fmt: skip
                            end = text.index(stop) + (len(stop) if includes else 0)
                            assert stopped == text[:end], (stop, includes)
                            assert answer.events[-2]["choices"][0]["finish_reason"] == "stop"

    run(ask())
