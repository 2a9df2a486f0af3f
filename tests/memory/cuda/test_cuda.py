"""CudaMemory beyond what every provider promises: fences, kept pages, refusals. All emulated."""

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver, Violation
from memory.cuda.names import CUresult
from quire.errors import ConfigError, MemoryUnavailable
from quire.memory.cuda import CudaMemory, CudaRegion
from quire.memory.cuda.driver import load_driver_functions
from quire.memory.cuda.memory import CudaWindow

PAGE = 2**16


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver(total_bytes=64 * PAGE)


def memory_of(driver: EmulatedDriver, *, keep_pages: int = 0) -> CudaMemory:
    return CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=keep_pages * PAGE)


@pytest.fixture
def memory(driver: EmulatedDriver) -> CudaMemory:
    return memory_of(driver)


def committed(memory: CudaMemory, num_pages: int) -> CudaRegion:
    region = memory.reserve(2**10 * PAGE, heap_bytes=8 * PAGE)
    region.commit(0, num_pages * PAGE)
    return region


def address(region: CudaRegion) -> int:
    return region.tensor(torch.uint8).data_ptr()


# -- how the driver is called --------------------------------------------------------------------


def test_access_is_given_once_a_run(driver: EmulatedDriver, memory: CudaMemory) -> None:
    region = memory.reserve(100 * PAGE)
    region.commit(0, 20 * PAGE)
    assert driver.calls["cuMemCreate"] == driver.calls["cuMemMap"] == 20
    assert driver.calls["cuMemSetAccess"] == driver.calls["cuMemsetD8Async"] == 1
    region.commit(20 * PAGE, 2 * PAGE, stride=2 * PAGE, count=4)  # pieces that touch: one run
    assert driver.calls["cuMemSetAccess"] == 2
    region.commit(40 * PAGE, 2 * PAGE, stride=5 * PAGE, count=4)
    assert driver.calls["cuMemSetAccess"] == 6
    region.decommit(0, 28 * PAGE)
    assert driver.calls["cuMemUnmap"] == 1
    assert not driver.refused


def test_a_window_shows_the_same_memory_and_creates_none(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 8)
    window = region.window(64 * PAGE)
    window.map(3 * PAGE, PAGE, 6 * PAGE)
    assert driver.calls["cuMemCreate"] == 8
    assert driver.calls["cuMemSetAccess"] == 2
    window.unmap(3 * PAGE, 6 * PAGE)
    assert driver.calls["cuMemUnmap"] == 1
    assert driver.backed_bytes == driver.physical_bytes == 8 * PAGE


@pytest.mark.parametrize("times", [3, 4])
def test_a_page_may_be_a_multiple_of_the_granularity(driver: EmulatedDriver, times: int) -> None:
    page = times * PAGE
    memory = CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=0, page_bytes=page)
    region = memory.reserve(page + 1)
    assert (memory.page_bytes, region.nbytes) == (page, 2 * page)
    region.commit(page, page)
    assert driver.calls["cuMemCreate"] == 1
    assert driver.physical_bytes == page
    assert not driver.refused
    with pytest.raises(ConfigError, match="page_bytes=100000"):
        CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, page_bytes=100_000)
    with pytest.raises(ConfigError, match="heap_bytes"):
        memory.reserve(1, heap_bytes=page + PAGE)


# -- fences --------------------------------------------------------------------------------------


def test_a_running_kernel_keeps_what_is_decommitted(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 8)
    kernel = driver.launch((address(region), 2 * PAGE))
    region.decommit(0, 4 * PAGE)
    assert region.committed_bytes == 4 * PAGE
    assert memory.hidden_bytes == 4 * PAGE
    assert memory.physical_bytes == driver.physical_bytes == 8 * PAGE
    memory.poll()
    assert memory.hidden_bytes == 4 * PAGE
    driver.finish(kernel)
    memory.poll()
    assert memory.hidden_bytes == 0
    assert memory.physical_bytes == driver.physical_bytes == driver.backed_bytes == 4 * PAGE


