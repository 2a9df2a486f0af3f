"""An engine whose sampler works as on a device says what it says with numpy."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.engine import build
from quire.engine.sampling import LogitsSampler
from quire.errors import RequestError
from quire.models.loader import LoadedModel, load
from quire.sampling_params import StructuredOutputsParams

PROMPTS = ["class Stack:\n", "def add(a, b):\n    return", "# A poem\n", "import os\n", "x = "]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    {"seed": 2, "top_k": 20, "top_p": 0.95, "logprobs": 0, "n": 3},
    {"seed": 5, "allowed_token_ids": (5, 6, 7, 300), "repetition_penalty": 1.1},
    {"seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "bad_words": (" the",)},
]


@cache
def demo() -> LoadedModel:
    return load()


def same_both_ways(say: Callable[[], Any]) -> None:
    on_host = say()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "LogitsSampler", partial(LogitsSampler, as_on_device=True))
        assert say() == on_host


def small(**options: Any) -> LLM:
    return LLM(demo(), max_model_len=256, kv_cache_memory_bytes="16MB", **options)


def told(completion: Any) -> list[Any]:
    return [
        (
            choice.token_ids,
            choice.finish_reason,
            [(own.token_id, own.rank, [t for t, _ in own.top]) for own in choice.logprobs or ()],
        )
        for choice in completion.choices
    ]


@pytest.mark.parametrize("guesses", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_requests_of_all_kinds(guesses: Any) -> None:
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kind) for kind in KINDS]

    def say() -> Any:
        with small(speculative_config=guesses) as llm:
            return [told(completion) for completion in llm.generate(PROMPTS, params)]

    same_both_ways(say)


def test_beams() -> None:
    def say() -> Any:
        with small() as llm:
            found = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=12))
            return [told(completion) for completion in found]

    same_both_ways(say)


def test_a_prescribed_form() -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})
    params = [
        SamplingParams(max_tokens=20, structured_outputs=form, temperature=0.0, logprobs=1),
        SamplingParams(max_tokens=20, structured_outputs=form, seed=4, top_p=0.9),
    ]

    def say() -> Any:
        with small() as llm:
            done = llm.generate(PROMPTS[:2], params)
            barred = done[0].token_ids[0]  # the form would have it, and so would the model
            allowed = [token for token in range(llm.vocab_size) if token != barred]
            done += llm.generate(PROMPTS[0], replace(params[0], allowed_token_ids=allowed))
            assert barred not in done[2].token_ids
            return [told(completion) for completion in done]

    same_both_ways(say)


def test_no_other_tokens_come_than_those_that_are_allowed() -> None:
    allowed = (7, 300, 40)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "n": 2},
        {"seed": 2, "logit_bias": {9: 100}},
    ]
    with small(speculative_config={"method": "ngram"}) as llm:
        params = [SamplingParams(max_tokens=30, allowed_token_ids=allowed, **k) for k in kinds]
        for completion in llm.generate(PROMPTS[:3], params):
            for choice in completion.choices:
                assert set(choice.token_ids) <= set(allowed)
                assert (len(choice.token_ids), choice.finish_reason) == (30, "length")
        end = min(llm.engine.scheduler.limits.eos_token_ids)
        (ended,) = llm.generate("a", SamplingParams(allowed_token_ids=(end,)))
        assert (ended.finish_reason, ended.text) == ("stop", "")
        (none,) = llm.generate("a", SamplingParams(allowed_token_ids=(end,), min_tokens=1))
        assert none.finish_reason == "error"
        assert "allowed_token_ids" in none.detail
        with pytest.raises(RequestError, match=r"allowed_token_ids: token id 4096 is not in the"):
            llm.generate("a", SamplingParams(allowed_token_ids=(5, 4096)))
    for wrong in ((), (-1,), ("a",)):
        with pytest.raises(RequestError, match="allowed_token_ids="):
            SamplingParams(allowed_token_ids=wrong)  # type: ignore[arg-type]


def test_prompt_logprobs() -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2)

    def say() -> Any:
        with small(max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
            (found,) = llm.generate(PROMPTS[0] * 6, params)
            prompt = [(own.token_id, own.rank, len(own.top)) for own in found.prompt_logprobs]
            assert len(prompt) > 16
            return told(found), prompt

    same_both_ways(say)
