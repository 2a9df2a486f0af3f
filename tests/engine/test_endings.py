"""How texts end that do not end by themselves: the reader is told, with the cause, and no other."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from conformance.covering import only
from engine.test_async_llm import read, run, until
from engine.test_beam import params as beam_params
from engine.test_beam import small as small_beams
from engine.test_llm import GREEDY, assert_all_is_given_back, demo, ids, model_of, prompts
from quire import LLM, AsyncLLM, SamplingParams
from quire.engine.outputs import TextDelta
from quire.engine.request_tracker import OutputCollector
from quire.engine.step_plan import TokenOutput
from quire.errors import RequestError
from quire.kv import STRATEGIES
from quire.models.loader import LoadedModel

BAD = 7  # a token that the strict tokenizer does not have
CODE = "def fibonacci(n):\n    "
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
TO_BAD = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logit_bias={BAD: 100.0})


class StrictTokenizer:
    """Raises for an id that its vocabulary lacks, as SentencePiece does."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._own(*args, **options)

    def decode(self, token_ids: Any, **options: Any) -> Any:
        if BAD in token_ids:
            raise IndexError("piece id is out of range")
        return self._own.decode(token_ids, **options)


def strict() -> LoadedModel:
    return replace(demo(), tokenizer=StrictTokenizer(demo().tokenizer))


def small(**options: Any) -> LLM:
    return LLM(strict(), **{"max_model_len": 256, "kv_cache_memory_bytes": "32MiB", **options})


