"""From a kernel's LLVM code to an address that can be called, once for each machine.

Compiled code is kept on disk (``kept_files``) under a name that covers the sources, the compiler,
the CPU and the kernel, so the next process only loads it.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from torch import Tensor

from quire.kept_files import KeptFiles, own_folder
from quire.kernels import amx
from quire.kernels.language import Isa

log = logging.getLogger(__name__)

LARGEST_BYTES = 64 * 2**20  # of a kernel's code, which has tens of KiB
_LOCK = threading.Lock()  # LLVM's own state is one for the process


@cache
def native_isa() -> Isa:
    """Detect this machine's CPU."""
    _start_llvm()
    return isa(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


def usable_isa(given: Isa | None = None) -> Isa:
    """Return a CPU, by default this machine's, without what the system keeps from this process."""
    found = native_isa() if given is None else given
    return found.without_amx() if found.amx and not amx.allow() else found


def isa(cpu: str, features: str) -> Isa:
    """Read LLVM's name of a CPU and its list of features (+avx2,+fma,…)."""
    has = set(features.split(","))
    zen = cpu.startswith("znver")
    before_zen_5 = cpu in {"znver1", "znver2", "znver3", "znver4"}
    wide = "+avx512f" in has and "+avx512bw" in has
    sse2 = "+sse2" in has
    return Isa(
        cpu=cpu,
        features=features,
        registers=32 if wide else 8 if "+avx2" in has else 4,
        f16=wide or "+f16c" in has,
        # Measured on Zen 5: products of 16 and 32 rows take 0.76 to 0.87 of the time with it.
        prefetch=sse2 and not before_zen_5,
        # Measured: 62 to 91 % of the memory's bandwidth on Intel's, 10 to 30 % less on Zen 4. Zen 5
        # has 1.2 to 2 times the bandwidth with it, a little less with 2.
        block_prefetch=None if not sse2 or before_zen_5 else 0 if zen else 2,
        bf16_convert=wide and "+avx512bf16" in has,
        # Intel's has it, at half the speed of float32.
        bf16_dot=wide and "+avx512bf16" in has and zen,
        byte_dot=wide and "+avx512vnni" in has,
        # Measured on Zen 5, where torch's library reaches a third of what registers multiply, and
        # on Intel's, where it reaches nine tenths.
        float_panels=wide and zen and not before_zen_5,
        amx=wide and {"+amx-tile", "+amx-bf16"} <= has,
    )


class Kernels:
    """Machine code for one machine, by name. Its addresses are good until the process ends.

    ``folder`` is where it is kept (None: ~/.cache/quire); ``sources`` is that of the modules that
    write the kernels, if it is not this one.
    """

    def __init__(
        self, isa: Isa, folder: Path | None = None, *, sources: Path | None = None
    ) -> None:
        self.isa = isa
        self._kept = kept_code(own_folder() if folder is None else folder)
        self._sources = Path(__file__).parent if sources is None else sources
        self._loaded: dict[str, tuple[llvm.ResourceTracker, int]] = {}

    def address(self, name: str, write: Callable[[ir.Module], None]) -> int:
        """Return the address of "work" in the module that ``write`` fills; compile it if new."""
        with _LOCK:
            if name not in self._loaded:
                self._loaded[name] = self._load(name, write)
            return self._loaded[name][1]

    def _load(
        self, name: str, write: Callable[[ir.Module], None]
    ) -> tuple[llvm.ResourceTracker, int]:
        _start_llvm()
        sources = source_hash(self._sources)
        key = hashlib.sha256(f"{sources} {self.isa} {name}".encode()).hexdigest()
        image = self._kept.read(key)
        if image is not None:
            try:
                return _linked(key, self.isa, image)
            except RuntimeError as error:
                self._kept.warn(f"LLVM cannot load what was kept for {name} ({error})")
        log.info("compiling for %s: %s", self.isa.cpu, name)
        module = ir.Module(name)
        write(module)
        image = _compile(module, self.isa)
        self._kept.write(key, image)
        return _linked(key, self.isa, image)


def code_digest(isa: Isa, *sources: Path) -> str:
    """Name what the kernels of some folders compute, to the bit: sources, compiler and CPU."""
    several = " ".join(map(source_hash, sources))
    return hashlib.sha256(f"{several} {isa}".encode()).hexdigest()


@cache
def _linked(key: str, isa: Isa, image: bytes) -> tuple[llvm.ResourceTracker, int]:
    """Link an object file, once for the process: its engines share the code.

    Raises: RuntimeError where it is none with a "work" in it.
    """
    # The other linker takes its pieces of memory where there is room: between reservations as
    # large as caches they may lie too far apart for a 32-bit distance, which it asserts.
    jit = llvm.create_lljit_compiler(_target(isa), use_jit_link=True)
    builder = llvm.JITLibraryBuilder().add_object_img(image).export_symbol("work")
    library = builder.link(jit, key)
    return library, library["work"]


@cache
def kept_code(folder: Path | None) -> KeptFiles:
    """Return this process's compiled kernels of a folder; None: there is no folder."""
    return KeptFiles(
        folder, ".o", largest_bytes=LARGEST_BYTES, loss="this process compiles its kernels again"
    )


@cache
def source_hash(folder: Path) -> str:
    """Hash all that decides what that folder's kernels do, but their names and the CPU.

    A module that writes kernels asks for it when it is imported. Another release may be installed
    while the process runs, and what this one compiles must not be kept under that one's hash.
    """
    digest = hashlib.sha256(f"{llvm.llvm_version_info}".encode())
    for sources in {Path(__file__).parent: None, folder: None}:
        for path in sorted(sources.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile(module: ir.Module, isa: Isa) -> bytes:
    target = _target(isa)
    module.triple = target.triple
    parsed = llvm.parse_assembly(str(module))
    builder = llvm.create_pass_builder(target, llvm.PipelineTuningOptions(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    image: bytes = target.emit_object(parsed)
    return image


def _target(isa: Isa) -> llvm.TargetMachine:
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=3, reloc="pic", codemodel="default"
    )


@cache
def _start_llvm() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


# -- tensors ---------------------------------------------------------------------------------------

# torch's tensors in the kernels' words: kinds, addresses and strides in bytes.


KINDS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "f32",
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.int8: "i8",
        torch.float8_e4m3fn: "f8",
    }
)


def words(tensor: Tensor | None, num_strides: int) -> tuple[int, ...]:
    """Return the address of a tensor of any shape and its first strides in bytes; or zeros."""
    if tensor is None:
        return (0,) * (1 + num_strides)
    size = tensor.element_size()
    return tensor.data_ptr(), *(size * stride for stride in tensor.stride()[:num_strides])


def with_dense_rows(tensor: Tensor) -> Tensor:
    """Return the tensor [..., D], or a copy, with the elements of a row side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