def test_the_emulator_would_notice_a_missing_fence(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 1)
    driver.launch((address(region), 1))
    with pytest.raises(Violation, match="while the device uses it"):
        driver.cuMemUnmap(address(region), PAGE)
    with pytest.raises(Violation, match="no access"):
        driver.launch((address(region) + PAGE, 1))


def test_to_commit_again_waits_for_what_is_hidden_there(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 4)
    region.tensor(torch.uint8)[: 4 * PAGE] = 7
    kernel = driver.launch((address(region), 4 * PAGE))
    region.decommit(0, 4 * PAGE)
    region.commit(8 * PAGE, PAGE)  # elsewhere: no wait
    assert not kernel.is_done
    region.commit(3 * PAGE, PAGE)
    assert kernel.is_done
    assert region.tensor(torch.uint8)[3 * PAGE : 4 * PAGE].eq(0).all()
    memory.poll()
    assert driver.physical_bytes == region.committed_bytes == 2 * PAGE


def test_a_page_is_replaced_after_the_kernels_that_read_it(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 2)
    region.tensor(torch.uint8)[PAGE : 2 * PAGE] = 7
    window = region.window(PAGE)
    window.map(0, 0, PAGE)
    seen = window.tensor(torch.uint8)
    kernel = driver.launch((seen.data_ptr(), PAGE))
    window.map(0, PAGE, PAGE)  # copy-on-write in place
    assert kernel.is_done
    assert seen.eq(7).all()


def test_what_is_decommitted_is_seen_through_no_window(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 4)
    window = region.window(4 * PAGE)
    window.map(0, 0, 4 * PAGE)
    region.decommit(PAGE, 2 * PAGE)
    assert driver.physical_bytes == 2 * PAGE
    assert driver.mapped_bytes(window.tensor(torch.uint8).data_ptr(), 4 * PAGE) == 2 * PAGE


def test_close_waits_for_the_device(driver: EmulatedDriver, memory: CudaMemory) -> None:
    region = committed(memory, 4)
    kernel = driver.launch((address(region), PAGE))
    region.close()
    assert kernel.is_done
    assert driver.physical_bytes == driver.reserved_bytes == 0


def test_another_stream_is_the_callers_to_order(driver: EmulatedDriver) -> None:
    memory = CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=0, stream=7)
    region = committed(memory, 2)
    kernel = driver.launch((address(region), PAGE), stream=7)
    region.decommit(0, PAGE)
    assert memory.hidden_bytes == PAGE
    driver.finish(kernel)
    memory.poll()
    driver.launch((address(region) + PAGE, PAGE), stream=8)
    with pytest.raises(Violation, match="while the device uses it"):
        region.decommit(PAGE, PAGE)


# -- kept pages ----------------------------------------------------------------------------------


def test_kept_pages_are_committed_again_zeroed(driver: EmulatedDriver) -> None:
    memory = memory_of(driver, keep_pages=4)
    region = committed(memory, 6)
    region.tensor(torch.uint8)[: 6 * PAGE] = 7
    region.decommit(0, 6 * PAGE)
    assert memory.kept_bytes == memory.physical_bytes == driver.physical_bytes == 4 * PAGE
    region.commit(100 * PAGE, 5 * PAGE)
    assert driver.calls["cuMemCreate"] == 7
    assert region.tensor(torch.uint8)[100 * PAGE : 105 * PAGE].eq(0).all()
    region.decommit(100 * PAGE, 5 * PAGE)
    memory.trim(PAGE)
    assert memory.kept_bytes == driver.physical_bytes == PAGE
    memory.trim()
    assert driver.physical_bytes == driver.backed_bytes == 0


