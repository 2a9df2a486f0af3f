"""Compute how many tokens fill whole pages in the two layouts, for accounting and storage.

Ranges are head-major, ``[K, slots, D]`` then ``[K, slots, Dv]``: one head's keys lie side by side,
as attention reads them. Blocks are ``[N, K, {keys, values}, B, D]``: one block is one piece of
memory. If such a block does not fill whole pages, as a latent's or one with scales, the blocks of
all the group's layers lie side by side in a row that does.

Blocks that sequences see through windows, and ranges on large pages, have their layers in stacks
(``stacking``): a block is one piece there, and tokens are equally far apart.

A recurrent state has one slot in every strategy: a row of whole pages with the states of all the
group's layers side by side. So has a source, whose keys and values are kept as states are.

Scales come last: of ranges ``[slots, K, {key, value}]``, since head by head a page of scales would
cover a thousand tokens; of blocks ``[{keys, values}, B]`` behind each head's values.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal, TypeAlias

from quire.errors import ConfigError
from quire.spec import AttentionSpec, Group, KeptWhole
from quire.spec.layer_specs import dtype_bytes, scale_bytes
from quire.units import align_up, ceil_div

# -- stacking --------------------------------------------------------------------------------------

# Layers that lie together fill a page with fewer tokens.
#
# A *stack* is some layers of a group; a token's entries in them are one piece of memory,
# ``[layers, K, {key, value}, D]`` (scales last), and tokens are equally far apart. With Qwen3-4B a
# page of 2 MiB holds 512 tokens of one layer, or 128 of four. So short sequences waste less, and a
# layer's entries lie farther apart.
#
# ``auto`` takes about four layers, as many as make tokens fill pages exactly. If no number does,
# it leaves a little space empty.
#
# Source: vAttention (tensor slicing)


# None: ranges are head-major, and blocks seen through windows have all layers in one stack.
LayersPerPage: TypeAlias = int | Literal["auto"] | None

_ABOUT = 4  # layers: to be measured, see docs/decisions/0039-memory-of-the-engine-on-a-gpu.md
_LARGE_PAGE_BYTES = 2**20
_EMPTY_SHARE = 8  # at most an eighth of what tokens take is left empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacking:
    """How a group's layers lie together."""

    num_layers: int  # in a stack; the last one may have fewer
    num_stacks: int
    token_bytes: int  # of a stack, from one token to the next

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token in all the group's layers."""
        return self.num_stacks * self.token_bytes

    def page_tokens(self, page_bytes: int) -> int:
        """Return the fewest tokens that fill whole pages."""
        return lcm(self.token_bytes, page_bytes) // self.token_bytes

    def stacks(self, group: Group) -> list[tuple[int, ...]]:
        """List the group's layers, stack by stack."""
        each, layers = self.num_layers, group.layers
        return [layers[first : first + each] for first in range(0, len(layers), each)]


def suited_to(page_bytes: int) -> LayersPerPage:
    """Choose the layers per page: on a GPU's large pages one head's entries would fill none."""
    return "auto" if page_bytes >= _LARGE_PAGE_BYTES else None


def stacking(group: Group, page_bytes: int, layers_per_page: LayersPerPage) -> Stacking:
    """Compute the stacking of a group that has tokens; None: all its layers in one stack."""
    if layers_per_page == "auto":
        return _suited(group, page_bytes)
    return _of(group, min(layers_per_page or group.num_layers, group.num_layers))


def stacking_of_ranges(
    group: Group, page_bytes: int, layers_per_page: LayersPerPage
) -> Stacking | None:
    """Compute the stacking of ranges; None for head-major ranges, and for states."""
    if layers_per_page is None or isinstance(group.spec, KeptWhole):
        return None
    return stacking(group, page_bytes, layers_per_page)


def apart(
    groups: Iterable[Group], page_bytes: int, layers_per_page: LayersPerPage
) -> list[tuple[Group, Stacking | None]]:
    """Split groups into the parts that storage can move one by one: layers, or stacks."""
    found: list[tuple[Group, Stacking | None]] = []
    for group in groups:
        whole = stacking_of_ranges(group, page_bytes, layers_per_page)
        pieces = [(layer,) for layer in group.layers] if whole is None else whole.stacks(group)
        own = whole and replace(whole, num_stacks=1)
        found += [(Group(spec=group.spec, layers=layers), own) for layers in pieces]
    return found


def _of(group: Group, num_layers: int, token_bytes: int | None = None) -> Stacking:
    return Stacking(
        num_layers=num_layers,
        num_stacks=ceil_div(group.num_layers, num_layers),
        token_bytes=token_bytes or num_layers * _layer_bytes(group),
    )


def _suited(group: Group, page_bytes: int) -> Stacking:
    held = group.num_layers * _layer_bytes(group)
    counts = range(1, min(4 * _ABOUT, group.num_layers) + 1)
    for count in sorted(counts, key=lambda count: abs(count - _ABOUT)):
        filled = 1 << (count * _layer_bytes(group) - 1).bit_length()
        found = _of(group, count, filled)
        if page_bytes % filled == 0 and _EMPTY_SHARE * (found.slot_bytes - held) <= held:
            return found
    exact = [_of(group, count) for count in counts if group.num_layers % count == 0]
    return min(
        exact,
        key=lambda s: (s.page_tokens(page_bytes) * s.slot_bytes, abs(s.num_layers - _ABOUT)),
    )


