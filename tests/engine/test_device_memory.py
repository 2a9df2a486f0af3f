"""The engine on a GPU's memory, as far as an emulated driver has it: tensors of the CPU lie there.

Kernels run on after each step, over all that is shown, until the next one begins to compute. So
whatever is unmapped under one, or read where nothing is mapped, ends the test, or the process.
"""

import gc
from typing import Any

import pytest
import torch

import quire
from conformance.covering import only
from engine.schedules import TEXTS, Result, Schedule, demo, prompts
from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from memory.cuda.streams import Work
from quire import LLM, SamplingParams
from quire.engine.step_plan import StepPlan
from quire.errors import MemoryUnavailable
from quire.kv import STRATEGIES
from quire.memory.cuda import CudaMemory
from quire.memory.machine.readings import MemoryReading

PAGE = 4096  # small, as the model is
CACHES = (*STRATEGIES, "virtual-shared")


class Device:
    """An emulated device that is always busy."""

    def __init__(self, *, page_bytes: int = PAGE, keep_pages: int = 16) -> None:
        self.driver = EmulatedDriver(granularity=page_bytes, total_bytes=2**28, fills_at_once=True)
        self.memory = CudaMemory(
            driver=self.driver, tensor_device=TENSOR_DEVICE, keep_bytes=keep_pages * page_bytes
        )
        self.kernel: Work | None = None
        self.num_steps = 0

    def began(self, llm: LLM) -> None:
        llm.engine.watch = self.compute

    def compute(self, plan: StepPlan) -> None:
        """What the step before was still doing is done; the tensors of this one are the CPU's."""
        if self.kernel is not None:
            self.driver.finish(self.kernel)
        page = self.memory.page_bytes
        granules = self.memory._granules
        hidden = {
            table.start + number * page
            for waiting in granules._hidden
            for table, run in waiting.runs
            for number in run
        }
        hidden |= {table.start + number * page for table, number in granules._parked.values()}
        mapped = self.driver._mappings.items()
        ranges = [(at, m.nbytes) for at, m in mapped if m.is_accessible and at not in hidden]
        self.kernel = self.driver.launch(*ranges)

    def stepped(self, llm: LLM) -> None:
        self.num_steps += 1
        llm._kv.accounting.check()
        committed = llm._kv.accounting.usage().committed_bytes
        assert llm.memory.committed_bytes == committed
        assert self.driver.physical_bytes == self.memory.physical_bytes
        in_use = self.memory.physical_bytes - self.memory.kept_bytes
        assert committed <= in_use <= committed + self.memory.hidden_bytes
        assert self.driver.refused == []

    def idle(self) -> None:
        if self.kernel is not None:
            self.driver.finish(self.kernel)


def run(seed: int, cache: str) -> tuple[Device, Result]:
    device = Device()
    schedule = Schedule(seed, cache, provider=device.memory)
    schedule.began, schedule.stepped = device.began, device.stepped
    result = schedule.run()
    assert not result.faults
    return device, result


@pytest.mark.parametrize("cache", only(CACHES, "growing", "virtual-shared"))
@pytest.mark.parametrize("seed", only([0, 1], 0))
def test_tokens_are_those_of_generate_and_all_memory_goes_back(cache: str, seed: int) -> None:
    device, result = run(seed, cache)
    assert result.num_sequences
    assert device.num_steps
    device.idle()
    driver = device.driver
    assert driver.calls["cuMemCreate"]
    assert driver.physical_bytes == 0  # on closing, whatever was kept
    del device
    gc.collect()
    assert driver.reserved_bytes == 0


def test_pages_are_created_while_the_device_computes() -> None:
    """Those of a step of decoding are there before it is planned."""
    device = Device(keep_pages=64)
    created: list[int] = []  # so far, when a step's memory is there
    with LLM(demo(), provider=device.memory, max_model_len=128, max_num_batched_tokens=64) as llm:
        device.began(llm)
        compute = llm.engine.watch

        def watch(plan: StepPlan) -> None:
            created.append(device.driver.calls["cuMemCreate"])
            compute(plan)

        llm.engine.watch = watch
        before: list[int] = []
        request = llm.request(list(prompts()[0]), SamplingParams(max_tokens=60, ignore_eos=True))
        llm.start(request, bool)
        while llm.engine.scheduler.has_unfinished:
            before.append(device.driver.calls["cuMemCreate"])
            llm.step()
    pages_of_a_block = 16 * 8192 // PAGE
    assert created[1:] == before[1:]
    assert created[-1] >= created[1] + pages_of_a_block  # blocks were added on the way


