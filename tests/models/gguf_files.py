"""GGUF files of tiny models, as llama.cpp's conversion scripts write them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, dequantize, get_tensor_name_map
from gguf.quants import quantize
from torch import Tensor
from transformers import PreTrainedModel

# ggml's names of the classes that are read.
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str = "Q8_0",
    *,
    others: Mapping[str, str] | None = None,
    divisors: Tensor | None = None,
    tokenizer: Any = None,
    **fields: Any,
) -> None:
    """Write a model's matrices in ``kind``, those named in ``others`` otherwise, all else in F32.

    ``divisors`` are of rotary frequencies; a ``tokenizer`` is one of bytes.
    The model's own weights become the file's very numbers. ``fields`` stand in the header besides,
    without their architecture; those that are None do not.
    """
    config = model.config
    architecture = MODEL_ARCH[ARCHITECTURES[config.model_type]]
    name = ARCHITECTURES[config.model_type].lower()
    writer = GGUFWriter(path, name)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    rope = config.rope_parameters
    said: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if name != "phi3":
        said |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    else:
        said["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1))
        said["attention.sliding_window"] = config.sliding_window or 0
    if name in ("gemma2", "gemma3"):
        said["attention.sliding_window"] = config.sliding_window
    if name == "gemma2":
        said["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        said["final_logit_softcapping"] = float(config.final_logit_softcapping)
    for key, value in {**said, **fields}.items():
        if value is None:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{name}.{key}", value)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(own, (".weight", ".bias"))
        as_kind = (others or {}).get(stored, kind if tensor.dim() > 1 else "F32")
        _write(writer, stored, own, tensor, as_kind, config, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write(
    writer: GGUFWriter, stored: str, own: str, tensor: Tensor, kind: str, config: Any, name: str
) -> None:
    weight = tensor.detach().clone()
    heads = 0
    if name == "llama" and own.split(".")[-2] in ("q_proj", "k_proj"):
        is_query = ".q_proj." in own
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
    if heads:
        weight = weight.view(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if name.startswith("gemma") and "norm" in own.split(".")[-2]:
        weight = weight + 1
    number = GGMLQuantizationType[kind]
    data = quantize(weight.numpy().astype(np.float32), number)
    writer.add_tensor(stored, data, raw_dtype=number)
    # What the file has, back in the model.
    there = torch.from_numpy(dequantize(data, number)).view(weight.shape)
    if name.startswith("gemma") and "norm" in own.split(".")[-2]:
        there = there - 1
    if heads:
        there = there.view(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    with torch.no_grad():
        tensor.copy_(there)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Any) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
