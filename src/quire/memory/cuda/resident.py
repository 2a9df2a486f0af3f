"""KV pages of a GPU that stay where they are, or go: what a residency means there.

Pages are handles of the driver, which any address can show. So to take all at the start is to
create them and keep them ready; nothing needs to be touched, and nothing is ever swapped out.
"""

import logging
from typing import final

from quire.errors import MemoryUnavailable
from quire.memory.cuda.memory import CudaMemory
from quire.memory.residency import Milestones, Residency

log = logging.getLogger(__name__)

_STEP_BYTES = 2**30  # created between two lines of progress


@final
class CudaResident:
    """One cache's memory on a GPU: a ``Resident``."""

    def __init__(self, provider: CudaMemory, residency: Residency, capacity_bytes: int) -> None:
        self.provider = provider
        self._capacity_bytes = capacity_bytes if residency == "prefault" else 0
        self._ceiling_bytes = capacity_bytes

    def prefault(self) -> None:
        """Create the capacity's pages. Raises: MemoryUnavailable."""
        if not self._capacity_bytes:
            return
        memory, progress = self.provider, Milestones("KV memory taken at the start")
        memory.hold_bytes = self._capacity_bytes
        while (taken := memory.physical_bytes) < self._capacity_bytes:
            step = min(_STEP_BYTES, self._capacity_bytes - taken)
            memory.prepare(memory.kept_bytes + step)
            if memory.physical_bytes == taken:  # less than a page is missing
                break
            progress(min(memory.physical_bytes, self._capacity_bytes), self._capacity_bytes)

    @property
    def prepares(self) -> bool:
        return True

    def prepare(self) -> None:
        """Create pages up to those that would be kept, within the ceiling. Safe under kernels."""
        memory = self.provider
        in_use = memory.physical_bytes - memory.kept_bytes
        wanted = min(memory.keep_bytes, self._ceiling_bytes - in_use)
        if memory.kept_bytes + memory.page_bytes > wanted:
            return
        try:
            memory.prepare(wanted)
        except MemoryUnavailable as error:
            log.debug("no page is prepared: %s", str(error))  # a commit that needs one raises

    def watch(self) -> None:
        """Do nothing: a GPU's pages are never swapped out."""

    def follow(self, ceiling_bytes: int) -> None:
        """Keep nothing beyond the ceiling, and unmap what no kernel can use any more."""
        memory, self._ceiling_bytes = self.provider, ceiling_bytes
        if self._capacity_bytes:
            memory.hold_bytes = min(ceiling_bytes, self._capacity_bytes)
        memory.poll()

    def rest(self, *, short: bool) -> None:
        """Give back the pages that are kept to be committed again, and what torch keeps."""
        import torch

        self._trim()
        if not torch.cuda.is_available():
            return
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # as while a graph is captured in another thread
            log.warning("torch keeps unused memory: %s", str(error).partition("\n")[0])

    @property
    def kept_bytes(self) -> int:
        return self.provider.kept_bytes if self._capacity_bytes else 0

    def close(self) -> None:
        """Give back what is kept."""
        self._capacity_bytes = 0
        self.provider.hold_bytes = 0
        self._trim()

    def _trim(self) -> None:
        """Give kept pages back; what the driver refuses now is tried again later."""
        try:
            self.provider.trim()
        except MemoryUnavailable as error:
            log.warning("memory is not given back yet: %s", str(error))
