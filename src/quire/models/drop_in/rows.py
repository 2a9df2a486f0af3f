"""The rows of one batch, kept by any strategy: what a Transformers cache needs, not its protocol.

All rows are equally long and change together, as ``generate`` demands. Where blocks are shared, a
beam that continues another one shares its blocks. Where they are not, nothing is moved either: the
*beam table* says for each row and token whose range holds it, and only the table is permuted.

A batch is copied as its rows are: batches that are copies of one another lie in one *family*, under
one ceiling, and share blocks until they write them.

Keys and values are kept here. The states of recurrent layers are in ``row_states``, under the same
ceiling: they are few, as long as the batch, and taken off before tokens get any.

Source: beam table as in OpenVINO's indirect KV cache.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import TypeAlias
from weakref import ReferenceType, WeakSet, finalize, ref

import torch
from torch import Tensor

from quire.attention import AttentionBackend, AttentionBatch, make_batch
from quire.errors import MemoryUnavailable, OutOfKVMemory, RequestTooLong
from quire.kv import (
    Accounting,
    CacheConfig,
    Fits,
    Never,
    NotNow,
    Storage,
    Usage,
    build_accounting,
    build_storage,
)
from quire.kv.layout import attention_groups, attention_spec
from quire.kv.page_tables import usage_with_tables
from quire.memory import CountedMemory, MemoryProvider
from quire.models.drop_in.in_place import KVPlace
from quire.models.drop_in.row_states import RowStates, Sources, equally_spaced, state_row_bytes
from quire.spec import AttentionSpec, Group, LatentAttention, ModelSpec
from quire.units import format_bytes, format_count

ChooseBackend: TypeAlias = Callable[[Iterable[AttentionSpec]], AttentionBackend | None]


class CacheFamily:
    """Where batches lie that are copies of one another: an accounting, its storage, one ceiling.

    Each copy may be used in a thread of its own: ``lock`` is held while one of them is changed.
    """

    def __init__(
        self,
        strategy: str,
        spec: ModelSpec,
        config: CacheConfig,
        provider: MemoryProvider,
        num_rows: int,
        choose: ChooseBackend | None = None,
    ) -> None:
        """``num_rows``: of the first batch; ``choose``: what reads and writes where they lie.

        Without ``choose``, or with None from it, torch does. Raises: OutOfKVMemory.
        """
        self.lock = RLock()
        self.memory = CountedMemory(provider)
        self.spec_groups: tuple[Group, ...] = spec.groups
        self.max_rows = config.max_num_seqs
        self.batches: WeakSet[BatchRows] = WeakSet()
        self.check_room_for(num_rows)
        self._ceiling_bytes = config.capacity_bytes
        self._state_bytes = state_row_bytes(spec.groups, self.memory.page_bytes)  # of a row
        if self._state_bytes:
            left = self._left_for_tokens(num_rows)
            config = replace(config, capacity_bytes=left, max_capacity_bytes=config.capacity_bytes)
        if config.shares_pages:  # while rows become copies of others, old and new have windows
            config = replace(config, max_num_seqs=2 * config.max_num_seqs)
        self.accounting: Accounting = build_accounting(strategy, spec.attention_alone, config)
        specs = {
            layer: attention_spec(group)
            for group in attention_groups(self.accounting.groups)
            for layer in group.layers
        }
        self.backend = None if choose is None or not specs else choose(specs.values())
        make_writer = None if self.backend is None else self.backend.make_writer
        self.storage: Storage = build_storage(strategy, self.accounting, self.memory, make_writer)
        # A latent in this cache has been expanded, or is expanded before it is read.
        self.read_in_place = {
            layer: spec for layer, spec in specs.items() if not isinstance(spec, LatentAttention)
        }
        self.group_of = {
            layer: index
            for index, group in enumerate(attention_groups(self.accounting.groups))
            for layer in group.layers
        }
        self.abandoned: deque[list[int]] = deque()  # of batches that ended without a word
        self._next_id = 0
        self._is_broken = False

    @property
    def can_be_joined(self) -> bool:
        """Whether a batch that ended here may begin again here, beside its copies."""
        return bool(self.batches) and not self._is_broken

    def num_rows(self, but: "BatchRows | None" = None) -> int:
        """Count the rows of all batches, or of all but one."""
        return sum(len(batch) for batch in self.batches if batch is not but)

    def new_ids(self, count: int) -> list[int]:
        """Return sequence ids that no row had before."""
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def usage(self) -> Usage:
        """Count the bytes of all batches together."""
        with self.lock:
            self.free_abandoned()
            usage = usage_with_tables(self.accounting, self.memory.page_bytes)
            for batch in self.batches:
                usage = batch.states_added_to(usage)
            return usage

    def apply(self) -> None:
        """Carry out what accounting has noted.

        Raises: MemoryUnavailable, and from then on to every copy.
        """
        if self._is_broken:
            raise MemoryUnavailable(
                "the system has refused pages to a copy of this cache, and their storage is half "
                "made: reset() each of them"
            )
        try:
            self.storage.apply(self.accounting.drain())
        except MemoryUnavailable:
            self._is_broken = True
            raise

    def free_abandoned(self) -> None:
        """Give back what batches held that nothing refers to any longer."""
        while self.abandoned:
            for seq_id in self.abandoned.popleft():
                self.accounting.free(seq_id)
            self.apply()

    def leave(self, batch: "BatchRows", seq_ids: list[int]) -> None:
        """End a batch. The last one gives the storage back too."""
        with self.lock:
            self.batches.discard(batch)
            if not self.batches:
                self.storage.close()
            if not self.batches or self._is_broken:
                return
            self.free_abandoned()
            for seq_id in seq_ids:
                self.accounting.free(seq_id)
            self.apply()
            self.leave_for_states(self.num_rows())

    def check_room_for(self, num_rows: int) -> None:
        """Check the room for rows. Raises: OutOfKVMemory if all batches would have too many."""
        if num_rows > self.max_rows:
            raise OutOfKVMemory(
                f"{num_rows} rows asked, {self.max_rows} at most: raise max_num_seqs"
            )

    def _left_for_tokens(self, num_rows: int) -> int:
        """Bytes of the ceiling that so many rows' states leave. Raises: OutOfKVMemory."""
        states_bytes = num_rows * self._state_bytes
        if states_bytes > self._ceiling_bytes:
            raise OutOfKVMemory(
                f"the recurrent states of {num_rows} rows take {format_bytes(states_bytes)}, and "
                f"{format_bytes(self._ceiling_bytes)} can ever be had: raise "
                f"kv_cache_memory_bytes, or lower the number of rows"
            )
        return self._ceiling_bytes - states_bytes

    def leave_for_states(self, num_rows: int) -> None:
        """Give tokens what the states of so many rows leave.

        Raises: OutOfKVMemory if they hold more than that, and nothing has changed.
        """
        if not self._state_bytes:
            return
        before, left = self.accounting.ceiling.capacity_bytes, self._left_for_tokens(num_rows)
        now = self.accounting.resize(left)
        if now > left:
            self.accounting.resize(before)
        self.apply()
        if now > left:
            raise OutOfKVMemory(
                f"the recurrent states of {num_rows} rows leave {format_bytes(left)} for keys and "
                f"values, which take {format_bytes(now)}: raise kv_cache_memory_bytes, or lower "
                f"the number of rows"
            )


