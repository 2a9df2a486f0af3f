"""Which backend serves a model: the fastest that can, and every choice is said aloud."""

import logging
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, final

import torch
from torch import Tensor

from quire.attention.attention_backend import AttentionBackend, AttentionBatch
from quire.attention.gather import ReferenceAttention
from quire.attention.sdpa import SdpaAttention
from quire.devices import wait_for
from quire.errors import ConfigError, QuireError, one_line
from quire.kv import LayerView
from quire.spec import AttentionSpec, LatentAttention

# -- the choice of a backend -----------------------------------------------------------------------


log = logging.getLogger(__name__)

BACKENDS = ("auto", "flashinfer", "triton", "cpu", "sdpa", "reference")
_FASTEST_FIRST = MappingProxyType(
    {"cpu": ("cpu", "sdpa"), "cuda": ("flashinfer", "triton", "sdpa")}
)


def choose_backend(
    name: str,
    specs: Iterable[AttentionSpec],
    device: torch.device,
    *,
    kernel_dir: Path | None = None,
) -> AttentionBackend:
    """The backend of that name, or with "auto" the first that serves all of these layers.

    ``kernel_dir``: where compiled kernels are kept; None for the backend's own choice.

    Raises: ConfigError for an unknown name, or for a backend that was asked for and cannot.
    """
    if name not in BACKENDS:
        raise ConfigError(f"attention backend {name!r} is unknown; known: {', '.join(BACKENDS)}")
    several = tuple(specs)
    reasons: list[str] = []
    fastest_first = _FASTEST_FIRST.get(device.type, _FASTEST_FIRST["cpu"])
    for candidate in fastest_first if name == "auto" else (name,):
        found = _find(candidate, several, device, kernel_dir)
        if isinstance(found, str):
            reasons.append(f"{candidate} cannot serve: {found}")
            continue
        told = "; ".join([f"attention backend: {candidate}", *reasons])
        # Only the last of them is slow.
        log.log(logging.WARNING if reasons and candidate == "sdpa" else logging.INFO, told)
        return found
    raise ConfigError(f"attention backend {name!r}: {'; '.join(reasons)}")


def fallback_backends(name: str, specs: Iterable[AttentionSpec], device: torch.device) -> list[str]:
    """What is to be tried, in that order, where the one that ``choose_backend`` takes fails.

    None where the choice was not left open, and on the CPU, whose kernels are compiled before they
    are taken.
    """
    if name != "auto" or device.type != "cuda":
        return []
    several = tuple(specs)
    order = _FASTEST_FIRST["cuda"]
    served = [each for each in order if not isinstance(_find(each, several, device, None), str)]
    return served[1:]


def backend_for_graphs(
    chosen: AttentionBackend, name: str, specs: Iterable[AttentionSpec], device: torch.device
) -> AttentionBackend:
    """Find the backend for steps that are captured as CUDA graphs: the chosen one, if it can.

    Where the choice was left open (``name``) and fell on one whose calls depend on the host, Triton
    takes its place there: a graph saves more than kernels differ by.
    """
    if device.type != "cuda" or name != "auto":
        return chosen
    if chosen.replays is not None or chosen.make_writer is None:
        return chosen
    found = _find("triton", tuple(specs), device, None)
    if isinstance(found, str) or found.replays is None:
        return chosen
    log.info("attention backend of steps that are captured: triton")
    return found


def _find(
    name: str, specs: tuple[AttentionSpec, ...], device: torch.device, kernel_dir: Path | None
) -> AttentionBackend | str:
    """The backend of that name, or why it cannot serve these layers."""
    backend: AttentionBackend
    if name == "cpu":
        try:
            from quire.attention.cpu.backend import CpuAttention
        except (ImportError, OSError) as error:  # no wheel for this platform, or a broken one
            return f"llvmlite cannot be imported ({error})"
        backend = CpuAttention(cache_dir=kernel_dir)
    elif name == "flashinfer":
        from quire.attention.flashinfer.backend import FlashInferAttention

        # FlashInfer reads what Triton's kernel has written, which leaves out padding.
        writer = _find("triton", specs, device, kernel_dir)
        backend = FlashInferAttention(
            make_writer=None if isinstance(writer, str) else writer.make_writer,
            captures=not any(isinstance(spec, LatentAttention) for spec in specs),
        )
    elif name == "triton":
        try:
            from quire.attention.triton.backend import TritonAttention
        except (ImportError, OSError) as error:  # torch for CUDA brings it, one for the CPU not
            return f"Triton cannot be imported ({error})"
        backend = TritonAttention()
    else:
        backend = SdpaAttention() if name == "sdpa" else ReferenceAttention()
    reasons = (backend.unsupported(spec, device) for spec in specs)
    return next((reason for reason in reasons if reason is not None), backend)


