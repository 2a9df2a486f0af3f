"""Quantized checkpoints: the bits of a weight by each method's own fields, and which weights."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.planner.parameters import WeightParts
from quire.planner.precision import NAMED, named, precision_of, unread_method

PARTS = WeightParts(table=1000, head=1000, attention=800, dense=1600, experts=32_000, small=10)


def compressed(bits: int, kind: str, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, **others}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize(
    ("said", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "awq", "bits": 4}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
        (compressed(8, "float", strategy="channel"), 8),
        (compressed(4, "int", group_size=32, symmetric=True), 4 + 16 / 32),
        (compressed(4, "int", group_size=32, symmetric=False), 4 + 20 / 32),
        (compressed(4, "float", group_size=16), 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
    ],
)
def test_the_bits_are_those_of_the_method(said: dict[str, Any], bits: float) -> None:
    found = precision_of({"quantization_config": said})
    assert found is not None
    assert found.bits == pytest.approx(bits)
    sizes = found.bytes_of(PARTS, 2)
    assert (sizes.table, sizes.head, sizes.small) == (2000, 2000, 20)
    assert sizes.experts == int(32_000 * bits / 8)
    assert sizes.attention == int(800 * bits / 8)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "of its own"},
        {"quant_method": ["fp8"]},
        compressed(0, "int"),
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": []}},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {},
    ],
)
def test_a_method_that_cannot_be_read_is_named(said: dict[str, Any]) -> None:
    config = {"quantization_config": said}
    assert precision_of(config) is None
    assert (unread_method(config) is not None) == bool(said)


def test_nothing_is_coded_without_the_field() -> None:
    assert precision_of({}) is None
    assert unread_method({"quantization_config": "nonsense"}) is None


def test_modules_of_all_layers_that_are_excluded_stay_as_they_are() -> None:
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    said = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    sizes = precision_of({"quantization_config": said}).bytes_of(PARTS, 2)  # type: ignore[union-attr]
    assert sizes.attention == 1600
    assert sizes.experts == 32_000 * 4.25 / 8
    assert sizes.dense == 1600 * 4.25 / 8
    # A layer named by its number is an exception, and too small to count.
    some = {**said, "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}
    assert precision_of({"quantization_config": some}).codes_attention  # type: ignore[union-attr]


def test_products_are_as_narrow_as_activations() -> None:
    def computes(said: dict[str, Any]) -> int:
        found = precision_of({"quantization_config": said})
        assert found is not None
        return found.computes_in_bits

    assert computes({"quant_method": "fp8"}) == 8
    assert computes({"quant_method": "awq", "bits": 4}) == 16
    weights = {"num_bits": 8, "type": "float"}
    group = {"weights": weights, "input_activations": {"num_bits": 8, "type": "float"}}
    both = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    assert computes(both) == 8
    assert computes(compressed(8, "float")) == 16


def test_a_precision_of_no_known_name_is_refused() -> None:
    assert named("fp8") is NAMED["fp8"]
    with pytest.raises(ConfigError, match=r"--weights 'fp7'.*published, bfloat16, fp8"):
        named("fp7")


nested = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = ("bits", "group_size", "config_groups", "weight_block_size", "quant_algo", "ignore")


@given(
    method=st.sampled_from(["fp8", "gptq", "compressed-tensors", "modelopt", "bitsandbytes", 7]),
    fields=st.dictionaries(st.sampled_from(FIELDS), nested),
)
def test_no_file_makes_a_traceback(method: object, fields: dict[str, Any]) -> None:
    found = precision_of({"quantization_config": {"quant_method": method, **fields}})
    assert found is None or 1 <= found.bits <= 100
