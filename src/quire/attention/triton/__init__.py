"""Attention on CUDA by kernels of our own, which need no more than the Triton that torch brings.

With them, the one that moves recurrent states of padded steps (``rows``).
"""

from quire.attention.triton.backend import TritonAttention
from quire.attention.triton.launch import find_gpu
from quire.attention.triton.writers import TritonRows

__all__ = ["TritonAttention", "TritonRows", "find_gpu"]
