"""Checkpoints that other tools quantized: loaded with the very numbers of their files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

import quire
from layers.stored import METHODS, Stored, store
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.kv_fingerprint import planned_fingerprint
from quire.errors import ConfigError, ModelNotLoadable
from quire.layers.packed_linear import PackedLinear
from quire.models.footprint import footprint
from quire.models.loader import load
from quire.models.stored_checkpoint import StoredConfig, stored_config
from quire.planner.subject import find_subject

DEMO = Path(quire.__file__).parent / "demo_model"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = "def fibonacci(n):\n"
SAID: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "group_size": 32},
                "input_activations": None,
            }
        },
    },
}


def written(folder: Path, method: str, **said: Any) -> dict[str, Stored]:
    """The demo model with any codes in its linear layers, as a tool would have left it."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    found = {}
    for n, name in enumerate(sorted(tensors)):
        where = name.removesuffix(".weight")
        if where.endswith("_proj"):
            outputs, inputs = tensors.pop(name).shape
            found[where] = store(
                method, outputs, inputs, 32,
                bits=4, is_symmetric=n % 2 == 0, dtype=torch.float16, zeros_less=1, seed=n,
                scale=0.01,
            )  # fmt: skip
            own = found[where].tensors
            tensors |= {f"{where}.{each}": tensor.contiguous() for each, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **SAID[method], **said}
    (folder / "config.json").write_text(json.dumps(config))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_its_numbers_are_those_of_the_file_and_so_are_its_tokens(
    method: str, tmp_path: Path
) -> None:
    stored = written(tmp_path, method)
    twin = load(dtype="float32")
    for where, each in stored.items():
        twin.model.get_submodule(where).weight.data = each.weight
    with LLM(str(tmp_path), dtype="float32", kv_cache_memory_bytes="16MiB") as llm:
        (completion,) = llm.generate(PROMPT, GREEDY)
    ids = twin.tokenizer(PROMPT, return_tensors="pt")
    out = twin.model.generate(**ids, do_sample=False, max_new_tokens=12, min_new_tokens=12)
    assert list(completion.token_ids) == out[0, ids["input_ids"].shape[1] :].tolist()
    layers = {n: m for n, m in load(tmp_path).model.named_modules() if isinstance(m, PackedLinear)}
    assert layers.keys() == stored.keys()
    for where, layer in layers.items():
        assert layer.dtype == torch.bfloat16
        assert torch.equal(layer.packed_weight.dequantized(), stored[where].weight)


def test_a_plan_has_the_fingerprint_of_the_engine_it_plans(tmp_path: Path) -> None:
    written(tmp_path / "model", "gptq")
    planned = planned_fingerprint(tmp_path / "model", EngineConfig())
    with LLM(str(tmp_path / "model"), kv_cache_memory_bytes="16MiB") as llm:
        assert llm.fingerprint().namespace == planned.namespace


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("method", METHODS)
def test_it_takes_what_is_planned(method: str, dtype: str, tmp_path: Path) -> None:
    """But for the form of zeros, and the order of inputs, which is not kept."""
    written(tmp_path, method)
    planned, weighed = (
        find_subject(str(tmp_path), dtype=dtype).own,
        footprint(load(tmp_path, dtype=dtype).model),
    )
    assert planned.weights_bytes == pytest.approx(weighed.weights_bytes, rel=0.02)
    assert planned.widest_rows == weighed.widest_rows


def test_rotated_inputs_are_left_to_transformers() -> None:
    """Which wants a package for them."""
    said = {"quant_method": "compressed-tensors", **SAID["compressed-tensors"]}
    for transforms, is_ours in (
        ({}, True), ({"config_groups": {}}, True),
        ({"config_groups": {"R4": {"type": "hadamard", "apply": []}}}, False),
    ):  # fmt: skip
        config = PreTrainedConfig(quantization_config={**said, "transform_config": transforms})
        assert (stored_config(config) is not None) == is_ours


def test_sizes_of_groups_are_read_wherever_they_are_said() -> None:
    weights = {"num_bits": 4, "group_size": 64}
    published = {
        "quant_method": "gptq", "group_size": 128, "config_groups": {"a": {"weights": weights}},
        "dynamic": {"-:lm_head": {}, "+:.*down.*": {"group_size": 32}},
    }  # fmt: skip
    assert StoredConfig(published).group_sizes == {128, 64, 32}
    for wrong in (None, 3, "many", [], {"a": 7}, {"a": {"weights": 3}}):
        odd = {"quant_method": "gptq", "group_size": -1, "config_groups": wrong, "dynamic": wrong}
        assert StoredConfig(odd).group_sizes == set()


def test_ranks_do_not_divide_them(tmp_path: Path) -> None:
    written(tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: .* are codes \(awq\)"):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=2)


def test_what_is_refused(tmp_path: Path) -> None:
    stored = written(tmp_path, "gptq")
    with pytest.raises(ConfigError, match=r"quantized already, .* leave the option out"):
        load(tmp_path, quantization="int8")
    where = sorted(stored)[0]
    tensors = load_file(tmp_path / "model.safetensors")
    codes = {f"lm_head.{name}": each for name, each in stored[where].tensors.items()}
    save_file(tensors | codes, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotLoadable, match=r"lm_head has codes, .*tie_word_embeddings"):
        load(tmp_path)
    tensors[f"{where}.g_idx"] = tensors[f"{where}.g_idx"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotLoadable, match=rf"{where} cannot be read as gptq: .*act-order"):
        load(tmp_path)


def test_zeros_that_are_missing_are_named(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "group_size": 32, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    stored = written(tmp_path, "compressed-tensors", config_groups=groups)
    assert any(not each.zeros.any() for each in stored.values())
    with pytest.raises(ModelNotLoadable, match="there is no weight_zero_point, and it is not sym"):
        load(tmp_path)
    several = {**groups, "group_1": {"weights": {**weights, "symmetric": True}}}
    written(tmp_path, "compressed-tensors", config_groups=several)
    assert load(tmp_path).dtype == "bfloat16"  # it may be of either group
