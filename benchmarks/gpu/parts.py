"""What a GPU is asked, in order of worth: the parts of ``run``, and how a part speaks to it.

A part runs in processes of its own. What it finds it says at once (``tell``), a line each, so that
one which is ended half-way has said what it knew.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MARK = "::quire:: "  # what follows on the line is for the script, not for a reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    limit_s: float  # for all of it
    quiet_s: float = 60.0  # without a line of output, after which it hangs: a test, and its start
    files: tuple[str, ...] = ()  # below tests/; without any, it measures
    select: str = ""  # by names, as pytest's -k
    needs: tuple[str, ...] = ("torch", "numpy")
    full: bool = True  # also what is otherwise sampled
    shards: int = 1  # processes that share its tests: a compiler uses one core

    @property
    def is_check(self) -> bool:
        return bool(self.files)


ENVIRONMENT = "environment"
_TESTS = ("torch", "numpy", "pytest", "hypothesis")
_QUIRE = ("transformers", "safetensors", "msgspec", "xxhash")
_ENGINES = (*_TESTS, *_QUIRE)
PARTS: Mapping[str, Part] = MappingProxyType(
    {
        ENVIRONMENT: Part(limit_s=150, quiet_s=120, needs=()),
        "memory": Part(
            limit_s=120,
            needs=_TESTS,
            full=False,  # of random machines: minutes
            files=(
                "conformance/test_memory.py",
                "conformance/test_windows.py",
                "conformance/test_storage.py",
                "devices/test_gpu_memory.py",
            ),
        ),
        "kernels": Part(
            limit_s=240,
            quiet_s=150,  # one compiles what others wait for
            needs=_TESTS,
            files=("conformance/test_attention.py", "conformance/test_attention_gpu.py"),
            select="not flashinfer",
            shards=6,
        ),
        "engine": Part(
            limit_s=200,
            quiet_s=140,  # FlashInfer compiles
            needs=_ENGINES,
            files=("engine/test_on_device.py",),
        ),
        "graphs": Part(limit_s=120, needs=_ENGINES, files=("devices/test_graphs_on_gpu.py",)),
        "sampling": Part(
            limit_s=120,
            needs=_TESTS,
            files=(
                "devices/test_results.py",
                "engine/sampling/test_choices.py",
                "engine/sampling/test_sampler.py",
            ),
        ),
        "ranks": Part(
            limit_s=120, needs=_ENGINES, files=("engine/parallel/test_ranks_on_gpus.py",)
        ),
        "decode": Part(limit_s=120, quiet_s=120),
        "prefill": Part(limit_s=120, quiet_s=120),
        "throughput": Part(limit_s=300, quiet_s=180, needs=("torch", "numpy", *_QUIRE)),
        "flashinfer": Part(
            limit_s=420,
            quiet_s=300,  # it compiles a kernel for each width and dtype, a minute each
            needs=_TESTS,
            files=("conformance/test_attention_gpu.py",),
            select="flashinfer",
            shards=8,
        ),
        "layouts": Part(limit_s=90, quiet_s=90),
        "growing": Part(limit_s=60),
        "bytes": Part(limit_s=60),
    }
)


def tell(**found: Any) -> None:
    """Say to ``run`` what was found."""
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


def told(line: str) -> dict[str, Any] | None:
    """Read what a line says to ``run``; None for a line that a reader is to see."""
    if not line.startswith(MARK):
        return None
    try:
        found = json.loads(line.removeprefix(MARK))
    except ValueError:  # cut off, as its process was
        return None
    return found if isinstance(found, dict) else None
