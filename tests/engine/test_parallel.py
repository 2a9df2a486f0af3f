"""Several continuations of a prompt: computed once, held once, and each as if it were alone."""

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from conformance.covering import only
from quire import LLM, SamplingParams
from quire.engine.outputs import TextDelta
from quire.kv import STRATEGIES
from quire.models.loader import LoadedModel, load
from tiny import tiny_model, tokens

N = 4
SEED = 20
PARAMS = SamplingParams(n=N, max_tokens=12, temperature=0.8, seed=SEED, ignore_eos=True)
# How blocks or copies are held, with and without what is kept of earlier prompts.
CASES = [(strategy, {}) for strategy in STRATEGIES] + [
    (strategy, {"enable_prefix_caching": False}) for strategy in ("paged", "virtual")
]


@cache
def model_of(name: str) -> PreTrainedModel:
    return tiny_model(name)


@cache
def demo() -> LoadedModel:
    return load()


def prompts() -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in (21, 1, 40)]


def small(name: str = "llama", **options: Any) -> LLM:
    defaults = dict(max_model_len=96, kv_cache_memory_bytes="64MB", max_num_seqs=16)
    return LLM(model_of(name), **{**defaults, **options})


def one(index: int, **changed: Any) -> SamplingParams:
    """What continuation ``index`` is, asked for alone."""
    alone = dict(max_tokens=12, temperature=0.8, seed=SEED + index, ignore_eos=True)
    return SamplingParams(**{**alone, **changed})


@cache
def wanted(name: str) -> list[list[tuple[int, ...]]]:
    with small(name) as llm:
        return [
            [llm.generate(prompt, one(index))[0].token_ids for index in range(N)]
            for prompt in prompts()
        ]


def choices(llm: LLM, params: SamplingParams = PARAMS) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in done.choices] for done in llm.generate(prompts(), params)]


def assert_all_is_given_back(llm: LLM) -> None:
    usage = llm.usage()
    assert usage.used_bytes == usage.num_sequences == 0
    llm.engine.scheduler.check()
    assert llm.reset_prefix_cache()
    assert llm.memory.committed_bytes == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [*(("llama", *case) for case in CASES), ("gemma3", "paged", {}), ("gemma3", "virtual", {})],
)
def test_each_choice_is_what_its_seed_gives_alone(
    name: str, strategy: str, options: dict[str, Any]
) -> None:
    """A prompt of one token, one of more than a block, and one that comes in parts."""
    with small(name, cache=strategy, max_num_batched_tokens=32, **options) as llm:
        assert choices(llm) == wanted(name)
        assert len({*wanted(name)[0]}) == N
        assert_all_is_given_back(llm)


@pytest.mark.parametrize("strategy", ["paged", "contiguous"])
def test_greedy_choices_are_one_text(strategy: str) -> None:
    params = SamplingParams(n=3, max_tokens=8, temperature=0, ignore_eos=True)
    with small(cache=strategy) as llm:
        for first, *others in choices(llm, params):
            assert others == [first, first]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "options"), CASES)
def test_a_prompt_is_held_once_where_blocks_are(strategy: str, options: dict[str, Any]) -> None:
    """Right after the prompt, and at most one block each more when all have written a token."""
    prompt, block = tokens(1, 60)[0].tolist(), 16
    used: list[int] = []
    with small(cache=strategy, **options) as llm:
        llm.generate(prompt, PARAMS, observe=lambda usage: used.append(usage.used_bytes))
        token_bytes = llm.spec.bytes_per_token
        shares = strategy == "paged" or (strategy == "virtual" and not options)
        if shares:
            assert used[0] == 60 * token_bytes
            assert used[1] <= (60 + N * block) * token_bytes
        else:
            assert used[:2] == [N * 60 * token_bytes, N * 61 * token_bytes]
        assert_all_is_given_back(llm)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "max_num_seqs"),
    [("contiguous", 2), ("growing", 2), ("paged", 1), ("paged", 3), ("virtual", 2)],
)
def test_more_choices_than_may_run_at_once_take_turns(strategy: str, max_num_seqs: int) -> None:
    with small(cache=strategy, max_num_seqs=max_num_seqs) as llm:
        assert choices(llm) == wanted("llama")
        assert_all_is_given_back(llm)


