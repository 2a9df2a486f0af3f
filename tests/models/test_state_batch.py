"""A step as recurrent layers see it: batches, places, slots; and with padding."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from quire.models.states.state_batch import StateBatch, make_state_batch, placed_states
from quire.spec import FullAttention, RecurrentState, StateTensor

STATE = RecurrentState(states=(StateTensor(name="scan", shape=(3,), dtype="float32"),))
TOKENS = FullAttention(num_kv_heads=1, head_dim=8, dtype="float32")


class Slots:
    """An accounting's tables: sequence i has slot 10 i in one group, and 10 i + 1 in the other."""

    groups = tuple(SimpleNamespace(spec=spec) for spec in (STATE, TOKENS, STATE))

    def table(self, group: int, seq_id: int) -> Sequence[int]:
        assert group != 1, "tokens have no states"
        return [10 * seq_id + group // 2]


ACCOUNTING: Any = Slots()


def test_who_goes_on_is_one_batch_and_every_other_chunk_is_alone() -> None:
    batch = make_state_batch(ACCOUNTING, [(1, 7, 8), (2, 0, 3), (3, 4, 6), (4, 9, 10), (5, 0, 1)])
    assert [(r.members, r.num_tokens, r.goes_on) for r in batch.rows] == [
        ((1,), 3, False),
        ((2,), 2, True),
        ((4,), 1, False),
        ((0, 3), 1, True),
    ]
    assert batch.places.tolist() == [1, 2, 3, 4, 5, 7, 0, 6]
    assert [slots.tolist() for slots in batch.slots] == [[20, 30, 50, 10, 40], [21, 31, 51, 11, 41]]
    assert not batch.only_goes_on
    assert not batch.is_padded
    placed = placed_states(batch, [torch.from_numpy(array) for array in batch.arrays])
    found = placed.batches()
    assert [rows.places.tolist() for rows in found] == [[[1, 2, 3]], [[4, 5]], [[7]], [[0], [6]]]
    assert [rows.slots[1].all.tolist() for rows in found] == [[21], [31], [51], [11, 41]]
    assert [rows.slots[0].only for rows in found] == [20, 30, 50, None]


def test_a_chunk_by_itself_has_its_own_places() -> None:
    batch = make_state_batch(ACCOUNTING, [(1, 7, 8), (2, 0, 3), (4, 9, 10)])
    placed = placed_states(batch, [torch.from_numpy(array) for array in batch.arrays])
    for number, (places, slot, goes_on) in enumerate(
        [([0], 10, True), ([0, 1, 2], 20, False), ([0], 40, True)]
    ):
        (rows,) = placed.chunk(number).batches()
        assert rows.places.tolist() == [places]
        assert (rows.slots[0].only, rows.goes_on) == (slot, goes_on)


def test_only_steps_of_one_token_that_goes_on_are_padded() -> None:
    batch = make_state_batch(ACCOUNTING, [(1, 7, 8), (4, 9, 10)])
    assert batch.only_goes_on
    padded = batch.padded(4)
    padding = StateBatch.padding(4, 2)
    assert padded.rows == padding.rows
    assert [slots.tolist() for slots in padded.slots] == [[10, 40, -1, -1], [11, 41, -1, -1]]
    assert padded.is_padded
    assert padding.is_padded
    for one, other in zip(padded.arrays, padding.arrays, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype) == ((4,), np.int64)
    for chunks in ([(1, 0, 1)], [(1, 4, 6)], [(1, 4, 5), (2, 0, 1)]):
        assert not make_state_batch(ACCOUNTING, chunks).only_goes_on


def test_padding_alone_has_no_slot_that_the_host_knows() -> None:
    padding = StateBatch.padding(1, 1)
    placed = placed_states(padding, [torch.from_numpy(array) for array in padding.arrays])
    assert placed.batches()[0].slots[0].only is None
