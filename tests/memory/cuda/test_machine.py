"""Random use of CudaMemory with kernels that run meanwhile and calls that fail at any moment.

The emulator raises where a real driver would fault; its memory is what the counters must say.
"""

import gc
import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from memory.cuda.names import CUresult
from memory.cuda.streams import Work
from quire.errors import MemoryUnavailable
from quire.memory.cuda import CudaMemory

PAGE = 2**12
NUM_PAGES = 24
NUM_SLOTS = 16  # pages of a window


class CudaMachine(RuleBasedStateMachine):
    """Two regions with a window each, against dictionaries: page → value, slot → page."""

    @initialize(total_pages=st.integers(8, 80), keep_pages=st.integers(0, 6))
    def begin(self, total_pages: int, keep_pages: int) -> None:
        logging.disable(logging.WARNING)  # thousands of them: each failed call is logged
        self.driver = EmulatedDriver(total_bytes=total_pages * PAGE, granularity=PAGE)
        self.memory = CudaMemory(
            driver=self.driver, tensor_device=TENSOR_DEVICE, keep_bytes=keep_pages * PAGE
        )
        self.memory.used_on(1)
        self.keep_pages = keep_pages
        self.kernels: list[Work] = []
        self.regions = [
            self.memory.reserve(NUM_PAGES * PAGE, heap_bytes=4 * PAGE) for _ in range(2)
        ]
        self.windows = [region.window(NUM_SLOTS * PAGE) for region in self.regions]
        self.pages = [region.tensor(torch.uint8).view(-1, PAGE) for region in self.regions]
        self.slots = [window.tensor(torch.uint8).view(-1, PAGE) for window in self.windows]
        self.values: list[dict[int, int]] = [{}, {}]
        self.shown: list[dict[int, int]] = [{}, {}]

    def run(self, data: st.DataObject, num_pages: int) -> tuple[int, int]:
        """(first, count) of a run."""
        first = data.draw(st.integers(0, num_pages - 1), label="first")
        return first, data.draw(st.integers(1, min(6, num_pages - first)), label="count")

    def tried(self, data: st.DataObject, call: Callable[[], object]) -> bool:
        """Whether it was done; one of its calls of the driver may fail."""
        failing = data.draw(st.one_of(st.none(), st.integers(1, 25)), label="failing call")
        error = data.draw(
            st.sampled_from([CUresult.CUDA_ERROR_UNKNOWN, CUresult.CUDA_ERROR_OUT_OF_MEMORY])
        )
        if failing:
            self.driver.fail_call(failing, error)
        try:
            call()
        except MemoryUnavailable:
            return False
        finally:
            self.driver.fails = lambda name, number: None
        return True

    @rule(data=st.data(), which=st.integers(0, 1))
    def commit(self, data: st.DataObject, which: int) -> None:
        first, count = self.run(data, NUM_PAGES)
        pages = range(first, first + count)
        values = self.values[which]
        if values.keys() & pages:
            return
        region = self.regions[which]
        if self.tried(data, lambda: region.commit(first * PAGE, count * PAGE)):
            self.finish_all()  # zeroing is the device's work too
            assert self.pages[which][first : first + count].eq(0).all()
            values.update(dict.fromkeys(pages, 0))

    @precondition(lambda self: any(self.values))
    @rule(data=st.data())
    def decommit(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from([i for i in range(2) if self.values[i]]))
        values = self.values[which]
        first = data.draw(st.sampled_from(sorted(values)))
        count = 1
        while first + count in values and count < 5:
            count += 1
        region = self.regions[which]
        assert self.tried(data, lambda: region.decommit(first * PAGE, count * PAGE))
        for page in range(first, first + count):
            del values[page]
        shown = self.shown[which]
        self.shown[which] = {slot: page for slot, page in shown.items() if page in values}

    @precondition(lambda self: any(self.values))
    @rule(data=st.data())
    def show(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from([i for i in range(2) if self.values[i]]))
        values, shown = self.values[which], self.shown[which]
        first = data.draw(st.sampled_from(sorted(values)))
        count = 1
        while first + count in values and count < 5:
            count += 1
        slot = data.draw(st.integers(0, NUM_SLOTS - count))
        window = self.windows[which]
        if self.tried(data, lambda: window.map(slot * PAGE, first * PAGE, count * PAGE)):
            shown.update({slot + i: first + i for i in range(count)})
        else:
            for i in range(count):
                shown.pop(slot + i, None)

    @rule(data=st.data(), which=st.integers(0, 1))
    def unmap(self, data: st.DataObject, which: int) -> None:
        slot, count = self.run(data, NUM_SLOTS)
        window = self.windows[which]
        assert self.tried(data, lambda: window.unmap(slot * PAGE, count * PAGE))
        for i in range(slot, slot + count):
            self.shown[which].pop(i, None)

    @precondition(lambda self: any(self.values))
    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        which = data.draw(st.sampled_from([i for i in range(2) if self.values[i]]))
        page = data.draw(st.sampled_from(sorted(self.values[which])))
        self.finish_all()
        self.pages[which][page] = value
        self.values[which][page] = value

    @rule(which=st.integers(0, 1), stream=st.integers(0, 1))
    def launch(self, which: int, stream: int) -> None:
        """A kernel reads all that it may."""
        seen = [self.pages[which][page] for page in self.values[which]]
        seen += [self.slots[which][slot] for slot in self.shown[which]]
        self.kernels.append(
            self.driver.launch(*((row.data_ptr(), PAGE) for row in seen), stream=stream)
        )

    @precondition(lambda self: self.kernels)
    @rule()
    def finish_one(self) -> None:
        self.driver.finish(self.kernels.pop(0))

    @rule()
    def finish_all(self) -> None:
        while self.kernels:
            self.driver.finish(self.kernels.pop(0))

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        keep_pages = data.draw(st.integers(0, 6))
        if self.tried(data, lambda: self.memory.trim(keep_pages * PAGE)):
            spare = self.memory.physical_bytes - self.memory.hold_bytes
            assert self.memory.kept_bytes <= keep_pages * PAGE or spare <= 0

    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        num_pages = data.draw(st.integers(0, 8))
        if self.tried(data, lambda: self.memory.prepare(num_pages * PAGE)):
            assert self.memory.kept_bytes >= min(num_pages, self.keep_pages) * PAGE

    @rule(num_pages=st.integers(0, 20))
    def hold(self, num_pages: int) -> None:
        self.memory.hold_bytes = num_pages * PAGE

    @rule()
    def settle(self) -> None:
        """All that was given back is back once the device is idle."""
        self.finish_all()
        self.memory.poll()
        assert self.memory.hidden_bytes == 0
        committed = sum(map(len, self.values)) * PAGE
        held = self.memory.hold_bytes
        assert self.memory.kept_bytes <= max(self.keep_pages * PAGE, held - committed)
        assert self.memory.parked_bytes <= self.memory.kept_bytes
        assert self.memory.physical_bytes == committed + self.memory.kept_bytes
        mapped = committed + sum(map(len, self.shown)) * PAGE + self.memory.parked_bytes
        assert self.driver.mapped_bytes(0, 2**63) == mapped

    @rule()
    def be_full(self) -> None:
        """Whatever is refused is refused with what is there unharmed."""
        self.finish_all()
        region = self.memory.reserve(100 * PAGE)
        with pytest.raises(MemoryUnavailable, match="lower the KV budget"):
            region.commit(0, 100 * PAGE)
        region.close()

    @rule()
    def read(self) -> None:
        self.finish_all()
        for which in range(2):
            for page, value in self.values[which].items():
                assert self.pages[which][page].eq(value).all()
            for slot, page in self.shown[which].items():
                assert self.slots[which][slot].eq(self.values[which][page]).all()

    @invariant()
    def counts_agree(self) -> None:
        for region, values in zip(self.regions, self.values, strict=True):
            assert region.committed_bytes == len(values) * PAGE
        assert self.memory.physical_bytes == self.driver.physical_bytes == self.driver.backed_bytes
        assert not self.driver.refused

    def teardown(self) -> None:
        logging.disable(logging.NOTSET)
        if not hasattr(self, "driver"):
            return
        for region in self.regions:
            region.close()
        self.memory.hold_bytes = 0
        self.memory.trim()
        assert self.driver.physical_bytes == self.driver.backed_bytes == 0
        self.pages.clear()
        self.slots.clear()
        self.windows.clear()
        gc.collect()
        self.memory.poll()
        assert self.driver.reserved_bytes == 0


TestCudaMemory = CudaMachine.TestCase
TestCudaMemory.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)
