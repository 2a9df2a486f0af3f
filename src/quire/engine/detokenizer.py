"""Tokens to text, piece by piece: nothing is shown that a later token could still change.

A character may span tokens, and a stop string may span both; text is held back until it is certain.
"""

from typing import Any


class Detokenizer:
    """The text of one continuation so far."""

    def __init__(self, tokenizer: Any, *, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False  # a stop string has come by; the text ends before it
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        # ids[_shown:] are not in the text yet; ids[_context:_shown] are decoded with them, because
        # how a token reads (a leading space, half a character) can depend on those before it.
        self._context = 0
        self._shown = 0
        self._held = ""  # certain as characters, but perhaps the beginning of a stop string

    def add(self, token_id: int, *, last: bool = False) -> str:
        """What can be shown now that this token has come; everything, if it is the last."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        if last or not after.endswith("\ufffd"):
            self._held += after[len(before) :]
            self._context, self._shown = self._shown, len(self._ids)
        return self._release(last=last)

    def flush(self) -> str:
        """What is still held back, when the end comes without a token."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        self._held += after[len(before) :]
        self._shown = len(self._ids)
        return self._release(last=True)

    def _release(self, *, last: bool) -> str:
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)  # the one that is complete first, however the tokens fall
            text, self._held = self._held[:start], ""
            return text
        keep = 0 if last else max((self._overlap(stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _overlap(self, stop: str) -> int:
        """How long a beginning of ``stop`` the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
