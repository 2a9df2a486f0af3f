"""The providers whose promises are tested, and how the system counts what they take.

A provider is one entry of ``CASES``: what makes it, and who is asked for its pages.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import target
from conformance import named
from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from quire.memory import (
    CheckedMemory,
    CountedMemory,
    FailingMemory,
    HostMemory,
    LimitedMemory,
    MemoryProvider,
)
from quire.memory.cuda import CudaMemory
from quire.memory.cuda.driver import load_driver_functions
from quire.memory.machine.probe import resident_bytes
from quire.memory.page_cache import PageCacheMemory

GIB = 2**30


def is_mapped(address: int) -> bool:
    if sys.platform != "linux":
        pytest.skip("the list of mappings is Linux's")
    with Path("/proc/self/maps").open("rb") as maps:  # line by line: a whole text could land there
        for line in maps:
            start, stop = (int(edge, 16) for edge in line.split(None, 1)[0].split(b"-"))
            if start <= address < stop:
                return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """One provider under test."""

    provider: MemoryProvider
    resident: Callable[[int, int], int]  # bytes of pages at an address; of a region without heaps
    in_heaps: Callable[[], int]  # bytes of pages of all heaps that are alive
    reads_zeros: bool = True  # where nothing is committed, or shown
    poll: Callable[[], object] = bool  # gives back what is given back with the next call only
    is_reserved: Callable[[int], bool] = is_mapped  # whether an address is one of a region


def host_case(provider: MemoryProvider) -> MemoryCase:
    return MemoryCase(provider=provider, resident=private_bytes, in_heaps=memfd_bytes_from_now())


def kept_case() -> MemoryCase:
    """What is kept has not been given back: the system counts it, the regions do not."""
    kept, in_heaps = PageCacheMemory(HostMemory(), limit_bytes=GIB), memfd_bytes_from_now()
    return MemoryCase(
        provider=kept,
        resident=lambda address, nbytes: private_bytes(address, nbytes) - kept.kept_bytes,
        in_heaps=lambda: in_heaps() - kept.kept_bytes,
    )


def cuda_case(wrapped: Callable[[MemoryProvider], MemoryProvider]) -> MemoryCase:
    """On the emulator of the driver, which counts what is mapped, and what its memory takes."""
    driver = EmulatedDriver()
    memory = CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=0)
    return MemoryCase(
        provider=wrapped(memory),
        resident=driver.mapped_bytes,
        in_heaps=lambda: driver.backed_bytes,
        reads_zeros=False,
        poll=memory.poll,
    )


def gpu_case(wrapped: Callable[[MemoryProvider], MemoryProvider]) -> MemoryCase:
    """On the real driver, which is asked page by page whether something is mapped there."""
    memory = target.memory()
    assert isinstance(memory, CudaMemory)
    return MemoryCase(
        provider=wrapped(memory),
        resident=lambda address, nbytes: mapped_bytes(address, nbytes, memory.page_bytes),
        in_heaps=lambda: memory.physical_bytes,
        reads_zeros=False,
        poll=lambda: memory.poll(wait=True),
        is_reserved=lambda address: is_reserved(address, memory.page_bytes),
    )


def is_reserved(address: int, page_bytes: int) -> bool:
    """Whether the driver gives the page of addresses to another who asks for just these.

    The system's list of mappings has all that the driver holds for itself.
    """
    functions, start = load_driver_functions(), address - address % page_bytes
    code, found = functions.cuMemAddressReserve(page_bytes, page_bytes, start, 0)  # type: ignore[attr-defined]
    assert int(code) == 0
    functions.cuMemAddressFree(found, page_bytes)  # type: ignore[attr-defined]
    return int(found) != start


def mapped_bytes(address: int, nbytes: int, page_bytes: int) -> int:
    """Bytes of a range behind which the driver has memory: it is asked for each page's handle."""
    functions = load_driver_functions()
    found = 0
    for at in range(address, address + nbytes, page_bytes):
        code, handle = functions.cuMemRetainAllocationHandle(at)  # type: ignore[attr-defined]
        if int(code) == 0:
            functions.cuMemRelease(handle)
            found += page_bytes
    return found


ON_A_GPU: dict[str, Callable[[], MemoryCase]] = {
    "cuda": lambda: gpu_case(lambda memory: memory),
    "cuda-stack": lambda: gpu_case(
        lambda memory: CheckedMemory(CountedMemory(LimitedMemory(memory, limit_bytes=GIB)))
    ),
}
CASES: dict[str, Callable[[], MemoryCase]] = {
    "host": lambda: host_case(HostMemory()),
    "host-portable": lambda: host_case(HostMemory(portable=True)),
    "host-huge": lambda: host_case(HostMemory(huge_pages=True)),
    "kept": kept_case,
    "kept-none": lambda: host_case(PageCacheMemory(HostMemory(), limit_bytes=0)),
    "counted": lambda: host_case(CountedMemory(HostMemory())),
    "limited": lambda: host_case(LimitedMemory(HostMemory(), limit_bytes=GIB)),
    "failing": lambda: host_case(FailingMemory(HostMemory(), failing=())),
    "checked": lambda: host_case(CheckedMemory(HostMemory())),
    "stack": lambda: host_case(
        CheckedMemory(CountedMemory(LimitedMemory(HostMemory(), limit_bytes=GIB)))
    ),
    "stack-portable": lambda: host_case(
        CountedMemory(CheckedMemory(FailingMemory(HostMemory(portable=True), failing=())))
    ),
    "cuda-emulated": lambda: cuda_case(lambda memory: memory),
    "cuda-emulated-stack": lambda: cuda_case(
        lambda memory: CheckedMemory(CountedMemory(LimitedMemory(memory, limit_bytes=GIB)))
    ),
}
if target.on_gpu():
    CASES = ON_A_GPU
if (found := named.provider()) is not None:
    CASES = {found[0]: partial(host_case, found[1])}
SHARING_CASES = tuple(name for name in CASES if "portable" not in name)


def sharing_case(name: str) -> MemoryCase:
    """The case, for a test of heaps and windows; the test is skipped where there are none."""
    case = CASES[name]()
    if (why := case.provider.cannot_share) is not None:
        pytest.skip(f"no heaps: {why}")
    return case


def private_bytes(address: int, nbytes: int) -> int:
    """Bytes that the kernel has backed with pages of our own."""
    bytes_ = resident_bytes(address, nbytes)
    if bytes_ is None:
        pytest.skip("this kernel does not say which pages exist")
    return bytes_


def heap_files() -> list[int]:
    """This process's open heaps."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:quire"):
                found.append(int(name))
        except FileNotFoundError:  # the listing's own
            continue
    return found


def memfd_bytes() -> int:
    """Bytes of pages in this process's heaps, however often they are seen."""
    return sum(os.fstat(file).st_blocks * 512 for file in heap_files())


def memfd_bytes_from_now() -> Callable[[], int]:
    """The same, of heaps that are made from now on: others may have left some open."""
    before = {os.fstat(file).st_ino for file in heap_files()}

    def new_bytes() -> int:
        states = [os.fstat(file) for file in heap_files()]
        return sum(state.st_blocks * 512 for state in states if state.st_ino not in before)

    return new_bytes


def rollup_bytes(field: str) -> int:
    """A figure of this process's memory: ``Pss_Shmem`` counts a page once, wherever it is seen."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run_alone(*code: str) -> None:
    """In a process of its own: for limits, and for forks."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(map(textwrap.dedent, code))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
