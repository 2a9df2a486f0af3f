"""Drafts of a smaller model with the same vocabulary, one token a step.

It has a paged cache of its own with an entry for each sequence. Rejected tokens are trimmed, a
sequence that ends or is preempted is dropped, and one without room gets no drafts. All sequences
take each of its steps together.
"""

import logging
import sys
from dataclasses import dataclass

from quire.engine.interfaces import Runner
from quire.engine.kv_cache import KVCache
from quire.engine.scheduling.plan_builder import NO_DRAFTS, Drafts
from quire.engine.sequence import Request, Sequence
from quire.engine.speculation.draft_length import DraftLength, num_alike
from quire.engine.step_plan import Chunk, StepPlan
from quire.errors import MemoryUnavailable
from quire.kv import Fits
from quire.memory import CountedMemory
from quire.sampling_params import SamplingParams

log = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0)
_REST_STEPS = 100  # after a failure


@dataclass(slots=True, eq=False)
class _Follower:
    """A sequence of the draft model, with its drafts as if they were accepted."""

    own: Sequence
    pace: DraftLength
    sure_tokens: int = 0  # the rest is drafted

    def catch_up(self, token_ids: list[int]) -> int:
        """Replace drafts by the tokens that came. Return how many entries are still right."""
        own = self.own.token_ids
        guess, came = tuple(own[self.sure_tokens :]), token_ids[self.sure_tokens :]
        right = self.sure_tokens + num_alike(guess, came)
        own[right:] = token_ids[right:]
        self.sure_tokens = len(own)
        # The last token is computed again, for the logits after it.
        return min(self.own.num_computed_tokens, right, len(own) - 1)


class DraftModel:
    """Drafts greedily. A failure costs drafts, and nothing else."""

    def __init__(
        self,
        kv: KVCache,
        runner: Runner,
        *,
        most_tokens: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
    ) -> None:
        """``vocab_size`` is the smaller one of both models: larger ids are padding."""
        self._kv, self._runner = kv, runner
        self._most_tokens, self._vocab_size = most_tokens, vocab_size
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._followers: dict[int, _Follower] = {}  # by sequence id
        self._rest_steps = 0

    @property
    def memory(self) -> CountedMemory:
        """KV memory that was taken from the system and given back."""
        return self._kv.memory

    def propose(self, sequences: list[Sequence]) -> Drafts:
        for seq_id in self._followers.keys() - {sequence.seq_id for sequence in sequences}:
            self._drop(seq_id)  # preempted
        if self._rest_steps:
            self._rest_steps -= 1
            return NO_DRAFTS
        try:
            return self._guess(sequences)
        except Exception:
            log.warning(
                "no drafts for %d steps: the draft model failed", _REST_STEPS, exc_info=True
            )
            self._begin_anew()
            return NO_DRAFTS

    def forget(self, sequence: Sequence) -> None:
        if sequence.seq_id in self._followers:
            self._drop(sequence.seq_id)
            self._kv.carry_out()

    def close(self) -> None:
        """Give the draft model's KV memory back, and close its runner."""
        self._followers.clear()
        self._kv.close()
        self._runner.close()

    def _begin_anew(self) -> None:
        """Rest for some steps, and then begin with an empty cache, if it can be had."""
        self._followers.clear()
        self._rest_steps = _REST_STEPS
        try:
            self._kv.restart()
        except MemoryUnavailable as error:
            log.warning("no more drafts: %s", error)
            self._rest_steps = sys.maxsize

    def _guess(self, sequences: list[Sequence]) -> Drafts:
        wanted = self._catch_up(sequences)
        drafts: dict[int, tuple[int, ...]] = {}
        due = [sequence for sequence in sequences if sequence.seq_id in wanted]
        while due:
            self._take_step([self._chunk(sequence.seq_id) for sequence in due])
            going_on: list[Sequence] = []
            for sequence in due:
                follower = self._followers[sequence.seq_id]
                guess = tuple(follower.own.token_ids[follower.sure_tokens :])
                if len(guess) < wanted[sequence.seq_id]:
                    going_on.append(sequence)
                else:
                    follower.pace.note(sequence, guess)
                    drafts[sequence.seq_id] = guess
            due = going_on
        return drafts

    def _catch_up(self, sequences: list[Sequence]) -> dict[int, int]:
        """Take room for each sequence's drafts. Return how many each gets, by id.

        A longer text is computed in chunks first, and gets drafts with the last one.
        """
        wanted: dict[int, int] = {}
        parts: list[Chunk] = []
        budget = self._max_num_batched_tokens
        for sequence in sequences:
            follower = self._follower(sequence)
            num_guesses = follower.pace.num_tokens_due(sequence)
            num_guesses = min(num_guesses, self._max_model_len - sequence.num_tokens)
            if num_guesses <= 0 or not budget:
                continue
            own = follower.own
            start = follower.catch_up(sequence.token_ids)
            self._kv.accounting.trim(own.seq_id, start)
            own.num_computed_tokens = start
            stop = min(start + budget, own.num_tokens)
            whole = stop == own.num_tokens
            # Room for all drafts at once: behind a window they could not be trimmed one by one.
            # The last draft is not computed.
            room = stop + num_guesses - 1 if whole else stop
            if not isinstance(self._kv.accounting.try_extend(own.seq_id, room), Fits):
                continue
            budget -= stop - start
            if whole:
                wanted[sequence.seq_id] = num_guesses
            else:
                parts.append(Chunk(sequence=own, start=start, stop=stop, samples=False))
        if parts or wanted:
            self._kv.carry_out()
            self._kv.require()
        if parts:
            self._take_step(parts)
        return wanted

    def _chunk(self, seq_id: int) -> Chunk:
        own = self._followers[seq_id].own
        start, stop = own.num_computed_tokens, own.num_tokens
        return Chunk(sequence=own, start=start, stop=stop, samples=True)

    def _take_step(self, chunks: list[Chunk]) -> None:
        """Compute chunks, and append the likeliest token to each sequence that is at its end."""
        plan = StepPlan.of(chunks)
        logits = self._runner.run(plan)
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.stop
        if plan.draws:
            likeliest = logits[:, : self._vocab_size].argmax(-1).tolist()
            for draw in plan.draws:
                draw.sequence.token_ids.append(likeliest[draw.row])

    def _follower(self, sequence: Sequence) -> _Follower:
        follower = self._followers.get(sequence.seq_id)
        if follower is None:
            request = Request(request_id=0, prompt_token_ids=(), params=_GREEDY)
            own = Sequence(request, seq_id=sequence.seq_id)
            follower = _Follower(own, DraftLength(self._most_tokens))
            self._kv.accounting.add(sequence.seq_id)
            self._followers[sequence.seq_id] = follower
        return follower

    def _drop(self, seq_id: int) -> None:
        del self._followers[seq_id]
        self._kv.accounting.free(seq_id)
