"""What is cached, found by what it is: (parent node, token ids, extra keys) → node → blocks.

A node stands for one full block of tokens after all those of its ancestors, and holds at most one
block in each group. It is found by equality of the token ids themselves: no hash is trusted. A
node's id is never used again, so a key that names a parent that is gone can match nothing.

A node lives as long as something needs it: a block in some group, a child, or a sequence that ends
in it. So it outlives its blocks while it has children; in groups that forget (windows, states) the
early blocks go first, and what follows is still found.

Source: SGLang's radix cache compares token ids too; the chained SHA-256 is as vLLM's block hash.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from quire.kv.eviction import Prints
from quire.kv.eviction_queue import Ids

# -- events ----------------------------------------------------------------------------------------

# What the prefix index learned and lost, in order: enough to rebuild it elsewhere.
#
# The fields are those of vLLM's KV-cache events, one block an event.


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A block can be found from now on."""

    block_hash: bytes  # chained SHA-256: over the parent's, the extra keys and the token ids
    parent_block_hash: bytes | None  # None for a sequence's first block
    token_ids: tuple[int, ...]
    extra_keys: tuple[tuple[str, str], ...]  # tagged: salt and adapter of the root, images
    group_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """A block can be found no longer."""

    block_hash: bytes
    group_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


# -- prefix index ----------------------------------------------------------------------------------


Extra: TypeAlias = tuple[tuple[str, str], ...]  # tagged: ("salt", …), ("lora", …), ("image", …)
BlockKey: TypeAlias = tuple[int, bytes] | tuple[int, bytes, Extra]  # a parent node comes first

NO_BLOCK = -1
_NO_PARENT = -1
_ROW_BITS = 28
_ROW = (1 << _ROW_BITS) - 1
_NO_CHILD, _MANY = -1, -2
_Number = TypeVar("_Number", np.int32, np.uint32)
_FIRST_ROOM = 64
TOKEN_BYTES = 4  # token ids are keyed as int32


