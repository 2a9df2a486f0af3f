"""What FlashInfer cannot serve, in words: asked before anything of it is imported."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from quire.kv import LayerView
from quire.spec import AttentionSpec, ChunkedAttention, LatentAttention

# What its kernels for Ampere and later are compiled for, and for latents DeepSeek's.
WIDTHS = (64, 128, 256)
LATENT_WIDTHS = (512, 64)
_DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
_QUERY_DTYPES = (torch.float16, torch.bfloat16)
# Strides are 32 bits there, in elements; offsets are 64.
_MAX_STRIDE = 2**32
_NVCC = Path("/usr/local/cuda/bin/nvcc")  # where it looks, too


def cannot_serve(spec: AttentionSpec) -> str | None:
    """Why no kernel of it fits layers of ``spec``; None if one does."""
    if spec.dtype not in _DTYPES:
        return f"it has no kernel for {spec.dtype} entries, only for {', '.join(_DTYPES)}"
    match spec:
        case ChunkedAttention():
            return "it has no mask for attention in chunks"
        case LatentAttention(compress_ratio=ratio) if ratio != 1:
            return f"it reads one latent a token, and these stand for {ratio}"
        case LatentAttention(latent_dim=latent, rope_dim=rope):
            if (latent, rope) != LATENT_WIDTHS:
                return f"its latents are 512 and 64 wide, not {latent} and {rope}"
            if spec.dtype == "float8_e4m3fn":
                return "it reads latents in 16 bits only"
        case _:
            (_, key), (_, value) = spec.entry_shapes
            if key != value:
                return f"it wants keys and values of one width, not of {key} and {value}"
            if key not in WIDTHS:
                return f"its heads are {', '.join(map(str, WIDTHS))} wide, not {key}"
    return None


def cannot_run(device: torch.device) -> str | None:
    """Why it does not run here; None if it does."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if find_spec("flashinfer") is None:
        return "it is not installed (pip install 'quire[flashinfer]')"
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0, and this GPU has {major}.{minor}"
    if not _has_kernels():
        return "it compiles its kernels, and there is no nvcc (nor flashinfer-jit-cache)"
    return None


def refused(q: Tensor, view: LayerView) -> str | None:
    """What of a call only shows when it comes: the queries' dtype, addresses too far apart."""
    if q.dtype not in _QUERY_DTYPES:
        return f"its queries are float16 or bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if view.k.element_size() > 1 and q.dtype != view.k.dtype:
        return f"queries in {q.dtype} cannot meet entries in {view.k.dtype} there"
    for part in (view.k, view.v):
        if max(part.stride()) >= _MAX_STRIDE:
            return f"its strides have 32 bits, and heads lie {max(part.stride())} elements apart"
    return None


def _has_kernels() -> bool:
    return (
        find_spec("flashinfer_jit_cache") is not None
        or shutil.which("nvcc") is not None
        or _NVCC.exists()
    )
