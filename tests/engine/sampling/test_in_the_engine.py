"""What an engine says where its requests prescribe what may come."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.models.loader import LoadedModel, load
from quire.sampling_params import StructuredOutputsParams

PROMPTS = ["class Stack:\n", "def add(a, b):\n    return", "# A poem\n", "import os\n", "x = "]


@cache
def demo() -> LoadedModel:
    return load()


def small(**options: Any) -> LLM:
    return LLM(demo(), max_model_len=256, kv_cache_memory_bytes="16MB", **options)


def test_a_prescribed_form() -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})
    params = [
        SamplingParams(max_tokens=20, structured_outputs=form, temperature=0.0, logprobs=1),
        SamplingParams(max_tokens=20, structured_outputs=form, seed=4, top_p=0.9),
    ]

    with small() as llm:
        done = llm.generate(PROMPTS[:2], params)
        barred = done[0].token_ids[0]  # the form would have it, and so would the model
        allowed = [token for token in range(llm.vocab_size) if token != barred]
        done += llm.generate(PROMPTS[0], replace(params[0], allowed_token_ids=allowed))
    assert barred not in done[2].token_ids
    assert all(completion.text.startswith("[") for completion in done)


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

    with small(max_num_batched_tokens=16, enable_prefix_caching=True) as llm:
        llm.generate(PROMPTS[0] * 6)  # its blocks are cached, and have no logits
        (found,) = llm.generate(PROMPTS[0] * 6, params)
        token_ids = llm.tokenizer(PROMPTS[0] * 6)["input_ids"]
        pieces = list(llm.stream(PROMPTS[0] * 6, replace(params, n=2)))
    assert [p.choice for p in pieces if len(p.prompt_logprobs) == len(token_ids) - 1] == [0, 1]
    assert len(token_ids) > 17
    assert [own.token_id for own in found.prompt_logprobs] == token_ids[1:]
    for own in found.prompt_logprobs:
        (first, likeliest), (_, second) = own.top
        assert own.logprob <= likeliest
        assert likeliest >= second
        assert (own.rank == 1) == (own.token_id == first or own.logprob == likeliest)