def test_what_is_kept_stays_mapped_until_it_is_needed_elsewhere(driver: EmulatedDriver) -> None:
    memory = memory_of(driver, keep_pages=4)
    region = committed(memory, 6)
    region.tensor(torch.uint8)[: 6 * PAGE] = 7
    region.decommit(0, 6 * PAGE)
    assert memory.parked_bytes == memory.kept_bytes == 4 * PAGE
    calls = driver.calls.copy()
    region.commit(PAGE, 3 * PAGE)  # where it is
    for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"):
        assert driver.calls[name] == calls[name]
    assert region.tensor(torch.uint8)[PAGE : 4 * PAGE].eq(0).all()
    region.commit(100 * PAGE, PAGE)  # the last one goes there
    assert memory.parked_bytes == 0
    assert driver.calls["cuMemUnmap"] == calls["cuMemUnmap"] + 1
    assert driver.calls["cuMemCreate"] == calls["cuMemCreate"]
    region.commit(0, PAGE)
    assert driver.mapped_bytes(address(region), region.nbytes) == region.committed_bytes == 5 * PAGE
    assert not driver.refused


def test_what_is_seen_through_a_window_is_kept_at_its_own_place(driver: EmulatedDriver) -> None:
    memory = memory_of(driver, keep_pages=4)
    region = committed(memory, 2)
    window = region.window(4 * PAGE)
    window.map(PAGE, 0, 2 * PAGE)
    region.decommit(0, 2 * PAGE)
    assert memory.parked_bytes == 2 * PAGE
    assert driver.mapped_bytes(window.tensor(torch.uint8).data_ptr(), 4 * PAGE) == 0
    assert driver.mapped_bytes(address(region), 2 * PAGE) == 2 * PAGE
    region.close()
    assert memory.parked_bytes == 0
    assert memory.kept_bytes == driver.physical_bytes == 2 * PAGE


def test_what_is_kept_is_shown_again_after_each_stream_that_used_it(driver: EmulatedDriver) -> None:
    memory = memory_of(driver, keep_pages=4)
    memory.used_on(5)
    region = committed(memory, 2)
    kernel = driver.launch((address(region), PAGE), stream=5)
    region.decommit(0, 2 * PAGE)
    memory.poll()
    assert (memory.hidden_bytes, memory.parked_bytes) == (2 * PAGE, 0)
    region.commit(PAGE, PAGE)
    assert kernel.is_done


def test_pages_can_be_created_ahead(driver: EmulatedDriver) -> None:
    memory = memory_of(driver, keep_pages=8)
    memory.prepare(5 * PAGE)
    assert memory.kept_bytes == 5 * PAGE
    memory.prepare(100 * PAGE)
    assert memory.kept_bytes == 8 * PAGE
    region = memory.reserve(8 * PAGE)
    region.commit(0, 8 * PAGE)
    assert driver.calls["cuMemCreate"] == 8
    driver.total_bytes = 10 * PAGE
    with pytest.raises(MemoryUnavailable, match="CUDA_ERROR_OUT_OF_MEMORY"):
        memory.prepare(3 * PAGE)
    assert memory.physical_bytes == 8 * PAGE + memory.kept_bytes


# -- refusals ------------------------------------------------------------------------------------


def test_a_full_device_waits_for_what_is_hidden_and_then_refuses_with_numbers(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 60)
    kernel = driver.launch((address(region), 60 * PAGE))
    region.decommit(0, 30 * PAGE)
    region.commit(100 * PAGE, 30 * PAGE)
    assert kernel.is_done
    assert driver.physical_bytes == 60 * PAGE
    with pytest.raises(
        MemoryUnavailable,
        match=r"refused 5 x 64.00 KiB \(cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY\) with "
        r"256.0 KiB of 4.00 MiB free and 3.75 MiB in use here: lower the KV budget",
    ):
        region.commit(200 * PAGE, 5 * PAGE)
    assert region.committed_bytes == driver.physical_bytes == 60 * PAGE
    region.commit(200 * PAGE, 4 * PAGE)
    assert not driver.refused


