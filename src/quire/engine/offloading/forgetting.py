"""``Forgetting``: tiers are made to forget blocks, or all; meanwhile these are not found.

A tier that refuses is asked again later, and no other one waits for it. Until it has forgotten
them, its records of these blocks are not found, and it is given none.
"""

import logging
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

log = logging.getLogger(__name__)

_DROP_S = 10.0  # that dropping some blocks' records may take
_DROP_AGAIN_S = 1.0  # after a tier has refused to
_LAST_DROP_S = 2.0  # … when the engine ends
_MOST_REFUSED = 2**16  # blocks that one tier may keep for later
CLEAR_S = 60.0  # that all tiers may take to forget a namespace


@final
class Forgetting:
    """What tiers are to forget. ``begin_…`` are called first, and the others by one thread."""

    def __init__(
        self, tiers: Sequence[GuardedTier], transfer: PeerTransfer | None, events: CopyEvents
    ) -> None:
        self._tiers, self._transfer, self._events = tiers, transfer, events
        self._lock = threading.Lock()
        # Chains of blocks that each tier is to forget, and those of peers' records.
        self._chains: dict[GuardedTier, Counter[bytes]] = {tier: Counter() for tier in tiers}
        self._of_peers = Counter[bytes]()
        # What tiers have refused to forget: the calling thread's own.
        self._refused: dict[GuardedTier, list[BlockIdentity]] = {}

    def num_kept(self, tier: GuardedTier, blocks: Iterable[BlockIdentity]) -> int:
        """Count the first of these blocks that a tier is not to forget."""
        if self._events.is_clearing:
            return 0
        with self._lock:
            chains = set(self._chains.get(tier, self._of_peers))
        count = 0
        for block in blocks:
            if block.chain in chains:
                break
            count += 1
        return count

    def is_kept(self, tier: GuardedTier, block: BlockIdentity) -> bool:
        """Tell whether a tier may be given a block: it is not to forget it."""
        return block.chain not in self._chains.get(tier, self._of_peers)

    def begin_drop(self, blocks: Iterable[BlockIdentity]) -> None:
        """Let no record of these blocks be found until ``drop``."""
        chains = [block.chain for block in blocks]
        with self._lock:
            for each in (*self._chains.values(), self._of_peers):
                each.update(chains)

    def drop(self, blocks: Sequence[BlockIdentity]) -> None:
        """Have all tiers forget these blocks, and peers' leases too."""
        for tier in self._tiers:
            may_ask = tier.may_forget and tier not in self._refused
            if not may_ask or not self._drop(tier, blocks, Deadline.after(_DROP_S)):
                self._keep_for_later(tier, blocks)
        if self._transfer is not None:
            self._transfer.drop(blocks)
        with self._lock:
            self._of_peers -= Counter(block.chain for block in blocks)

    @property
    def again_s(self) -> float | None:
        """Return the seconds until ``drop_again`` may achieve something; None: all is forgotten."""
        if not self._refused:
            return None
        return max(_DROP_AGAIN_S, min(tier.forgets_in_s for tier in self._refused))

    def drop_again(self) -> None:
        """Ask tiers once more that have refused, if they may be asked."""
        for tier, blocks in list(self._refused.items()):
            if tier.may_forget and self._drop(tier, blocks, Deadline.after(_DROP_S)):
                del self._refused[tier]

    def end(self) -> None:
        """Ask them for the last time, and tell what is left where others may find it."""
        for tier, blocks in self._refused.items():
            if not tier.traits.outlives_process:
                continue
            if not self._drop(tier, blocks, Deadline.after(_LAST_DROP_S)):
                log.warning(
                    "tier %s may still have records of %d blocks that it was to forget, since the "
                    "model failed on them: clear its namespace",
                    tier.name,
                    len(blocks),
                )

    def _drop(self, tier: GuardedTier, blocks: Sequence[BlockIdentity], deadline: Deadline) -> bool:
        """Have a tier forget blocks, which may be found there then. Return whether it has."""
        copies = [
            (form.name(form.header(block)), group, block)
            for block in blocks
            for group, form in enumerate(tier.formats)
        ]
        with self._events.losing(tier, copies, were_told=tier in self._refused):
            if not tier.drop([name for name, _, _ in copies], deadline):
                return False
        self._show(tier, blocks)
        return True

    def _keep_for_later(self, tier: GuardedTier, blocks: Sequence[BlockIdentity]) -> None:
        several = self._refused.setdefault(tier, [])
        several += blocks
        if len(several) > _MOST_REFUSED:
            tier.suspect(f"it was to forget {len(several):,} blocks, and has not")
            self._show(tier, several)
            del self._refused[tier]

    def _show(self, tier: GuardedTier, blocks: Iterable[BlockIdentity]) -> None:
        with self._lock:
            self._chains[tier] -= Counter(block.chain for block in blocks)

    def check(self) -> None:
        """Check that no block is hidden but those that a tier has refused to forget.

        No call may be under way, or to come.
        """
        for tier, chains in self._chains.items():
            refused = Counter(block.chain for block in self._refused.get(tier, ()))
            assert chains == refused, f"tier {tier.name} hides what it is not to forget"
        assert not self._of_peers, "peers' records stay hidden"

    def begin_clear(self) -> None:
        """Let no record be found until ``clear``."""
        self._events.begin_clearing()

    def clear(self, done: "Future[Mapping[str, str]]") -> None:
        """Have tiers forget all of this namespace, and peers' leases. Say why one has not."""
        deadline, left = Deadline.after(CLEAR_S), dict[str, str]()
        for at, tier in enumerate(self._tiers):
            # One that hangs leaves time for the others; one that fails is not loaded from.
            own = Deadline.after(deadline.left_s / (len(self._tiers) - at))
            if (why := tier.clear(own)) is not None:
                left[tier.name] = why
            elif blocks := self._refused.pop(tier, None):
                self._show(tier, blocks)
        if self._transfer is not None:
            self._transfer.records.release_all()
        self._events.end_clearing()
        done.set_result(left)
