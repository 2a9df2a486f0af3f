"""Weights by shapes alone, against the models that Transformers makes of the same shapes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from quire.models.footprint import footprint
from quire.planner.parameters import parameters_of, shapes_of, widest_rows
from quire.planner.precision import uncoded
from quire.planner.subject import published_models
from quire.planner.weights import footprint_of
from quire.spec import ModelSpec
from tiny import CONFIGS, tiny_model


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_estimate_is_near_the_model_and_its_activations_are_exact(name: str) -> None:
    model = tiny_model(name)
    config = model.config.to_dict()
    spec = ModelSpec.from_config(config)
    own = footprint(model)
    counted = parameters_of(config, spec, "config.json")
    assert counted.total == sum(weight.numel() for weight in set(model.parameters()))
    weights = uncoded("float32", 4).bytes_of(counted, 4)
    shapes = shapes_of(config, spec, "config.json")
    widest = widest_rows(config, spec, "config.json")
    estimate = footprint_of(weights, shapes, widest, 4)
    assert estimate.activation_bytes(512, 4) == own.activation_bytes(512, 4)


# A part of the table on each run, and all of it in ``make test-all``: a class of each family.
NAMES = [model.name for model in published_models().models]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", NAMES)
def test_the_weights_of_a_published_model_are_those_of_its_class(name: str) -> None:
    """On torch's meta device, where a model of any size takes no memory."""
    entry = published_models().find(name)
    assert entry is not None
    config = dict(entry.config)
    # Kimi's class is DeepSeek's under a name of its own.
    model_type = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    config = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    made = AutoConfig.for_model(model_type, **config)
    # A composite's class makes a tower of default sizes where the file states none.
    if "text_config" in config and "vision_config" not in config:
        made = made.get_text_config()
    is_composite = "vision_config" in config
    kind = AutoModelForImageTextToText if is_composite else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(made)
    spec = ModelSpec.from_config(entry.config)
    counted = parameters_of(entry.config, spec, name)
    own = sum(weight.numel() for weight in set(model.parameters()))
    assert counted.total == pytest.approx(own, rel=1e-3)


def test_the_parts_of_a_mixture_are_those_of_its_class() -> None:
    model = tiny_model("deepseek_v3")
    config = model.config.to_dict()
    counted = parameters_of(config, ModelSpec.from_config(config), "config.json")
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}

    def of(word: str) -> int:
        return sum(size for name, size in sizes.items() if word in name and "norm" not in name)

    assert counted.experts == of(".experts.")
    assert counted.attention == of("self_attn")
    assert counted.table == counted.head == of("embed_tokens") == of("lm_head")
    assert counted.dense == of(".mlp.") - of(".experts.") - of(".mlp.gate.")


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
    tied = parameters_of({**config, "tie_word_embeddings": True}, spec, "config.json").total
    assert parameters_of(config, spec, "config.json").total == tied + 64_000
    # 2 × (4 matrices of attention, 3 of the layer behind), a table, five norms
    assert tied == 2 * (4 * 64 * 64 + 3 * 64 * 128) + 64_000 + 5 * 64