def test_every_call_of_a_commit_may_fail(driver: EmulatedDriver, memory: CudaMemory) -> None:
    region = committed(memory, 4)
    region.tensor(torch.uint8)[: 4 * PAGE] = 7
    for number in range(1, 1 + 4 + 4 + 2 + 2 * 3):  # create, map, access; zero in its context
        driver.fail_call(number)
        with pytest.raises(MemoryUnavailable, match="CUDA_ERROR_UNKNOWN"):
            region.commit(10 * PAGE, 2 * PAGE, stride=4 * PAGE, count=2)
        assert region.committed_bytes == 4 * PAGE
        memory.poll()
        assert memory.physical_bytes == driver.physical_bytes == 4 * PAGE
    region.commit(10 * PAGE, 2 * PAGE, stride=4 * PAGE, count=2)
    assert region.tensor(torch.uint8)[: 4 * PAGE].eq(7).all()
    assert region.committed_bytes == driver.physical_bytes == 8 * PAGE


def test_every_call_of_a_decommit_may_fail_and_is_tried_again(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 60)
    for number in range(1, 30):
        driver.fail_call(number)
        region.decommit((number - 1) * 2 * PAGE, 2 * PAGE)
        driver.fails = lambda name, now: None
        memory.poll()
        assert driver.physical_bytes == memory.physical_bytes == region.committed_bytes
        assert memory.hidden_bytes == 0
    assert not driver.refused


def test_every_call_of_a_window_may_fail(driver: EmulatedDriver, memory: CudaMemory) -> None:
    region = committed(memory, 8)
    window = region.window(8 * PAGE)
    where = window.tensor(torch.uint8).data_ptr()
    num_failed = 0
    for number in range(1, 20):
        window.map(0, 4 * PAGE, 4 * PAGE)
        driver.fail_call(number)
        try:
            window.map(0, 0, 4 * PAGE)
        except MemoryUnavailable:
            num_failed += 1
            shown = 0
        else:
            shown = 4 * PAGE
        driver.fails = lambda name, now: None
        memory.poll()
        assert driver.mapped_bytes(where, 8 * PAGE) == shown
        assert driver.physical_bytes == 8 * PAGE
    assert num_failed >= 4 + 1 + 1  # maps, the access, the wait
    assert not driver.refused