class PrefixIndex:
    """The nodes. A node's id is its row, and above that how many nodes there were before it."""

    def __init__(self, num_groups: int, block_size: int, *, keep_events: bool = False) -> None:
        self.events: list[BlockEvent] = []  # in order, if kept; the reader clears the list
        self._keep_events = keep_events
        self.block_bytes = TOKEN_BYTES * block_size  # of a full block's token ids
        self._ids: dict[BlockKey, int] = {}
        self._num_created = 0
        # By row.
        self.blocks: list[npt.NDArray[np.int32]] = [
            np.full(_FIRST_ROOM, NO_BLOCK, np.int32) for _ in range(num_groups)
        ]  # of each group
        self.prints: Prints = np.zeros(_FIRST_ROOM, np.uint32)  # of the prefix: a hint, no proof
        self._needs = np.zeros(_FIRST_ROOM, np.int32)  # children, sequences that end here, blocks
        self._only_child = np.full(_FIRST_ROOM, _NO_CHILD, np.int32)  # its row
        self._keys: list[BlockKey | None] = []
        self._free_rows: list[int] = []
        # Of a few rows.
        self._families: dict[int, list[bytes]] = {}  # token ids of two or more children, sorted
        self._hashes: dict[int, bytes] = {}  # chained hashes, of those that were asked for
        self._view()

    def __len__(self) -> int:
        return len(self._ids)

    # -- finding ---------------------------------------------------------------------------------

    def root(self, extra: Extra = ()) -> int:
        """The node before the first token. The caller needs it until ``let_go``."""
        node = self._child((_NO_PARENT, b"", extra))
        self._need[node & _ROW] += 1
        return node

    def walk(self, root: int, data: bytes, extras: Sequence[Extra] = ()) -> list[int]:
        """The known nodes along whole blocks of token ids, as far as they go."""
        get, size = self._ids.get, self.block_bytes
        node: int | None = root
        found: list[int] = []
        num_extras = len(extras)
        for start in range(0, len(data) - size + 1, size):
            tokens = data[start : start + size]
            index = start // size
            if index < num_extras and extras[index]:
                node = get((node, tokens, extras[index]))  # type: ignore[arg-type]
            else:
                node = get((node, tokens))  # type: ignore[arg-type]
            if node is None:
                break
            found.append(node)
        return found

    def nearest_child(self, node: int, data: bytes) -> tuple[int, int] | None:
        """The child that shares most token ids with ``data``: (its id, how many), or None."""
        row = node & _ROW
        only = self._child_at[row]
        if only == _NO_CHILD:
            return None
        children = self._families[row] if only == _MANY else [self._key(only)[1]]
        at = bisect_left(children, data)
        # Of sorted strings, the ones beside it share most.
        near = [(_common_tokens(data, other), other) for other in children[max(at - 1, 0) : at + 1]]
        num_tokens, tokens = max(near)
        return (self._ids[node, tokens], num_tokens) if num_tokens else None

    def is_bare(self, node: int) -> bool:
        """Whether it has no child that begins with token ids alone."""
        return self._child_at[node & _ROW] == _NO_CHILD

    def rows(self, nodes: Iterable[int]) -> Ids:
        return np.fromiter(nodes, np.int64) & _ROW

    def row(self, node: int) -> int:
        return node & _ROW

    def tokens(self, row: int) -> bytes:
        """A node's token ids, as int32 bytes."""
        return self._key(row)[1]

    def extra(self, row: int) -> Extra:
        key = self._key(row)
        return key[2] if len(key) == 3 else ()

    def parent(self, node: int) -> int:
        return self._key(node & _ROW)[0]

    def path(self, row: int) -> list[int]:
        """Rows from the first block down to this one; the root is not among them."""
        path = []
        parent = self._key(row)[0]
        while parent != _NO_PARENT:
            path.append(row)
            row = parent & _ROW
            parent = self._key(row)[0]
        return path[::-1]

    # -- growing ---------------------------------------------------------------------------------

    def advance(self, tip: int, tokens: bytes, extra: Extra = ()) -> tuple[int, bool]:
        """A sequence that ends in ``tip`` has filled one more block. Returns: node, is it new."""
        key: BlockKey = (tip, tokens, extra) if extra else (tip, tokens)
        node = self._ids.get(key)
        if node is not None:
            self._need[node & _ROW] += 1
            self._need[tip & _ROW] -= 1  # it has this child, so it stays
            return node, False
        node = self._child(key)
        # The tip loses the sequence and gains the child.
        self._need[node & _ROW] = 1
        if not extra:
            self._add_to_family(tip & _ROW, node & _ROW, tokens)
        return node, True

    def descend(self, tip: int, data: bytes) -> tuple[list[int], int]:
        """``advance`` along whole blocks of token ids. Returns: the nodes, how many were known.

        What follows a new node is new too, so the rest is made in one go.
        """
        size = self.block_bytes
        if (tip, data[:size]) not in self._ids:  # as mostly with a single block
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
            return self._chain(tip, pieces), 0
        nodes = self.walk(tip, data)
        num_known = len(nodes)
        if num_known:
            self._need[nodes[-1] & _ROW] += 1
            self._need[tip & _ROW] -= 1
            tip = nodes[-1]
        if num_known * size < len(data):
            pieces = [data[at : at + size] for at in range(num_known * size, len(data), size)]
            nodes += self._chain(tip, pieces)
        return nodes, num_known

    def _chain(self, tip: int, pieces: list[bytes]) -> list[int]:
        """New nodes, each the only child of the one before it; a sequence ends in the last."""
        while len(self._keys) + len(pieces) > len(self.prints):
            self._double()
        keys, ids, free_rows = self._keys, self._ids, self._free_rows
        prints, needs, children = self._print, self._need, self._child_at
        nodes: list[int] = []
        above, above_row, serial = prints[tip & _ROW], _NO_CHILD, self._num_created
        parent = tip
        for tokens in pieces:
            key = (parent, tokens)
            if free_rows:
                row = free_rows.pop()
                keys[row] = key
            else:
                row = len(keys)
                keys.append(key)
            if above_row != _NO_CHILD:
                children[above_row] = row
            parent = ids[key] = serial << _ROW_BITS | row
            serial += 1
            above = prints[row] = crc32(tokens, above)
            needs[row] = 1
            above_row = row
            nodes.append(parent)
        self._num_created = serial
        self._add_to_family(tip & _ROW, nodes[0] & _ROW, pieces[0])
        return nodes

    def _child(self, key: BlockKey) -> int:
        node = self._ids.get(key)
        if node is None:
            if self._free_rows:
                row = self._free_rows.pop()
                self._keys[row] = key
            else:
                row = len(self._keys)
                self._keys.append(key)
                if row >= len(self.prints):
                    self._double()
            node = self._ids[key] = self._num_created << _ROW_BITS | row
            self._num_created += 1
            above = 0 if key[0] == _NO_PARENT else self._print[key[0] & _ROW]
            if len(key) == 3:
                above = crc32(repr(key[2]).encode(), above)
            self._print[row] = crc32(key[1], above)
        return node

    def _view(self) -> None:
        """Single elements are read and written faster through these."""
        self._print = memoryview(self.prints)  # type: ignore[arg-type]
        self._need = memoryview(self._needs)  # type: ignore[arg-type]
        self._child_at = memoryview(self._only_child)  # type: ignore[arg-type]

    def _double(self) -> None:
        self.blocks = [_doubled(blocks, NO_BLOCK) for blocks in self.blocks]
        self.prints = _doubled(self.prints, 0)
        self._needs = _doubled(self._needs, 0)
        self._only_child = _doubled(self._only_child, _NO_CHILD)
        self._view()

    def need(self, node: int) -> None:
        """One more sequence ends here."""
        self._need[node & _ROW] += 1

    def attach(self, group: int, rows: Ids, blocks: Ids) -> None:
        """These nodes, which have none in the group, now hold these blocks."""
        self.blocks[group][rows] = blocks
        self._needs[rows] += 1
        if self._keep_events:
            self.events += [self._stored(group, row) for row in rows.tolist()]

    # -- shrinking -------------------------------------------------------------------------------

    def detach(self, group: int, rows: Ids) -> None:
        """These nodes hold no block in the group any more."""
        self.blocks[group][rows] = NO_BLOCK
        if self._keep_events:
            hashes = [self.block_hash(row) for row in rows.tolist()]
            self.events += [BlockRemoved(block_hash=each, group_idx=group) for each in hashes]
        left = self._needs[rows] - 1
        self._needs[rows] = left
        for row in rows[left == 0].tolist():
            self._remove(row)

    def let_go(self, node: int) -> None:
        """A sequence ends here no longer."""
        row = node & _ROW
        self._need[row] -= 1
        if not self._need[row]:
            self._remove(row)

    def _remove(self, row: int) -> None:
        """Nothing needs a node; nor, perhaps, its ancestors, once it is gone."""
        keys, ids, free_rows = self._keys, self._ids, self._free_rows
        needs, children = self._need, self._child_at
        while not needs[row]:
            key = keys[row]
            assert key is not None, f"row {row} holds no node"
            del ids[key]
            keys[row] = None
            free_rows.append(row)
            if self._hashes:
                self._hashes.pop(row, None)
            if key[0] == _NO_PARENT:
                return
            row = key[0] & _ROW
            if len(key) == 2:
                if children[row] == _MANY:
                    self._take_from_family(row, key)
                else:
                    children[row] = _NO_CHILD
            needs[row] -= 1

    def note_cleared(self) -> None:
        """Everything has been detached at once, which readers of events may want to know."""
        if self._keep_events:
            self.events.append(AllBlocksCleared())

    # -- for the outside -------------------------------------------------------------------------

    def block_hash(self, row: int) -> bytes:
        """The chained SHA-256 over all token ids and extra keys up to this node.

        Events and outside stores name blocks by it. It is computed once a node.
        """
        missing = []
        while row not in self._hashes:
            missing.append(row)
            parent = self._key(row)[0]
            if parent == _NO_PARENT:
                break
            row = parent & _ROW
        digest = self._hashes.get(row, b"")
        for row in reversed(missing):
            state = sha256(digest)
            extra = self.extra(row)
            if extra:
                state.update(repr(extra).encode())
            state.update(self.tokens(row))
            digest = self._hashes[row] = state.digest()
        return digest

    def _stored(self, group: int, row: int) -> BlockStored:
        parent = self.row(self._key(row)[0])
        first = self._key(parent)[0] == _NO_PARENT
        return BlockStored(
            block_hash=self.block_hash(row),
            parent_block_hash=None if first else self.block_hash(parent),
            token_ids=tuple(np.frombuffer(self.tokens(row), np.int32).tolist()),
            extra_keys=(*(self.extra(parent) if first else ()), *self.extra(row)),
            group_idx=group,
        )

    def check(self) -> None:
        needs = [0] * len(self._keys)
        for key, node in self._ids.items():
            row = node & _ROW
            assert self._keys[row] == key, "a node's key is not where it is found"
            if key[0] != _NO_PARENT:
                assert self._ids.get(self._key(key[0] & _ROW)) == key[0], "a node without a parent"
                needs[key[0] & _ROW] += 1
            for blocks in self.blocks:
                needs[row] += int(blocks[row] != NO_BLOCK)
        rows = {node & _ROW for node in self._ids.values()}
        assert rows.isdisjoint(self._free_rows), "a row is both used and free"
        assert len(rows) + len(self._free_rows) == len(self._keys), "a row is lost"
        for row in rows:
            assert self._needs[row] >= needs[row], "a node counts too few needs"
            assert self._needs[row] > 0, "a node that nothing needs"

    def num_sequences(self, row: int) -> int:
        """How many sequences end in this node, by what else needs it (for checks)."""
        children = sum(1 for key in self._ids if key[0] & _ROW == row and key[0] != _NO_PARENT)
        held = sum(int(blocks[row] != NO_BLOCK) for blocks in self.blocks)
        return int(self._needs[row]) - children - held

    def _key(self, row: int) -> BlockKey:
        key = self._keys[row]
        assert key is not None, f"row {row} holds no node"
        return key

    def _add_to_family(self, row: int, child: int, tokens: bytes) -> None:
        only = self._child_at[row]
        if only == _NO_CHILD:
            self._child_at[row] = child
        elif only == _MANY:
            insort(self._families[row], tokens)
        else:
            self._families[row] = sorted((self._key(only)[1], tokens))
            self._child_at[row] = _MANY

    def _take_from_family(self, row: int, key: BlockKey) -> None:
        """One of several children is gone."""
        family = self._families[row]
        del family[bisect_left(family, key[1])]
        if len(family) == 1:
            self._child_at[row] = self._ids[key[0], family[0]] & _ROW
            del self._families[row]


