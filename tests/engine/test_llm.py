"""LLM: what users call. Its texts are the model's own, whatever the memory does meanwhile."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from threading import Event, Thread
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import quire
from conformance.covering import in_turn, only
from quire import LLM, SamplingParams
from quire.engine.outputs import CompletionOutput, TextDelta
from quire.errors import ConfigError, MemoryUnavailable, RequestError, RequestTooLong
from quire.kv import STRATEGIES
from quire.memory import CountedMemory, FailingMemory, HostMemory
from quire.models.loader import LoadedModel, load
from tiny import CONFIGS, tiny_model, tokens

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
PROMPT_LENGTHS = (5, 17, 33, 11)


@cache
def model_of(name: str) -> PreTrainedModel:
    return tiny_model(name)


@cache
def demo() -> LoadedModel:
    return load()


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in lengths]


@cache
def generated_by_transformers(name: str, max_new_tokens: int = 20) -> list[tuple[int, ...]]:
    return [
        tuple(
            model_of(name)
            .generate(
                torch.tensor([prompt]),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :]
            .tolist()
        )
        for prompt in prompts()
    ]


def small(name: str = "llama", **options: Any) -> LLM:
    defaults = dict(max_model_len=128, kv_cache_memory_bytes="64MB", max_num_seqs=8)
    return LLM(model_of(name), **{**defaults, **options})


def ids(completions: list[CompletionOutput]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


# -- what comes out -------------------------------------------------------------------------------


def assert_all_is_given_back(llm: LLM) -> None:
    """Nothing is held; what is kept for prompts to come can be had back too."""
    usage = llm.usage()
    assert usage.used_bytes == usage.num_sequences == 0
    assert usage.committed_bytes == llm.memory.committed_bytes
    assert (usage.committed_bytes > 0) == (usage.cached_bytes > 0)
    assert llm.reset_prefix_cache()
    assert llm.memory.committed_bytes == llm.usage().committed_bytes == 0


@pytest.mark.parametrize(("name", "strategy"), in_turn(CONFIGS, [*STRATEGIES]))
def test_greedy_is_what_generate_gives(name: str, strategy: str) -> None:
    """Token for token, with prompts cut into chunks; and every page is given back."""
    with small(name, cache=strategy, max_num_batched_tokens=16) as llm:
        completions = llm.generate(prompts(), GREEDY)
        assert ids(completions) == generated_by_transformers(name)
        assert [list(c.prompt_token_ids) for c in completions] == prompts()
        assert {(c.finish_reason, c.detail) for c in completions} == {("length", "")}
        assert llm.memory.peak_committed_bytes > 0
        assert_all_is_given_back(llm)


@pytest.mark.parametrize("name", only(CONFIGS, "gemma3", "gpt_oss"))
def test_a_model_in_bfloat16_runs(name: str) -> None:
    model = tiny_model(name).bfloat16()
    with LLM(model, max_model_len=64, kv_cache_memory_bytes="16MB", max_num_seqs=4) as llm:
        assert llm.spec.groups[0].spec.dtype == "bfloat16"
        assert [len(i) for i in ids(llm.generate(prompts(), GREEDY))] == [20] * 4


# 4 layers of 2 heads of 16, keys and values.
PER_TOKEN = {
    "auto": 4 * 2 * 2 * 16 * 4,
    "bfloat16": 4 * 2 * 2 * 16 * 2,
    "fp8": 4 * 2 * 2 * 16,
    "fp8_e4m3": 4 * 2 * 2 * 16,
    "int8_per_token_head": 4 * 2 * 2 * (16 + 4),
}


@pytest.mark.parametrize(("kept_as", "strategy"), in_turn(PER_TOKEN, [*STRATEGIES]))
def test_keys_and_values_are_kept_in_the_dtype_asked_for(kept_as: str, strategy: str) -> None:
    per_token = PER_TOKEN[kept_as]
    used: list[int] = []
    with small(cache=strategy, kv_cache_dtype=kept_as) as llm:
        assert llm.spec.bytes_per_token == per_token
        (completion,) = llm.generate(
            [prompts()[0]], GREEDY, observe=lambda usage: used.append(usage.used_bytes)
        )
        # The last token is never computed, and with the one before it everything is given back.
        assert max(used) == per_token * (len(prompts()[0]) + len(completion.token_ids) - 2)
        assert len(completion.token_ids) == 20
        assert_all_is_given_back(llm)


@pytest.mark.parametrize("kept_as", ["fp8", "int8_per_token_head"])
@pytest.mark.parametrize("name", only(CONFIGS, "deepseek_v3", "gemma3"))
def test_every_model_runs_on_eight_bits(name: str, kept_as: str) -> None:
    with small(name, kv_cache_dtype=kept_as, max_num_batched_tokens=16) as llm:
        assert [len(i) for i in ids(llm.generate(prompts(), GREEDY))] == [20] * 4


@pytest.mark.parametrize("budget", [1, 3, 1000])
def test_chunks_of_any_length_give_the_same(budget: int) -> None:
    with small("gemma3", max_num_batched_tokens=budget) as llm:
        assert ids(llm.generate(prompts(), GREEDY)) == generated_by_transformers("gemma3")


@pytest.mark.parametrize("strategy", only(STRATEGIES, "growing", "paged"))
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(strategy: str) -> None:
    params = SamplingParams(max_tokens=15, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    with small(cache=strategy, max_num_batched_tokens=16) as llm:
        together = ids(llm.generate(prompts(), params))
        alone = [ids(llm.generate(prompt, params))[0] for prompt in prompts()]
        again = ids(llm.generate(prompts()[::-1], params))[::-1]
    assert together == alone == again
    assert together != ids(small().generate(prompts(), SamplingParams(max_tokens=15, seed=12)))


def test_prompts_are_text_or_ids_one_or_several() -> None:
    with LLM(demo(), max_num_seqs=4) as llm:
        params = SamplingParams(max_tokens=4, temperature=0)
        texts = ["def a():", "import os"]
        as_ids = [llm.tokenizer(text)["input_ids"] for text in texts]
        several = llm.generate(texts, params)
        assert llm.generate(as_ids, params) == several
        assert llm.generate((text for text in texts), params) == several
        assert llm.generate(tuple(map(tuple, as_ids)), params) == several
        assert llm.generate([texts[0], as_ids[1]], params) == several
        assert llm.generate([torch.tensor(as_ids[0]).numpy().tolist()], params) == several[:1]
        assert llm.generate(list(torch.tensor(as_ids[0]).numpy()), params) == several[:1]
        assert llm.generate(texts[0], params) == llm.generate(as_ids[0], params) == several[:1]
        assert llm.generate([], params) == []
        assert len(llm.generate("x")[0].token_ids) <= SamplingParams().max_tokens


# -- streams --------------------------------------------------------------------------------------


def test_the_pieces_of_a_stream_add_up() -> None:
    texts = ["class Stack:\n", "for é in '色👍':", "def fibonacci(n):\n"]
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1)
    # What is found computed rounds otherwise in bfloat16, and so may draw otherwise.
    options: dict[str, Any] = dict(max_num_batched_tokens=16, enable_prefix_caching=False)
    with LLM(demo(), **options) as llm:
        whole = llm.generate(texts, params)
        deltas = list(llm.stream(texts, params))
    for index, completion in enumerate(whole):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == completion.text
        assert tuple(delta.token_id for delta in own) == completion.token_ids
        assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == completion.finish_reason
        assert completion.text == llm.tokenizer.decode(
            completion.token_ids, skip_special_tokens=True
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_leaving_a_stream_early_frees_its_memory(strategy: str) -> None:
    with small(cache=strategy) as llm:
        stream = llm.stream(prompts(), GREEDY)
        for _ in range(6):
            next(stream)
        assert llm.usage().committed_bytes > 0
        stream.close()
        assert_all_is_given_back(llm)
        assert not llm.engine.scheduler.has_unfinished
        assert ids(llm.generate(prompts(), GREEDY)) == generated_by_transformers("llama")


def test_a_stream_that_is_not_read_runs_nothing() -> None:
    with small() as llm:
        stream = llm.stream(prompts(), GREEDY)
        assert not llm.engine.scheduler.has_unfinished
        del stream
        llm.generate(prompts(), GREEDY)
        assert llm.usage().num_sequences == 0


def test_streams_can_be_read_in_turns() -> None:
    """A step serves all streams; no piece goes to another stream, or nowhere."""
    with small() as llm:
        first, second = (llm.stream(prompt, GREEDY) for prompt in prompts()[:2])
        pairs = list(zip(first, second, strict=True))
        inside = [next(llm.stream(prompts()[2], GREEDY)).token_id for _ in range(2)]
        third = llm.stream(prompts()[2], GREEDY)
        head = next(third)
        fourth = ids(llm.generate(prompts()[3], GREEDY))[0]  # while the third is half-way
        tail = list(third)
    want = generated_by_transformers("llama")
    assert [tuple(delta.token_id for delta in side) for side in zip(*pairs, strict=True)] == want[
        :2
    ]
    assert inside == [want[2][0]] * 2
    assert tuple(delta.token_id for delta in [head, *tail]) == want[2]
    assert fourth == want[3]


def test_observe_sees_the_usage_after_each_step() -> None:
    seen = []
    with small() as llm:
        llm.generate(prompts()[0], GREEDY, observe=seen.append)
    assert len(seen) == 20
    assert [usage.num_tokens for usage in seen[:3]] == [5, 6, 7]
    assert seen[-1].used_bytes == 0


# -- how it ends ----------------------------------------------------------------------------------


def test_eos_ends_unless_it_is_ignored() -> None:
    """The third greedy token is declared the end of text."""
    want = generated_by_transformers("llama")[0]
    at = next(i for i in range(2, 20) if want[i] not in want[:i])
    model = model_of("llama")
    usual = model.generation_config.eos_token_id
    try:
        for eos in (want[at], [want[at], 0]):
            model.generation_config.eos_token_id = eos
            with small() as llm:
                (ended,) = llm.generate(prompts()[0], SamplingParams(max_tokens=20, temperature=0))
                assert (ended.token_ids, ended.finish_reason) == (want[: at + 1], "stop")
                assert ids(llm.generate(prompts()[0], GREEDY)) == [want]
    finally:
        model.generation_config.eos_token_id = usual


def test_a_conversation_is_answered_as_its_prompt_is_continued() -> None:
    """The template writes the prompt; the answer ends where the model's answers end."""
    with LLM(demo()) as llm:
        asked = [{"role": "user", "content": "Write a class."}]
        params = SamplingParams(max_tokens=60, temperature=0)
        [answer] = llm.chat(asked, params)
        text = llm.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        stop = tuple(llm.tokenizer.init_kwargs["chat_stop_strings"])
        [own] = llm.generate(text, replace(params, stop=stop))
        assert answer.prompt_token_ids == own.prompt_token_ids
        assert answer.choices[0].text == own.choices[0].text
        [begun] = llm.chat(
            [*asked, {"role": "assistant", "content": "class Q"}],
            params,
            add_generation_prompt=False,
            continue_final_message=True,
        )
        assert len(begun.prompt_token_ids) > len(answer.prompt_token_ids)
        [other] = llm.chat(asked, params, chat_template="{{ messages[0].content }} x")
        assert len(other.prompt_token_ids) > len(answer.prompt_token_ids)
        for wrong in ("Hello", {"role": "user"}, [], 3, [{"content": "x"}]):
            with pytest.raises(RequestError):
                llm.chat(wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="2 params for 1 prompts"):
            llm.chat(asked, [params, params])


