"""From the option ``device`` to a device that can be used, or to a sentence why not.

How much of its memory there is for a model and its cache, ``quire.memory`` says.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConfigError, one_line
from quire.memory.by_device import why_no_memory
from quire.units import align_up

# -- the choice of a device ------------------------------------------------------------------------


log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def choose_device(name: str) -> torch.device:
    """Choose a device: ``auto`` is the first GPU that can be used, else the CPU; the log says why.

    Raises: ConfigError for a GPU that was asked for and cannot be used.
    """
    if name == "cpu":
        return _CPU
    asked = torch.device("cuda" if name == "auto" else name)
    index = asked.index or 0
    reason = why_no_cuda(index) or why_no_memory(torch.device("cuda", index))
    if reason is None:
        log.info("device: cuda:%d (%s)", index, torch.cuda.get_device_name(index))
        return torch.device("cuda", index)
    if name == "auto":
        log.info("device: cpu, for %s", reason)
        return _CPU
    raise ConfigError(f"device={name}: {reason}; or leave it out, for the CPU")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch kernels on a device, for a while, where nothing else says on which."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def refuse_other_device(name: str, found: torch.device) -> None:
    """Check that a model is on the device that was asked for. Raises: ConfigError."""
    asked = torch.device("cpu" if name == "auto" else name)
    same_index = asked.index is None or asked.index == (found.index or 0)
    if name != "auto" and (asked.type != found.type or not same_index):
        raise ConfigError(
            f"device={name} is not where the model is, {found}: move it (model.to({name!r})), or "
            f"leave device auto"
        )


def why_no_cuda(index: int = 0) -> str | None:
    """Say why that GPU cannot be used, and what to do; None if it can."""
    if not torch.cuda.is_available():
        return _why_none()
    count = torch.cuda.device_count()
    if index >= count:
        there = ", ".join(f"cuda:{number}" for number in range(count))
        return f"there is no cuda:{index}, only {there}: choose one that is there"
    try:
        torch.cuda.mem_get_info(index)  # the first thing that needs some of its memory
    except RuntimeError as error:
        return (
            f"cuda:{index} gives no memory, not even to begin ({_first_line(error)}): end what "
            f"else uses it (nvidia-smi lists it)"
        )
    return None


def _why_none() -> str:
    """Say why torch has no GPU at all."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} was built without CUDA: for a GPU install one that has it "
            f"(https://pytorch.org/get-started)"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return (
            f"CUDA does not start ({_first_line(error)}): see what nvidia-smi says of the driver, "
            f"and whether CUDA_VISIBLE_DEVICES hides the GPU"
        )
    return "torch finds no GPU: see whether nvidia-smi does"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(" .:")


# -- pinned memory ---------------------------------------------------------------------------------

# Memory of the host that a device copies to and from by itself: pinned, where any can be had.


_TRIAL_BYTES = 2**20


