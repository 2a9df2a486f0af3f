"""What came of a step: which tokens are in the cache now, and which were appended."""

from collections.abc import Iterable, Mapping

import numpy as np

from quire.engine.scheduling.admission import SlotAllocator
from quire.engine.scheduling.policy import SchedulerLimits
from quire.engine.scheduling.preemption import Preemption
from quire.engine.sequence import Embedding, Sequence
from quire.engine.step_plan import Chunk, Draw, Sampled, TokenOutput

# -- the outcome of a step -------------------------------------------------------------------------


def kept_drafts(draws: Iterable[tuple[Draw, Sampled]]) -> dict[int, int]:
    """How many drafts hold, by the id of each sequence that had some and goes on."""
    return {
        draw.sequence.seq_id: len(result.token_ids) - 1
        for draw, result in draws
        if draw.drafts and not result.error
    }


def mark_computed(
    room: SlotAllocator,
    preemption: Preemption,
    chunks: Iterable[Chunk],
    num_kept: Mapping[int, int],
) -> None:
    """These tokens are computed: full blocks of them may be shared from now on.

    ``num_kept``: how many of a chunk's drafts hold, by sequence id.
    """
    going_on = [chunk for chunk in chunks if chunk.sequence.finish_reason is None]
    if not going_on:
        return
    accounting, counts, tokens = room.accounting, list[int](), list[int]()
    for chunk in going_on:
        sequence, stop = chunk.sequence, chunk.stop
        if chunk.drafts:
            stop += num_kept[sequence.seq_id] - len(chunk.drafts)
            if stop < chunk.stop:
                accounting.trim(sequence.seq_id, stop)
        sequence.num_computed_tokens = stop
        preemption.note_computed(chunk, stop, accounting.groups)
        count = stop - chunk.start + chunk.num_restored
        counts.append(count)
        if count == 1 and not chunk.num_restored:
            tokens.append(sequence.token_ids[chunk.start])
        else:
            tokens += chunk.new_token_ids[:count]
    accounting.mark_computed(
        [chunk.sequence.seq_id for chunk in going_on],
        None if counts.count(1) == len(counts) else counts,
        np.array(tokens, np.int32),
    )
    room.snapshots.keep(accounting, going_on)


def is_embedding(found: Embedding | None) -> bool:
    """Whether it is one, all of finite numbers."""
    return found is not None and bool(np.isfinite(found).all())


def pooled(chunks: Iterable[Chunk]) -> list[TokenOutput]:
    """What ends with the embedding that it now has."""
    return [
        TokenOutput(sequence=chunk.sequence, token_id=None, finish_reason="stop")
        for chunk in chunks
        if chunk.pools and chunk.sequence.finish_reason is None
    ]


def append(sequence: Sequence, result: Sampled, limits: SchedulerLimits) -> list[TokenOutput]:
    """Append what was sampled, as far as the sequence goes on; the last output says if it ends."""
    if sequence.request.chosen_outside:
        sequence.awaits_choice = True
        seen = TokenOutput(
            sequence=sequence, token_id=None, finish_reason=None, logprobs=result.logprobs[0]
        )
        return [seen]
    outputs: list[TokenOutput] = []
    for place, token_id in enumerate(result.token_ids):
        sequence.token_ids.append(token_id)
        reason = limits.finish_reason(sequence, token_id)
        is_text = reason != "stop"
        if reason is None and result.ends and place == len(result.token_ids) - 1:
            reason = "stop"
        outputs.append(
            TokenOutput(
                sequence=sequence,
                token_id=token_id,
                is_text=is_text,
                finish_reason=reason,
                logprobs=result.logprobs[place] if result.logprobs else None,
            )
        )
        if reason is not None:
            break
    return outputs


# -- fault isolation -------------------------------------------------------------------------------

# Sequences that were in a step that failed and left their states of no use.
#
# Which of them is at fault is not known. They begin anew, one at a time in a step, until each has
# come past the tokens at which it failed; one that fails then ends.


class FaultIsolation:
    """Which sequences are computed alone, and up to how many tokens."""

    def __init__(self) -> None:
        self._until: dict[Sequence, int] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._until

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self._until[sequence] = num_tokens

    def acquit(self) -> None:
        """Those that have come so far, or have ended."""
        self._until = {
            sequence: until
            for sequence, until in self._until.items()
            if sequence.finish_reason is None and sequence.num_computed_tokens < until
        }

    def among(self, due: list[Sequence], *, or_all: bool) -> list[Sequence]:
        """Those of the sequences that are suspects; without any, all of them or none."""
        return [s for s in due if s in self._until] or (due if or_all else [])
