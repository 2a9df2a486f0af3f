"""A step's numbers where the model computes: token ids, positions, what attention and recurrent
layers are told.

On the CPU they are there already. A GPU gets all of them in one copy, and each batch knows from
then on where its own are (``AttentionBatch.on``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention import AttentionBatch
from quire.devices import Array, to_device
from quire.models.states.state_batch import PlacedStates, StateBatch, placed_states

_PER_BATCH = 4  # arrays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What a model is called with, packed."""

    token_ids: Tensor  # i64[T]
    positions: Tensor  # i64[T], each in its own sequence
    logits_at: Tensor  # i64: the tokens whose logits are wanted, in order
    states: PlacedStates | None = None  # where layers are recurrent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostInputs:
    """The same on the host."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logits_at: npt.NDArray[np.int64]
    states: StateBatch | None = None

    def on(self, device: torch.device, batches: Sequence[AttentionBatch]) -> Inputs:
        """Bring them to a device, with the batches."""
        if device.type == "cpu":
            found = [torch.from_numpy(array) for array in self.arrays]
        else:
            found = to_device([*self.arrays, *batch_arrays(batches)], device)
            place_batches(device, batches, found[len(self.arrays) :])
        return self.placed(found)

    @property
    def arrays(self) -> list[Array]:
        states = [] if self.states is None else self.states.arrays
        return [self.token_ids, self.positions, self.logits_at, *states]

    def placed(self, found: Sequence[Tensor]) -> Inputs:
        """Return them as tensors [n], the first ones of ``found``."""
        token_ids, positions, logits_at, *states = found[: len(self.arrays)]
        return Inputs(
            token_ids=token_ids,
            positions=positions,
            logits_at=logits_at,
            states=None if self.states is None else placed_states(self.states, states),
        )


def batch_arrays(batches: Sequence[AttentionBatch]) -> list[Array]:
    """List what kernels on a device read; the tables come last, for their width differs."""
    return [
        *(array for batch in batches for array in _fixed(batch)),
        *(batch.tables.numpy().astype(np.int32) for batch in batches),
    ]


def place_batches(
    device: torch.device,
    batches: Sequence[AttentionBatch],
    found: Sequence[Tensor],
    *,
    max_context_len: int | None = None,
) -> None:
    """Tell batches where their arrays are: ``found``, as ``batch_arrays`` lists them: [n].

    ``max_context_len``: if it may be longer than now.
    """
    tables = found[(_PER_BATCH - 1) * len(batches) :]
    for number, batch in enumerate(batches):
        starts, context_lens, slots = found[(_PER_BATCH - 1) * number :][: _PER_BATCH - 1]
        batch.place(
            device,
            query_starts=starts,
            context_lens=context_lens,
            tables=tables[number],
            slots=slots,
            max_context_len=max_context_len,
        )


def _fixed(batch: AttentionBatch) -> list[Array]:
    return [
        batch.query_starts.astype(np.int32),
        batch.context_lens.astype(np.int32),
        batch.slots.numpy(),
    ]