class BatchRows:
    """A batch of sequences of one length, in one cache."""

    def __init__(self, family: CacheFamily, num_rows: int) -> None:
        """Raises: OutOfKVMemory."""
        self.num_tokens = 0
        self._family = family
        self._accounting, self._storage = family.accounting, family.storage
        with family.lock:
            family.free_abandoned()
            family.check_room_for(family.num_rows() + num_rows)
            if family.batches:
                family.leave_for_states(family.num_rows() + num_rows)
            self._states = RowStates(family.memory, family.spec_groups, num_rows, family.max_rows)
            self._group_of = family.group_of
            self._sources = Sources(self._accounting, self._storage)
            self._ids = family.new_ids(num_rows)
            for seq_id in self._ids:
                self._accounting.add(seq_id)
            family.batches.add(self)
        # A copy may be dropped without ``close``. It may be dropped at any moment, within a change
        # of the family too: here its ids are only noted.
        self._dropped = finalize(self, family.abandoned.append, self._ids)
        # i64[rows, tokens]: the row whose range holds a token. None: each row holds its own.
        self._beam_table: Tensor | None = None
        self._slots: dict[tuple[int, int, int], Tensor] = {}  # of this step, by group and tokens
        self._batches: dict[tuple[int, int, int], AttentionBatch] = {}  # likewise
        self._alike: dict[tuple[object, ...], AttentionBatch] = {}  # by where their blocks lie
        self._places: list[ReferenceType[KVPlace]] = []  # of this step, given away

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def memory(self) -> CountedMemory:
        return self._family.memory

    @property
    def family(self) -> CacheFamily:
        return self._family

    def usage(self) -> Usage:
        """Count the bytes of this batch and its copies."""
        return self._family.usage()

    def states_added_to(self, usage: Usage) -> Usage:
        """Add the states of recurrent layers to the usage of keys and values."""
        return self._states.added_to(usage)

    def copy(self) -> "BatchRows":
        """Make a batch that goes on from here by itself. Shared blocks are not copied yet.

        Raises: OutOfKVMemory, and nothing has changed; MemoryUnavailable.
        """
        with self._family.lock:
            twin = BatchRows(self._family, len(self._ids))
            try:
                twin._take_over(self)
            except OutOfKVMemory:
                twin.close()
                raise
            return twin

    def _take_over(self, other: "BatchRows") -> None:
        """Become what another batch is, having nothing yet."""
        for seq_id in self._ids:
            self._accounting.free(seq_id)
        forked: list[int] = []
        for source, seq_id in zip(other._ids, self._ids, strict=True):
            verdict = self._accounting.fork(source, seq_id)
            if not isinstance(verdict, Fits):
                for missing in self._ids[len(forked) :]:
                    self._accounting.add(missing)
                raise self._error(verdict, other.num_tokens)
            forked.append(seq_id)
        self._family.apply()
        self._states.take_over(other._states)
        self._sources.take_over(other._sources)
        self._beam_table = other._beam_table
        self.num_tokens = other.num_tokens

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return a recurrent layer's states as its spec lists them: [rows, *shape], a view each.

        Raises: MemoryUnavailable, and then only ``close`` is left.
        """
        return self._states.layer(layer)

    def extend(self, num_tokens: int) -> None:
        """Make room up to ``num_tokens`` in every row, or in none.

        Raises: RequestTooLong, OutOfKVMemory; MemoryUnavailable, and then only ``close`` is left.
        """
        self._end_step()
        with self._family.lock:
            self._family.free_abandoned()
            for index, seq_id in enumerate(self._ids):
                verdict = self._accounting.try_extend(seq_id, num_tokens)
                if not isinstance(verdict, Fits):
                    for extended in self._ids[:index]:
                        self._accounting.trim(extended, self.num_tokens)
                    self._family.apply()
                    raise self._error(verdict, num_tokens)
            self._family.apply()
        if self._beam_table is not None:
            own = torch.arange(len(self._ids))[:, None].expand(-1, num_tokens - self.num_tokens)
            self._beam_table = torch.cat([self._beam_table, own], 1)
        self.num_tokens = num_tokens

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Put in the entries of tokens [start, start + T): k [rows, K, T, D], v likewise."""
        stop = start + k.shape[2]
        if self._family.backend is None:
            with self._family.lock:
                slots = self._own_slots(self._group_of[layer], start, stop).flatten()
        else:
            slots = self._batch(self._group_of[layer], start, stop).slots
        self._storage.write(
            layer, slots, k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)
        )

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return entries of tokens [start, stop): k [rows, K, n, D], v [rows, K, n, Dv].

        A view where the rows lie at equal distances, else a copy.
        """
        group = self._group_of[layer]
        with self._family.lock:
            rows = self._equally_spaced(group) if self._beam_table is None else None
            if rows is not None:
                view = self._storage.view(layer)
                return view.k[rows, :, start:stop], view.v[rows, :, start:stop]
            slots = self._own_slots(group, start, stop)
        if self._beam_table is not None:
            owners = self._beam_table[:, start:stop]
            slots = slots.gather(0, owners)
        k, v = self._storage.gather(layer, slots)
        return k.transpose(0, 1), v.transpose(0, 1)

    def read_in_place(
        self, layer: int, start: int, begin: int, stop: int
    ) -> tuple[Tensor, Tensor] | None:
        """Return k, v [rows, K, n, D] that attention reads where they lie; None if it cannot.

        The queries to come are those of tokens [begin, stop).
        """
        spec, backend = self._family.read_in_place.get(layer), self._family.backend
        if backend is None or self._beam_table is not None or spec is None:
            return None
        view = self._storage.view(layer)
        gather = partial(self.read, layer, start, stop)
        batch = self._batch(self._group_of[layer], begin, stop)
        place = KVPlace(backend, view, spec, batch, start, gather)
        self._places.append(ref(place))
        return place.tensors(view.k.dtype)

    def write_source(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put in what an encoder made of each row's source: k [rows, K, S, D], v likewise.

        After the first tokens have room, and before it is read.
        """
        with self._family.lock:
            self._sources.write(layer, self._ids, k, v)

    def read_source(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a source's k, v [rows, K, n, D]: a view of equally spaced rows, else a copy."""
        owners = None if self._beam_table is None else self._beam_table[:, 0]
        with self._family.lock:
            return self._sources.read(layer, self._ids, owners)

    def reorder(self, source_rows: Tensor) -> None:
        """Make row i a copy of row ``source_rows[i]``, i64[rows].

        No key or value is moved. States are: the next token overwrites each of them.
        """
        rows = source_rows.tolist()
        if rows == list(range(len(self._ids))):
            return
        self._end_step()
        self._states.select(rows)
        if self._accounting.shares_blocks:
            self._become(rows)
            return
        if self._beam_table is None:
            own = torch.arange(len(self._ids))[:, None]
            self._beam_table = own.expand(-1, self.num_tokens)
        self._beam_table = self._beam_table[source_rows]

    def select(self, source_rows: list[int]) -> None:
        """Keep copies of some rows, in that order; there may be more or fewer than before."""
        self._end_step()
        with self._family.lock:
            self._family.free_abandoned()
            before, others = len(self._ids), self._family.num_rows(but=self)
            self._family.check_room_for(others + len(source_rows))
            if len(source_rows) > before:
                self._family.leave_for_states(others + len(source_rows))
            try:
                self._select_tokens(source_rows)
            except OutOfKVMemory:
                self._family.leave_for_states(others + len(self._ids))
                raise
            self._states.select(source_rows)
            if len(source_rows) < before:
                self._family.leave_for_states(others + len(source_rows))

    def _select_tokens(self, source_rows: list[int]) -> None:
        if self._beam_table is None:
            self._become(source_rows)
            return
        layers = {layer: self.read(layer, 0, self.num_tokens) for layer in self._group_of}
        copies = {layer: (k[source_rows], v[source_rows]) for layer, (k, v) in layers.items()}
        sources = {layer: self.read_source(layer) for layer in self._sources.layers}
        chosen = {layer: (k[source_rows], v[source_rows]) for layer, (k, v) in sources.items()}
        num_tokens = self.num_tokens
        self.clear(len(source_rows))
        self.extend(num_tokens)
        for layer, (k, v) in copies.items():
            self.write(layer, 0, k, v)
        for layer, (k, v) in chosen.items():
            self.write_source(layer, k, v)

    def trim(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens of every row."""
        self._end_step()
        with self._family.lock:
            for seq_id in self._ids:
                self._accounting.trim(seq_id, num_tokens)
            self._family.apply()
        if self._beam_table is not None:
            self._beam_table = self._beam_table[:, :num_tokens]
        self.num_tokens = num_tokens

    def clear(self, num_rows: int) -> None:
        """Begin again with rows that have no tokens; every page of theirs is given back."""
        self._end_step()
        with self._family.lock:
            for seq_id in self._ids:
                self._accounting.free(seq_id)
            self._ids[:] = self._family.new_ids(num_rows)
            for seq_id in self._ids:
                self._accounting.add(seq_id)
            self._family.apply()
        self._beam_table = None
        self.num_tokens = 0

    def close(self) -> None:
        """Give back what no copy holds."""
        self._end_step()
        if self._dropped.detach() is not None:
            self._states.close()
            self._family.leave(self, self._ids)

    def _become(self, source_rows: list[int]) -> None:
        """Replace the rows by forks of rows; the first fork of each takes its memory over."""
        old_ids = list(self._ids)
        new_ids: list[int] = []
        taken: set[int] = set()
        with self._family.lock:
            for row in source_rows:
                if row in taken:
                    (seq_id,) = self._family.new_ids(1)
                    verdict = self._accounting.fork(old_ids[row], seq_id)
                    if not isinstance(verdict, Fits):
                        for fork in set(new_ids) - set(old_ids):
                            self._accounting.free(fork)
                        self._family.apply()
                        raise self._error(verdict, self.num_tokens)
                    new_ids.append(seq_id)
                else:
                    taken.add(row)
                    new_ids.append(old_ids[row])
            for row, seq_id in enumerate(old_ids):
                if row not in taken:
                    self._accounting.free(seq_id)
            self._family.apply()
            self._ids[:] = new_ids

    def _error(self, verdict: NotNow | Never, num_tokens: int) -> Exception:
        if isinstance(verdict, Never):
            return RequestTooLong(
                f"{format_count(num_tokens)} tokens need {format_bytes(verdict.need_bytes)} of KV "
                f"memory, {format_bytes(verdict.capacity_bytes)} can ever be had: at most "
                f"{format_count(verdict.fitting_tokens)} tokens fit; raise {verdict.option}"
            )
        if verdict.option != "kv_cache_memory_bytes":
            return OutOfKVMemory(
                f"{len(self._ids)} rows of {format_count(num_tokens)} tokens: {verdict}"
            )
        return OutOfKVMemory(
            f"{len(self._ids)} rows of {format_count(num_tokens)} tokens: "
            f"{format_bytes(verdict.need_bytes)} more KV memory is needed, "
            f"{format_bytes(verdict.free_bytes)} is free; raise kv_cache_memory_bytes, or lower "
            f"max_model_len or the number of rows"
        )

        self._end_step()

    def _end_step(self) -> None:
        """Tokens are about to move: what was given away, and is still held, is gathered now."""
        for place in self._places:
            if (held := place()) is not None:
                held.read()
        self._places.clear()
        self._slots.clear()
        self._batches.clear()
        self._alike.clear()

    def _batch(self, group: int, begin: int, stop: int) -> AttentionBatch:
        """A group's queries of tokens [begin, stop), found once a step."""
        key = (group, begin, stop)
        if key not in self._batches:
            with self._family.lock:
                # Slots follow from tables. Groups of which each is one layer lie alike, most often:
                # what a backend works out for one of them serves the others.
                tables = (self._accounting.table(group, i).tobytes() for i in self._ids)
                layout = (begin, stop, self._accounting.block_size(group), *tables)
                if layout not in self._alike:
                    chunks = [(seq_id, begin, stop) for seq_id in self._ids]
                    self._alike[layout] = make_batch(self._accounting, group, chunks)
            self._batches[key] = self._alike[layout]
        return self._batches[key]

    def _own_slots(self, group: int, start: int, stop: int) -> Tensor:
        """Each row's own slots (i64[rows, n]) for tokens [start, stop), found once a step."""
        key = (group, start, stop)
        if key not in self._slots:
            rows = [
                torch.from_numpy(self._accounting.slots(group, seq_id, start, stop))
                for seq_id in self._ids
            ]
            self._slots[key] = torch.stack(rows)
        return self._slots[key]

    def _equally_spaced(self, group: int) -> slice | None:
        """The rows' ranges as a slice of a layer's view, if they lie at equal distances."""
        if self._accounting.block_size(group) < self.num_tokens:
            return None
        return equally_spaced([int(self._accounting.table(group, i)[0]) for i in self._ids])
