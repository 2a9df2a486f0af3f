"""Page in hardware: the longest possible range is address space only, and pages follow the tokens.

Each sequence has one fixed range of addresses, so an unmodified kernel reads it as if it had been
reserved whole; the processor's page table does what a block table does elsewhere. Pages behind a
window are given back while the sequence runs. (uzu calls this a sparse buffer.)

Nothing is shared between sequences here: a fork copies. The form that shares is ``virtual_shared``.
"""

from quire.kv.allocation import (
    FITS,
    AllocationResult,
    Fits,
    Never,
    peak_bytes,
    verdict_on_length,
)
from quire.kv.block_steps import check_window
from quire.kv.interface import AS_IT_IS, CacheConfig, Counts, Extension
from quire.kv.ranges import Row, RowAccounting
from quire.kv.storage_ops import Copy
from quire.spec import FullAttention, Group, KeptWhole, LatentAttention
from quire.units import align_down, align_up


class VirtualAccounting(RowAccounting):
    """Rows whose pages follow the tokens that can be read."""

    def __init__(self, groups: tuple[Group, ...], config: CacheConfig) -> None:
        super().__init__(groups, config)
        self._is_state = [isinstance(group.spec, KeptWhole) for group in groups]
        sizes = [n * size for n, size in zip(self._page_tokens, self._slot_bytes, strict=True)]
        self._peaks = peak_bytes(groups, self._page_tokens, sizes, config.max_model_len)

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        return self._peaks[num_tokens]

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
        if self.bytes_in(backed) > self.ceiling.capacity_bytes:
            return self.never(num_tokens)
        if promised_tokens > room:
            promised = int(self._peaks[min(promised_tokens, self.config.max_model_len)])
            kept_bytes += max(0, promised - self.bytes_in(backed))
        return self.take(held, backed, num_tokens, kept_bytes)

    def fork(self, seq_id: int, new_id: int) -> AllocationResult:
        source, num_tokens = self.sequences[seq_id], self.sequences[seq_id].num_tokens
        self.add(new_id)
        target = self.sequences[new_id]
        backed = [
            range(old.start, min(old.stop, align_up(num_tokens, step)))
            for old, step in zip(source.backed, self._page_tokens, strict=True)
        ]
        verdict = self.take(target, backed, num_tokens)
        if verdict is not FITS:
            del self.sequences[new_id]
            return verdict
        for group, pages in enumerate(backed):
            stop = min(num_tokens, self.row_slots(group))
            if pages.start < stop:
                start = self.place(group, source) + pages.start
                goal = self.place(group, target) + pages.start
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

    def check(self) -> None:
        super().check()
        for held in self.sequences.values():
            for group, backed, state in zip(self.groups, held.backed, self._is_state, strict=True):
                if state:
                    assert bool(backed) == (held.row >= 0), "a state without a page"
                    continue
                live = group.live_range(held.num_tokens)
                assert not live or (backed.start <= live.start and live.stop <= backed.stop), (
                    "a token that can be read has no page"
                )

    def _backed_for(self, held: Row, begin: int, num_tokens: int) -> list[range]:
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

    def _is_backed(self, held: Row, num_tokens: int) -> bool:
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
