"""A plan in the making: what has a place in it, and how many tokens are left to give out."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from quire.engine.scheduling.policy import SchedulerLimits
from quire.engine.sequence import Sequence
from quire.engine.step_plan import Chunk
from quire.kv import Accounting
from quire.spec import RecurrentState
from quire.units import align_down, align_up, ceil_div

# -- state checkpoints -----------------------------------------------------------------------------

# When a recurrent state is worth a copy that others can begin from.
#
# A state stands for all tokens so far, and the next token overwrites it. So that a prompt that
# begins alike need not be computed again, copies are kept at the ends of blocks: at a prompt's
# last one, where the next turn of a conversation or another question about the same text begins,
# and else every so many tokens that the copies take no more memory than the keys and values
# between them.


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


# -- plan builder ----------------------------------------------------------------------------------


Drafts = Mapping[int, tuple[int, ...]]
NO_DRAFTS: Drafts = MappingProxyType({})


@dataclass(slots=True)
class PlanBuilder:
    """``drafts``: guesses at what comes next, by sequence id."""

    limits: SchedulerLimits
    drafts: Drafts
    snapshots: StateCheckpoints  # where chunks end
    budget: int  # tokens that may still be computed
    one_chunk: bool = False  # and no more
    chunks: list[Chunk] = field(default_factory=list)
    served: set[int] = field(default_factory=set)  # sequences that have a chunk

    _all_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._all_tokens = self.budget

    @property
    def takes_in_text(self) -> bool:
        """Whether a sequence computes more than its last token."""
        return self._all_tokens - self.budget > len(self.chunks)

    def add(self, chunks: Several[Chunk]) -> None:
        self.chunks += chunks
        self.served.update(chunk.sequence.seq_id for chunk in chunks)
        self.budget -= sum(chunk.stop - chunk.start for chunk in chunks)
        if self.one_chunk and self.chunks:
            self.budget = 0

    def chunks_due(self, due: list[Sequence]) -> list[Chunk]:
        """What these running sequences have to compute, as far as the budget goes."""
        chunks: list[Chunk] = []
        budget, spare = self.budget, 0
        if self.drafts:  # guesses take what is left when all have what is certain
            spare = budget - sum(s.num_tokens - s.num_computed_tokens for s in due)
        for sequence in due:
            start, last = sequence.num_computed_tokens, sequence.num_tokens
            stop = last
            if last > start + 1:  # one token goes in any case
                stop = self.snapshots.end(start, min(last, start + budget), last)
            if stop < last:
                chunks.append(Chunk(sequence=sequence, start=start, stop=stop, samples=False))
                budget -= stop - start
                if not budget or self.one_chunk:
                    break
                continue
            guesses: tuple[int, ...] = ()
            if sequence.seq_id in self.drafts:
                # The last token that it may have is never computed.
                most = min(spare, self.limits.longest(sequence.request) - stop - 1)
                guesses = self.drafts[sequence.seq_id][: max(0, most)]
                spare -= len(guesses)
                stop += len(guesses)
            chunks.append(
                Chunk(sequence=sequence, start=start, stop=stop, drafts=guesses, samples=True)
            )
            budget -= stop - start
            if not budget or self.one_chunk:
                break
        return chunks

    def withdraw_drafts(self, accounting: Accounting) -> None:
        """Do without guesses, and take back the room for them."""
        self.drafts = NO_DRAFTS
        for place, chunk in enumerate(self.chunks):
            if chunk.drafts:
                stop = chunk.stop - len(chunk.drafts)
                accounting.trim(chunk.sequence.seq_id, stop)
                self.chunks[place] = replace(chunk, stop=stop, drafts=())
                self.budget += len(chunk.drafts)
