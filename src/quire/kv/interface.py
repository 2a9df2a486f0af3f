"""The two halves of a strategy: ``Accounting`` (who holds what) and ``Storage`` (where it lies).

Accounting has no tensors. It decides, and notes each physical consequence as a ``StorageOp``: pages
to commit, tokens to copy, pages to release. Storage carries them out, in order. So the planner and
the simulator run the same decisions without a tensor, and the peak that an order of operations
causes is a property of the list, not of what executes it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from quire.kv.allocation import AllocationResult, Fits, Never
from quire.kv.block_pool import Ceiling
from quire.kv.eviction import DEFAULT_POLICY
from quire.kv.eviction_queue import Ids
from quire.kv.layout import LayersPerPage
from quire.kv.occupancy import Occupancy
from quire.kv.prefix_cache import PrefixHit, TokenIds
from quire.kv.prefix_index import (
    NO_KEYS,
    BlockEvent,
    BlockIdentity,
    BlockKey,
    PrefixIndex,
    PrefixKeys,
)
from quire.kv.retention import Retention
from quire.kv.storage_ops import StorageOp
from quire.memory import CountedMemory
from quire.spec import Group

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kv.storage.states import StateRows


# -- view ------------------------------------------------------------------------------------------

# What attention sees of a layer, whichever strategy holds it, and what writes into it.


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer's keys and values, as every attention kernel sees them.

    Entry i of a block table is row i here. The strategies that hold ranges give overlapping rows
    (row i begins one token after row i - 1), so a range is a table of one entry.

    Slot s is entry ``s % slots_per_row`` of row ``s // slots_per_row``. That is B for blocks and 1
    for ranges, where the last slots begin no row of the tensor, but have addresses all the same: a
    compiled kernel goes by strides.

    Keys and values that are codes have scales where their format has them (``quantized``).
    """

    k: "Tensor"  # [N, K, B, D], any strides
    v: "Tensor"  # [N, K, B, Dv]
    slots_per_row: int
    k_scale: "Tensor | None" = None  # f32[N, K, B]
    v_scale: "Tensor | None" = None  # f32[N, K, B]
    # What a kernel has worked out about the view, for the steps that come after the first one.
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


