"""Layers on the CPU: kernels written in a small vector language, compiled on the spot."""

from quire.layers.cpu.linear import BoundGated, BoundLinear, CpuLinear

__all__ = ["BoundGated", "BoundLinear", "CpuLinear"]
