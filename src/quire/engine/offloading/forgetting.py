"""``Forgetting``: tiers are made to forget blocks, or all; meanwhile these are not found."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import final

from quire.engine.offloading.copy_events import CopyEvents
from quire.engine.transfer import PeerTransfer
from quire.kv.prefix_index import BlockIdentity
from quire.tiers import Deadline
from quire.tiers.guard import GuardedTier

_DROP_S = 10.0  # that dropping some blocks' records may take
_DROP_AGAIN_S = 1.0  # after a tier has refused to
CLEAR_S = 60.0  # that all tiers may take to forget a namespace


@final
class Forgetting:
    """What tiers are to forget. ``begin_…`` are called first, and the others by one thread."""

    def __init__(
        self,
        tiers: Sequence[GuardedTier],
        transfer: PeerTransfer | None,
        events: CopyEvents,
        closing: threading.Event,  # set: a tier that refuses is not asked again
    ) -> None:
        self._tiers, self._transfer, self._events = tiers, transfer, events
        self._closing = closing
        self._lock = threading.Lock()
        self._chains: Counter[bytes] = Counter()  # of blocks

    def num_kept(self, blocks: Iterable[BlockIdentity]) -> int:
        """Count the first of these blocks that are not being forgotten."""
        if self._events.is_clearing:
            return 0
        with self._lock:
            chains = set(self._chains)
        count = 0
        for block in blocks:
            if block.chain in chains:
                break
            count += 1
        return count

    def begin_drop(self, blocks: Iterable[BlockIdentity]) -> None:
        """Let no record of these blocks be found until ``drop``."""
        with self._lock:
            self._chains.update(block.chain for block in blocks)

    def drop(self, blocks: Sequence[BlockIdentity]) -> None:
        """Have all tiers forget these blocks, and peers' leases too."""
        for tier in self._tiers:
            names = [form.name(form.header(block)) for block in blocks for form in tier.formats]
            # No wrong record may stay where it can be found.
            while not tier.drop(names, Deadline.after(_DROP_S)):
                if self._closing.wait(_DROP_AGAIN_S):
                    break
            groups = range(len(tier.formats))
            self._events.note_lost(tier, [(group, block) for block in blocks for group in groups])
        if self._transfer is not None:
            self._transfer.drop(blocks)
        with self._lock:
            self._chains -= Counter(block.chain for block in blocks)

    def begin_clear(self) -> None:
        """Let no record be found until ``clear``."""
        self._events.begin_clearing()

    def clear(self, done: "Future[Mapping[str, str]]") -> None:
        """Have tiers forget all of this namespace, and peers' leases. Say why one has not."""
        deadline, left = Deadline.after(CLEAR_S), dict[str, str]()
        for tier in self._tiers:  # one that fails is not loaded from, so the others may be
            if (why := tier.clear(deadline)) is not None:
                left[tier.name] = why
        if self._transfer is not None:
            self._transfer.records.release_all()
        self._events.end_clearing()
        done.set_result(left)
