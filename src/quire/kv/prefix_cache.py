"""What the sequences' blocks contain, and who may use it again.

Sequences report the token ids that they have computed. When a block is full, it is entered into the
prefix index: under a new node, or, if another sequence has filled the same block before, that one's
block is adopted and the own copy given back. A new sequence asks for the longest prefix it can use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from quire.kv.block_pool import Pools
from quire.kv.block_tables import BlockTables
from quire.kv.eviction_queue import NO_IDS, Ids
from quire.kv.prefix_index import NO_BLOCK, BlockKey, Extra, PrefixIndex, PrefixKeys
from quire.spec import Group, KeptWhole
from quire.units import ceil_div

# -- prefix matches --------------------------------------------------------------------------------

# The longest prefix that every group still has, and why it is not longer.
#
# A hit of n tokens needs, in each group, the blocks of the tokens that token n reads there: all of
# them under full attention, the last few behind a window, the one state of a recurrent layer.


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


# -- prefix cache ----------------------------------------------------------------------------------


TokenIds = npt.NDArray[np.int32]


class PrefixCache:
    """By row of ``tables``: the node that a sequence's computed tokens end in, and its keys."""

    def __init__(
        self, groups: tuple[Group, ...], index: PrefixIndex, pools: Pools, tables: BlockTables
    ) -> None:
        self._groups, self._index, self._pools, self._tables = groups, index, pools, tables
        self._size = tables.block_size
        # A recurrent state changes with each token; what is kept of it are copies (``keep_state``).
        self._in_blocks = [
            number for number, group in enumerate(groups) if not isinstance(group.spec, KeptWhole)
        ]
        self._in_states = [n for n in range(len(groups)) if n not in self._in_blocks]
        self._tips: dict[int, int] = {}
        self._extras: dict[int, tuple[Extra, ...]] = {}

    # -- sequences -------------------------------------------------------------------------------

    def add(self, row: int, keys: PrefixKeys) -> None:
        self._tips[row] = self._index.root(keys.of_root())
        self._extras[row] = keys.of_blocks(self._size)

    def tip(self, row: int) -> int:
        """The node that a sequence's computed tokens end in."""
        return self._tips[row]

    def fork(self, source: int, target: int) -> None:
        self._index.need(self._tips[source])
        self._tips[target], self._extras[target] = self._tips[source], self._extras[source]

    def remove(self, row: int) -> None:
        self._index.let_go(self._tips.pop(row))
        del self._extras[row]

    def forget(self, row: int) -> None:
        """What is entered up to a sequence's last full block is to be found no more."""
        path = np.array(self._index.path(self._index.row(self._tips[row])), np.intp)
        for number, blocks in enumerate(self._index.blocks):
            there = blocks[path]
            self._pools.forget(number, there[there != NO_BLOCK].astype(np.intp))

    def trim(self, row: int, num_tokens: int) -> None:
        """The sequence has computed no more than ``num_tokens``."""
        before = int(self._tables.num_computed[row])
        if num_tokens >= before:
            return
        tip, size = self._tips[row], self._size
        back = before // size - num_tokens // size
        if back:
            old = tip
            for _ in range(back):
                tokens = self._index.tokens(self._index.row(tip))
                tip = self._index.parent(tip)
            self._tables.tails[row] = np.frombuffer(tokens, np.int32)
            self._index.need(tip)
            self._index.let_go(old)
            self._tips[row] = tip

    # -- asking ----------------------------------------------------------------------------------

    def match(
        self, row: int, token_ids: TokenIds, limit: int, *, in_part: bool = True
    ) -> PrefixHit:
        """The longest prefix of these token ids, up to ``limit``, for a sequence without any.

        ``in_part``: the first tokens of a block will do too.
        """
        root, extras = self._tips[row], self._extras[row]
        data = token_ids.tobytes()
        nodes = self._index.walk(root, data, extras)
        rest = b""
        if in_part and (len(nodes) >= len(extras) or not extras[len(nodes)]):
            first = len(nodes) * self._index.block_bytes
            rest = data[first : first + self._index.block_bytes]
        hit = longest_hit(
            self._index,
            self._groups,
            self._size,
            root=root,
            nodes=nodes,
            rest=rest,
            limit=limit,
        )
        if hit.shortfall == "unknown" and not nodes and self._index.is_bare(root):
            tags = dict(self._index.extra(self._index.row(root)))
            return replace(hit, shortfall="salt") if "salt" in tags else hit
        return hit

    def next_block(
        self, row: int, token_ids: Sequence[int], hit: PrefixHit | None
    ) -> tuple[BlockKey, int] | None:
        """What the block will be found by that the next of these token ids fill, and its end."""
        computed = int(self._tables.num_computed[row]) if hit is None else hit.num_tokens
        column = computed // self._size
        end = (column + 1) * self._size
        if len(token_ids) < end:
            return None
        tip, extras = self._tips[row] if hit is None else hit.tip, self._extras[row]
        tokens = np.array(token_ids[end - self._size : end], np.int32).tobytes()
        if column < len(extras) and extras[column]:
            return (tip, tokens, extras[column]), end
        return (tip, tokens), end

    def adopt(self, row: int, hit: PrefixHit) -> None:
        """The sequence begins with this prefix. Its blocks are held by now."""
        self._index.need(hit.tip)
        self._index.let_go(self._tips[row])
        self._tips[row] = hit.tip
        self._tables.num_computed[row] = hit.num_tokens
        if hit.num_tokens % self._size:
            tokens = self._index.tokens(int(hit.rows[-1]))
            self._tables.tails[row] = np.frombuffer(tokens, np.int32)

    def lacking_states(self, row: int) -> tuple[int, list[int]]:
        """The node that a sequence's full blocks end in, and the groups that keep no state there.

        None of them, if its tokens end elsewhere than at the end of a block.
        """
        node = self._index.row(self._tips[row])
        computed = int(self._tables.num_computed[row])
        if not computed or computed % self._size:
            return node, []
        return node, [n for n in self._in_states if self._index.blocks[n][node] == NO_BLOCK]

    # -- telling ---------------------------------------------------------------------------------

    def mark_computed(self, rows: Ids, counts: Sequence[int] | None, token_ids: TokenIds) -> None:
        """The next tokens of these rows are computed: ``counts[i]`` of them, or one of each."""
        tables, size = self._tables, self._size
        computed = tables.num_computed[rows]
        offsets = computed % size
        if counts is None:
            tables.tails[rows, offsets] = token_ids
            tables.num_computed[rows] += 1
            full = (offsets == size - 1).nonzero()[0]
            if len(full):
                columns = (computed[full] // size).tolist()
                of_each = zip(rows[full].tolist(), columns, strict=True)
                self._enter([(row, at, tables.tails[row].tobytes()) for row, at in of_each])
            return
        sizes = np.asarray(counts, np.int64)
        stops = sizes.cumsum()
        # Most are single tokens that fill nothing.
        single = (sizes == 1) & (offsets < size - 1)
        tables.tails[rows[single], offsets[single]] = token_ids[stops[single] - 1]
        tables.num_computed[rows] = computed + sizes
        several = (~single).nonzero()[0]
        entered: list[tuple[int, int, bytes]] = []
        for row, offset, count, before, stop in zip(
            rows[several].tolist(),
            offsets[several].tolist(),
            sizes[several].tolist(),
            computed[several].tolist(),
            stops[several].tolist(),
            strict=True,
        ):
            tokens = token_ids[stop - count : stop]
            if offset + count < size:
                tables.tails[row, offset : offset + count] = tokens
                continue
            new = np.concatenate([tables.tails[row, :offset], tokens]) if offset else tokens
            end = len(new) // size * size
            tables.tails[row, : len(new) - end] = new[end:]
            entered.append((row, before // size, new[:end].tobytes()))
        if entered:
            self._enter(entered)

    def _enter(self, filled: list[tuple[int, int, bytes]]) -> None:
        """Enter full blocks: of a row, from a column on, what they contain."""
        rows: list[int] = []
        columns: list[int] = []
        entered: list[int] = []
        known: list[tuple[int, int, int]] = []  # row, column, node
        for row, first, data in filled:
            nodes, num_known = self._descend(row, first, data)
            self._tips[row] = nodes[-1]
            known += ((row, first + at, nodes[at]) for at in range(num_known))
            rows += [row] * (len(nodes) - num_known)
            columns += range(first + num_known, first + len(nodes))
            entered += nodes[num_known:]
        if entered:
            self._attach(np.array(rows), np.array(columns), self._index.rows(entered))
        for row, column, node in known:
            self._share(row, column, self._index.row(node))

    def _descend(self, row: int, column: int, data: bytes) -> tuple[list[int], int]:
        """The nodes of a row's next blocks, and how many of them were known before."""
        tip, extras, length = self._tips[row], self._extras[row], self._index.block_bytes
        if column >= len(extras):
            return self._index.descend(tip, data)
        nodes, num_known = list[int](), 0
        for at, start in enumerate(range(0, len(data), length), column):
            extra = extras[at] if at < len(extras) else ()
            tip, is_new = self._index.advance(tip, data[start : start + length], extra)
            nodes.append(tip)
            num_known += not is_new
        return nodes, num_known

    def _attach(self, table_rows: Ids, columns: Ids, entered: Ids) -> None:
        """New nodes hold the blocks that their sequences filled."""
        for number in self._in_blocks:
            blocks = self._tables.ids[number][table_rows, columns].astype(np.intp)
            # A window may have passed some, or never have needed what they begin with.
            there = (blocks != NO_BLOCK) & (columns >= self._tables.sound[number, table_rows])
            if np.count_nonzero(there) < len(blocks):
                self.attach(number, entered[there], blocks[there])
            else:
                self.attach(number, entered, blocks)

    def attach(self, number: int, nodes: Ids, blocks: Ids) -> None:
        """These nodes, which hold none in the group, hold these blocks."""
        self._index.attach(number, nodes, blocks)
        self._pools[number].nodes[blocks] = nodes

    def _share(self, row: int, column: int, node: int) -> None:
        """A block that was filled before: one of the two is enough, if it may be."""
        for number in self._in_blocks:
            table = self._tables.ids[number]
            own, theirs = int(table[row, column]), int(self._index.blocks[number][node])
            if own in (theirs, NO_BLOCK):
                continue
            if theirs == NO_BLOCK:
                if column < self._tables.sound[number, row]:
                    continue
                self.attach(number, np.array([node]), np.array([own]))
            elif self._tables.may_swap(number, row, column, theirs):
                self._pools.hold(number, np.array([theirs]))
                table[row, column] = theirs
                self._tables.note((row,))
                self._pools.release(number, np.array([own]))
