"""What the sequences' blocks contain, and who may use it again.

Sequences report the token ids that they have computed. When a block is full, it is entered into the
prefix index: under a new node, or, if another sequence has filled the same block before, that one's
block is adopted and the own copy given back. A new sequence asks for the longest prefix it can use.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire.blocks.hits import PrefixHit, longest_hit
from quire.blocks.pools import Pools
from quire.blocks.prefix_index import NO_BLOCK, Extra, PrefixIndex
from quire.blocks.prefix_keys import PrefixKeys
from quire.blocks.runs import Ids
from quire.blocks.tables import BlockTables
from quire.spec import Group, KeptWhole

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
        if counts is None:
            offsets = computed % size
            tables.tails[rows, offsets] = token_ids
            full = np.flatnonzero(offsets == size - 1)
            filled = rows[full]
            data, columns = tables.tails[filled].tobytes(), (computed[full] // size).tolist()
            tables.num_computed[rows] += 1
            if len(filled):
                self._enter(filled.tolist(), columns, data)
            return
        filled_rows: list[int] = []
        filled_columns: list[int] = []
        pieces: list[bytes] = []
        start = 0
        for row, count, before in zip(rows.tolist(), counts, computed.tolist(), strict=True):
            tokens = token_ids[start : start + count]
            start += count
            offset = before % size
            if offset + count < size:
                tables.tails[row, offset : offset + count] = tokens
                continue
            new = np.concatenate([tables.tails[row, :offset], tokens]) if offset else tokens
            num_full = len(new) // size
            rest = new[num_full * size :]
            tables.tails[row, : len(rest)] = rest
            first = before // size
            filled_rows += [row] * num_full
            filled_columns += range(first, first + num_full)
            pieces.append(new[: num_full * size].tobytes())
        tables.num_computed[rows] = computed + np.asarray(counts, np.int64)
        if filled_rows:
            self._enter(filled_rows, filled_columns, b"".join(pieces))

    def _enter(self, rows: list[int], columns: list[int], data: bytes) -> None:
        """Enter full blocks: column ``columns[i]`` of row ``rows[i]``, in order of depth."""
        advance, tips, length = self._index.advance, self._tips, self._index.block_bytes
        new: list[tuple[int, int, int]] = []  # row, column, node
        known: list[tuple[int, int, int]] = []
        start = 0
        for row, column in zip(rows, columns, strict=True):
            extras = self._extras[row]
            extra = extras[column] if column < len(extras) else ()
            node, is_new = advance(tips[row], data[start : start + length], extra)
            tips[row] = node
            start += length
            (new if is_new else known).append((row, column, node))
        if new:
            self._attach(new)
        for row, column, node in known:
            self._share(row, column, self._index.row(node))

    def _attach(self, new: list[tuple[int, int, int]]) -> None:
        """New nodes hold the blocks that their sequences filled."""
        table_rows, columns, nodes = np.array(new, np.int64).T
        entered = self._index.rows(nodes.tolist())
        for number in self._in_blocks:
            blocks = self._tables.ids[number][table_rows, columns].astype(np.intp)
            # A window may have passed some, or never have needed what they begin with.
            there = (blocks != NO_BLOCK) & (columns >= self._tables.sound[number, table_rows])
            blocks, at = blocks[there], entered[there]
            self.attach(number, at, blocks)

    def attach(self, number: int, nodes: Ids, blocks: Ids) -> None:
        """These nodes, which hold none in the group, hold these blocks."""
        self._index.attach(number, nodes, blocks)
        self._pools[number].nodes[blocks] = nodes

    def _share(self, row: int, column: int, node: int) -> None:
        """A block that somebody has filled before: one of the two is enough, if it may be."""
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
