"""Beam search: the likeliest whole continuations instead of the likeliest token each time.

Beams are sequences of the scheduler for which the sampler chooses no token: when it has the
log-probabilities of all of them, the search chooses which beams go on with which tokens. A beam
that goes on twice is forked, so that the cache holds prompt and common beginning once.
"""

import logging
import math
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from typing import Any

from quire.engine.core import Engine
from quire.engine.outputs import Deliver, End, TextDelta
from quire.engine.sequence import FinishReason, Sequence, TokenLogprobs
from quire.engine.statistics import Latencies
from quire.engine.step_plan import TokenOutput
from quire.sampling_params import BeamSearchParams

log = logging.getLogger(__name__)

_DONE = End("stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A continuation that has ended, with its score."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    detail: str = ""

    def delta(self, tokenizer: Any, sequence: Sequence, index: int, choice: int) -> TextDelta:
        """Return all of it as one piece. ``sequence`` is any of the same search."""
        text, reason, detail = "", self.finish_reason, self.detail
        if tokenizer is not None:
            try:
                text = tokenizer.decode(self.token_ids, skip_special_tokens=True)
            except Exception as error:
                log.exception("the text of a beam cannot be decoded")
                reason, detail = "error", f"its text cannot be decoded: {error!r}"
        return TextDelta(
            index=index,
            choice=choice,
            text=text,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=reason,
            detail=detail,
            num_cached_tokens=sequence.num_cached_tokens,
            latencies=Latencies.of(sequence),
            cumulative_logprob=self.cumulative_logprob,
        )


@dataclass(slots=True, eq=False)
class _Beam:
    """An unfinished continuation. ``top`` is set once its next token can be chosen."""

    sequence: Sequence
    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    top: tuple[tuple[int, float], ...] | None = None

    def lost(self, reason: FinishReason, detail: str) -> Hypothesis:
        """Return its text so far, for an end that is not the search's."""
        return Hypothesis(
            token_ids=tuple(token.token_id for token in self.logprobs),
            logprobs=self.logprobs,
            cumulative_logprob=self.cumulative_logprob,
            score=-math.inf,
            finish_reason=reason,
            detail=detail,
        )


@dataclass(frozen=True, slots=True)
class _Candidate:
    beam: _Beam
    token: TokenLogprobs
    cumulative_logprob: float


class BeamSearch:
    """The search for one prompt, over the sequences that were started for it.

    A beam ends with an end-of-text token only if that is among the ``beam_width`` best of the step.
    ``deliver`` gets a piece without text at the first step, and each continuation at the end.
    ``index`` is the prompt's.

    Source: Transformers' ``generate(num_beams=…)``.
    """

    def __init__(
        self,
        engine: Engine,
        params: BeamSearchParams,
        sequences: list[Sequence],
        eos_token_ids: frozenset[int],
        tokenizer: Any,
        index: int,
        deliver: Deliver,
    ) -> None:
        self._engine, self._params, self.sequences = engine, params, sequences
        self._tokenizer, self._index, self._deliver = tokenizer, index, deliver
        self._has_begun = self._is_told = False
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        first = sequences[0]
        longest = engine.scheduler.limits.longest(first.request)
        self._most_tokens = longest - first.num_prompt_tokens
        # All begin with the same tokens, so that one stands for all.
        self._beams = [_Beam(first)]
        self._ended: list[Hypothesis] = []  # the best ones
        self._lost: list[Hypothesis] = []  # those that the search did not end

    @property
    def is_over(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best first, and then those that the search did not end."""
        return [*self._ended, *self._lost][: self._params.beam_width]

    def hear(self, output: TokenOutput) -> None:
        """Note what a step did for a beam, and choose once it did so for all.

        After an error the search ends, and all other sequences begin anew, since the search may
        have stopped half-way. Raises: MemoryUnavailable if they cannot.
        """
        try:
            self._hear(output)
        except Exception as error:
            log.exception("a beam search failed: all sequences are computed again")
            self._engine.begin_anew()
            self._end_all(End("error", f"its search failed: {error!r}"))
        if self.is_over:
            self._tell()
        elif not self._has_begun:
            self._has_begun = True
            self._deliver(TextDelta(index=self._index, text="", token_ids=(), finish_reason=None))

    def end(self, end: End) -> None:
        """End every beam with its text so far. An error of ``deliver`` is logged."""
        self._end_all(end)
        try:
            self._tell()
        except Exception:
            log.exception("the end of a beam search cannot be delivered")

    def _end_all(self, end: End) -> None:
        self._lost += [beam.lost(end.reason, end.detail) for beam in self._beams]
        self._beams = []
        self._finish(end)

    def _tell(self) -> None:
        """Deliver each continuation, once.

        Where there are too few, the missing ones end as the last does, without text.
        """
        if self._is_told:
            return
        self._is_told, first = True, self.sequences[0]
        found = self.hypotheses
        missing = _Beam(first).lost(
            found[-1].finish_reason if found else "abort", found[-1].detail if found else ""
        )
        for choice in range(self._params.num_choices):
            own = found[choice] if choice < len(found) else missing
            self._deliver(own.delta(self._tokenizer, first, self._index, choice))

    def _hear(self, output: TokenOutput) -> None:
        for beam in self._beams:
            if beam.sequence is output.sequence:
                if output.finish_reason is not None:
                    self._lose(beam, output.finish_reason)
                elif beam.sequence.awaits_choice and output.logprobs is not None:
                    beam.top = output.logprobs.top
                break
        if self._beams and all(beam.top is not None for beam in self._beams):
            self._choose()

    def _lose(self, beam: _Beam, reason: FinishReason) -> None:
        """Drop a beam that the search has not ended. While all are alike, another replaces it."""
        self._beams.remove(beam)
        sequence = beam.sequence
        others = [s for s in self.sequences if s.finish_reason is None]
        if not self._beams and not beam.logprobs and others:
            self._beams = [_Beam(others[0])]
            return
        if not self._beams:
            self._finish()
        self._lost.append(beam.lost(reason, sequence.finish_detail))

    def _choose(self) -> None:
        """Choose which beams go on with which tokens, and end others."""
        width = self._params.beam_width
        going_on: list[_Candidate] = []
        places = [s for s in self.sequences if s.finish_reason is None]
        num_tokens = self._beams[0].sequence.num_output_tokens + 1
        for rank, candidate in enumerate(self._candidates()):
            reason = self._end_of(candidate, num_tokens)
            if reason is None:
                if len(going_on) < len(places):
                    going_on.append(candidate)
            elif rank < width:
                self._end(candidate, num_tokens, reason)
        self._ended = sorted(self._ended, key=lambda own: own.score, reverse=True)[:width]
        is_done = self._params.early_stopping is True and len(self._ended) == width
        if going_on and not is_done and self._can_improve(going_on[0], num_tokens):
            self._go_on(going_on, places)
        else:
            self._beams = []
            self._finish()

    def _candidates(self) -> list[_Candidate]:
        """Return the best tokens of all beams, the best first."""
        num_ends = max(1, len(self._eos_token_ids))
        totals = (  # plain numbers: a wide search has thousands in a step
            (beam.cumulative_logprob + logprob, place, rank)
            for place, beam in enumerate(self._beams)
            for rank, (_, logprob) in enumerate(beam.top or ())
        )
        best = nlargest((1 + num_ends) * self._params.beam_width, totals, key=itemgetter(0))
        return [self._candidate(*each) for each in best]

    def _candidate(self, total: float, place: int, rank: int) -> _Candidate:
        beam = self._beams[place]
        assert beam.top is not None
        token_id, logprob = beam.top[rank]
        token = TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank + 1)
        return _Candidate(beam, token, total)

    def _end_of(self, candidate: _Candidate, num_tokens: int) -> FinishReason | None:
        if candidate.token.token_id in self._eos_token_ids:
            return "stop"
        return "length" if num_tokens >= self._most_tokens else None

    def _end(self, candidate: _Candidate, num_tokens: int, reason: FinishReason) -> None:
        beam, total = candidate.beam, candidate.cumulative_logprob
        self._ended.append(
            Hypothesis(
                token_ids=(*beam.sequence.output_token_ids, candidate.token.token_id),
                logprobs=(*beam.logprobs, candidate.token),
                cumulative_logprob=total,
                score=self._score(total, num_tokens),
                finish_reason=reason,
            )
        )

    def _can_improve(self, best: _Candidate, num_tokens: int) -> bool:
        """Return whether the best that goes on could score higher than the worst that has ended.

        Its sum only falls, but with a length penalty its score may rise. The search waits for that
        only if ``early_stopping`` is "never".
        """
        params, length = self._params, num_tokens
        if len(self._ended) < params.beam_width:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._most_tokens
        return self._score(best.cumulative_logprob, length) > self._ended[-1].score

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        score: float = cumulative_logprob / num_tokens**self._params.length_penalty
        return score

    def _go_on(self, candidates: list[_Candidate], places: list[Sequence]) -> None:
        """Let candidates go on. A beam's second one takes the place of a beam without any."""
        scheduler = self._engine.scheduler
        kept = {candidate.beam.sequence for candidate in candidates}
        vacant = [place for place in places if place not in kept]
        used: set[Sequence] = set()
        beams: list[_Beam] = []
        for candidate in candidates:
            place = candidate.beam.sequence
            if place in used:
                place = vacant.pop()
                scheduler.replace(place, candidate.beam.sequence)
            used.add(place)
            logprobs = (*candidate.beam.logprobs, candidate.token)
            beams.append(_Beam(place, candidate.cumulative_logprob, logprobs))
        for beam in beams:
            scheduler.choose(beam.sequence, beam.logprobs[-1].token_id)
        self._beams = beams

    def _finish(self, end: End = _DONE) -> None:
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                self._engine.finish(sequence, end.reason, end.detail)
