"""Attention on the CPU: kernels written in a small vector language, compiled on the spot."""

from quire.attention.cpu.backend import CpuAttention

__all__ = ["CpuAttention"]
