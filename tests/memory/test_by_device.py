"""Who provides, limits and reads the memory of a device, and what is said where it cannot be."""

from typing import Any

import pytest
import torch

from memory.cuda.emulator import TENSOR_DEVICE, CUresult, EmulatedDriver
from memory.cuda.fake_torch import FakeCuda, fake_cuda
from quire.errors import ConfigError, MemoryUnavailable
from quire.memory import HostMemory, by_device
from quire.memory.budget import BUDGETS, Needs, make_ledger
from quire.memory.by_device import (
    gauge_for,
    give_back_kept,
    machine_for,
    make_resident,
    memory_for,
    why_no_memory,
)
from quire.memory.cuda import CudaMemory
from quire.memory.cuda import memory as cuda
from quire.memory.cuda.resident import CudaResident
from quire.memory.machine import CudaGauge, CudaPeak, cuda_devices
from quire.memory.machine.readings import HostGauge
from quire.memory.residency import HostResident, Residency

GIB = 2**30
CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda(monkeypatch)


def needs(weights: int = GIB) -> Needs:
    return Needs(
        weights_bytes=weights,
        counted_weights_bytes=weights,
        activation_bytes=GIB // 2,
        graph_bytes=GIB // 4,
        bytes_per_token=2**17,
        context_tokens=4096,
        least_bytes=2**24,
    )


def test_a_cpu_has_memory_of_the_host() -> None:
    assert isinstance(memory_for(CPU, "on-demand"), HostMemory)
    assert machine_for(CPU).device is None
    assert isinstance(gauge_for(CPU), HostGauge)
    assert isinstance(make_resident(HostMemory(), "on-demand", GIB), HostResident)


