"""Newcomers whose prefix a step computes anyway: they wait for it, and then share it.

A newcomer is held back while a sequence of the same step fills the block that it would compute
first. So each one that waits has another that gets on, and none waits for one that waits itself.

Source: SGLang's in-batch prefix caching puts such requests behind others, too.
"""

import numpy as np

from quire.engine.plan import Chunk
from quire.engine.scheduling.room import Attempt, Room
from quire.engine.scheduling.step import Step
from quire.engine.sequence import Sequence
from quire.kv import BlockKey

_MOST_IN_VAIN = 3  # steps that one waits without having found more afterwards


class InBatchPrefixes:
    """Which blocks a step fills, and which sequences wait for them."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.waits_for: dict[int, Sequence] = {}  # by id of the waiting one: the one it waits for
        self._filled: dict[BlockKey, Chunk] = {}
        self._num_seen = 0  # chunks of the step

    def begin_plan(self) -> None:
        self.waits_for.clear()
        self._filled.clear()
        self._num_seen = 0

    def holds_back(self, step: Step, newcomer: Sequence, attempt: Attempt) -> int:
        """How many tokens a newcomer will find if it waits for what this step computes.

        0 if it is not to wait. If it is, that is noted.
        """
        if not step.takes_in_text:
            self._num_seen = len(step.chunks)  # of one token each: nothing to see in them
            return 0
        if attempt.hit is None or attempt.num_restored:
            return 0
        self._see(step)
        accounting, num_found = self._room.accounting, attempt.hit.num_tokens
        block = accounting.next_block(newcomer.seq_id, newcomer.token_ids, attempt.hit)
        chunk = self._filled.get(block[0]) if block else None
        if chunk is None:
            return 0
        num_then = self._num_found_after(chunk, attempt)
        if num_then - num_found < step.limits.shared_tokens:
            return 0
        if num_found > newcomer.most_found_tokens:
            newcomer.most_found_tokens, newcomer.num_waits_in_vain = num_found, 0
        elif newcomer.num_waits_in_vain == _MOST_IN_VAIN:
            return 0
        else:
            newcomer.num_waits_in_vain += 1
        self.waits_for[newcomer.seq_id] = chunk.sequence
        return num_then

    def _see(self, step: Step) -> None:
        """The chunks that have come into the step since the last look."""
        accounting = self._room.accounting
        for chunk in step.chunks[self._num_seen :]:
            stop = chunk.stop - len(chunk.drafts)
            if stop - chunk.start > 1:
                block = accounting.next_block(chunk.sequence.seq_id, chunk.sequence.token_ids)
                if block is not None and block[1] <= stop:
                    self._filled.setdefault(block[0], chunk)
        self._num_seen = len(step.chunks)

    def _num_found_after(self, chunk: Chunk, attempt: Attempt) -> int:
        """Tokens that an attempt would find when a chunk's sequence has come to its end, or, where
        states are kept at a few places only, when the chunk is computed.
        """
        other = np.array(chunk.sequence.token_ids[: len(attempt.token_ids) - 1], np.int32)
        different = (attempt.token_ids[: len(other)] != other).nonzero()[0]
        num_common = int(different[0]) if len(different) else len(other)
        if self._room.accounting.state_block_size == 0:
            return num_common
        stop = chunk.stop - len(chunk.drafts)
        keeps = self._room.snapshots.keeps(chunk.sequence, chunk.start, stop)
        return stop if keeps and stop <= num_common else 0
