"""Who may come beside those that run: the headroom a newcomer must leave, and whom it displaces.

A newcomer for whom all are expected to find room to the end comes. One for whom room will be short
some steps from now comes if that pays: until then it shares the steps that are taken anyway, and
then somebody makes room and computes again what it had. Both are seconds, by the measured costs.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from quire.engine.scheduling.costs import Costs
from quire.engine.scheduling.headroom import (
    Outlook,
    OutputLengths,
    Prospects,
    moments,
    outlooks,
)
from quire.engine.scheduling.limits import Limits
from quire.engine.sequence import FinishReason, Sequence
from quire.strategies import Accounting

# Of what a sequence had that made room. Some is still cached when it comes back, and it makes room
# later than is said with caution: a half is best of what was tried, from 0.3 to 1.
_LOST_PART = 0.5
_TOLD_ANEW = 16  # steps after which what is expected of everybody is worked out again


class Admission:
    """Asks what is free for how much is to come. The watermark stays free in any case.

    It hears who runs, and keeps sums of what is expected of them, by grade: so a newcomer costs as
    much beside one as beside many.
    """

    def __init__(self, limits: Limits, grade: Callable[[Sequence], int], costs: Costs) -> None:
        self._limits, self._grade, self._costs = limits, grade, costs
        self._lengths = OutputLengths()
        self._survival = self._lengths.survival(np.zeros(0, np.int64))
        self._moments = moments(limits.max_model_len)
        self._running: dict[int, Sequence] = {}
        self._unknown: dict[int, Sequence] = {}  # of these, who has no outlook yet
        self._outlooks: dict[int, tuple[int, Outlook]] = {}  # of the others, with their grades
        self._sums: dict[int, Outlook] = {}  # by grade
        self._since = -_TOLD_ANEW  # the step that moments count from
        self._told = 0  # sequences, then
        self._own_part = 1.0  # of what a sequence holds: the rest it shares
        self._other_bytes = 0  # held by nobody who runs

    def note_ended(self, num_output_tokens: int, reason: FinishReason) -> None:
        """An output has come to its end, or to its limit."""
        self._lengths.note(num_output_tokens, cut_off=reason == "length")

    def came(self, sequence: Sequence) -> None:
        """It runs from now on, or goes on without its siblings."""
        self.left(sequence)
        self._running[sequence.seq_id] = self._unknown[sequence.seq_id] = sequence

    def left(self, sequence: Sequence) -> None:
        """It does not run any more. Does nothing if it has not."""
        self._running.pop(sequence.seq_id, None)
        self._unknown.pop(sequence.seq_id, None)
        if known := self._outlooks.pop(sequence.seq_id, None):
            grade, outlook = known
            self._sums[grade].add(outlook, -1)
            if not self._sums[grade].num_sequences:
                del self._sums[grade]

    def all_left(self) -> None:
        """Nobody runs."""
        self._running.clear()
        self._tell_anew()
        self._told = 0

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises: AssertionError if others run than those that it has heard of."""
        assert {s.seq_id for s in running} == set(self._running), "admission has missed somebody"
        told = {*self._outlooks, *self._unknown}
        assert told == set(self._running), "an outlook of who does not run"
        for grade, together in self._sums.items():
            rows = [outlook for of, outlook in self._outlooks.values() if of == grade]
            assert together.num_sequences == sum(row.num_sequences for row in rows)
            assert together.own_bytes == sum(row.own_bytes for row in rows)
            assert np.allclose(together.expected, sum(row.expected for row in rows))

    def kept_bytes(
        self, accounting: Accounting, newcomer: Sequence, *, now: int, spare_bytes: int
    ) -> int:
        """What must stay free beside a newcomer that comes at the step ``now``.

        Those of a worse grade would make room for it and do not count. Of what is kept,
        ``spare_bytes`` are elsewhere: in swap space, for those who lack room at the peak.
        """
        watermark, share = self._limits.watermark_bytes, self._limits.headroom
        if share == 0 or not self._running:
            return watermark
        self._look(accounting, now)
        together, worse = self._company(self._grade(newcomer))
        if not together.num_sequences:
            return watermark
        elapsed = now - self._since
        held_bytes = accounting.held_bytes - self._other_bytes - worse.own_bytes
        # Who is still there was not sure to be: all of them, in place of those that were expected.
        together.scale(max(1.0, held_bytes / max(1.0, float(together.expected[elapsed]))))
        (its,) = self._outlooks_of(accounting, [newcomer], now)
        together.add(its)
        steps, need = self._moments[elapsed:] - elapsed, together.need[elapsed:]
        growth = need - (held_bytes + its.own_bytes)
        taken_bytes = accounting.held_bytes + its.own_bytes
        most_bytes = accounting.ceiling.now_bytes
        if share is None:
            share = 1.0
            short = growth > most_bytes - taken_bytes + spare_bytes
            # If all find room in the end, it comes. If not, so many will on average.
            num_later = together.num_sequences * min(1.0, most_bytes / max(1.0, need.max()))
            if short.any() and self._pays(newcomer, int(steps[short.argmax()]), num_later):
                return watermark
        return max(watermark, int(share * growth.max()) - spare_bytes)

    def could_displace(
        self, accounting: Accounting, newcomer: Sequence, *, now: int, kept_bytes: int
    ) -> bool:
        """Whether there would be room for a newcomer if all of a worse grade made room."""
        self._look(accounting, now)
        _, worse = self._company(self._grade(newcomer))
        (its,) = self._outlooks_of(accounting, [newcomer], now)
        free_bytes = accounting.ceiling.now_bytes - accounting.held_bytes
        return its.own_bytes + kept_bytes <= free_bytes + worse.own_bytes

    def _pays(self, newcomer: Sequence, num_steps: int, num_later: float) -> bool:
        """Whether to come is worth it for one beside whom room will be short in so many steps.

        Until then it has a part in steps that are taken anyway; if it waits, it has one in later
        steps, with ``num_later`` sequences. Then it, or another one like it, makes room, and
        computes again what it had, but for what others hold too.
        """
        prompt_steps = newcomer.num_tokens / self._limits.max_num_batched_tokens
        gained_s = self._costs.prices.step_s * (num_steps - prompt_steps) / num_later
        num_tokens = int(self._own_part * newcomer.num_tokens) + num_steps
        return gained_s > _LOST_PART * self._costs.recompute_s(num_tokens)

    def _company(self, grade: int) -> tuple[Outlook, Outlook]:
        """Together: those that run of up to this grade, and those of a worse one."""
        both = Outlook.of_none(len(self._moments)), Outlook.of_none(len(self._moments))
        for of, outlook in self._sums.items():
            both[of > grade].add(outlook)
        return both

    def _look(self, accounting: Accounting, now: int) -> None:
        """Work out what is not known yet of those that run, or all if that is some steps old."""
        if now - self._since >= _TOLD_ANEW or len(self._running) >= 2 * self._told:
            everybody = self._tell_anew()
            self._since, self._told = now, len(everybody)
            lengths = [s.num_output_tokens for s in everybody]
            self._survival = self._lengths.survival(np.array(lengths, np.int64))
            alone_bytes = int(self._prospects(accounting, everybody).own_bytes.sum())
            # What several share is given back by the last of them: on average each has that part.
            self._own_part = min(1.0, accounting.held_bytes / max(1, alone_bytes))
            self._other_bytes = max(0, accounting.held_bytes - alone_bytes)
        if self._unknown:
            sequences, self._unknown = [*self._unknown.values()], {}
            several = self._outlooks_of(accounting, sequences, now)
            for sequence, outlook in zip(sequences, several, strict=True):
                grade = self._grade(sequence)
                self._outlooks[sequence.seq_id] = grade, outlook
                if grade not in self._sums:
                    self._sums[grade] = Outlook.of_none(len(self._moments))
                self._sums[grade].add(outlook)

    def _tell_anew(self) -> list[Sequence]:
        """Forget what is expected of those that run. Returns: all of them."""
        self._outlooks.clear()
        self._sums.clear()
        self._unknown = dict(self._running)
        return [*self._running.values()]

    def _outlooks_of(
        self, accounting: Accounting, sequences: list[Sequence], now: int
    ) -> list[Outlook]:
        """Of each of these, with the siblings that wait for its prompt."""
        prospects = self._prospects(accounting, sequences)
        own_bytes = (prospects.own_bytes * self._own_part).astype(np.int64)
        longest = prospects.longest[:, None]
        several = outlooks(
            replace(prospects, own_bytes=own_bytes),
            self._survival,
            (self._moments - (now - self._since)).clip(0),
            lambda num_tokens: accounting.bytes_alone(
                np.minimum(num_tokens, self._limits.max_model_len), longest
            ),
        )
        rows = iter(several)
        leaders: list[Outlook] = []
        for sequence in sequences:
            leaders.append(next(rows))
            for _ in sequence.siblings:
                leaders[-1].add(next(rows))
        return leaders

    def _prospects(self, accounting: Accounting, sequences: list[Sequence]) -> Prospects:
        """As if nothing were shared, but for the prompt that siblings wait for.

        They will share it, and then grow as its leader does.
        """
        rows = [
            (
                sequence.num_tokens,
                sequence.num_output_tokens,
                sequence.request.params.max_tokens,
                _ends_by_length(sequence),
                accounting.num_tokens(sequence.seq_id),
                own,
            )
            for sequence in sequences
            for own in [True] + [False] * len(sequence.siblings)
        ]
        num_tokens, num_output, most_output, sure, room_tokens, own = (
            np.array(rows, np.int64).reshape(-1, 6).T
        )
        most_output = np.minimum(most_output, self._limits.max_model_len - num_tokens + num_output)
        held_bytes = accounting.bytes_alone(
            np.where((room_tokens > 0) & (own > 0), room_tokens, num_tokens),
            num_tokens + most_output - num_output,
        )
        return Prospects(
            num_tokens=num_tokens,
            num_output=num_output,
            most_output=most_output,
            sure=sure > 0,
            held_bytes=held_bytes,
            own_bytes=held_bytes * own,
        )


def _ends_by_length(sequence: Sequence) -> bool:
    """Whether nothing else ends it."""
    params = sequence.request.params
    return params.ignore_eos and not params.stop and not params.stop_token_ids
