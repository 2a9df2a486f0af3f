"""How many tokens make whole pages, in the two layouts. Accounting and storage compute from here.

Ranges are head-major, ``[K, slots, D]`` then ``[K, slots, Dv]``: one head's keys lie side by side,
which is how attention reads them. Blocks are ``[N, K, {keys, values}, B, D]``: one block is one
piece of memory.
"""

from collections.abc import Iterable
from math import lcm

from quire.spec import AttentionSpec, Group, RecurrentState
from quire.spec.layers import dtype_bytes


def attention_spec(group: Group) -> AttentionSpec:
    """The group's spec, known to be one that has tokens."""
    assert not isinstance(group.spec, RecurrentState), "a recurrent state has no slots"
    return group.spec


def page_tokens(group: Group, page_bytes: int) -> int:
    """The fewest tokens of a range whose rows fill whole pages in each head, keys and values."""
    spec = attention_spec(group)
    rows = [width * dtype_bytes(spec.dtype) for _, width in spec.entry_shapes]
    return lcm(*(lcm(row, page_bytes) // row for row in rows))


def common_page_tokens(groups: Iterable[Group], page_bytes: int) -> int:
    """``page_tokens`` that suits every group, for ranges that are equal in all of them."""
    return lcm(*(page_tokens(group, page_bytes) for group in groups))


def granule_blocks(group: Group, block_size: int, page_bytes: int) -> int:
    """The fewest blocks that fill whole pages in each layer."""
    block = attention_spec(group).block_bytes(block_size)
    return lcm(block, page_bytes) // block
