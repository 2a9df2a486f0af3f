"""Define a trace: a stream of requests with one clock, for every file format.

Each iteration reads the file anew, and holds only one line of it (of conversations: those that have
begun and not ended). ``trace_formats`` parses lines, and its ``open_trace`` detects the format.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias, final

from quire.errors import ConfigError
from quire.units import ceil_div

MAX_TOKENS: Final = 2**31 - 1  # of a prompt or an answer: block tables have int32 entries
MAX_ID: Final = 2**63 - 1  # of a hash id, which is an int64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A request: its time, its lengths, and the blocks of its prompt. A trace has no texts."""

    at_s: float  # since the first request of the trace
    input_tokens: int  # at least 1
    output_tokens: int  # 0: no answer; an engine that replays it generates one token
    # Ids of the prompt's blocks, in order: equal ids after equal ids are the same tokens.
    hash_ids: tuple[int, ...] = ()
    id_tokens: int = 0  # tokens per id; the last one may have fewer
    session: str | int | None = None  # the conversation of the request
    think_s: float | None = None  # time since the previous answer of the session, if known

    def later(self, seconds: float) -> "TraceRequest":
        """Return the request at a later time, in seconds."""
        return replace(self, at_s=self.at_s + seconds)

    def problem(self) -> str | None:
        """Return what is wrong with the request, or None."""
        if not 0 <= self.at_s < float("inf"):
            return f"a time of {self.at_s} s"
        if not 1 <= self.input_tokens <= MAX_TOKENS:
            return f"a prompt of {self.input_tokens:,} tokens is not from 1 to {MAX_TOKENS:,}"
        if not 0 <= self.output_tokens <= MAX_TOKENS:
            return f"an answer of {self.output_tokens:,} tokens is not from 0 to {MAX_TOKENS:,}"
        if self.think_s is not None and not 0 <= self.think_s < float("inf"):
            return f"a think time of {self.think_s} s"
        if not self.hash_ids:
            return None
        if not 1 <= self.id_tokens <= MAX_TOKENS:
            return f"hash ids of {self.id_tokens:,} tokens are not from 1 to {MAX_TOKENS:,}"
        if len(self.hash_ids) > ceil_div(self.input_tokens, self.id_tokens):
            return (
                f"{len(self.hash_ids):,} hash ids of {self.id_tokens:,} tokens for a prompt of "
                f"{self.input_tokens:,}"
            )
        if min(self.hash_ids) < 0 or max(self.hash_ids) > MAX_ID:
            return f"a hash id that is not from 0 to {MAX_ID}"
        return None


# A place in a file (a line number, or the name of an archive's member), and the request there, with
# the file's own clock; or the reason why there is none.
Found: TypeAlias = tuple[int | str, "TraceRequest | BadRow"]
Reading: TypeAlias = Callable[[], AbstractContextManager[Iterator[Found]]]


class BadRow(ValueError):
    """A row is no request; the message gives the reason."""


@dataclass(slots=True, kw_only=True)
class ReadCounts:
    """Counts of an iteration so far."""

    num_requests: int = 0
    num_skipped: int = 0  # rows that are no requests, or earlier than the row above
    num_without_answer: int = 0  # requests without output tokens
    first_skipped: str = ""  # the place of the first, and the reason


@final
class Trace:
    """Requests in order of time, the first at 0.

    ``wanted`` lists a row's fields, for error messages. Raises: ConfigError during an iteration,
    with the source and the line.
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
        """Count a row that is no request. Raises: ConfigError if that are too many."""
        place = f"line {where:,}" if isinstance(where, int) else where
        self.counts.num_skipped += 1
        self.counts.first_skipped = self.counts.first_skipped or f"{place}: {why}"
        if self._max_skipped is None or self.counts.num_skipped <= self._max_skipped:
            return
        wanted = f" Wanted: {self._wanted}." if self._wanted else ""
        skipped = self._of_skipped() if self._max_skipped else ""
        raise ConfigError(
            f"trace {self.source}, {place}: {why}{skipped}.{wanted} --max-skipped (in quire bench "
            "--trace-max-skipped) skips invalid rows"
        )

    def _of_skipped(self) -> str:
        counts = self.counts
        if not counts.num_skipped:
            return ""
        return f" ({counts.num_skipped:,} invalid rows; the first is {counts.first_skipped})"