def test_what_is_prefaulted_is_there_from_the_beginning() -> None:
    device = Device()
    with LLM(
        demo(),
        provider=device.memory,
        residency="prefault",
        kv_cache_memory_bytes="4MiB",
        max_model_len=128,
    ) as llm:
        assert device.driver.physical_bytes == llm._resident.kept_bytes == 4 * 2**20
        created = device.driver.calls["cuMemCreate"]
        llm.generate(TEXTS[0])
        assert device.driver.calls["cuMemCreate"] == created
        assert device.driver.physical_bytes == 4 * 2**20
        llm.resize(2**20)
        assert device.driver.physical_bytes <= 2**20
    assert device.driver.physical_bytes == 0


class Neighbour:
    """A gauge of the emulated device, of which another process takes ``taken_bytes``."""

    def __init__(self, device: Device) -> None:
        self.device, self.taken_bytes, self.time_s = device, 0, 0.0

    def now_s(self) -> float:
        self.time_s += 1.0
        return self.time_s

    def read(self) -> MemoryReading:
        total = self.device.driver.total_bytes
        free = total - self.device.driver.physical_bytes - self.taken_bytes
        return MemoryReading(total_bytes=total, available_bytes=max(0, free), source="emulated")


def test_what_others_take_of_the_device_is_given_up() -> None:
    device = Device(keep_pages=256)
    neighbour = Neighbour(device)
    with LLM(
        demo(),
        provider=device.memory,
        gauge=neighbour,
        kv_cache_memory_bytes="32MiB",
        max_model_len=128,
    ) as llm:
        llm.generate([list(each) for each in prompts()[::3]], SamplingParams(max_tokens=8))
        cached = llm.usage().cached_bytes
        assert cached > 0
        assert device.memory.kept_bytes > 0
        total = device.driver.total_bytes
        neighbour.taken_bytes = total - device.driver.physical_bytes  # and the headroom with it
        llm.step()
        assert llm.usage().cached_bytes < cached
        assert llm.elastic.ceiling_bytes < 32 * 2**20
        assert device.memory.kept_bytes == 0
        assert "is missing" in llm.elastic.reason
        assert llm.elastic.memory is not None
        assert llm.elastic.memory.available_bytes < neighbour.read().available_bytes


@pytest.mark.parametrize("cache", only(CACHES, "paged"))
def test_tokens_are_those_of_generate_on_pages_as_large_as_a_gpus(cache: str) -> None:
    """Four of the eight layers lie together: 512 tokens fill a page."""
    device = Device(page_bytes=2**21, keep_pages=2)
    schedule = Schedule(3, cache, provider=device.memory)
    schedule.options |= {"kv_cache_memory_bytes": "16MiB", "swap_space": "1MiB"}
    schedule.began, schedule.stepped = device.began, device.stepped
    result = schedule.run()
    assert result.num_sequences
    assert not result.faults
    device.idle()
    assert device.driver.physical_bytes == 0


@pytest.mark.parametrize("cache", only(STRATEGIES, "contiguous", "virtual"))
def test_generate_with_a_cache_on_large_pages(cache: str) -> None:
    device, model = Device(page_bytes=2**21, keep_pages=0), demo().model
    prompt = torch.tensor([prompts()[0], prompts()[0]])
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=12, min_new_tokens=12)
    options["attention_mask"] = torch.ones_like(prompt)
    with quire.cache(
        model,
        cache,
        provider=device.memory,
        max_model_len=256,
        max_num_seqs=2,
        kv_cache_memory_bytes="64MiB",
    ) as kept:
        told = model.generate(prompt, past_key_values=kept, **options)
        assert kept.usage().committed_bytes == kept.memory.committed_bytes > 0
    assert told.equal(model.generate(prompt, **options))
    device.memory.poll(wait=True)
    assert device.driver.physical_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize("cache", CACHES)
def test_a_hundred_schedules(cache: str) -> None:
    for seed in range(100):
        run(seed, cache)


def test_what_was_taken_at_the_start_goes_back_if_there_is_no_engine() -> None:
    device = Device(keep_pages=0)
    device.driver.total_bytes = 2**22
    with pytest.raises(MemoryUnavailable, match="lower the KV budget"):
        LLM(
            demo(),
            provider=device.memory,
            max_model_len=128,
            residency="prefault",
            kv_cache_memory_bytes=2**23,
        )
    assert device.driver.calls["cuMemCreate"]
    assert device.driver.physical_bytes == 0
