"""A loaded model's linear layers exchanged for layers of 8 or 4 bits.

What is left in its dtype: tables of tokens and the output head, norms, routers and other small
layers, experts that are one tensor, parts for images and sound, and what attention to latents reads
as a matrix.
"""

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.errors import MemoryUnavailable, ModelNotLoadable
from quire.kernels.compile import usable_isa
from quire.layers.cpu import CpuLinear
from quire.layers.cpu.packed_weight import BLOCK, PackedForm
from quire.layers.packed_linear import PackedLinear
from quire.memory.host.huge_pages import drop_file_pages, huge_pieces
from quire.memory.machine.probe import mapped_from_files
from quire.spec.module_names import is_of_tower
from quire.spec.weight_forms import WeightForm
from quire.units import format_bytes

log = logging.getLogger(__name__)

_READ_AS_MATRIX = frozenset({"kv_b_proj"})  # ``executors.latent`` takes it apart
_READS_WEIGHT = re.compile(r"\.(\w+)\.weight\b")  # of a layer by its name, in a class's code
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


def quantize_layers(
    model: PreTrainedModel, form: WeightForm, name: str, kernel_dir: Path | None = None
) -> None:
    """Replace a model's linear layers by packed ones, in place, layer by layer.

    ``kernel_dir`` keeps machine code; None: ~/.cache/quire.
    Raises: ModelNotLoadable naming a layer whose weights are no finite numbers.
    """
    begun = perf_counter()
    packed_form = PackedForm(bits=form.bits, group_size=form.group_size, has_zeros=form.has_zeros)
    quantizer = CpuLinear(kernel_dir=kernel_dir).quantizer(packed_form)
    chosen = dict(quantizable(model))
    shapes = [packed_form.shape(m.out_features, m.in_features) for m in chosen.values()]
    places = pieces([blocks * groups * size for blocks, groups, size in shapes])
    before = after = 0
    for (where, layer), place in zip(chosen.items(), places, strict=True):
        weight = layer.weight.detach()
        try:
            packed = quantizer(weight, place)
        except ValueError as error:
            raise ModelNotLoadable(f"{name}: {where} cannot be quantized: {error}") from None
        before, after = before + weight.nbytes, after + packed.data.nbytes
        bias = None if layer.bias is None else layer.bias.detach()
        put(model, where, PackedLinear(packed, bias, weight.dtype))
        if weight.is_contiguous() and mapped_from_files([weight.data_ptr()]):
            drop_file_pages(weight.data_ptr(), weight.nbytes)
    log.info(
        "%d linear layers of %s in %s: %s instead of %s, made in %.1f s",
        len(chosen), name, form.name, format_bytes(after), format_bytes(before),
        perf_counter() - begun,
    )  # fmt: skip


def round_inputs(model: nn.Module) -> None:
    """Have a model's packed layers multiply with inputs of 8 bits, where this CPU does that.

    Layers in float32 do not: what is asked for there is exact.
    """
    if not usable_isa().byte_dot:
        return
    for module in model.modules():
        if isinstance(module, PackedLinear) and module.dtype != torch.float32:
            module.rounds_inputs = True


def rounds_inputs(model: nn.Module) -> bool:
    """Tell whether one of a model's layers does."""
    return any(isinstance(m, PackedLinear) and m.rounds_inputs for m in model.modules())


def quantizable(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """List the linear layers that are quantized, by their names."""
    head = model.get_output_embeddings()
    left = _READ_AS_MATRIX | _ROUTERS | _read_by_code(model)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module is head:
            continue
        parts = name.split(".")
        if is_of_tower(parts) or parts[-1] in left or module.out_features < BLOCK:
            continue
        if module.weight.device.type == "cpu":
            yield name, module


def _read_by_code(model: PreTrainedModel) -> frozenset[str]:
    """Names of layers whose weights a class reads itself, as Mamba's and T5's do."""
    found: set[str] = set()
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.partition(".")[0] == "torch":
            continue
        with suppress(OSError, TypeError):  # it was not read from a file
            found.update(_READS_WEIGHT.findall(inspect.getsource(kind)))
    return frozenset(found)


def put(model: nn.Module, where: str, layer: nn.Module) -> None:
    """Put a layer in the place of another, by its name with dots."""
    parent, _, own = where.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


def pieces(sizes: list[int]) -> list[Tensor]:
    """Make memory of these sizes, u8[bytes] each, in huge pages where there are some."""
    try:
        return huge_pieces(sizes) if sizes else []
    except MemoryUnavailable:
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]
