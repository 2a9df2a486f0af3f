"""Attention on CUDA by kernels of our own, which need no more than the Triton that torch brings."""

from quire.attention.triton.backend import TritonAttention

__all__ = ["TritonAttention"]
