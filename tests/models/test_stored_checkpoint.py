"""Checkpoints that other tools quantized: loaded with the very numbers of their files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quire
from layers.stored import METHODS, Stored, store
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.kv_fingerprint import planned_fingerprint
from quire.errors import ConfigError, ModelNotLoadable
from quire.layers.packed_linear import PackedLinear
from quire.models.loader import load

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
                "weights": {"num_bits": 4, "group_size": 32, "symmetric": False},
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


def test_what_is_refused(tmp_path: Path) -> None:
    stored = written(tmp_path, "gptq")
    with pytest.raises(ConfigError, match=r"quantized already, .* leave the option out"):
        load(tmp_path, quantization="int8")
    where = sorted(stored)[0]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{where}.g_idx"] = tensors[f"{where}.g_idx"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotLoadable, match=rf"{where} cannot be read as gptq: .*act-order"):
        load(tmp_path)
