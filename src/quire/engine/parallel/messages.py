"""What rank 0 tells the others, and what they answer: one answer to each message.

Numbers travel as they are: block tables, slots, token ids. Sequences, requests and samplers stay
where they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.kv import CacheConfig, StorageOp
from quire.kv.interface import Slots
from quire.memory.residency import Residency
from quire.spec import ModelSpec

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Find the others."""

    rank: int
    num_ranks: int
    store: Path  # a file that all of them can see
    device_type: str  # "cpu", "cuda"
    timeout_s: float  # for each exchange
    num_threads: int | None = None  # to compute with; None: as many as it would


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSaved:
    """Load your part of a model."""

    model: int  # what it is called from now on
    name: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The answer: how much memory the model's device has and has left; None for a CPU."""

    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """No engine needs that model any more."""

    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assemble:
    """Be ready to run a model over a cache."""

    engine: int  # what it is called from now on
    model: int
    spec: ModelSpec  # of a rank, with keys and values as they are kept
    strategy: str
    sizes: CacheConfig
    config: EngineConfig
    residency: Residency = "on-demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefault:
    """Back the capacity, whose addresses are reserved, and keep it from looking idle."""

    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Keep nothing beyond the ceiling."""

    engine: int
    ceiling_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Give back what is kept around the cache: nothing is to do, or memory is short."""

    engine: int
    short: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The answer: a ``MemoryReading`` of where the engine's cache lies."""

    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disassemble:
    """Its engine is closed. Never refused."""

    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeStorage:
    """Reserve what the cache needs."""

    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStorage:
    """Give every page back."""

    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Carry out what accounting decided. The answer: how many bytes are committed now."""

    engine: int
    changes: Sequence[StorageOp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Run the model in that way from now on."""

    engine: int
    way: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Compute what the model says by itself of the tokens that it is tried with."""

    engine: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """One step, as the layers of one group see it: the numbers of an ``AttentionBatch``."""

    query_starts: Ids  # i64[S + 1]
    context_lens: Ids  # i64[S]
    tables: Ids  # i64[S, P]
    slots: Ids  # i64[T]
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One forward pass. The logits are rank 0's."""

    engine: int
    batches: Sequence[GroupBatch]
    token_ids: Ids  # i64[T]
    positions: Ids  # i64[T]
    logits_at: Ids  # i64[S]: the packed tokens whose logits are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSwap:
    """Have a place for saved entries: host memory, or a file in that folder."""

    engine: int
    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEntries:
    """Copy a sequence's entries out: of each group, those in these slots."""

    engine: int
    seq_id: int
    slots: Sequence[Slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBack:
    """Copy them back, into these slots of each group, but for the first ones that were saved."""

    engine: int
    seq_id: int
    slots: Sequence[Slots]
    num_skipped: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSaved:
    """What was saved of these is not needed any more."""

    engine: int
    seq_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Heard:
    """That your part of an exchange has failed: rank 0's has ended too. Not to be answered."""


@dataclass(frozen=True, slots=True)
class Leave:
    """All is done. Not to be answered."""


# All ranks do these together: one that stops in the middle leaves the others waiting.
EXCHANGES = (Join, LoadSaved, Expect, Compute)

# What an engine asks for again and again: of its steps, and of the memory around its cache.
Asked: TypeAlias = (
    MakeStorage | CloseStorage | Apply | Go | Expect | Compute | SaveEntries | PutBack | DropSaved
)
Tended: TypeAlias = Prefault | Follow | Rest | Read
Message: TypeAlias = (
    Join
    | LoadSaved
    | Look
    | Unload
    | Assemble
    | Disassemble
    | OpenSwap
    | Asked
    | Tended
    | Heard
    | Leave
)


@dataclass(frozen=True, slots=True)
class Done:
    """It is done, and this came of it."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """It is not done, or a part of it; ``value`` is what there is all the same."""

    error: Exception
    value: Any = None


Answer: TypeAlias = Done | Failed
