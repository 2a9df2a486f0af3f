"""``OffloadPolicy``: which blocks are asked for in tiers, how long a sequence waits, what goes out.

This is the part of offloading that needs no tensor and no thread. A ``BlockCarrier`` moves bytes
between the cache, staging memory and tiers.

A waiting sequence whose prompt goes on behind its prefix hit asks the tiers. While the answer
is on its way the scheduler passes the sequence over, at most for as long as computing would take.
What comes goes into free blocks of the pool between two steps, where any sequence finds it.

Blocks that steps have filled are copied out between steps, parents before children, where that pays
and as far as the share of time allows that steps may lose to it.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeAlias, final

from quire.engine.scheduling.block_carrier import (
    BlockCarrier,
    LoadJob,
    TierReport,
    columns_read,
)
from quire.engine.scheduling.offers import Offers
from quire.engine.scheduling.step_costs import Clock, Costs
from quire.engine.sequence import Sequence
from quire.kv import Accounting
from quire.kv.interface import ExternalBlocks
from quire.kv.prefix_cache import PrefixHit, TokenIds
from quire.kv.prefix_index import NO_BLOCK, BlockEvent, BlockIdentity

_Outcome: TypeAlias = Literal["inserted", "no room", "lost"]
WritePolicy: TypeAlias = Literal["auto", "always", "never"]
WRITE_POLICIES: tuple[WritePolicy, ...] = ("auto", "always", "never")

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 10.0
_CLOSE_S = 5.0  # that blocks may still go out when the engine ends
SHARE_OF_A_STEP = 0.05  # of its time, that copying blocks out or in may take beside it
BLOCKS_AT_ONCE = 4  # that are inserted beside steps, between two looks at the clock
_MOST_REMEMBERED = 2**17  # blocks, by 8 bytes of their names
_MOST_QUEUED = 2**16  # blocks that may go out
_LIKELY = 0.5  # how often a block is asked for again that was computed or found twice
_LOOKS = 64  # at inserted blocks, between two steps: whether they were evicted
_SLOW_ASKS = 16  # of so many that loading is too slow for, one is made to measure it anew
_MOST_ASKS = 8  # of a sequence that get it no further than before
_PIN_ID = -2  # of the sequence that brings blocks and never runs


@dataclass(slots=True)
class OffloadCounts:
    """What became of blocks since the start."""

    queried_tokens: int = 0  # that tiers were asked for
    hit_tokens: int = 0  # … that were inserted
    num_late: int = 0  # loads that a sequence did not wait for
    late_tokens: int = 0  # loaded, and not inserted
    evicted_tokens: int = 0  # inserted, and lost again before a sequence had them
    saved_s: float = 0.0  # computing that inserted blocks have spared, less the loading
    stored_blocks: int = 0  # copied out
    dropped_blocks: int = 0  # that were to go out, and were evicted first or found no room

    @property
    def wasted_tokens(self) -> int:
        """Return the tokens that were loaded for nothing."""
        return self.late_tokens + self.evicted_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """What an engine's tiers hold and have done, at a moment."""

    tiers: tuple[TierReport, ...]  # the nearest first
    counts: OffloadCounts
    why_off: str | None  # they are used no longer; None: they are


