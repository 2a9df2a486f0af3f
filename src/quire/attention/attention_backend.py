"""What attention is given: packed queries, a layer's view, and where each sequence's tokens lie.

The letters of every shape comment in Quire:

    T  tokens of a step, all sequences packed        D   width of a key (Dv: of a value)
    S  sequences of a step                           B   tokens of a block
    H  query heads                                   P   entries of a block table
    K  key-value heads                               N   rows of a layer's view
    G  query heads that share a key-value head       L   tokens that one sequence can read
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.threads import KernelCall
from quire.kv import Accounting, LayerView, MakeWriter
from quire.kv.packed_slots import packed_positions
from quire.spec import AttentionSpec

Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedBatch:
    """A batch's numbers where a device's kernels read them.

    A batch may be padded to a size that was recorded: rows of padding have no context, and tokens
    that are kept nowhere have the slot -1.
    """

    query_starts: Tensor  # i32[S + 1]
    context_lens: Tensor  # i32[S]
    tables: Tensor  # i32[S, P]
    slots: Tensor  # i64[T]
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """One step of the layers of one group.

    Sequence i's chunk is tokens [query_starts[i], query_starts[i + 1]) of the packed queries: the
    last ones of its context_lens[i] tokens.
    """

    query_starts: Counts  # i64[S + 1]
    context_lens: Counts  # i64[S], the chunk included
    tables: Tensor  # i64[S, P], -1 where a window has passed or a table has ended
    slots: Tensor  # i64[T]: where the chunk's own entries go
    block_size: int
    # i64[S]: how many tokens at each sequence's beginning no query reads: rows of a batch may be
    # padded on the left. They end before its chunk. The CPU only.
    padding: Counts | None = None
    # What a backend has computed for the step, for the layers after the first one.
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    def first_read(self, index: int, spec: AttentionSpec, position: int) -> int:
        """Return the first token of sequence ``index`` that a query at ``position`` reads."""
        padding = 0 if self.padding is None else int(self.padding[index])
        return max(padding, spec.live_range(position).start)

    def chunks(self) -> list[tuple[int, int, int]]:
        """List (first query, one past the last, context length in tokens) of each sequence."""
        starts = self.query_starts.tolist()
        return list(zip(starts, starts[1:], self.context_lens.tolist(), strict=False))

    def on(self, device: torch.device) -> PlacedBatch:
        """Return its numbers on a device, copied once for all layers of a step."""
        if device not in self.memo:
            self.place(
                device,
                query_starts=torch.from_numpy(self.query_starts).to(device, torch.int32),
                context_lens=torch.from_numpy(self.context_lens).to(device, torch.int32),
                tables=self.tables.to(device, torch.int32),
                slots=self.slots.to(device),
            )
        placed: PlacedBatch = self.memo[device]
        return placed

    def place(
        self,
        device: torch.device,
        *,
        query_starts: Tensor,  # i32[S + 1]
        context_lens: Tensor,  # i32[S]
        tables: Tensor,  # i32[S, P]
        slots: Tensor,  # i64[T]
        max_context_len: int | None = None,  # if it may become longer than now
    ) -> None:
        """Set where its numbers lie on a device. Raises: ValueError for padded sequences."""
        if self.padding is not None:
            raise ValueError(
                f"padded sequences are read only on the CPU, and these are on {device}"
            )
        longest = int(self.context_lens.max(initial=0))
        self.memo[device] = PlacedBatch(
            query_starts=query_starts,
            context_lens=context_lens,
            tables=tables,
            slots=slots,
            max_query_len=int(np.diff(self.query_starts).max(initial=0)),
            max_context_len=longest if max_context_len is None else max_context_len,
        )

    def slots_on(self, device: torch.device) -> Tensor:
        """Return the slots, i64[T], where torch indexes tensors of a device with them."""
        return self.slots if device.type == "cpu" else self.on(device).slots

    def tables_on(self, device: torch.device) -> Tensor:
        """Return the tables, [S, P], where torch indexes tensors of a device with them."""
        return self.tables if device.type == "cpu" else self.on(device).tables


# Finds a step's words for a call, and the number of threads that make it.
FindWords: TypeAlias = Callable[[AttentionBatch], tuple[tuple[int, ...], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VaryingCall:
    """A kernel's call of which some words, side by side, differ from step to step."""

    call: KernelCall
    words: range  # of its frame: those that differ
    find: FindWords  # the same one for layers of one kind
    kept: object  # what its other words point to


