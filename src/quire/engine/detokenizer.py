"""``Detokenizer``: tokens to text, of which only what no later token can change is shown.

A character may span tokens, and a stop string too. Text is held back until it is certain.
"""

from copy import copy
from typing import Any

from quire.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"  # stands for half a character
_LONGEST_CHARACTER = 4  # in tokens of one byte


class Detokenizer:
    """The text of one continuation so far."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.stopped_by: str | None = None  # the stop string that ended the text
        self._tokenizer = tokenizer
        self._params = params
        # The last tokens. Those from _shown on are not in the text yet. Those before are decoded
        # with them, because a token's text (a leading space) can depend on those before it.
        self._ids: list[int] = []
        self._shown = 0
        self._num_half = 0  # characters of those before _shown that are not in the text either
        self._num_tokens = 0
        self._held = ""  # certain characters that may begin a stop string
        self._num_exempt = 0  # of them, those that come too early to complete one

    def copy(self) -> "Detokenizer":
        """Return another that goes on from here."""
        other = copy(self)
        other._ids = list(self._ids)
        return other

    def add(self, token_id: int, *, last: bool = False) -> str:
        """Add a token, and return the text that can be shown; all of it, if it is the last."""
        if self.stopped_by is not None:
            return ""
        self._ids.append(token_id)
        self._num_tokens += 1
        self._take(last=last)
        return self._release(last=last)

    def flush(self) -> str:
        """Return the text that is held back, at an end without a token."""
        if self.stopped_by is not None:
            return ""
        self._take(last=True)
        return self._release(last=True)

    def _take(self, *, last: bool) -> None:
        """Hold the certain text of the tokens that are not shown."""
        after = self._decode(self._ids)
        num_half = 0
        if after.endswith(_REPLACEMENT) and not last:
            if len(self._ids) - self._shown <= _LONGEST_CHARACTER:
                return
            num_half = 1  # more tokens than a character has: only the last character can change
        before = self._decode(self._ids[: self._shown])
        self._held += after[len(before) - self._num_half : len(after) - num_half]
        self._ids = self._ids[self._shown :]
        self._shown, self._num_half = len(self._ids), num_half

    def _release(self, *, last: bool) -> str:
        stops = self._params.stop
        if self._num_tokens <= self._params.min_tokens:
            self._num_exempt = len(self._held)
        ends = [(at + len(stop), at, stop) for stop in stops if (at := self._find(stop)) >= 0]
        if ends:
            # The stop string that is complete first counts.
            end, start, self.stopped_by = min(ends)
            return self._held[: end if self._params.include_stop_str_in_output else start]
        keep = 0 if last else max((self._overlap(stop) for stop in stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return text

    def _find(self, stop: str) -> int:
        """Return the place of a stop string that ends behind the exempt text, or -1."""
        return self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))

    def _overlap(self, stop: str) -> int:
        """Return how many characters of ``stop`` the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._params.skip_special_tokens
        )
        return text
