"""Encoder-decoders: what a decoder keeps of its text and of its source, against Transformers' own.

Tiny models with random weights, whose encoder and decoder differ in layers and heads. The bytes
that the spec reads from config.json alone are those of an ``EncoderDecoderCache``'s tensors.
"""

from typing import Any

import pytest

from quire.errors import ConfigError, UnsupportedModel
from quire.spec import CrossAttention, FullAttention, ModelSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

_T5: dict[str, Any] = {
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "n_positions": 20,
}
_BART: dict[str, Any] = {
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 20,
}
_LED = {"max_encoder_position_embeddings": 20, "max_decoder_position_embeddings": 9}
_WHISPER = {"max_source_positions": 20, "max_target_positions": 9, "num_mel_bins": 8}
_SPARSE = {"num_experts": 2, "encoder_sparse_step": 1, "decoder_sparse_step": 1}

# model_type → its sizes
TINY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
    **dict.fromkeys(("bart", "mbart", "plbart", "pegasus", "m2m_100"), _BART),
    **dict.fromkeys(("blenderbot", "blenderbot-small"), _BART),
    "marian": {**_BART, "decoder_vocab_size": 64},
    "nllb-moe": {**_BART, **_SPARSE},
    "bigbird_pegasus": {**_BART, "attention_type": "original_full"},
    "pegasus_x": {**_BART, "block_size": 4, "num_global_tokens": 2},
    "led": {**_BART, **_LED, "attention_window": 4},
    "whisper": {**_BART, **_WHISPER},
}
SOURCE, TEXT = 20, 5  # tokens


def config_of(model_type: str) -> Any:
    common = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return transformers.AutoConfig.for_model(
        model_type, vocab_size=64, d_model=16, **common, **TINY[model_type]
    )


@pytest.mark.parametrize("model_type", TINY)
def test_the_bytes_are_those_of_transformers_own_cache(model_type: str) -> None:
    config = config_of(model_type)
    spec = ModelSpec.from_config(config.to_dict()).computed_in("float32")
    auto = transformers.AutoModelForSeq2SeqLM
    if model_type == "whisper":
        auto = transformers.AutoModelForSpeechSeq2Seq
    source: dict[str, Any] = {"input_ids": torch.arange(SOURCE)[None] + 3}
    if model_type == "whisper":
        source = {"input_features": torch.zeros(1, 8, 2 * SOURCE)}
    with torch.inference_mode():
        cache = (
            auto.from_config(config)
            .eval()(**source, decoder_input_ids=torch.arange(TEXT)[None] + 3, use_cache=True)
            .past_key_values
        )
    for layer, (own, cross) in enumerate(spec.layers[n].specs for n in range(spec.num_layers)):
        assert isinstance(own, FullAttention)
        assert isinstance(cross, CrossAttention)
        assert own.bytes_for(TEXT) == bytes_in(cache.self_attention_cache.layers[layer])
        assert cross.bytes_for(TEXT) == bytes_in(cache.cross_attention_cache.layers[layer])
        keys, values = cross.states
        assert keys.shape == cache.cross_attention_cache.layers[layer].keys.shape[1:]
        assert values.shape == cache.cross_attention_cache.layers[layer].values.shape[1:]
    assert spec.num_layers == len(cache) == 3
    assert spec.source_tokens == SOURCE
    assert spec.max_model_len == (9 if model_type in ("led", "whisper") else 20)


def bytes_in(layer: Any) -> int:
    return int(layer.keys.nbytes + layer.values.nbytes)


def test_whisper_large_keeps_469_mib_of_its_source_in_float32() -> None:
    """By hand: 32 layers x 2 x 1500 x 20 heads of 64 x 4 bytes, before the first word."""
    sizes = {"decoder_layers": 32, "decoder_attention_heads": 20, "d_model": 1280}
    whisper = ModelSpec.from_config(
        {"model_type": "whisper", "is_encoder_decoder": True, "encoder_layers": 32, **sizes}
    ).computed_in("float32")
    assert whisper.state_bytes == 32 * 2 * 1500 * 1280 * 4 == 491_520_000
    assert whisper.bytes_for(1) == whisper.state_bytes + whisper.bytes_per_token
    assert whisper.bytes_per_token == 32 * 2 * 1280 * 4


def test_a_source_costs_nothing_before_there_is_a_text_and_as_much_after_any() -> None:
    cross = CrossAttention(num_kv_heads=2, head_dim=8, dtype="float32", source_tokens=10)
    assert cross.bytes_per_token == cross.bytes_for(0) == 0
    assert cross.bytes_for(1) == cross.bytes_for(400) == cross.block_bytes(16) == 2 * 2 * 8 * 10 * 4


def test_room_for_shorter_sources_takes_less() -> None:
    spec = ModelSpec.from_config(config_of("bart").to_dict())
    half = spec.with_source_tokens(SOURCE // 2)
    assert half.source_tokens == SOURCE // 2
    assert 2 * half.state_bytes == spec.state_bytes
    assert half.bytes_per_token == spec.bytes_per_token


def test_keys_and_values_of_a_source_stay_as_the_model_writes_them() -> None:
    """Codes and scales are for what grows."""
    spec = ModelSpec.from_config(config_of("bart").to_dict()).computed_in("float16")
    kept = spec.with_kv_dtype("int8")
    assert [layer.specs[0].dtype for layer in kept.layers] == ["int8"] * 3  # type: ignore[union-attr]
    assert [layer.specs[1].dtype for layer in kept.layers] == ["float16"] * 3  # type: ignore[union-attr]


def test_an_encoder_decoder_of_another_kind_is_refused_by_its_field() -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    with pytest.raises(UnsupportedModel, match=r"encoder-decoder \(is_encoder_decoder\)"):
        ModelSpec.from_config({"model_type": "new", "is_encoder_decoder": True, **sizes})


def test_a_source_of_no_tokens_is_a_wrong_config() -> None:
    fields = {**config_of("whisper").to_dict(), "max_source_positions": 0}
    with pytest.raises(ConfigError, match="max_source_positions = 0 must be a whole number from 1"):
        ModelSpec.from_config(fields)
