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
    in_rows: bool  # a sequence has addresses for itself, and only those in use are shown


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the engine lives."""

    model: str
    strategy: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    chats: bool  # it takes messages; else a prompt, which it goes on with
    rule: str  # of the budget
    bound: str  # what decided it
    ledger: tuple[BudgetTerm, ...]
    groups: tuple[GroupAbout, ...]


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """The picture of a group: each of its cells stands for ``each`` of the group's own."""

    num_cells: int  # of the group, in all its addresses
    num_shown: int  # … of these, in this picture
    each: int
    row_cells: int  # cells of the picture in a row, or 0
    counts: tuple[int, ...]  # of the group's own cells, by letter: as many as there are
    states: str  # a letter a cell
    fills: str  # a digit a cell: tenths of its tokens that are there, rounded up, 9 at most
    holders: tuple[int, ...]  # sequence, how many cells, sequence, …; -1: no sequence


class SequenceFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, by the engine's own id."""

    id: int
    state: State
    tokens: int
    prompt: int  # tokens of it
    computed: int
    cached: int  # tokens of its prompt that it found computed
    max_tokens: int  # the longest it may become
    preemptions: int
    tables: tuple[tuple[int, ...], ...]  # a group: first cell, how many, first cell, …


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

    queries: int = 0  # tokens of prompts that were looked up
    hits: int = 0  # … of them found computed
    generated: int = 0  # tokens
    preemptions: int = 0
    recomputed: int = 0  # tokens


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The cache between two steps."""

    cells: tuple[Cells, ...]  # of each group of ``About``
    sequences: tuple[SequenceFrame, ...]
    num_running: int
    num_waiting: int
    num_more: int  # sequences that are not listed
    memory: Memory  # of a tenant's: what its sequences hold, of the capacity
    counters: Counters | None  # all sequences' together, which a tenant is not told
    elastic: str  # why the ceiling is where it is, if anything was decided
    others_percent: int | None = None  # of the capacity that other tenants' sequences hold
