"""Encoder-decoders in the engine: generate()'s own tokens, whatever runs beside or interrupts."""

import asyncio
import logging
from collections.abc import Mapping
from functools import cache as once
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from conformance.covering import in_turn, only
from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.config import SpeculativeConfig
from quire.engine.prompts import Prompt
from quire.engine.scheduling.plan_builder import NO_DRAFTS, Drafts
from quire.engine.step_plan import StepPlan
from quire.errors import ConfigError, RequestError, RequestTooLong
from quire.models.executors import encoder_source as sources
from quire.models.footprint import outline
from quire.spec import ModelSpec
from readers import FRAMES, VOCAB, features, source_ids, tiny_reader
from tiny import tiny_model

NEW = 12
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
LENGTHS = (3, 9, 17, 30)
CACHES: Mapping[str, dict[str, Any]] = {
    "contiguous": dict(cache="contiguous"),
    "growing": dict(cache="growing", growth_tokens=8),
    "paged": dict(cache="paged"),
    "virtual": dict(cache="virtual", enable_prefix_caching=False),
    "virtual, shared": dict(cache="virtual"),
}


@once
def reader(name: str) -> PreTrainedModel:
    """One that never says that a text ends, so that all are as long."""
    model = tiny_reader(name)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def llm_of(name: str, **options: Any) -> LLM:
    defaults: dict[str, Any] = dict(kv_cache_memory_bytes="32MB", max_num_seqs=8, block_size=4)
    return LLM(reader(name), **{**defaults, **options})


def prompts(name: str) -> list[Any]:
    if name == "whisper":
        return [{"source": features(1, seed=seed)[0]} for seed in LENGTHS]
    return [source_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]


def own(name: str, prompt: Any, **options: Any) -> list[list[int]]:
    """What Transformers' generate() says after what a text begins with."""
    given = prompt["source"][None] if isinstance(prompt, Mapping) else torch.tensor([prompt])
    torch.manual_seed(1)
    out = reader(name).generate(given, max_new_tokens=NEW, **options)
    return [row[-NEW:] for row in out.tolist()]


@once
def expected(name: str) -> list[list[int]]:
    return [own(name, prompt)[0] for prompt in prompts(name)]


def texts(llm: LLM, several: list[Prompt], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(done.choices[0].token_ids) for done in llm.generate(several, params)]


