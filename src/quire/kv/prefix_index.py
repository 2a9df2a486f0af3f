"""The prefix index finds cached blocks by content: (parent node, token ids, extra keys) → blocks.

A node stands for one full block of tokens after all those of its ancestors, and holds at most one
block in each group. It is found by equality of the token ids themselves: no hash is trusted. A
node's id is never used again, so a key with a removed parent matches nothing.

A node lives as long as something refers to it: a block in some group, a child, or a sequence that
ends in it. So it outlives its blocks while it has children: groups with windows or states lose the
early blocks first, and the index still finds what follows them.

Source: SGLang's radix cache compares token ids too; the chained SHA-256 is as vLLM's block hash.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.kv.eviction import Prints
from quire.kv.eviction_queue import Ids

# -- events ----------------------------------------------------------------------------------------

# The prefix index notes each block that it gains or loses, in order, so that a reader can rebuild
# the index elsewhere. The fields are those of vLLM's KV-cache events, one block an event.


# Where a block lies, in vLLM's words: the pool, on any device; a tier in this process's memory;
# any other tier.
Medium: TypeAlias = Literal["GPU", "CPU", "STORAGE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """This block is found from now on: by the index, or in a tier."""

    block_hash: bytes  # chained SHA-256: over the parent's, the extra keys and the token ids
    parent_block_hash: bytes | None  # None for a sequence's first block
    token_ids: tuple[int, ...]
    extra_keys: tuple[tuple[str, str], ...]  # tagged: salt and adapter of the root, images
    root_keys: tuple[tuple[str, str], ...]  # … salt and adapter, in each block's event
    group_idx: int
    medium: Medium = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """This block is no longer found there."""

    block_hash: bytes
    root_keys: tuple[tuple[str, str], ...]
    group_idx: int
    medium: Medium = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """The index has lost all its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIdentity:
    """What tells a full block of tokens from all others, wherever its entries are kept."""

    parent: bytes  # chained SHA-256 of the block before it, or of the root
    chain: bytes  # … its own
    extras: bytes  # extra keys of the root and of its own
    token_ids: npt.NDArray[np.int32]  # i32[block size]
    root_keys: tuple[tuple[str, str], ...] = ()  # those of the root …
    own_keys: tuple[tuple[str, str], ...] = ()  # … and its own, as in events

    def stored(self, group: int, medium: Medium) -> BlockStored:
        """Return the event of a copy in a tier, as the index tells of the block itself."""
        is_first = self.parent == chained_hash(b"", self.root_keys, b"")
        return BlockStored(
            block_hash=self.chain,
            parent_block_hash=None if is_first else self.parent,
            token_ids=tuple(self.token_ids.tolist()),
            extra_keys=(*(self.root_keys if is_first else ()), *self.own_keys),
            root_keys=self.root_keys,
            group_idx=group,
            medium=medium,
        )

    def removed(self, group: int, medium: Medium) -> BlockRemoved:
        """Return the event of the end of that copy."""
        return BlockRemoved(
            block_hash=self.chain, root_keys=self.root_keys, group_idx=group, medium=medium
        )


BlockEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


# -- prefix index ----------------------------------------------------------------------------------


