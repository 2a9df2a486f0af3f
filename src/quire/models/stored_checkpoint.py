"""Checkpoints in 8 and 4 bits that other tools made: loaded by Transformers, and repacked.

Transformers lets a package add a quantizer under a name of its own. Ours puts modules with the
file's tensors in the place of linear layers before the weights are loaded, and packed layers in
theirs afterwards. What it does not know is left to Transformers' own.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import (
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from quire.layers.packed_linear import PackedLinear
from quire.layers.stored_weights import STORED_NAMES, read_stored, stored_bits
from quire.models.quantized import put

_NAME = "quire"
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "I32": torch.int32,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
    }
)


class StoredConfig(QuantizationConfigMixin):
    """What a checkpoint's config.json says of its weights, under our name."""

    def __init__(self, published: Mapping[str, Any], quant_method: str = _NAME) -> None:
        self.quant_method = quant_method
        self.published = dict(published)

    @property
    def method(self) -> str:
        """One of ``STORED_NAMES``."""
        return str(self.published["quant_method"])

    @property
    def zeros_less(self) -> int:
        """By how much zeros that GPTQ stores are too small: one, but for its second form."""
        return 0 if self.published.get("checkpoint_format") == "gptq_v2" else 1

    @property
    def needs_zeros(self) -> bool:
        """Tell whether all codes of compressed-tensors have zeros, which it leaves out else."""
        said = [weights.get("symmetric", True) for weights in self._of_groups]
        return self.method == "compressed-tensors" and bool(said) and not any(said)

    @property
    def group_sizes(self) -> frozenset[int]:
        """Those that it speaks of: some layers may have another than the others."""
        said = [self.published, *_mappings(self.published.get("dynamic")), *self._of_groups]
        sizes = [each.get("group_size") for each in said]
        return frozenset(size for size in sizes if type(size) is int and size > 0)

    @property
    def _of_groups(self) -> list[Mapping[str, Any]]:
        """What compressed-tensors says of the weights of each group of modules."""
        groups = _mappings(self.published.get("config_groups"))
        return _mappings([group.get("weights") for group in groups])


def stored_config(config: Any) -> dict[str, Any] | None:
    """Return what has Transformers load a config's weights by our quantizer.

    None for weights that are not stored in a form which is repacked here.
    """
    said = getattr(config, "quantization_config", None)
    if not isinstance(said, dict) or said.get("quant_method") not in STORED_NAMES:
        return None
    method = said["quant_method"]
    if method == "awq" and str(said.get("version", "gemm")).lower() != "gemm":
        return None
    if method == "compressed-tensors" and not _packs_weights_alone(said):
        return None
    _register()
    return {"quant_method": _NAME, "published": said}


def _packs_weights_alone(said: Mapping[str, Any]) -> bool:
    groups, transforms = said.get("config_groups"), said.get("transform_config")
    if said.get("format") != "pack-quantized" or not isinstance(groups, dict):
        return False
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        return False  # inputs are rotated before they are multiplied
    return all(
        isinstance(group, dict)
        and group.get("input_activations") is None
        and group.get("output_activations") is None
        for group in groups.values()
    )


def _mappings(several: Any) -> list[Mapping[str, Any]]:
    """Those of a mapping's or a list's values that are mappings themselves."""
    if isinstance(several, dict):
        several = [*several.values()]
    return [each for each in several if isinstance(each, dict)] if type(several) is list else []


@cache
def _register() -> None:
    """Add our quantizer to those that Transformers knows, under our name."""
    register_quantization_config(_NAME)(StoredConfig)
    register_quantizer(_NAME)(StoredQuantizer)


class StoredLinear(nn.Module):
    """Stands for a linear layer while its tensors are loaded, under the file's names."""

    def __init__(self, layer: nn.Linear, tensors: Mapping[str, tuple[torch.dtype, list[int]]]):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        for name, (dtype, shape) in tensors.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = layer.bias


class StoredQuantizer(HfQuantizer):
    """Takes checkpoints of ``STORED_NAMES``."""

    quantization_config: StoredConfig

    @property
    def is_trainable(self) -> bool:
        """Tell that whole numbers are not trained."""
        return False

    def is_serializable(self) -> bool:
        """Tell that what was repacked is not written again."""
        return False

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Sequence[str] | None = None,
        **_: Any,
    ) -> None:
        known = STORED_NAMES[self.quantization_config.method]
        stored = _tensors(checkpoint_files or (), known)
        head = model.get_output_embeddings()
        for where, layer in [*model.named_modules()]:
            if isinstance(layer, nn.Linear) and where in stored:
                if layer is head and model.config.get_text_config().tie_word_embeddings:
                    raise ValueError(
                        f"{where} has codes, and config.json says that it is the table of tokens "
                        f"(tie_word_embeddings)"
                    )
                put(model, where, StoredLinear(layer, stored[where]))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config = self.quantization_config
        for where, layer in [*model.named_modules()]:
            if not isinstance(layer, StoredLinear):
                continue
            tensors = {
                name: parameter.data
                for name, parameter in layer.named_parameters()
                if name != "bias"
            }
            try:
                if config.needs_zeros and "weight_zero_point" not in tensors:
                    raise ValueError("there is no weight_zero_point, and it is not symmetric")
                packed = read_stored(
                    config.method,
                    tensors,
                    bits=stored_bits(config.method, tensors, layer.out_features, layer.in_features),
                    zeros_less=config.zeros_less,
                    group_sizes=config.group_sizes,
                )
                if packed.shape != (layer.out_features, layer.in_features):
                    raise ValueError(f"its weight is {packed.shape}")
            except ValueError as error:
                raise ValueError(f"{where} cannot be read as {config.method}: {error}") from None
            bias = None if layer.bias is None else layer.bias.data
            put(model, where, PackedLinear(packed, bias, model.dtype))
        # As it was: what a model's content is named by.
        model.config.quantization_config = config.published


def _tensors(
    files: Sequence[str], known: Sequence[str]
) -> dict[str, dict[str, tuple[torch.dtype, list[int]]]]:
    """Return the dtype and shape of each layer's tensors, by the layer's name and theirs."""
    found: dict[str, dict[str, tuple[torch.dtype, list[int]]]] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"{Path(file).name} is no safetensors file")
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                where, _, own = name.rpartition(".")
                if own in known:
                    part = opened.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise ValueError(f"{name} is in {part.get_dtype()}")
                    found.setdefault(where, {})[own] = dtype, part.get_shape()
    return found
