"""The prefix cache knows what the sequences' blocks contain, and finds it for new sequences.

Sequences report the token ids that they have computed. A full block is entered into the prefix
index under a new node. If another sequence has filled the same block before, the sequence takes
that block over and releases its own copy. A new sequence asks for the longest prefix it can use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from quire.kv.block_pool import Pools
from quire.kv.block_tables import BlockTables
from quire.kv.eviction_queue import NO_IDS, Ids
from quire.kv.prefix_index import (
    NO_BLOCK,
    SECRETS,
    BlockIdentity,
    BlockKey,
    Extra,
    PrefixIndex,
    PrefixKeys,
)
from quire.kv.retention import Retention
from quire.spec import Group, KeptWhole
from quire.units import ceil_div

# -- prefix matches --------------------------------------------------------------------------------

# A hit of n tokens needs, in each group, the blocks of the tokens that token n reads there: all of
# them under full attention, the last few behind a window, the one state of a recurrent layer.


Shortfall = Literal[
    "",  # the hit is as long as it may be
    "unknown",  # the index does not know what follows
    "salt",  # the index knows nothing under this salt, or of this tenant
    "evicted",  # a block of full attention was evicted
    "window",  # a window's blocks there were evicted, while later ones may be cached
    "state",  # no recurrent state was kept at a later block's end
    "strategy",  # this strategy, or this cache as configured, shares nothing
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The beginning of a prompt that is cached. It holds no blocks: use it at once."""

    num_tokens: int
    limit: int  # tokens: the longest that it may be, all but the prompt's last one
    shortfall: Shortfall
    rows: Ids  # of the nodes that hold the tokens; the last one may be used in part
    tail: int = -1  # the node of the last whole block, or the root


def no_hit(num_prompt_tokens: int, shortfall: Shortfall, tail: int = -1) -> PrefixHit:
    """Make a hit of no tokens."""
    return PrefixHit(
        num_tokens=0,
        limit=max(0, num_prompt_tokens - 1),
        shortfall=shortfall,
        rows=NO_IDS,
        tail=tail,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The blocks that a sequence takes over from a hit in one group."""

    first: int  # column of the first block; a window has passed the earlier ones
    blocks: Ids  # whole blocks, to be held
    source: Ids  # none, or the block of which only the first slots are used: they are copied
    num_slots: int  # … how many
    shareable_from: int = 0  # the first column that the sequence will write whole


NOTHING = Start(first=0, blocks=NO_IDS, source=NO_IDS, num_slots=0)


def start_of(
    index: PrefixIndex, number: int, group: Group, block_size: int, hit: PrefixHit, begin: int
) -> Start:
    """Find what a sequence takes over from a hit in one group.

    ``begin``: the first token that the sequence will compute, at or after the end of the hit.
    """
    if not begin:
        return NOTHING
    column = index.blocks[number][hit.rows].astype(np.intp)
    if isinstance(group.spec, KeptWhole):
        # The next token overwrites a state, so the sequence works on a copy. A state that the
        # caller brings is a later one.
        source = column[-1:] if begin == hit.num_tokens else column[:0]
        return Start(first=0, blocks=column[:0], source=source, num_slots=1)
    num_whole, num_slots = divmod(hit.num_tokens, block_size)
    first = group.live_start(begin) // block_size
    source = column[num_whole:] if first <= num_whole else column[:0]
    there = source[source != NO_BLOCK]  # a window may have lost what no token will read
    shareable_from = num_whole + 1 if len(there) < len(source) else 0
    if group.live_start(begin) > max(hit.num_tokens, first * block_size):
        shareable_from = first + 1  # the caller's tokens begin in the middle of this block
    return Start(
        first=min(first, num_whole),
        blocks=column[first:num_whole],
        source=there,
        num_slots=num_slots,
        shareable_from=shareable_from,
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
    """Find the longest hit along ``nodes``; ``rest``: the prompt's token ids that follow them.

    A hit has whole blocks, and the first tokens of one more: of the next on the path if ``limit``
    cuts it, else of the child that shares most tokens with the prompt.
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
            tail=root,
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
        tail=nodes[num_blocks - 1] if num_blocks else root,
    )


