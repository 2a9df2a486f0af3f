"""Tokens that must not come next: the last of a bad word, and what would end a text too early."""

from collections.abc import Iterable

from quire.engine.sequence import Request


class BadWords:
    """Several words as token ids; a word's last token is barred where the rest of it has come."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._always: list[int] = []
        self._after: dict[int, list[tuple[int, ...]]] = {}  # by a word's last token but one
        self.num_before = 0  # tokens that have to be looked at
        for word in words:
            if len(word) == 1:
                self._always.append(word[0])
            else:
                self._after.setdefault(word[-2], []).append(word)
                self.num_before = max(self.num_before, len(word) - 1)

    def barred(self, before: list[int]) -> list[int]:
        """``before``: the last tokens that were generated, ``num_before`` of them if there are."""
        words = self._after.get(before[-1], ()) if before else ()
        return self._always + [
            word[-1] for word in words if tuple(before[1 - len(word) :]) == word[:-1]
        ]


def ends_of(request: Request, eos_token_ids: Iterable[int]) -> list[int]:
    """The tokens that end a request's text."""
    params = request.params
    return sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
