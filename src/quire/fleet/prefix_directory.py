"""``PrefixDirectory``: which replica has which prefix, as their KV-cache events tell.

A block is known by a 64-bit hash of its whole prefix, which this module makes from token ids with
a secret of its own, many blocks in a few array operations. A chain begins with the name that events
give its first block: the name covers what tells chains apart besides tokens (an adapter, and a
tenant or a salt under the fleet's key), so it need not be known here. Two prefixes with one hash
would make a choice worse and no answer wrong, and who does not know the secret cannot find two.

For each block there is one bit a replica, in each group of layers and medium. So one pass over a
prompt's blocks answers for all replicas at once. Storage that several replicas reach has a bit of
its own: what one of them tells of it counts for all.

What a replica tells is believed of itself and of its storage alone, and only so much of it is kept.
Methods may be called from several threads.
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from struct import Struct, pack
from struct import error as StructError
from typing import Any, Final, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from quire.engine.event_format import (
    ClearedBlocks,
    ExtraKeys,
    RemovedBlocks,
    StoredBlocks,
    WireEvent,
    block_name,
)
from quire.errors import ConfigError
from quire.fleet.key_table import NOT_THERE, Keys, KeyTable, Numbers, as_keys
from quire.kv import PrefixKeys, TokenIds
from quire.kv.prefix_index import SECRETS, Extra, Medium, chained_hash
from quire.spec import Group, KeptWhole

MEDIA: Final[tuple[Medium, ...]] = get_args(Medium)  # the nearest first
MAX_REPLICAS: Final = 64  # a bit of a word each, as each store that some of them share
DEFAULT_MAX_BLOCKS: Final = 2**21

PromptTokens: TypeAlias = Sequence[int] | TokenIds  # an array (i32[n]) spares its conversion
Column: TypeAlias = tuple[int, Medium]  # a group of layers, and where a block of it lies
Rows: TypeAlias = slice | Numbers  # that follow each other, or any

_POOL: Final[Medium] = "GPU"
_STORE: Final[Medium] = "STORAGE"  # what several replicas may reach
_ALL, _NONE = np.uint64(2**64 - 1), np.uint64(0)
_FIRST_ROWS: Final = 64
_GROWTH: Final = 1.25
_COMPARED, _COMPARED_MORE = 256, 8  # blocks of a prompt at first, and times as many then
_LEAST_RUN, _SHORT_RUNS = 16, 4  # rows that follow each other; so many runs may be shorter
_LOOKED_UP, _LOOKED_UP_MORE = 256, 8  # blocks of a prompt at first, and times as many then
_HASHED: Final = 1024  # blocks at once, which stay in a processor's cache
_HALF, _REST, _WORD = np.uint64(32), np.uint64(29), 2**64 - 1
_KEPT_FRACTION: Final = 7 / 8  # of a replica's limit, once it is passed


@dataclass(slots=True)
class _Holder:
    """A replica or a store: its bit, and the rows of its blocks, by their names in events."""

    bit: np.uint64
    place: int = field(init=False)  # of the bit
    names: KeyTable = field(default_factory=lambda: KeyTable(has_stamps=True))
    store: "_Holder | None" = None  # of a replica: what has its blocks in storage
    sharers: np.uint64 = _NONE  # of a store: the bits of replicas that reach it

    def __post_init__(self) -> None:
        self.place = int(self.bit).bit_length() - 1


@dataclass(frozen=True, slots=True)
class _Chain:
    """Blocks of one event, checked: each follows the one before it."""

    names: Keys  # u64[n]
    parent: int | None  # the name of the block before the first one
    tokens: bytes  # int32, of all of them
    images: Mapping[int, bytes]  # in those of them that have any
    column: Column


@final
class PrefixDirectory:
    """Blocks of ``block_size`` tokens in ``groups`` of layers, and the replicas that have them.

    ``key``: of names whose chain has a tenant or a salt, the replicas' own; None: such prompts are
    not found. ``max_blocks``: names that are kept of one replica, or of a store that several share;
    beyond them the oldest go.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        block_size: int,
        *,
        key: bytes | None = None,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
    ) -> None:
        self.block_size = block_size
        self.num_ignored = 0  # blocks of events that cannot be used: garbled, or without a parent
        self.num_evicted = 0  # blocks of replicas that told of too many
        self._groups, self._key = tuple(groups), key
        # A hit goes only as far as these groups have every block.
        self._read_whole = [
            number
            for number, group in enumerate(self._groups)
            if not isinstance(group.spec, KeptWhole) and not group.live_start(2**40)
        ]
        self._max_blocks = max_blocks
        self._prefix_hash = _PrefixHash(block_size)
        self._lock = threading.Lock()
        self._holders: dict[str, _Holder] = {}
        self._stores: dict[str, _Holder] = {}
        self._asked: tuple[str, ...] | None = None  # the replicas that were asked for last …
        self._places: Numbers = np.zeros(0, np.int64)  # … the places of their bits …
        self._asked_bits = _NONE  # … and these
        self._free_bits = [np.uint64(1 << n) for n in reversed(range(MAX_REPLICAS))]
        self._stamp = 0
        self._rows = KeyTable()  # of prefix hashes
        # By row.
        self._hashes: Keys = np.zeros(_FIRST_ROWS, np.uint64)
        self._depths = np.zeros(_FIRST_ROWS, np.uint32)  # blocks of the prefix
        self._bits: dict[Column, Keys] = {}  # of replicas; columns that events have told of
        self._num_rows = 0  # that were ever used
        self._free_rows = np.zeros(_FIRST_ROWS, np.int32)  # a stack …
        self._num_free = 0  # … and its height

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return self._num_rows - self._num_free

    @property
    def num_bytes(self) -> int:
        columns = sum(bits.nbytes for bits in self._bits.values())
        rows = self._hashes.nbytes + self._depths.nbytes + self._free_rows.nbytes
        holders = (*self._holders.values(), *self._stores.values())
        tables = (self._rows, *(each.names for each in holders))
        return columns + rows + sum(each.num_bytes for each in tables)

    def num_blocks(self, replica: str) -> int:
        """Return how many blocks a replica has."""
        holder = self._holders.get(replica)
        return len(holder.names) if holder else 0

    # -- asking ----------------------------------------------------------------------------------

    def hashes(self, token_ids: PromptTokens, keys: PrefixKeys) -> Keys:
        """Return the prefix hash of each whole block of a prompt: u64[n].

        Without the key, a prompt that has a tenant or a salt has none.
        """
        of_root = keys.of_root()
        num_blocks = len(token_ids) // self.block_size
        is_secret = any(tag in SECRETS for tag, _ in of_root)
        if not num_blocks or (is_secret and self._key is None):
            return np.zeros(0, np.uint64)
        tokens = _as_int32(token_ids, num_blocks * self.block_size)
        extras = keys.of_blocks(self.block_size)[:num_blocks] if keys.images else ()
        first = chained_hash(
            chained_hash(b"", of_root, b""),
            extras[0] if extras else (),
            tokens[: self.block_size].tobytes(),
        )
        terms = self._prefix_hash.terms_of_prompt(tokens, _images_of(extras))
        name = block_name(first, of_root, self._key or b"")
        terms[0] = self._prefix_hash.beginning(name)
        return as_keys(np.add.accumulate(terms, out=terms))

    def find(self, hashes: Keys, replicas: Sequence[str]) -> dict[str, dict[Medium, int]]:
        """Return what ``count`` finds, by replica. Those that have nothing are left out."""
        found: dict[str, dict[Medium, int]] = {}
        for medium, counts in self.count(hashes, replicas).items():
            for name, num in zip(replicas, counts.tolist(), strict=True):
                if num:
                    found.setdefault(name, {})[medium] = num
        return found

    def count(self, hashes: Keys, replicas: Sequence[str]) -> dict[Medium, Numbers]:
        """Count how many of a prompt's blocks each replica can use, by where they lie: i64[n] each.

        ``hashes``: u64, as ``hashes`` makes them; ``replicas``: n different ones.
        """
        several = tuple(replicas)
        with self._lock:
            if several != self._asked:
                places = [self._holder(name).place for name in several]
                self._places = np.array(places, np.int64)
                self._asked_bits = np.uint64(sum(1 << place for place in places))
                self._asked = several
            media, hit = self._look_up(hashes, self._asked_bits)
            at = self._places
        if len(media) == 1 and self._read_whole:  # each block of a hit is there
            return {medium: _counted(hit)[at] for medium in media}
        # Each block of a hit counts where it is nearest.
        counts: dict[Medium, Numbers] = {}
        for medium, there in media.items():
            counts[medium] = _counted(there & hit)[at]
            hit = hit & ~there
        return counts

    def _look_up(self, hashes: Keys, asked: np.uint64) -> tuple[dict[Medium, Keys], Keys]:
        """Return bits of replicas for each block: is it in a medium (u64[n] each), in the hit."""
        # Where a group is read as a whole, no hit goes on behind a block that is nowhere.
        parts = self._beginning(hashes) if self._read_whole else [self._rows.find(hashes)]
        num_blocks = sum(map(_num_rows, parts))
        if not num_blocks:
            return {}, np.zeros(0, np.uint64)
        there = {column: self._of_rows(parts, column) for column in self._bits}
        # By number of blocks from 1 on: has a replica all that is read behind so many?
        fits = np.full(num_blocks, asked)
        for number, group in enumerate(self._groups):
            either = _either(there, number, num_blocks)
            if number in self._read_whole:
                fits &= np.bitwise_and.accumulate(either)
            else:
                fits &= _all_between(either, _first_read(group, self.block_size, num_blocks))
        if len(self._read_whole) < len(self._groups):
            fits = np.bitwise_or.accumulate(fits[::-1])[::-1]
        told = self._read_whole[0] if self._read_whole else 0
        return {m: there[told, m] for m in MEDIA if (told, m) in there}, fits

    def _beginning(self, hashes: Keys) -> list[Rows]:
        """Return the rows of a prompt's first blocks (hashes: u64[n]), up to one that is nowhere.

        Blocks that were stored together lie in rows one after the other: so one is looked up, and
        those behind it are compared. What was stored in small pieces is looked up as a whole.
        """
        parts: list[Rows] = []
        first, count = 0, len(hashes)
        while first < count:
            if first < _LEAST_RUN * (len(parts) - _SHORT_RUNS):
                parts.append(self._looked_up(hashes[first:]))
                break
            row = self._rows.find_one(int(hashes[first]))
            if row == NOT_THERE:
                break
            num = self._num_alike(row, hashes, first)
            parts.append(slice(row, row + num))
            first += num
        return parts

    def _num_alike(self, row: int, hashes: Keys, first: int) -> int:
        """Return how many blocks (u64[n]) from ``first`` on lie in this row and those behind it."""
        num, most = 0, _COMPARED
        while True:
            wanted = hashes[first + num : first + most]
            behind = self._hashes[row + num : row + num + len(wanted)]
            if not len(behind):
                return num
            others = behind != wanted[: len(behind)]
            place = int(others.argmax())  # of the first one, if there is any
            if others[place]:
                return num + place
            num += len(behind)
            if num < most:  # all rows, or all blocks, were compared
                return num
            most *= _COMPARED_MORE

    def _looked_up(self, hashes: Keys) -> Numbers:
        """Return the rows of blocks (u64[n]), up to one that is nowhere, each looked up."""
        parts: list[Numbers] = []
        first, count = 0, _LOOKED_UP
        while first < len(hashes):
            rows = self._rows.find(hashes[first : first + count])
            missing = rows == NOT_THERE
            if missing.any():
                parts.append(rows[: int(missing.argmax())])
                break
            parts.append(rows)
            first, count = first + count, _LOOKED_UP_MORE * count
        return np.concatenate(parts)

    def _of_rows(self, parts: Sequence[Rows], column: Column) -> Keys:
        """Return the bits of rows, n in all of these parts, in a column: u64[n]."""
        bits = self._bits[column]
        there = np.concatenate([bits[rows] for rows in parts])  # a copy
        if not self._read_whole:
            there[parts[0] == NOT_THERE] = _NONE
        if column[1] == _STORE:
            for store in self._stores.values():
                there[(there & store.bit) != 0] |= store.sharers
        return there

    # -- being told ------------------------------------------------------------------------------

    def add(self, replica: str, store: str | None = None) -> None:
        """Make room for a replica, unless it has some.

        ``store``: what its blocks in storage lie in, if other replicas may have the same; it is
        kept when they have gone. Raises: ConfigError for one replica or store too many.
        """
        with self._lock:
            holder = self._holder(replica)
            if store is None or holder.store is not None:
                return
            if store not in self._stores:
                self._stores[store] = _Holder(self._take_bit(f"store {store!r}"))
            holder.store = self._stores[store]
            holder.store.sharers |= holder.bit

    def apply(self, replica: str, events: Iterable[WireEvent]) -> None:
        """Take a replica's events, in the order in which it sent them.

        What cannot be used is counted in ``num_ignored``. Raises: ConfigError for one replica more
        than ``MAX_REPLICAS``.
        """
        with self._lock:
            holder = self._holder(replica)
            for kind, run in groupby(events, type):
                if kind is StoredBlocks:
                    self._store(holder, run)  # type: ignore[arg-type]
                elif kind is RemovedBlocks:
                    self._remove(holder, run)  # type: ignore[arg-type]
                elif kind is ClearedBlocks:
                    self._take_away(holder, *holder.names.items(), _in_pool)

    def clear(self, replica: str) -> None:
        """Forget all that a replica has told of itself."""
        with self._lock:
            if (holder := self._holders.get(replica)) is not None:
                self._take_away(holder, *holder.names.items(), _everywhere)

    def forget(self, replica: str) -> None:
        """Forget all that a replica has told of itself, and the replica."""
        with self._lock:
            if (holder := self._holders.pop(replica, None)) is not None:
                self._asked = None
                self._take_away(holder, *holder.names.items(), _everywhere)
                self._free_bits.append(holder.bit)
                if holder.store is not None:
                    holder.store.sharers &= ~holder.bit

    def _holder(self, replica: str) -> _Holder:
        holder = self._holders.get(replica)
        if holder is None:
            bit = self._take_bit(f"replica {replica!r}")
            holder = self._holders[replica] = _Holder(bit)
        return holder

    def _take_bit(self, what: str) -> np.uint64:
        """Return a bit that is free, or that of a store that is no replica's. Raises: ConfigError
        for ``what`` if there is none.
        """
        if not self._free_bits:
            unused = next((name for name, own in self._stores.items() if not own.sharers), None)
            if unused is None:
                raise ConfigError(
                    f"{what} is one too many: placement by prefixes knows {MAX_REPLICAS} replicas "
                    "and shared stores at most; use least-loaded for more"
                )
            store = self._stores.pop(unused)
            self._take_away(store, *store.names.items(), _everywhere)
            self._free_bits.append(store.bit)
        return self._free_bits.pop()

    def _store(self, holder: _Holder, events: Iterable[StoredBlocks]) -> None:
        """Store blocks, as many events at once as do not follow each other."""
        self._stamp += 1
        together: list[_Chain] = []
        names = set[int]()
        for event in events:
            blocks = self._checked(event)
            if blocks is None:
                self.num_ignored += len(event.block_hashes)
                continue
            if blocks.parent in names or len(names) > self._max_blocks:
                self._enter_all(holder, together)
                together, names = [], set()
            together.append(blocks)
            names.update(event.block_hashes)  # type: ignore[arg-type]
        self._enter_all(holder, together)
        for own in filter(None, (holder, holder.store)):
            if len(own.names) > self._max_blocks:
                oldest = own.names.oldest(len(own.names) - int(_KEPT_FRACTION * self._max_blocks))
                self.num_evicted += len(oldest)
                self._take_away(own, oldest, own.names.find(oldest), _everywhere)

    def _checked(self, event: StoredBlocks) -> _Chain | None:
        """Return the blocks of an event, or None if it makes no sense here."""
        column = self._column(event.group_idx, event.medium)
        names, parent = _as_names(event.block_hashes), event.parent_block_hash
        extras = event.extra_keys or ()
        if (
            column is None
            or names is None
            or not (parent is None or _as_names([parent]) is not None)
            or event.block_size != self.block_size
            or len(event.token_ids) != len(names) * self.block_size
            or len(extras) not in (0, len(names))
        ):
            return None
        try:
            tokens = pack(f"{len(event.token_ids)}i", *event.token_ids)
        except StructError:  # what is no int32 is no token
            return None
        return _Chain(names, parent, tokens, _images_told(extras), column)  # type: ignore[arg-type]

    def _column(self, group: int | None, medium: str | None) -> Column | None:
        """Return where an event's blocks lie; None for a place that there is not."""
        group = group or 0
        if 0 <= group < len(self._groups):
            for known in MEDIA:
                if known == (medium or _POOL):
                    return group, known
        return None

    def _enter_all(self, holder: _Holder, chains: list[_Chain]) -> None:
        """Give a replica and its store their blocks of chains whose parents one of them has."""
        store = holder.store
        if store is None:
            self._enter(holder, chains, None)
            return
        for is_stored, run in groupby(chains, lambda each: each.column[1] == _STORE):
            owner, other = (store, holder) if is_stored else (holder, store)
            self._enter(owner, list(run), other)

    def _enter(self, holder: _Holder, chains: list[_Chain], other: _Holder | None) -> None:
        """Give a holder the blocks of chains whose parents it has, or the other one."""
        parents = _names_or_zero([each.parent for each in chains])
        above = holder.names.find(parents)
        if other is not None:
            above = np.where(above < 0, other.names.find(parents), above)
        orphans = [
            number
            for number, (each, row) in enumerate(zip(chains, above.tolist(), strict=True))
            if row < 0 and each.parent is not None
        ]
        for number in reversed(orphans):
            self.num_ignored += len(chains.pop(number).names)
        if not chains:
            return
        above = np.delete(above, orphans)
        hashes, depths = self._hashed(chains, above)
        names = np.concatenate([each.names for each in chains])
        kept = self._name(holder, names, hashes, depths)
        rows = holder.names.find(names)
        columns = np.repeat(np.arange(len(chains)), [len(each.names) for each in chains])
        for column in {each.column for each in chains}:
            of_column = np.array([each.column == column for each in chains])
            bits = self._bits.get(column)
            if bits is None:
                bits = self._bits[column] = np.zeros(len(self._hashes), np.uint64)
            bits[rows[kept & of_column[columns]]] |= holder.bit

    def _hashed(self, chains: Sequence[_Chain], above: Numbers) -> tuple[Keys, Keys]:
        """Return the prefix hashes of all blocks, and how many blocks each prefix has: u64[n]."""
        counts = np.array([len(each.names) for each in chains])
        starts = np.cumsum(counts) - counts
        begins = np.array([each.parent is None for each in chains])
        depth_above = np.where(begins, 0, self._depths[above]).astype(np.uint64)
        base = np.where(begins, _NONE, self._hashes[above])
        behind = np.arange(counts.sum()) - np.repeat(
            starts, counts
        )  # blocks of its event before it
        depths = np.repeat(depth_above, counts) + behind.astype(np.uint64)
        images = {
            int(start) + place: text
            for start, each in zip(starts, chains, strict=True)
            for place, text in each.images.items()
        }
        tokens = np.frombuffer(b"".join(each.tokens for each in chains), np.int32)
        terms = self._prefix_hash.terms(tokens, depths, images)
        names = np.array([each.names[0] for each in chains], np.uint64)[begins]
        terms[starts[begins]] = self._prefix_hash.beginnings(names)
        sums = np.cumsum(terms, dtype=np.uint64)
        base = base - (sums[starts] - terms[starts])
        return as_keys(sums + np.repeat(base, counts)), depths + np.uint64(1)

    def _name(
        self, holder: _Holder, names: Keys, hashes: Keys, depths: Keys
    ) -> npt.NDArray[np.bool_]:
        """Give names of a replica's blocks (u64[n]) a row each. Returns: which of them have theirs.

        A name stands for the block that it was last told with, and a block has one name: what
        tells otherwise is left out.
        """
        unique, first, place = np.unique(names[::-1], return_index=True, return_inverse=True)
        last = len(names) - 1 - first
        told = hashes[last]
        _, once = np.unique(told, return_index=True)
        is_fit = np.zeros(len(unique), bool)
        is_fit[once] = True
        known = holder.names.find(unique)
        is_known = known >= 0
        moved = is_known & (self._hashes[known] != told)
        if moved.any():
            self._take_away(holder, unique[moved], known[moved], _everywhere)
            is_known &= ~moved
        rows = self._rows.find(told)
        is_fit &= is_known | ~((rows >= 0) & self._has_any(holder, rows))
        missing = np.flatnonzero(is_fit & (rows < 0))
        missing = missing[np.argsort(last[missing])]  # a chain's blocks get rows in its order
        rows[missing] = self._make_rows(told[missing], depths[last][missing])
        new = is_fit & ~is_known
        holder.names.insert(unique[new], rows[new], self._stamp)
        holder.names.stamp(unique[is_known], self._stamp)
        self.num_ignored += len(unique) - int(is_fit.sum())
        place = place[::-1]
        has_its_own: npt.NDArray[np.bool_] = is_fit[place] & (hashes == told[place])
        return has_its_own

    def _remove(self, holder: _Holder, events: Iterable[RemovedBlocks]) -> None:
        by_column: dict[Column, list[Keys]] = {}
        for event in events:
            column = self._column(event.group_idx, event.medium)
            names = _as_names(event.block_hashes)
            if column is None or names is None:
                self.num_ignored += len(event.block_hashes)
            else:
                by_column.setdefault(column, []).append(names)
        for column, several in by_column.items():
            names = np.unique(np.concatenate(several))
            owner = holder.store if holder.store and column[1] == _STORE else holder
            rows = owner.names.find(names)
            there = rows >= 0
            self._take_away(owner, names[there], rows[there], column.__eq__)

    def _take_away(
        self, holder: _Holder, names: Keys, rows: Numbers, where: Callable[[Column], bool]
    ) -> None:
        """Take a replica's blocks from some columns, and forget what is nowhere then.

        ``names`` (u64[n]): distinct ones that the replica has; ``rows`` (i64[n]): theirs.
        """
        left = np.zeros(len(rows), np.uint64)
        for column, bits in self._bits.items():
            if where(column):
                bits[rows] &= ~holder.bit
            left |= bits[rows]
        holder.names.remove(names[(left & holder.bit) == 0])
        # In order, so that blocks which lay together leave rows which lie together.
        free = np.sort(rows[left == 0])
        self._rows.remove(self._hashes[free])
        self._hashes[free] = _NONE  # no block is found there
        self._free_rows[self._num_free : self._num_free + len(free)] = free
        self._num_free += len(free)

    # -- rows ------------------------------------------------------------------------------------

    def _has_any(self, holder: _Holder, rows: Numbers) -> npt.NDArray[np.bool_]:
        """Tell of each row (i64[n]) whether a replica has a block in it, anywhere."""
        bits = np.zeros(len(rows), np.uint64)
        for column in self._bits.values():
            bits |= column[rows]
        has_any: npt.NDArray[np.bool_] = (bits & holder.bit) != 0
        return has_any

    def _make_rows(self, hashes: Keys, depths: Keys) -> Numbers:
        """Make a row for each of these distinct hashes (u64[n]). Returns: i64[n]."""
        again = min(len(hashes), self._num_free)
        self._num_free -= again
        num_rows = self._num_rows + len(hashes) - again
        rows = np.concatenate(
            [
                self._free_rows[self._num_free : self._num_free + again].astype(np.int64),
                np.arange(self._num_rows, num_rows),
            ]
        )
        if num_rows > len(self._hashes):
            length = max(num_rows, int(_GROWTH * len(self._hashes)))
            self._hashes, self._depths = (
                _longer(self._hashes, length),
                _longer(self._depths, length),
            )
            self._bits = {column: _longer(bits, length) for column, bits in self._bits.items()}
            self._free_rows = _longer(self._free_rows, length)
        self._num_rows = num_rows
        self._hashes[rows], self._depths[rows] = hashes, depths
        self._rows.insert(hashes, rows)
        return rows

    def check(self) -> None:
        """Raise AssertionError if tables, rows and bits contradict each other."""
        self._rows.check()
        free = self._free_rows[: self._num_free]
        assert len(np.unique(free)) == len(free), "a row is free twice"
        used = np.setdiff1d(np.arange(self._num_rows), free)
        hashes, rows = self._rows.items()
        assert (np.sort(rows) == used).all(), "a row is lost, or both used and free"
        assert (self._hashes[rows] == hashes).all(), "a row has another's hash"
        everyone = np.zeros(len(self._hashes), np.uint64)
        for bits in self._bits.values():
            everyone |= bits
        assert (everyone[used] != 0).all(), "a row that no replica has"
        assert np.count_nonzero(everyone) == len(used), "a replica has a free row"
        for store in self._stores.values():
            sharers = [int(own.bit) for own in self._holders.values() if own.store is store]
            assert int(store.sharers) == sum(sharers), "a store is shared by others"
        for holder in (*self._holders.values(), *self._stores.values()):
            holder.names.check()
            _, rows = holder.names.items()
            own = np.flatnonzero(everyone & holder.bit)
            assert (np.sort(rows) == own).all(), "a replica's names are not its rows"
            assert len(rows) <= self._max_blocks, "a replica has too many blocks"