def test_max_tokens_is_the_length_of_the_continuation() -> None:
    with small() as llm:
        for max_tokens in (1, 2, 7):
            params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
            (ended,) = llm.generate(prompts()[0], params)
            want = generated_by_transformers("llama")[0][:max_tokens]
            assert (ended.token_ids, ended.finish_reason) == (want, "length")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_end_of_the_context_ends_the_text(strategy: str) -> None:
    with small(cache=strategy, max_model_len=40) as llm:
        params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        ended = llm.generate([*prompts()[:3], tokens(1, 39)[0].tolist()], params)
        assert [c.finish_reason for c in ended] == ["length"] * 4
        assert [len(c.token_ids) for c in ended] == [35, 23, 7, 1]
        assert ended[2].token_ids == generated_by_transformers("llama")[2][:7]


def test_a_stop_string_ends_the_text_and_is_not_in_it() -> None:
    prompt = 'def read_config(path):\n    """Read a file."""\n'
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(demo(), max_num_seqs=4) as llm:
        (free,) = llm.generate(prompt, params)
        assert len(free.text) > 40
        for begin, length in ((3, 2), (10, 9), (17, 1), (len(free.text) - 6, 6)):
            stop = free.text[begin : begin + length]
            stopped = SamplingParams(
                max_tokens=40, temperature=0, ignore_eos=True, stop=(stop, "☃")
            )
            deltas = list(llm.stream(prompt, stopped))
            text = "".join(delta.text for delta in deltas)
            assert text == free.text[: free.text.find(stop)]
            assert deltas[-1].finish_reason == "stop"
            (completion,) = llm.generate(prompt, stopped)
            assert (completion.text, completion.finish_reason) == (text, "stop")
            assert deltas[-1].stopped_by == completion.choices[0].stopped_by == stop
            assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
            assert not llm.engine.scheduler.has_unfinished
            assert_all_is_given_back(llm)


