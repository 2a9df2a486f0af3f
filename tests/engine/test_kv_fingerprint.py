"""What an engine's fingerprint names: each option is classified, and each named one changes it."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.config import KV_CACHE_DTYPES, EngineConfig
from quire.engine.kv_fingerprint import (
    EFFECTS,
    BlockLayout,
    fingerprint_of,
    planned_fingerprint,
    planned_layout,
)
from quire.errors import ConfigError
from quire.models.file_hashes import CannotName
from quire.models.model_content import ModelContent
from quire.spec import FullAttention, Layer, ModelSpec, SlidingWindow
from quire.tiers import record
from quire.tiers.fingerprint import Fingerprint
from quire.tiers.record_folder import list_namespaces

CONTENT = ModelContent(
    weights="files 00",
    config={"rope_parameters": {"rope_theta": 1e4}, "attn_logit_softcapping": 50.0},
    dtype="bfloat16",
    code={"transformers": "5.0.0", "torch": "2.13.0"},
)
FULL = FullAttention(num_kv_heads=2, head_dim=8, dtype="bfloat16")
SPEC = ModelSpec(
    model_type="qwen3",
    layers=tuple(Layer(specs=(FULL,)) for _ in range(3)),
    max_model_len=64,
    dtype="bfloat16",
)
# Another value for each option that a fingerprint names.
OTHER = {
    "dtype": "float32",
    "quantization": "int8",
    "dynamic_quantization": False,
    "kv_cache_dtype": "int8_per_token_head",
    "cache": "virtual",
    "block_size": 32,
    "tensor_parallel_size": 2,
    "batch_invariant": True,
}
FIELDS = {"cache": "order"}  # that say what an option of another name has done
# … and for each that says nothing of the bytes, or only how they are rounded.
SAME = {
    "device": "cuda",
    "attention_backend": "sdpa",
    "enforce_eager": True,
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
    "prefix_caching_policy": "lru",
    "watermark": 0.1,
    "scheduling_policy": "priority",
    "swap_space": 2**20,
    "kv_cache_memory_bytes": 2**20,
    "budget": "vllm",
    "memory_utilization": 0.5,
    "memory_mode": "dedicated",
    "residency": "prefault",
    "growth": "doubling",
    "growth_tokens": 8,
    "reserve": "request",
    "speculative_config": {"num_speculative_tokens": 2},
    "seed": 1,
    "limit_mm_per_prompt": {"image": 1},
    "kv_events_config": {"enable_kv_cache_events": True},
    "kv_tier": ("memory:?size=1GiB",),
    "kv_tier_trusted": True,
    "kv_tier_write": "never",
    "kv_offloading_size": 2**30,
    "kv_transfer_config": {
        "kv_connector": "QuireConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"listen": "unix:/run/quire/peer"},
    },
}


def made(content: ModelContent = CONTENT, rank: int = 0, **options: Any) -> Fingerprint:
    config = EngineConfig(**options)
    if config.dtype != "auto":  # an engine computes in what the option says
        content = replace(content, dtype=config.dtype)
    return fingerprint_of(content, config, layout_of(SPEC, content.dtype, config), rank=rank)


def layout_of(spec: ModelSpec, dtype: str, config: EngineConfig) -> BlockLayout:
    """Lay blocks out as an engine does of whose options only those matter that may."""
    own = EngineConfig(
        cache=config.cache, block_size=config.block_size, kv_cache_dtype=config.kv_cache_dtype
    )
    return planned_layout(own, "model", spec.computed_in(dtype))


def test_every_option_is_classified() -> None:
    """A new option: say in EFFECTS what it does to the bytes of a record, and here a value."""
    names = {field.name for field in fields(EngineConfig)}
    assert EFFECTS.keys() == names
    assert {name for name, effect in EFFECTS.items() if effect == "named"} == OTHER.keys()


@pytest.mark.parametrize("name", OTHER)
def test_a_named_option_is_another_namespace(name: str) -> None:
    other = made(**{name: OTHER[name]})
    assert other.namespace != made().namespace
    field = FIELDS.get(name, name)
    assert any(line.startswith(f"{field}: ") for line in made().difference(other))


@pytest.mark.parametrize("name", SAME)
def test_any_other_option_is_the_same_namespace(name: str) -> None:
    assert EFFECTS[name] != "named"
    assert getattr(EngineConfig(**{name: SAME[name]}), name) != getattr(EngineConfig(), name)
    assert made(**{name: SAME[name]}) == made()


def test_a_dtype_said_twice_is_one() -> None:
    assert made(kv_cache_dtype="bfloat16") == made()
    assert len({made(kv_cache_dtype=name).namespace for name in KV_CACHE_DTYPES}) == len(
        {kept or "bfloat16" for kept in KV_CACHE_DTYPES.values()}
    )


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("weights", replace(CONTENT, weights="files 01")),
        ("weights", replace(CONTENT, weights="parameters 00")),
        (
            "config.rope_parameters.rope_theta",
            replace(CONTENT, config={**CONTENT.config, "rope_parameters": {"rope_theta": 1e5}}),
        ),
        (
            "config.attn_logit_softcapping",
            replace(CONTENT, config={**CONTENT.config, "attn_logit_softcapping": None}),
        ),
        ("config.unheard_of", replace(CONTENT, config={**CONTENT.config, "unheard_of": 1})),
        ("code.transformers", replace(CONTENT, code={**CONTENT.code, "transformers": "5.0.1"})),
        ("code.torch", replace(CONTENT, code={**CONTENT.code, "torch": "2.13.1"})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_content_is_another_namespace(field: str, content: ModelContent) -> None:
    (line,) = made().difference(made(content))
    assert line.startswith(f"{field}: ")


def test_ranks_groups_and_formats_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own, config = made(), EngineConfig()
    window = SlidingWindow(num_kv_heads=2, head_dim=8, dtype="bfloat16", window=8)
    mixed = replace(SPEC, layers=(*SPEC.layers[:2], Layer(specs=(window,))))
    several = [
        own,
        made(rank=1, tensor_parallel_size=2),
        made(tensor_parallel_size=2),
        *(
            fingerprint_of(CONTENT, config, layout_of(spec, CONTENT.dtype, config))
            for spec in (mixed, replace(SPEC, layers=SPEC.layers[:2]))
        ),
    ]
    monkeypatch.setattr("quire.engine.kv_fingerprint.VERSION", record.VERSION + 1)
    several.append(made())
    monkeypatch.undo()
    monkeypatch.setattr("quire.engine.kv_fingerprint.ARITHMETIC", 0)
    several.append(made())
    assert len({each.namespace for each in several}) == len(several)


def test_a_config_that_is_no_text_has_no_fingerprint() -> None:
    with pytest.raises(CannotName, match=r"config\.odd is a object"):
        made(replace(CONTENT, config={"odd": object()}))


def test_transformers_own_note_of_the_option_is_not_named_twice() -> None:
    noted = replace(CONTENT, config={**CONTENT.config, "quantization_config": {"bits": 8}})
    assert made(noted, quantization="int8") == made(quantization="int8")
    assert made(noted) != made()  # a checkpoint's own


def test_a_form_of_weights_is_named_in_full() -> None:
    """Whatever ``int8`` and ``int4`` come to stand for, records are of what they were made with."""
    assert made(quantization="int8") == made(quantization="int8-g128")
    forms = (None, "int8", "int8-g32", "int8-g128-asym", "int4", "int4-g128")
    assert len({made(quantization=form).namespace for form in forms}) == len(forms)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32", "kv_cache_dtype": "int8_per_token_head", "cache": "virtual"},
        {"quantization": "int4"},
    ],
    ids=str,
)
def test_a_plan_has_the_fingerprint_of_the_engine_it_plans(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """``quire doctor`` loads no weights. In the last one a block has what fills whole pages."""
    planned = planned_fingerprint(None, EngineConfig(**options))
    with LLM(
        kv_cache_memory_bytes="16MB",
        max_model_len=64,
        kv_tier=(f"file:{tmp_path}/tier",),
        **options,
    ) as llm:
        layout = BlockLayout.of(llm.accounting, llm.engine._kv.storage)
        assert planned.fields["block_size"] == layout.block_size
        assert (layout.block_size > llm.config.block_size) == ("cache" in options)
    assert list_namespaces(tmp_path / "tier") == [planned.namespace]


def test_caches_that_tiers_cannot_serve_have_no_plan() -> None:
    for options, said in (
        (dict(cache="growing"), "cache=growing"),
        (dict(tensor_parallel_size=2), "tensor_parallel_size=1"),
        (dict(enable_prefix_caching=False), "enable_prefix_caching"),
    ):
        with pytest.raises(ConfigError, match=said):
            planned_layout(EngineConfig(**options), "model", SPEC)


def test_weights_that_are_not_here_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.kv_fingerprint.looked_at", lambda *_: ())
    with pytest.raises(CannotName, match="are not on this machine"):
        planned_fingerprint(None, EngineConfig())
