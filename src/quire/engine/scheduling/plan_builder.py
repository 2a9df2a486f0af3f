"""A plan in the making: its chunks, where chunks end, and which sequences are computed alone."""

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

_MOST_INTERVAL_TOKENS = 4096  # where a token takes few bytes, or none


class StateCheckpoints:
    """Ends chunks where a copy of the recurrent state is worth it, and has the copies kept.

    A state stands for all tokens so far, and the next token overwrites it. So that a prompt with
    the same beginning need not be computed again, copies are kept at the ends of blocks: at the
    last one of a prompt, where the next turn of a conversation begins, and at intervals so long
    that the copies take no more memory than the keys and values between them.
    """

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
        """Return where a chunk ends that could go on to ``stop`` of a sequence's tokens.

        It ends at the end of a block, unless no block ends in it or it has one token.
        """
        if not self._block_size or stop - start == 1:
            return stop
        boundary = align_down(min(stop, num_tokens - 1), self._block_size)
        return boundary if boundary > start else stop

    def keep(self, accounting: Accounting, chunks: Iterable[Chunk]) -> None:
        """Keep copies of the states after these computed chunks, where a copy is worth it."""
        if not self._block_size:
            return
        for chunk in chunks:
            if self.keeps(chunk.sequence, chunk.start, chunk.sequence.num_computed_tokens):
                accounting.keep_state(chunk.sequence.seq_id)

    def keeps(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Return whether a copy is worth it after the tokens [start, stop)."""
        if not self._block_size or stop % self._block_size:
            return False
        rest = sequence.num_prompt_tokens - stop
        ends_prompt = 0 < rest <= self._block_size
        return ends_prompt or stop // self._interval > start // self._interval


# -- whole images ----------------------------------------------------------------------------------


def outside_images(sequence: Sequence, start: int, stop: int) -> int:
    """Return where a chunk ends that could end at ``stop``, if it may not end in an image.

    It ends before the image, or goes on to its end where it begins there: past the budget of the
    step, which another sequence would use up again and again.
    """
    for image in sequence.request.keys.images:
        end = image.start + image.num_tokens
        if image.start < stop < end:
            return image.start if start < image.start else end
    return stop


# -- plan builder ----------------------------------------------------------------------------------


Drafts = Mapping[int, tuple[int, ...]]
NO_DRAFTS: Drafts = MappingProxyType({})


@dataclass(slots=True)
class PlanBuilder:
    """Chunks so far, and the tokens that are left. ``drafts``: guesses, by sequence id."""

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
        """Give these chunks, whose room is taken, a place in the plan."""
        self.chunks += chunks
        self.served.update(chunk.sequence.seq_id for chunk in chunks)
        self.budget = max(0, self.budget - sum(chunk.stop - chunk.start for chunk in chunks))
        if self.one_chunk and self.chunks:
            self.budget = 0

    def chunks_due(self, due: list[Sequence]) -> list[Chunk]:
        """Return what these running sequences have to compute, as far as the budget goes."""
        chunks: list[Chunk] = []
        budget, spare, one_chunk = self.budget, 0, self.one_chunk
        if self.drafts:  # drafts take what the certain tokens leave
            spare = budget - sum(s.num_tokens - s.num_computed_tokens for s in due)
        for sequence in due:
            start, last = sequence.num_computed_tokens, len(sequence.token_ids)
            if last == start + 1 and not self.drafts:  # as mostly
                chunks.append(Chunk(sequence=sequence, start=start, stop=last, samples=True))
                budget -= 1
                if not budget or one_chunk:
                    break
                continue
            stop = last
            if last > start + 1:  # a single token always fits
                stop = self.snapshots.end(start, min(last, start + budget), last)
                if self.limits.whole_images:
                    stop = outside_images(sequence, start, stop)
            if stop < last:
                chunks.append(Chunk(sequence=sequence, start=start, stop=stop, samples=False))
                budget = max(0, budget - (stop - start))
                if not budget or one_chunk:
                    break
                continue
            guesses: tuple[int, ...] = ()
            if sequence.seq_id in self.drafts:
                # The last token of a sequence is never computed.
                most = min(spare, self.limits.longest(sequence.request) - stop - 1)
                guesses = self.drafts[sequence.seq_id][: max(0, most)]
                spare -= len(guesses)
                stop += len(guesses)
            chunks.append(
                Chunk(sequence=sequence, start=start, stop=stop, drafts=guesses, samples=True)
            )
            budget = max(0, budget - (stop - start))
            if not budget or one_chunk:
                break
        return chunks

    def withdraw_drafts(self, accounting: Accounting) -> None:
        """Leave the drafts out, and give their room back."""
        self.drafts = NO_DRAFTS
        for place, chunk in enumerate(self.chunks):
            if chunk.drafts:
                stop = chunk.stop - len(chunk.drafts)
                accounting.trim(chunk.sequence.seq_id, stop)
                self.chunks[place] = replace(chunk, stop=stop, drafts=())
                self.budget += len(chunk.drafts)


# -- suspects --------------------------------------------------------------------------------------


class FaultIsolation:
    """Sequences of a step that failed and left their states useless: each is computed alone.

    Which of them is at fault is not known. They begin anew, one at a time in a step, until each has
    come past the tokens at which it failed. A sequence that fails alone ends.
    """

    def __init__(self) -> None:
        self._until: dict[Sequence, int] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._until

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Compute a sequence alone until it has ``num_tokens`` computed."""
        self._until[sequence] = num_tokens

    def acquit(self) -> None:
        """Release the sequences that have come that far, or have ended."""
        self._until = {
            sequence: until
            for sequence, until in self._until.items()
            if sequence.finish_reason is None and sequence.num_computed_tokens < until
        }

    def among(self, due: list[Sequence], *, or_all: bool) -> list[Sequence]:
        """Return the suspects of these sequences; without any, all of them or none."""
        return [s for s in due if s in self._until] or (due if or_all else [])
