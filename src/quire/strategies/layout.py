"""How many tokens make whole pages, in the two layouts. Accounting and storage compute from here.

Ranges are head-major, ``[K, slots, D]`` then ``[K, slots, Dv]``: one head's keys lie side by side,
which is how attention reads them. Blocks are ``[N, K, {keys, values}, B, D]``: one block is one
piece of memory.

Blocks that are seen through windows are ``[B, layers, K, {key, value, …}]``: all that a token has
in a *stack* of layers lies together: a block is one piece, and tokens are equally far apart.

Scales come last: of ranges ``[slots, K, {key, value}]``, since head by head a page of them would
cover a thousand tokens; of blocks ``[{keys, values}, B]`` behind each head's values.
"""

from collections.abc import Iterable
from math import lcm

from quire.errors import ConfigError
from quire.spec import AttentionSpec, Group, RecurrentState
from quire.spec.layers import dtype_bytes, scale_bytes


def stacks(group: Group, stack_layers: int | None) -> list[tuple[int, ...]]:
    """The group's layers, so many together; None: all of them."""
    count = stack_layers or group.num_layers
    return [group.layers[first : first + count] for first in range(0, group.num_layers, count)]


def stacked_block_size(
    groups: Iterable[Group], block_size: int, page_bytes: int, stack_layers: int | None
) -> int:
    """The fewest tokens, ``block_size`` or a multiple of it, that fill whole pages in every stack.

    Raises: ConfigError where the scales of a token would lie across their own size.
    """
    steps = [block_size]
    for group in groups:
        spec = attention_spec(group)
        scale, width = scale_bytes(spec.dtype), sum(heads * dim for heads, dim in spec.entry_shapes)
        if scale and width % scale:
            raise ConfigError(
                f"a token has {width} bytes of {spec.dtype} keys and values in a layer; for the "
                f"scales behind them it must be a multiple of {scale}: keep another kv_cache_dtype"
            )
        for layers in stacks(group, stack_layers):
            token = len(layers) * spec.bytes_per_token
            steps.append(lcm(token, page_bytes) // token)
    return lcm(*steps)


def attention_spec(group: Group) -> AttentionSpec:
    """The group's spec, known to be one that has tokens."""
    assert not isinstance(group.spec, RecurrentState), "a recurrent state has no slots"
    return group.spec


def range_rows(spec: AttentionSpec) -> list[tuple[int, int]]:
    """What a slot has in ranges: (pieces, bytes of each) among the keys, the values, the scales."""
    rows = [(heads, width * dtype_bytes(spec.dtype)) for heads, width in spec.entry_shapes]
    if scale := scale_bytes(spec.dtype):
        rows.append((1, scale * sum(heads for heads, _ in spec.entry_shapes)))
    return rows


def page_tokens(group: Group, page_bytes: int) -> int:
    """The fewest tokens of a range whose rows fill whole pages wherever they lie."""
    rows = range_rows(attention_spec(group))
    return lcm(*(lcm(row, page_bytes) // row for _, row in rows))


def common_page_tokens(groups: Iterable[Group], page_bytes: int) -> int:
    """``page_tokens`` that suits every group, for ranges that are equal in all of them."""
    return lcm(*(page_tokens(group, page_bytes) for group in groups))


def granule_blocks(group: Group, block_size: int, page_bytes: int) -> int:
    """The fewest blocks that fill whole pages in each layer.

    Raises: ConfigError where the scales of a block would lie across their own size.
    """
    spec = attention_spec(group)
    scale, width = scale_bytes(spec.dtype), sum(width for _, width in spec.entry_shapes)
    if scale and block_size * width % scale:
        raise ConfigError(
            f"block_size={block_size} gives each head {block_size * width} bytes of {spec.dtype} "
            f"keys and values; for the scales behind them it must be a multiple of {scale}: make "
            f"block_size one"
        )
    block = spec.block_bytes(block_size)
    return lcm(block, page_bytes) // block
