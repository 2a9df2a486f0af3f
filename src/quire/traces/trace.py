"""A trace of requests: a stream with one clock, whatever the form of the file.

Each iteration reads it anew, from the first request to the last, and holds no more of it than a
line (of conversations: those under way). What a line says is left to the forms, which of them it is
to ``open_trace``.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, final

from quire.errors import ConfigError
from quire.units import ceil_div

# -- request ---------------------------------------------------------------------------------------

# One request of a trace: when it came, how long it was, and which blocks its prompt has.
#
# Texts are never known here. Reading is left to the forms, drawing prompts to ``quire.bench``.


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


# -- trace -----------------------------------------------------------------------------------------


# What a form makes of a file: where it is read (a line's number, or a member's name), and the
# request there, with the file's own clock; or why there is none.
Found: TypeAlias = tuple[int | str, "TraceRequest | BadRow"]
Reading: TypeAlias = Callable[[], AbstractContextManager[Iterator[Found]]]


class BadRow(ValueError):
    """Here is no request; the message says why."""


@dataclass(slots=True, kw_only=True)
class ReadCounts:
    """What an iteration has met so far."""

    num_requests: int = 0
    num_skipped: int = 0  # lines that are no requests, or come before the one above them
    num_without_answer: int = 0  # requests of 0 output tokens
    first_skipped: str = ""  # which, and why


@final
class Trace:
    """Requests in order of time, the first at 0.

    Raises: ConfigError while it is read, naming the source and the line.
    """

    def __init__(
        self,
        source: str | Path,
        form: str,
        reading: Reading,
        *,
        wanted: str = "",
        max_skipped: int | None = 0,
    ) -> None:
        self.source, self.form = source, form
        self._reading, self._wanted, self._max_skipped = reading, wanted, max_skipped
        self.counts = ReadCounts()  # of the last iteration

    def __iter__(self) -> Iterator[TraceRequest]:
        counts = self.counts = ReadCounts()
        first_s: float | None = None
        last_s = 0.0
        with self._reading() as found:
            for where, request in found:
                if isinstance(request, BadRow):
                    self._skip(where, str(request))
                    continue
                if first_s is None:
                    first_s = request.at_s
                if first_s:
                    request = request.later(-first_s)
                if request.at_s < last_s:
                    problem: str | None = (
                        f"the clock runs backwards, by {last_s - request.at_s:g} s"
                    )
                else:
                    problem = request.problem()
                if problem is not None:
                    if not counts.num_requests:
                        first_s = None
                    self._skip(where, problem)
                    continue
                last_s = request.at_s
                counts.num_requests += 1
                counts.num_without_answer += not request.output_tokens
                yield request
        if not counts.num_requests:
            raise ConfigError(f"trace {self.source} has no requests{self._of_skipped()}")

    def _skip(self, where: int | str, why: str) -> None:
        """Raises: ConfigError where no more may be skipped."""
        place = f"line {where:,}" if isinstance(where, int) else where
        self.counts.num_skipped += 1
        self.counts.first_skipped = self.counts.first_skipped or f"{place}: {why}"
        if self._max_skipped is None or self.counts.num_skipped <= self._max_skipped:
            return
        wanted = f" Wanted: {self._wanted}." if self._wanted else ""
        skipped = self._of_skipped() if self._max_skipped else ""
        raise ConfigError(
            f"trace {self.source}, {place}: {why}{skipped}.{wanted} --max-skipped lets so many be "
            f"left out (in quire bench --trace-max-skipped)"
        )

    def _of_skipped(self) -> str:
        counts = self.counts
        if not counts.num_skipped:
            return ""
        return f" ({counts.num_skipped:,} rows are none; the first is {counts.first_skipped})"
