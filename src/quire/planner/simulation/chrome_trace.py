"""A simulation as a file that chrome://tracing and Perfetto show: requests, and what is held.

It is written as requests end, so that it takes no memory. Times are virtual.
"""

import json
from collections.abc import Sequence as Several
from pathlib import Path
from types import TracebackType
from typing import Any, final

from quire.engine.sequence import Sequence
from quire.errors import ConfigError
from quire.planner.simulation.timeline import FIGURES, Point


@final
class ChromeTrace:
    """A process for each replica; use it in a ``with`` block. Raises: ConfigError."""

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
        """A request's three parts: it waits, takes in its prompt, and generates."""
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

    def held(self, timelines: Several[Several[Point]]) -> None:
        """What each replica held, as counters."""
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