@pytest.mark.parametrize(
    "each",
    only(
        [*(("llama", strategy) for strategy in STRATEGIES), ("gemma3", "paged")],
        ("llama", "growing"),
        ("gemma3", "paged"),
    ),
)
def test_too_little_memory_for_all_changes_no_choice(each: tuple[str, str]) -> None:
    name, strategy = each
    options: dict[str, Any] = dict(cache=strategy, growth_tokens=16, block_size=4)
    with small(name, **options) as llm:
        choices(llm)
        peak = llm.memory.peak_committed_bytes
    with small(name, **options, kv_cache_memory_bytes=peak // 2) as llm:
        assert choices(llm) == wanted(name)
        assert llm.memory.peak_committed_bytes <= peak // 2
        if strategy == "paged":
            assert llm.engine.scheduler.num_preemptions > 0
        assert_all_is_given_back(llm)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("ended", [0, 1, 3])
def test_who_is_aborted_leaves_the_others_as_they_are(ended: int, after: int) -> None:
    """Before the prompt is computed, too: then another one computes it for all."""
    deltas: list[TextDelta] = []
    with small() as llm:
        sequences = llm.start(llm.request(prompts()[0], PARAMS), deltas.append)
        for _ in range(after):
            llm.step()
        llm.abandon([sequences[ended]])
        while llm.step():
            pass
        for index in range(N):
            own = tuple(delta.token_id for delta in deltas if delta.choice == index)
            want = wanted("llama")[0][index]
            assert own == (want[:after] if index == ended else want)
        assert sequences[ended].finish_reason == "abort"
        assert_all_is_given_back(llm)


def test_each_choice_ends_for_itself() -> None:
    """A token that only one of them says ends that one; pieces say whose they are."""
    want = wanted("llama")[0]
    at, token = next(
        (at, token)
        for at, token in enumerate(want[2])
        if at > 2 and token not in want[2][:at] and not any(token in want[i] for i in (0, 1, 3))
    )
    params = SamplingParams(
        n=N, max_tokens=12, temperature=0.8, seed=SEED, ignore_eos=True, stop_token_ids=(token,)
    )
    with small() as llm:
        deltas = list(llm.stream(prompts()[0], params))
        (completion,) = llm.generate(prompts()[0], params)
    assert [c.finish_reason for c in completion.choices] == ["length", "length", "stop", "length"]
    for index, choice in enumerate(completion.choices):
        assert choice.token_ids == (want[index][: at + 1] if index == 2 else want[index])
        own = [delta for delta in deltas if delta.choice == index]
        assert tuple(delta.token_id for delta in own) == choice.token_ids
        assert [d.finish_reason for d in own] == [None] * (len(own) - 1) + [choice.finish_reason]
    assert {delta.index for delta in deltas} == {0}


def test_texts_are_told_apart() -> None:
    params = SamplingParams(n=3, max_tokens=16, temperature=1.0, seed=2)
    with LLM(demo(), max_num_seqs=8) as llm:
        (completion,) = llm.generate("class Stack:\n", params)
        for choice in completion.choices:
            decoded = llm.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
            assert choice.text == decoded
        assert completion.text == completion.choices[0].text
        assert len({choice.text for choice in completion.choices}) == 3


def test_what_was_found_computed_is_told_of_every_choice() -> None:
    prompt = tokens(1, 40)[0].tolist()
    with small() as llm:
        llm.generate(prompt, one(0))
        deltas = list(llm.stream(prompt, PARAMS))
    assert {delta.num_cached_tokens for delta in deltas} == {39}
