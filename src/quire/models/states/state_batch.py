"""A step, as recurrent layers see it: which chunks go through them together, and whose states.

Tokens that go on from a state are rows of one batch; every other chunk is a batch by itself. What
a step tells the device of that are its tokens' places and, for each group of layers that keep
states, a slot for each row. A step that was captured is padded: rows of padding have the slot -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from quire.devices import Array, to_device
from quire.kv import Accounting
from quire.kv.interface import place_of
from quire.spec import RecurrentState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatchRows:
    """Chunks of one length that are computed as rows of one batch."""

    members: tuple[int, ...]  # which of the step's chunks
    num_tokens: int  # of each
    goes_on: bool  # from states that are there


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlots:
    """Where one group's states of some rows are."""

    all: Tensor  # i64[rows]
    only: int | None  # of a single row, where the host knows it


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRows:
    """Rows of one batch, where the model computes."""

    places: Tensor  # i64[rows, tokens]: in the packed row
    slots: tuple[RowSlots, ...]  # in each group
    goes_on: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateBatch:
    """On the host."""

    rows: tuple[StateBatchRows, ...]
    places: Array  # i64[T]: in the packed row, of one batch after the other
    slots: tuple[Array, ...]  # i64[S] in each group, in the same order

    @classmethod
    def padding(cls, size: int, num_groups: int) -> "StateBatch":
        """Make a step of ``size`` rows of padding, a token each."""
        return cls(
            rows=(StateBatchRows(members=tuple(range(size)), num_tokens=1, goes_on=True),),
            places=np.arange(size),
            slots=(np.full(size, -1),) * num_groups,
        )

    @property
    def only_goes_on(self) -> bool:
        """Whether it is one batch, of tokens that go on from states."""
        return len(self.rows) == 1 and self.rows[0].goes_on and self.rows[0].num_tokens == 1

    @property
    def is_padded(self) -> bool:
        """Whether some of its rows are padding."""
        return any(bool((own < 0).any()) for own in self.slots)

    @property
    def arrays(self) -> list[Array]:
        """What a device is told."""
        return [self.places, *self.slots]

    def padded(self, size: int) -> "StateBatch":
        """Add rows of padding to a step that only goes on."""
        assert self.only_goes_on, "other rows have no padding"
        padding = self.padding(size, len(self.slots))
        room = (0, size - len(self.places))
        slots = tuple(np.pad(own, room, constant_values=-1) for own in self.slots)
        return replace(padding, slots=slots)

    def chunk(self, number: int) -> "StateBatch":
        """Return one of the step's chunks, by itself."""
        order = [member for rows in self.rows for member in rows.members]
        at = order.index(number)
        rows = next(rows for rows in self.rows if number in rows.members)
        return StateBatch(
            rows=(replace(rows, members=(0,)),),
            places=np.arange(rows.num_tokens),
            slots=tuple(own[at : at + 1] for own in self.slots),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedStates:
    """The same where the model computes."""

    batch: StateBatch
    places: Tensor  # i64[T]
    slots: tuple[Tensor, ...]  # i64[S]

    def batches(self) -> list[PlacedRows]:
        """Yield one after the other."""
        several: list[PlacedRows] = []
        first = token = 0
        for rows in self.batch.rows:
            count, num_tokens = len(rows.members), rows.num_tokens
            places = self.places[token : token + count * num_tokens].view(count, num_tokens)
            slots = [
                RowSlots(all=there[first : first + count], only=_only(here[first : first + count]))
                for here, there in zip(self.batch.slots, self.slots, strict=True)
            ]
            several.append(PlacedRows(places=places, slots=tuple(slots), goes_on=rows.goes_on))
            first, token = first + count, token + count * num_tokens
        return several

    def chunk(self, number: int) -> "PlacedStates":
        """Return one of the step's chunks, by itself."""
        one = self.batch.chunk(number)
        return placed_states(one, to_device(one.arrays, self.places.device))


def placed_states(batch: StateBatch, found: Sequence[Tensor]) -> PlacedStates:
    """Return a batch's tensors, each [n], from its arrays where the model computes."""
    places, *slots = found
    return PlacedStates(batch=batch, places=places, slots=tuple(slots))


def make_state_batch(accounting: Accounting, chunks: Sequence[tuple[int, int, int]]) -> StateBatch:
    """Make a step's batch of chunks (sequence id, start, stop)."""
    going_on = [n for n, (_, start, stop) in enumerate(chunks) if start and stop - start == 1]
    others = [n for n, (_, start, stop) in enumerate(chunks) if not start or stop - start > 1]
    rows = [
        StateBatchRows(
            members=(n,), num_tokens=chunks[n][2] - chunks[n][1], goes_on=chunks[n][1] > 0
        )
        for n in others
    ]
    if going_on:
        rows.append(StateBatchRows(members=tuple(going_on), num_tokens=1, goes_on=True))
    ends = np.cumsum([stop - start for _, start, stop in chunks])
    order = [*others, *going_on]
    seq_ids = [chunks[n][0] for n in order]
    return StateBatch(
        rows=tuple(rows),
        places=np.concatenate(
            [np.arange(ends[n] - (chunks[n][2] - chunks[n][1]), ends[n]) for n in others]
            + [ends[going_on] - 1]
        ),
        slots=tuple(
            np.array([place_of(accounting, group, seq_id) for seq_id in seq_ids])
            for group in state_groups(accounting)
        ),
    )


def state_groups(accounting: Accounting) -> list[int]:
    """List the numbers of the groups whose layers keep states."""
    return [
        number
        for number, group in enumerate(accounting.groups)
        if isinstance(group.spec, RecurrentState)
    ]


def _only(slots: Array) -> int | None:
    return int(slots[0]) if len(slots) == 1 and slots[0] >= 0 else None
