"""Tokens to text, piece by piece: nothing is shown that a later token could still change.

A character may span tokens, and a stop string may span both; text is held back until it is certain.
"""

from typing import Any

from quire.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"  # what half a character reads as
_LONGEST_CHARACTER = 4  # in tokens, of which each has a byte at least


class Detokenizer:
    """The text of one continuation so far."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.stopped_by: str | None = None  # the stop string that came; the text ends with it
        self._tokenizer = tokenizer
        self._params = params
        # The last tokens. Those from _shown on are not in the text yet; those before it are decoded
        # with them, because how a token reads (a leading space) can depend on those before it.
        self._ids: list[int] = []
        self._shown = 0
        self._num_half = 0  # characters at the end of those before _shown that are not there either
        self._num_tokens = 0
        self._held = ""  # certain as characters, but perhaps the beginning of a stop string
        self._num_exempt = 0  # characters of it that come too early to complete one

    def add(self, token_id: int, *, last: bool = False) -> str:
        """What can be shown now that this token has come; everything, if it is the last."""
        if self.stopped_by is not None:
            return ""
        self._ids.append(token_id)
        self._num_tokens += 1
        self._take(last=last)
        return self._release(last=last)

    def flush(self) -> str:
        """What is still held back, when the end comes without a token."""
        if self.stopped_by is not None:
            return ""
        self._take(last=True)
        return self._release(last=True)

    def _take(self, *, last: bool) -> None:
        """Hold what the tokens that are not shown add, as far as it is certain."""
        after = self._decode(self._ids)
        num_half = 0
        if after.endswith(_REPLACEMENT) and not last:
            if len(self._ids) - self._shown <= _LONGEST_CHARACTER:
                return
            num_half = 1  # so many are no single character: only the last one can still change
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
            # The one that is complete first, however the tokens fall.
            end, start, self.stopped_by = min(ends)
            return self._held[: end if self._params.include_stop_str_in_output else start]
        keep = 0 if last else max((self._overlap(stop) for stop in stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._num_exempt = max(0, self._num_exempt - cut)
        return text

    def _find(self, stop: str) -> int:
        """Where it is in the held text, complete after what is exempt; -1 if it is not."""
        return self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))

    def _overlap(self, stop: str) -> int:
        """How long a beginning of ``stop`` the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._params.skip_special_tokens
        )
        return text