def _fits(
    index: PrefixIndex, groups: Sequence[Group], block_size: int, rows: Ids, longest: int
) -> tuple[Ids, int | None]:
    """Tell for each number of whole blocks, from 0 on, whether every group has such a hit.

    Returns: that (bool[num_blocks + 1]), and a group that lacks a hit of ``longest``, or None.
    """
    num_blocks = longest // block_size
    boundaries = np.arange(num_blocks + 1)
    fits = np.ones(num_blocks + 1, bool)
    lacking = None
    for number, group in enumerate(groups):
        has = index.blocks[number][rows] != NO_BLOCK
        if has.all() and not (isinstance(group.spec, KeptWhole) and longest % block_size):
            continue
        # The last missing block before each boundary; -1 for none.
        missing = np.where(has, -1, np.arange(len(rows)))
        last_missing = np.concatenate([[-1], np.maximum.accumulate(missing)])
        fits &= last_missing[boundaries] < group.live_start(boundaries * block_size) // block_size
        first, reaches = group.live_start(longest), last_missing[ceil_div(longest, block_size)]
        unaligned = isinstance(group.spec, KeptWhole) and longest % block_size
        if unaligned or (first < longest and reaches >= first // block_size):
            lacking = number
    fits[0] = True
    return fits, lacking


def _needed(
    group: Group, block_size: int, there: npt.NDArray[np.bool_], stop: int
) -> tuple[int, Ids]:
    """Return how many blocks a hit of up to ``stop`` can have in a group, and which columns it
    needs.

    ``there`` (bool[n]) tells which are in the cache.
    """
    if isinstance(group.spec, KeptWhole):  # the last state before serves
        last = there[:stop].nonzero()[0][-1:]
        return (int(last[0]) + 1 if len(last) else 0), last
    first = group.live_start(stop * block_size) // block_size
    # The index knows a node while something is in it, also where a chunk begins.
    columns = np.arange(min(first, stop - 1), stop)
    return (stop, columns) if there[columns].all() else (0, NO_IDS)


def _why(group: Group) -> Shortfall:
    if isinstance(group.spec, KeptWhole):
        return "state"
    return "evicted" if group.live_start(2**40) == 0 else "window"


# -- prefix cache ----------------------------------------------------------------------------------


TokenIds = npt.NDArray[np.int32]


class PrefixCache:
    """For each row of ``tables``: the node of the sequence's last full block, and its keys."""

    def __init__(
        self, groups: tuple[Group, ...], index: PrefixIndex, pools: Pools, tables: BlockTables
    ) -> None:
        self._groups, self._index, self._pools, self._tables = groups, index, pools, tables
        self._size = tables.block_size
        # A recurrent state changes with each token: the cache holds copies (``keep_state``).
        self._in_blocks = [
            number for number, group in enumerate(groups) if not isinstance(group.spec, KeptWhole)
        ]
        self._in_states = [n for n in range(len(groups)) if n not in self._in_blocks]
        self._tail_nodes: dict[int, int] = {}
        self._extras: dict[int, tuple[Extra, ...]] = {}

    # -- sequences -------------------------------------------------------------------------------

    def add(self, row: int, keys: PrefixKeys) -> None:
        """Begin a sequence, which has computed nothing."""
        self._tail_nodes[row] = self._index.root(keys.of_root())
        self._extras[row] = keys.of_blocks(self._size)

    def tail(self, row: int) -> int:
        """Return the node of a sequence's last full block, or its root."""
        return self._tail_nodes[row]

    def _path(self, row: int) -> list[int]:
        """List the index's rows of a sequence's full blocks, from its first one on."""
        return self._index.path(self._index.row(self._tail_nodes[row]))

    def fork(self, source: int, target: int) -> None:
        """Begin a sequence as a copy of another."""
        self._index.incref(self._tail_nodes[source])
        self._tail_nodes[target], self._extras[target] = (
            self._tail_nodes[source],
            self._extras[source],
        )

    def remove(self, row: int) -> None:
        """End a sequence; its blocks can still be found."""
        self._index.decref(self._tail_nodes.pop(row))
        del self._extras[row]

    def forget(self, row: int) -> None:
        """Take a sequence's blocks out of the index, from its first to its last full one."""
        path = np.array(self._path(row), np.intp)
        for number, blocks in enumerate(self._index.blocks):
            there = blocks[path]
            self._pools.forget(number, there[there != NO_BLOCK].astype(np.intp))

    def retain(self, row: int, retention: Retention) -> int:
        """Keep the beginning of a sequence's prompt for a while. Returns: how many tokens of it."""
        path = np.array(self._path(row), np.intp)
        seconds = retention.seconds(len(path), self._size)
        stops = ((np.diff(seconds, append=0) < 0).nonzero()[0] + 1).tolist()  # after each mark
        if not stops:
            return 0
        num_kept = len(path)
        for number, group in enumerate(self._groups):
            blocks = self._index.blocks[number][path].astype(np.intp)
            needs = [_needed(group, self._size, blocks != NO_BLOCK, stop) for stop in stops]
            columns = np.unique(np.concatenate([need for _, need in needs]))[::-1]
            count = self._pools.retain(
                number, blocks[columns], seconds[columns], retention.owner, retention.clock
            )
            kept = np.zeros(len(path) + 1, bool)
            kept[columns[len(columns) - count :]] = True
            if group.live_start(len(path) * self._size):
                found = max((end for end, need in needs if kept[need].all()), default=0)
            else:  # also a part of what a mark needs can be found
                found = int(kept.argmin())
            num_kept = min(num_kept, found)
        return num_kept * self._size

    def trim(self, row: int, num_tokens: int) -> None:
        """Take a sequence back to its first ``num_tokens`` tokens."""
        before = int(self._tables.num_computed[row])
        if num_tokens >= before:
            return
        tail, size = self._tail_nodes[row], self._size
        back = before // size - num_tokens // size
        if back:
            old = tail
            for _ in range(back):
                tokens = self._index.tokens(self._index.row(tail))
                tail = self._index.parent(tail)
            self._tables.last_token_ids[row] = np.frombuffer(tokens, np.int32)
            self._index.incref(tail)
            self._index.decref(old)
            self._tail_nodes[row] = tail

    # -- asking ----------------------------------------------------------------------------------

    def match(
        self, row: int, token_ids: TokenIds, limit: int, *, in_part: bool = True
    ) -> PrefixHit:
        """Find the longest prefix of token ids (i32[n]), up to ``limit``, for an empty sequence.

        ``in_part``: the last block may be used in part.
        """
        root, extras = self._tail_nodes[row], self._extras[row]
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
            return hit if SECRETS.isdisjoint(tags) else replace(hit, shortfall="salt")
        return hit

    def next_block(
        self, row: int, token_ids: Sequence[int], hit: PrefixHit | None
    ) -> tuple[BlockKey, int] | None:
        """Return the key of the block that the next token ids fill, and the token it ends at."""
        computed = int(self._tables.num_computed[row]) if hit is None else hit.num_tokens
        column = computed // self._size
        end = (column + 1) * self._size
        if len(token_ids) < end:
            return None
        tail, extras = self._tail_nodes[row] if hit is None else hit.tail, self._extras[row]
        tokens = np.array(token_ids[end - self._size : end], np.int32).tobytes()
        if column < len(extras) and extras[column]:
            return (tail, tokens, extras[column]), end
        return (tail, tokens), end

    def following(self, row: int, token_ids: TokenIds, hit: PrefixHit) -> list[BlockIdentity]:
        """Name the whole blocks of token ids (i32[n]) behind an empty sequence's hit."""
        first = hit.num_tokens // self._size
        data = token_ids[first * self._size : len(token_ids) // self._size * self._size].tobytes()
        root, extras = self._tail_nodes[row], self._extras[row]
        return self._index.following(hit.tail, root, data, extras[first:])

    def computed(self, row: int) -> list[BlockIdentity]:
        """Name the full blocks of a sequence, from its first one on."""
        blocks = map(self._index.identity, self.computed_nodes(row))
        return [block for block in blocks if block is not None]

    def computed_nodes(self, row: int) -> list[int]:
        """List the nodes of a sequence's full blocks, from its first one on."""
        return [self._index.node(each) for each in self._path(row)]

    def last_nodes(self, row: int, count: int) -> list[int]:
        """List the nodes of a sequence's last full blocks, the last one first."""
        upwards = self._index.upwards(self._index.row(self._tail_nodes[row]))
        return [self._index.node(each) for each in islice(upwards, count)]

    def adopt(self, row: int, hit: PrefixHit) -> None:
        """Begin a sequence with this prefix, whose blocks it holds."""
        self._index.incref(hit.tail)
        self._index.decref(self._tail_nodes[row])
        self._tail_nodes[row] = hit.tail
        self._tables.num_computed[row] = hit.num_tokens
        if hit.num_tokens % self._size:
            tokens = self._index.tokens(int(hit.rows[-1]))
            self._tables.last_token_ids[row] = np.frombuffer(tokens, np.int32)

    def lacking_states(self, row: int) -> tuple[int, list[int]]:
        """Return a sequence's tail node, and the groups that keep no state there.

        There are none if the sequence's tokens do not end at the end of a block.
        """
        node = self._index.row(self._tail_nodes[row])
        computed = int(self._tables.num_computed[row])
        if not computed or computed % self._size:
            return node, []
        return node, [n for n in self._in_states if self._index.blocks[n][node] == NO_BLOCK]

    # -- telling ---------------------------------------------------------------------------------

    def mark_computed(self, rows: Ids, counts: Sequence[int] | None, token_ids: TokenIds) -> None:
        """Note that the next tokens of rows (i64[S]) are computed, and enter the full blocks.

        ``counts[i]`` tokens of row i, or one of each; ``token_ids``: all of them, packed (i32[T]).
        """
        tables, size = self._tables, self._size
        computed = tables.num_computed[rows]
        offsets = computed % size
        if counts is None:
            tables.last_token_ids[rows, offsets] = token_ids
            tables.num_computed[rows] += 1
            full = (offsets == size - 1).nonzero()[0]
            if len(full):
                columns = (computed[full] // size).tolist()
                of_each = zip(rows[full].tolist(), columns, strict=True)
                self._enter(
                    [(row, at, tables.last_token_ids[row].tobytes()) for row, at in of_each]
                )
            return
        sizes = np.asarray(counts, np.int64)
        stops = sizes.cumsum()
        # Most are single tokens that fill no block.
        single = (sizes == 1) & (offsets < size - 1)
        tables.last_token_ids[rows[single], offsets[single]] = token_ids[stops[single] - 1]
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
                tables.last_token_ids[row, offset : offset + count] = tokens
                continue
            new = (
                np.concatenate([tables.last_token_ids[row, :offset], tokens]) if offset else tokens
            )
            end = len(new) // size * size
            tables.last_token_ids[row, : len(new) - end] = new[end:]
            entered.append((row, before // size, new[:end].tobytes()))
        if entered:
            self._enter(entered)

    def _enter(self, filled: list[tuple[int, int, bytes]]) -> None:
        """Enter full blocks: (row, first column, the token ids of the blocks) each."""
        rows: list[int] = []
        columns: list[int] = []
        entered: list[int] = []
        known: list[tuple[int, int, int]] = []  # row, column, node
        for row, first, data in filled:
            nodes, num_known = self._descend(row, first, data)
            self._tail_nodes[row] = nodes[-1]
            known += ((row, first + at, nodes[at]) for at in range(num_known))
            rows += [row] * (len(nodes) - num_known)
            columns += range(first + num_known, first + len(nodes))
            entered += nodes[num_known:]
        if entered:
            self._attach(np.array(rows), np.array(columns), self._index.rows(entered))
        for row, column, node in known:
            self._share(row, column, self._index.row(node))

    def _descend(self, row: int, column: int, data: bytes) -> tuple[list[int], int]:
        """Return the nodes of a row's next blocks, and how many of them were known before."""
        tail, extras, length = self._tail_nodes[row], self._extras[row], self._index.block_bytes
        if column >= len(extras):
            return self._index.descend(tail, data)
        nodes, num_known = list[int](), 0
        for at, start in enumerate(range(0, len(data), length), column):
            extra = extras[at] if at < len(extras) else ()
            tail, is_new = self._index.advance(tail, data[start : start + length], extra)
            nodes.append(tail)
            num_known += not is_new
        return nodes, num_known

    def _attach(self, table_rows: Ids, columns: Ids, entered: Ids) -> None:
        """Give new nodes the blocks that their sequences filled."""
        for number in self._in_blocks:
            blocks = self._tables.ids[number][table_rows, columns].astype(np.intp)
            # A window may have passed some, and others may not be written whole.
            first = self._tables.shareable_from[number, table_rows]
            there = (blocks != NO_BLOCK) & (columns >= first)
            if np.count_nonzero(there) < len(blocks):
                self.attach(number, entered[there], blocks[there])
            else:
                self.attach(number, entered, blocks)

    def attach(self, number: int, nodes: Ids, blocks: Ids) -> None:
        """Give nodes (i64[n]) that hold no block in the group these blocks (i64[n])."""
        self._index.attach(number, nodes, blocks)
        self._pools[number].nodes[blocks] = nodes

    def _share(self, row: int, column: int, node: int) -> None:
        """Let a row use the node's block instead of its own, which holds the same."""
        for number in self._in_blocks:
            table = self._tables.ids[number]
            own, theirs = int(table[row, column]), int(self._index.blocks[number][node])
            if own in (theirs, NO_BLOCK):
                continue
            if theirs == NO_BLOCK:
                if column < self._tables.shareable_from[number, row]:
                    continue
                self.attach(number, np.array([node]), np.array([own]))
            elif self._tables.may_swap(number, row, column, theirs):
                self._pools.hold(number, np.array([theirs]))
                table[row, column] = theirs
                self._tables.note((row,))
                self._pools.release(number, np.array([own]))
