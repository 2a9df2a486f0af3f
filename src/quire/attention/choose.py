"""The names of attention backends, and the choice of the one that serves a model's layers.

``BACKENDS`` is open to other packages: docs/guides/write-an-attention-backend.md. "auto" takes the
fastest of Quire's own that can serve, and no other package's: what is installed beside Quire does
not change what a model computes until an option names it. Importing this module imports no torch.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from quire.errors import ConfigError
from quire.plugins import Registry
from quire.spec import AttentionSpec, LatentAttention

if TYPE_CHECKING:
    import torch

    from quire.attention.attention_backend import AttentionBackend

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersToServe:
    """What a backend is made for."""

    specs: tuple[AttentionSpec, ...]
    device: "torch.device"
    kernel_dir: Path | None = None  # where compiled kernels are kept; None: the backend's choice
    # A token's result may not depend on what else is in a step: of a backend that can see to that.
    batch_invariant: bool = False


# Makes a backend. Raises: ConfigError that says why it cannot serve here.
MakeBackend: TypeAlias = Callable[[LayersToServe], "AttentionBackend"]

# -- Quire's own -----------------------------------------------------------------------------------


def _auto(layers: LayersToServe) -> "AttentionBackend":
    return choose_backend(
        AUTO,
        layers.specs,
        layers.device,
        kernel_dir=layers.kernel_dir,
        batch_invariant=layers.batch_invariant,
    )


def _flashinfer(layers: LayersToServe) -> "AttentionBackend":
    from quire.attention.flashinfer.backend import FlashInferAttention

    # FlashInfer reads what Triton's kernel has written, which leaves out padding.
    writer = _find("triton", layers)
    return FlashInferAttention(
        make_writer=None if isinstance(writer, str) else writer.make_writer,
        captures=not any(isinstance(spec, LatentAttention) for spec in layers.specs),
    )


def _triton(layers: LayersToServe) -> "AttentionBackend":
    try:
        from quire.attention.triton.backend import TritonAttention
    except (ImportError, OSError) as error:  # torch for CUDA brings it, one for the CPU not
        raise ConfigError(f"Triton cannot be imported ({error})") from error
    return TritonAttention()


def _cpu(layers: LayersToServe) -> "AttentionBackend":
    try:
        from quire.attention.cpu.backend import CpuAttention
    except (ImportError, OSError) as error:  # no wheel for this platform, or a broken one
        raise ConfigError(f"llvmlite cannot be imported ({error})") from error
    return CpuAttention(cache_dir=layers.kernel_dir, batch_invariant=layers.batch_invariant)


def _sdpa(layers: LayersToServe) -> "AttentionBackend":
    from quire.attention.sdpa import SdpaAttention

    return SdpaAttention()


def _reference(layers: LayersToServe) -> "AttentionBackend":
    from quire.attention.gather import ReferenceAttention

    return ReferenceAttention()


AUTO = "auto"
BY_TORCH = ("sdpa", "reference")  # these run everywhere; the first is the faster one
_FASTEST_FIRST = MappingProxyType(
    {"cpu": ("cpu", "sdpa"), "cuda": ("flashinfer", "triton", "sdpa")}
)
BACKENDS: Registry[MakeBackend] = Registry(
    "attention backend",
    "quire.attention_backends",
    {
        AUTO: _auto,
        "flashinfer": _flashinfer,
        "triton": _triton,
        "cpu": _cpu,
        "sdpa": _sdpa,
        "reference": _reference,
    },
    lambda found: None if callable(found) else f"{found!r} makes no backend: it is not callable",
)

# -- the choice ------------------------------------------------------------------------------------


def choose_backend(
    name: str,
    specs: Iterable[AttentionSpec],
    device: "torch.device",
    *,
    kernel_dir: Path | None = None,
    batch_invariant: bool = False,
) -> "AttentionBackend":
    """Make the backend of that name, or with "auto" the fastest that serves all of these layers.

    ``kernel_dir`` is where compiled kernels are kept; None leaves that to the backend. With
    ``batch_invariant`` a token's result may not depend on what else is in a step.

    Raises: ConfigError for an unknown name, or for a named backend that cannot serve.
    """
    BACKENDS.require(name, "attention_backend")
    layers = LayersToServe(
        specs=tuple(specs),
        device=device,
        kernel_dir=kernel_dir,
        batch_invariant=batch_invariant,
    )
    reasons: list[str] = []
    fastest_first = _FASTEST_FIRST.get(device.type, _FASTEST_FIRST["cpu"])
    for candidate in fastest_first if name == AUTO else (name,):
        found = _find(candidate, layers)
        if isinstance(found, str):
            reasons.append(f"{candidate} cannot serve: {found}")
            continue
        told = "; ".join([f"attention backend: {candidate}", *reasons])
        # Only torch's is slow.
        is_slow = bool(reasons) and candidate in BY_TORCH
        log.log(logging.WARNING if is_slow else logging.INFO, told)
        return found
    raise ConfigError(f"attention backend {name!r}: {'; '.join(reasons)}")


def fallback_backends(
    name: str, specs: Iterable[AttentionSpec], device: "torch.device"
) -> list[str]:
    """List the backends to try, in order, after the one that ``choose_backend`` takes has failed.

    The list is empty for a named backend, and on the CPU, whose kernels are compiled before they
    are taken.
    """
    if name != AUTO or device.type != "cuda":
        return []
    layers = LayersToServe(specs=tuple(specs), device=device)
    order = _FASTEST_FIRST["cuda"]
    return [each for each in order if not isinstance(_find(each, layers), str)][1:]


def backend_for_graphs(
    chosen: "AttentionBackend", name: str, specs: Iterable[AttentionSpec], device: "torch.device"
) -> "AttentionBackend":
    """Find the backend for steps that are captured as CUDA graphs: the chosen one, if it can.

    If ``name`` is "auto" and the chosen backend's calls depend on the host, Triton takes its place
    in such steps: a graph saves more than kernels differ by.
    """
    if device.type != "cuda" or name != AUTO:
        return chosen
    if chosen.replays is not None or chosen.make_writer is None:
        return chosen
    found = _find("triton", LayersToServe(specs=tuple(specs), device=device))
    if isinstance(found, str) or found.replays is None:
        return chosen
    log.info("attention backend of steps that are captured: triton")
    return found


def _find(name: str, layers: LayersToServe) -> "AttentionBackend | str":
    """Make the backend of that name, or return why it cannot serve these layers."""
    try:
        with BACKENDS.blamed(name, "attention_backend"):
            backend = BACKENDS[name](layers)
    except ConfigError as error:
        return str(error)
    if layers.batch_invariant and not backend.batch_invariant:
        return "its results depend on what else is in a step (batch_invariant)"
    reasons = (backend.unsupported(spec, layers.device) for spec in layers.specs)
    return next((reason for reason in reasons if reason is not None), backend)
