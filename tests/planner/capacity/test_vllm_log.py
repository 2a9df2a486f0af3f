"""vLLM's two lines at its start, as people have posted them, by its rule.

A log states gibibytes with two digits: the blocks it states must be among those that such an amount
can give, and the rest follows from the blocks exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from quire.cli.plan_report import VllmStartUp, start_up
from quire.planner.subject import find_subject
from quire.spec import ModelSpec
from quire.spec.tensor_parallel import rank_spec

GIB = 1 << 30
# Qwen2.5's 1.5 B and 0.5 B have the memory of Qwen2's: 28 and 24 layers, 2 heads of 128 and 64.
QWEN_1_5B, QWEN_0_5B = "Qwen2-1.5B-Instruct", "Qwen2-0.5B-Instruct"
OPT_125M = ModelSpec.from_config(  # the defaults of OPTConfig in Transformers
    {
        "model_type": "opt",
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_size": 768,
        "max_position_embeddings": 2048,
        "dtype": "float16",
    }
)


def spec_of(model: str) -> ModelSpec:
    return OPT_125M if model == "opt-125m" else find_subject(model).spec


@dataclass(frozen=True, kw_only=True)
class Posted:
    """A start-up as it was posted."""

    model: str
    gib: str  # for KV, as it is written there
    num_tokens: int
    source: str
    concurrency: tuple[int, str] | None = None  # for so many tokens a request


POSTED = [
    Posted(
        model="Llama-3.1-8B-Instruct",
        gib="3.81",
        num_tokens=1952 * 16,  # "GPU blocks: 1952"
        concurrency=(20_000, "1.56"),
        source="https://github.com/vllm-project/vllm/issues/10517 (RTX 3090, 20,000 tokens)",
    ),
    Posted(
        model="Llama-3.1-8B-Instruct",
        gib="2.89",
        num_tokens=1478 * 16,  # 23,648 tokens, as the error says too
        concurrency=(29_000, "0.82"),
        source="https://github.com/vllm-project/vllm/issues/10517 (RTX 3090, 29,000 tokens)",
    ),
    Posted(
        model="Llama-3.1-8B-Instruct",
        gib="19.92",
        num_tokens=163_168,
        source="a public benchmark's record of its A100 40 GB, 2026-05-03",
    ),
    Posted(
        model=QWEN_1_5B,
        gib="0.56",
        num_tokens=20_992,
        source="a public deployment's record, Qwen2.5-1.5B-Instruct",
    ),
    Posted(
        model=QWEN_0_5B,
        gib="34.81",
        num_tokens=190_100 * 16,  # "cuda blocks: 190100"
        concurrency=(32_768, "92.82"),
        source="a public notebook's output of 12 August, Qwen2.5-0.5B in four bits, 48 GB",
    ),
    Posted(
        model="opt-125m",
        gib="20.33",
        num_tokens=37_011 * 16,  # "rocm blocks: 37011"
        concurrency=(2048, "289.15"),
        source="a public server's documentation, facebook/opt-125m on 24 GB under ROCm",
    ),
]


@pytest.mark.parametrize("posted", POSTED, ids=lambda posted: f"{posted.model} {posted.gib}")
def test_the_size_that_was_posted_is_what_that_memory_gives(posted: Posted) -> None:
    spec = spec_of(posted.model)
    low, high = (
        start_up(spec, int((float(posted.gib) + off) * GIB), max_model_len=4096)
        for off in (-0.005, 0.005)
    )
    assert low is not None
    assert high is not None
    assert low.num_tokens <= posted.num_tokens <= high.num_tokens
    assert high.num_tokens - low.num_tokens < 0.02 * posted.num_tokens
    if posted.concurrency is not None:
        max_model_len, said = posted.concurrency
        exact = VllmStartUp(
            num_blocks=posted.num_tokens // 16, block_size=16, max_model_len=max_model_len
        )
        assert f"{exact.concurrency:.2f}" == said


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "tokens", "concurrency"),
    [
        # https://github.com/vllm-project/vllm/pull/13596
        (127_626, 2048, "2,042,016", "997.08x"),
        # https://github.com/vllm-project/vllm/issues/17327
        (12_424, 8192, "198,784", "24.27x"),
    ],
)
def test_tokens_and_concurrency_follow_from_the_blocks(
    num_blocks: int, max_model_len: int, tokens: str, concurrency: str
) -> None:
    said = VllmStartUp(num_blocks=num_blocks, block_size=16, max_model_len=max_model_len).text
    assert f"GPU KV cache size: {tokens} tokens" in said
    assert said.endswith(concurrency)


def test_ranks_have_their_heads_each() -> None:
    spec = find_subject("Llama-3.3-70B-Instruct").spec
    whole = start_up(spec, 40 * GIB, max_model_len=8192)
    half = start_up(rank_spec(spec, 2), 40 * GIB, max_model_len=8192)
    assert whole is not None
    assert half is not None
    assert half.num_blocks == pytest.approx(2 * whole.num_blocks, abs=1)


def test_layers_that_differ_are_not_vllms_two_lines() -> None:
    spec: ModelSpec = find_subject("gemma-3-27b-it").spec
    assert start_up(spec, 40 * GIB, max_model_len=8192) is None
