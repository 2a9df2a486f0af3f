"""FlashInfer's kernels on our pool: an extra, and the first choice on a GPU that has it."""

from quire.attention.flashinfer.backend import FlashInferAttention

__all__ = ["FlashInferAttention"]