def test_a_stop_token_is_named_and_the_end_of_sequence_is_not() -> None:
    with LLM(demo(), max_num_seqs=4) as llm:
        greedy: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        (free,) = llm.generate("import", SamplingParams(**greedy))
        token = free.token_ids[7]
        (named,) = llm.generate("import", SamplingParams(**greedy, stop_token_ids=(token,)))
        assert named.finish_reason == "stop"
        assert named.choices[0].stopped_by == token == named.token_ids[-1]
        (eos,) = llm.engine.scheduler.limits.eos_token_ids
        ends = SamplingParams(max_tokens=3, temperature=0, logit_bias={eos: 100})
        (ended,) = llm.generate("import", ends)
        assert (ended.finish_reason, ended.choices[0].stopped_by) == ("stop", None)


# -- prompts that begin alike ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "strategy"),
    in_turn(CONFIGS, ["paged", "virtual"], kept=["gemma3", "deepseek_v3"]),
)
def test_a_prefix_is_computed_once_and_changes_no_token(name: str, strategy: str) -> None:
    """What is found computed gives the tokens that computing it would have given."""
    first, second = prompts((45, 30))
    several = [first, [*first[:37], *second[:9]], first]
    with small(name, enable_prefix_caching=False) as llm:
        want = ids(llm.generate(several, GREEDY))
        assert llm.usage().committed_bytes == 0
    with small(name, cache=strategy, max_num_batched_tokens=16) as llm:
        assert ids(llm.generate(several[:1], GREEDY)) == want[:1]
        completions = llm.generate(several[1:], GREEDY)
        assert ids(completions) == want[1:]
        # All but the last token at most, and not only whole blocks.
        assert [c.num_cached_tokens for c in completions] == [37, 44]
        assert_all_is_given_back(llm)
        (completion,) = llm.generate(first, GREEDY)
        assert (completion.num_cached_tokens, ids([completion])) == (0, want[:1])


