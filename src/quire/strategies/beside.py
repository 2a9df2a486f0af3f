"""Copies of entries on a GPU, beside the steps: on a stream of their own.

A step computes one layer after the other. So what is copied in a layer is waited for where that
layer is used for the first time, and meanwhile the layers before it are computed.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import torch


@final
class CopiesBeside:
    """Copies that steps may not have waited for, by what they were made in.

    The caller is on the stream of the steps. What is copied has been written there by then, and
    what is written later, over what was copied, waits for the copy as readers do.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._cuda, self._device = torch.cuda, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: dict[Hashable, Any] = {}  # events

    @property
    def stream(self) -> int:
        """Its handle."""
        handle: int = self._stream.cuda_stream
        return handle

    def run(self, where: Hashable, copy: Callable[[], None]) -> None:
        """Begin when the steps so far are done."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        # The device first, as in ``devices.streams``: a user's cache may be of another one.
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            copy()
        self._copied[where] = self._stream.record_event()

    def require(self, where: Hashable) -> None:
        """What is launched from now on finds these copies done."""
        event = self._copied.pop(where, None)
        if event is not None:
            self._cuda.current_stream(self._device).wait_event(event)

    def settle(self) -> None:
        """All of them."""
        for where in list(self._copied):
            self.require(where)
