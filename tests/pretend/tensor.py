"""Tensors that say they are on CUDA, and the rules of an operation between them.

An operation is computed on the CPU tensors that lie inside. Where a graph is captured, nothing of
what exists is written to, as on a GPU: the operation is noted, and computed at each replay. (On
memory of the graph's own it is computed too, so that an index is one.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pretend.runtime import Gpu

aten = torch.ops.aten
UNDERNEATH = "privateuseone"  # what torch takes them for, where it does not ask Python
FAR = 1 << 62  # added to addresses: a CPU that reads there crashes

# The host has to know what came out before it can go on.
_WAITS = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose),
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount),
}
_COUNTED = {aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_NESTS = (tuple, list)
_UNKNOWN = {aten.set_, aten.resize_, aten.transpose_, aten.squeeze_, aten.unsqueeze_}


def leaves_of(tree: Any) -> list[Any]:
    """All that lies in tuples, lists and dicts, one inside the other."""
    found, rest = [], [tree]
    while rest:
        each = rest.pop()
        if isinstance(each, _NESTS):
            rest.extend(reversed(each))
        elif isinstance(each, dict):
            rest.extend(reversed(each.values()))
        else:
            found.append(each)
    return found


def with_each(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """The same tuples, lists and dicts, with what ``change`` makes of each leaf of a kind."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, _NESTS):
        return type(tree)([with_each(kind, change, each) for each in tree])
    if isinstance(tree, dict):
        return {key: with_each(kind, change, each) for key, each in tree.items()}
    return tree


class PretendTensor(Tensor):
    """On a device that is not there. ``inner`` is where its values are."""

    inner: Tensor
    gpu: Gpu
    _device: torch.device
    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: Gpu, device: torch.device) -> PretendTensor:
        with torch.inference_mode(False):  # a view of what was made outside counts its versions
            made: PretendTensor = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device(UNDERNEATH, device.index or 0),
            )
        made.inner, made.gpu, made._device = inner, gpu, torch.device("cuda", device.index or 0)
        return made

    def __init__(self, *_: Any) -> None:
        """All is done."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, PretendTensor) for kind in types):
            return NotImplemented  # such as a DTensor: it comes back with what lies in it
        gpu = next(x.gpu for x in leaves_of((args, kwargs)) if isinstance(x, PretendTensor))
        return compute(gpu, func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr() + FAR

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        return torch.nn.Parameter(copied, False) if isinstance(self, torch.nn.Parameter) else copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"pretend({self.inner!r})"


def compute(gpu: Gpu, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives. Raises: RuntimeError for what a GPU refuses."""
    packet = func.overloadpacket
    if packet is aten.to:  # in inference mode it is not taken apart before it comes here
        with gpu.dispatch:
            return func.decompose(*args, **kwargs)
    if packet is aten._has_compatible_shallow_copy_type:
        return args[0].device == args[1].device
    leaves = leaves_of((args, kwargs))
    pretended = [x for x in leaves if isinstance(x, PretendTensor)]
    if packet in (aten._to_copy, aten.copy_):
        moved = _move(gpu, func, args, kwargs)
        if moved is not None:
            return moved
    if packet in _UNKNOWN and pretended:
        raise NotImplementedError(f"{func} is not pretended")
    asked = kwargs.get("device")
    if packet is aten.scalar_tensor and asked is not None and asked.type == UNDERNEATH:
        asked = kwargs["device"] = torch.device("cpu")  # x[mask] = 0: with CUDA it is the host's
    device = named(asked) if asked is not None else _common(func, pretended, leaves)
    if asked is not None and device.type == "cuda":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        return gpu.pin(func(*args, **{**kwargs, "pin_memory": False}))
    if device.type != "cuda" and not pretended:
        return func(*args, **kwargs)
    if (
        packet in _WAITS
        or (packet in _INDEXED and _waits_for_index(*args[1:]))
        or (func in _COUNTED and kwargs.get("output_size") is None)
    ):
        gpu.wait(str(packet))
    return _run(gpu, func, args, kwargs, pretended, device)


def named(device: torch.device | str) -> torch.device:
    """As the program knows it."""
    device = torch.device(device)
    is_ours = device.type in (UNDERNEATH, "cuda")
    return torch.device("cuda", device.index or 0) if is_ours else device


