"""One request of a trace: when it came, how long it was, and which blocks its prompt has.

Texts are never known here. Reading is left to the forms, drawing prompts to ``quire.bench``.
"""

from dataclasses import dataclass
from typing import Final

from quire.units import ceil_div

MAX_TOKENS: Final = 2**31 - 1  # of a prompt or an answer; what a table of blocks can number
MAX_ID: Final = 2**63 - 1  # of a hash id: it is kept in 64 bits, with its sign


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A request as it was met.

    Units: ``at_s`` counts from the first request of the trace.
    """

    at_s: float
    input_tokens: int  # at least 1
    output_tokens: int  # 0: nothing came back; an engine that replays it makes one
    # Ids of the prompt's blocks, in order: equal ids after equal ids are the same tokens.
    hash_ids: tuple[int, ...] = ()
    id_tokens: int = 0  # tokens that an id stands for; the last one may stand for fewer
    session: str | int | None = None  # requests that share it are one conversation
    think_s: float | None = None  # from the answer before it in the session, where that is known

    def later(self, seconds: float) -> "TraceRequest":
        """The same at another time."""
        return TraceRequest(
            at_s=self.at_s + seconds,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            hash_ids=self.hash_ids,
            id_tokens=self.id_tokens,
            session=self.session,
            think_s=self.think_s,
        )

    def problem(self) -> str | None:
        """What cannot be in this request; None where all can."""
        if not 0 <= self.at_s < float("inf"):
            return f"a time of {self.at_s} s"
        if not 1 <= self.input_tokens <= MAX_TOKENS:
            return f"a prompt of {self.input_tokens:,} tokens; 1 to {MAX_TOKENS:,} can be"
        if not 0 <= self.output_tokens <= MAX_TOKENS:
            return f"an answer of {self.output_tokens:,} tokens; 0 to {MAX_TOKENS:,} can be"
        if self.think_s is not None and not 0 <= self.think_s < float("inf"):
            return f"a think time of {self.think_s} s"
        if not self.hash_ids:
            return None
        if not 1 <= self.id_tokens <= MAX_TOKENS:
            return f"hash ids of {self.id_tokens:,} tokens; 1 to {MAX_TOKENS:,} can be"
        if len(self.hash_ids) > ceil_div(self.input_tokens, self.id_tokens):
            return (
                f"{len(self.hash_ids):,} hash ids of {self.id_tokens:,} tokens for a prompt of "
                f"{self.input_tokens:,}"
            )
        if min(self.hash_ids) < 0 or max(self.hash_ids) > MAX_ID:
            return f"a hash id that is not from 0 to {MAX_ID}"
        return None