def test_a_gpu_has_memory_of_its_driver(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    class Memory:
        was_tried = False

        def __init__(self, **options: int) -> None:
            asked.update(options)

        def try_out(self) -> None:
            self.was_tried = True

    monkeypatch.setattr(by_device, "CudaMemory", Memory)
    made: Any = memory_for(GPU, "prefault")
    assert made.was_tried
    assert asked == {"device": 1, "stream": 7}
    memory_for(torch.device("cuda"), "on-demand")
    assert asked["device"] == 0
    assert isinstance(gauge_for(GPU), CudaGauge)


@pytest.mark.parametrize(
    ("device", "residency", "says"),
    [
        (GPU, "lock", "set residency=prefault"),
        (torch.device("mps"), "on-demand", "set device=cpu"),
    ],
)
def test_what_cannot_be_is_said(device: torch.device, residency: Residency, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        memory_for(device, residency)


def test_no_bindings_no_driver_and_no_mapping_are_said(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> object:
        raise ConfigError("memory of a GPU needs the package cuda-bindings")

    monkeypatch.setattr(cuda, "load_driver_functions", missing)
    with pytest.raises(ConfigError, match="cuda-bindings"):
        memory_for(GPU, "on-demand")
    monkeypatch.setattr(cuda, "load_driver_functions", EmulatedDriver)
    with pytest.raises(ConfigError, match="CUDA device 1 cannot be used"):  # it has one: number 0
        memory_for(GPU, "on-demand")
    monkeypatch.setattr(cuda, "load_driver_functions", lambda: EmulatedDriver(can_map=False))
    with pytest.raises(ConfigError, match="cannot map memory to chosen addresses"):
        memory_for(torch.device("cuda:0"), "on-demand")
    assert "cannot map memory" in str(why_no_memory(torch.device("cuda:0")))
    monkeypatch.setattr(cuda, "load_driver_functions", lambda: EmulatedDriver(fills_at_once=True))
    monkeypatch.setattr(cuda, "CUDA", cuda.CPU)  # where the emulator's tensors are
    assert why_no_memory(torch.device("cuda:0")) is None
    monkeypatch.setattr(EmulatedDriver, "cuMemsetD8Async", lambda *_: (CUresult.CUDA_SUCCESS,))
    assert "new memory is not full of zeros" in str(why_no_memory(torch.device("cuda:0")))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ConfigError, match="AMD GPUs"):
        memory_for(GPU, "on-demand")


def test_the_ledger_says_who_has_taken_a_gpus_memory(gpu: FakeCuda) -> None:
    gpu.free_bytes = GIB
    machine = machine_for(GPU)
    assert machine.device is not None
    assert machine.device.others_bytes == 6 * GIB
    ledger = make_ledger(machine, needs(), budget="vllm")
    with pytest.raises(ConfigError, match="is more than the machine has available") as refused:
        ledger.require()
    assert "CUDA graphs" in str(refused.value)
    auto = make_ledger(machine, needs(), budget="auto", mode="dedicated")
    assert "6.00 GiB by others and the driver, 1.00 GiB by this process" in auto.explain()


@pytest.mark.parametrize("rule", BUDGETS)
def test_every_rule_counts_on_the_device_alone(gpu: FakeCuda, rule: str) -> None:
    ledger = make_ledger(machine_for(GPU), needs(), budget=rule)
    taken = GIB // 2 + GIB // 4  # by a step, and by graphs
    shared, used = 2 * GIB, 3 * GIB  # headroom is a quarter of so small a device
    assert ledger.room_bytes == 5 * GIB - taken
    assert (
        ledger.kv_bytes
        == {
            "auto": 8 * GIB - used - shared - taken,
            "vllm": int(8 * GIB * 0.9) - GIB - taken,
            "mistralrs": int(8 * GIB * 0.9) - GIB - taken,
            "llamacpp": 4096 * 2**17,
            "fraction": int(8 * GIB * 0.9) - GIB - taken,
        }[rule]
    )
    assert (ledger.refusal is None) == (ledger.kv_bytes <= ledger.room_bytes)


def test_a_device_that_does_not_answer_is_no_crash(gpu: FakeCuda) -> None:
    gpu.error = "CUDA error: out of memory\nand many lines more"
    with pytest.raises(MemoryUnavailable, match=r"\(CUDA error: out of memory\): if others"):
        machine_for(GPU)
    with pytest.raises(MemoryUnavailable):
        CudaGauge(1).read()
    said = cuda_devices()
    assert len(said) == 2
    assert all(isinstance(each, str) and "end them" in each for each in said)


def test_a_gauge_reads_the_device(gpu: FakeCuda) -> None:
    reading = CudaGauge(1).read()
    assert (reading.available_bytes, reading.total_bytes) == (5 * GIB, 8 * GIB)
    assert reading.source == "fake 1"


def test_a_peak_is_above_its_beginning(gpu: FakeCuda) -> None:
    peak = CudaPeak(0)
    peak.begin()
    gpu.peak_bytes = gpu.own_bytes + 77
    assert peak.peak_bytes() == 77
    assert gpu.num_emptied == 2


# -- what stays on a GPU


def emulated(total_bytes: int = GIB) -> tuple[EmulatedDriver, CudaMemory]:
    driver = EmulatedDriver(total_bytes=total_bytes)
    return driver, CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=0)


def test_prefault_takes_the_capacity_at_the_start_and_follows_the_ceiling() -> None:
    driver, memory = emulated()
    page = memory.page_bytes
    resident = make_resident(memory, "prefault", 10 * page)
    assert isinstance(resident, CudaResident)
    region = memory.reserve(100 * page)
    resident.prefault()
    assert driver.physical_bytes == resident.kept_bytes == 10 * page

    created = driver.calls["cuMemCreate"]
    region.commit(0, 6 * page)
    assert (driver.physical_bytes, resident.kept_bytes) == (10 * page, 4 * page)
    region.decommit(0, 3 * page)
    memory.poll(wait=True)
    assert (driver.physical_bytes, resident.kept_bytes) == (10 * page, 7 * page)
    assert driver.calls["cuMemCreate"] == created

    resident.follow(5 * page)  # three are committed
    assert (driver.physical_bytes, resident.kept_bytes) == (5 * page, 2 * page)
    resident.follow(10 * page)
    region.commit(10 * page, 4 * page)
    resident.rest(short=True)
    assert driver.physical_bytes == 7 * page
    region.close()
    resident.close()
    assert driver.physical_bytes == 0


def test_rest_goes_on_where_torch_gives_nothing_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As while a graph is captured for another engine."""
    fake = fake_cuda(monkeypatch)
    driver, memory = emulated()
    resident = make_resident(memory, "on-demand", 10 * memory.page_bytes)
    resident.rest(short=False)
    assert fake.num_emptied == 1

    def refuses() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuses)
    memory.prepare(memory.page_bytes)
    resident.rest(short=True)
    assert driver.physical_bytes == 0
    assert "torch keeps unused memory" in caplog.text


def test_on_demand_keeps_nothing_for_the_cache() -> None:
    driver, memory = emulated()
    resident = make_resident(memory, "on-demand", 10 * memory.page_bytes)
    resident.prefault()
    resident.watch()
    assert driver.physical_bytes == resident.kept_bytes == 0


def test_a_device_without_so_much_says_so() -> None:
    driver, memory = emulated(total_bytes=2**20)
    resident = make_resident(memory, "prefault", 2**21)
    with pytest.raises(MemoryUnavailable, match="lower the KV budget"):
        resident.prefault()
    resident.close()
    assert driver.physical_bytes == 0


def test_closing_goes_on_where_the_driver_takes_nothing_back() -> None:
    driver, memory = emulated()
    resident = make_resident(memory, "prefault", 2 * memory.page_bytes)
    resident.prefault()
    unknown = CUresult.CUDA_ERROR_UNKNOWN
    driver.fails = lambda name, _: unknown if name == "cuMemRelease" else None
    resident.close()
    assert driver.physical_bytes
    driver.fails = lambda *_: None
    memory.poll()
    assert driver.physical_bytes == 0


def test_what_is_kept_of_a_step_that_was_tried_goes_back() -> None:
    driver = EmulatedDriver(total_bytes=GIB)
    memory = CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE)
    region = memory.reserve(2 * memory.page_bytes)
    region.commit(0, 2 * memory.page_bytes)
    region.close()
    assert driver.physical_bytes == 2 * memory.page_bytes
    give_back_kept(memory)
    assert driver.physical_bytes == 0
    give_back_kept(HostMemory())
