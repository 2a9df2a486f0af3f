"""Ranks whose keys and values lie on an emulated driver each; all else is the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from quire.engine.llm import LLM
from quire.engine.parallel import worker as child
from quire.engine.parallel import worker as follower
from quire.engine.parallel import worker_group as crew
from quire.memory import by_device
from quire.memory.cuda import CudaMemory
from quire.memory.machine.readings import HostGauge, MemoryReading
from quire.memory.residency import Residency

PAGE = 4096  # small, as the models are
KEPT_PAGES = 8
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from engine.parallel.emulated import main; "
    "main({channel}, {lifeline}, {folder!r}, {grace_s!r})"
)


class DriversGauge:
    """What the driver has left."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self._driver = driver
        self.now_s = HostGauge().now_s

    def read(self) -> MemoryReading:
        total = self._driver.total_bytes
        return MemoryReading(total_bytes=total, available_bytes=total - self._driver.physical_bytes)


@contextmanager
def drivers() -> Iterator[EmulatedDriver]:
    """This process's driver. Those of a crew that is started meanwhile have one each."""
    driver = EmulatedDriver(granularity=PAGE, total_bytes=2**28, fills_at_once=True)

    def memory_for(device: torch.device, residency: Residency) -> CudaMemory:
        assert device.type == "cpu"
        keep_bytes = KEPT_PAGES * PAGE
        return CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=keep_bytes)

    with ExitStack() as undo:
        for where, name, value in (
            (crew, "_START", _START),
            (by_device, "memory_for", memory_for),
            (follower, "gauge_for", lambda _: DriversGauge(driver)),
        ):
            undo.enter_context(mock.patch.object(where, name, value))
        yield driver


def physical_bytes(llm: LLM, driver: EmulatedDriver) -> list[int]:
    """Of each rank's driver."""
    assert llm._team is not None
    here, answers = llm._team.all_of("read_memory", own=DriversGauge(driver).read)
    readings = [here, *(answer.value for answer in answers)]
    return [reading.total_bytes - reading.available_bytes for reading in readings]


def main(channel: int, lifeline: int, folder: str, grace_s: float) -> None:
    """The process of a rank other than 0."""
    with drivers():
        child.main(channel, lifeline, folder, grace_s)
