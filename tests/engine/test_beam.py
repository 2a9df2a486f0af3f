"""Beam search finds the best of all continuations, and what Transformers' own search finds."""

import asyncio
import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conformance.covering import only
from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.engine.outputs import CompletionOutput
from quire.errors import RequestError, RequestTooLong
from quire.kv import STRATEGIES
from quire.models.loader import LoadedModel, load
from tiny import CONFIGS, tiny_model, tokens

WIDTH = 4
LENGTH = 10
SOME_ENDS = (7, 9, 11, 20, 33, 44, 55, 66, 77, 88, 99)  # so many that texts end early


@cache
def model_of(name: str, ends: tuple[int, ...]) -> PreTrainedModel:
    """With flatter weights than elsewhere, so that there is something to choose."""
    model = tiny_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    model.generation_config.eos_token_id = model.config.eos_token_id = list(ends) or None
    return model


@cache
def demo() -> LoadedModel:
    return load()


def prompts() -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in (5, 33, 17)]


def small(name: str = "llama", ends: tuple[int, ...] = SOME_ENDS, **options: Any) -> LLM:
    defaults = dict(max_model_len=96, kv_cache_memory_bytes="64MB", max_num_seqs=16)
    return LLM(model_of(name, ends), **{**defaults, **options})


def params(length_penalty: float = 1.0, **changed: Any) -> BeamSearchParams:
    usual = dict(beam_width=WIDTH, max_tokens=LENGTH, length_penalty=length_penalty)
    return BeamSearchParams(**{**usual, **changed})


def searched_by_transformers(
    model: PreTrainedModel,
    prompt: list[int],
    length_penalty: float,
    early_stopping: bool | str = "never",
) -> list[tuple[tuple[int, ...], float]]:
    """Token ids, without what fills up after the end, and scores."""
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        max_new_tokens=LENGTH,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ends = model.generation_config.eos_token_id or []
    texts = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ended = next((at for at, token in enumerate(row) if token in ends), LENGTH - 1)
        texts.append(tuple(row[: ended + 1]))
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


@cache
def wanted(
    name: str, ends: tuple[int, ...], length_penalty: float
) -> list[list[tuple[tuple[int, ...], float]]]:
    model = model_of(name, ends)
    return [searched_by_transformers(model, prompt, length_penalty) for prompt in prompts()]


def texts(completions: list[CompletionOutput]) -> list[list[tuple[int, ...]]]:
    return [[choice.token_ids for choice in done.choices] for done in completions]


def assert_found(
    completions: list[CompletionOutput],
    want: list[list[tuple[tuple[int, ...], float]]],
    length_penalty: float = 1.0,
) -> None:
    assert texts(completions) == [[text for text, _ in own] for own in want]
    for done, own in zip(completions, want, strict=True):
        for choice, (text, score) in zip(done.choices, own, strict=True):
            assert choice.cumulative_logprob is not None
            total = sum(token.logprob for token in choice.logprobs)
            assert math.isclose(choice.cumulative_logprob, total, abs_tol=1e-4)
            ours = choice.cumulative_logprob / len(text) ** length_penalty
            assert math.isclose(ours, score, rel_tol=1e-4, abs_tol=1e-4)
            ended = "length" if len(text) == LENGTH and text[-1] not in SOME_ENDS else "stop"
            assert choice.finish_reason in (ended, "length")


def assert_all_is_given_back(llm: LLM) -> None:
    usage = llm.usage()
    assert usage.used_bytes == usage.num_sequences == 0
    assert not llm.engine.scheduler.has_unfinished
    llm.engine.scheduler.check()
    assert llm.reset_prefix_cache()
    assert llm.memory.committed_bytes == 0


# -- what is found --------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "ends", "length_penalty"),
    [
        *(("llama", SOME_ENDS, penalty) for penalty in (1.0, 0.0, -1.0, 2.0)),
        ("llama", (), 1.0),
        ("gemma3", SOME_ENDS, 0.0),
        ("gemma3", (), 0.0),
    ],
)
def test_it_finds_what_transformers_finds(
    name: str, ends: tuple[int, ...], length_penalty: float
) -> None:
    """All beams, best first, with their scores; several prompts at once, cut into chunks."""
    with small(name, ends, max_num_batched_tokens=16) as llm:
        found = llm.beam_search(prompts(), params(length_penalty))
        assert_found(found, wanted(name, ends, length_penalty), length_penalty)
        assert_all_is_given_back(llm)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("length_penalty", [1.0, 2.0, -1.0])
