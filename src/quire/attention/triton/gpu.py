"""What the kernels are made for: a GPU's facts, or the interpreter's in place of one."""

from dataclasses import dataclass

import torch
import triton

LEAST_CAPABILITY = (
    8,
    0,
)  # bfloat16 products, and copies into shared memory that are not waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device, as far as a kernel's shape depends on it."""

    num_processors: int  # streaming multiprocessors
    shared_bytes: int  # that one program may have
    fp8_converts: bool  # float8_e4m3fn, in an instruction
    products_from_shared: bool  # tensor cores of Hopper and the large Blackwells: wgmma, tcgen05
    emulated: bool  # Triton's interpreter runs the kernels, on the CPU


def interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when Triton was imported, which decides for the process."""
    return bool(triton.knobs.runtime.interpret)


def find_gpu(device: torch.device) -> Gpu | str:
    """A device's facts, or why the kernels cannot run there."""
    if interpreted() and device.type in ("cpu", "cuda"):
        return Gpu(  # an H200's figures, so that what is split there is split here
            num_processors=132,
            shared_bytes=227 * 1024,
            fp8_converts=False,
            products_from_shared=True,
            emulated=True,
        )
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device} (but in Triton's interpreter: TRITON_INTERPRET=1)"
    if torch.version.hip is not None:
        return "its kernels are made for NVIDIA's GPUs, and this torch is for AMD's"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    facts = torch.cuda.get_device_properties(device)
    capability = (facts.major, facts.minor)
    if capability < LEAST_CAPABILITY:
        return (
            f"{facts.name} has compute capability {facts.major}.{facts.minor}, and it needs "
            f"{'.'.join(map(str, LEAST_CAPABILITY))} (Ampere) or more"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    limits = triton.runtime.driver.active.utils.get_device_properties(index)
    return Gpu(
        num_processors=facts.multi_processor_count,
        shared_bytes=limits["max_shared_mem"],
        fp8_converts=capability >= (8, 9),
        products_from_shared=facts.major in (9, 10),
        emulated=False,
    )
