"""Drafts without a model: the tokens that followed the last time that the text read like this.

They pay where a text repeats its prompt or itself: summaries, edits, code, tables.

Source: prompt lookup decoding (A. Saxena, 2023), which vLLM calls "ngram". The places are chained
as zlib chains them, so that a token costs one entry however many lengths are compared.
"""

from array import array

from quire.engine.scheduling.plan_builder import Drafts
from quire.engine.sequence import Sequence
from quire.engine.speculation.draft_length import DraftLength

_MOST_PLACES = 16  # compared, the latest first


class Repetitions:
    """The places in one text where its ``shortest``-grams have come before."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        # A place is the index of the token that follows an n-gram; 0 is none.
        self._latest: dict[tuple[int, ...], int] = {}
        # For the place i + shortest: the place before it of the same n-gram.
        self._earlier = array("q")

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens that were appended since the last call."""
        size, latest, earlier = self._shortest, self._latest, self._earlier
        for place in range(len(earlier) + size, len(token_ids)):
            ngram = tuple(token_ids[place - size : place])
            earlier.append(latest.get(ngram, 0))
            latest[ngram] = place

    def continuation(self, token_ids: list[int], num_tokens: int) -> tuple[int, ...]:
        """Return what followed the longest n-gram with which the text ends, or nothing.

        Of equally long ones the latest counts. A text that repeats itself up to its end is taken to
        go on repeating.
        """
        place = self._longest_match(token_ids)
        if not place:
            return ()
        found = token_ids[place : place + num_tokens]
        for index in range(len(found), num_tokens):
            found.append(found[place + index - len(token_ids)])
        return tuple(found)

    def _longest_match(self, token_ids: list[int]) -> int:
        """Return the place of the longest match among the latest ones, or 0."""
        size, end = self._shortest, len(token_ids)
        if end <= size:
            return 0
        place = self._latest.get(tuple(token_ids[-size:]), 0)
        best, best_length = 0, 0
        for _ in range(_MOST_PLACES):
            if not place or best_length == self._longest:
                break
            length, most = size, min(self._longest, place)
            while length < most and token_ids[place - length - 1] == token_ids[end - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._earlier[place - size]
        return best


class PromptLookup:
    """Drafts from each sequence's own tokens."""

    def __init__(self, *, most_tokens: int, shortest: int, longest: int) -> None:
        self._most_tokens, self._shortest, self._longest = most_tokens, shortest, longest
        self._texts: dict[int, tuple[DraftLength, Repetitions]] = {}  # by sequence id

    def propose(self, sequences: list[Sequence]) -> Drafts:
        drafts: dict[int, tuple[int, ...]] = {}
        for sequence in sequences:
            text = self._texts.get(sequence.seq_id)
            if text is None:
                text = DraftLength(self._most_tokens), Repetitions(self._shortest, self._longest)
                self._texts[sequence.seq_id] = text
            pace, repetitions = text
            num_tokens = pace.num_tokens_due(sequence)
            if not num_tokens:
                continue
            repetitions.extend(sequence.token_ids)
            guess = repetitions.continuation(sequence.token_ids, num_tokens)
            if guess:
                pace.note(sequence, guess)
                drafts[sequence.seq_id] = guess
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence.seq_id, None)

    def close(self) -> None:
        """Do nothing: nothing is held."""
