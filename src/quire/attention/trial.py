"""A backend on trial: the result of each of its calls is compared with torch's attention.

Kernels that are compiled where they run may fail there, or give another result than where they were
written. So the engine tries them before the first request, in the calls that a model makes, over
the storage that the cache has.
"""

from typing import final

import torch
from torch import Tensor

from quire.attention.attention_backend import AttentionBackend, AttentionBatch
from quire.attention.gather import ReferenceAttention
from quire.attention.sdpa import SdpaAttention
from quire.devices import wait_for
from quire.errors import QuireError, one_line
from quire.kv import LayerView
from quire.spec import AttentionSpec

# Shares of the largest result. Weights are rounded to the queries' dtype, and sums have another
# order.
_LIMIT_FLOAT32, _LIMIT = 1e-3, 2e-2


class AttentionFailed(QuireError):
    """A backend raised an error, or its result is not torch's."""


@final
class TriedAttention(AttentionBackend):
    """Another backend, in eager steps without padding. Each call waits for the device."""

    def __init__(self, own: AttentionBackend) -> None:
        self.name, self.make_writer, self.replays = own.name, own.make_writer, own.replays
        self._own, self._twin = own, SdpaAttention()

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """Return what the backend on trial returns."""
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
        """Return the backend's result, [T, H, Dv], if it is torch's too.

        Raises: AttentionFailed if the backend raises an error or the two results differ;
            OutOfMemoryError as the backend does.
        """
        rest = q, view, batch
        try:
            got = self._own.attend(*rest, spec=spec, scale=scale, softcap=softcap, sinks=sinks)
            wait_for(q.device)  # a kernel's error is raised here
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
        if not apart <= limit * largest:  # NaN fails too
            raise AttentionFailed(
                f"attention by {self.name} gives other results than torch's: {apart:.1e} apart, "
                f"where the largest result is {largest:.1e} and {limit:.0e} of that is allowed"
            )
        return got


def tried(own: AttentionBackend, device: torch.device) -> AttentionBackend:
    """Put a backend on trial, where it needs one: on a GPU, unless torch computes all of it."""
    if device.type != "cuda" or isinstance(own, SdpaAttention | ReferenceAttention):
        return own
    return TriedAttention(own)