@pytest.mark.parametrize("backend", only(["sdpa", "reference", "cpu"], "cpu"))
@pytest.mark.parametrize("name", only(["llama", "gemma3"], "gemma3"))
def test_what_is_seen_through_windows_is_what_lies_in_blocks(name: str, backend: str) -> None:
    """In every format; in the model's own these are the tokens of ``generate``."""
    for kept_as in ("auto", "fp8", "int8_per_token_head"):
        options = dict(kv_cache_dtype=kept_as, attention_backend=backend, max_num_batched_tokens=16)
        several = []
        for strategy in ("paged", "virtual"):
            with small(name, cache=strategy, **options) as llm:
                several.append([ids(llm.generate(prompts(), GREEDY)) for _ in range(2)])
                assert_all_is_given_back(llm)
        in_blocks, through_windows = several
        assert in_blocks == through_windows
        if kept_as == "auto":
            assert in_blocks == [generated_by_transformers(name)] * 2


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_private_ranges_give_the_same(name: str) -> None:
    options = dict(cache="virtual", enable_prefix_caching=False, max_num_batched_tokens=16)
    with small(name, **options) as llm:
        assert ids(llm.generate(prompts(), GREEDY)) == generated_by_transformers(name)
        assert_all_is_given_back(llm)


# -- when memory is short -------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "name"), in_turn([*STRATEGIES], ["llama", "gemma3", "deepseek_v3"])
)
def test_too_little_memory_for_all_changes_no_token(name: str, strategy: str) -> None:
    """With half of what they took together, sequences wait or recompute; all of them finish."""
    options: dict[str, Any] = dict(cache=strategy, growth_tokens=16, max_num_batched_tokens=24)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    several = prompts((50, 40, 60, 55))
    with small(name, **options) as llm:
        want = ids(llm.generate(several, params))
        peak = llm.memory.peak_committed_bytes
    options["kv_cache_memory_bytes"] = ceiling = peak // 2
    with small(name, **options) as llm:
        completions = llm.generate(several, params)
        scheduler = llm.engine.scheduler
        assert ids(completions) == want
        assert {c.finish_reason for c in completions} == {"length"}
        assert llm.memory.peak_committed_bytes <= ceiling
        assert_all_is_given_back(llm)
        scheduler.check()
        if strategy == "contiguous":  # what is reserved whole need not make room: it waits
            assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("growth", only(["uniform", "doubling", "staggered"], "staggered"))
