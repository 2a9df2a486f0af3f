"""What ``torch.cuda`` offers, pretended: memory to copy to and from, streams, events, graphs.

All work is in one queue. None of it is known to be done before the host has waited: what was copied
to pinned memory is garbage until then, and what is copied from there must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from memory.cuda.streams import Streams
from pretend.late import Lateness
from pretend.streams import names_of_streams
from pretend.tensor import UNDERNEATH, PretendTensor, compute, leaves_of, with_each


@dataclass(frozen=True, slots=True)
class _Pending:
    """A copy that the host has not waited for."""

    mark: int
    settle: Callable[[], None]


@contextmanager
def _plainly() -> Iterator[None]:
    """Inside of kernels all tensors are the host's."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``: operations, on the memory that they were captured on."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.notes: list[tuple[Any, Any, Any, Any]] = []
        self._own: dict[int, Any] = {}  # storages

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.notes.append((func, args, kwargs, out))

    def keep(self, new: list[Tensor]) -> None:
        """Memory that was made while it was captured."""
        self._own.update((x.untyped_storage()._cdata, x.untyped_storage()) for x in new)

    def made(self, held: Tensor) -> bool:
        return held.untyped_storage()._cdata in self._own

    def tensors(self) -> list[Tensor]:
        """All that it reads or writes and did not make."""
        found = [x for x in leaves_of(self.notes) if isinstance(x, Tensor)]
        return [x for x in found if not self.made(x)]

    def replay(self) -> None:
        self._gpu.launch("graph")
        self.run()

    @torch.inference_mode()
    def run(self) -> None:
        with _plainly():
            for func, args, kwargs, out in self.notes:
                again = func(*args, **kwargs)
                if out is None:
                    continue
                for held, new in zip(leaves_of(out), leaves_of(again), strict=True):
                    if isinstance(held, Tensor) and held is not new:
                        held.copy_(new)

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self.notes.clear()


class Gpu:
    """The device, and what was done with it. ``waits`` says for what the host has waited."""

    def __init__(self, num_devices: int, total_bytes: int) -> None:
        self.num_devices, self.total_bytes, self.free_bytes = num_devices, total_bytes, total_bytes
        self.current = 0  # the device that is meant where none is named
        self.waits: list[str] = []
        self.launches: list[str] = []
        self.num_replays = self.num_uploads = self.num_downloads = 0
        self.num_host_emptied = 0  # times that pinned memory went back to the system
        self.capturing: Graph | None = None
        self.late: Lateness | None = None  # it has several streams
        self.dispatch = _Dispatch(self)
        self._pinned: dict[int, Any] = {}  # storages
        self._pending: list[_Pending] = []
        self._mark = self._done = 0

    def reset(self) -> None:
        """Count from nothing."""
        self.waits.clear()
        self.launches.clear()
        self.num_replays = self.num_uploads = self.num_downloads = 0

    def launch(self, name: str) -> None:
        self._mark += 1
        self.launches.append(name)
        self.num_replays += name == "graph"

    def kernel(self, function: Callable[..., None], *args: Any) -> None:
        """Launch what is no operation of torch's. It gets the tensors inside, and writes to them.

        Raises: RuntimeError for a tensor of the host, or of a device that is not the current one.
        """
        here = torch.device("cuda", self.current)
        for x in leaves_of(args):
            if isinstance(x, Tensor) and not (isinstance(x, PretendTensor) and x.device == here):
                raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        inner = with_each(PretendTensor, lambda x: x.inner, args)
        self.launch(function.__name__)
        if self.noting is not None:
            self.noting.note(function, inner, {}, None)
        else:
            with _plainly():
                function(*inner)

    @property
    def noting(self) -> Graph | None:
        """Where operations are noted, to be done later."""
        if self.capturing is not None or self.late is None:
            return self.capturing
        return self.late.noting

    def wait(self, why: str, mark: int | None = None) -> None:
        """The host waits, for all that was launched (up to ``mark``)."""
        if self.capturing is not None:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing: {why}"
            )
        assert self.noting is None, f"the host waits for another stream than the first: {why}"
        self.waits.append(why)
        self._done = self._mark if mark is None else max(mark, self._done)
        settled = [each for each in self._pending if each.mark <= self._done]
        self._pending = [each for each in self._pending if each.mark > self._done]
        for each in settled:
            each.settle()

    def has_done(self, mark: int) -> bool:
        return mark <= self._done

    @property
    def mark(self) -> int:
        return self._mark

    def pin(self, host: Tensor) -> Tensor:
        storage = host.untyped_storage()
        self._pinned[storage._cdata] = storage
        return host

    def empty_host_cache(self) -> None:
        self.num_host_emptied += 1

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage()._cdata in self._pinned

    def copy(self, target: Tensor, source: Tensor, *, blocks: bool) -> None:
        """From one device to another."""
        up = not isinstance(source, PretendTensor)
        if self.capturing is not None:
            raise RuntimeError("CUDA error: a copy between devices while a graph is captured")
        held = source if up else source.inner
        into = target.inner if isinstance(target, PretendTensor) else target
        host = held if up else into
        assert self.noting is None, "a copy between devices on another stream than the first"
        self.num_uploads += up
        self.num_downloads += not isinstance(target, PretendTensor)
        self._mark += 1
        into.copy_(held)
        if blocks or not self.is_pinned(host):
            self.wait("upload" if up else "download")
            return
        value = host.clone()

        def unchanged() -> None:
            assert torch.equal(host, value), "pinned memory was changed before its copy had ended"

        def arrive() -> None:
            host.copy_(value)

        if not up:
            host.view(-1).view(torch.uint8).fill_(0xAB) if host.is_contiguous() else host.zero_()
        self._pending.append(_Pending(self._mark, unchanged if up else arrive))


