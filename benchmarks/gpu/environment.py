"""The first part: what is here, in which version, and what Quire would choose of it.

Each thing is looked at by itself, and what is missing or broken is said in words.
"""

import importlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu.parts import tell

# (what is imported, the package that brings it); what breaks the others comes last.
LIBRARIES = (
    ("numpy", "numpy"),
    ("torch", "torch"),
    ("triton", "triton"),
    ("transformers", "transformers"),
    ("safetensors", "safetensors"),
    ("msgspec", "msgspec"),
    ("xxhash", "xxhash"),
    ("llvmlite", "llvmlite"),
    ("pytest", "pytest"),
    ("hypothesis", "hypothesis"),
    ("typer", "typer"),
    ("rich", "rich"),
    ("cuda.bindings.driver", "cuda-bindings"),
    ("flashinfer", "flashinfer-python"),
)
PROGRAMS = (
    (
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,mig.mode.current",
        "--format=csv,noheader",
    ),
    ("nvcc", "--version"),
)


def look(emulated: bool) -> None:
    """Print what this machine has, and try what a session will use."""
    _say("python", lambda: f"{platform.python_version()}, {sys.executable}")
    _say("machine", lambda: f"{platform.platform()}, {os.cpu_count()} cores")
    for program, *options in PROGRAMS:
        _say(program, lambda program=program, options=options: _asked(program, *options))
    _say("C compiler", _compiler)
    for module, package in LIBRARIES:
        tell(begun=f"import {module}")
        _say(module, lambda module=module, package=package: _imported(module, package))
    _say("vllm", lambda: version("vllm"))
    _say("GPU", lambda: _gpu(emulated))
    _say("free memory", lambda: _free(emulated))
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s: %(message)s")
    for name, tried in (
        ("device", _device),
        ("driver's virtual memory", _virtual_memory),
        ("attention", _attention),
    ):
        _say(name, tried)


def _say(name: str, look_at: Callable[[], str]) -> None:
    try:
        found, missing = look_at(), None
    except PackageNotFoundError:
        found = missing = "not installed"
    except (Exception, SystemExit) as error:  # whatever is broken is said, and the rest looked at
        words = " ".join(str(error).split())[:300]
        found = missing = (
            words if isinstance(error, _Missing) else f"{type(error).__name__}: {words}"
        )
    tell(fact=name, value=found, missing=missing)


class _Missing(Exception):
    """In words."""


def _asked(program: str, *options: str) -> str:
    if (path := shutil.which(program)) is None:
        raise _Missing("not found")
    done = subprocess.run(
        [path, *options], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
    )
    lines = (
        (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().split("\n")
    )
    return "; ".join(line.strip() for line in lines[-2:]) or "it says nothing"


def _compiler() -> str:
    """As Triton looks for one, which compiles what launches its kernels."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if path := shutil.which(name):
            return path
    raise _Missing("not found (CC, cc, gcc, clang): Triton's kernels need one on a GPU")


def _imported(module: str, package: str) -> str:
    own = getattr(importlib.import_module(module), "__version__", None)
    return str(own or version(package))


def _gpu(emulated: bool) -> str:
    if emulated:
        return "emulated"
    import torch

    if torch.version.cuda is None:
        raise _Missing(f"torch {torch.__version__} is a build without CUDA")
    if not torch.cuda.is_available():
        raise _Missing("torch finds no GPU that it can use (is there one, and a driver?)")
    facts = torch.cuda.get_device_properties(0)
    return (  # by which another call knows the machine again: nothing that changes
        f"{facts.name}, capability {facts.major}.{facts.minor}, {facts.multi_processor_count} "
        f"processors, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    )


def _free(emulated: bool) -> str:
    if emulated:
        return "emulated"
    import torch

    if not torch.cuda.is_available():
        raise _Missing("there is no GPU")
    free, total = torch.cuda.mem_get_info()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB"


def _device() -> str:
    from quire.devices import choose_device

    return str(choose_device("auto"))


def _virtual_memory() -> str:
    import torch

    from quire.memory.by_device import why_no_memory

    if not torch.cuda.is_available():
        raise _Missing("there is no GPU")
    if (why := why_no_memory(torch.device("cuda", 0))) is not None:
        raise _Missing(why)
    return "can be used"


def _attention() -> str:
    """The log says why not the others."""
    import torch

    from quire.attention import backend_for_graphs, choose_backend
    from quire.spec import FullAttention, LatentAttention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = {
        "128 wide": FullAttention(num_kv_heads=8, head_dim=128, dtype="bfloat16"),
        "float32": FullAttention(num_kv_heads=8, head_dim=128, dtype="float32"),
        "latents": LatentAttention(latent_dim=512, rope_dim=64, dtype="bfloat16"),
    }
    found = []
    for name, spec in kinds.items():
        chosen = choose_backend("auto", [spec], device)
        in_graphs = backend_for_graphs(chosen, "auto", [spec], device)
        found.append(f"{name}: {chosen.name}, in graphs {in_graphs.name}")
    return f"on {device.type}: {'; '.join(found)}"
