"""Reading config.json: spellings, text parts, rules for layers, and errors that say what to do."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError, ModelNotLoadable, UnsupportedModel
from quire.spec import (
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 512,
}
SAME = ModelSpec.from_config(PLAIN)


def read(**changes: Any) -> ModelSpec:
    """PLAIN with changes; ``...`` takes a field away."""
    fields = {name: value for name, value in (PLAIN | changes).items() if value is not ...}
    return ModelSpec.from_config(fields)


def kinds(spec: ModelSpec) -> str:
    """One letter a layer: Full, Sliding, Chunked, Latent, Recurrent; - for none."""
    letters = {
        FullAttention: "F",
        SlidingWindow: "S",
        ChunkedAttention: "C",
        LatentAttention: "L",
        RecurrentState: "R",
    }
    return " ".join(
        "".join(letters[type(own)] for own in layer.specs) or "-" for layer in spec.layers
    )


def test_importing_the_room_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, quire.spec; "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What fields mean -------------------------------------------------------------------------------


def test_a_model_type_never_heard_of_is_read_by_its_fields() -> None:
    spec = read(model_type="tomorrow")
    assert spec.layers == SAME.layers
    assert spec.model_type == "tomorrow"


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        ("num_hidden_layers", "n_layer"),
        ("num_hidden_layers", "n_layers"),
        ("num_hidden_layers", "num_layers"),
        ("num_attention_heads", "n_head"),
        ("num_attention_heads", "n_heads"),
        ("num_key_value_heads", "n_head_kv"),
        ("num_key_value_heads", "num_kv_heads"),
        ("num_key_value_heads", "multi_query_group_num"),
        ("hidden_size", "n_embd"),
        ("hidden_size", "d_model"),
        ("max_position_embeddings", "n_positions"),
        ("max_position_embeddings", "max_seq_len"),
        ("max_position_embeddings", "seq_length"),
    ],
)
def test_other_spellings_are_read_alike(usual: str, other: str) -> None:
    assert read(**{usual: ..., other: PLAIN[usual]}) == SAME


def test_heads_of_keys_default_to_heads_of_queries() -> None:
    (group,) = read(num_key_value_heads=...).groups
    assert group.spec == FullAttention(num_kv_heads=8, head_dim=8, dtype="bfloat16")


@pytest.mark.parametrize(
    ("model_type", "head_dim"), [("llama", 8), ("qwen3", 128), ("gemma", 256), ("gpt_oss", 64)]
)
def test_head_dim_defaults_as_the_family_has_it(model_type: str, head_dim: int) -> None:
    assert {g.spec.head_dim for g in read(model_type=model_type).groups} == {head_dim}
    assert {g.spec.head_dim for g in read(model_type=model_type, head_dim=24).groups} == {24}


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": "auto"}, "bfloat16"),
        ({"torch_dtype": None}, "bfloat16"),
        ({"dtype": "half"}, "float16"),
    ],
)
def test_dtype_is_as_stated_else_bfloat16(fields: dict[str, Any], dtype: str) -> None:
    spec = read(**fields)
    assert spec.dtype == dtype
    assert spec.groups[0].spec.dtype == dtype


@pytest.mark.parametrize(
    "section", ["text_config", "llm_config", "language_config", "thinker_config"]
)
def test_the_text_part_is_found_and_inherits_the_dtype(section: str) -> None:
    config = {"model_type": "seeing", "torch_dtype": "float16", section: PLAIN}
    spec = ModelSpec.from_config(config)
    assert spec.model_type == "llama"
    assert spec == read(dtype="float16")
    assert ModelSpec.from_config({"thinker_config": config}) == spec


def test_a_section_without_a_model_type_is_the_text_part_of_its_file_s_family() -> None:
    text = {name: value for name, value in PLAIN.items() if name != "model_type"}
    nested = ModelSpec.from_config({"model_type": "gemma3", "text_config": text})
    flat = read(model_type="gemma3")
    assert nested.layers == flat.layers == read(model_type="gemma3_text").layers


def test_what_a_section_leaves_out_is_the_class_default() -> None:
    """LLaVA-1.5 says no more of its Llama than this."""
    spec = ModelSpec.from_config(
        {"model_type": "llava", "text_config": {"model_type": "llama"}, "torch_dtype": "float16"}
    )
    assert spec.bytes_per_token == 32 * (4096 + 4096) * 2
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        ModelSpec.from_config({"model_type": "llama"})


# Which layer is of which kind -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mistral"}, "S S S S"),
        ({"model_type": "mistral", "sliding_window": None}, "F F F F"),
        ({"model_type": "phi3", "sliding_window": 9}, "S S S S"),
        ({"model_type": "qwen2", "sliding_window": 9}, "F F F F"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
            "F F F S",
        ),
        ({"model_type": "gemma2"}, "S F S F"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, "S S F S"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 7}, "S S S S S F S"),
        ({"model_type": "cohere2"}, "S S S F"),
        ({"model_type": "gpt_oss"}, "S F S F"),
        ({"model_type": "olmo3"}, "S S S F"),
        ({"model_type": "cwm"}, "F S S S"),
        ({"model_type": "llama4_text"}, "C C C F"),
        ({"model_type": "llama4_text", "no_rope_layers": [0, 1, 0, 1]}, "F C F C"),
        ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 2]]}, "F F F F"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 9},
            "F S F S",
        ),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": 4}, "L L L L"),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": 4, "use_mla": False}, "F F F F"),
        ({"kv_lora_rank": None}, "F F F F"),
        ({"model_type": "jamba"}, "R R R R"),
        ({"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}, "R F R F"),
        ({"model_type": "bamba", "attn_layer_indices": [2]}, "R R F R"),
        ({"model_type": "lfm2", "full_attn_idxs": [0, 3]}, "F R R F"),
        ({"model_type": "falcon_h1"}, "FR FR FR FR"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*-E"}, "R F - -"),
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, "R F R F"),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [4]}},
            "R R R F",
        ),
        ({"model_type": "bailing_hybrid", "layer_group_size": 2, "linear_head_dim": 8}, "R F R F"),
        ({"model_type": "minimax"}, "F R F R"),
        ({"model_type": "mimo_v2_flash", "num_hidden_layers": 7}, "F S S S S F S"),
        ({"model_type": "inkling_text", "local_layer_ids": [1, 2]}, "FR SR SR FR"),
        ({"model_type": "inkling_text", "local_layer_ids": [0, 1, 2, 3]}, "SR SR SR SR"),
        ({"model_type": "inkling2_text", "num_hidden_layers": 6}, "SR SR SR SR SR FR"),
        ({"model_type": "zaya"}, "FR FR FR FR"),
        ({"model_type": "mllama_text_model", "cross_attention_layers": [1, 3]}, "F - F -"),
        ({"model_type": "bert", "is_decoder": True}, "F F F F"),
        ({"model_type": "longcat_flash", "kv_lora_rank": 8, "qk_rope_head_dim": 2}, "L " * 7 + "L"),
    ],
)
def test_kinds_of_layers(fields: dict[str, Any], expected: str) -> None:
    assert kinds(read(**fields)) == expected


def test_gemma_4_full_layers_have_heads_of_their_own() -> None:
    spec = read(
        model_type="gemma4_text",
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=32,
        num_global_key_value_heads=1,
    )
    sliding, full = (group.spec for group in spec.groups)
    assert sliding == SlidingWindow(num_kv_heads=2, head_dim=256, dtype="bfloat16", window=512)
    assert full == FullAttention(num_kv_heads=1, head_dim=32, dtype="bfloat16")


def test_sliding_layers_may_have_twice_the_heads_and_count_the_tokens_before() -> None:
    """MiMo: ``sliding_window_size`` tokens before the one that reads them."""
    full, sliding, *_ = read(model_type="mimo_v2_flash", sliding_window_size=8).layers
    assert full.specs[0].num_kv_heads * 2 == sliding.specs[0].num_kv_heads
    assert sliding.specs[0].window == 9
    assert full.specs[0].value_head_dim == 128


def test_a_decoder_cut_out_of_an_encoder_decoder_has_its_own_words() -> None:
    stated = {"decoder_layers": 3, "decoder_attention_heads": 4, "d_model": 32}
    spec = ModelSpec.from_config(
        {"model_type": "whisper", "max_target_positions": 448, "encoder_layers": 9, **stated}
    )
    assert (spec.num_layers, spec.max_model_len) == (3, 448)
    assert spec.layers[0].specs[0].entry_shapes == ((4, 8), (4, 8))


def test_heads_may_be_listed_layer_by_layer() -> None:
    """As OpenELM does."""
    spec = read(num_key_value_heads=[1, 2, 2, 4], head_dim=8)
    assert [layer.specs[0].num_kv_heads for layer in spec.layers] == [1, 2, 2, 4]
    with pytest.raises(ConfigError, match="no entry for layer 3"):
        read(num_key_value_heads=[1, 2, 2], head_dim=8)


def test_transformers_per_layer_config_is_read() -> None:
    spec = read(per_layer_config={"01": {"head_dim": 16}, "3": {"num_key_value_heads": 1}})
    shapes = [(layer.specs[0].num_kv_heads, layer.specs[0].head_dim) for layer in spec.layers]
    assert shapes == [(2, 8), (2, 16), (2, 8), (1, 8)]


def test_searched_architectures_drop_and_group_heads_by_layer() -> None:
    """Nemotron-NAS: block_configs."""
    spec = read(
        model_type="nemotron-nas",
        num_key_value_heads=None,
        block_configs=[
            {"attention": {"n_heads_in_group": 4, "no_op": False}},
            {"attention": {"n_heads_in_group": None, "no_op": True}},
            {"attention": {"n_heads_in_group": None, "replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 8}},
        ],
    )
    assert kinds(spec) == "F - - F"
    assert [g.spec.num_kv_heads for g in spec.groups] == [2, 1]


def test_a_recurrent_only_model_states_no_length_and_costs_nothing_a_token() -> None:
    spec = ModelSpec.from_config({"model_type": "mamba", "n_layer": 2, "d_model": 64})
    assert spec.max_model_len == 2**20
    assert spec.bytes_per_token == 0
    assert spec.bytes_for(1) == spec.bytes_for(10**6) == 2 * (128 * 4 * 2 + 128 * 16 * 4)


# Errors: the file, the field, the value, and what to do -----------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": ...}, r"m.json has no 'num_hidden_layers' \(nor 'n_layer', "),
        ({"num_attention_heads": ...}, "has no 'num_attention_heads'.*add it"),
        ({"max_position_embeddings": ...}, "has no 'max_position_embeddings'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 must be a whole number from 1 to 10,000"),
        ({"num_hidden_layers": -3}, "num_hidden_layers = -3 must"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers = '4' must"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 must"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True must"),
        ({"hidden_size": float("nan")}, "hidden_size = nan must"),
        ({"hidden_size": 65}, "num_attention_heads = 8 does not divide 65"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide 8"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads = 2.5 must"),
        ({"head_dim": 2**60}, "head_dim = 1152921504606846976 must"),
        ({"head_dim": [4, 4]}, "head_dim = .4, 4. has no entry for layer 2"),
        ({"dtype": "int3"}, "dtype = 'int3' is not known; known: float64"),
        ({"dtype": 16}, "dtype = 16 must be a string"),
        ({"model_type": 4}, "model_type = 4 must be a string"),
        ({"layer_types": "full"}, "layer_types = 'full' must be a list"),
        ({"layer_types": ["full_attention"] * 3}, "names 3 layers, but num_hidden_layers = 4"),
        ({"sliding_window": 0}, "sliding_window = 0 must"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            r"has no 'sliding_window' \(nor 'attention_window_size'\): add it",
        ),
        ({"kv_lora_rank": 32}, "has no 'qk_rope_head_dim': add it"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 leaves none of 4 layers"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*?*"},
            r"hybrid_override_pattern = 'M\*\?\*' has \['\?'\]; known: M, \*, -, E",
        ),
        ({"model_type": "nemotron_h"}, "'layer_types'.*add it"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_limit(
    changes: dict[str, Any], message: str
) -> None:
    fields = {name: value for name, value in (PLAIN | changes).items() if value is not ...}
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_config(fields, "m.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "rwkv"}, "states of their own outside"),
        ({"model_type": "bert"}, "an encoder"),
        ({"model_type": "bert", "is_decoder": False}, "an encoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"index_topk": 2048}, "sparse indexer"),
        ({"layer_types": ["indexed_attention"] * 4}, "layer_types name 'indexed_attention'"),
        ({"layer_types": ["linear_attention"] * 4}, "add a row for its model_type"),
        (
            {"model_type": "new", "mamba_d_state": 16},
            "state_size.*list 'layer_types', or add a row",
        ),
        ({"model_type": "new", "sliding_window_pattern": 3}, "sliding_window_pattern"),
        ({"use_bidirectional_attention": True}, "both directions"),
        (
            {
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 4,
                "sliding_window": 9,
                "layer_types": ["sliding_attention"] * 4,
            },
            "sliding_attention over a compressed latent",
        ),
        (
            {
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
                "num_kv_shared_layers": 1,
            },
            "later sliding_attention layers share",
        ),
    ],
)
def test_what_cannot_be_held_is_refused_with_a_reason(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        UnsupportedModel, match=rf"^m\.json: this model is not supported: .*{message}"
    ):
        ModelSpec.from_config(PLAIN | changes, "m.json")


def test_a_section_is_named_in_the_message() -> None:
    with pytest.raises(ConfigError, match=r"^m\.json, text_config: num_hidden_layers = 0"):
        ModelSpec.from_config({"text_config": PLAIN | {"num_hidden_layers": 0}}, "m.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"a": 1e999'])
def test_a_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ModelNotLoadable, match=r"config\.json"):
        ModelSpec.from_file(file)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoadable, match="cannot read"):
        ModelSpec.from_file(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelNotLoadable, match="cannot read"):
        ModelSpec.from_file(tmp_path)
