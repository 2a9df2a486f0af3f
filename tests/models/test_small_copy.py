"""Errors in positions, windows, scales and heads are seen at load, in 16 bits too."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from conformance.covering import in_turn
from quire import LLM
from quire.attention import packed_tokens
from quire.engine import runner
from quire.errors import UnsupportedModel
from quire.models.executors import hooks
from quire.models.executors.small_copy import small_copy
from quire.models.loader import LoadedModel, adopt
from quire.spec import ChunkedAttention, LayerSpec, SlidingWindow
from tiny import random_model

_SIZES: dict[str, Any] = dict(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=32_768,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# One for each kind of layer, with windows as models have them.
KINDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "full": lambda: Qwen3Config(**_SIZES),
    "learned positions": lambda: OPTConfig(
        vocab_size=199, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4
    ),
    "sliding": lambda: MistralConfig(**_SIZES, sliding_window=4096),
    "sliding and full": lambda: Gemma3TextConfig(
        **_SIZES,
        sliding_window=1024,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "sinks": lambda: GptOssConfig(
        **_SIZES, sliding_window=128, num_local_experts=4, num_experts_per_tok=2
    ),
    "chunked": lambda: Llama4TextConfig(
        **_SIZES,
        attention_chunk_size=8192,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=96,
        layer_types=["chunked_attention", "full_attention"] * 2,
    ),
    "latent": lambda: DeepseekV3Config(
        **{k: v for k, v in _SIZES.items() if k not in ("num_key_value_heads", "head_dim")},
        num_key_value_heads=8,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
    ),
}


def taken(name: str, change: Callable[[LoadedModel], LoadedModel] = lambda loaded: loaded) -> str:
    """The way that a model of one kind takes, in bfloat16; "none" if it is refused."""
    loaded = change(adopt(random_model(KINDS[name]()).bfloat16()))
    try:
        with LLM(loaded, max_model_len=64, kv_cache_memory_bytes="16MB", max_num_seqs=2) as llm:
            return llm.attention_way
    except UnsupportedModel:
        return "none"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_passes_as_it_is(name: str) -> None:
    assert taken(name) == "table"


def reaching(by: int) -> Callable[[LoadedModel], LoadedModel]:
    """With windows that are longer by so many tokens in the spec, and not in the model."""

    def longer(kept: LayerSpec) -> LayerSpec:
        match kept:
            case SlidingWindow():
                return replace(kept, window=kept.window + by)
            case ChunkedAttention():
                return replace(kept, chunk=kept.chunk + by)
        return kept

    def change(loaded: LoadedModel) -> LoadedModel:
        spec = loaded.spec
        layers = (replace(each, specs=tuple(map(longer, each.specs))) for each in spec.layers)
        return replace(loaded, spec=replace(spec, layers=tuple(layers)))

    return change


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "by"), in_turn(["sliding", "sliding and full", "sinks", "chunked"], [-1, 1])
)
def test_a_window_that_is_one_off_is_seen(name: str, by: int) -> None:
    assert taken(name, reaching(by)) != "table"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "by"), in_turn(KINDS, [-1, 1]))
def test_a_position_that_is_one_off_is_seen(
    name: str, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of later chunks: rotations only know how far two tokens are apart."""
    monkeypatch.setattr(
        runner, "packed_tokens", lambda chunks: packed_tokens(chunks) + by * (chunks[0][1] > 0)
    )
    assert taken(name) == "none"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "what"), in_turn(KINDS, ["scale", "heads"]))
def test_another_scale_and_heads_of_a_neighbour_are_seen(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(
        module: torch.nn.Module,
        query: Tensor,
        *args: Any,
        scaling: float | None = None,
        **rest: Any,
    ) -> Any:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if what == "scale":
            return attend(module, query, *args, scaling=1.02 * scale, **rest)
        return attend(module, query.roll(1, dims=1), *args, scaling=scale, **rest)

    attend = hooks.attend
    monkeypatch.setattr(hooks, "attend", wrong)
    assert taken(name) == "alone"  # with the model's own attention


def test_random_numbers_of_the_caller_go_on_as_they_would() -> None:
    loaded = adopt(random_model(KINDS["full"]()))
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    assert small_copy(loaded) is not None
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_keeps_what_makes_a_kind(name: str) -> None:
    loaded = adopt(random_model(KINDS[name]()))
    copied = small_copy(loaded)
    assert copied is not None
    assert copied.model.config.to_dict() != loaded.model.config.to_dict()
    kinds = {type(kept) for layer in loaded.spec.layers for kept in layer.specs}
    assert {type(kept) for layer in copied.spec.layers for kept in layer.specs} == kinds
    for layer in copied.spec.layers:
        for kept in layer.specs:
            if isinstance(kept, SlidingWindow):
                assert kept.window == copied.model.config.sliding_window < 16
            if isinstance(kept, ChunkedAttention):
                assert kept.chunk == copied.model.config.attention_chunk_size < 16


def test_without_a_copy_the_model_alone_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    """Its own code decides by a size that is cut."""

    class Unusual(Qwen3ForCausalLM):
        def __init__(self, config: Qwen3Config) -> None:
            if config.vocab_size != 199:
                raise ValueError("made for 199 tokens")
            super().__init__(config)

    model = Unusual(Qwen3Config(**_SIZES)).eval().bfloat16()
    with caplog.at_level(logging.INFO, "quire"):
        assert taken("full", lambda _: adopt(model)) == "table"
    assert "no small copy to be tried with (ValueError: made for 199 tokens)" in caplog.text