# -- rows of recurrent states ----------------------------------------------------------------------

# Rows that a step's sequences have in a tensor, brought into one batch and back.
#
# A recurrent layer's states are such a tensor: a row for each slot. Where a step is run, torch
# moves them. A step that was captured has rows of padding too. Only a kernel can leave those out:
# a tensor on the device tells it where to read and write.


class RowMover(Protocol):
    """Moves rows by their slots, which lie on the device."""

    def take(self, held: Tensor, slots: Tensor) -> Tensor:
        """Copies of some rows: held [slots, …], slots i64[S] → [S, …], in order."""
        ...

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        """Overwrite some rows: held [slots, …], slots i64[S], new [S, …]."""
        ...


@final
class TorchRows:
    """By torch: every slot is a sequence's."""

    def take(self, held: Tensor, slots: Tensor) -> Tensor:
        return held[slots]

    def put(self, held: Tensor, slots: Tensor, new: Tensor) -> None:
        held[slots] = new


def find_padded_rows(device: torch.device) -> RowMover | str:
    """What moves rows and leaves out padding, or why nothing does there.

    The slot of padding is -1: it is taken as zeros, and put nowhere. No address is touched for it.
    """
    try:
        from quire.attention.triton.launch import find_gpu
        from quire.attention.triton.writers import TritonRows
    except (ImportError, OSError) as error:  # torch for CUDA brings it, one for the CPU not
        return f"Triton cannot be imported ({error})"
    gpu = find_gpu(device)
    return gpu if isinstance(gpu, str) else TritonRows()


# -- the trial of a backend ------------------------------------------------------------------------

# A backend while it is tried: what each of its calls gives is held against torch's attention.
#
# Kernels that are compiled where they run may fail there, or give something else there than where
# they were made. So they are tried in the calls that a model makes, over the storage that it has.


# Of the largest result. Weights are rounded to the queries' dtype, and sums have another order.
_LIMIT_FLOAT32, _LIMIT = 1e-3, 2e-2


class AttentionFailed(QuireError):
    """A backend raised, or gave something else than torch does."""


@final
class TriedAttention:
    """Another backend, in eager steps of real sequences. Each call waits for the device.

    Raises: AttentionFailed, from ``attend``.
    """

    plays = None

    def __init__(self, own: AttentionBackend) -> None:
        self.name, self.make_writer, self.replays = own.name, own.make_writer, own.replays
        self._own, self._twin = own, SdpaAttention()

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return self._own.unsupported(spec, device)

    def attend(
        self,
        q: Tensor,  # [T, H, D]
        view: LayerView,
        batch: AttentionBatch,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [H]
    ) -> Tensor:
        rest = q, view, batch
        try:
            got = self._own.attend(*rest, spec=spec, scale=scale, softcap=softcap, sinks=sinks)
            wait_for(q.device)  # what a kernel did wrong is said then
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, loaders and the driver raise what they like
            raise AttentionFailed(
                f"attention by {self.name} fails here: {one_line(error)}"
            ) from error
        want = self._twin.attend(*rest, spec=spec, scale=scale, softcap=softcap, sinks=sinks)
        largest = want.abs().amax().item()
        apart = (got.float() - want.float()).abs().amax().item()
        limit = _LIMIT_FLOAT32 if q.dtype == torch.float32 else _LIMIT
        if not apart <= limit * largest:  # nor if it is no number
            raise AttentionFailed(
                f"attention by {self.name} gives something else than torch's: {apart:.1e} apart, "
                f"where the largest result is {largest:.1e} and {limit:.0e} of that is allowed"
            )
        return got


def tried(own: AttentionBackend, device: torch.device) -> AttentionBackend:
    """What is to be used in a trial: only a GPU's kernels are made where they run."""
    if device.type != "cuda" or own.name in ("sdpa", "reference"):
        return own
    return TriedAttention(own)