class Plays(Protocol):
    """What a backend does for a layer, as calls that need no Python between two steps."""

    def write(self, view: LayerView, k: Tensor, v: Tensor) -> VaryingCall | None:
        """Make the call that puts k [T, K, D] and v [T, K, Dv] into a step's slots, at most T.

        It is None if the backend has no such call.
        """
        ...

    def attend(
        self,
        q: Tensor,  # [T, H, D]
        out: Tensor,  # [T, H, Dv]
        view: LayerView,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> VaryingCall | None:
        """Make the call of ``AttentionBackend.attend`` into ``out``, for steps of at most T tokens.

        It is None if the backend has no such call.
        """
        ...


class Replays(Protocol):
    """What a backend does for a step that was captured, as a CUDA graph, before it is replayed.

    A backend that has it reads in ``attend`` only what lies on the device, and the sizes in a
    ``PlacedBatch``: those are the same in each replay, and no context is longer.
    """

    def prepare(self, batch: AttentionBatch) -> None:
        """Do the host's part. The padded batch's numbers lie where the captured step's lay."""
        ...


@final
class NoHostPart:
    """The ``Replays`` of kernels that need nothing of the host."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Do nothing."""


class AttentionBackend(Protocol):
    """One way to attend. Implementations differ in speed, not in results beyond rounding.

    A class that derives from this one needs ``name`` and ``attend`` alone.
    """

    name: str
    # Makes what writes a layer's entries for the storage; None: torch writes them.
    make_writer: MakeWriter | None = None
    # The same as calls of kernels that need no Python between two steps; None: it has none.
    plays: Plays | None = None
    # Whether a token's result is the same to the bit, whatever else is in the step and wherever its
    # sequence is cut into chunks.
    batch_invariant: bool = False
    # What it does for steps that are captured as graphs; None: its calls depend on the host.
    replays: Replays | None = None

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """Return why this backend cannot serve layers of ``spec`` on ``device``; None if it can."""
        return None

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, H, D]
        view: LayerView,  # k [N, K, B, D], v [N, K, B, Dv]
        batch: AttentionBatch,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [H]: a logit that takes weight and gives no value
    ) -> Tensor:
        """Return [T, H, Dv]: each query over the tokens of its sequence that its spec lets it read.

        Raises: ValueError for tensors that it has no kernel for.
        """
        ...


def make_batch(
    accounting: Accounting, group: int, chunks: list[tuple[int, int, int]]
) -> AttentionBatch:
    """Make a step's batch for one group; ``chunks`` are (sequence id, start, stop), in tokens."""
    seq_ids, starts, stops = zip(*chunks, strict=True)
    tables, slots = accounting.packed(group, seq_ids, starts, stops)
    query_starts = np.zeros(len(chunks) + 1, np.int64)
    np.subtract(stops, starts, out=query_starts[1:])
    return AttentionBatch(
        query_starts=query_starts.cumsum(),
        context_lens=np.array(stops, np.int64),
        tables=torch.from_numpy(tables),
        slots=torch.from_numpy(slots),
        block_size=accounting.block_size(group),
    )


def packed_tokens(chunks: list[tuple[int, int, int]]) -> Counts:
    """Return the positions, i64[T], of a step's tokens, each in its own sequence."""
    _, starts, stops = zip(*chunks, strict=True)
    return packed_positions(starts, stops)[1]
