"""When a recurrent state is worth a copy that others can begin from.

A state stands for all tokens so far, and the next token overwrites it. So that a prompt that begins
alike need not be computed again, copies are kept at the ends of blocks: at a prompt's last one,
where the next turn of a conversation or another question about the same text begins, and else every
so many tokens that the copies take no more memory than the keys and values between them.
"""

from collections.abc import Iterable

from quire.engine.sequence import Sequence
from quire.engine.step_plan import Chunk
from quire.kv import Accounting
from quire.spec import RecurrentState
from quire.units import align_down, align_up, ceil_div

_MOST_INTERVAL_TOKENS = 4096  # where a token takes few bytes, or none


class StateCheckpoints:
    """Says where chunks end, and has the accounting keep copies there."""

    def __init__(self, accounting: Accounting) -> None:
        self._block_size = accounting.state_block_size
        state_bytes = sum(
            group.bytes_for(1)
            for group in accounting.groups
            if isinstance(group.spec, RecurrentState)
        )
        token_bytes = sum(group.bytes_per_token for group in accounting.groups)
        tokens = ceil_div(state_bytes, token_bytes) if token_bytes else _MOST_INTERVAL_TOKENS
        self._interval = align_up(min(tokens, _MOST_INTERVAL_TOKENS), self._block_size or 1)

    def end(self, start: int, stop: int, num_tokens: int) -> int:
        """Where a chunk that could go on to ``stop`` of a sequence's tokens ends.

        At the end of a block, but for what is left then, and for tokens that come one by one.
        """
        if not self._block_size or stop - start == 1:
            return stop
        boundary = align_down(min(stop, num_tokens - 1), self._block_size)
        return boundary if boundary > start else stop

    def keep(self, accounting: Accounting, chunks: Iterable[Chunk]) -> None:
        """Copies of the states after these chunks, which are computed, where they are worth it."""
        if not self._block_size:
            return
        for chunk in chunks:
            if self.keeps(chunk.sequence, chunk.start, chunk.sequence.num_computed_tokens):
                accounting.keep_state(chunk.sequence.seq_id)

    def keeps(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Whether a copy is worth it after the tokens [start, stop)."""
        if not self._block_size or stop % self._block_size:
            return False
        rest = sequence.num_prompt_tokens - stop
        ends_prompt = 0 < rest <= self._block_size
        return ends_prompt or stop // self._interval > start // self._interval