def test_it_ends_early_as_transformers_does(early_stopping: bool, length_penalty: float) -> None:
    model = model_of("llama", SOME_ENDS)
    want = [
        searched_by_transformers(model, prompt, length_penalty, early_stopping)
        for prompt in prompts()
    ]
    with small() as llm:
        asked = params(length_penalty, early_stopping=early_stopping)
        assert_found(llm.beam_search(prompts(), asked), want, length_penalty)
        assert_all_is_given_back(llm)


def test_the_best_of_them_can_be_had_alone() -> None:
    with small() as llm:
        found = llm.beam_search(prompts(), params(n=2))
        assert_found(found, [own[:2] for own in wanted("llama", SOME_ENDS, 1.0)])


@cache
def of_few_words() -> PreTrainedModel:
    torch.manual_seed(5)
    config = CONFIGS["llama"]()
    config.vocab_size = 6
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config.eos_token_id = 2
    return model


@pytest.mark.parametrize(
    ("length_penalty", "ignore_eos"), [(1.0, False), (0.0, False), (0.5, True)]
)
def test_a_search_that_is_wide_enough_finds_the_best_of_all(
    length_penalty: float, ignore_eos: bool
) -> None:
    """Six words, three tokens: every continuation is scored. Wide enough: no beam is ever cut."""
    width, depth, prompt = 36, 3, [3, 4, 1, 5]
    scores: dict[tuple[int, ...], float] = {}
    for text in product(range(6), repeat=depth):
        if not ignore_eos and 2 in text:
            text = text[: text.index(2) + 1]
        if text in scores:
            continue
        with torch.inference_mode():
            logits = of_few_words()(torch.tensor([[*prompt, *text]])).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        total = sum(logprobs[at, token].item() for at, token in enumerate(text))
        scores[text] = total / len(text) ** length_penalty
    best = sorted(scores, key=lambda text: scores[text], reverse=True)[:width]
    with LLM(of_few_words(), max_model_len=16, kv_cache_memory_bytes="16MB") as llm:
        (done,) = llm.beam_search(
            prompt,
            BeamSearchParams(
                beam_width=width,
                max_tokens=depth,
                length_penalty=length_penalty,
                ignore_eos=ignore_eos,
            ),
        )
    found = [choice.token_ids for choice in done.choices]
    assert len(found) == width
    assert [scores[text] for text in found] == pytest.approx([scores[text] for text in best])
    assert {*found} == {*best}


def test_a_width_of_one_is_greedy() -> None:
    with small() as llm:
        greedy = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
        want = [done.token_ids for done in llm.generate(prompts(), greedy)]
        found = llm.beam_search(prompts(), params(beam_width=1, ignore_eos=True))
        assert [[text] for text in want] == texts(found)


def test_text_in_text_out() -> None:
    with LLM(demo(), max_num_seqs=8) as llm:
        (done,) = llm.beam_search("def add(a, b):\n", params(max_tokens=12, beam_width=3))
        assert len({choice.text for choice in done.choices}) == 3
        totals = [choice.cumulative_logprob / len(choice.token_ids) for choice in done.choices]
        assert totals == sorted(totals, reverse=True)
        for choice in done.choices:
            decoded = llm.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
            assert choice.text == decoded


# -- where it lies, and beside whom ---------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("llama", {"cache": strategy}) for strategy in STRATEGIES),
        ("llama", {"cache": "virtual", "enable_prefix_caching": False}),
        ("llama", {"max_num_seqs": 1}),
        ("llama", {"cache": "contiguous", "max_num_seqs": 3}),
        ("gemma3", {"max_num_seqs": 2, "enable_prefix_caching": False}),
        ("gemma3", {"block_size": 1}),
    ],
)
def test_no_way_to_keep_beams_changes_what_is_found(name: str, options: dict[str, Any]) -> None:
    """Fewer seats than beams: those that have their candidates make room, and recompute."""
    with small(name, **options) as llm:
        assert_found(llm.beam_search(prompts(), params()), wanted(name, SOME_ENDS, 1.0))
        few = options.get("max_num_seqs", 16) < WIDTH
        assert (llm.engine.scheduler.num_preemptions > 0) == few
        assert_all_is_given_back(llm)


