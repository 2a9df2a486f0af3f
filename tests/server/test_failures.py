"""What fails while clients wait: they are told at once, or never notice."""

import asyncio
from typing import Any

import pytest

from engine.test_faults import FailingOperators, spoiled
from quire.config import ServerConfig
from quire.engine.llm import LLM
from server.asking import Answer, Client, Slowly, nothing_runs, run, serving

AT = "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
PROMPTS = [[7, 8, 9] * 12, [20, 30, 40, 50] * 9, list(range(100, 140))]


async def ask_three(client: Client, **fields: Any) -> list[Answer]:
    calls = [client.call(AT, {"prompt": p, **GREEDY, **fields}) for p in PROMPTS]
    return [await call.whole() for call in calls]


def texts(answers: list[Answer]) -> list[str]:
    return [answer.json["choices"][0]["text"] for answer in answers]


@pytest.mark.parametrize("how", [RuntimeError, MemoryError, SystemExit])
def test_an_engine_that_dies_is_seen_at_once_by_all(
    how: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who read, those who wait, those who come, and a client that asks for its health."""

    async def ask() -> None:
        async with serving(max_num_seqs=2, observe=Slowly()) as client:
            long = {"prompt": PROMPTS[0], **GREEDY, "max_tokens": 200}
            reading = client.call(AT, {**long, "stream": True})
            waiting = [client.call(AT, {**long, "stream": stream}) for stream in (False, True)]
            await reading.until(3)
            assert (await client.get("/health")).status == 200
            step, ended = LLM.step, asyncio.Event()
            loop = asyncio.get_running_loop()

            def dies(llm: LLM) -> bool:
                monkeypatch.setattr(LLM, "step", step)
                loop.call_soon_threadsafe(ended.set)
                raise how("it is over")

            monkeypatch.setattr(LLM, "step", dies)
            await ended.wait()
            # Not a second later but with the first news that there is.
            answers = [await call.whole() for call in (reading, *waiting)]
            assert (await client.get("/health")).status == 503
            assert (await client.get("/ping")).status == 503
            assert [answer.status for answer in answers] == [200, 500, 200]
            for streamed in (answers[0], answers[2]):
                assert "error" in streamed.events[-2]
                assert streamed.events[-1] == "[DONE]"
            late = await client.post(AT, {"prompt": PROMPTS[0]})
            assert (late.status, late.error["code"]) == (503, "engine_dead")
            assert (
                client.service.admission.num_under_way == client.service.admission.num_queued == 0
            )

    run(ask())


def test_a_row_that_is_no_number_fails_its_own_request_and_is_not_kept() -> None:
    async def ask() -> None:
        async with serving() as client:
            want = texts(await ask_three(client))
            await client.service.engine.reset_prefix_cache()
            with spoiled(client.service.engine.llm, PROMPTS[1], lambda row: row * float("nan")):
                for fields in ({}, {"stream": True}):
                    answers = await ask_three(client, **fields)
                    if not fields:
                        assert [answer.status for answer in answers] == [200, 500, 200]
                        assert answers[1].error["code"] == "engine_error"
                        assert texts([answers[0], answers[2]]) == [want[0], want[2]]
                    else:
                        assert answers[1].events[-2]["error"]["code"] == "engine_error"
            again = await ask_three(client)
            assert texts(again) == want
            cached = [a.json["usage"]["prompt_tokens_details"]["cached_tokens"] for a in again]
            assert cached[1] == 0 < cached[0]
            await nothing_runs(client)

    run(ask())


@pytest.mark.parametrize("stride", [239, pytest.param(5, marks=pytest.mark.full)])
def test_an_operator_without_memory_costs_no_client_a_token(
    stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, in whichever step: it fails once, in the thread that steps."""

    async def ask() -> None:
        async with serving() as client:
            want = texts(await ask_three(client))
            step = LLM.step
            failing = num_operators = 0  # at first none fails, so that all are counted
            while failing <= num_operators:
                mode = FailingOperators(failing or -1)

                def stepping(llm: LLM, mode: FailingOperators = mode) -> bool:
                    with mode:
                        return step(llm)

                monkeypatch.setattr(LLM, "step", stepping)
                assert texts(await ask_three(client)) == want, failing
                await nothing_runs(client)
                usage = await client.service.engine.usage()
                assert usage.used_bytes == 0
                num_operators = max(num_operators, mode.num_called)
                failing += stride
            assert num_operators > 300

    run(ask(), at_most_s=600)


def test_what_is_refused_costs_the_engine_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times more than there is room for: refused before it is read, the rest served whole."""

    async def ask() -> None:
        config = ServerConfig(max_num_queued_reqs=4)
        async with serving(config, max_num_seqs=2) as client:
            made = 0
            request = client.service.engine.request

            async def counted(*arguments: Any, **options: Any) -> Any:
                nonlocal made
                made += 1
                return await request(*arguments, **options)

            monkeypatch.setattr(client.service.engine, "request", counted)
            calls = [client.call(AT, {"prompt": [n], **GREEDY}) for n in range(60)]
            answers = [await call.whole() for call in calls]
            served = [answer for answer in answers if answer.status == 200]
            refused = [answer for answer in answers if answer.status != 200]
            assert len(served) == made >= 4
            assert {answer.status for answer in refused} == {503}
            for answer in refused:
                assert answer.error["code"] == "max_num_queued_reqs"
                assert 1 <= int(answer.headers["retry-after"]) <= 600
            assert all(a.json["usage"]["completion_tokens"] == 12 for a in served)
            await nothing_runs(client)
            assert (await client.post(AT, {"prompt": [1], **GREEDY})).status == 200

    run(ask())


MIXED: list[dict[str, Any]] = [
    {},
    {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False},
    {"structured_outputs": {"regex": "[0-9]{3,9}"}, "ignore_eos": False},
    {"logit_bias": {"17": 100}},
    {"bad_words": ["a", " the"], "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "top_p": 0.8},
    {"logprobs": 3, "n": 2},
    {"min_tokens": 5, "ignore_eos": False, "stop_token_ids": [17]},
]


@pytest.mark.parametrize("num", [48, pytest.param(2000, marks=pytest.mark.full)])
def test_nobodys_rules_are_anybody_elses(num: int) -> None:
    """Places in the batch are used again and again: each text is what it is alone."""

    async def ask() -> None:
        async with serving(ServerConfig(max_num_queued_reqs=4096), max_num_seqs=6) as client:

            async def one(number: int) -> list[str]:
                fields = MIXED[number * 7 % len(MIXED)]
                body = {"prompt": PROMPTS[number % 3], **GREEDY, **fields}
                body["max_tokens"] = 4 + number % 2 * 4
                answer = await client.post(AT, body)
                assert answer.status == 200, answer.body
                return [choice["text"] for choice in answer.json["choices"]]

            alone: dict[int, list[str]] = {}
            period = len(MIXED) * 6
            for number in range(min(num, period)):
                alone[number] = await one(number)
            together = await asyncio.gather(*map(one, range(num)))
            for number, found in enumerate(together):
                assert found == alone[number % period], number

    run(ask(), at_most_s=900)
