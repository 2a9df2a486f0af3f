"""``RecordStorer``: makes records of blocks in staging memory, and gives them to tiers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import final

from quire.engine.offloading.copy_events import CopyEvents
from quire.engine.offloading.forgetting import Forgetting
from quire.engine.offloading.staging import Bytes, Staging
from quire.engine.scheduling.step_costs import mean_of_latest
from quire.engine.transfer import PeerTransfer
from quire.kv.prefix_index import BlockIdentity
from quire.tiers import Deadline, Name
from quire.tiers.guard import GuardedTier

_STORE_S = 10.0  # that a batch of records may take


@dataclass(slots=True)
class OutgoingBlock:
    """A block that is to be stored: its payload lies at the end of a buffer."""

    group: int
    identity: BlockIdentity
    buffer: Bytes
    tiers: Sequence[GuardedTier]  # which are to have it
    lease: str = ""  # of memory for another server, which has it then
    is_sealed: bool | None = None  # None: the buffer has no header yet


@final
class RecordStorer:
    """Stores one batch after the other, in one thread."""

    def __init__(
        self,
        tiers: Sequence[GuardedTier],  # that new blocks go to
        staging: Staging,
        *,
        transfer: PeerTransfer | None,
        forgetting: Forgetting,
        events: CopyEvents,
    ) -> None:
        self.s_per_block = 0.0  # of computing, that storing one has taken lately
        self.stop_s = float("inf")  # monotonic: nothing is stored after it. Set once, by another
        self._tiers, self._staging = tiers, staging
        self._transfer, self._forgetting, self._events = transfer, forgetting, events

    def store(self, blocks: Sequence[OutgoingBlock]) -> None:
        """Store blocks where they are to go, and give their buffers back."""
        try:
            for each in blocks:
                if each.lease and self._transfer is not None:
                    self._transfer.keep(each.lease, each.group, each.identity, each.buffer.data)
            for tiers, several in groupby(blocks, lambda each: each.tiers):
                self._store_in_each(tiers, list(several))
        finally:
            self._staging.give(each.buffer for each in blocks)

    def _store_in_each(self, tiers: Sequence[GuardedTier], blocks: list[OutgoingBlock]) -> None:
        begun_s = time.thread_time()
        # A seal encrypts the payload in its place, so that plain records come first.
        for tier in sorted(tiers, key=lambda tier: tier.is_sealed):
            for start in range(0, len(blocks), tier.traits.batch):
                self._store_batch(tier, blocks[start : start + tier.traits.batch])
        if tiers == self._tiers:
            took_s = (time.thread_time() - begun_s) / len(blocks)
            self.s_per_block = mean_of_latest(self.s_per_block, took_s)

    def _store_batch(self, tier: GuardedTier, blocks: list[OutgoingBlock]) -> None:
        blocks = [each for each in blocks if self._forgetting.is_kept(tier, each.identity)]
        names, views = list[Name](), list[memoryview]()
        for each in blocks:
            form = tier.formats[each.group]
            header = form.header(each.identity)
            view = each.buffer.data[-form.num_bytes :]
            if each.is_sealed is not tier.is_sealed:
                form.finish(view, header)
                each.is_sealed = tier.is_sealed
            names.append(form.name(header))
            views.append(view)
        if time.monotonic() > self.stop_s:
            return
        with self._events.keeping(tier) as call:
            count = tier.store(names, views, Deadline.after(_STORE_S))
            kept = zip(names[:count], blocks[:count], strict=True)
            self._events.note_kept(call, [(name, each.group, each.identity) for name, each in kept])