def test_a_refused_reservation(driver: EmulatedDriver, memory: CudaMemory) -> None:
    driver.fail_call(1, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(
        MemoryUnavailable,
        match=r"64.00 KiB of address space \(cuMemAddressReserve failed: CUDA_ERROR_OUT_OF_MEMORY",
    ):
        memory.reserve(PAGE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": 3}, r"device 3 .*cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"),
        ({"driver": EmulatedDriver(can_map=False)}, "MANAGEMENT_SUPPORTED is 0"),
    ],
)
def test_a_device_that_cannot_is_refused(
    driver: EmulatedDriver, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CudaMemory(**{"driver": driver, "tensor_device": TENSOR_DEVICE} | options)


def test_without_a_driver(driver: EmulatedDriver) -> None:
    driver.fail_call(1, CUresult.CUDA_ERROR_NO_DEVICE)
    with pytest.raises(
        ConfigError, match=r"cuInit failed: CUDA_ERROR_NO_DEVICE.*memory of the CPU"
    ):
        memory_of(driver)

    class NoLibrary(EmulatedDriver):
        def cuInit(self, Flags: int) -> object:
            raise RuntimeError("libcuda.so.1 is not there")

    with pytest.raises(ConfigError, match=r"libcuda.so.1.*install NVIDIA's driver"):
        memory_of(NoLibrary())


def test_without_the_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-kv\[cuda\]'"):
        load_driver_functions()


def test_bindings_with_other_names_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(**{n: None for n in dir(EmulatedDriver) if n != "cuMemSetAccess"})
    monkeypatch.setattr("importlib.import_module", lambda name: other)
    with pytest.raises(ConfigError, match="have no cuMemSetAccess: install 12"):
        load_driver_functions()


# -- lifetimes -----------------------------------------------------------------------------------


def test_addresses_go_with_the_call_after_the_last_tensor(
    driver: EmulatedDriver, memory: CudaMemory
) -> None:
    region = committed(memory, 4)
    window = region.window(4 * PAGE)
    kept = window.tensor(torch.bfloat16)[5:10]
    window.close()
    region.close()
    del region, window
    gc.collect()
    memory.poll()
    assert driver.physical_bytes == 0
    assert driver.reserved_bytes == 4 * PAGE
    on_another_thread = [kept]
    del kept
    thread = threading.Thread(target=on_another_thread.clear)
    thread.start()
    thread.join()
    assert driver.reserved_bytes == 4 * PAGE  # to drop a tensor calls no driver
    memory.poll()
    assert driver.reserved_bytes == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("drop", [lambda region: None, lambda region: region.close()])
def test_nothing_is_left_when_all_is_dropped(
    driver: EmulatedDriver, drop: Callable[[CudaRegion], None]
) -> None:
    memory = memory_of(driver, keep_pages=3)
    memory.prepare(3 * PAGE)
    region = committed(memory, 8)
    window = region.window(8 * PAGE)
    window.map(0, 0, 8 * PAGE)
    kept = window.tensor(torch.uint8)
    kept[: 8 * PAGE] = 5
    driver.launch((address(region), 8 * PAGE))
    region.decommit(6 * PAGE, PAGE)
    drop(region)
    del memory, region, window
    gc.collect()
    del kept
    gc.collect()
    assert driver.physical_bytes == driver.backed_bytes == driver.reserved_bytes == 0
    assert driver.calls["cuEventDestroy"] == driver.calls["cuEventCreate"] > 0


def test_a_tensor_keeps_the_bytes_of_a_dropped_region(driver: EmulatedDriver) -> None:
    region = committed(memory_of(driver), 2)
    kept = region.tensor(torch.float8_e4m3fn)[: 2 * PAGE]
    kept.view(torch.uint8).fill_(3)
    del region
    gc.collect()
    assert kept.view(torch.uint8).eq(3).all()
    assert driver.physical_bytes == 2 * PAGE


# -- a trial on the real device ------------------------------------------------------------------


@pytest.fixture
def prompt_driver() -> EmulatedDriver:
    return EmulatedDriver(total_bytes=64 * PAGE, fills_at_once=True)


def test_a_trial_leaves_nothing_behind(prompt_driver: EmulatedDriver) -> None:
    memory = memory_of(prompt_driver, keep_pages=8)
    memory.try_out()
    memory.poll()  # addresses go with the next call
    assert memory.cannot_share is None
    assert (memory.physical_bytes, memory.hidden_bytes) == (0, 0)
    assert prompt_driver.physical_bytes == prompt_driver.reserved_bytes == 0
    assert prompt_driver.calls["cuMemMap"] == 1 + 2  # the page itself once, for it is parked


def test_whatever_the_driver_refuses_in_a_trial_is_said(prompt_driver: EmulatedDriver) -> None:
    memory = memory_of(prompt_driver, keep_pages=8)
    before = prompt_driver.num_calls
    memory.try_out()
    memory.poll()
    num_calls, said, shares = prompt_driver.num_calls - before, "", []
    for number in range(1, num_calls + 1):
        memory.cannot_share = None
        prompt_driver.fail_call(number)
        try:
            memory.try_out()
        except (ConfigError, MemoryUnavailable) as error:
            said += str(error) + "\n"
        else:
            shares.append(memory.cannot_share)
        memory.poll(wait=True)
        memory.trim()
        assert prompt_driver.physical_bytes == 0
    for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"):
        assert f"{call} failed: CUDA_ERROR_UNKNOWN" in said
    assert "set device=cpu" in said
    assert "cache=paged reserves no more" in said
    assert any("second address" in each for each in shares if each is not None)


@pytest.mark.parametrize("refused", ["memory", "tensor"])
def test_memory_that_is_not_what_it_should_be_is_refused(
    refused: str, prompt_driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(prompt_driver)
    if refused == "memory":
        monkeypatch.setattr(EmulatedDriver, "cuMemsetD8Async", lambda *_: (CUresult.CUDA_SUCCESS,))
    else:

        def no_tensor(*_: object) -> None:
            raise BufferError("DLPack: unsupported version")

        monkeypatch.setattr("quire.memory.cuda.memory.bytes_at", no_tensor)
    why = {"memory": "new memory is not full of zeros", "tensor": "unsupported version"}
    with pytest.raises(ConfigError, match=f"{why[refused]}.* or set device=cpu"):
        memory.try_out()
    assert prompt_driver.physical_bytes == 0


def test_a_trial_reads_what_it_wrote_at_each_address(
    prompt_driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(prompt_driver)
    with monkeypatch.context() as patch:
        patch.setattr(CudaWindow, "tensor", lambda own, dtype: torch.zeros(own.nbytes, dtype=dtype))
        memory.try_out()
    assert "there it is not what was written here" in str(memory.cannot_share)
    monkeypatch.setattr(torch.Tensor, "fill_", lambda own, _: own)
    with pytest.raises(ConfigError, match="what is written is not what is read"):
        memory.try_out()


def test_a_shortage_is_no_fault_of_the_device() -> None:
    full = EmulatedDriver(total_bytes=0, fills_at_once=True)
    with pytest.raises(MemoryUnavailable, match="OUT_OF_MEMORY"):
        memory_of(full).try_out()


def test_pages_that_are_not_as_new_where_they_stayed_stay_nowhere(
    prompt_driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh: set[int] = set()
    own_map, own_zero = EmulatedDriver.cuMemMap, EmulatedDriver.cuMemsetD8Async

    def mapped(driver: EmulatedDriver, address: int, *rest: Any) -> Any:
        fresh.add(address)
        return own_map(driver, address, *rest)

    def zeroed(driver: EmulatedDriver, address: int, *rest: Any) -> Any:
        if address not in fresh:
            return (CUresult.CUDA_SUCCESS,)
        fresh.remove(address)
        return own_zero(driver, address, *rest)

    monkeypatch.setattr(EmulatedDriver, "cuMemMap", mapped)
    monkeypatch.setattr(EmulatedDriver, "cuMemsetD8Async", zeroed)
    memory = memory_of(prompt_driver, keep_pages=8)
    memory.try_out()
    assert "not kept where they were: " in caplog.text
    assert "new memory is not full of zeros" in caplog.text
    region = memory.reserve(2 * PAGE)
    own = region.tensor(torch.uint8)
    for _ in range(3):
        region.commit(0, PAGE)
        assert own[:PAGE].eq(0).all()
        own[:PAGE].fill_(7)
        region.decommit(0, PAGE)
        assert memory.parked_bytes == 0
    assert memory.kept_bytes == PAGE


def test_a_page_that_has_one_address_only_is_not_shared(
    prompt_driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine then has its other layout of virtual, as the log says."""
    own = CudaMemory(driver=prompt_driver, tensor_device=TENSOR_DEVICE, keep_bytes=0)
    begun = prompt_driver.calls["cuMemMap"]

    def fails(name: str, number: int) -> CUresult | None:
        window = name == "cuMemMap" and prompt_driver.calls[name] > begun + 1
        return CUresult.CUDA_ERROR_UNKNOWN if window else None

    prompt_driver.fails = fails
    with pytest.raises(ConfigError):  # nor can it be mapped again where it was not kept
        own.try_out()
    assert "CUDA_ERROR_UNKNOWN" in str(own.cannot_share)
    kept = memory_of(prompt_driver, keep_pages=8)
    begun = prompt_driver.calls["cuMemMap"]
    kept.try_out()
    assert "CUDA_ERROR_UNKNOWN" in str(kept.cannot_share)
