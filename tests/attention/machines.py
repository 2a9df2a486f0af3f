"""The instruction sets that kernels are compiled for here, and where the machine code is kept.

One process runs all of them: a wide CPU has the narrow ones' instructions. What this CPU lacks is
skipped aloud.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import llvmlite.binding as llvm
import pytest

from quire.attention.cpu import CpuAttention
from quire.kernels.compile import isa, native_isa, usable_isa
from quire.kernels.language import Isa

# "native" is what this machine does best, "pairs" multiplies bfloat16; the others are older x86, as
# (LLVM's name, features). For linear layers there is "panels" besides, which multiplies floats so.
_OLDER: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "avx512": (
            "skylake-avx512",
            "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx2,+fma,+f16c,+avx,+sse4.2",
        ),
        "avx2": ("haswell", "+avx2,+fma,+f16c,+avx,+sse4.2"),
        "sse": ("x86-64", ""),
    }
)
ISAS = ("native", "pairs", *_OLDER)


def kernel_folder() -> Path:
    """Where every test of this session keeps and finds machine code (``conftest``)."""
    return Path(os.environ["QUIRE_CACHE_DIR"])


@cache
def find_isa(name: str) -> Isa | str:
    """An instruction set that runs here, or why it does not."""
    if name == "native":
        return usable_isa()
    native = native_isa()
    if name == "pairs":  # as on Zen 4, whether or not that is what this CPU does best
        able = native.bf16_convert
        return replace(native, amx=False, bf16_dot=True) if able else "this CPU lacks avx512bf16"
    if name == "panels":  # as on Zen 5
        able = native.registers >= 32
        return replace(native, amx=False, float_panels=True) if able else "this CPU lacks avx512bw"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{name} is of x86, and this is {platform.machine()}"
    cpu, features = _OLDER[name]
    here = llvm.get_host_cpu_features()
    missing = [f for f in features.split(",") if f and not here.get(f[1:], False)]
    return f"this CPU lacks {', '.join(missing)}" if missing else isa(cpu, features)


def isa_or_skip(name: str) -> Isa:
    found = find_isa(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def cpu_backend(name: str) -> CpuAttention:
    """A new one, for it keeps every view that it has seen; its machine code is the session's."""
    return CpuAttention(isa_or_skip(name), kernel_folder())