def _layer_bytes(group: Group) -> int:
    return group.bytes_per_token // group.num_layers


# -- layout ----------------------------------------------------------------------------------------


def stacked_block_size(
    groups: Iterable[Group], block_size: int, page_bytes: int, layers_per_page: LayersPerPage
) -> int:
    """Return the smallest multiple of ``block_size`` that fills whole pages in every stack.

    Raises: ConfigError if the scales of a token would not be aligned.
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
        steps.append(stacking(group, page_bytes, layers_per_page).page_tokens(page_bytes))
    return lcm(*steps)


def states_last(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Sort the groups: those with tokens first, then states."""
    return tuple(sorted(groups, key=lambda group: isinstance(group.spec, KeptWhole)))


def attention_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the groups that have tokens."""
    return tuple(group for group in groups if not isinstance(group.spec, KeptWhole))


def state_offsets(spec: KeptWhole) -> tuple[list[int], int]:
    """Return where each tensor of a layer's state begins, and the size of all, in bytes."""
    offsets, end = [], 0
    for state in spec.states:
        offsets.append(align_up(end, dtype_bytes(state.dtype)))
        end = offsets[-1] + state.num_bytes
    return offsets, align_up(end, max((dtype_bytes(s.dtype) for s in spec.states), default=1))


def slot_bytes(group: Group, page_bytes: int, layers_per_page: LayersPerPage = None) -> int:
    """Return the bytes of a slot in all the group's layers: a token, or a whole state or source.

    ``layers_per_page``: of ranges.
    """
    if (stacked := stacking_of_ranges(group, page_bytes, layers_per_page)) is not None:
        return stacked.slot_bytes
    if isinstance(group.spec, KeptWhole):
        _, state_bytes = state_offsets(group.spec)
        return align_up(group.num_layers * state_bytes, page_bytes)
    return group.bytes_per_token


def attention_spec(group: Group) -> AttentionSpec:
    """Return the spec of a group that has tokens."""
    assert not isinstance(group.spec, KeptWhole), "its tokens have no slots"
    return group.spec


def range_rows(spec: AttentionSpec) -> list[tuple[int, int]]:
    """Return (pieces, bytes of each) of a slot's keys, values and scales in ranges."""
    rows = [(heads, width * dtype_bytes(spec.dtype)) for heads, width in spec.entry_shapes]
    if scale := scale_bytes(spec.dtype):
        rows.append((1, scale * sum(heads for heads, _ in spec.entry_shapes)))
    return rows


def page_tokens(group: Group, page_bytes: int, layers_per_page: LayersPerPage = None) -> int:
    """Return the fewest slots of a range whose rows fill whole pages wherever they lie."""
    if (stacked := stacking_of_ranges(group, page_bytes, layers_per_page)) is not None:
        return stacked.page_tokens(page_bytes)
    if isinstance(group.spec, KeptWhole):
        return 1
    rows = range_rows(attention_spec(group))
    return lcm(*(lcm(row, page_bytes) // row for _, row in rows))


def common_page_tokens(
    groups: Iterable[Group], page_bytes: int, layers_per_page: LayersPerPage = None
) -> int:
    """Return the fewest slots that fill whole pages in every group."""
    return lcm(*(page_tokens(group, page_bytes, layers_per_page) for group in groups))


def row_bytes(group: Group, block_size: int, page_bytes: int) -> int | None:
    """Return the bytes of a row: a block's entries of all layers, side by side on whole pages.

    None if there are no rows: a block of one layer fills whole pages, or a row would be more than
    a sixteenth larger than its entries.
    """
    block = attention_spec(group).block_bytes(block_size)
    held = group.num_layers * block
    row = align_up(held, lcm(page_bytes, block_size))  # a slot is a whole number of bytes
    return None if block % page_bytes == 0 or 16 * (row - held) > held else row


def granule_blocks(group: Group, block_size: int, page_bytes: int) -> int:
    """Return the fewest blocks that fill whole pages, in each layer or in a row.

    Raises: ConfigError if the scales of a block would not be aligned.
    """
    spec = attention_spec(group)
    scale, width = scale_bytes(spec.dtype), sum(width for _, width in spec.entry_shapes)
    if scale and block_size * width % scale:
        raise ConfigError(
            f"block_size={block_size} gives each head {block_size * width} bytes of {spec.dtype} "
            f"keys and values; for the scales behind them it must be a multiple of {scale}: make "
            f"block_size one"
        )
    if row_bytes(group, block_size, page_bytes) is not None:
        return 1
    block = spec.block_bytes(block_size)
    return lcm(block, page_bytes) // block


def whole_bytes(
    group: Group, num_tokens: int, num_sequences: int, block_size: int, page_bytes: int
) -> int:
    """Return the bytes of blocks for ``num_tokens``, or of states for ``num_sequences``.

    They are whole granules. ``num_tokens`` counts each sequence's last block in full.
    """
    if isinstance(group.spec, KeptWhole):
        return num_sequences * slot_bytes(group, page_bytes)
    blocks = ceil_div(num_tokens, block_size)
    granule = granule_blocks(group, block_size, page_bytes)
    row = row_bytes(group, block_size, page_bytes)
    return align_up(blocks, granule) * (row or block_size * group.bytes_per_token)
