"""Record memory and requests over time in a bounded number of points, with their means.

The replica adds a note at the end of each step that admits, advances or ends a sequence. Between
two notes sequences only decode, so that their memory changes linearly.
"""

import json
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, final

from quire.engine.sequence import Sequence
from quire.errors import ConfigError

MAX_POINTS = 2_000
FIGURES = ("used_bytes", "committed_bytes", "cached_bytes", "num_running", "num_waiting")


class State(NamedTuple):
    """The state of a replica at one moment, in the order of ``FIGURES``."""

    used_bytes: int  # entries that a later token can still read
    committed_bytes: int
    cached_bytes: int  # held by no sequence, and kept for later prompts
    num_running: int
    num_waiting: int


NOTHING = State(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Means over a span of time, and the peak of committed bytes in it."""

    start_s: float
    stop_s: float
    means: tuple[float, ...]  # in the order of ``FIGURES``
    peak_committed_bytes: int


class _Span:
    """A span of time whose integrals may still grow."""

    __slots__ = ("integrals", "peak", "start_s", "stop_s")

    def __init__(self, start_s: float, stop_s: float, integrals: list[float], peak: int) -> None:
        self.start_s, self.stop_s, self.integrals, self.peak = start_s, stop_s, integrals, peak

    def take(self, other: "_Span") -> None:
        """Merge the span that follows."""
        self.stop_s = other.stop_s
        for place, value in enumerate(other.integrals):
            self.integrals[place] += value
        self.peak = max(self.peak, other.peak)


@final
class Timeline:
    """Notes in order of time; neighbours merge when there are too many points."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._spans: list[_Span] = []
        self._width_s = 0.0  # shorter spans merge with their neighbour
        self._last: tuple[float, ...] = NOTHING
        self._last_s = 0.0
        self.peak = NOTHING  # the state with the most committed bytes
        self.most_running = 0

    def note(self, now_s: float, state: State) -> None:
        """Add a state; ``now_s`` is at or after the last note's time."""
        if (state.committed_bytes, state.used_bytes) > (
            self.peak.committed_bytes,
            self.peak.used_bytes,
        ):
            self.peak = state
        self.most_running = max(self.most_running, state.num_running)
        figures, seconds = state, now_s - self._last_s
        if seconds > 0:
            integrals = [(a + b) / 2 * seconds for a, b in zip(self._last, figures, strict=True)]
            span = _Span(self._last_s, now_s, integrals, state.committed_bytes)
            self._add(span)
        self._last, self._last_s = figures, now_s

    def jump(self, now_s: float) -> None:
        """Keep the last state until this time."""
        if now_s > self._last_s:
            seconds = now_s - self._last_s
            integrals = [value * seconds for value in self._last]
            self._add(_Span(self._last_s, now_s, integrals, int(self._last[1])))
            self._last_s = now_s

    @property
    def points(self) -> list[TimelinePoint]:
        return [
            TimelinePoint(
                span.start_s,
                span.stop_s,
                tuple(value / (span.stop_s - span.start_s) for value in span.integrals),
                span.peak,
            )
            for span in self._spans
        ]

    def integral(self, figure: str) -> float:
        """Return a figure's integral over all time, in its unit times seconds."""
        place = FIGURES.index(figure)
        return sum(span.integrals[place] for span in self._spans)

    @property
    def duration_s(self) -> float:
        return self._last_s

    def _add(self, span: _Span) -> None:
        spans = self._spans
        if spans and spans[-1].stop_s - spans[-1].start_s < self._width_s:
            spans[-1].take(span)
            return
        spans.append(span)
        if len(spans) > self._max_points:
            self._width_s = max(2 * self._width_s, 2 * self._last_s / self._max_points)
            merged: list[_Span] = []
            for each in spans:
                if merged and merged[-1].stop_s - merged[-1].start_s < self._width_s:
                    merged[-1].take(each)
                else:
                    merged.append(each)
            self._spans = merged


# -- chrome trace ----------------------------------------------------------------------------------


@final
class ChromeTrace:
    """Writes a file for chrome://tracing and Perfetto, with a process for each replica.

    Use it in a ``with`` block. It writes each request when it ends, so that it needs no memory.
    Times are virtual. Raises: ConfigError.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--chrome-trace {path} cannot be written: {error}") from error
        self._file.write("[\n")
        self._is_first = True

    def __enter__(self) -> "ChromeTrace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.write("\n]\n")
        self._file.close()

    def ended(self, replica: int, sequence: Sequence) -> None:
        """Write a request's three phases: waiting, its prompt, and generation."""
        end_s = sequence.ended_s if sequence.ended_s is not None else sequence.arrived_s
        moments_s = (sequence.arrived_s, sequence.came_s, sequence.first_token_s, end_s)
        parts = ("waits", "prompt", "generates")
        for place, name in enumerate(parts):
            start_s = moments_s[place]
            if start_s is None:
                break
            stop_s = next((s for s in moments_s[place + 1 :] if s is not None), end_s)
            common = {
                "cat": "request",
                "id": sequence.request.request_id,
                "pid": replica,
                "tid": 0,
                "name": name,
            }
            about = {
                "prompt_tokens": sequence.num_prompt_tokens,
                "cached_tokens": sequence.num_cached_tokens,
                "output_tokens": sequence.num_output_tokens,
                "preemptions": sequence.num_preemptions,
                "finish_reason": sequence.finish_reason,
            }
            self._write({**common, "ph": "b", "ts": start_s * 1e6, "args": about})
            self._write({**common, "ph": "e", "ts": stop_s * 1e6})

    def held(self, timelines: Several[Several[TimelinePoint]]) -> None:
        """Write the memory and requests of each replica as counters."""
        for replica, points in enumerate(timelines):
            for point in points:
                figures = dict(zip(FIGURES, point.means, strict=True))
                for name, parts in (
                    ("bytes", ("used_bytes", "cached_bytes", "committed_bytes")),
                    ("requests", ("num_running", "num_waiting")),
                ):
                    values = {part: figures[part] for part in parts}
                    at = {"ph": "C", "pid": replica, "ts": point.start_s * 1e6}
                    self._write({**at, "name": name, "args": values})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(("" if self._is_first else ",\n") + json.dumps(event))
        self._is_first = False