def test_growing_alone_near_the_ceiling_finishes(growth: str) -> None:
    """No room for old and new buffers together: it begins anew in one piece, more than once."""
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    options: dict[str, Any] = dict(cache="growing", growth=growth, growth_tokens=8)
    with small(**options) as llm:
        (want,) = llm.generate(prompts()[0], params)
    page_tokens, token_bytes = 64, llm.spec.bytes_per_token
    options["kv_cache_memory_bytes"] = 2 * page_tokens * token_bytes
    with small(**options, max_num_batched_tokens=7) as llm:
        assert llm.generate(prompts()[0], params) == [want]
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("strategy", only(STRATEGIES, "contiguous", "growing"))
def test_who_outgrows_the_cache_ends_alone_with_its_text_so_far(strategy: str) -> None:
    options: dict[str, Any] = dict(
        cache=strategy, max_model_len=512, growth_tokens=16, reserve="request"
    )
    long, short = (SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (150, 9))
    with small(**options) as llm:
        want, *wanted_short = llm.generate(prompts(), [long, short, short, short])
        num_tokens = 128
        ceiling = num_tokens * llm.spec.bytes_per_token
    with small(**options, kv_cache_memory_bytes=ceiling) as llm:
        if strategy == "contiguous":  # its range would be too long: it says so before it begins
            with pytest.raises(RequestTooLong, match=r"never run.*or lower max_tokens"):
                llm.generate(prompts(), [long, short, short, short])
            assert ids(llm.generate(prompts()[1:], short)) == ids(wanted_short)
            return
        streams = {0: llm.stream(prompts()[0], long), 1: llm.stream(prompts()[1:], short)}
        got: dict[int, list[TextDelta]] = {0: [], 1: []}
        while streams:
            for key, stream in list(streams.items()):
                delta = next(stream, None)
                if delta is None:
                    del streams[key]
                else:
                    got[key].append(delta)
        end = got[0][-1]
        assert (end.finish_reason, end.token_id) == ("capacity", None)
        for part in ("tokens", "KiB", "raise kv_cache_memory_bytes"):
            assert part in end.detail
        written = tuple(d.token_id for d in got[0] if d.token_id is not None)
        assert written == want.token_ids[: len(written)]
        assert len(prompts()[0]) + len(written) == num_tokens + 1
        for index, completion in enumerate(wanted_short):
            own = tuple(d.token_id for d in got[1] if d.index == index)
            assert own == completion.token_ids
        assert_all_is_given_back(llm)
        (completion,) = llm.generate(prompts()[0], long)
        assert (completion.token_ids, completion.detail) == (written, end.detail)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("strategy", "at"), in_turn([*STRATEGIES], [1, 3]))