# -- prefix hashes ---------------------------------------------------------------------------------


@final
class _PrefixHash:
    """Hashes prefixes: the sum over their blocks of a hash of block and depth, modulo 2⁶⁴."""

    def __init__(self, block_size: int) -> None:
        """``block_size``: tokens of a block."""
        self._block_size = block_size
        self._secret = secrets.token_bytes(32)
        count = -(-block_size // 2)  # of a block's words: two tokens each
        drawn = np.frombuffer(secrets.token_bytes(8 * count), np.uint64)
        # As many times as blocks are hashed at once: one long row is multiplied sooner than many
        # short ones.
        self._factors = np.tile(drawn | np.uint64(1), (_HASHED, 1))
        self._ones = np.ones(count, np.uint64)
        self._more = np.uint64(secrets.randbits(64) | 1)
        self._step = np.uint64(secrets.randbits(64) | 1)
        self._steps: Keys = np.zeros(0, np.uint64)  # of depths from 0 on

    def terms(self, tokens: TokenIds, depths: Keys, images: Mapping[int, bytes]) -> Keys:
        """Return what each block adds to a prefix: u64[n].

        ``tokens`` (i32): of all blocks; ``depths`` (u64[n]): blocks before each; ``images``: what
        is in some of them besides tokens, by their numbers.
        """
        return self._terms(tokens, depths * self._step, images)

    def terms_of_prompt(self, tokens: TokenIds, images: Mapping[int, bytes]) -> Keys:
        """Return what each block of a prompt adds (u64[n]), as ``terms`` of depths from 0 on."""
        num_blocks = len(tokens) // self._block_size
        if num_blocks > len(self._steps):
            self._steps = np.arange(2 * num_blocks, dtype=np.uint64) * self._step
        return self._terms(tokens, self._steps[:num_blocks], images)

    def _terms(self, tokens: TokenIds, steps: Keys, images: Mapping[int, bytes]) -> Keys:
        words = tokens.reshape(len(steps), self._block_size)
        if self._block_size % 2:
            words = np.pad(words, ((0, 0), (0, 1)))
        pairs = words.view(np.uint64)
        digests: Keys = np.empty(len(steps), np.uint64)
        for begin in range(0, len(steps), _HASHED):
            some = pairs[begin : begin + _HASHED]
            products = some * self._factors[: len(some)]
            products ^= products >> _HALF
            np.matmul(products, self._ones, out=digests[begin : begin + _HASHED])
        for number, text in images.items():
            keyed = blake2b(text, key=self._secret, digest_size=8).digest()
            digests[number] ^= np.uint64(int.from_bytes(keyed, "little"))
        digests += steps
        return _mixed(digests, self._more)

    def beginnings(self, names: Keys) -> Keys:
        """Return the hashes of chains' first blocks (u64[n]) from their names in events."""
        return _mixed(names * self._step, self._more)

    def beginning(self, name: int) -> int:
        """Return what ``beginnings`` does, of one, sooner."""
        number = name * int(self._step) & _WORD
        number ^= number >> int(_HALF)
        number = number * int(self._more) & _WORD
        return number ^ number >> int(_REST)


def _mixed(numbers: Keys, factor: np.uint64) -> Keys:
    """Let upper bits change lower ones, and these upper ones again; in place."""
    numbers ^= numbers >> _HALF
    numbers *= factor
    numbers ^= numbers >> _REST
    return numbers


# -- bits of replicas ------------------------------------------------------------------------------


def _either(there: Mapping[Column, Keys], group: int, num_blocks: int) -> Keys:
    """Return bits (u64[num_blocks]) of the replicas that have a block of a group in any medium."""
    several = [bits for (number, _), bits in there.items() if number == group]
    if len(several) == 1:
        return several[0]
    either = np.zeros(num_blocks, np.uint64)
    for bits in several:
        either |= bits
    return either


def _first_read(group: Group, block_size: int, num_blocks: int) -> Numbers:
    """Return the first block that is read behind n blocks, for n from 1 on: i64[num_blocks]."""
    ends = np.arange(1, num_blocks + 1)
    if isinstance(group.spec, KeptWhole):
        return ends - 1
    return group.live_start(ends * block_size) // block_size


def _all_between(there: Keys, first: Numbers) -> Keys:
    """Return bits of the replicas that have blocks first[n] … n, for each n: u64[len(there)].

    Source: a sparse table; a span is covered by two of a power of two blocks, which may overlap.
    """
    lengths = np.arange(1, len(there) + 1) - first
    levels = np.frexp(np.maximum(lengths, 1))[1] - 1
    found, spans = np.full(len(there), _ALL), there
    ends = np.arange(len(there))
    for level in range(int(levels.max(initial=0)) + 1):
        at = np.flatnonzero((levels == level) & (lengths > 0))
        found[at] = spans[first[at]] & spans[ends[at] - 2**level + 1]
        longer = spans.copy()
        longer[: len(there) - 2**level] &= spans[2**level :]
        spans = longer
    return found


def _counted(bits: Keys) -> Numbers:
    """Count for each of ``MAX_REPLICAS`` the blocks (u64[n], n ≥ 1) with its bit."""
    ends = (bits[1:] != bits[:-1]).nonzero()[0].tolist()  # of runs of equal ones
    ends.append(len(bits) - 1)
    lengths = [end - before for before, end in zip([-1, *ends], ends, strict=False)]
    runs = bits[ends].astype("<u8", copy=False).view(np.uint8)
    each = np.unpackbits(runs, bitorder="little").reshape(len(ends), MAX_REPLICAS)
    counts: Numbers = np.array(lengths, np.int64) @ each.astype(np.int64)
    return counts


def _num_rows(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _everywhere(column: Column) -> bool:
    return True


def _in_pool(column: Column) -> bool:
    return column[1] == _POOL


# -- from events and prompts -----------------------------------------------------------------------


def _as_int32(token_ids: PromptTokens, count: int) -> TokenIds:
    """Return the first ``count`` token ids in one piece: i32[count]."""
    if isinstance(token_ids, np.ndarray):
        return np.ascontiguousarray(token_ids[:count], np.int32)
    # A tuple is passed on as it is where it is all that is passed, and "I" reads an int sooner than
    # "i". A token id below 0 is only a simulated prompt's that is like no other.
    try:
        packed = Struct(f"{len(token_ids)}I").pack(*token_ids)
    except StructError:
        packed = Struct(f"{len(token_ids)}i").pack(*token_ids)
    return np.frombuffer(packed, np.int32, count)


def _as_names(given: Sequence[bytes | int]) -> Keys | None:
    """Return blocks' names as keys (u64[n]); None if there are none, or others than 64 bits."""
    try:
        return as_keys(np.array(given, np.uint64)) if len(given) else None
    except (OverflowError, TypeError, ValueError):
        return None


def _names_or_zero(given: Sequence[int | None]) -> Keys:
    return as_keys(np.array([each or 0 for each in given], np.uint64))


def _images_of(extras: Sequence[Extra]) -> dict[int, bytes]:
    """Spell the images in a prompt's blocks, of those that have any."""
    return {
        number: _spelled(value for _, value in extra)
        for number, extra in enumerate(extras)
        if extra
    }


def _images_told(extras: Sequence[ExtraKeys]) -> dict[int, bytes]:
    """Spell the images in an event's blocks, which are (id, place) pairs among other keys."""
    found = {}
    for number, extra in enumerate(extras):
        pairs = [each for each in extra or () if isinstance(each, list | tuple) and len(each) == 2]
        if pairs:
            found[number] = _spelled(f"{content}@{place}" for content, place in pairs)
    return found


def _spelled(images: Iterable[str]) -> bytes:
    return "\n".join(images).encode()


def _longer(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Copy an array into one of another length, with zeros behind."""
    longer = np.zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer
