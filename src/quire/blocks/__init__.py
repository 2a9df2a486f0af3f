"""Ids: blocks and ranges, who holds them, and which are free. No bytes, no tensors, no torch."""

from quire.blocks.pool import BlockPool
from quire.blocks.ranges import FirstFit

__all__ = ["BlockPool", "FirstFit"]
