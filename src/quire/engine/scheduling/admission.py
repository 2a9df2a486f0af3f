"""Which sequences may come beside those that run: the headroom to leave, and what they displace.

A newcomer comes if it and all others are expected to find room to the end. If room will be short
some steps from now, it comes if that pays: until then it shares the steps that are taken anyway,
and then a sequence makes room and computes again what it had. Both are seconds, by the measured
costs.

What all of them will need is worked out at most once a plan, and each that comes is added to it:
``company`` has the numbers, ``headroom`` the estimate.
"""

import numpy as np

from quire.engine.scheduling.costs import Costs
from quire.engine.scheduling.headroom import Counts, Curves, Outlook, OutputLengths, Prospects
from quire.engine.scheduling.limits import Limits
from quire.engine.scheduling.policy import Policy
from quire.engine.scheduling.queues import Queues
from quire.engine.sequence import FinishReason, Sequence

# Of what a sequence had that made room. Some is still cached when it comes back, and it makes room
# later than is said with caution: a half is best of what was tried, from 0.3 to 1.
_LOST_PART = 0.5
_MOST_AT_ONCE = 64  # newcomers


class Admission:
    """Asks what is free for how much is to come. The watermark stays free in any case."""

    def __init__(self, limits: Limits, policy: Policy, queues: Queues, costs: Costs) -> None:
        self.company = queues.company
        self._queues, self._costs = queues, costs
        self._lengths = OutputLengths()
        self._limits, self._grade = limits, policy.grade
        # In this plan: what is to come of those that run; of grades up to one, when so many had
        # left; and the bytes that they would take besides if all came to their limits at once.
        self._outlook: Outlook | None = None
        self._outlook_of = (0, 0)
        self._more_at_worst = 0.0
        self._num_expected = 0  # sequences in that outlook
        self._own_part = 1.0  # of what a sequence holds: the rest it shares
        # What newcomers will take besides what each holds when it has come, and that.
        self._asked: dict[Sequence, tuple[Curves, float]] = {}
        self._held_back: list[Sequence] = []  # in this plan …
        self._held_back_bytes = 0  # … what they will need when they come …
        self._held_back_most_bytes = 0  # … and what they can come to hold

    def note_ended(self, num_output_tokens: int, reason: FinishReason) -> None:
        """An output has come to its end, or to its limit."""
        self._lengths.note(num_output_tokens, cut_off=reason == "length")

    def begin_plan(self) -> None:
        self.company.note_step()
        self._outlook = None
        self._asked.clear()
        self._held_back.clear()
        self._held_back_bytes = self._held_back_most_bytes = 0

    def note_held_back(self, newcomer: Sequence, num_found: int) -> None:
        """It keeps its place: those behind it find the room taken that it will need.

        ``num_found``: tokens that it will share then.
        """
        self._held_back.append(newcomer)
        tokens = np.array([num_found, newcomer.num_tokens])
        longest = np.array([self._limits.longest(newcomer.request)])
        shared, alone = self.company.accounting.bytes_alone(tokens, longest).tolist()
        self._held_back_bytes += alone - shared
        self._held_back_most_bytes += self.company.bytes_at_most(newcomer)
        self.note_came(newcomer)

    def note_came(self, newcomer: Sequence) -> None:
        """It is one of those that run, for the newcomers after it in this plan."""
        if self._outlook is not None:
            curves, held_bytes = self._ask(newcomer, self._outlook)
            self._outlook.add(curves)
            self._more_at_worst += self.company.bytes_at_most(newcomer) - held_bytes
            self._num_expected += 1 + len(newcomer.siblings)

    def kept_bytes(self, newcomer: Sequence, spare_bytes: int) -> int:
        """What must stay free beside a newcomer, so that it and its company find room to the end.

        Those who would make room for it are no company. Of what is kept, ``spare_bytes`` are
        elsewhere: in swap space, for those that lack room at the peak.
        """
        least = self._limits.watermark_bytes
        if self._limits.headroom != 0 and self.company:
            least = max(least, self._headroom_bytes(newcomer, spare_bytes))
        return least + self._held_back_bytes

    def could_displace(self, newcomer: Sequence, kept_bytes: int) -> bool:
        """Whether there would be room for a newcomer if all of a worse grade made room."""
        accounting = self.company.accounting
        worse = self.company.prospects(self._grade(newcomer), worse=True)
        freed = int((worse.freed_bytes * worse.count * worse.has_room).sum())
        need = int(self.company.to_come(newcomer).freed_bytes.sum()) + kept_bytes
        return need <= accounting.ceiling.now_bytes - accounting.held_bytes + freed

    def _headroom_bytes(self, newcomer: Sequence, spare_bytes: int) -> int:
        """What all will take besides, at their peak; 0 if there is room for all that they may, or
        if it pays to come all the same.
        """
        company, share = self.company, self._limits.headroom
        own, most = company.bytes_at_most(newcomer), company.accounting.ceiling.now_bytes
        if company.most_bytes + self._held_back_most_bytes + own <= most:
            return 0
        outlook = self._look_ahead(self._grade(newcomer))
        if outlook is None:
            return 0
        # Some share what they hold, and some would make room.
        held_bytes = company.accounting.held_bytes
        if self._more_at_worst + own + held_bytes <= most:
            return 0
        curves, newcomer_bytes = self._ask(newcomer, outlook)
        growth = outlook.need_bytes(curves)
        peak = float(growth.max())
        if share is None:
            share, taken_bytes = 1.0, held_bytes + newcomer_bytes + self._held_back_bytes
            room_bytes = most - taken_bytes + spare_bytes
            if peak > room_bytes:
                # If all found room in the end, it would come. As it is, so many will on average.
                part = min(1.0, most / max(1.0, taken_bytes + peak))
                num_later = part * (self._num_expected + 1 + len(newcomer.siblings))
                num_steps = int(outlook.moments[(growth > room_bytes).argmax()])
                if self._pays(newcomer, num_steps, num_later):
                    return 0
        return int(share * peak) - spare_bytes

    def _pays(self, newcomer: Sequence, num_steps: int, num_later: float) -> bool:
        """Whether to come is worth it, where room will be short in so many steps.

        Until then it has a part in steps that are taken anyway; if it waits, it has one in later
        steps, with ``num_later`` sequences. Then it, or another one like it, makes room, and
        computes again what it had, but for what others hold too.
        """
        prompt_steps = newcomer.num_tokens / self._limits.max_num_batched_tokens
        gained_s = self._costs.prices.step_s * (num_steps - prompt_steps) / num_later
        num_tokens = int(self._own_part * newcomer.num_tokens) + num_steps
        return gained_s > _LOST_PART * self._costs.recompute_s(num_tokens)

    def _ask(self, newcomer: Sequence, outlook: Outlook) -> tuple[Curves, float]:
        """What a newcomer will take besides what it holds when it has come, and that.

        Those behind it are worked out with it, as many as were asked for so far: many cost little
        more than one.
        """
        if newcomer not in self._asked:
            count = min(1 + len(self._asked), _MOST_AT_ONCE)
            several = list(dict.fromkeys([newcomer, *self._queues.next_ones(count)]))
            prospects = self.company.to_come(*several)
            expected, variance = outlook.curves_of_each(prospects)
            leaders = (place for place, each in enumerate(several) if each.siblings)
            for follower, leader in enumerate(leaders, len(several)):
                expected[leader] += expected[follower]
                variance[leader] += variance[follower]
            held_bytes = prospects.held_bytes[: len(several)].tolist()
            for place, each in enumerate(several):
                self._asked[each] = (expected[place], variance[place]), held_bytes[place]
        return self._asked[newcomer]

    def _look_ahead(self, grade: int) -> Outlook | None:
        """Of those that run with this grade or a better one; None: there are none."""
        of = grade, self.company.num_left
        if self._outlook is None or self._outlook_of != of:
            running = self.company.prospects(grade)
            if not len(running.count):
                return None
            self._asked.clear()
            there = running.only(running.has_room)
            self._outlook, self._outlook_of = (
                Outlook(
                    running,
                    self._lengths.survival(there.num_output, there.count.astype(np.float64)),
                    self._bytes_at,
                    horizon=self._limits.max_model_len,
                ),
                of,
            )
            at_worst = self._bytes_at(running.longest[:, None], running)[:, 0] * running.count
            held = (there.held_bytes * there.count).sum()
            self._more_at_worst = float(at_worst.sum() - held)
            self._num_expected = int(running.count.sum())
            alone = float((there.held_bytes * there.count).sum())
            own = float((there.freed_bytes * there.count).sum())
            self._own_part = own / alone if alone else 1.0
            for newcomer in self._held_back:
                self.note_came(newcomer)
        return self._outlook

    def _bytes_at(self, num_tokens: Counts, of: Prospects) -> Counts:
        """Shapes: num_tokens i64[S, T]."""
        tokens = np.minimum(num_tokens, self._limits.max_model_len)
        return self.company.accounting.bytes_alone(tokens, of.longest[:, None])