class EntryWriter(Protocol):
    """Puts entries into one layer's slots, as they are stored there."""

    def __call__(self, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        """Shapes: slots i64[T], k [T, K, D], v [T, K, Dv]."""
        ...


MakeWriter: TypeAlias = Callable[[LayerView], EntryWriter]


# -- base ------------------------------------------------------------------------------------------


Slots: TypeAlias = npt.NDArray[np.int64]
Counts: TypeAlias = npt.NDArray[np.int64]


# -- what a strategy is built from ---------------------------------------------------------------

Growth: TypeAlias = Literal["uniform", "doubling", "staggered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The numbers of a cache. They are final here; defaults for a user are in ``quire.config``."""

    max_model_len: int  # tokens: the longest a sequence may become
    max_num_seqs: int  # sequences at once: sizes address space, not memory
    capacity_bytes: int  # ceiling on committed bytes
    block_size: int = 16  # tokens; paged, virtual that shares
    page_bytes: int = 4096  # of the memory provider
    reserve: Literal["max_model_len", "request"] = "max_model_len"  # contiguous
    defrag: bool = False  # contiguous: close the holes when a range fits in none of them
    shares_pages: bool = False  # virtual: one copy of what is alike, in a layout slower to read
    layers_per_page: LayersPerPage = None  # that lie together, in ranges and what shares pages
    heap_bytes: int = 2**28  # … physical memory comes and goes in about these
    max_mappings: int | None = None  # … of addresses to pages, in this process; None: no limit
    growth: Growth = "uniform"  # growing
    growth_tokens: int = 256  # growing: step of uniform, first size of doubling, base of staggered
    keep_old: bool = False  # growing: an old buffer lives until the next step, as OpenVINO's does
    enable_prefix_caching: bool = True  # where blocks are: keep what ends for like prompts
    eviction_policy: str = DEFAULT_POLICY  # … what of that goes first
    retention_share: float = 0.25  # … how much of the capacity clients can have kept for a while
    keep_events: bool = False  # … note what can be found from now on and what no longer
    max_capacity_bytes: int | None = None  # how far ``resize`` may go; None: no further

    @property
    def most_bytes(self) -> int:
        """The most that the capacity may ever be: address space is made for it."""
        return max(self.capacity_bytes, self.max_capacity_bytes or 0)

    def never(
        self,
        num_tokens: int,
        bytes_for: Callable[[int], int],
        *,
        capacity_bytes: int,
        need_bytes: int | None = None,
    ) -> Never:
        """Make the refusal of ``num_tokens``; ``bytes_for(n)`` is what n take in an empty cache.

        ``capacity_bytes``: as it is now; ``need_bytes``: if it is not what that many take.
        """
        too_long = num_tokens > self.max_model_len
        lengths = range(1, self.max_model_len + 1)
        return Never(
            need_bytes=bytes_for(num_tokens) if need_bytes is None else need_bytes,
            capacity_bytes=capacity_bytes,
            fitting_tokens=bisect_right(lengths, capacity_bytes, key=bytes_for),
            option="max_model_len" if too_long else "kv_cache_memory_bytes",
        )


# -- what accounting answers --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Where the bytes are, as accounting knows it.

    reserved ≥ committed ≥ used + cached; what is committed and neither is wasted.
    """

    reserved_bytes: int  # address space
    committed_bytes: int  # backed with pages
    used_bytes: int  # entries that a later token can still read, shared ones counted once
    cached_bytes: int = 0  # that no sequence holds, kept for prompts that begin alike
    num_sequences: int
    num_tokens: int  # of all sequences, shared ones counted for each holder
    # Besides, by what finds out (``page_tables``); None: it has not been asked for.
    page_table_bytes: int | None = None

    @property
    def wasted_bytes(self) -> int:
        return self.committed_bytes - self.used_bytes - self.cached_bytes

    @classmethod
    def nothing(cls) -> "Usage":
        """Make the usage of a cache that is not there yet, or no longer."""
        return cls(
            reserved_bytes=0,
            committed_bytes=0,
            used_bytes=0,
            num_sequences=0,
            num_tokens=0,
            page_table_bytes=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What a sequence asks for with its room, besides a length."""

    hit: PrefixHit | None = None  # of a new sequence: held at once
    external_tokens: int = 0  # behind the hit: computed elsewhere, and brought by the caller
    lookahead_tokens: int = 0  # for guesses: they get room, and do not count as the sequence's
    # Refused, if it could not go on to so many with what is free now (an estimate where windows
    # pass what others hold).
    promised_tokens: int = 0
    kept_bytes: int = 0  # refused, if less than these stayed free for others


AS_IT_IS = Extension()


# -- the two protocols --------------------------------------------------------------------------


class Accounting(Protocol):
    """Who holds which tokens. No tensors. A refusal has changed nothing.

    Sequence ids are the caller's. Every verb takes one sequence; the caller plans, so that exactly
    one of these calls mutates at a time.

    A *step* is what happens between two calls of ``drain``. Tokens that a step makes room for are
    written after its changes are applied, so a sequence is forked or trimmed at its beginning.
    """

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups whose slots are counted here; ``StorageOp.group`` indexes this tuple."""
        ...

    @property
    def ceiling(self) -> Ceiling:
        """How much may be committed; moved by ``resize``."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether ``fork`` shares what is held instead of copying it."""
        ...

    @property
    def state_block_size(self) -> int:
        """Tokens from one place to the next where a recurrent state can be kept; 0: nowhere."""
        ...

    @property
    def held_bytes(self) -> int:
        """Committed bytes that sequences hold; what is only cached is not among them."""
        ...

    @property
    def fragmentation(self) -> float:
        """Return the share of the free slots outside the largest hole; 0 where none is needed."""
        ...

    def bytes_alone(self, num_tokens: Counts, max_tokens: Counts) -> Counts:
        """Count the bytes of a sequence by itself that has become so long, or a little more.

        ``max_tokens``: as in ``add``. Shapes: i64[...] and what broadcasts to it → i64[...].
        """
        ...

    def num_slots(self, group: int) -> int:
        """Return the slots of address space in a group."""
        ...

    def slot_bytes(self, group: int) -> int:
        """Return the bytes of a slot in all the group's layers, its padding to pages included."""
        ...

    def block_size(self, group: int) -> int:
        """Return the tokens that an entry of a block table stands for; 1 for what is kept whole."""
        ...

    def add(
        self,
        seq_id: int,
        *,
        max_tokens: int | None = None,
        keys: PrefixKeys = NO_KEYS,
        priority: int = 0,
    ) -> None:
        """Announce a sequence. It holds nothing yet.

        ``max_tokens`` is the longest it can become, if the caller knows; ``keys`` tell its prefix
        from others with the same token ids; what it leaves in the cache goes before that of
        sequences with a smaller ``priority``.
        Raises: KeyError if the id is in use.
        """
        ...

    def could_hold(self, num_tokens: int, *, max_tokens: int | None = None) -> Fits | Never:
        """Tell whether an empty cache takes one sequence that far, token by token.

        ``max_tokens``: as in ``add``.
        """
        ...

    def match_prefix(self, seq_id: int, token_ids: TokenIds) -> PrefixHit:
        """Find the longest prefix of a prompt that can be used again, and why it is not longer.

        For a sequence that holds nothing yet. Nothing changes; the hit is good for the very next
        ``try_extend``.
        """
        ...

    def next_block(
        self, seq_id: int, token_ids: Sequence[int], hit: PrefixHit | None = None
    ) -> tuple[BlockKey, int] | None:
        """Return the key of the next full block of these token ids, and the token where it ends.

        Two sequences that are given the same would fill the same block. One that holds nothing
        goes on behind its ``hit``. None: there is no full block, or nothing will be found.
        """
        ...

    def try_extend(
        self, seq_id: int, num_tokens: int, extension: Extension = AS_IT_IS
    ) -> AllocationResult:
        """Make room for a sequence's first ``num_tokens`` tokens in every group, or in none.

        It does nothing if there is room already. Else, at most once a step, all that the first new
        token reads stays readable: a window passes only what was behind it before. A refusal leaves
        usage, tables and changes as they were.

        The tokens of a new sequence are, in this order: those of the extension's ``hit``, its
        external ones, and new ones.
        """
        ...

    def try_extend_each(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> int:
        """Make room for each of these sequences, in order; how many of them have it now.

        The next one does not fit: ``try_extend`` says why.
        """
        ...

    def mark_computed(
        self, seq_ids: Sequence[int], counts: Sequence[int] | None, token_ids: TokenIds
    ) -> None:
        """Note that the next ``counts[i]`` tokens of sequence i are computed, for others to share.

        ``token_ids`` (i32[sum of counts]) holds all of them, packed; without ``counts``, one of
        each. A caller that never says so shares nothing.
        """
        ...

    def keep_state(self, seq_id: int) -> bool:
        """Keep a copy of a sequence's recurrent states, for others that begin alike.

        It must stand at the end of a full block, and takes free bytes only. False: nothing is kept.
        """
        ...

    def retain(self, seq_id: int, retention: Retention) -> int:
        """Keep what is computed of a prompt's beginning for a while, as its client asks.

        A hint: what sequences need goes first. Returns: how many tokens are kept so now, which may
        be fewer than were asked for.
        """
        ...

    def resize(self, capacity_bytes: int, *, for_now: bool = False) -> int:
        """Set the ceiling on committed bytes; the one in force, never below what sequences hold.

        What is only cached goes as far as needed, what sequences hold never does. ``for_now``: the
        capacity stays, so that what does not fit now may fit later. Otherwise it changes too, up to
        what the cache was built for. Between two steps; changes are noted as ever.
        """
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget what is only cached; False, and nothing is done, while a sequence holds memory."""
        ...

    def fork(self, seq_id: int, new_id: int) -> AllocationResult:
        """Begin ``new_id`` as a copy of ``seq_id``, shared until written where blocks are."""
        ...

    def steady_tokens(self, seq_id: int) -> int:
        """Return a length that a sequence reaches with the same outcome token by token and at once.

        Nothing is copied or given back on the way, and what is committed at the end is the same.
        """
        ...

    def trim(self, seq_id: int, num_tokens: int) -> None:
        """Keep only the first ``num_tokens`` tokens.

        The last extension can always be undone. Further back, a window may have given back tokens
        that it would read again, or their places. Raises: ValueError then, and nothing has changed.
        A recurrent state never goes back: the caller undoes nothing that has been computed there.
        A source stays until no token is left.
        """
        ...

    def free(self, seq_id: int, *, forget: bool = False, ended: bool = False) -> None:
        """End a sequence and give back what only it holds.

        ``forget``: no sequence is to find what it has computed, nor the whole blocks it began with.
        ``ended``: its client says that the conversation ends with it, so what it alone used may go.
        """
        ...

    def num_tokens(self, seq_id: int) -> int:
        """Return the tokens that a sequence has room for."""
        ...

    def table(self, group: int, seq_id: int) -> Slots:
        """Return a block table: ids of a sequence's blocks (i64[P]), -1 where a window has passed.

        One entry for the strategies that hold a range: the slot where it begins. In a recurrent
        group the first entry is the slot of its state, in all of them; so is a source's.
        """
        ...

    def slots(self, group: int, seq_id: int, start: int, stop: int) -> Slots:
        """Return the slots (i64[stop - start]) of a sequence's tokens [start, stop)."""
        ...

    def packed(
        self, group: int, seq_ids: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[Slots, Slots]:
        """Pack several sequences' tables (i64[S, P], -1 behind an end) and slots (i64[T])."""
        ...

    def drain(self) -> list[StorageOp]:
        """End the step: its changes, in order. Storage applies them before it is written to.

        Applied one by one they never commit more than the ceiling.
        """
        ...

    def usage(self) -> Usage:
        """Return where the bytes are at this moment."""
        ...

    def census(self, group: int) -> Occupancy:
        """Return what each cell of a group that has pages is at this moment."""
        ...

    def cells(self, group: int, seq_id: int) -> Slots:
        """Return the cells (i64[P]) of a sequence's tokens, in order; -1 behind a window."""
        ...

    def check(self) -> None:
        """Recompute every derived figure. Raises: AssertionError if one is off."""
        ...


class Storage(Protocol):
    """Where the bytes lie. Layers are the model's layer indices."""

    @property
    def memory(self) -> CountedMemory:
        """Bytes reserved, committed, at peak and given back so far."""
        ...

    def apply(self, changes: Iterable[StorageOp]) -> None:
        """Carry out what accounting decided. What is copied may be copied until it is used.

        Raises: MemoryUnavailable if the system refuses pages. The changes before the refused one
        are done, it and those after it are not, in any layer. Accounting is ahead of the pages that
        exist then: the pair is good for ``close`` only.
        """
        ...

    def settle(self) -> None:
        """Wait for all copies: before the replay of a step, which asks for no layer."""
        ...

    def write(self, layer: int, slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
        """Put each token's entry into its slot, quantized where the layer holds codes.

        Shapes: slots i64[T], k [T, K, D], v [T, K, Dv].
        """
        ...

    def gather(self, layer: int, slots: "Tensor") -> tuple["Tensor", "Tensor"]:
        """Copy entries out of any slots; codes come out in float32.

        Shapes: slots i64[*S] → k [K, *S, D], v [K, *S, Dv].
        """
        ...

    def save(self, layer: int, slots: "Tensor") -> "list[Tensor]":
        """Copy entries out as they are stored, codes and scales.

        Shapes: slots i64[T]; ``bytes_per_token`` of the layer for each, in a few tensors.
        """
        ...

    def load(self, layer: int, slots: "Tensor", parts: "list[Tensor]") -> None:
        """Put back what ``save`` gave, or an equal part of each token's: the same bits.

        Shapes: slots i64[T], parts as ``save`` returns them.
        """
        ...

    def view(self, layer: int) -> LayerView:
        """Return what attention sees of a layer."""
        ...

    def states(self, group: int) -> "StateRows":
        """Return the states of a recurrent group's layers, or the sources that a group reads."""
        ...

    def close(self) -> None:
        """Give every page back."""
        ...


# -- blocks that come and go ---------------------------------------------------------------------


@runtime_checkable
class BlockEventSource(Protocol):
    """What accounting does besides where ``CacheConfig.keep_events`` has it note its blocks."""

    def take_events(self) -> list[BlockEvent]:
        """Return what was noted since the last call, in order; it is noted no longer."""
        ...


@runtime_checkable
class ExternalBlocks(Accounting, Protocol):
    """What accounting does besides where its blocks may come from outside, and go there."""

    index: PrefixIndex

    def following_blocks(
        self, seq_id: int, token_ids: TokenIds, hit: PrefixHit
    ) -> list[BlockIdentity]:
        """Name the full blocks of a prompt (i32[n]) behind the hit of an empty sequence."""
        ...

    def computed_blocks(self, seq_id: int) -> list[BlockIdentity]:
        """Name a sequence's full blocks, from its first one on."""
        ...

    def computed_nodes(self, seq_id: int) -> list[int]:
        """List the index's nodes of a sequence's full blocks, from its first one on."""
        ...

    def hottest_nodes(self) -> list[int]:
        """List the index's nodes of cached blocks: those that are evicted last come first.

        Each comes behind its parent.
        """
        ...

    def reserve_blocks(
        self, pin_id: int, token_ids: TokenIds, keys: PrefixKeys = NO_KEYS
    ) -> list[tuple[int, Ids]] | None:
        """Take the blocks of a prefix (i32[n], whole blocks) that are not cached, to be filled.

        Returns: for each group the first column that is to be filled, and the blocks from there
        on: those that a sequence which begins behind the prefix reads. The caller writes whole
        blocks, and calls ``insert_blocks`` or ``free``. Empty if all of it is cached; None if there
        is no room. Nothing has changed then.
        """
        ...

    def insert_blocks(self, pin_id: int, token_ids: TokenIds) -> list[int]:
        """Let reserved blocks, which are filled now, be found: i32[n], as they were reserved.

        They are cached, and ``pin_id`` is free. Returns: the index's nodes of them.
        """
        ...


def found_block_size(accounting: Accounting, otherwise: int) -> int:
    """Return the tokens of a block that other sequences find, or ``otherwise`` where none is found.

    It is the option's, or as much more as fills whole pages.
    """
    return accounting.index.block_size if isinstance(accounting, ExternalBlocks) else otherwise


@runtime_checkable
class BlockBytes(Protocol):
    """What storage does besides where whole blocks can be copied out and in."""

    @property
    def block_order(self) -> str:
        """Return a name, of up to 12 characters, for the order of the bytes in a block."""
        ...

    def block_rows(self, group: int) -> "list[Tensor]":
        """Return where a group's blocks lie, by block id: u8[blocks, bytes] each, any strides.

        One tensor for each layer, or for layers that lie together. What is committed may be read
        and written between two steps.
        """
        ...


def place_of(accounting: Accounting, group: int, seq_id: int) -> int:
    """Find the slot of a sequence's states, or of its source."""
    return int(accounting.table(group, seq_id)[0])
