"""A backend while it is tried: what each of its calls gives is held against torch's attention.

Kernels that are compiled where they run may fail there, or give something else there than where
they were made. So they are tried in the calls that a model makes, over the storage that it has.
"""

from typing import final

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.sdpa import SdpaAttention
from quire.devices.results import wait_for
from quire.errors import QuireError, one_line
from quire.kv import LayerView
from quire.spec import AttentionSpec

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
