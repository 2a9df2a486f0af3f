"""A model's weights on a GPU: all of them, or as many as there is room for.

What a GPU has no room for stays in host memory and is brought over for each pass, layer by layer:
Accelerate does that, and decides which layers. Every layer computes on the GPU all the same, so its
keys and values lie there too. Several GPUs are not for the layers of one model to be spread over.
"""

import logging
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from quire.errors import ConfigError, ModelNotLoadable
from quire.memory.machine.probe import available_bytes
from quire.units import format_bytes

log = logging.getLogger(__name__)

# Of what is free, a part is for activations and a cache: without, the weights would be of no use.
_FOR_WEIGHTS = 0.9  # if all fit
_FOR_SOME = 0.7  # if only some do: they are slow enough, so that what is read each step has room


def device_map(source: str, weights_bytes: int, device: torch.device) -> dict[str, Any]:
    """Choose what Transformers is told when it loads; nothing if all weights have room.

    Raises: ConfigError where some have none, and Accelerate, which would bring them over, is not
    installed.
    """
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if weights_bytes <= _FOR_WEIGHTS * free_bytes:
        return {}
    told = (
        f"the weights of {source} take {format_bytes(weights_bytes)}, and {device} has "
        f"{format_bytes(free_bytes)} free"
    )
    if find_spec("accelerate") is None:
        raise ConfigError(
            f"{told}: free some, take fewer bits (dtype, quantization), keep a part in host memory "
            f"(pip install 'quire-kv[offload]'), or choose device=cpu"
        )
    on_device = int(_FOR_SOME * free_bytes)
    log.warning(
        "%s: %s are kept there, the others in host memory, and are brought over for every step, "
        "which is slow",
        told,
        format_bytes(on_device),
    )
    most = {device.index or 0: on_device, "cpu": available_bytes()}
    return {"device_map": "auto", "max_memory": most}


def weights_bytes(model: PreTrainedModel) -> int:
    """Count the bytes of a model in memory, or on the meta device; tied weights count once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def move_to(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Bring all weights there, unless Accelerate has placed them.

    Raises: ModelNotLoadable where there is no room after all.
    """
    if getattr(model, "hf_device_map", None):
        return model
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelNotLoadable(
            f"{device} has no room for {format_bytes(weights_bytes(model))} of weights: {error}"
        ) from error


def device_of(model: PreTrainedModel) -> torch.device:
    """Find where a model computes.

    Raises: ConfigError for one whose layers do so in several places.
    """
    placed: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    computing = {device for where in placed.values() if (device := _device(where)) is not None}
    if len(computing) > 1:
        raise ConfigError(
            f"{type(model).__name__} is spread over {', '.join(sorted(map(str, computing)))}: load "
            f"it on one GPU, or with tensor_parallel_size"
        )
    own: torch.device = model.device
    return next(iter(computing), own)


def is_offloaded(model: PreTrainedModel) -> bool:
    """Tell whether some weights are brought over for each pass."""
    placed: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    several = {_device(where) for where in placed.values()}
    return None in several and len(several) > 1


def _device(where: Any) -> torch.device | None:
    """A GPU; None for what waits elsewhere."""
    if isinstance(where, int):
        return torch.device("cuda", where)
    device = None if where == "disk" else torch.device(where)
    if device is None or device.type == "cpu":
        return None
    return torch.device(device.type, device.index or 0)