def _run(
    gpu: Gpu,
    func: Any,
    args: Any,
    kwargs: Any,
    pretended: list[PretendTensor],
    device: torch.device,
) -> Any:
    """Computed inside, and noted if it is a kernel."""
    outer = {id(x.inner): x for x in pretended}
    storages = {x.inner.untyped_storage()._cdata for x in outer.values()}
    args, kwargs = with_each(PretendTensor, lambda x: x.inner, (args, kwargs))
    if func is aten.histc.default and not args[0].is_floating_point():
        func = _histc  # which the CPU lacks
    graph, writes = gpu.noting, func is not _histc and func._schema.is_mutable
    written = _written(func, args, kwargs) if graph is not None and writes else []
    if graph is not None and not all(graph.made(x) for x in written):  # nothing is done yet
        out = written[0] if len(func._schema.returns) else None
    else:
        out = func(*args, **kwargs)
    new = [x for x in leaves_of(out) if isinstance(x, Tensor) and id(x) not in outer]
    new = [x for x in new if x.untyped_storage()._cdata not in storages]
    if graph is not None:
        graph.keep(new)
    if (writes or new) and "empty" not in func.__name__:
        gpu.launch(str(func))
        if graph is not None:
            graph.note(func, args, kwargs, None if writes else out)

    def wrapped(x: Tensor) -> Tensor:
        held = outer.get(id(x))
        if device.type != "cuda":  # made like one that is there
            return x
        return PretendTensor(x, gpu, device) if held is None else held

    return with_each(Tensor, wrapped, out)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    pairs = zip(func._schema.arguments, args, strict=False)
    found = [v for a, v in pairs if a.alias_info is not None and a.alias_info.is_write]
    return leaves_of([*found, *(v for k, v in kwargs.items() if k == "out")])


def _histc(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return aten.histc(values.float(), *args, **kwargs).to(values.dtype)


def _move(gpu: Gpu, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A copy from one device to another; None for one that stays where it is."""
    if func.overloadpacket is aten.copy_:
        target, source = args[:2]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if not isinstance(source, Tensor) or target.device == source.device:
            return None
        if not source.dim() and source.device.type == "cpu":
            return None
        gpu.copy(target, source, blocks=blocks)
        return target
    source = args[0]
    device = kwargs.get("device")
    device = source.device if device is None else named(device)
    if device == source.device or device.type not in ("cpu", "cuda"):
        return None
    blocks = not kwargs.get("non_blocking", False)
    dtype = kwargs.get("dtype") or source.dtype
    held = source.inner if isinstance(source, PretendTensor) else source
    inner = torch.empty_like(held, memory_format=kwargs.get("memory_format"))
    if device.type == "cuda":
        target = PretendTensor(inner, gpu, device)
        gpu.copy(target, source, blocks=blocks)
        return target if dtype == source.dtype else target.to(dtype)
    if dtype != source.dtype:  # as torch does: cast where it lies
        source, inner = source.to(dtype), inner.to(dtype)
    target = inner if blocks else gpu.pin(inner)  # torch takes pinned memory then
    gpu.copy(target, source, blocks=blocks)
    return target


def _common(func: Any, pretended: list[PretendTensor], leaves: list[Any]) -> torch.device:
    """The device of an operation. Raises: RuntimeError where there are two."""
    if not pretended:
        return torch.device("cpu")
    device = pretended[0].device
    others = {x.device for x in pretended} - {device}
    if func.overloadpacket not in _INDEXED:
        others |= {
            x.device
            for x in leaves
            if isinstance(x, Tensor) and not isinstance(x, PretendTensor) and x.dim()
        }
    if others:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{device} and {', '.join(map(str, others))}! ({func})"
        )
    return device


def _waits_for_index(indices: list[Tensor | None], value: Any = None, *rest: Any) -> bool:
    """A mask is counted first, and what is on the host is copied."""
    masks, given = (torch.bool, torch.uint8), [x for x in indices if x is not None]
    from_host = any(not isinstance(x, PretendTensor) and x.dim() > 0 for x in given)
    is_number = isinstance(value, Tensor) and value.dim() == 0 and value.is_cpu
    if is_number and not any(rest) and not from_host and all(x.dtype in masks for x in given):
        return False  # masked_fill
    return from_host or any(x.dtype in masks for x in given)
