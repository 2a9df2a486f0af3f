"""The JSON of the memory page's feed: numbers about memory, and never a word of a prompt.

``About`` is sent once, a ``Frame`` whenever something has changed. A tenant that may not see all
gets a frame of its own sequences alone, and how much others hold, in steps.
"""

from typing import Literal

import msgspec

FEED = "/memory/feed"

# A letter a cell. The first five are ``CellState`` in its order; the last one has no pages.
LETTERS = "ecrhs."

State = Literal["running", "waiting", "preempted"]


class BudgetTerm(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the budget's ledger."""

    label: str
    bytes: int
    source: str


class GroupAbout(msgspec.Struct, frozen=True, kw_only=True):
    """A group of layers that is shown, and how many there are like it."""

    label: str
    cell_tokens: int
    cell_bytes: int
    in_rows: bool  # each sequence has its own addresses; only those in use are shown


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the engine lives."""

    model: str
    strategy: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    chats: bool  # the model takes messages; otherwise it continues a prompt
    rule: str  # of the budget
    bound: str  # what decided it
    ledger: tuple[BudgetTerm, ...]
    groups: tuple[GroupAbout, ...]


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """The picture of a group: each of its cells stands for ``each`` of the group's own."""

    num_cells: int  # in all addresses of the group
    num_shown: int  # … that this picture shows
    each: int
    row_cells: int  # cells of the picture in a row, or 0
    counts: tuple[int, ...]  # how many of the group's cells there are, by letter
    states: str  # one letter for each cell
    fills: str  # one digit for each cell: its fill in tenths, rounded up, at most 9
    holders: tuple[int, ...]  # sequence, how many cells, sequence, …; -1: no sequence


class SequenceFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, by the engine's own id."""

    id: int
    state: State
    tokens: int
    prompt: int  # its tokens
    computed: int
    cached: int  # prompt tokens that the prefix cache had
    max_tokens: int  # the longest that it may become
    preemptions: int
    tables: tuple[tuple[int, ...], ...]  # for each group: first cell, how many, first cell, …


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, as in ``Usage``, and their limits."""

    reserved: int
    committed: int
    used: int
    cached: int
    ceiling: int
    capacity: int


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals so far. Only the difference between two frames has a meaning."""

    queries: int = 0  # prompt tokens that were looked up
    hits: int = 0  # … of them found computed
    generated: int = 0  # tokens
    preemptions: int = 0
    recomputed: int = 0  # tokens


class TierFrame(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier holds, as in ``TierReport``. None: it does not say."""

    name: str
    state: Literal["ok", "suspect", "broken"]
    records: int | None
    used: int | None  # bytes
    capacity: int | None  # bytes
    hits: int  # prompt tokens that it had, so far


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The cache between two steps."""

    cells: tuple[Cells, ...]  # one for each group of ``About``
    sequences: tuple[SequenceFrame, ...]
    num_running: int
    num_waiting: int
    num_more: int  # sequences that are not listed
    memory: Memory  # a tenant sees what its own sequences hold, and the capacity
    counters: Counters | None  # of all sequences, so None for a tenant
    elastic: str  # why the ceiling is where it is, if anything was decided
    others_percent: int | None = None  # share of the capacity that other tenants' sequences hold
    tiers: tuple[TierFrame, ...] = ()  # the nearest first; none for a tenant, since all share them