@pytest.mark.parametrize("strategy", only(STRATEGIES, "contiguous", "paged"))
def test_too_little_memory_for_all_beams_changes_nothing(strategy: str) -> None:
    options: dict[str, Any] = dict(cache=strategy, growth_tokens=16, block_size=4)
    with small(**options) as llm:
        llm.beam_search(prompts(), params())
        peak = llm.memory.peak_committed_bytes
    with small(**options, kv_cache_memory_bytes=peak // 2) as llm:
        assert_found(llm.beam_search(prompts(), params()), wanted("llama", SOME_ENDS, 1.0))
        assert llm.memory.peak_committed_bytes <= peak // 2
        assert_all_is_given_back(llm)


def test_a_prompt_is_held_once_and_so_is_a_common_beginning() -> None:
    """Beams hold the prompt, and at most what each of them has written since in blocks."""
    prompt, block_size = tokens(1, 60)[0].tolist(), 4
    used: list[int] = []
    with small(block_size=block_size) as llm:
        steps = llm.step

        def step() -> bool:
            more = steps()
            used.append(llm.usage().used_bytes)
            return more

        llm.step = step  # type: ignore[method-assign]
        llm.beam_search(prompt, params(ignore_eos=True))
        token_bytes = llm.spec.bytes_per_token
    assert used[0] == 60 * token_bytes
    assert len(used) == LENGTH
    for num_written, num_bytes in enumerate(used[:-1]):
        own = -(-num_written // block_size) * block_size
        assert num_bytes <= (60 + WIDTH * own) * token_bytes
    assert used[-1] == 0


@pytest.mark.parametrize("strategy", ["paged", "growing"])
def test_searches_run_beside_other_requests(strategy: str) -> None:
    greedy = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with small(cache=strategy) as llm:
        want = [done.token_ids for done in llm.generate(prompts(), greedy)]
        stream = llm.stream(prompts(), greedy)
        head = [next(stream) for _ in range(4)]
        assert_found(llm.beam_search(prompts(), params()), wanted("llama", SOME_ENDS, 1.0))
        deltas = [*head, *stream]
        for index, text in enumerate(want):
            assert tuple(d.token_id for d in deltas if d.index == index) == text
        assert_all_is_given_back(llm)


@pytest.mark.parametrize("after", [1, 7])
def test_a_beam_that_is_preempted_recomputes(after: int) -> None:
    with small() as llm:
        steps, left = llm.step, iter(range(after, -1, -1))

        def step() -> bool:
            if next(left, None) == 0:
                for _ in range(3):
                    llm.engine.scheduler.preempt_youngest(spare_oldest=True)
            return steps()

        llm.step = step  # type: ignore[method-assign]
        assert_found(llm.beam_search(prompts(), params()), wanted("llama", SOME_ENDS, 1.0))


@pytest.mark.parametrize("strategy", only(["contiguous", "growing", "virtual"], "growing"))
def test_a_beam_is_swapped_out_with_what_it_has_just_been_given(strategy: str) -> None:
    """A beam that goes on from another one's text is preempted before the next step."""
    options: dict[str, Any] = dict(cache=strategy, max_num_seqs=WIDTH, swap_space="4MiB")
    urgent = SamplingParams(max_tokens=2, temperature=0, n=WIDTH)
    with small(enable_prefix_caching=False, scheduling_policy="priority", **options) as llm:
        llm.engine.scheduler.costs.note_step = lambda *_: None  # type: ignore[method-assign]
        steps = llm.step
        for after in range(1, LENGTH - 1):
            left = iter(range(after, -1, -1))

            def step(left: Iterator[int] = left) -> bool:
                if next(left, None) == 0:
                    llm.start(llm.request(tokens(1, 9)[0].tolist(), urgent, priority=-1), id)
                return steps()

            llm.step = step  # type: ignore[method-assign]
            found = llm.beam_search(prompts()[:1], params(ignore_eos=True))
            assert_found(found, wanted("llama", (), 1.0)[:1])
        assert llm.engine.scheduler.statistics.num_swaps > LENGTH


def test_guesses_are_not_for_beams() -> None:
    with small(speculative_config={"method": "ngram"}) as llm:
        assert_found(llm.beam_search(prompts(), params()), wanted("llama", SOME_ENDS, 1.0))
        assert llm.statistics.num_draft_tokens == 0


# -- how it ends otherwise ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_end_of_the_context_ends_every_beam(strategy: str) -> None:
    prompt = tokens(1, 28)[0].tolist()
    with small(ends=(), cache=strategy, max_model_len=32) as llm:
        (done,) = llm.beam_search(prompt, params())
        ends = {(c.finish_reason, len(c.token_ids)) for c in done.choices}
        assert ends == {("length", 4)}
        assert_all_is_given_back(llm)


def test_beams_that_outgrow_the_cache_end_with_their_texts_so_far() -> None:
    options: dict[str, Any] = dict(max_model_len=96, block_size=4, ends=())
    with small(**options) as llm:
        token_bytes = llm.spec.bytes_per_token
    prompt = tokens(1, 30)[0].tolist()
    with small(**options, kv_cache_memory_bytes=40 * token_bytes) as llm:
        (done,) = llm.beam_search(prompt, params(max_tokens=30))
        assert len(done.choices) == WIDTH
        for choice in done.choices:
            assert choice.finish_reason == "capacity"
            assert "raise kv_cache_memory_bytes" in choice.detail
            assert 0 < len(choice.token_ids) <= 11
        assert_all_is_given_back(llm)
        with pytest.raises(RequestTooLong):
            llm.beam_search([[5, 6], tokens(1, 60)[0].tolist()], params())
        assert not llm.engine.scheduler.has_unfinished


def test_an_async_reader_gets_it_all_at_once_and_an_aborted_one_what_there_was() -> None:
    async def run() -> None:
        options: dict[str, Any] = dict(max_model_len=96, kv_cache_memory_bytes="64MB")
        async with AsyncLLM(model_of("llama", SOME_ENDS), **options) as llm:
            found = [await llm.complete(prompt, params()) for prompt in prompts()]
            assert_found(found, wanted("llama", SOME_ENDS, 1.0))
            pieces = [d async for d in llm.generate(prompts()[0], params(n=2))]
            assert [d.choice for d in pieces if d.finish_reason] == [0, 1]
            assert all(d.latencies for d in pieces if d.finish_reason)
            endless = params(max_tokens=80, ignore_eos=True, n=2)
            begun = llm.generate(prompts()[0], endless, request_id="one")
            assert not (await anext(begun)).finish_reason
            await llm.abort("one")
            ends = [d async for d in begun]
            assert [(d.choice, d.finish_reason) for d in ends] == [(0, "abort"), (1, "abort")]
            left = llm.generate(prompts()[0], endless)
            await anext(left)
            await left.aclose()  # type: ignore[attr-defined]
            assert not (await llm.usage()).num_sequences
            assert not await llm.inspect(lambda inner, _: inner._listeners)

    asyncio.run(run())


def test_a_search_that_is_left_ends() -> None:
    with small() as llm:
        steps, left = llm.step, iter(range(5))

        def step() -> bool:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return steps()

        llm.step = step  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search(prompts(), params())
        del llm.step
        assert_all_is_given_back(llm)
        assert_found(llm.beam_search(prompts(), params()), wanted("llama", SOME_ENDS, 1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 must be a whole number of at least 1"),
        ({"beam_width": True}, "beam_width=True must be"),
        ({"max_tokens": 1.5}, r"max_tokens=1\.5 must be a whole number"),
        ({"temperature": 0.5}, r"temperature=0\.5 must be 0"),
        ({"length_penalty": math.nan}, "length_penalty=nan must be a number"),
        ({"length_penalty": "1"}, "length_penalty='1' must be a number"),
        ({"early_stopping": "soon"}, "early_stopping='soon' must be True, False or 'never'"),
        ({"n": 5}, "n=5 must be from 1 to beam_width=4"),
        ({"n": 0}, "n=0 must be from 1"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        params(**options)
