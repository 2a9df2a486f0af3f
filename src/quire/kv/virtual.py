"""Page in hardware: the longest possible range is address space only, and pages follow the tokens.

Each sequence has one fixed range of addresses, so an unmodified kernel reads it as if it had been
reserved whole; the processor's page table does what a block table does elsewhere. Pages behind a
window are given back while the sequence runs. (uzu calls this a sparse buffer.)

Nothing is shared between sequences here: a fork copies. The form that shares is ``virtual_shared``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.kv.allocation import (
    FITS,
    AllocationResult,
    Fits,
    Never,
    NotNow,
    peak_bytes,
    verdict_on_length,
)
from quire.kv.block_steps import check_window
from quire.kv.interface import AS_IT_IS, CacheConfig, Counts, Extension
from quire.kv.layout import page_tokens, slot_bytes
from quire.kv.occupancy import HeldRange
from quire.kv.ranges import RangeAccounting
from quire.kv.storage_ops import Commit, Copy, Release
from quire.spec import FullAttention, Group, KeptWhole, LatentAttention
from quire.units import align_down, align_up


@dataclass(slots=True)
class _Row:
    """A sequence's range of addresses, by number, and the part of it that has pages."""

    row: int
    num_tokens: int = 0
    backed: list[range] = field(default_factory=list)  # a group: tokens with pages, page-aligned