# -- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5", "bart", "marian", "whisper"])
def test_texts_tell_sources_apart(name: str) -> None:
    """Else nothing below would be seen."""
    assert len({tuple(text) for text in expected(name)}) == len(LENGTHS)
    assert all(len(set(text)) > 2 for text in expected(name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("cache", "name"), in_turn([*CACHES], ["t5", "bart", "marian", "whisper"]))
def test_greedy_tokens_are_those_of_generate(name: str, cache: str) -> None:
    """Four sources of different lengths at once, and each by itself."""
    with llm_of(name, **CACHES[cache]) as llm:
        assert llm.attention_way == "alone"
        assert texts(llm, prompts(name)) == expected(name)
        assert [texts(llm, [prompt])[0] for prompt in prompts(name)] == expected(name)
        assert not llm.usage().committed_bytes, "nothing is kept of a text that has ended"


def test_who_comes_later_joins_the_others() -> None:
    """More sequences than may run at once, and fewer tokens a step than there are sequences."""
    with llm_of("bart", max_num_seqs=2, max_num_batched_tokens=2) as llm:
        assert texts(llm, prompts("bart") * 2) == expected("bart") * 2


def test_a_source_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, seen = sources.encode, list[int]()

    def counted(model: PreTrainedModel, source: sources.Source) -> torch.Tensor:
        seen.append(source.num_tokens)
        return encode(model, source)

    with llm_of("t5", max_num_batched_tokens=1) as llm:
        monkeypatch.setattr(sources, "encode", counted)
        start = llm._source_prompts.text_begins  # type: ignore[union-attr]
        several = [{"source": p, "prompt_token_ids": [*start, 5, 6]} for p in prompts("t5")]
        llm.generate(several, GREEDY)
    assert sorted(seen) == sorted(LENGTHS)


def test_a_text_may_begin_otherwise() -> None:
    begin = [3, 9, 11, 7]
    with llm_of("bart", max_num_batched_tokens=3) as llm:
        several = [{"source": p, "prompt_token_ids": begin} for p in prompts("bart")]
        done = llm.generate(several, GREEDY)
    for prompt, completion in zip(prompts("bart"), done, strict=True):
        assert list(completion.prompt_token_ids) == begin
        want = own("bart", prompt, decoder_input_ids=torch.tensor([begin]))
        assert list(completion.choices[0].token_ids) == want[0]


def test_what_the_generation_config_forces_counts_as_the_prompt() -> None:
    model = tiny_reader("bart", seed=3)
    model.generation_config.forced_bos_token_id = 8
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    (prompt, *_) = prompts("bart")
    with LLM(model, kv_cache_memory_bytes="8MB") as llm:
        (done,) = llm.generate([prompt], GREEDY)
    want = model.generate(torch.tensor([prompt]), max_new_tokens=NEW + 1)[0].tolist()
    assert list(done.prompt_token_ids) == want[:2] == [3, 8]
    assert list(done.choices[0].token_ids) == want[2:]


def test_what_the_generation_config_suppresses_does_not_come() -> None:
    model = tiny_reader("whisper")
    said = model.generation_config
    said.eos_token_id = None
    given = torch.stack([prompt["source"] for prompt in prompts("whisper")])
    plain = expected("whisper")
    first, anywhere = plain[0][-1], plain[1][-1]
    said.begin_suppress_tokens = sorted({text[0] for text in plain} | {first, 4096})
    said.suppress_tokens = [anywhere]
    want = [row[-NEW:] for row in model.generate(given, max_new_tokens=NEW).tolist()]
    with LLM(model, kv_cache_memory_bytes="8MB") as llm:
        assert texts(llm, prompts("whisper")) == want != plain
    assert not any(anywhere in text for text in want)
    barred_first = {text[0] for text in plain} | {first}
    assert any(barred_first & set(text[1:]) for text in want), "they may come later"


@pytest.mark.parametrize("cache", only(CACHES, "growing", "virtual, shared"))
def test_beams_are_those_of_generate(cache: str) -> None:
    (_, prompt, *_) = prompts("bart")
    search = BeamSearchParams(beam_width=3, max_tokens=NEW)
    with llm_of("bart", **CACHES[cache]) as llm:
        (done,) = llm.beam_search([prompt], search)
    beams = dict(num_beams=3, num_return_sequences=3, early_stopping="never")
    assert [list(c.token_ids) for c in done.choices] == own("bart", prompt, **beams)


@pytest.mark.parametrize("cache", only(CACHES, "contiguous", "paged"))
def test_continuations_share_the_source_where_blocks_are_shared(cache: str) -> None:
    params = SamplingParams(max_tokens=NEW, n=4, seed=5, ignore_eos=True)
    used: list[int] = []
    (prompt, *_) = prompts("bart")
    with llm_of("bart", **CACHES[cache]) as llm:
        (done,) = llm.generate(
            [prompt], params, observe=lambda usage: used.append(usage.used_bytes)
        )
        spec, shares = llm.spec, llm._kv.accounting.shares_blocks
    with llm_of("bart") as llm:
        (same,) = llm.generate([prompt], params)
    assert done.choices == same.choices
    num_sources = 1 if shares else 4
    in_text = max(used) - num_sources * spec.state_bytes
    assert 0 < in_text <= 4 * (NEW + 1) * spec.bytes_per_token


def test_random_draws_depend_on_the_source() -> None:
    params = SamplingParams(max_tokens=NEW, seed=5, ignore_eos=True)
    with llm_of("t5") as llm:
        once_, again = (texts(llm, prompts("t5"), params) for _ in range(2))
    assert once_ == again
    assert len({tuple(text) for text in once_}) == len(LENGTHS)


def test_a_mixture_of_experts_is_one_too() -> None:
    with llm_of("nllb-moe") as llm:
        assert texts(llm, prompts("nllb-moe")) == expected("nllb-moe")
    assert len({tuple(text) for text in expected("nllb-moe")}) > 1


# -- making room ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache", "way"), in_turn([*CACHES], ["recompute", "swap", "file"]))
def test_who_makes_room_goes_on_with_the_same_tokens(cache: str, way: str, tmp_path: Path) -> None:
    """Encoded once more, or brought back: a source that was lost is there again."""
    swap: dict[str, Any] = {} if way == "recompute" else dict(swap_space="4MB")
    if way == "file":
        swap["swap_path"] = str(tmp_path)
    with llm_of("bart", **{**CACHES[cache], **swap}) as llm:
        scheduler = llm.engine.scheduler
        scheduler.costs.recompute_s = lambda _: inf  # type: ignore[method-assign]
        plan_as_ever, plans = scheduler.plan, iter(range(100))

        def plan(drafts: Drafts = NO_DRAFTS) -> StepPlan:
            if next(plans) in (4, 7, 8):
                scheduler._preempt(scheduler._queues.running[-1], "a test")
            return plan_as_ever(drafts)

        scheduler.plan = plan  # type: ignore[method-assign]
        assert texts(llm, prompts("bart")) == expected("bart")
        stats = scheduler.statistics
        assert stats.num_preemptions == 3
        if way == "recompute":
            assert stats.num_recomputed_tokens
        else:
            assert not stats.num_recomputed_tokens
            assert stats.loaded_bytes == stats.saved_bytes >= 3 * llm.spec.state_bytes


@pytest.mark.parametrize("cache", CACHES)
def test_sources_draw_on_the_one_budget(cache: str) -> None:
    """Room for two sources and their texts: the others wait, and none is lost."""
    spec = ModelSpec.from_config(reader("bart").config.to_dict()).computed_in("float32")
    copies = 4 if cache == "growing" else 2
    room = 2 * spec.state_bytes + 2 * copies * 64 * spec.bytes_per_token + 2**16
    with llm_of("bart", kv_cache_memory_bytes=room, **CACHES[cache]) as llm:
        most: list[int] = []
        several = llm.generate(
            prompts("bart"), GREEDY, observe=lambda usage: most.append(usage.committed_bytes)
        )
        assert [list(done.choices[0].token_ids) for done in several] == expected("bart")
        assert max(most) <= room
        assert "sources" in llm.ledger.explain()


def test_a_step_that_fails_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that fails for one source ends that sequence, and no other."""
    encode = sources.encode

    def failing(model: PreTrainedModel, source: sources.Source) -> torch.Tensor:
        if source.num_tokens == LENGTHS[1]:
            raise RuntimeError("a source that cannot be read")
        return encode(model, source)

    with llm_of("bart") as llm:
        monkeypatch.setattr(sources, "encode", failing)
        done = llm.generate(prompts("bart"), GREEDY)
    assert [d.finish_reason for d in done] == ["length", "error", "length", "length"]
    assert "a source that cannot be read" in done[1].choices[0].detail
    others = [list(d.choices[0].token_ids) for d in done if d.finish_reason == "length"]
    assert others == [text for at, text in enumerate(expected("bart")) if at != 1]


# -- what is refused ------------------------------------------------------------------------------


def test_too_long_a_source_is_refused_with_what_would_help() -> None:
    with llm_of("bart", max_model_len=32) as llm:
        assert llm.spec.source_tokens == 32
        assert texts(llm, prompts("bart")) == expected("bart")
        with pytest.raises(RequestTooLong, match=r"33 tokens .* 32: shorten it or raise max_model"):
            llm.generate([[5] * 33], GREEDY)
    with (
        llm_of("bart") as llm,
        pytest.raises(RequestTooLong, match=r"65 tokens .* 64: shorten"),
    ):
        llm.generate([[5] * 65], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({}, "may have 'prompt_token_ids'; this one has neither"),
        ({"sauce": [1]}, "this one has .'sauce'."),
        ({"source": [5], "text": "a"}, "this one has .'source', 'text'."),
        ({"source": [5], "prompt_token_ids": "a"}, "prompt_token_ids are token ids; this is str"),
        ({"source": [5], "prompt_token_ids": [VOCAB]}, f"token id {VOCAB} is not in the vocab"),
        ({"source": []}, "the prompt is empty"),
        ({"source": [VOCAB]}, f"token id {VOCAB} is not in the vocabulary"),
        ({"source": "text"}, "no tokenizer"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, said: str) -> None:
    with llm_of("t5") as llm, pytest.raises(RequestError, match=said):
        llm.generate([prompt], GREEDY)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([5, 6], "hears input_features, a tensor .8, 40. .* this is list"),
        (torch.zeros(8, 2 * FRAMES + 1), r"this is \[8, 41\]"),
        (torch.zeros(2, 8, 2 * FRAMES), r"one source a prompt.*\[2, 8, 40\]"),
        (torch.zeros(8, 2 * FRAMES, dtype=torch.long), "in floating point"),
    ],
)
def test_what_a_speech_model_cannot_hear_is_refused(given: Any, said: str) -> None:
    with llm_of("whisper") as llm, pytest.raises(RequestError, match=said):
        llm.generate([{"source": given}], GREEDY)


def test_a_decoder_takes_no_source() -> None:
    said = "a prompt is text or a list of token ids"
    llm = LLM(tiny_model("llama"), kv_cache_memory_bytes="8MB")
    with llm, pytest.raises(RequestError, match=said):
        llm.generate([{"source": [5]}], GREEDY)


def test_guesses_are_refused_with_the_reason() -> None:
    lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=r"answers a source, of which neither .* leave"):
        llm_of("bart", speculative_config=lookup)


def test_no_prefix_caching_and_the_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    with llm_of("bart") as llm:
        for _ in range(2):
            (done,) = llm.generate([prompts("bart")[2]], GREEDY)
        assert not done.num_cached_tokens
    assert "no prefix caching: what BartForConditionalGeneration writes depends" in caplog.text


# -- the ways in ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_folder_is_loaded_as_what_it_is(name: str, tmp_path: Path) -> None:
    reader(name).save_pretrained(tmp_path)
    with LLM(tmp_path, kv_cache_memory_bytes="32MB", max_num_seqs=4) as llm:
        assert texts(llm, prompts(name)) == expected(name)
    _, own_bytes, spec = outline(tmp_path)
    assert own_bytes.weights_bytes
    assert spec.source_tokens == (FRAMES if name == "whisper" else 64)


def test_event_loops_give_sources_too() -> None:
    async def run() -> list[list[int]]:
        options: dict[str, Any] = dict(kv_cache_memory_bytes="32MB", max_num_seqs=4)
        async with AsyncLLM(reader("whisper"), **options) as llm:
            done = await asyncio.gather(*(llm.complete(p, GREEDY) for p in prompts("whisper")))
        return [list(each.choices[0].token_ids) for each in done]

    assert asyncio.run(run()) == expected("whisper")


@pytest.mark.parametrize("kept_as", ["float16", "int8_per_token_head"])
def test_the_text_may_be_kept_in_fewer_bits(kept_as: str) -> None:
    """The source is not: it is read as the model writes it."""
    with llm_of("bart", kv_cache_dtype=kept_as) as llm:
        assert {s.dtype for s in llm.spec.layers[0].specs[1:]} == {"float32"}  # type: ignore[union-attr]
        assert len(texts(llm, prompts("bart"))) == len(LENGTHS)
