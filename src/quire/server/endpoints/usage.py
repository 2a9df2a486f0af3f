"""What a request has cost so far, in tokens."""

from collections.abc import Sequence

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.server.schemas.fields import Usage


class Tally:
    """Counts the pieces of several prompts."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}  # by prompt

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def add(self, index: int, delta: TextDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        self._cached[index] = delta.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details={"cached_tokens": self.cached_tokens},
        )
