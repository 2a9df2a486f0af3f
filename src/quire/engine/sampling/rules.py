"""What one sequence's parameters and past say about its next token.

All that is kept here follows from the sequence, and catches up with it: a step may be computed
twice, and a sequence that was preempted or is new here gives the same.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.engine.sampling.bans import BadWords, ends_of
from quire.engine.sampling.edits import Edits
from quire.engine.sampling.tally import Tally
from quire.engine.sequence import Sequence
from quire.units import ceil_div

Bits: TypeAlias = NDArray[np.uint8]


class Rules:
    """Of one sequence. ``key`` is of its randomness."""

    def __init__(self, sequence: Sequence, key: int, eos_token_ids: frozenset[int]) -> None:
        request = sequence.request
        params = request.params
        self.key = key
        self.is_greedy = params.temperature == 0 or params.top_k == 1
        self.is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.matcher = request.grammar.matcher() if request.grammar is not None else None
        self.params = params
        self._sequence, self._token_ids = sequence, sequence.token_ids
        self._ends = ends_of(request, eos_token_ids) if params.min_tokens else []
        self._bad_words = BadWords(request.bad_words) if request.bad_words else None
        self._tally: Tally | None = None
        repeats = params.repetition_penalty != 1
        if repeats or params.presence_penalty or params.frequency_penalty:
            self._tally = Tally(sequence, with_prompt=repeats)
        self._num_counted = sequence.num_prompt_tokens
        self.edits_logits = bool(
            self.matcher
            or self._tally
            or self._bad_words
            or self._ends
            or request.suppressed
            or request.suppressed_first
            or params.logit_bias
            or params.allowed_token_ids
        )
        self._allowed: Bits | None = None  # made when the first row is there

    def follows(self, sequence: Sequence) -> bool:
        """Whether it is still the text that is known here, with more at its end at most."""
        return sequence.token_ids is self._token_ids and len(self._token_ids) >= self._num_counted

    def write(self, edits: Edits, row: int, drafts: tuple[int, ...]) -> None:
        """What has to change in row ``row``, and for each draft in one more, if it is reached."""
        self._catch_up()
        allowed = self._allowed_of(edits.vocab_size)
        if self.matcher is not None:
            for place, bits in enumerate(self.matcher.masks(drafts)):
                edits.allow(row + place, bits if allowed is None else bits & allowed)
        elif allowed is not None:
            for place in range(len(drafts) + 1):
                edits.allow(row + place, allowed)
        for place in range(len(drafts) + 1):
            self._write_one(edits, row + place, drafts[:place])
            if self._tally is not None and place < len(drafts):
                self._tally.add(drafts[place])
        if self._tally is not None:
            for draft in reversed(drafts):
                self._tally.take_back(draft)

    def _write_one(self, edits: Edits, row: int, before: tuple[int, ...]) -> None:
        """Of one row; ``before`` are the drafts before it, which the tally counts already."""
        sequence = self._sequence
        request = sequence.request
        is_first = not before and not sequence.num_output_tokens
        if barred := [*request.suppressed, *(request.suppressed_first if is_first else ())]:
            edits.bar(row, barred)
        if self._bad_words is not None:
            first = sequence.num_tokens - self._bad_words.num_before
            recent = sequence.token_ids[max(first, sequence.num_prompt_tokens) :]
            edits.bar(row, self._bad_words.barred([*recent, *before]))
        if self._ends and sequence.num_output_tokens + len(before) < self.params.min_tokens:
            edits.bar(row, self._ends)
        if self.params.logit_bias:
            edits.bias(row, self.params.logit_bias)
        if self._tally is not None:
            edits.penalise(row, self._tally, self.params)

    def _allowed_of(self, vocab_size: int) -> Bits | None:
        """As ``Edits.allow`` takes them, and as many as a grammar's; None: all may come."""
        if self.params.allowed_token_ids is not None and self._allowed is None:
            is_allowed = np.zeros(32 * ceil_div(vocab_size, 32), np.bool)
            is_allowed[list(self.params.allowed_token_ids)] = True
            self._allowed = np.packbits(is_allowed, bitorder="little")
        return self._allowed

    def _catch_up(self) -> None:
        sequence = self._sequence
        new = sequence.token_ids[self._num_counted :]
        self._num_counted = sequence.num_tokens
        if self._tally is not None:
            for token_id in new:
                self._tally.add(token_id)
        if self.matcher is not None:
            self.matcher.consume(new)
