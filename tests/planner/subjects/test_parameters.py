"""Weights by shapes alone, against the models that Transformers makes of the same shapes."""

from __future__ import annotations

import pytest

from quire.models.footprint import footprint
from quire.planner.weights import estimated_footprint, num_parameters, shapes_of
from quire.spec import ModelSpec
from tiny import CONFIGS, tiny_model


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_estimate_is_near_the_model_and_its_activations_are_exact(name: str) -> None:
    model = tiny_model(name)
    config = model.config.to_dict()
    spec = ModelSpec.from_config(config)
    own = footprint(model)
    estimate = estimated_footprint(config, spec, "config.json", 4)
    assert estimate.weights_bytes == pytest.approx(own.weights_bytes, rel=0.03)
    assert estimate.activation_bytes(512, 4) == own.activation_bytes(512, 4)


@pytest.mark.parametrize(
    ("said", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "awq", "bits": 4}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": "four"}, None),
        ({"quant_method": "of its own"}, None),
        ("nonsense", None),
    ],
)
def test_a_quantized_checkpoint_has_fewer_bytes(said: object, bits: float | None) -> None:
    config = CONFIGS["llama"]().to_dict()
    spec = ModelSpec.from_config(config)
    plain = estimated_footprint(config, spec, "config.json", 2).weights_bytes
    coded = estimated_footprint(
        {**config, "quantization_config": said}, spec, "config.json", 2
    ).weights_bytes
    shapes = shapes_of(config, spec, "config.json")
    tables = 2 * shapes.num_in_tables
    assert coded == (plain if bits is None else tables + int((plain - tables) * bits / 16))


def test_a_head_of_its_own_counts() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
    }
    spec = ModelSpec.from_config(config)
    tied = num_parameters({**config, "tie_word_embeddings": True}, spec, "config.json")
    assert num_parameters(config, spec, "config.json") == tied + 64_000
    # 2 × (4 matrices of attention, 3 of the layer behind), a table, five norms
    assert tied == 2 * (4 * 64 * 64 + 3 * 64 * 128) + 64_000 + 5 * 64
