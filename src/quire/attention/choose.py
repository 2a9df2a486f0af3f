"""Which backend serves a model: the fastest that can, and every choice is said aloud."""

import logging
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

import torch

from quire.attention.base import AttentionBackend
from quire.attention.reference import ReferenceAttention
from quire.attention.sdpa import SdpaAttention
from quire.errors import ConfigError
from quire.spec import AttentionSpec, LatentAttention

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
