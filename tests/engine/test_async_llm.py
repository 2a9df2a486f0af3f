"""AsyncLLM: many readers, and the same tokens as LLM whatever they do; nothing stays behind."""

import asyncio
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import pytest

import quire
from conformance.covering import in_turn
from engine.test_llm import (
    GREEDY,
    assert_all_is_given_back,
    demo,
    generated_by_transformers,
    model_of,
    prompts,
)
from quire import LLM, AsyncLLM, SamplingParams
from quire.engine.outputs import TextDelta
from quire.errors import MemoryUnavailable, RequestError, RequestTooLong
from quire.kv import Usage
from quire.memory import CountedMemory, HostMemory
from quire.models.loader import load
from quire.sampling_params import StructuredOutputsParams
from tiny import tokens

T = TypeVar("T")
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def _known() -> None:
    """Before any engine steps: the model's own generate must not run beside a step."""
    generated_by_transformers("llama")


def small(**options: Any) -> AsyncLLM:
    defaults = dict(max_model_len=128, kv_cache_memory_bytes="64MB", max_num_seqs=8)
    return AsyncLLM(model_of("llama"), **{**defaults, **options})


def token_ids(deltas: list[TextDelta], choice: int = 0) -> tuple[int, ...]:
    return tuple(i for delta in deltas if delta.choice == choice for i in delta.token_ids)


async def read(llm: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **more: Any) -> Any:
    return [delta async for delta in llm.generate(prompt, params, **more)]


def run(awaitable: Awaitable[T]) -> T:
    """In an event loop of its own, and not for ever."""

    async def bounded() -> T:
        return await asyncio.wait_for(awaitable, 300)

    return asyncio.run(bounded())


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        await asyncio.sleep(0.001)


# -- what comes out -------------------------------------------------------------------------------


def test_many_readers_get_what_generate_gives() -> None:
    async def main() -> None:
        async with small(max_num_batched_tokens=16) as llm:
            several = await asyncio.gather(*(read(llm, prompt) for prompt in prompts()))
            assert [token_ids(deltas) for deltas in several] == generated_by_transformers("llama")
            assert {deltas[-1].finish_reason for deltas in several} == {"length"}
            assert_all_is_given_back(llm.llm)

    run(main())


def test_text_and_every_choice_come_whole() -> None:
    params = SamplingParams(n=3, max_tokens=24, temperature=1.0, seed=1)
    texts = ["class Stack:\n", "for é in '色👍':", "def fibonacci(n):\n"]
    exact = load(dtype="float32")  # in bfloat16 a token may depend on who else is in the batch
    with LLM(exact, max_num_seqs=9) as llm:
        want = llm.generate(texts, params)

    async def main() -> None:
        async with AsyncLLM(exact, max_num_seqs=9) as llm:
            several = await asyncio.gather(*(read(llm, text, params) for text in texts))
            for deltas, whole in zip(several, want, strict=True):
                for choice, expected in enumerate(whole.choices):
                    own = [delta for delta in deltas if delta.choice == choice]
                    assert "".join(delta.text for delta in own) == expected.text
                    assert token_ids(deltas, choice) == expected.token_ids
                    assert own[-1].finish_reason == expected.finish_reason
            assert await asyncio.gather(*(llm.complete(text, params) for text in texts)) == [
                replace(whole, num_cached_tokens=len(whole.prompt_token_ids) - 1) for whole in want
            ]

    run(main())


