"""The longest prefix that every group still has, and why it is not longer.

A hit of n tokens needs, in each group, the blocks of the tokens that token n reads there: all of
them under full attention, the last few behind a window, the one state of a recurrent layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.blocks.prefix_index import NO_BLOCK, PrefixIndex
from quire.blocks.runs import NO_IDS, Ids
from quire.spec import Group, KeptWhole
from quire.units import ceil_div

Shortfall = Literal[
    "",  # none: it is as long as it may be
    "unknown",  # what follows has not been computed, or is long gone
    "salt",  # nothing is cached under this salt
    "evicted",  # a block of full attention is gone
    "window",  # a window's blocks there are gone, while what follows may be cached
    "state",  # no recurrent state was kept at a later block's end
    "strategy",  # this strategy, or this cache as configured, shares nothing
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The beginning of a prompt that need not be computed. It holds nothing: use it at once."""

    num_tokens: int
    limit: int  # tokens that it could be at most: all but the last
    shortfall: Shortfall
    rows: Ids  # of the nodes that the tokens lie in; the last one may be used in part
    tip: int = -1  # the node of the last whole block, or the root


def no_hit(num_prompt_tokens: int, shortfall: Shortfall, tip: int = -1) -> PrefixHit:
    return PrefixHit(
        num_tokens=0,
        limit=max(0, num_prompt_tokens - 1),
        shortfall=shortfall,
        rows=NO_IDS,
        tip=tip,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a sequence takes over from a hit in one group."""

    first: int  # column of the first block; a window has passed those before
    blocks: Ids  # whole blocks, to be held
    source: Ids  # none, or the block whose first slots are to be copied: it is used in part
    num_slots: int  # … so many
    sound: int = 0  # columns from here on will be written whole, so that others may read them


NOTHING = Start(first=0, blocks=NO_IDS, source=NO_IDS, num_slots=0)


def start_of(
    index: PrefixIndex, number: int, group: Group, block_size: int, hit: PrefixHit, begin: int
) -> Start:
    """``begin``: the first token that the sequence will compute, at or after the end of the hit."""
    if not begin:
        return NOTHING
    column = index.blocks[number][hit.rows].astype(np.intp)
    if isinstance(group.spec, KeptWhole):
        # A state is used up by the next token, so the sequence works on a copy; a state that is
        # brought from outside is a later one.
        source = column[-1:] if begin == hit.num_tokens else column[:0]
        return Start(first=0, blocks=column[:0], source=source, num_slots=1)
    num_whole, num_slots = divmod(hit.num_tokens, block_size)
    first = group.live_start(begin) // block_size
    source = column[num_whole:] if first <= num_whole else column[:0]
    there = source[source != NO_BLOCK]  # a window may have lost what no token here will read
    sound = num_whole + 1 if len(there) < len(source) else 0
    if group.live_start(begin) > max(hit.num_tokens, first * block_size):
        sound = first + 1  # what comes from outside begins in the middle of this block
    return Start(
        first=min(first, num_whole),
        blocks=column[first:num_whole],
        source=there,
        num_slots=num_slots,
        sound=sound,
    )


def longest_hit(
    index: PrefixIndex,
    groups: Sequence[Group],
    block_size: int,
    *,
    root: int,
    nodes: list[int],
    rest: bytes,
    limit: int,
) -> PrefixHit:
    """The longest hit along ``nodes``; ``rest``: what follows them of the prompt's token ids.

    Whole blocks, and the first tokens of one more: of the next on the path where ``limit`` cuts it,
    else of the child that begins most alike.
    """
    known, near = len(nodes) * block_size, None
    if rest and known < limit:
        near = index.nearest_child(nodes[-1] if nodes else root, rest)
    if near is not None:
        known += near[1]
    longest = min(known, limit)
    if not longest:
        return PrefixHit(
            num_tokens=0,
            limit=limit,
            shortfall="unknown" if limit else "",
            rows=NO_IDS,
            tip=root,
        )
    rows = index.rows(nodes if near is None else [*nodes, near[0]])
    fits, lacking = _fits(index, groups, block_size, rows, longest)
    num_tokens = longest if lacking is None else int(np.flatnonzero(fits)[-1]) * block_size
    shortfall: Shortfall = ""
    if num_tokens < longest:
        assert lacking is not None
        shortfall = _why(groups[lacking])
    elif num_tokens < limit:
        shortfall = "unknown"
    num_blocks = num_tokens // block_size
    return PrefixHit(
        num_tokens=num_tokens,
        limit=limit,
        shortfall=shortfall,
        rows=rows[: ceil_div(num_tokens, block_size)],
        tip=nodes[num_blocks - 1] if num_blocks else root,
    )


def _fits(
    index: PrefixIndex, groups: Sequence[Group], block_size: int, rows: Ids, longest: int
) -> tuple[Ids, int | None]:
    """For each number of whole blocks from 0 on: would a hit of it do; and a group for which
    ``longest`` itself would not, if there is one."""
    num_blocks = longest // block_size
    boundaries = np.arange(num_blocks + 1)
    fits = np.ones(num_blocks + 1, bool)
    lacking = None
    for number, group in enumerate(groups):
        has = index.blocks[number][rows] != NO_BLOCK
        if has.all() and not (isinstance(group.spec, KeptWhole) and longest % block_size):
            continue
        # The number of the last block before each boundary that is missing; -1 for none.
        missing = np.where(has, -1, np.arange(len(rows)))
        last_missing = np.concatenate([[-1], np.maximum.accumulate(missing)])
        fits &= last_missing[boundaries] < group.live_start(boundaries * block_size) // block_size
        first, reaches = group.live_start(longest), last_missing[ceil_div(longest, block_size)]
        unaligned = isinstance(group.spec, KeptWhole) and longest % block_size
        if unaligned or (first < longest and reaches >= first // block_size):
            lacking = number
    fits[0] = True
    return fits, lacking


def _why(group: Group) -> Shortfall:
    if isinstance(group.spec, KeptWhole):
        return "state"
    return "evicted" if group.live_start(2**40) == 0 else "window"
