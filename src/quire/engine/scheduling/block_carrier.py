"""``BlockCarrier``: what moves blocks for ``OffloadPolicy``, and what it moves: a ``LoadJob``.

``engine.offloading`` has the one of a real engine, ``planner.simulation`` one that only takes time.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire.engine.sequence import RemoteBlocks
from quire.engine.statistics import Histogram
from quire.kv.prefix_cache import TokenIds
from quire.kv.prefix_index import BlockEvent, BlockIdentity, Medium, PrefixKeys
from quire.spec import Group, KeptWhole


@dataclass(eq=False, slots=True, kw_only=True)
class LoadJob:
    """Blocks of one prompt that tiers are asked for."""

    seq_id: int
    keys: PrefixKeys
    token_ids: TokenIds  # i32[n]: whole blocks, from the prompt's first on
    first: int  # blocks of these that were cached when it began
    blocks: list[BlockIdentity]  # the others
    deadline_s: float  # on the engine's clock: a sequence waits no longer
    remote: RemoteBlocks | None = None  # a peer that is asked before all tiers
    lacking: list[BlockIdentity] = field(default_factory=list)  # which no tier has, or a bad one
    end: int = 0  # blocks that can be inserted: from ``first`` to this one
    is_cut: bool = False  # there was more, and no room for it in staging memory
    is_done: bool = False
    lacks_room: bool = False  # in the cache, for what has come
    is_lost: bool = False  # what it goes on behind was evicted
    is_given_up: bool = False
    is_wrong: bool = False  # what it brings is wrong, or may be
    payloads: dict[tuple[int, int], object] = field(default_factory=dict)  # (group, column)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """What one tier holds and has done, at a moment. Counts are since the engine was made."""

    name: str
    medium: Medium  # CPU: this process's memory; STORAGE: anything else
    is_shared: bool  # other machines or users may write into it
    is_persistent: bool
    state: Literal["ok", "suspect", "broken"]
    may_clear: bool  # it can forget a whole namespace
    num_records: int | None  # None: the tier does not say
    used_bytes: int | None
    capacity_bytes: int | None  # None: it has no limit of its own
    hit_tokens: int  # that it had, and that were inserted
    num_loaded: int  # records that were right
    loaded_bytes: int
    load_s: float
    num_stored: int
    stored_bytes: int
    store_s: float
    num_dropped: int  # records that it did not take
    num_errors: Mapping[str, int]  # by call
    num_bad: Mapping[str, int]  # records, by what was wrong
    promotion_s: Histogram  # from the question for a prompt's blocks to the last one checked


class BlockCarrier(Protocol):
    """Moves blocks between tiers, staging memory and the cache. No call waits for a tier."""

    def load(self, job: LoadJob, wait_s: float) -> bool:
        """Begin to load what tiers have of a job. Return False if there is no room for it now."""
        ...

    def loaded(self) -> list[LoadJob]:
        """Return the jobs that are done since the last call."""
        ...

    def fill(self, group: int, blocks: list[int], payloads: list[object]) -> None:
        """Copy payloads into blocks of the cache."""
        ...

    def release(self, job: LoadJob) -> None:
        """Give back a job's staging memory. What it has brought may go to a nearer tier."""
        ...

    when_idle: Callable[[], bool] | None

    def copy_out(self, group: int, block: int, identity: BlockIdentity) -> bool:
        """Copy a block to staging memory, to be stored. Return False if there is no room now."""
        ...

    def send(self) -> None:
        """Hand what was copied out to the tiers' thread."""
        ...

    @property
    def may_store(self) -> bool:
        """Whether some tier takes records now."""
        ...

    def wait_for_room(self, seconds: float) -> None:
        """Wait until something that was copied out is stored, or for so many seconds."""
        ...

    @property
    def may_drain(self) -> bool:
        """Whether some tier keeps records when this process has ended, or a peer does."""
        ...

    def copy_to_last(self, group: int, block: int, identity: BlockIdentity) -> bool:
        """Copy a block to staging memory for those. Return False if there is no room now."""
        ...

    def wait_until_stored(self, seconds: float) -> None:
        """Wait until all that was sent is stored, or for so many seconds."""
        ...

    def drop(self, blocks: Iterable[BlockIdentity]) -> None:
        """Have tiers forget these blocks' records."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until a job is done, or for so many seconds."""
        ...

    def restart(self) -> None:
        """Let go of a cache's memory; another one follows, or none."""
        ...

    def note_inserted(self, job: LoadJob, end: int) -> None:
        """Note that blocks of a job are in the cache now: from ``job.first`` to before ``end``."""
        ...

    def report(self) -> tuple[TierReport, ...]:
        """Return what each tier holds and has done, the nearest first. Any thread may ask."""
        ...

    def take_events(self) -> list[BlockEvent]:
        """Return which copies tiers have kept or lost since the last call, if events are wanted."""
        ...

    def trust(self, name: str | None) -> None:
        """Load from a tier again that gave bad records, or from each (None)."""
        ...

    def clear(self) -> "Future[Mapping[str, str]]":
        """Have tiers forget all of this engine's namespace, and load nothing until they have.

        Returns: a future of why one has not, by the tier's name.
        """
        ...

    def load_s(self, num_blocks: int) -> float:
        """Return the seconds that loading so many blocks is expected to take; 0: not known."""
        ...

    @property
    def store_s_per_block(self) -> float:
        """Return the seconds of computing that a block which is stored has cost; 0: not known."""
        ...

    def close(self) -> None:
        """End every job, and give what was copied out a while to be stored."""
        ...


def columns_read(group: Group, block_size: int, first: int, end: int) -> range:
    """Return which of a group's blocks [first, end) a sequence reads that begins behind them."""
    if isinstance(group.spec, KeptWhole):
        return range(end - 1, end)
    return range(max(first, int(group.live_start(end * block_size)) // block_size), end)


def reads_all(group: Group) -> bool:
    """Tell whether a sequence reads all of its blocks in a group, however long it is."""
    return not isinstance(group.spec, KeptWhole) and int(group.live_start(2**40)) == 0