Extra: TypeAlias = tuple[tuple[str, str], ...]  # tagged: ("tenant", …), ("salt", …), ("image", …)
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
    """A forest of nodes. A node's id is its row and, in the upper bits, its serial number."""

    def __init__(self, num_groups: int, block_size: int, *, keep_events: bool = False) -> None:
        self.events: list[BlockEvent] = []  # in order, if kept; the reader clears the list
        self._keep_events = keep_events
        # Nodes (i64[n]) that got a block, in order, since a reader last took the list; None: no
        # reader has asked for them.
        self.filled: list[Ids] | None = None
        self.block_size = block_size  # tokens
        self.block_bytes = TOKEN_BYTES * block_size  # of a full block's token ids
        self._ids: dict[BlockKey, int] = {}
        self._num_created = 0
        # By row.
        self.blocks: list[npt.NDArray[np.int32]] = [
            np.full(_FIRST_ROOM, NO_BLOCK, np.int32) for _ in range(num_groups)
        ]  # of each group
        self.prints: Prints = np.zeros(_FIRST_ROOM, np.uint32)  # of the prefix: a hint, no proof
        self._ref_counts = np.zeros(_FIRST_ROOM, np.int32)  # by children, sequences, blocks
        self._only_child = np.full(_FIRST_ROOM, _NO_CHILD, np.int32)  # its row
        self._keys: list[BlockKey | None] = []
        self._free_rows: list[int] = []
        # Of a few rows.
        self._families: dict[int, list[bytes]] = {}  # token ids of two or more children, sorted
        # Chained hashes of those that were asked for, and the rows of their roots.
        self._hashes: dict[int, tuple[bytes, int]] = {}
        self._view()

    def __len__(self) -> int:
        return len(self._ids)

    # -- finding ---------------------------------------------------------------------------------

    def root(self, extra: Extra = ()) -> int:
        """Return the node before the first token, and count a reference of the caller to it."""
        node = self._child((_NO_PARENT, b"", extra))
        self._refs[node & _ROW] += 1
        return node

    def walk(self, root: int, data: bytes, extras: Sequence[Extra] = ()) -> list[int]:
        """Find the known nodes along whole blocks of token ids (int32 bytes), as far as they go."""
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
        """Find the child that shares most token ids with ``data``: (its id, how many), or None."""
        row = node & _ROW
        only = self._child_at[row]
        if only == _NO_CHILD:
            return None
        children = self._families[row] if only == _MANY else [self._key(only)[1]]
        at = bisect_left(children, data)
        # Among sorted strings, the neighbours share most.
        near = [(_common_tokens(data, other), other) for other in children[max(at - 1, 0) : at + 1]]
        num_tokens, tokens = max(near)
        return (self._ids[node, tokens], num_tokens) if num_tokens else None

    def is_bare(self, node: int) -> bool:
        """Tell whether the node has no child that begins with token ids alone."""
        return self._child_at[node & _ROW] == _NO_CHILD

    def rows(self, nodes: Iterable[int]) -> Ids:
        """Return the rows of nodes: i64[len(nodes)]."""
        return np.fromiter(nodes, np.int64) & _ROW

    def row(self, node: int) -> int:
        """Return a node's row."""
        return node & _ROW

    def node(self, row: int) -> int:
        """Return the node in a row."""
        return self._ids[self._key(row)]

    def tokens(self, row: int) -> bytes:
        """Return a node's token ids, as int32 bytes."""
        return self._key(row)[1]

    def extra(self, row: int) -> Extra:
        """Return a node's extra keys."""
        key = self._key(row)
        return key[2] if len(key) == 3 else ()

    def parent(self, node: int) -> int:
        """Return the id of a node's parent."""
        return self._key(node & _ROW)[0]

    def path(self, row: int) -> list[int]:
        """List the rows from the first block down to this one, without the root's."""
        return list(self.upwards(row))[::-1]

    def upwards(self, row: int) -> Iterator[int]:
        """Yield this row and those of its ancestors, up to the first block's."""
        parent = self._key(row)[0]
        while parent != _NO_PARENT:
            yield row
            row = parent & _ROW
            parent = self._key(row)[0]

    def places(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return how many blocks come before each of these rows' and the rows above them.

        Rows of one path cost least with the deepest first.
        """
        depths: dict[int, int] = {}
        parents = {row: self._key(row)[0] & _ROW for row in rows}
        for row in reversed(rows):
            path = []
            while row not in depths:
                parent = self._key(row)[0]
                if parent == _NO_PARENT:
                    depths[row] = -1  # the root
                    break
                path.append(row)
                row = parent & _ROW
            for depth, below in enumerate(reversed(path), depths[row] + 1):
                depths[below] = depth
        return [depths[row] for row in rows], [parents[row] for row in rows]

    # -- growing ---------------------------------------------------------------------------------

    def advance(self, tail: int, tokens: bytes, extra: Extra = ()) -> tuple[int, bool]:
        """Follow a sequence from ``tail`` to its next block. Returns: the node, is it new."""
        key: BlockKey = (tail, tokens, extra) if extra else (tail, tokens)
        node = self._ids.get(key)
        if node is not None:
            self._refs[node & _ROW] += 1
            self._refs[tail & _ROW] -= 1  # it has this child, so it stays
            return node, False
        node = self._child(key)
        # The tail loses the sequence and gains the child.
        self._refs[node & _ROW] = 1
        if not extra:
            self._add_to_family(tail & _ROW, node & _ROW, tokens)
        return node, True

    def descend(self, tail: int, data: bytes) -> tuple[list[int], int]:
        """Advance along whole blocks of token ids. Returns: the nodes, how many were known.

        What follows a new node is new too, so ``_chain`` makes the rest at once.
        """
        size = self.block_bytes
        if (tail, data[:size]) not in self._ids:  # as mostly with a single block
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
            return self._chain(tail, pieces), 0
        nodes = self.walk(tail, data)
        num_known = len(nodes)
        if num_known:
            self._refs[nodes[-1] & _ROW] += 1
            self._refs[tail & _ROW] -= 1
            tail = nodes[-1]
        if num_known * size < len(data):
            pieces = [data[at : at + size] for at in range(num_known * size, len(data), size)]
            nodes += self._chain(tail, pieces)
        return nodes, num_known

    def _chain(self, tail: int, pieces: list[bytes]) -> list[int]:
        """Make nodes, each the only child of the one before it; a sequence ends in the last."""
        while len(self._keys) + len(pieces) > len(self.prints):
            self._double()
        keys, ids, free_rows = self._keys, self._ids, self._free_rows
        prints, refs, children = self._print, self._refs, self._child_at
        nodes: list[int] = []
        above, above_row, serial = prints[tail & _ROW], _NO_CHILD, self._num_created
        parent = tail
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
            refs[row] = 1
            above_row = row
            nodes.append(parent)
        self._num_created = serial
        self._add_to_family(tail & _ROW, nodes[0] & _ROW, pieces[0])
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
        self._refs = memoryview(self._ref_counts)  # type: ignore[arg-type]
        self._child_at = memoryview(self._only_child)  # type: ignore[arg-type]

    def _double(self) -> None:
        self.blocks = [_doubled(blocks, NO_BLOCK) for blocks in self.blocks]
        self.prints = _doubled(self.prints, 0)
        self._ref_counts = _doubled(self._ref_counts, 0)
        self._only_child = _doubled(self._only_child, _NO_CHILD)
        self._view()

    def incref(self, node: int) -> None:
        """Count one more sequence that ends in this node."""
        self._refs[node & _ROW] += 1

    def attach(self, group: int, rows: Ids, blocks: Ids) -> None:
        """Give nodes that hold no block in the group one each: rows i64[n], blocks i64[n]."""
        self.blocks[group][rows] = blocks
        self._ref_counts[rows] += 1
        if self.filled is not None:
            self.filled.append(self._nodes_of(rows))
        if self._keep_events:
            self.events += [self._stored(group, row) for row in rows.tolist()]

    # -- shrinking -------------------------------------------------------------------------------

    def detach(self, group: int, rows: Ids) -> None:
        """Take their block in the group from these nodes: rows i64[n]."""
        self.blocks[group][rows] = NO_BLOCK
        if self._keep_events:
            self.events += [self._removed(group, row) for row in rows.tolist()]
        left = self._ref_counts[rows] - 1
        self._ref_counts[rows] = left
        for row in rows[left == 0].tolist():
            self._remove(row)

    def decref(self, node: int) -> None:
        """Count one sequence less that ends in this node; without references it goes."""
        row = node & _ROW
        self._refs[row] -= 1
        if not self._refs[row]:
            self._remove(row)

    def _remove(self, row: int) -> None:
        """Remove a node without references, and each ancestor that then has none."""
        keys, ids, free_rows = self._keys, self._ids, self._free_rows
        refs, children = self._refs, self._child_at
        while not refs[row]:
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
            refs[row] -= 1

    def note_cleared(self) -> None:
        """Note for the readers of events that all blocks were detached at once."""
        if self._keep_events:
            self.events.append(AllBlocksCleared())

    # -- for the outside -------------------------------------------------------------------------

    def block_hash(self, row: int) -> bytes:
        """Return the chained SHA-256 over all token ids and extra keys up to this node.

        Events and outside stores name blocks by it. Each node's is computed once.
        """
        return self._hashed(row)[0]

    def _hashed(self, row: int) -> tuple[bytes, int]:
        """Return the chained hash of a row, and its root's row."""
        missing = []
        while row not in self._hashes:
            missing.append(row)
            parent = self._key(row)[0]
            if parent == _NO_PARENT:
                break
            row = parent & _ROW
        digest, root = self._hashes.get(row, (b"", row))
        for row in reversed(missing):
            digest = chained_hash(digest, self.extra(row), self.tokens(row))
            self._hashes[row] = digest, root
        return digest, root

    def identity(self, node: int) -> BlockIdentity | None:
        """Return what names a node's block outside, or None if the node is gone."""
        row = node & _ROW
        if not self.is_there(node):
            return None
        chain, root = self._hashed(row)
        return BlockIdentity(
            parent=self.block_hash(self._key(row)[0] & _ROW),
            chain=chain,
            extras=_spelled(self.extra(root), self.extra(row)),
            token_ids=np.frombuffer(self.tokens(row), np.int32),
            root_keys=self.extra(root),
            own_keys=self.extra(row),
        )

    def is_there(self, node: int) -> bool:
        """Tell whether a node has not been removed."""
        row = node & _ROW
        key = self._keys[row] if row < len(self._keys) else None
        return key is not None and self._ids[key] == node

    def has_block(self, node: int) -> bool:
        """Tell whether a node is there and has a block in some group."""
        row = node & _ROW
        return self.is_there(node) and any(own[row] != NO_BLOCK for own in self.blocks)

    def following(
        self, node: int, root: int, data: bytes, extras: Sequence[Extra]
    ) -> list[BlockIdentity]:
        """Name the blocks behind a node, known or not: token ids ``data``, and each one's extras.

        ``data``: int32 bytes, whole blocks. Nothing changes.
        """
        above, found = self.block_hash(node & _ROW), list[BlockIdentity]()
        of_root = self.extra(root & _ROW)
        for at, start in enumerate(range(0, len(data), self.block_bytes)):
            tokens = data[start : start + self.block_bytes]
            extra = extras[at] if at < len(extras) else ()
            chain = chained_hash(above, extra, tokens)
            found.append(
                BlockIdentity(
                    parent=above,
                    chain=chain,
                    extras=_spelled(of_root, extra),
                    token_ids=np.frombuffer(tokens, np.int32),
                    root_keys=of_root,
                    own_keys=extra,
                )
            )
            above = chain
        return found

    def _nodes_of(self, rows: Ids) -> Ids:
        """Return the nodes i64[n] in these rows i64[n]."""
        return np.array([self.node(row) for row in rows.tolist()], np.int64)

    def _stored(self, group: int, row: int) -> BlockStored:
        parent = self.row(self._key(row)[0])
        digest, root = self._hashed(row)
        of_root = self.extra(root)
        first = parent == root
        return BlockStored(
            block_hash=digest,
            parent_block_hash=None if first else self.block_hash(parent),
            token_ids=tuple(np.frombuffer(self.tokens(row), np.int32).tolist()),
            extra_keys=(*(of_root if first else ()), *self.extra(row)),
            root_keys=of_root,
            group_idx=group,
        )

    def _removed(self, group: int, row: int) -> BlockRemoved:
        digest, root = self._hashed(row)
        return BlockRemoved(block_hash=digest, root_keys=self.extra(root), group_idx=group)

    def check(self) -> None:
        """Raise AssertionError if keys, rows or reference counts contradict each other."""
        refs = [0] * len(self._keys)
        for key, node in self._ids.items():
            row = node & _ROW
            assert self._keys[row] == key, "a node's key is not where it is found"
            if key[0] != _NO_PARENT:
                assert self._ids.get(self._key(key[0] & _ROW)) == key[0], "a node without a parent"
                refs[key[0] & _ROW] += 1
            for blocks in self.blocks:
                refs[row] += int(blocks[row] != NO_BLOCK)
        rows = {node & _ROW for node in self._ids.values()}
        assert rows.isdisjoint(self._free_rows), "a row is both used and free"
        assert len(rows) + len(self._free_rows) == len(self._keys), "a row is lost"
        for row in rows:
            assert self._ref_counts[row] >= refs[row], "a node counts too few references"
            assert self._ref_counts[row] > 0, "a node that nothing refers to"

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
        """Take one of several children out."""
        family = self._families[row]
        del family[bisect_left(family, key[1])]
        if len(family) == 1:
            self._child_at[row] = self._ids[key[0], family[0]] & _ROW
            del self._families[row]


def chained_hash(above: bytes, extra: Extra, tokens: bytes) -> bytes:
    """Hash a block's content (int32 bytes) behind the digest of all before it: chained SHA-256.

    A chain begins with ``chained_hash(b"", extra keys of the root, b"")``.
    """
    state = sha256(above)
    if extra:
        state.update(repr(extra).encode())
    state.update(tokens)
    return state.digest()


def _spelled(of_root: Extra, extra: Extra) -> bytes:
    return repr((of_root, extra)).encode() if of_root or extra else b""


def _common_tokens(one: bytes, other: bytes) -> int:
    """Count the token ids with which both strings begin."""
    if one[:TOKEN_BYTES] != other[:TOKEN_BYTES]:
        return 0
    length = min(len(one), len(other)) // TOKEN_BYTES * TOKEN_BYTES
    a, b = np.frombuffer(one[:length], np.int32), np.frombuffer(other[:length], np.int32)
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else length // TOKEN_BYTES


def _doubled(array: npt.NDArray[_Number], fill: int) -> npt.NDArray[_Number]:
    return np.concatenate([array, np.full_like(array, fill)])


# -- prefix keys -----------------------------------------------------------------------------------

# Besides token ids, a tenant, a salt, an adapter and images tell prefixes apart. Each is tagged, so
# that an adapter never equals a salt.

SECRETS = frozenset(("tenant", "salt"))  # tags of keys that are told to no one
_IS_CONTENT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The content behind placeholder tokens [start, start + num_tokens)."""

    content_id: str  # a hash of the content
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKeys:
    """Sequences share a prefix only if these are equal for it."""

    tenant: str = ""  # made from a caller's key: tenants never see each other's blocks
    salt: str = ""  # a caller's own secret, which divides what it has once more
    lora: str = ""  # what the adapter that computes keys and values has in it: 64 hex digits
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an adapter's name, which another adapter may bear tomorrow. Raises: RequestError.

        Blocks outlive the process in which a name had its meaning.
        """
        if self.lora and not _IS_CONTENT.fullmatch(self.lora):
            raise RequestError(
                f"lora={self.lora[:80]!r} must be 64 hex digits, a hash of the adapter's weights "
                f"and options (quire.models.model_content.adapter_content), and not its name"
            )

    def of_root(self) -> Extra:
        """Return the keys that hold for every block."""
        tagged = (("tenant", self.tenant), ("salt", self.salt), ("lora", self.lora))
        return tuple(pair for pair in tagged if pair[1])

    def of_blocks(self, block_size: int) -> tuple[Extra, ...]:
        """Return the keys of single blocks: the images in each, and where they begin."""
        extras: dict[int, Extra] = {}
        for image in sorted(self.images, key=lambda image: image.start):
            stop = image.start + image.num_tokens
            for index in range(image.start // block_size, -(-stop // block_size)):
                place = f"{image.content_id}@{image.start - index * block_size}"
                extras[index] = (*extras.get(index, ()), ("image", place))
        return tuple(extras.get(index, ()) for index in range(max(extras, default=-1) + 1))


NO_KEYS = PrefixKeys()