# -- a text that cannot be decoded ----------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("speculative", [None, '{"method": "ngram"}'])
def test_a_token_that_cannot_be_decoded_ends_its_own_text(
    max_tokens: int, speculative: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it would have been the last one or not; the others get what they get alone."""
    good, bad = replace(GREEDY, max_tokens=24), replace(TO_BAD, max_tokens=max_tokens)
    with small(speculative_config=speculative) as llm:
        want = llm.generate(CODE, good)[0]
        first, broken, last = llm.generate([CODE, "class A:\n", CODE], [good, bad, good])
        assert [first.choices, last.choices] == [want.choices, want.choices]
        assert broken.finish_reason == "error"
        assert broken.token_ids == (BAD,)
        assert broken.text == ""
        assert "cannot be decoded" in broken.detail
        assert "IndexError('piece id is out of range')" in broken.detail
        assert_all_is_given_back(llm)
    logged = [r for r in caplog.records if "cannot be decoded" in r.message]
    assert len(logged) == 1
    assert logged[0].levelno == logging.ERROR
    assert logged[0].exc_info is not None


def test_the_sequence_itself_says_so() -> None:
    with small() as llm:
        got = list[TextDelta]()
        (sequence,) = llm.start(llm.request(CODE, TO_BAD), got.append)
        while llm.step():
            pass
        assert sequence.finish_reason == "error"
        assert sequence.finish_detail == got[-1].detail != ""
        assert [delta.finish_reason for delta in got] == ["error"]
        assert llm.statistics.num_finished["error"] == 1


def test_one_of_several_continuations_ends_alone() -> None:
    """Some draw the token, some do not."""
    params = SamplingParams(
        n=8, max_tokens=4, temperature=1.0, seed=3, ignore_eos=True, logit_bias={BAD: 6.0}
    )
    with LLM(demo(), max_model_len=256, kv_cache_memory_bytes="32MiB") as llm:
        (want,) = llm.generate(CODE, params)
    with small() as llm:
        (got,) = llm.generate(CODE, params)
        assert_all_is_given_back(llm)
    hit = [BAD in choice.token_ids for choice in want.choices]
    assert any(hit)
    assert not all(hit)
    for own, other, is_hit in zip(got.choices, want.choices, hit, strict=True):
        assert (own.finish_reason == "error") == is_hit
        if is_hit:
            place = other.token_ids.index(BAD)
            assert own.token_ids == other.token_ids[: place + 1]
        else:
            assert own == other


def test_readers_of_an_event_loop_get_theirs_beside_one_that_cannot() -> None:
    async def main() -> None:
        async with AsyncLLM(
            strict(), max_model_len=256, kv_cache_memory_bytes="32MiB", max_num_seqs=8
        ) as llm:
            want = await llm.complete(CODE, LONG)
            good = asyncio.ensure_future(llm.complete(CODE, LONG))
            await until(lambda: llm.llm.engine.scheduler.num_running > 0)
            bad = await read(llm, CODE, TO_BAD)
            assert bad[-1].finish_reason == "error"
            assert "piece id is out of range" in bad[-1].detail
            assert (await good).choices == want.choices
            assert llm.failure is None

    run(main())


def test_a_beam_that_cannot_be_decoded_is_one_choice() -> None:
    params = beam_params(beam_width=3, max_tokens=1)
    with small() as llm:
        (want,) = llm.beam_search([CODE], params)
        bad = want.choices[1].token_ids[0]
        decode = llm.tokenizer.decode

        def refuse(token_ids: Any, **options: Any) -> Any:
            if bad in token_ids:
                raise IndexError("piece id is out of range")
            return decode(token_ids, **options)

        llm.tokenizer.decode = refuse
        (got,) = llm.beam_search([CODE], params)
    assert [choice.finish_reason for choice in got.choices] == ["length", "error", "length"]
    assert "piece id is out of range" in got.choices[1].detail
    assert got.choices[1].text == ""
    assert [c.token_ids for c in got.choices] == [c.token_ids for c in want.choices]
    assert (got.choices[0], got.choices[2]) == (want.choices[0], want.choices[2])


# -- a piece that cannot be delivered -------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 2])
def test_a_reader_who_raises_ends_its_own_text(
    after: int, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(model_of("llama"), max_model_len=128, kv_cache_memory_bytes="64MB") as llm:
        want = ids(llm.generate(prompts(), GREEDY))
        heard: list[list[TextDelta]] = [[] for _ in prompts()]

        def deliver(delta: TextDelta) -> None:
            if delta.index == 1 and len(heard[1]) == after and delta.finish_reason is None:
                raise ValueError("this reader is gone")
            heard[delta.index].append(delta)

        sequences = [
            llm.start(llm.request(prompt, GREEDY), deliver, index=index)[0]
            for index, prompt in enumerate(prompts())
        ]
        while llm.step():
            pass
        assert [s.finish_reason for s in sequences] == ["length", "error", "length", "length"]
        assert "ValueError('this reader is gone')" in sequences[1].finish_detail
        # It is told how it ended, if it can be told anything.
        assert heard[1][-1].finish_reason == "error"
        assert heard[1][-1].detail == sequences[1].finish_detail
        for index in (0, 2, 3):
            told = tuple(token for delta in heard[index] for token in delta.token_ids)
            assert told == want[index]
        assert "this reader is gone" in caplog.text
        assert not llm._listeners
        assert_all_is_given_back(llm)


def test_a_mailbox_that_takes_nothing_raises_in_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other continuations end too, and the other readers get theirs."""
    put, broken = OutputCollector.put, list[OutputCollector]()

    def refuse(self: OutputCollector, delta: TextDelta) -> None:
        if self in broken:
            raise MemoryError("no room for a piece")
        put(self, delta)

    monkeypatch.setattr(OutputCollector, "put", refuse)

    async def main() -> None:
        async with AsyncLLM(
            model_of("llama"), max_model_len=128, kv_cache_memory_bytes="64MB", max_num_seqs=8
        ) as llm:
            want = await llm.complete(prompts()[0], LONG)
            good = asyncio.ensure_future(llm.complete(prompts()[0], LONG))
            bad = llm.generate(prompts()[1], replace(LONG, n=2), request_id="bad")
            await anext(bad)
            broken.append(llm._tracker._requests["bad"].collector)
            with pytest.raises(MemoryError, match="no room for a piece"):
                async for _ in bad:
                    pass
            assert (await good).token_ids == want.token_ids
            await until(lambda: not llm.llm.engine.scheduler.has_unfinished)
            assert llm.failure is None
            assert_all_is_given_back(llm.llm)

    run(main())


# -- what chooses ---------------------------------------------------------------------------------


class BrokenGrammar:
    """Its automaton raises where the third token is to be taken, however often it is asked."""

    error = ""

    def __init__(self) -> None:
        self._num_taken = 0

    def matcher(self) -> "BrokenGrammar":
        return BrokenGrammar()

    def consume(self, token_ids: list[int]) -> None:
        self._num_taken += len(token_ids)
        if self._num_taken > 2:
            raise RuntimeError("the automaton is broken")

    def masks(self, drafts: tuple[int, ...]) -> list[Any]:
        return [np.full(1 << 16, 255, np.uint8) for _ in range(len(drafts) + 1)]

    def taken(self, token_ids: Any) -> tuple[int, bool]:
        return len(token_ids), False


def test_an_automaton_that_raises_ends_its_own_text() -> None:
    with LLM(demo(), max_model_len=256, kv_cache_memory_bytes="32MiB") as llm:
        want = llm.generate(CODE, GREEDY)[0].token_ids
        got: list[list[TextDelta]] = [[], []]
        broken = replace(llm.request(CODE, GREEDY), grammar=BrokenGrammar())  # type: ignore[arg-type]
        llm.start(llm.request(CODE, GREEDY), got[0].append)
        (sequence,) = llm.start(broken, got[1].append)
        while llm.step():
            pass
        assert tuple(token for delta in got[0] for token in delta.token_ids) == want
        assert got[1][-1].finish_reason == sequence.finish_reason == "error"
        assert "the automaton is broken" in sequence.finish_detail


@pytest.mark.parametrize("strategy", only(STRATEGIES, "growing", "paged"))
def test_a_search_that_fails_ends_alone(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Half-way through a fork, so that the books are as they should not be."""
    with small_beams(cache=strategy) as llm:
        want = ids(llm.generate(prompts(), GREEDY))
        stream = llm.stream(prompts(), GREEDY)
        head = [next(stream) for _ in range(8)]
        branch, calls = llm.engine.scheduler._branch, iter(range(5))

        def fail(parent: Any, sequence: Any) -> None:
            if next(calls) == 4:
                raise MemoryError("no room for a table")
            branch(parent, sequence)

        llm.engine.scheduler._branch = fail  # type: ignore[method-assign]
        (done,) = llm.beam_search(prompts()[:1], beam_params(ignore_eos=True))
        llm.engine.scheduler._branch = branch  # type: ignore[method-assign]
        assert {choice.finish_reason for choice in done.choices} == {"error"}
        assert all("no room for a table" in choice.detail for choice in done.choices)
        llm.engine.scheduler.check()
        deltas = [*head, *stream]
        told = [tuple(d.token_id for d in deltas if d.index == i) for i in range(len(want))]
        assert told == want
        assert_all_is_given_back(llm)
    assert "a beam search failed" in caplog.text


# -- an LLM that is closed under its readers ------------------------------------------------------


def beside(use: Callable[[], Any], llm: LLM, num_steps: int, end: Callable[[], None]) -> Any:
    """What ``use`` gives or raises in a thread, while the LLM ends after so many steps."""
    steps, come, results = llm.step, Event(), deque[Any]()

    def step() -> bool:
        nonlocal num_steps
        num_steps -= 1
        if num_steps == 0:
            come.set()
        return steps()

    def work() -> None:
        try:
            results.append(use())
        except Exception as error:
            results.append(error)
        come.set()

    llm.step = step  # type: ignore[method-assign]
    thread = Thread(target=work)
    thread.start()
    assert come.wait(100)
    end()
    thread.join(100)
    assert not thread.is_alive(), "it waits for ever"
    return results.popleft()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("num_steps", "strategy"), [(1, "paged"), (7, "paged"), (4, "virtual")])
def test_closing_under_generate_is_an_abort(n: int, num_steps: int, strategy: str) -> None:
    params = replace(LONG, n=n)
    llm = LLM(
        model_of("llama"), max_model_len=128, kv_cache_memory_bytes="64MB", cache=strategy,
        max_num_seqs=3, max_num_batched_tokens=16,
    )  # fmt: skip
    got = beside(lambda: llm.generate(prompts(), params), llm, num_steps, llm.close)
    assert len(got) == len(prompts())
    for own in got:
        assert len(own.choices) == n
        for choice in own.choices:
            assert choice.finish_reason == "abort"
            assert choice.detail == "the LLM was closed"
            assert len(choice.token_ids) < params.max_tokens


def test_what_was_held_back_for_a_stop_string_comes_with_the_end() -> None:
    with small() as llm:
        (whole,) = llm.generate(CODE, replace(LONG, max_tokens=3))
        stop = whole.text + "and never so"
        stream = llm.stream(CODE, replace(LONG, stop=(stop,)))
        head = [next(stream) for _ in range(3)]
        assert "".join(delta.text for delta in head) == ""
        llm.close()
        last = list(stream)[-1]
        assert (last.text, last.finish_reason) == (whole.text, "abort")


def test_a_failure_under_another_thread_is_an_error_with_its_cause() -> None:
    llm = LLM(model_of("llama"), max_model_len=128, kv_cache_memory_bytes="64MB")
    (got,) = beside(lambda: llm.generate(prompts()[0], LONG), llm, 5, lambda: llm.fail("it burns"))
    assert (got.finish_reason, got.detail) == ("error", "it burns")


@pytest.mark.parametrize("num_steps", [1, 5])
def test_closing_under_a_search_ends_its_beams(num_steps: int) -> None:
    llm = small_beams()
    search = beam_params(ignore_eos=True, max_tokens=60)
    (got,) = beside(lambda: llm.beam_search(prompts()[:1], search), llm, num_steps, llm.close)
    assert {(c.finish_reason, c.detail) for c in got.choices} == {("abort", "the LLM was closed")}


def test_nothing_is_begun_or_stepped_once_it_is_closed() -> None:
    llm = LLM(model_of("llama"), max_model_len=128, kv_cache_memory_bytes="64MB")
    request = llm.request(prompts()[0], GREEDY)
    llm.close()
    with pytest.raises(RequestError, match="this LLM is closed"):
        llm.start(request, lambda _: None)
    assert not llm.engine.scheduler.has_unfinished
    llm.engine.step = None  # type: ignore[method-assign,assignment]
    assert not llm.step()


def test_a_step_from_a_callback_of_close_is_refused_in_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread that closes would wait for itself."""
    llm = LLM(model_of("llama"), max_model_len=128, kv_cache_memory_bytes="64MB")
    ends = deque[str | None]()

    def deliver(delta: TextDelta) -> None:
        ends.append(delta.finish_reason)
        llm.step()

    llm.start(llm.request(prompts()[0], GREEDY), deliver)
    closing = Thread(target=llm.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), "it waits for ever"
    assert list(ends) == ["abort"]
    assert "step() was called from a deliver callback" in caplog.text
    assert not llm.step(), "outside of one it says that there is nothing to do"


def test_a_piece_after_the_end_of_a_listener_is_dropped() -> None:
    with small() as llm:
        (sequence,) = llm.start(llm.request(CODE, GREEDY), lambda _: None)
        llm.abandon([sequence])
        llm._tell(TokenOutput(sequence=sequence, token_id=5, finish_reason=None))
        assert sequence.finish_reason == "abort"
