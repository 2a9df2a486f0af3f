"""Compiles the kernels for GPUs that are not here; run as a program, for a process of its own.

    python compiling.py ARCHITECTURE KIND [KIND …]

prints a JSON object for each kernel of each kind of layer: what it takes of a GPU. Triton and its
assembler need no device for that, only to be told which one they compile for.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.attention import AttentionBatch
from quire.attention.triton.launch import Gpu
from quire.kv import LayerView
from quire.spec import AttentionSpec, FullAttention, LatentAttention, SlidingWindow

# What one program may have of shared memory: CUDA's programming guide, table of capabilities.
SHARED_BYTES = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of layer."""

    spec: AttentionSpec
    sharing: int
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None
    sinks: bool = False
    in_range: bool = False  # not in blocks
    block_size: int = 16


def _full(dtype: str = "bfloat16", *, key: int = 128, value: int | None = None) -> FullAttention:
    return FullAttention(num_kv_heads=2, head_dim=key, value_head_dim=value, dtype=dtype)


def _window(key: int) -> SlidingWindow:
    return SlidingWindow(num_kv_heads=2, head_dim=key, window=1024, dtype="bfloat16")


def _latent(dtype: str = "bfloat16") -> LatentAttention:
    return LatentAttention(latent_dim=512, rope_dim=64, dtype=dtype)


KINDS = {
    "llama": Kind(spec=_full(), sharing=4),
    "llama in ranges": Kind(spec=_full(), sharing=4, in_range=True),
    "llama in float16": Kind(spec=_full("float16"), sharing=4, dtype=torch.float16),
    "int8": Kind(spec=_full("int8"), sharing=4),
    "int8 in float16": Kind(spec=_full("int8"), sharing=4, dtype=torch.float16),
    "fp8": Kind(spec=_full("float8_e4m3fn"), sharing=4),
    "fp8 in ranges": Kind(spec=_full("float8_e4m3fn"), sharing=8, in_range=True),
    "no groups": Kind(spec=_full(), sharing=1, block_size=32),
    "qwen2 7": Kind(spec=_full(), sharing=7),
    "phi 96": Kind(spec=_full(key=96), sharing=1),
    "gemma2": Kind(spec=_window(256), sharing=2, softcap=50.0),
    "gpt-oss": Kind(spec=_window(64), sharing=8, sinks=True),
    "wide keys": Kind(spec=_full(key=192, value=128), sharing=1),
    "71 heads": Kind(spec=_full(key=64), sharing=71),
    "deepseek lite": Kind(spec=_latent(), sharing=16),
    "deepseek": Kind(spec=_latent(), sharing=128),
    "deepseek in int8": Kind(spec=_latent("int8"), sharing=16),
    "float32": Kind(spec=_full("float32"), sharing=4, dtype=torch.float32),
    "float32, 256": Kind(spec=_full("float32", key=256), sharing=2, dtype=torch.float32),
    "float32 latents": Kind(spec=_latent("float32"), sharing=16, dtype=torch.float32),
}


def view_of(kind: Kind) -> LayerView:
    (heads, key), (_, value) = kind.spec.entry_shapes
    dtype = getattr(torch, kind.spec.dtype)
    size = 1024 if kind.in_range else kind.block_size
    scale = torch.empty(2, heads, size) if kind.spec.dtype == "int8" else None
    return LayerView(
        k=torch.empty(2, heads, size, key, dtype=dtype),
        v=torch.empty(2, heads, size, value, dtype=dtype),
        k_scale=scale,
        v_scale=scale,
        slots_per_row=1 if kind.in_range else size,
    )


def call_all(kind: Kind, gpu: Gpu) -> None:
    """A decode, a long chunk, their entries' way in, and that of states."""
    from quire.attention.triton import TritonAttention, TritonRows

    attention = TritonAttention()
    attention._gpus[torch.device("cpu")] = gpu
    view = view_of(kind)
    (heads, key), (_, value) = kind.spec.entry_shapes
    width = key + value if isinstance(kind.spec, LatentAttention) else key
    num_heads = heads * kind.sharing
    batch = AttentionBatch(
        query_starts=np.array([0, 1, 301]),
        context_lens=np.array([4000, 300]),
        tables=torch.zeros(2, 1 if kind.in_range else 4000 // kind.block_size, dtype=torch.long),
        slots=torch.arange(301),
        block_size=view.k.shape[2],
    )
    attention.attend(
        torch.empty(301, num_heads, width, dtype=kind.dtype),
        view,
        batch,
        spec=kind.spec,
        scale=0.1,
        softcap=kind.softcap,
        sinks=torch.empty(num_heads) if kind.sinks else None,
    )
    k, v = (torch.empty(3, heads, n, dtype=kind.dtype) for n in (key, value))
    attention.make_writer(view)(torch.arange(3), k, v)
    states = torch.empty(4, 3000, dtype=kind.dtype)
    TritonRows().put(states, torch.arange(3), TritonRows().take(states, torch.arange(3)))


def compiled(architecture: int) -> Iterator[list[tuple[str, Any]]]:
    """From here on a call of a kernel compiles it; they are in the list that is given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class NoDevice:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", architecture, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    triton.runtime.driver.set_active(NoDevice())
    found: list[tuple[str, Any]] = []

    def compile_for(self: Any, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> None:
            kernel = self.warmup(*args, grid=grid, **options)
            found.append((self.__name__, kernel))

        return call

    JITFunction.__getitem__ = compile_for
    yield found


def takes(kernel: Any) -> dict[str, Any]:
    """Registers of a thread, bytes that it keeps outside of them, and shared bytes of a program."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert found, said.stdout
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "copies_ahead": "cp.async" in ptx,
        "tensor_cores": any(word in ptx for word in ("wgmma", "mma.sync", "tcgen05.mma")),
    }


def main(architecture: int, names: list[str]) -> None:
    import triton

    gpu = Gpu(
        num_processors=132,
        shared_bytes=SHARED_BYTES[architecture],
        fp8_converts=architecture >= 89,
        products_from_shared=architecture // 10 in (9, 10),
        emulated=False,
    )
    measured: dict[str, dict[str, Any]] = {}  # kinds have kernels in common
    for found in compiled(architecture):
        for name in names:
            call_all(KINDS[name], gpu)
            for kernel_name, kernel in found:
                row = {"triton": triton.__version__, "kind": name, "kernel": kernel_name}
                if kernel.hash not in measured:
                    measured[kernel.hash] = takes(kernel)
                row |= measured[kernel.hash]
                print(json.dumps(row), flush=True)
            found.clear()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