def _common_tokens(one: bytes, other: bytes) -> int:
    """How many token ids two strings of them begin with alike."""
    if one[:TOKEN_BYTES] != other[:TOKEN_BYTES]:
        return 0
    length = min(len(one), len(other)) // TOKEN_BYTES * TOKEN_BYTES
    a, b = np.frombuffer(one[:length], np.int32), np.frombuffer(other[:length], np.int32)
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else length // TOKEN_BYTES


def _doubled(array: npt.NDArray[_Number], fill: int) -> npt.NDArray[_Number]:
    return np.concatenate([array, np.full_like(array, fill)])


# -- prefix keys -----------------------------------------------------------------------------------

# What tells prefixes apart besides their token ids: a tenant's salt, an adapter, images.
#
# Each is tagged, so that an adapter's name can never be taken for a salt.


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Content that stands behind placeholder tokens [start, start + num_tokens)."""

    content_id: str  # a hash of the content
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKeys:
    """Sequences share a prefix only if these are equal for it."""

    salt: str = ""  # a tenant's secret: sequences of different salts never see each other's blocks
    lora: str = ""  # the adapter that computes keys and values: name and version
    images: tuple[Image, ...] = ()

    def of_root(self) -> Extra:
        """What holds for every block."""
        tagged = (("salt", self.salt), ("lora", self.lora))
        return tuple(pair for pair in tagged if pair[1])

    def of_blocks(self, block_size: int) -> tuple[Extra, ...]:
        """What holds for single blocks: which images reach into each, and where they begin."""
        extras: dict[int, Extra] = {}
        for image in sorted(self.images, key=lambda image: image.start):
            stop = image.start + image.num_tokens
            for index in range(image.start // block_size, -(-stop // block_size)):
                place = f"{image.content_id}@{image.start - index * block_size}"
                extras[index] = (*extras.get(index, ()), ("image", place))
        return tuple(extras.get(index, ()) for index in range(max(extras, default=-1) + 1))


NO_KEYS = PrefixKeys()
