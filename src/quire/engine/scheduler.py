"""Which tokens of which sequences the next step computes, and who must wait or make room.

There is no prefill phase and no decode phase: a sequence has tokens and computed tokens, and each
step hands out tokens so that computed catches up. A sequence that has caught up gets its next token
sampled. Room is taken while planning, so a plan can always be carried out.
"""

from collections import deque
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quire.engine.sequence import FinishReason, Request, Sequence
from quire.errors import RequestTooLong
from quire.strategies import Accounting, Fits, Never, NotNow
from quire.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, stop) of one sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool  # the step brings the sequence up to date, so that its next token is due


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass."""

    chunks: tuple[Chunk, ...]

    @property
    def sampling(self) -> list[Sequence]:
        """Whose next token is due, in the order of the rows of logits."""
        return [chunk.sequence for chunk in self.chunks if chunk.samples]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What a step did for one sequence: a token, or the news that it has ended, or both."""

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None


class Scheduler:
    """First come, first served; the youngest makes room and recomputes later."""

    def __init__(
        self,
        accounting: Accounting,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        watermark_bytes: int = 0,
    ) -> None:
        self.num_preemptions = 0
        self._watermark_bytes = watermark_bytes
        self._accounting = accounting
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of arrival
        self._ended: list[Sequence] = []  # while planning: to be reported by update

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def check_request(self, request: Request) -> None:
        """Raises: RequestTooLong for a prompt that can never run.

        It leaves no room for a token in max_model_len, or an empty cache could not hold it.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens >= self._max_model_len:
            raise RequestTooLong(
                f"the prompt has {format_count(num_prompt_tokens)} tokens and the context ends at "
                f"{format_count(self._max_model_len)}, with at least one to generate: shorten the "
                f"prompt or raise max_model_len"
            )
        longest = self._longest(request)
        verdict = self._accounting.could_hold(num_prompt_tokens, max_tokens=longest)
        if isinstance(verdict, Never):
            raise RequestTooLong(
                f"the prompt of {format_count(num_prompt_tokens)} tokens can never run: {verdict}"
            )

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises: RequestTooLong."""
        self.check_request(request)
        sequence = Sequence(request)
        self._announce(sequence)
        self._waiting.append(sequence)
        return sequence

    def plan(self) -> StepPlan:
        """The next step. Its room is already taken; it may be empty if sequences only ended."""
        budget = self._max_num_batched_tokens
        chunks: list[Chunk] = []
        preemptions_before = self.num_preemptions
        index = 0
        while budget and index < len(self._running):
            chunks_due = self._chunks_due(index, budget)
            fitting = self._accounting.try_extend_each(
                [chunk.sequence.seq_id for chunk in chunks_due],
                [chunk.stop for chunk in chunks_due],
            )
            chunks += chunks_due[:fitting]
            budget -= sum(chunk.stop - chunk.start for chunk in chunks_due[:fitting])
            index += fitting
            if fitting == len(chunks_due):
                break
            chunk = self._extend(self._running[index], budget, may_preempt=True)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
                index += 1
            # Otherwise it has left the running ones, and the next has its index now.
        # Room that somebody was just preempted for is not a newcomer's.
        admitting = self.num_preemptions == preemptions_before
        while admitting and budget and self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            chunk = self._extend(sequence, budget, may_preempt=False)
            if chunk is not None:
                self._running.append(self._waiting.popleft())
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
            elif sequence.finish_reason is None:
                break
        return StepPlan(chunks=tuple(chunks))

    def update(self, plan: StepPlan, token_ids: list[int]) -> list[TokenOutput]:
        """Append the sampled tokens (one for each of ``plan.sampling``), free what has ended."""
        self._mark_computed(plan.chunks)
        outputs = [
            TokenOutput(sequence=ended, token_id=None, finish_reason=ended.finish_reason)
            for ended in self._ended
        ]
        self._ended.clear()
        for sequence, token_id in zip(plan.sampling, token_ids, strict=True):
            sequence.token_ids.append(token_id)
            reason = self._finish_reason(sequence, token_id)
            if reason is not None:
                self.finish(sequence, reason)
            outputs.append(TokenOutput(sequence=sequence, token_id=token_id, finish_reason=reason))
        return outputs

    def finish(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """End a sequence, wherever it is, and free what it holds. A second call does nothing."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason, sequence.finish_detail = reason, detail
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._accounting.free(sequence.seq_id)

    def finish_all(self, reason: FinishReason, detail: str = "") -> None:
        """End every sequence; there is nothing left to report."""
        for sequence in [*self._running, *self._waiting]:
            self.finish(sequence, reason, detail)
        self._ended.clear()

    def preempt_youngest(self, *, spare_oldest: bool) -> bool:
        """Take a running sequence's room away between two steps; False if there is none to take.

        With ``spare_oldest`` one goes on, so that somebody always does.
        """
        if len(self._running) <= spare_oldest:
            return False
        # The last one begins anew in one piece, or ends if it is too long for that now.
        self._running[-1].needs_room_at_once = len(self._running) == 1
        self._preempt(self._running[-1])
        return True

    def check(self) -> None:
        """Raises: AssertionError if the queues and the cache disagree."""
        self._accounting.check()
        for sequence in self._running:
            held = self._accounting.num_tokens(sequence.seq_id)
            assert held >= sequence.num_computed_tokens, "a computed token is held nowhere"
        for sequence in self._waiting:
            assert not self._accounting.num_tokens(sequence.seq_id), "a waiting sequence holds room"
        assert len(self._running) <= self._max_num_seqs

    def _chunks_due(self, index: int, budget: int) -> list[Chunk]:
        """What running sequences from ``index`` on have to compute, as far as the budget goes."""
        chunks: list[Chunk] = []
        for sequence in self._running[index:]:
            start = sequence.num_computed_tokens
            stop = min(sequence.num_tokens, start + budget)
            chunks.append(_chunk(sequence, start, stop))
            budget -= stop - start
            if not budget:
                break
        return chunks

    def _mark_computed(self, chunks: tuple[Chunk, ...]) -> None:
        """These tokens are computed: full blocks of them may be shared from now on."""
        if not chunks:
            return
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.stop
        tokens = chain.from_iterable(c.sequence.token_ids[c.start : c.stop] for c in chunks)
        self._accounting.mark_computed(
            [chunk.sequence.seq_id for chunk in chunks],
            [chunk.stop - chunk.start for chunk in chunks],
            np.fromiter(tokens, np.int32),
        )

    def _extend(self, sequence: Sequence, budget: int, *, may_preempt: bool) -> Chunk | None:
        """Take room for the next chunk. None: the sequence waits, was preempted or has ended."""
        hit = None
        if not sequence.num_computed_tokens:
            token_ids = np.array(sequence.token_ids, np.int32)
            hit = self._accounting.match_prefix(sequence.seq_id, token_ids)
        start = hit.num_tokens if hit else sequence.num_computed_tokens
        stop = min(sequence.num_tokens, start + budget)
        # Who comes anew beside others must find room for all that is already there to compute, or
        # the others would soon have to make it; alone it may go as far as it can.
        anew = hit is not None and bool(self._running)
        while True:
            room = sequence.num_tokens if sequence.needs_room_at_once else stop
            verdict = self._accounting.try_extend(
                sequence.seq_id,
                room,
                hit=hit,
                promised_tokens=sequence.num_tokens if anew else 0,
                kept_bytes=self._watermark_bytes if anew else 0,
            )
            if isinstance(verdict, Fits):
                sequence.needs_room_at_once = False
                sequence.num_computed_tokens = start
                if hit and not sequence.num_preemptions:
                    sequence.num_cached_tokens = hit.num_tokens
                return _chunk(sequence, start, stop)
            if self._running in ([], [sequence]) and self._lift_ceiling(verdict):
                continue
            if isinstance(verdict, Never) or not self._running:
                # Nobody will make room. A window that moves in smaller steps holds less at once;
                # what a hit holds may lie scattered over pages, so that less fits than would anew.
                # If nothing helps, that is the end.
                if room > start + 1 and not sequence.needs_room_at_once:
                    stop = start + (stop - start) // 2
                elif hit is not None and start:
                    hit, start, stop = None, 0, min(sequence.num_tokens, budget)
                elif sequence.needs_room_at_once and self._may_begin_again(sequence):
                    sequence.needs_room_at_once = False
                    sequence.began_again_at = sequence.num_tokens
                else:
                    self._end_for_lack_of_room(sequence, room, verdict)
                    return None
            elif not may_preempt:
                return None
            else:
                victim = self._running[-1]
                # Alone and yet without room: growing in place takes more than there is, as a copy
                # into a larger buffer does. Begun anew in one piece it fits, or else never will.
                victim.needs_room_at_once = len(self._running) == 1
                self._preempt(victim)
                if victim is sequence:
                    return None

    def _lift_ceiling(self, verdict: Never | NotNow) -> bool:
        """Who is alone need not wait for the machine: a lowered ceiling gives way to it.

        So somebody always gets on, and nobody ends for a shortage that will pass.
        """
        ceiling = self._accounting.ceiling
        if isinstance(verdict, Never) or ceiling.now_bytes == ceiling.capacity_bytes:
            return False
        lacking = verdict.need_bytes + verdict.kept_bytes - verdict.free_bytes
        if lacking > 0:
            self._accounting.resize(ceiling.now_bytes + lacking, for_now=True)
        return lacking > 0

    def _may_begin_again(self, sequence: Sequence) -> bool:
        """Whether it could come so far in chunks, and has not failed to at this very length."""
        verdict = self._accounting.could_hold(
            sequence.num_tokens, max_tokens=self._longest(sequence.request)
        )
        return isinstance(verdict, Fits) and sequence.began_again_at < sequence.num_tokens

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's room away. It goes to the head of the queue and recomputes."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.num_computed_tokens = 0
        self._running.remove(sequence)
        self._accounting.free(sequence.seq_id)
        self._announce(sequence)
        self._waiting.appendleft(sequence)

    def _announce(self, sequence: Sequence) -> None:
        self._accounting.add(
            sequence.seq_id,
            max_tokens=self._longest(sequence.request),
            keys=sequence.request.keys,
            priority=sequence.request.priority,
        )

    def _longest(self, request: Request) -> int:
        return min(request.max_tokens, self._max_model_len)

    def _end_for_lack_of_room(
        self, sequence: Sequence, num_tokens: int, verdict: Never | NotNow
    ) -> None:
        detail = (
            f"no room for {format_count(num_tokens)} tokens, of "
            f"{format_count(self._longest(sequence.request))} at most: {verdict}"
        )
        self.finish(sequence, "capacity", detail)
        self._ended.append(sequence)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.params
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return "stop"
        if sequence.num_output_tokens >= params.max_tokens:
            return "length"
        if sequence.num_tokens >= self._max_model_len:
            return "length"
        return None


def _chunk(sequence: Sequence, start: int, stop: int) -> Chunk:
    due = stop == sequence.num_tokens
    return Chunk(sequence=sequence, start=start, stop=stop, samples=due)