def test_pages_that_the_system_refuses_disturb_no_request(strategy: str, at: int) -> None:
    """Accounting counts on pages that do not exist: the cache begins anew, and all in it."""
    options: dict[str, Any] = dict(cache=strategy, max_model_len=64, growth_tokens=8)
    counter = FailingMemory(HostMemory(), failing=())
    with small(**options, provider=counter) as llm:
        first = counter.num_commits + at
        want = llm.generate(prompts(), GREEDY)
    memory = FailingMemory(CountedMemory(HostMemory()), failing={first, first + 2})
    with small(**options, provider=memory) as llm:
        assert llm.generate(prompts(), GREEDY) == [replace(w, num_cached_tokens=0) for w in want]
        assert memory.num_commits > first + 2
        assert_all_is_given_back(llm)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_system_without_pages_ends_who_is_alone_and_says_so(strategy: str) -> None:
    options: dict[str, Any] = dict(cache=strategy, max_model_len=64, growth_tokens=8)
    counter = FailingMemory(HostMemory(), failing=())
    small(**options, provider=counter).close()
    inner = CountedMemory(HostMemory())
    with pytest.raises(MemoryUnavailable):  # in the trial
        small(**options, provider=FailingMemory(inner, failing=range(1, 10**9)))
    assert inner.committed_bytes == inner.reserved_bytes == 0
    memory = FailingMemory(inner, failing=range(counter.num_commits + 1, 10**9))
    with small(**options, provider=memory) as llm:
        for completion in llm.generate(prompts(), GREEDY):
            assert completion.finish_reason == "capacity"
            assert "as it was told to" in completion.detail
        assert not llm.engine.scheduler.has_unfinished
    assert inner.committed_bytes == inner.reserved_bytes == 0


# -- opening and closing --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_close_gives_everything_back_and_ends_what_runs(strategy: str) -> None:
    memory = CountedMemory(HostMemory())
    with small(cache=strategy, provider=memory) as llm:
        stream = llm.stream(prompts(), GREEDY)
        next(stream)
        assert memory.committed_bytes > 0
    assert memory.committed_bytes == memory.reserved_bytes == 0
    rest = list(stream)  # what the last step had brought already, and the ends
    assert [d.index for d in rest[-4:]] == [0, 1, 2, 3]
    assert {(d.finish_reason, d.detail) for d in rest[-4:]} == {("abort", "the LLM was closed")}
    assert len(rest) < 8
    llm.close()
    for use in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match="closed"):
            use(prompts()[0])


@pytest.mark.parametrize("beside", [True, False], ids=["alike", "usual"])
def test_engines_over_one_model_compute_in_turn(beside: bool) -> None:
    """Each exchanges parts of the model for its passes, and none computes with the other's."""
    own, errors = tiny_model("llama"), list[BaseException]()
    asked = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    stop = Event()

    def keep_asking(llm: LLM) -> None:
        try:
            while not stop.is_set():
                assert ids(llm.generate(prompts(), asked)) == want
                # Engines are made while others compute, too.
                with LLM(own, kv_cache_memory_bytes="2MiB", max_model_len=64):
                    pass
        except BaseException as error:
            errors.append(error)

    first, second = (
        LLM(own, batch_invariant=invariant, kv_cache_memory_bytes="8MiB", enforce_eager=True)
        for invariant in (True, beside)
    )
    with first, second:
        want = ids(second.generate(prompts(), asked))
        alone = ids(first.generate(prompts(), asked))
        other = Thread(target=keep_asking, args=(second,))
        other.start()
        for _ in range(8):
            assert ids(first.generate(prompts(), asked)) == alone
        stop.set()
        other.join()
    assert not errors


def test_whatever_cannot_be_closed_the_cache_is() -> None:
    def fail() -> None:
        raise RuntimeError("a graph cannot be freed")

    memory = CountedMemory(HostMemory())
    llm = small(provider=memory)
    next(llm.stream(prompts(), GREEDY))
    llm.engine._runner.close = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cannot be freed"):
        llm.close()
    assert memory.committed_bytes == memory.reserved_bytes == 0
    llm.close()


