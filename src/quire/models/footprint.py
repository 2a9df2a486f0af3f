"""A model's own bytes, of its tensors: weights, and the sizes that a step's results follow from.

Weights are counted by storage, so tied ones count once. ``outline`` makes the model on torch's meta
device, where a tensor has a shape and no memory: a config.json is all it needs.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from quire.layers.packed_linear import PackedLinear
from quire.memory.budget import Footprint
from quire.memory.machine.probe import mapped_from_files
from quire.models.loader import outline_of, read_config
from quire.models.weight_placement import device_of
from quire.spec import ModelSpec
from quire.spec.model_files import called, find_folder


def footprint(model: PreTrainedModel) -> Footprint:
    """Measure a model in memory, or on the meta device: what lies where it computes."""
    parameters = [*model.parameters()]  # walked once: half a millisecond in a model of 0.1 B
    weights_bytes, counted_bytes = _weighed(device_of(model), (*parameters, *model.buffers()))
    config = model.config.get_text_config()
    hidden, vocab, experts = (
        getattr(config, name, None) or 1
        for name in ("hidden_size", "vocab_size", "num_experts_per_tok")
    )
    weights = [p for p in parameters if p.ndim >= 2 and vocab not in p.shape[-2:]]
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    widest = [max(m.in_features, m.out_features) for m in packed]
    widest += [_widest(p) * (experts if p.ndim > 2 else 1) for p in weights]
    return Footprint(
        weights_bytes=weights_bytes,
        counted_bytes=counted_bytes,
        hidden_size=hidden,
        widest_rows=max(widest, default=0),
        vocab_size=vocab,
        item_bytes=model.dtype.itemsize,
    )


def weights_of(model: PreTrainedModel) -> tuple[int, int]:
    """Count the bytes of what lies where the model computes, and of these the used memory."""
    return _weighed(device_of(model), (*model.parameters(), *model.buffers()))


def _weighed(device: torch.device, every: Iterable[Tensor]) -> tuple[int, int]:
    own = (part.untyped_storage() for t in every if t.device == device for part in _parts(t))
    # Those on the meta device have no address to tell them apart by.
    storages = {storage._cdata: storage for storage in own}
    sizes = [(storage.data_ptr(), storage.nbytes()) for storage in storages.values()]
    on_files = mapped_from_files(address for address, _ in sizes if address)
    counted = (size for address, size in sizes if address and address not in on_files)
    return sum(size for _, size in sizes), sum(counted)


def outline(
    name: str | Path | None = None, *, dtype: str = "auto"
) -> tuple[str, Footprint, ModelSpec]:
    """Return a folder's or a hub name's footprint and memory, its weights left where they are.

    Raises: ModelNotLoadable, UnsupportedModel.
    """
    model, spec = outlined(name, dtype=dtype)
    dtype_name = str(model.dtype).removeprefix("torch.")
    return called(name), footprint(model), spec.computed_in(dtype_name)


def outlined(name: str | Path | None, *, dtype: str = "auto") -> tuple[PreTrainedModel, ModelSpec]:
    """Make a folder's or a hub name's model without memory. Raises: as ``outline``."""
    folder = find_folder(name)
    config, spec = read_config(str(folder or name), folder)
    wanted = getattr(torch, spec.dtype if dtype == "auto" else dtype)
    return outline_of(config, wanted), spec


def _widest(weight: Tensor) -> int:
    """Of the part that this process has, where a weight is divided."""
    return max(max((part.shape[-2:]), default=0) for part in _parts(weight)[:1])


def _parts(tensor: Tensor) -> list[Tensor]:
    """What a tensor is made of: itself, the codes and scales of a quantized one, a rank's part."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inside = [getattr(tensor, name) for name in names]  # of a rank's part its mesh too
    return [part for each in inside if isinstance(each, Tensor) for part in _parts(each)]
