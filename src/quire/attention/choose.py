"""Which backend serves a model: the fastest that can, and every choice is said aloud."""

import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from quire.attention.base import AttentionBackend
from quire.attention.reference import ReferenceAttention
from quire.attention.sdpa import SdpaAttention
from quire.errors import ConfigError
from quire.spec import AttentionSpec

log = logging.getLogger(__name__)

BACKENDS = ("auto", "cpu", "sdpa", "reference")
_FASTEST_FIRST = ("cpu", "sdpa")


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
    for candidate in _FASTEST_FIRST if name == "auto" else (name,):
        made = _make(candidate, kernel_dir)
        reason = made if isinstance(made, str) else _unsupported(made, several, device)
        if reason is None and not isinstance(made, str):
            told = f"attention backend: {candidate}"
            if reasons:
                log.warning("%s, for %s", told, "; ".join(reasons))
            else:
                log.info(told)
            return made
        reasons.append(f"{candidate} cannot serve: {reason}")
    raise ConfigError(f"attention backend {name!r}: {'; '.join(reasons)}")


def _make(name: str, kernel_dir: Path | None) -> AttentionBackend | str:
    """A backend, or why there is none."""
    if name == "reference":
        return ReferenceAttention()
    if name == "sdpa":
        return SdpaAttention()
    try:
        from quire.attention.cpu import CpuAttention
    except (ImportError, OSError) as error:  # no wheel for this platform, or one that is broken
        return f"llvmlite cannot be imported ({error})"
    return CpuAttention(cache_dir=kernel_dir)


def _unsupported(
    backend: AttentionBackend, specs: tuple[AttentionSpec, ...], device: torch.device
) -> str | None:
    reasons = (backend.unsupported(spec, device) for spec in specs)
    return next((reason for reason in reasons if reason is not None), None)