def test_one_part_that_cannot_be_closed_keeps_no_other_open() -> None:
    def fail() -> None:
        raise OSError("the file is gone")

    llm, closed = small(swap_space="1MiB"), list[str]()
    assert llm.engine._swap is not None
    plain = llm.engine._runner.close

    def close() -> None:
        closed.append("runner")
        plain()

    llm.engine._swap.close = fail  # type: ignore[method-assign]
    llm.engine._runner.close = close  # type: ignore[method-assign]
    with pytest.raises(OSError, match="is gone"):
        llm.close()
    assert closed == ["runner"]
    assert llm.memory.committed_bytes == 0


def test_no_thread_gives_memory_back_while_another_steps() -> None:
    """Its books are for one thread at a time."""
    llm = small()
    lock, resident, free = llm._elastic.lock, llm._resident, list[bool]()
    plain = resident.close

    def close() -> None:
        other = Thread(target=lambda: free.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        plain()

    resident.close = close  # type: ignore[method-assign]
    llm.close()
    assert free == [False]


def test_a_stream_begun_after_close_says_so() -> None:
    with small() as llm:
        stream = llm.stream(prompts()[0], GREEDY)
    with pytest.raises(RequestError, match="this LLM is closed"):
        next(stream)


def test_the_model_stays_its_owners() -> None:
    """Between two steps its own generate works, and several engines can share it."""
    model = model_of("gemma3")
    own = model.config._attn_implementation
    want = generated_by_transformers("gemma3")
    with small("gemma3") as one, small("gemma3", cache="virtual") as two:
        stream = one.stream(prompts()[0], GREEDY)
        next(stream)
        assert model.config._attn_implementation == own
        prompt = torch.tensor(prompts()[:1])
        generated = model.generate(
            prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tuple(generated[0, prompt.shape[1] :].tolist()) == want[0]
        assert ids(two.generate(prompts(), GREEDY)) == want
        assert tuple(d.token_id for d in stream) == want[0][1:]
    assert model.config._attn_implementation == own


def test_quire_offers_it_by_name() -> None:
    assert quire.LLM is LLM


# -- what is refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked() -> Iterator[LLM]:
    with LLM(demo(), max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        (None, "NoneType"),
        (5, "int"),
        (1.5, "float"),
        (b"bytes", "bytes"),
        ({"text": "x"}, r"a prompt is text or .* has \['text'\]"),
        ([None], "NoneType"),
        ([b"bytes"], "bytes"),
        ([[[1, 2]]], r"\[1, 2\] is not in the vocabulary"),
        ([["a"]], "'a' is not in the vocabulary"),
        ([1, "a"], "'a' is not in the vocabulary"),
        ([1, 2.0], "2.0 is not in the vocabulary"),
        ([[True]], "True is not in the vocabulary"),
        ([-1], "-1 is not in the vocabulary.*0 to 4,095"),
        ([4096], "4096 is not in the vocabulary.*0 to 4,095"),
        ([2**70], "is not in the vocabulary"),
        ("", "empty"),
        ([""], "empty"),
        ([[]], "empty"),
        (["fine", ""], "empty"),
        ("\ud800", "not valid text"),
    ],
)
def test_a_prompt_that_is_none_is_refused(asked: LLM, prompt: Any, part: str) -> None:
    for use in (asked.generate, asked.stream):
        with pytest.raises(RequestError, match=part):
            use(prompt)
    assert not asked.engine.scheduler.has_unfinished


def test_a_prompt_longer_than_the_context_is_refused_and_none_started() -> None:
    with small(max_model_len=32) as llm:
        with pytest.raises(RequestTooLong, match=r"33 tokens .* 32.*max_model_len"):
            llm.generate([[5, 6], tokens(1, 33)[0].tolist()])
        assert not llm.engine.scheduler.has_unfinished
        assert llm.usage().num_sequences == 0


def test_without_a_tokenizer_only_ids_can_be_given() -> None:
    with small() as llm:
        with pytest.raises(RequestError, match="no tokenizer: give the prompt as token ids"):
            llm.generate("text")
        with pytest.raises(RequestError, match=r"no tokenizer.*stop"):
            llm.generate([5, 6], SamplingParams(stop=("x",)))
        assert llm.generate([5, 6], GREEDY)[0].text == ""


@pytest.mark.parametrize("params", [5, {"max_tokens": 3}, [GREEDY, None], "greedy"])
def test_parameters_of_another_type_are_refused(params: Any) -> None:
    with small() as llm, pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([[5, 6], [7]], params)


def test_each_prompt_can_have_parameters_of_its_own() -> None:
    several = [replace(GREEDY, max_tokens=n) for n in (3, 20, 1, 7)]
    with small() as llm:
        want = generated_by_transformers("llama")
        got = ids(llm.generate(prompts(), several))
        assert got == [own[: p.max_tokens] for own, p in zip(want, several, strict=True)]
        for wrong in (several[:3], [], [*several, GREEDY]):
            with pytest.raises(RequestError, match=f"{len(wrong)} params for 4 prompts"):
                llm.generate(prompts(), wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cach": "paged"}, "unknown option 'cach'; did you mean 'cache'"),
        ({"max_seqs": 2}, "unknown option 'max_seqs'; did you mean 'max_num_seqs'"),
        ({"zzz": 2}, "unknown option 'zzz'; known: attention_backend, batch_invariant, block_size"),
        ({"cache": "sparse"}, "cache='sparse' is no cache strategy; known: contiguous, growing"),
        ({"cache": None}, "cache=None is no cache strategy"),
        ({"cache": ["paged"]}, "is no cache strategy"),
        ({"growth": "fast"}, "growth 'fast' is unknown; known: uniform"),
        ({"reserve": 1}, "reserve 1 is unknown"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown; known: auto, float32"),
        ({"dtype": 3}, "dtype 3 is unknown"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype 'fp8_e5m2' is unknown; known: auto, flo"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype 'int8' is unknown; .* int8_per_token_head"),
        ({"dtype": "float16"}, "dtype=float16 is not the model's, float32"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0 must be from 1"),
        ({"kv_cache_memory_bytes": -4096}, "kv_cache_memory_bytes=-4,096 must be"),
        ({"kv_cache_memory_bytes": "0"}, "kv_cache_memory_bytes=0 must be from 1"),
        ({"kv_cache_memory_bytes": "-1GB"}, "'-1GB' is not a size"),
        ({"kv_cache_memory_bytes": "much"}, "'much' is not a size"),
        ({"kv_cache_memory_bytes": 1.5}, "kv_cache_memory_bytes=1.5 must be a whole number"),
        ({"kv_cache_memory_bytes": True}, "must be a whole number"),
        ({"kv_cache_memory_bytes": "900TB"}, "more than the machine has available, .*: lower it"),
        ({"kv_cache_memory_bytes": 1}, "1 B of KV memory cannot hold .* KiB: raise kv_cache_mem"),
        ({"max_model_len": 513}, "max_model_len=513 is more than LlamaForCausalLM .* 512: lower"),
        ({"max_model_len": 1}, "max_model_len=1 must be from 2"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be from 1"),
        ({"max_num_seqs": "4"}, "max_num_seqs='4' must be a whole number"),
        ({"max_num_seqs": 10**12}, "max_num_seqs=1,000,000,000,000 must be from 1 to"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 must be from 1"),
        ({"block_size": -16}, "block_size=-16 must be from 1"),
        ({"growth_tokens": 0}, "growth_tokens=0 must be from 1"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
        ({"tokenizer": None, "model_len": 3}, "unknown option 'model_len'; did you mean"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model_of("llama"), **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_ceiling_under_which_nothing_runs_is_refused_and_leaves_nothing(strategy: str) -> None:
    memory = CountedMemory(HostMemory())
    with pytest.raises(ConfigError, match=r"8\.00 KiB of KV memory cannot hold.*raise kv_cache"):
        small(cache=strategy, kv_cache_memory_bytes=8192, provider=memory)
    assert memory.reserved_bytes == 0


def test_the_shortest_context_runs() -> None:
    for strategy in STRATEGIES:
        with small(cache=strategy, max_model_len=2, block_size=1) as llm:
            assert ids(llm.generate([[7], [9]], GREEDY)) != [(), ()]
