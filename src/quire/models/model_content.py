"""What a model computes by, as its content says it: weights, configuration and code.

Names and revisions are not asked: a folder's files may be others tomorrow. A model that only the
engine has is named by its files' hashes, any other one by its parameters. What cannot be named is
refused, for records under a wrong name would be read as another model's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
import transformers
from torch import Tensor

from quire.layers.watch import WeightsWatch
from quire.models.file_hashes import CannotName, file_hashes
from quire.models.loader import LoadedModel

# Fields of a config, at any depth, that say where it comes from, or that have fields of their own.
NOT_NAMED = frozenset({"_name_or_path", "name_or_path", "transformers_version", "dtype"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContent:
    """What tells a model's arithmetic from all others."""

    weights: str  # "files" or "parameters", and a SHA-256
    config: Mapping[str, Any]  # of Transformers, without what ``NOT_NAMED`` lists
    dtype: str  # of the weights, as a spec spells it
    code: Mapping[str, str]  # releases of the libraries that compute, by name


def model_content(loaded: LoadedModel) -> ModelContent:
    """Name a loaded model by its content. Raises: CannotName."""
    if loaded.files and (loaded.is_private or loaded.ranks is not None):
        weights = f"files {_digest(file_hashes(loaded.files))}"
    else:
        weights = f"parameters {_of_parameters(loaded)}"
    return ModelContent(
        weights=weights,
        config=named_config(loaded.model.config),
        dtype=loaded.dtype,
        code=_code(),
    )


def named_config(config: Any) -> dict[str, Any]:
    """Return the fields of a Transformers config that may shape what a model computes."""
    named = _without(config.to_dict())
    assert isinstance(named, dict)
    return named


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without(each) for name, each in value.items() if name not in NOT_NAMED}
    if isinstance(value, list | tuple):
        return [_without(each) for each in value]
    return value


def _code() -> dict[str, str]:
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],  # without the build: "+cpu"
    }


def _of_parameters(loaded: LoadedModel) -> str:
    watch = WeightsWatch(loaded.model)
    if watch.is_heard:
        raise CannotName(f"{loaded.name} has hooks, or a forward function of its own")
    digests = {}
    tensors = {**dict(loaded.model.named_parameters()), **dict(loaded.model.named_buffers())}
    for name, tensor in tensors.items():
        digests[name] = _of_tensor(name, tensor)
    return _digest(digests)


def _of_tensor(name: str, tensor: Tensor) -> str:
    tensor = tensor.detach()
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_sparse:
        raise CannotName(f"{name} is a {type(tensor).__name__} on {tensor.device}")
    flat = tensor.cpu().contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return f"{tensor.dtype} {tuple(tensor.shape)} {sha256(data).hexdigest()}"


def _digest(digests: Mapping[str, str]) -> str:
    return sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