class _Dispatch(TorchDispatchMode):
    """Factories that name the device; all else comes by the tensors themselves."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, PretendTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        return compute(self._gpu, func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What does not reach the dispatcher of a torch without CUDA."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {key: self._numbered(value) for key, value in (kwargs or {}).items()}
        args = tuple(map(self._numbered, args))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            device = kwargs.pop("device", None)
            if device is None and func is Tensor.new_tensor:
                device = args[0].device
            made = func(*args, **kwargs, **({"device": "cpu"} if device is not None else {}))
            return made if device is None else made.to(device)
        if func is Tensor.cuda:
            return args[0].to(self._numbered("cuda"), **kwargs)
        if func in (Tensor.tolist, Tensor.numpy) and isinstance(args[0], PretendTensor):
            if func is Tensor.numpy and not kwargs.get("force"):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            return func(args[0].cpu())
        if func is Tensor.__format__ and isinstance(args[0], PretendTensor):
            return func(args[0].cpu(), *args[1:])
        if func is Tensor.pin_memory:
            return self._gpu.pin(args[0].clone())
        if func is Tensor.is_pinned:
            return self._gpu.is_pinned(args[0])
        return func(*args, **kwargs)

    def _numbered(self, value: Any) -> Any:
        """``cuda`` → ``cuda:0``: without CUDA, torch cannot ask which one is current."""
        if isinstance(value, (torch.device, str)) and str(value) == "cuda":
            return torch.device("cuda", self._gpu.current)
        return value


def _graphs_of(gpu: Gpu) -> type[Graph]:
    """A class, since Transformers names it in annotations."""

    class CUDAGraph(Graph):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(gpu)

    return CUDAGraph


def _names(gpu: Gpu) -> dict[str, Any]:
    """What is found in ``torch.cuda`` meanwhile."""
    # Older than any that kernels are made for, which would be launched by the driver that is not
    # there: attention is torch's own then, or what a test brings.
    properties = SimpleNamespace(
        name="pretended", total_memory=gpu.total_bytes, major=5, minor=2, multi_processor_count=132
    )
    nothing = ("_lazy_init", "init", "empty_cache", "reset_peak_memory_stats")
    zero = ("memory_allocated", "memory_reserved", "max_memory_allocated")
    return {
        **dict.fromkeys(nothing, _says(None)),
        **dict.fromkeys(zero, _says(0)),
        **dict.fromkeys(("is_available", "is_initialized"), _says(True)),
        **names_of_streams(gpu),
        **_names_of_devices(gpu),
        "device_count": _says(gpu.num_devices),
        "get_device_name": _says(properties.name),
        "get_device_properties": _says(properties),
        "get_device_capability": _says((5, 2)),
        "graph_pool_handle": _says((0, 0)),
        "memory_snapshot": lambda *_: [],
        "mem_get_info": lambda *_: (gpu.free_bytes, gpu.total_bytes),
        "CUDAGraph": _graphs_of(gpu),
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
    }


def _names_of_devices(gpu: Gpu) -> dict[str, Any]:
    """Which one is current."""

    def set_device(device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        assert index is None or index < gpu.num_devices, "CUDA error: invalid device ordinal"
        gpu.current = gpu.current if index is None else index

    @contextmanager
    def device(device: torch.device | int) -> Iterator[None]:
        before = gpu.current
        set_device(device)
        try:
            yield
        finally:
            gpu.current = before

    return {"set_device": set_device, "current_device": lambda: gpu.current, "device": device}


def _says(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextmanager
def cuda(
    *, num_devices: int = 1, total_bytes: int = 2**34, queues: Streams | None = None
) -> Iterator[Gpu]:
    """While it lasts there is CUDA. Tensors that were made then are of no use afterwards.

    With ``queues`` there are several streams, see ``late``; without, all are one.
    """
    if not hasattr(torch, UNDERNEATH):
        _setup_privateuseone_for_python_backend()
    gpu = Gpu(num_devices, total_bytes)
    names = _names(gpu)
    if queues is not None:
        gpu.late = Lateness(gpu, queues)
        names |= gpu.late.names()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as undo:
        for name, value in names.items():
            undo.enter_context(mock.patch.object(torch.cuda, name, value))
        host_cache = mock.patch.object(
            torch.accelerator, "empty_host_cache", gpu.empty_host_cache, create=True
        )
        undo.enter_context(host_cache)
        undo.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        # So that tied weights stay tied when a module is moved.
        torch.__future__.set_swap_module_params_on_conversion(True)
        undo.enter_context(gpu.dispatch)
        undo.enter_context(_Functions(gpu))
        yield gpu
