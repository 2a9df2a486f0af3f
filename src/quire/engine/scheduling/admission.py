"""Who may come beside those that run: the headroom a newcomer must leave, and whom it displaces."""

import numpy as np

from quire.engine.scheduling.headroom import Counts, OutputLengths, Prospects, growth_bytes
from quire.engine.scheduling.limits import Limits
from quire.engine.sequence import FinishReason, Sequence
from quire.strategies import Accounting


class Admission:
    """Asks what is free for how much is to come. The watermark stays free in any case."""

    def __init__(self, limits: Limits) -> None:
        self._lengths = OutputLengths()
        self._limits = limits

    def note_ended(self, num_output_tokens: int, reason: FinishReason) -> None:
        """An output has come to its end, or to its limit."""
        self._lengths.note(num_output_tokens, cut_off=reason == "length")

    def kept_bytes(
        self, accounting: Accounting, newcomer: Sequence, company: list[Sequence], spare_bytes: int
    ) -> int:
        """What must stay free beside a newcomer, so that it and its company find room to the end.

        Those who would make room for it are no company. Of what is kept, ``spare_bytes`` are
        elsewhere: in swap space, for those who lack room at the peak.
        """
        if not (self._limits.headroom and company):
            return self._limits.watermark_bytes
        prospects = self._prospects(accounting, [*company, newcomer])
        running = prospects.num_output[prospects.has_room]
        if self._fits_at_worst(accounting, prospects):
            return self._limits.watermark_bytes
        growth = growth_bytes(
            prospects,
            self._lengths.survival(running),
            lambda num_tokens: self._bytes_at(accounting, num_tokens, prospects),
        )
        return max(self._limits.watermark_bytes, growth - spare_bytes)

    def could_displace(
        self, accounting: Accounting, newcomer: Sequence, worse: list[Sequence], kept_bytes: int
    ) -> bool:
        """Whether there would be room for a newcomer if all of these made room."""
        prospects = self._prospects(accounting, [*worse, newcomer])
        there = prospects.has_room
        need = int((prospects.freed_bytes * ~there).sum()) + kept_bytes
        free = accounting.ceiling.now_bytes - accounting.held_bytes
        return need <= free + int((prospects.freed_bytes * there).sum())

    def _fits_at_worst(self, accounting: Accounting, prospects: Prospects) -> bool:
        """Whether there is room even if everybody comes to its limit at the same time."""
        longest = _longest(prospects)[:, None]
        at_worst = self._bytes_at(accounting, longest, prospects)[:, 0]
        more = at_worst.sum() - (prospects.held_bytes * prospects.has_room).sum()
        return int(more) + accounting.held_bytes <= accounting.ceiling.now_bytes

    def _bytes_at(self, accounting: Accounting, num_tokens: Counts, prospects: Prospects) -> Counts:
        """Shapes: num_tokens i64[S, T]."""
        most = _longest(prospects)[:, None]
        return accounting.bytes_alone(np.minimum(num_tokens, self._limits.max_model_len), most)

    def _prospects(self, accounting: Accounting, sequences: list[Sequence]) -> Prospects:
        """The siblings that wait for one's prompt will share it, and then grow as it does."""
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
        num_tokens, num_output, most_output, sure, room_tokens, own = np.array(rows, np.int64).T
        most_output = np.minimum(most_output, self._limits.max_model_len - num_tokens + num_output)
        has_room = (room_tokens > 0) & (own > 0)
        held = accounting.bytes_alone(
            np.where(room_tokens > 0, room_tokens, num_tokens),
            num_tokens + most_output - num_output,
        )
        # What several share is given back by the last of them: on average each has that part.
        alone = int((held * has_room).sum())
        part = min(1.0, accounting.held_bytes / alone) if alone else 1.0
        return Prospects(
            num_tokens=num_tokens,
            num_output=num_output,
            most_output=most_output,
            sure=sure > 0,
            has_room=has_room,
            held_bytes=held,
            freed_bytes=(held * own * np.where(has_room, part, 1.0)).astype(np.int64),
        )


def _longest(prospects: Prospects) -> Counts:
    """i64[S]: tokens at most."""
    return prospects.num_tokens + prospects.most_output - prospects.num_output


def _ends_by_length(sequence: Sequence) -> bool:
    """Whether nothing else ends it."""
    params = sequence.request.params
    return params.ignore_eos and not params.stop and not params.stop_token_ids