def test_event_loops_in_several_threads_share_one_engine() -> None:
    llm, found = small(), {}

    def read_all(name: int) -> None:
        async def main() -> list[Any]:
            return await asyncio.gather(*(read(llm, prompt) for prompt in prompts()))

        found[name] = [token_ids(deltas) for deltas in run(main())]

    threads = [threading.Thread(target=read_all, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == dict.fromkeys(range(3), generated_by_transformers("llama"))
    assert_all_is_given_back(llm.llm)
    llm.close()


def test_what_begins_alike_is_found_and_figures_can_be_had_between_steps() -> None:
    async def main() -> None:
        async with small() as llm:
            await read(llm, prompts()[2])
            again = await llm.complete(prompts()[2], GREEDY)
            assert again.num_cached_tokens == len(prompts()[2]) - 1
            usage = await llm.usage()
            assert (usage.num_sequences, usage.used_bytes) == (0, 0)
            assert usage.cached_bytes > 0
            await llm.resize("32MB")
            assert llm.llm.elastic.capacity_bytes == 32 * 10**6
            assert await llm.reset_prefix_cache()
            assert (await llm.usage()).committed_bytes == 0

    run(main())


def test_observe_sees_the_usage_after_each_step() -> None:
    seen: list[Usage] = []

    async def main() -> None:
        async with small(observe=seen.append) as llm:
            await read(llm, prompts()[0])

    run(main())
    assert [usage.num_tokens for usage in seen[:3]] == [5, 6, 7]
    assert seen[19].used_bytes == 0


# -- who leaves -----------------------------------------------------------------------------------


async def leave_by_break(llm: AsyncLLM, prompt: list[int]) -> None:
    async for _ in llm.generate(prompt, LONG):
        break


async def leave_by_closing(llm: AsyncLLM, prompt: list[int]) -> None:
    async with aclosing(llm.generate(prompt, LONG)) as stream:
        await anext(stream)


async def leave_by_cancel(llm: AsyncLLM, prompt: list[int]) -> None:
    got = asyncio.Event()

    async def reader() -> None:
        async for _ in llm.generate(prompt, LONG):
            got.set()

    task = asyncio.create_task(reader())
    await got.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_error(llm: AsyncLLM, prompt: list[int]) -> None:
    async def reader() -> None:
        async for _ in llm.generate(prompt, LONG):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await reader()


async def leave_by_timeout(llm: AsyncLLM, prompt: list[int]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.complete(prompt, LONG), 0.001)


async def leave_by_abort(llm: AsyncLLM, prompt: list[int]) -> None:
    deltas = []
    async for delta in llm.generate(prompt, LONG, request_id="mine"):
        deltas.append(delta)
        if len(deltas) == 2:
            await llm.abort(["mine", "unknown"])
            assert (await llm.usage()).num_sequences == 1  # and not a step later
    assert (deltas[-1].finish_reason, deltas[-1].detail) == ("abort", "aborted")
    await llm.abort("mine")


LEAVING = (
    leave_by_break,
    leave_by_closing,
    leave_by_cancel,
    leave_by_error,
    leave_by_timeout,
    leave_by_abort,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("leave", "strategy"), in_turn(LEAVING, ["paged", "virtual"]))
def test_who_leaves_gives_back_its_own_and_leaves_what_is_shared(
    leave: Callable[[AsyncLLM, list[int]], Awaitable[None]], strategy: str
) -> None:
    """The other has its tokens and bytes as if it had been alone; the prefix stays findable."""
    shared = tokens(1, 40)[0].tolist()
    options = dict(cache=strategy, max_num_seqs=2)

    async def main() -> None:
        async with small(**options) as llm:
            want = token_ids(await read(llm, shared, LONG))
            stays = aiter(llm.generate(shared, LONG))
            got = [await anext(stays)]
            await leave(llm, [*shared, 7, 8, 9])
            await until(lambda: llm.llm.engine.scheduler.num_running <= 1)
            usage = await llm.usage()
            assert usage.num_sequences == 1
            per_token = llm.llm.spec.bytes_per_token
            assert usage.used_bytes == usage.num_tokens * per_token
            assert usage.cached_bytes > 0
            got += [delta async for delta in stays]
            assert token_ids(got) == want
            assert got[0].num_cached_tokens == len(shared) - 1
            assert (await llm.usage()).used_bytes == 0
            after = await llm.complete([*shared, 5], GREEDY)
            assert after.num_cached_tokens >= len(shared)
            assert_all_is_given_back(llm.llm)

    run(main())


def test_an_event_loop_that_ends_takes_its_requests_along() -> None:
    """Readers that were never finalized, of a loop that was closed over them."""
    llm = small()
    loop = asyncio.new_event_loop()
    stream = llm.generate(prompts()[0], LONG)
    loop.run_until_complete(anext(stream))
    loop.close()

    async def main() -> None:
        await until(lambda: not llm.llm.engine.scheduler.has_unfinished)
        assert token_ids(await read(llm, prompts()[1])) == generated_by_transformers("llama")[1]
        assert_all_is_given_back(llm.llm)

    run(main())
    llm.close()


# -- slow readers, and others that they do not hold up --------------------------------------------


def test_a_reader_who_is_behind_gets_the_rest_at_once() -> None:
    async def main() -> None:
        async with small() as llm:
            stream = llm.generate(prompts()[0], replace(LONG, n=2))
            first = await anext(stream)
            await until(lambda: not llm.llm.engine.scheduler.has_unfinished)
            rest = [delta async for delta in stream]
            # What came with the first piece, and everything else: a piece for each choice.
            assert len(rest) <= 3
            want = await llm.complete(prompts()[0], LONG)
            for choice in range(2):
                assert token_ids([first, *rest], choice) == want.token_ids

    run(main())


class SlowTokenizer:
    """Takes as long as it is told to for one text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.go_on, self.begun = tokenizer, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str) -> Any:
        if text == "slow":
            self.begun.set()
            assert self.go_on.wait(100)
        return self._tokenizer(text)


def test_tokenizing_holds_up_neither_the_loop_nor_the_steps() -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)

    async def main() -> None:
        async with AsyncLLM(demo()) as llm:
            maker = llm.llm._maker
            tokenizer = SlowTokenizer(maker.facts.tokenizer)
            maker.facts = replace(maker.facts, tokenizer=tokenizer)
            running = llm.generate("def a():", params)
            await anext(running)
            slow = asyncio.create_task(llm.complete("slow", params, request_id="slow"))
            await until(tokenizer.begun.is_set)
            assert len(token_ids([delta async for delta in running])) >= 28  # to its end
            assert not slow.done()
            # Aborted while it is being tokenized, it never runs.
            await llm.abort("slow")
            tokenizer.go_on.set()
            completion = await slow
            assert (completion.finish_reason, completion.token_ids) == ("abort", ())
            assert_all_is_given_back(llm.llm)

    run(main())


def test_compiling_a_grammar_holds_up_no_prompt() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def main() -> None:
        async with small() as llm:
            request = llm.llm.request

            def slow(prompt: Any, params: SamplingParams, **more: Any) -> Any:
                if params.structured_outputs is not None:
                    begun.set()
                    assert go_on.wait(100)
                return request(prompt, replace(params, structured_outputs=None), **more)

            llm.llm.request = slow  # type: ignore[method-assign]
            form = StructuredOutputsParams(regex="[ab]+")
            formed = asyncio.create_task(
                llm.complete(prompts()[0], replace(GREEDY, structured_outputs=form))
            )
            await until(begun.is_set)
            plain = await llm.complete(prompts()[1], GREEDY)
            assert plain.token_ids == generated_by_transformers("llama")[1]
            assert not formed.done()
            go_on.set()
            assert (await formed).token_ids == generated_by_transformers("llama")[0]

    run(main())


# -- what is refused, and what fails --------------------------------------------------------------


def test_a_request_that_cannot_run_raises_where_it_was_made() -> None:
    async def main() -> None:
        async with small(max_model_len=64) as llm:
            other = asyncio.create_task(read(llm, prompts()[0]))
            with pytest.raises(RequestTooLong, match="raise max_model_len"):
                await read(llm, tokens(1, 64)[0].tolist())
            with pytest.raises(RequestError, match="not in the vocabulary"):
                await llm.complete([10**6])
            with pytest.raises(RequestError, match="no tokenizer"):
                await read(llm, "text")
            with pytest.raises(RequestError, match="params must be SamplingParams, not dict"):
                await read(llm, [5], {"max_tokens": 3})  # type: ignore[arg-type]
            assert token_ids(await other) == generated_by_transformers("llama")[0]
            # Too long only since it was checked: the thread that steps says so.
            request = llm.llm.request(tokens(1, 60)[0].tolist(), GREEDY)
            await llm.resize(2 * 16 * llm.llm.spec.bytes_per_token)
            llm.llm.request = lambda *_, **__: request  # type: ignore[method-assign]
            with pytest.raises(RequestTooLong, match="raise kv_cache_memory_bytes"):
                await read(llm, [5])
            assert not llm.llm.engine.scheduler.has_unfinished

    run(main())


def test_a_name_is_of_one_request_at_a_time() -> None:
    async def main() -> None:
        async with small() as llm:
            stream = llm.generate(prompts()[0], LONG, request_id="1")
            await anext(stream)
            with pytest.raises(RequestError, match=r"request_id '1' is in use"):
                await read(llm, prompts()[1], request_id="1")
            nameless = await read(llm, prompts()[1])
            assert token_ids(nameless) == generated_by_transformers("llama")[1]
            with pytest.raises(RequestError, match=r"request_id '1' is in use"):
                await read(llm, prompts()[1], request_id="1")
            await stream.aclose()
            again = await read(llm, prompts()[1], request_id="1")
            assert token_ids(again) == token_ids(nameless)

    run(main())


def test_an_engine_that_fails_tells_all_readers_why() -> None:
    memory = CountedMemory(HostMemory())
    llm = small(provider=memory)
    step, scheduler = llm.llm.step, llm.llm.engine.scheduler

    def fail_with_all_on_board() -> bool:
        if scheduler.num_running == len(prompts()):
            raise MemoryUnavailable("the system has no pages left")
        return step()

    llm.llm.step = fail_with_all_on_board  # type: ignore[method-assign]

    async def main() -> None:
        results = await asyncio.gather(
            *(read(llm, prompt, LONG) for prompt in prompts()), return_exceptions=True
        )
        for error in results:
            assert isinstance(error, MemoryUnavailable)
            assert str(error) == "the system has no pages left"
        assert len({id(error) for error in results}) == len(results)
        for late in (read(llm, prompts()[0]), llm.complete([5]), llm.usage(), llm.abort("1")):
            with pytest.raises(MemoryUnavailable, match="no pages left"):
                await late

    run(main())
    llm.close()
    assert memory.committed_bytes == memory.reserved_bytes == 0


def test_a_defect_in_a_step_reaches_the_readers_too() -> None:
    llm = small()

    def broken() -> bool:
        raise AssertionError("a block is held twice")

    llm.llm.step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"the engine has failed.*a block is held twice"):
        run(read(llm, prompts()[0]))
    llm.close()
    assert llm.llm.memory.reserved_bytes == 0


# -- the end --------------------------------------------------------------------------------------


def test_closing_tells_who_still_reads() -> None:
    async def main() -> None:
        memory = CountedMemory(HostMemory())
        llm = small(provider=memory)
        stream = llm.generate(prompts()[0], LONG)
        deltas = [await anext(stream)]
        await llm.aclose()
        deltas += [delta async for delta in stream]
        assert (deltas[-1].finish_reason, deltas[-1].detail) == ("abort", "the LLM was closed")
        got = token_ids(deltas)[:20]
        assert got == generated_by_transformers("llama")[0][: len(got)]
        assert memory.committed_bytes == memory.reserved_bytes == 0
        for use in (read(llm, prompts()[0]), llm.complete([5]), llm.usage(), llm.abort("1")):
            with pytest.raises(RequestError, match="closed"):
                await use
        llm.close()

    run(main())


def test_it_can_be_closed_unused_and_by_forgetting_it() -> None:
    others = set(threading.enumerate())  # of engines that other tests share

    def steps() -> bool:
        return "quire-step" in {each.name for each in set(threading.enumerate()) - others}

    unused = small()
    unused.close()
    with pytest.raises(RequestError, match="closed"):
        run(read(unused, [5]))
    memory = CountedMemory(HostMemory())
    llm = small(provider=memory)
    run(read(llm, prompts()[0]))
    assert steps()
    known = weakref.ref(llm)
    del llm, unused
    gc.collect()
    assert known() is None
    assert memory.reserved_bytes == 0
    assert not steps()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own() -> None:
    llm = small()
    want = run(read(llm, prompts()[0]))
    child = os.fork()
    if not child:
        code = 1
        try:
            llm.close()  # nothing of its parent's
            run(read(llm, prompts()[0]))
        except RequestError as error:
            code = 0 if "belongs to the parent process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert token_ids(run(read(llm, prompts()[0]))) == token_ids(want)
    llm.close()


def test_quire_offers_it_by_name() -> None:
    assert quire.AsyncLLM is AsyncLLM


# -- storms ---------------------------------------------------------------------------------------

STORM, WHOLE_STORM = 1_500, 10_000


async def begin_and_leave(llm: AsyncLLM, prompt: list[int], chance: random.Random) -> None:
    """A request that ends at a random moment, in a random manner."""
    name, params = str(id(prompt)), replace(LONG, n=chance.choice([1, 1, 1, 3]))
    how = chance.randrange(8)
    if how == 0:
        num_left = chance.choice([1, 1, 5])
        async for _ in llm.generate(prompt, params):
            num_left -= 1
            if not num_left:
                break
        return
    task = asyncio.create_task(read(llm, prompt, params, request_id=name))
    for _ in range(chance.randrange(20)):
        await asyncio.sleep(0)
    if how < 4:
        await llm.abort(name)
    task.cancel()  # an abort may have come before it had even begun
    await asyncio.wait([task])


@pytest.mark.parametrize("num", [STORM, pytest.param(WHOLE_STORM, marks=pytest.mark.full)])
def test_a_storm_of_aborts_changes_nothing_for_who_stays(num: int) -> None:
    """They come and go at random moments; those that stay get their tokens; no block is lost."""
    chance = random.Random(6)
    stay = [tokens(1, length, seed=100 + length)[0].tolist() for length in range(3, 23)]
    storm = [tokens(1, length, seed=length % 5)[0].tolist() for length in range(2, 31)]
    options = dict(max_num_seqs=64, max_num_batched_tokens=256)

    async def all_of(llm: AsyncLLM) -> list[tuple[int, ...]]:
        several = await asyncio.gather(*(llm.complete(prompt, LONG) for prompt in stay))
        return [completion.token_ids for completion in several]

    async def main() -> None:
        async with small(**options) as llm:
            want = await all_of(llm)
            assert_all_is_given_back(llm.llm)
            free_before = llm.llm.usage()
            seats = asyncio.Semaphore(num // 4)

            async def one() -> None:
                async with seats:
                    await begin_and_leave(llm, list(chance.choice(storm)), chance)

            survivors = asyncio.create_task(all_of(llm))
            await asyncio.gather(*(one() for _ in range(num)))
            assert await survivors == want
            await until(lambda: not llm.llm.engine.scheduler.has_unfinished)
            assert_all_is_given_back(llm.llm)
            assert llm.llm.usage() == free_before
            llm.llm.engine.scheduler.check()
            assert not llm._tracker._requests
            assert not llm.llm._listeners
            assert await all_of(llm) == want

    run(main())