class VirtualAccounting(RangeAccounting[_Row]):
    """``max_num_seqs`` ranges of ``max_model_len`` slots; bytes are counted in pages.

    A state is a range of one slot.
    """

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        super().__init__(groups, config)
        together = config.layers_per_page
        self._page_tokens = [page_tokens(group, config.page_bytes, together) for group in groups]
        self._slot_bytes = [slot_bytes(group, config.page_bytes, together) for group in groups]
        self._is_state = [isinstance(group.spec, KeptWhole) for group in groups]
        longest = config.max_model_len
        self._row_slots = [self.page_slots(group, longest) for group in range(len(groups))]
        sizes = [n * size for n, size in zip(self._page_tokens, self._slot_bytes, strict=True)]
        self._peaks = peak_bytes(groups, self._page_tokens, sizes, longest)
        self._nothing = [range(0)] * len(groups)
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._committed_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._committed_bytes

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        return self._peaks[num_tokens]

    def page_tokens(self, group: int) -> int:
        return self._page_tokens[group]

    def slot_bytes(self, group: int) -> int:
        return self._slot_bytes[group]

    def row_slots(self, group: int) -> int:
        return self._row_slots[group]

    def begin(self, max_tokens: int | None) -> _Row:
        # A sequence without pages needs no row yet, and there may be more of them than rows.
        return _Row(row=-1, backed=self._nothing)

    def could_hold(self, num_tokens: int, *, max_tokens: int | None = None) -> Fits | Never:
        return verdict_on_length(num_tokens, self._peaks, self.ceiling.capacity_bytes)

    def try_extend(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        held = self.sequences[seq_id]
        if num_tokens <= held.num_tokens:
            return FITS
        if num_tokens > self.config.max_model_len:
            return self.never(num_tokens)
        room = min(num_tokens + extension.lookahead_tokens, self.config.max_model_len)
        promised_tokens, kept_bytes = extension.promised_tokens, extension.kept_bytes
        if not (promised_tokens or kept_bytes) and self._is_backed(held, room):
            held.num_tokens = num_tokens
            return FITS
        backed = self._backed_for(held, held.num_tokens + extension.external_tokens, room)
        if self._grown_bytes(self._nothing, backed) > self.ceiling.capacity_bytes:
            return self.never(num_tokens)
        if promised_tokens > room:
            promised = int(self._peaks[min(promised_tokens, self.config.max_model_len)])
            kept_bytes += max(0, promised - self._grown_bytes(self._nothing, backed))
        return self._take(held, backed, num_tokens, kept_bytes)

    def fork(self, seq_id: int, new_id: int) -> AllocationResult:
        source, num_tokens = self.sequences[seq_id], self.sequences[seq_id].num_tokens
        self.add(new_id)
        target = self.sequences[new_id]
        backed = [
            range(old.start, min(old.stop, align_up(num_tokens, step)))
            for old, step in zip(source.backed, self._page_tokens, strict=True)
        ]
        verdict = self._take(target, backed, num_tokens)
        if verdict is not FITS:
            del self.sequences[new_id]
            return verdict
        for group, pages in enumerate(backed):
            stop = min(num_tokens, self.row_slots(group))
            if pages.start < stop:
                start = self._first_slot(group, source) + pages.start
                goal = self._first_slot(group, target) + pages.start
                self.changes.append(Copy(group, start, goal, stop - pages.start))
        return verdict

    def steady_tokens(self, seq_id: int) -> int:
        forgets = any(not isinstance(g.spec, FullAttention | LatentAttention) for g in self.groups)
        return self.num_tokens(seq_id) if forgets else self.config.max_model_len

    def trim(self, seq_id: int, num_tokens: int) -> None:
        # The pages stay: a trimmed sequence is about to write there again.
        held = self.sequences[seq_id]
        num_tokens = min(held.num_tokens, num_tokens)
        for group, backed in zip(self.groups, held.backed, strict=True):
            check_window(group, backed.start, num_tokens)
        held.num_tokens = num_tokens

    def free(self, seq_id: int, *, forget: bool = False) -> None:
        held = self.sequences.pop(seq_id)
        if held.row >= 0:
            self._set_backed(held, self._nothing)
            self._free_rows.append(held.row)

    def first_slot(self, group: int, seq_id: int) -> int:
        held = self.sequences[seq_id]
        return self._first_slot(group, held) if held.row >= 0 else -1

    def backed(self, group: int) -> Iterator[HeldRange]:
        for seq_id, held in self.sequences.items():
            if held.backed[group]:
                first = self._first_slot(group, held)
                yield HeldRange(seq_id, first, held.backed[group], held.num_tokens)

    def check(self) -> None:
        rows = [held.row for held in self.sequences.values() if held.row >= 0]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), (
            "a row is lost or held twice"
        )
        total = 0
        for held in self.sequences.values():
            assert held.row >= 0 or not any(held.backed), "pages without a row"
            for group, backed in enumerate(held.backed):
                total += len(backed) * self._slot_bytes[group]
                if self._is_state[group]:
                    assert bool(backed) == (held.row >= 0), "a state without a page"
                    continue
                live = self.groups[group].live_range(held.num_tokens)
                assert not live or (backed.start <= live.start and live.stop <= backed.stop), (
                    "a token that can be read has no page"
                )
        assert total == self._committed_bytes, "committed bytes differ from the pages of the rows"
        assert total <= self.ceiling.now_bytes, "above the ceiling"

    def _take(
        self, held: _Row, backed: list[range], num_tokens: int, kept_bytes: int = 0
    ) -> AllocationResult:
        """Give a sequence exactly these pages, and a row if it has none, or refuse."""
        need = self._grown_bytes(held.backed, backed)
        needs_row = held.row < 0 and any(backed)
        free_bytes = self.ceiling.now_bytes - self._committed_bytes
        if need > free_bytes - kept_bytes or (needs_row and not self._free_rows):
            return NotNow(
                need_bytes=need,
                free_bytes=free_bytes,
                kept_bytes=kept_bytes,
                holders=tuple(i for i, other in self.sequences.items() if other.row >= 0),
            )
        if needs_row:
            held.row = self._free_rows.pop()
        self._set_backed(held, backed)
        held.num_tokens = num_tokens
        return FITS

    def _backed_for(self, held: _Row, begin: int, num_tokens: int) -> list[range]:
        """Pages from the first token that the *first* new token reads, to the last new token.

        So a step never frees what its own tokens read, and undoing the step never misses a token.
        """
        ranges: list[range] = []
        for group, backed, state in zip(self.groups, held.backed, self._is_state, strict=True):
            step = self._page_tokens[len(ranges)]
            if state:
                ranges.append(range(min(1, num_tokens)))
                continue
            live = group.live_range(begin)
            first = max(backed.start, align_down(live.start, step))
            ranges.append(range(first, max(backed.stop, align_up(num_tokens, step))))
        return ranges

    def _is_backed(self, held: _Row, num_tokens: int) -> bool:
        """Whether a step up to there changes no page, as most steps of decoding."""
        each = zip(self.groups, held.backed, self._page_tokens, self._is_state, strict=True)
        for group, backed, step, state in each:
            if state and backed:
                continue
            if num_tokens > backed.stop:
                return False
            if align_down(group.live_start(held.num_tokens), step) > backed.start:
                return False
        return True

    def bytes_for(self, num_tokens: int) -> int:
        sizes = enumerate(self._slot_bytes)
        return sum(self.page_slots(group, num_tokens) * size for group, size in sizes)

    def _grown_bytes(self, before: list[range], after: list[range]) -> int:
        """Bytes by which the committed total grows when ``before`` becomes ``after``."""
        sizes = zip(before, after, self._slot_bytes, strict=True)
        return sum((len(new) - len(old)) * size for old, new, size in sizes)

    def _set_backed(self, held: _Row, after: list[range]) -> None:
        self._committed_bytes += self._grown_bytes(held.backed, after)
        pairs = list(enumerate(zip(held.backed, after, strict=True)))
        # Releases first, so that the total never rises above what was asked for.
        for group, (old, new) in pairs:
            gone = range(old.start, min(new.start, old.stop)) if new else old
            self._note(Release, group, held, gone)
        for group, (old, new) in pairs:
            self._note(Commit, group, held, range(max(old.stop, new.start), new.stop))
        held.backed = after

    def _note(
        self, change: type[Commit] | type[Release], group: int, held: _Row, tokens: range
    ) -> None:
        if tokens:
            first = self._first_slot(group, held)
            self.changes.append(change(group, first + tokens.start, first + tokens.stop))

    def _first_slot(self, group: int, held: _Row) -> int:
        return held.row * self.row_slots(group)