def host_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Make u8[num_bytes] on the host, pinned for a GPU.

    Where no memory can be pinned, torch waits for each copy of it.
    """
    if device.type == "cuda":
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # which an engine has been told of at its start
            pass
    return torch.empty(num_bytes, dtype=torch.uint8)


def warn_if_none(device: torch.device) -> None:
    """Warn that the host waits for a step's copies, where no memory can be pinned."""
    if device.type != "cuda":
        return
    try:
        torch.empty(_TRIAL_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning(
            "no memory can be pinned (%s), so that each copy to and from %s is waited for: raise "
            "the limit of locked memory (ulimit -l; docker run --ulimit memlock=-1)",
            one_line(error),
            device,
        )


# -- from a device ---------------------------------------------------------------------------------

# Numbers from a device to the host: many tensors, one copy, and the host waits once.
#
# They come to pinned memory, which a device can copy to by itself: so the host can prepare
# whatever else is to be done, and waits when it needs them.


_MOST_BYTES = 64 * 2**20  # of results that wait on the device for a copy


def wait_for(device: torch.device) -> None:
    """Wait until all that was launched on a device is done; the CPU's work is done at once."""
    if device.type == "cuda":
        # By an event: torch cannot tell a wait for a stream from one that was not meant
        # (``torch.cuda.set_sync_debug_mode``).
        torch.cuda.current_stream(device).record_event().synchronize()


class Results:
    """Tensors on their way to the host. Nothing is waited for before ``arrive``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[Tensor] = []  # for the next copy
        self._waiting_bytes = 0
        self._under_way: list[tuple[Tensor, list[tuple[torch.dtype, torch.Size]]]] = []
        self._num = 0

    def add(self, tensor: Tensor) -> int:
        """Add a tensor of any shape. Returns: its index in the result of ``arrive``.

        A tensor on the CPU is not copied, and must not change.
        """
        if self._device.type != "cpu" and self._waiting_bytes + tensor.nbytes > _MOST_BYTES:
            self._send()  # the device's memory is handed out again only after the copy
        self._waiting.append(tensor)
        self._waiting_bytes += tensor.nbytes
        self._num += 1
        return self._num - 1

    def arrive(self) -> list[NDArray[Any]]:
        """Wait for the device once, and return all tensors that were added, in their shapes."""
        if self._device.type == "cpu":
            return [tensor.numpy() for tensor in self._waiting]
        self._send()
        wait_for(self._device)
        found: list[NDArray[Any]] = []
        for staged, kinds in self._under_way:
            start = 0
            for dtype, shape in kinds:
                num_bytes = dtype.itemsize * shape.numel()
                own = staged[start : start + num_bytes].clone()  # aligned, and its own
                found.append(own.view(dtype).view(shape).numpy())
                start += num_bytes
        return found

    def _send(self) -> None:
        if not self._waiting:
            return
        packed = torch.cat([_bytes_of(tensor) for tensor in self._waiting])
        staged = host_bytes(len(packed), self._device)
        staged.copy_(packed, non_blocking=self._device.type == "cuda")
        kinds = [(tensor.dtype, tensor.shape) for tensor in self._waiting]
        self._under_way.append((staged, kinds))
        self._waiting, self._waiting_bytes = [], 0


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # of one element or none, which torch calls contiguous all the same
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


# -- to a device -----------------------------------------------------------------------------------

# Numbers from the host to a device: many arrays, and one copy that the host does not wait for.
#
# They are gathered in pinned memory, which a device can copy from by itself. Torch keeps such
# memory for the next step, and hands none out before the copies that use it are done.


Array: TypeAlias = npt.NDArray[Any]
_ALIGNMENT = 16  # bytes: of every dtype


def staged_bytes(arrays: Sequence[Array]) -> int:
    """Return the bytes that arrays take beside each other."""
    return sum(align_up(array.nbytes, _ALIGNMENT) for array in arrays)


def to_device(
    arrays: Sequence[Array], device: torch.device, into: Tensor | None = None
) -> list[Tensor]:
    """Copy each array to the device, as a tensor of its shape and type.

    ``into``: u8, of at least ``staged_bytes``, to hold them. Arrays of the same shapes and types
    come to lie at the same addresses in it; what was there is overwritten when the work that has
    been launched so far is done. Without it a CPU reads the arrays where they are.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    staged = host_bytes(staged_bytes(arrays), device)
    room, start = staged.numpy(), 0
    places: list[tuple[int, Array]] = []
    for array in arrays:
        room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        places.append((start, array))
        start += align_up(array.nbytes, _ALIGNMENT)
    if into is None:
        there = staged.to(device, non_blocking=True)
    else:
        there = into[: len(staged)].copy_(staged, non_blocking=True)
    found: list[Tensor] = []
    for start, array in places:
        dtype = torch.from_numpy(array[:0]).dtype
        found.append(there[start : start + array.nbytes].view(dtype).view(array.shape))
    return found


# -- the stream ------------------------------------------------------------------------------------

# The stream that an engine's work goes to: the device's default one, whichever thread steps.
#
# Each thread has its own current stream, and the caller may have chosen another. Memory that is
# taken back while kernels use it, and a cache that is read where it was just written, are right
# only if all of an engine's work is in one order.


@contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """Launch on the device's default stream, for a while.

    The work comes after what the caller has launched on a stream of its own, and before what it
    launches on that later.
    """
    if device.type != "cuda":
        yield
        return
    callers, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    is_other = callers != default
    if is_other:
        default.wait_stream(callers)
    try:
        # The device first: a stream of another one than the current would make that one the
        # current device again at the end, which takes a context there where none was.
        with torch.cuda.device(device), torch.cuda.stream(default):
            yield
    finally:
        if is_other:
            callers.wait_stream(default)


# -- torch's unused memory -------------------------------------------------------------------------

# What torch keeps of memory for later use: a device's, and pinned memory of the host.


def give_back_unused(device: torch.device) -> None:
    """Have torch give unused memory of this whole process back to the device and the system.

    Never fails: torch refuses while a graph is captured in another thread, and says so.
    """
    if device.type != "cuda":
        return
    # The public name came with torch 2.12; the other one is that of CUDA builds since 2.5.
    public = getattr(torch.accelerator, "empty_host_cache", None)
    of_host = public or getattr(torch._C, "_host_emptyCache", None)
    for give_back in (torch.cuda.empty_cache, of_host):
        try:
            if give_back is not None:
                give_back()
        except RuntimeError as error:
            log.warning("torch keeps unused memory: %s", str(error).partition("\n")[0])