@final
class OffloadPolicy:
    """Decides for one engine. Its calls are made between two steps, by the engine's thread."""

    def __init__(
        self,
        carrier: BlockCarrier,
        accounting: Accounting,
        costs: Costs,
        clock: Clock,
        *,
        write: WritePolicy = "auto",
        offers: Offers | None = None,  # None: no other server is handed blocks
        is_same_model: Callable[[], bool] = lambda: True,  # that records in tiers are named after
    ) -> None:
        self.counts = OffloadCounts()
        self._carrier, self._costs, self._clock = carrier, costs, clock
        self._write, self.offers = write, offers
        self._jobs: dict[int, LoadJob] = {}  # by the sequence that waits for it
        self._late: list[LoadJob] = []  # under way, and no sequence waits
        self._asks_left: dict[int, int] = {}  # of waiting sequences that have asked
        self._furthest: dict[int, int] = {}  # blocks that they have got, where there were more
        self._queue: deque[tuple[int, bool]] = deque(maxlen=_MOST_QUEUED)  # node, was asked for
        # Blocks seen, by name: the groups of which there is a record, as bits.
        self._remembered: dict[bytes, int] = {}
        self._unread: dict[int, None] = {}  # nodes that were inserted, and no sequence has had
        self._recurring = _Share()
        self._num_slow = 0  # prompts that computing was expected to be quicker for
        self._is_off = self._is_closed = False
        self._why_off: str | None = None
        self._is_same_model = is_same_model
        self.use(accounting)

    def use(self, accounting: Accounting) -> None:
        """Go on with another cache, which is empty."""
        assert isinstance(accounting, ExternalBlocks)
        self.counts.evicted_tokens += len(self._unread) * accounting.index.block_size
        self._unread.clear()
        self._blocks: ExternalBlocks = accounting
        self._groups, self._block_size = accounting.groups, accounting.index.block_size
        self._carrier.restart()
        if self._write != "never" and not self._is_off:
            self._blocks.index.filled = []
        self._queue.clear()
        if self.offers is not None:
            self.offers.forget_blocks()

    # -- loading -----------------------------------------------------------------------------------

    def holds_back(self, sequence: Sequence, token_ids: TokenIds, hit: PrefixHit | None) -> bool:
        """Tell whether a waiting sequence with this prefix hit waits for tiers.

        ``token_ids``: all that it has, i32[n].
        """
        job = self._jobs.get(sequence.seq_id)
        if job is not None:
            if job.lacks_room:  # as the sequence itself does, or it goes on with less
                return False
            # What has come is inserted soon, which takes less than computing it.
            if self._clock() < job.deadline_s or (job.is_done and job.end > job.first):
                return True
            self._give_up(job)
            return False
        if self._is_off or hit is None or sequence.num_saved_tokens > hit.num_tokens:
            return False
        return self._ask(sequence, token_ids, hit)

    def forget(self, sequence: Sequence) -> None:
        """Note that a sequence waits no longer: it runs, or it has ended."""
        self._asks_left.pop(sequence.seq_id, None)
        self._furthest.pop(sequence.seq_id, None)
        if self.offers is not None:
            self.offers.forget(sequence)
        job = self._jobs.get(sequence.seq_id)
        if job is not None:
            self._give_up(job)

    def wait(self) -> None:
        """Wait until something has come, or a sequence waits no longer."""
        deadlines_s = [job.deadline_s for job in self._jobs.values() if not job.is_done]
        if deadlines_s:
            self._carrier.wait(max(0.0, min(deadlines_s) - self._clock()))

    def bring(self, settle: Callable[[], bool], *, step_s: float | None) -> None:
        """Insert what has come into the cache.

        ``settle`` carries out what accounting has decided, and tells whether that went well.
        ``step_s``: seconds of a step beside which this happens; None: no sequence runs.
        """
        self._note_evicted(_LOOKS)
        for job in self._carrier.loaded():
            job.is_done = True
            self._note_lost(job)
            if job.is_given_up:
                self._late.remove(job)
                self._release_late(job)
        stop_s = None if step_s is None else self._clock() + SHARE_OF_A_STEP * step_s
        for job in [job for job in self._jobs.values() if job.is_done]:
            if job.end > job.first and not self._insert(job, settle, stop_s):
                continue
            del self._jobs[job.seq_id]
            if job.is_cut and job.end > self._furthest.get(job.seq_id, 0):
                self._furthest[job.seq_id] = job.end
                self._asks_left[job.seq_id] += 1  # that was no ask in vain
            elif not (job.is_cut or job.is_lost):
                self._asks_left[job.seq_id] = 0
            self._carrier.release(job)
            if stop_s is not None and self._clock() >= stop_s:
                return

    def _ask(self, sequence: Sequence, token_ids: TokenIds, hit: PrefixHit) -> bool:
        """Ask tiers for what follows a hit, if that may pay. Return whether they are asked."""
        size = self._block_size
        remote, least_s = None, 0.0
        if self.offers is not None:
            remote = sequence.remote
            least_s = self.offers.least_wait_s(remote)
        first, end = hit.num_tokens // size, (len(token_ids) - 1) // size
        asks_left = self._asks_left.get(sequence.seq_id, _MOST_ASKS)
        if end <= first or not asks_left:
            return False
        is_first = sequence.seq_id not in self._asks_left
        wanted = token_ids[: end * size]
        blocks = self._blocks.following_blocks(sequence.seq_id, wanted, hit)
        if is_first:
            self._note_request(hit.num_tokens // size, blocks)
        self._asks_left[sequence.seq_id] = 0
        recompute_s = self._costs.recompute_s(len(blocks) * size)
        # What loading has taken lately says nothing of a peer that was not asked.
        is_told_to = least_s > 0 or remote is not None
        if self._carrier.load_s(len(blocks)) >= recompute_s and not is_told_to:
            # What was slow once need not be slow for ever: some ask all the same.
            self._num_slow += 1
            if self._num_slow % _SLOW_ASKS:
                return False
        wait_s = max(least_s, min(recompute_s, _LONGEST_WAIT_S))
        job = LoadJob(
            seq_id=sequence.seq_id,
            keys=sequence.request.keys,
            token_ids=wanted,
            first=first,
            blocks=blocks,
            deadline_s=self._clock() + wait_s,
            remote=remote,
        )
        if not self._carrier.load(job, wait_s):
            return False
        if is_first:
            self.counts.queried_tokens += len(blocks) * size
        self._jobs[sequence.seq_id], self._asks_left[sequence.seq_id] = job, asks_left - 1
        return True

    def _give_up(self, job: LoadJob) -> None:
        """Wait no longer for a job; what it has brought may go to a nearer tier."""
        del self._jobs[job.seq_id]
        self.counts.num_late += 1
        job.is_given_up = True
        if job.is_done:
            self._release_late(job)
        else:
            self._late.append(job)

    def _release_late(self, job: LoadJob) -> None:
        """Count what a job has brought for nothing, which is known once it is done."""
        self.counts.late_tokens += (job.end - job.first) * self._block_size
        self._carrier.release(job)

    def _note_lost(self, job: LoadJob) -> None:
        """Note which blocks have no record any more, so that they are stored again."""
        for block in job.lacking:
            if self._remembered.get(block.chain[:8]):
                self._remembered[block.chain[:8]] = 0

    def _insert(self, job: LoadJob, settle: Callable[[], bool], stop_s: float | None) -> bool:
        """Insert a job's blocks, some at a time. Return whether the job is over."""
        size = self._block_size
        # Windows and states are brought for the end alone, so what they belong to goes whole.
        must_be_whole = any(
            columns_read(group, size, job.first, job.end).start > job.first
            for group in self._groups
        )
        whole = stop_s is None or must_be_whole
        begun_s, done = self._clock(), job.first
        outcome: _Outcome = "inserted"
        while done < job.end:
            end = job.end if whole else min(job.end, done + BLOCKS_AT_ONCE)
            outcome = self._insert_until(job, end, settle)
            if outcome == "no room" and whole and not must_be_whole:
                whole = False  # as many as there is room for
                continue
            if outcome != "inserted":
                break
            done = end
            if stop_s is not None and self._clock() >= stop_s:
                break
        tokens = (done - job.first) * size
        self.counts.hit_tokens += tokens
        self._carrier.note_inserted(job, done)
        spent_s = self._clock() - begun_s
        recompute_s = self._costs.recompute_s(tokens)
        if tokens and recompute_s < float("inf"):
            self.counts.saved_s += recompute_s - spent_s
        if job.remote is None:
            self._remember_records(job, done)
        job.blocks, job.first = job.blocks[done - job.first :], done
        job.lacks_room, job.is_lost = outcome == "no room", outcome == "lost"
        return done >= job.end or job.is_lost

    def _remember_records(self, job: LoadJob, end: int) -> None:
        """Note of which groups tiers have a job's blocks before column ``end``."""
        for column in range(job.first, end):
            name = job.blocks[column - job.first].chain[:8]
            found = sum(
                1 << group for group in range(len(self._groups)) if (group, column) in job.payloads
            )
            self._remember(name, self._remembered.get(name, 0) | found)

    def _insert_until(self, job: LoadJob, end: int, settle: Callable[[], bool]) -> _Outcome:
        """Insert a job's blocks before column ``end``, if there is room for them."""
        token_ids = job.token_ids[: end * self._block_size]
        reserved = self._blocks.reserve_blocks(_PIN_ID, token_ids, job.keys)
        if reserved is None:
            return "no room"
        if not reserved:  # another sequence has computed it meanwhile
            return "inserted"
        there = all(
            (number, column) in job.payloads
            for number, (start, blocks) in enumerate(reserved)
            for column in range(start, start + len(blocks))
        )
        if not there:  # what it was to go on behind has been evicted since
            self._blocks.free(_PIN_ID)
            return "lost"
        if not settle():
            return "lost"
        for number, (start, blocks) in enumerate(reserved):
            if len(blocks):
                payloads = [job.payloads[number, start + at] for at in range(len(blocks))]
                self._carrier.fill(number, blocks.tolist(), payloads)
        nodes = self._blocks.insert_blocks(_PIN_ID, token_ids)
        self._unread.update(dict.fromkeys(nodes))
        return "inserted"

    def _note_evicted(self, most: int) -> None:
        """Look at some inserted blocks that no sequence has had: those that are gone are waste."""
        index = self._blocks.index
        for node in list(islice(self._unread, most)):
            del self._unread[node]
            if index.has_block(node):
                self._unread[node] = None  # and looked at again after all others
            else:
                self.counts.evicted_tokens += self._block_size

    # -- storing -----------------------------------------------------------------------------------

    def note_admitted(self, sequence: Sequence, hit: PrefixHit | None) -> None:
        """Note that a sequence runs. What it has found and tiers lack may go out now."""
        self.forget(sequence)
        if hit is None:
            return
        index = self._blocks.index
        rows = hit.rows[: hit.num_tokens // self._block_size].tolist()
        if self._unread:
            for row in rows:
                self._unread.pop(index.node(row), None)
        if self._write == "never" or self._is_off:
            return
        for row in rows:
            if not self._remembered.get(index.block_hash(row)[:8]):
                self._queue.append((index.node(row), True))

    def offer(self, sequence: Sequence) -> None:
        """Offer a prompt that is computed to another server, once."""
        is_first = sequence.kv_transfer_params is None and not sequence.index
        if is_first and self.offers is not None and not self._is_off:
            self.offers.offer(sequence, self._blocks)

    @property
    def has_more(self) -> bool:
        """Whether blocks wait to go out."""
        if self.offers:
            return True
        return self._carrier.may_store and bool(self._queue or self._blocks.index.filled)

    def store(self, *, step_s: float | None) -> None:
        """Copy out blocks that steps have filled, or that were asked for again.

        ``step_s``: seconds of the step beside which this happens; None: no sequence runs.
        """
        if self.offers:
            has_room = self.offers.copy_out(self._blocks, step_s=step_s)
            self._carrier.send()
            if not has_room:
                return
        index = self._blocks.index
        if index.filled:
            for nodes in index.filled:
                self._queue += ((node, False) for node in nodes.tolist())
            index.filled.clear()
        stop_s = None if step_s is None else self._clock() + SHARE_OF_A_STEP * step_s
        has_room, sent = True, False
        while self._queue and has_room:
            node, was_asked_for = self._queue[0]
            identity = index.identity(node)
            if identity is None:
                self.counts.dropped_blocks += 1  # it was evicted first
            else:
                groups = self._lacking(node, identity)
                if groups and self._goes_out(identity, was_asked_for):
                    has_room = self._copy_out(node, identity, groups)
                    sent = True
            if has_room:
                self._queue.popleft()
            if stop_s is not None and self._clock() >= stop_s:
                break
        if sent:
            self._carrier.send()

    def drain(self, seconds: float) -> int:
        """Store the hottest cached blocks where they outlive this engine, for so many seconds.

        Parents go before children: without them nothing is found. Returns: blocks copied out.
        """
        index, count = self._blocks.index, 0
        if self._is_off or self._is_closed or not self._carrier.may_drain:
            return count
        stop_s = self._clock() + seconds
        for node in self._blocks.hottest_nodes():
            identity, row = index.identity(node), index.row(node)
            for number, blocks in enumerate(index.blocks):
                block = int(blocks[row])
                if identity is None or block == NO_BLOCK:
                    continue
                while not self._carrier.copy_to_last(number, block, identity):
                    self._carrier.send()
                    if self._clock() >= stop_s:
                        return count
                    self._carrier.wait_for_room(stop_s - self._clock())
            count += 1
            if self._clock() >= stop_s:
                break
        self._carrier.send()
        self._carrier.wait_until_stored(max(0.0, stop_s - self._clock()))
        return count

    def check_model(self) -> None:
        """Stop if the model is not the one that records are named after."""
        if not (self._is_off or self._is_same_model()):
            self.stop("the weights are not what they were")

    def stop(self, reason: str) -> None:
        """End all loading and storing: what steps compute is no longer what records say."""
        if self._is_off:
            return
        log.warning("no block is stored in tiers or loaded from them any more: %s", reason)
        self._is_off, self._why_off = True, reason
        self._let_jobs_bring_nothing()
        self._queue.clear()
        if self.offers is not None:
            self.offers.stop()
        self._blocks.index.filled = None

    def report(self) -> OffloadReport:
        """Return what tiers hold and have done. Any thread may ask, at any moment."""
        return OffloadReport(
            tiers=self._carrier.report(), counts=replace(self.counts), why_off=self._why_off
        )

    def take_events(self) -> list[BlockEvent]:
        """Return which copies tiers have kept or lost since the last call, if events are wanted."""
        return self._carrier.take_events()

    def trust(self, name: str | None) -> None:
        """Load from a tier again that gave bad records, or from each (None). Any thread may ask."""
        self._carrier.trust(name)

    def clear(self) -> "Future[Mapping[str, str]]":
        """Have tiers forget all that this engine's namespace has in them. Its cache is empty.

        Returns: a future of why one has not, by the tier's name.
        """
        self._let_jobs_bring_nothing()
        self._queue.clear()
        if self._blocks.index.filled:
            self._blocks.index.filled.clear()
        self._remembered.clear()
        return self._carrier.clear()

    def _let_jobs_bring_nothing(self) -> None:
        for job in [*self._jobs.values(), *self._late]:
            job.is_wrong = True
            if not job.is_given_up:
                self._give_up(job)

    def store_when_idle(self, store: Callable[[], bool]) -> None:
        """Have ``store`` called while no step is run: it calls this one's ``store``.

        Returns: whether nothing is left to be stored; if not, it is called again soon.
        """
        self._carrier.when_idle = store

    def close(self) -> None:
        """Copy out what can be in a few seconds, and end what is under way."""
        if self._is_closed:
            return
        self._is_closed, self._is_same_model = True, lambda: True  # which held the model
        self._note_evicted(len(self._unread))
        stop_s = self._clock() + _CLOSE_S
        self.store(step_s=None)
        while self.has_more and self._clock() < stop_s:
            self._carrier.wait_for_room(stop_s - self._clock())
            self.store(step_s=None)
        self._carrier.close()

    def drop(self, sequence: Sequence) -> None:
        """Have tiers forget what a sequence has computed, and load it for no other one."""
        several = self._blocks.computed_blocks(sequence.seq_id)
        chains = {block.chain for block in several}
        for block in several:
            self._remembered.pop(block.chain[:8], None)
        for job in [*self._jobs.values(), *self._late]:
            if not chains.isdisjoint(block.chain for block in job.blocks):
                job.is_wrong = True
                if not job.is_given_up:
                    self._give_up(job)
        self._carrier.drop(several)

    def _lacking(self, node: int, identity: BlockIdentity) -> list[int]:
        """Return the groups in which a node has a block, and tiers have no record of it."""
        row, stored = self._blocks.index.row(node), self._remembered.get(identity.chain[:8], 0)
        return [
            number
            for number, blocks in enumerate(self._blocks.index.blocks)
            if blocks[row] != NO_BLOCK and not stored >> number & 1
        ]

    def _goes_out(self, identity: BlockIdentity, was_asked_for: bool) -> bool:
        """Return whether it pays to store a block."""
        name = identity.chain[:8]
        known = self._remembered.get(name)
        if self._write == "always" or known:  # a state of a block that is stored
            return True
        # Without its parent no sequence finds it. A parent that is not remembered is a root, or
        # was stored so long ago that it is forgotten.
        has_parent = self._remembered.get(identity.parent[:8], 1) != 0
        recurs = was_asked_for or known is not None
        share = max(self._recurring.value, _LIKELY if recurs else 0.0)
        load_s = self._carrier.load_s(2) - self._carrier.load_s(1)  # as one of many
        spared_s = self._costs.recompute_s(self._block_size) - load_s
        if has_parent and share * spared_s > self._carrier.store_s_per_block:
            return True
        self._remember(name, 0)
        return False

    def _copy_out(self, node: int, identity: BlockIdentity, groups: list[int]) -> bool:
        """Copy what a node has in these groups. Return False if there was no room for it."""
        index, name = self._blocks.index, identity.chain[:8]
        row = index.row(node)
        for number in groups:
            if not self._carrier.copy_out(number, int(index.blocks[number][row]), identity):
                return False
            self._remember(name, self._remembered.get(name, 0) | 1 << number)
        self.counts.stored_blocks += 1
        return True

    def _note_request(self, num_cached: int, blocks: list[BlockIdentity]) -> None:
        """Learn from a prompt how much of one has been computed before."""
        known = sum(block.chain[:8] in self._remembered for block in blocks)
        if not blocks:
            return
        self._recurring.note((num_cached + known) / (num_cached + len(blocks)))

    def _remember(self, name: bytes, groups: int) -> None:
        self._remembered.pop(name, None)  # so that it is the latest
        self._remembered[name] = groups
        if len(self._remembered) > _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]


@final
class _Share:
    """A mean of shares in which the latest weigh most.

    It begins in the middle: the first prompts find little because little came before them.
    """

    def __init__(self, value: float = 0.5, weight: float = 10.0, most: float = 50.0) -> None:
        self.value, self._weight, self._most = value, weight, most

    def note(self, share: float) -> None:
        self._weight = min(self._weight + 1, self._most)
        self.value += (share - self.value) / self._weight
