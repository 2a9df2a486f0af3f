"""``Swapper`` saves preempted sequences, brings them back, and measures what that costs.

The scheduler decides which sequences are saved (``SwapSpace``). A failure here is logged and costs
a computation; it ends no sequence.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import final

import torch

from quire.engine.kv_cache import KVCache
from quire.engine.scheduling.step_costs import Costs
from quire.engine.scheduling.swap_space import readable_tokens, slots_of
from quire.engine.sequence import Sequence
from quire.engine.step_plan import Chunk, Save
from quire.engine.swap.kv_mover import KVMover, make_mover
from quire.errors import ConfigError

log = logging.getLogger(__name__)

_TRIAL_BYTES = 2**20
_CPU = torch.device("cpu")


@final
class Swapper:
    """Finds the entries to save and to bring back, and notes the seconds."""

    def __init__(self, kv: KVCache, mover: KVMover, costs: Costs) -> None:
        self._kv, self._mover, self._costs = kv, mover, costs
        self._firsts: dict[int, tuple[int, ...]] = {}  # of each sequence: first token, by group
        # The first estimate of what a byte costs.
        mover.try_out(
            _TRIAL_BYTES,
            partial(costs.note_saved, _TRIAL_BYTES),
            partial(costs.note_loaded, _TRIAL_BYTES),
        )

    def save(self, saves: Iterable[Save]) -> list[Sequence]:
        """Copy entries out before storage changes. Return the sequences that were not saved."""
        failed: list[Sequence] = []
        timer = self._mover.timer
        for save in saves:
            begun = timer.begin()
            try:
                self._mover.save(save.sequence.seq_id, save.slots)
            except (OSError, MemoryError, RuntimeError) as error:
                log.warning("sequence %d is not swapped out: %s", save.sequence.seq_id, error)
                failed.append(save.sequence)
                continue
            timer.end(begun, partial(self._costs.note_saved, save.num_bytes))
            stop = save.sequence.num_saved_tokens
            self._firsts[save.sequence.seq_id] = tuple(stop - len(slots) for slots in save.slots)
        return failed

    def load(self, chunk: Chunk) -> bool:
        """Copy entries back to where their sequence has room. Return False if they are lost."""
        seq_id, accounting, timer = chunk.sequence.seq_id, self._kv.accounting, self._mover.timer
        begun = timer.begin()
        wanted = readable_tokens(accounting.groups, chunk.start - chunk.num_restored, chunk.start)
        slots = [slots_of(accounting, number, seq_id, own) for number, own in enumerate(wanted)]
        firsts = self._firsts[seq_id]
        skipped = [own.start - first for own, first in zip(wanted, firsts, strict=True)]
        try:
            size = self._mover.put_back(seq_id, slots, skipped)
        except (OSError, MemoryError, RuntimeError) as error:
            log.warning("sequence %d is lost in swap, and computed again: %s", seq_id, error)
            return False
        if size:
            timer.end(begun, partial(self._costs.note_loaded, size))
        return True

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the saved entries of these sequences."""
        several = list(seq_ids)
        for seq_id in several:
            self._firsts.pop(seq_id, None)
        self._mover.drop(several)

    def close(self) -> None:
        self._mover.close()


def make_swap_store(
    kv: KVCache,
    swap_path: str | None,
    costs: Costs,
    max_model_len: int,
    device: torch.device = _CPU,
    *,
    around: Callable[[KVMover], KVMover] | None = None,
) -> Swapper:
    """Make swap space for a cache on ``device``. ``around`` adds the other ranks to the mover.

    Raises: ConfigError if no file can be made or written in the folder ``swap_path``.
    """
    mover: KVMover = make_mover(kv, swap_path, max_model_len, device)
    try:
        return Swapper(kv, mover if around is None else around(mover), costs)
    except OSError as error:
        mover.close()
        raise ConfigError(f"swap_path={swap_path!r}: {error}") from error
    except BaseException:
        mover.close()
        raise
