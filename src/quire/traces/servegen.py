"""Generate a trace from ServeGen's clients, each with rates, burstiness and lengths.

Source: alibaba/ServeGen (NSDI 2026). A client has two files. ``chunk-N-trace.csv`` has a line for
each window of time (ten minutes in the published files): its start in seconds, requests per second,
the coefficient of variation of the gaps, and the distribution fitted to them with its two
parameters (``Gamma`` or ``Weibull``: shape, scale), or no name without requests.
``chunk-N-dataset.json`` has the frequencies of lengths in longer windows, as a dictionary in
Python's syntax: ``{"0": {"input_tokens": "{17: 0.25, 80: 0.75}", "output_tokens": …}}``.

A window has as many requests as its rate gives, with gaps in proportion to the fitted distribution.
Prompt and answer lengths are drawn independently, since the files do not pair them. Prompts share
no prefix. The format is implemented from ServeGen's own reader, without a published file to test.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge
from math import inf
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError
from quire.traces.trace import Found, TraceRequest
from quire.traces.trace_files import OnProgress

_TRACE = re.compile(r"chunk-(\d+)-trace\.csv")
_MOST_IN_A_WINDOW: Final = 10**7
_WINDOW_S: Final = 600.0  # length of a file's only window


def has_clients(folder: Path) -> bool:
    """Return whether a folder has ServeGen's files."""
    return any(_TRACE.fullmatch(file.name) for file in folder.iterdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    begins_s: float
    rate: float  # requests per second; 0: none
    pattern: str
    shape: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """The lengths of one window in ascending order, with their cumulative shares."""

    tokens: npt.NDArray[np.int64]
    cumulative: npt.NDArray[np.float64]

    def draw(self, rng: np.random.Generator) -> int:
        at = np.searchsorted(self.cumulative, rng.random() * self.cumulative[-1], side="right")
        return int(self.tokens[min(int(at), len(self.tokens) - 1)])


@final
class ServeGenClients:
    """The clients of a folder, merged by time. All their lengths are in memory at once."""

    def __init__(self, folder: Path, *, seed: int, on_progress: OnProgress | None = None) -> None:
        self._folder, self._seed, self._on_progress = folder, seed, on_progress

    @contextmanager
    def reading(self) -> Iterator[Iterator[Found]]:
        """Open the clients; yields their requests. Raises: ConfigError."""
        yield ((request.session or "", request) for request in self._requests())

    def _requests(self) -> Iterator[TraceRequest]:
        files = sorted(
            (int(match[1]), file)
            for file in self._folder.iterdir()
            if (match := _TRACE.fullmatch(file.name))
        )
        clients = []
        for done, (number, file) in enumerate(files, 1):
            dataset = file.with_name(f"chunk-{number}-dataset.json")
            clients.append(self._client(number, _windows(file), _datasets(dataset)))
            if self._on_progress is not None:
                self._on_progress(done, len(files))
        return merge(*clients, key=lambda request: request.at_s)

    def _client(
        self, number: int, windows: list[_Window], lengths: dict[float, dict[str, _Lengths]]
    ) -> Iterator[TraceRequest]:
        rng = np.random.default_rng((self._seed, number))
        begins = sorted(lengths)
        for window, following in zip(windows, [*windows[1:], None], strict=True):
            known = [each for each in begins if each <= window.begins_s]
            if not window.rate or not known:
                continue
            of_window = lengths[known[-1]]
            if following is None:
                span_s = window.begins_s - windows[-2].begins_s if len(windows) > 1 else _WINDOW_S
            else:
                span_s = following.begins_s - window.begins_s
            if window.rate * span_s > _MOST_IN_A_WINDOW:
                raise ConfigError(
                    f"trace {self._folder}, chunk-{number}-trace.csv: {window.rate:g} requests per "
                    f"second for {span_s:g} s are more than {_MOST_IN_A_WINDOW:,}"
                )
            for at_s in _arrivals(window, span_s, rng):
                yield TraceRequest(
                    at_s=at_s,
                    input_tokens=max(1, of_window["input_tokens"].draw(rng)),
                    output_tokens=of_window["output_tokens"].draw(rng),
                    session=f"client {number}",
                )


def _arrivals(window: _Window, span_s: float, rng: np.random.Generator) -> list[float]:
    """Draw arrival times; a fractional number of requests is rounded at random."""
    expected = window.rate * span_s
    count = int(expected) + int(rng.random() < expected % 1)
    if window.pattern == "Gamma":
        gaps = rng.gamma(window.shape, size=count + 1)
    elif window.pattern == "Weibull":
        gaps = rng.weibull(window.shape, size=count + 1)
    else:
        gaps = rng.exponential(size=count + 1)
    times = gaps.cumsum()
    if times[-1] > 0:
        times *= span_s / times[-1]
    found: list[float] = (window.begins_s + times[:count]).tolist()
    return found


def _windows(file: Path) -> list[_Window]:
    """Read the windows of a client. Raises: ConfigError with the line."""
    windows: list[_Window] = []
    for number, line in enumerate(_text(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            begins, rate, _, pattern, shape, _ = line.strip().split(",")
            window = _Window(
                begins_s=float(begins), rate=float(rate), pattern=pattern, shape=float(shape)
            )
            if not 0 <= window.begins_s < inf or not 0 <= window.rate < inf:
                raise ValueError(f"a rate of {rate} from {begins} s on")
            if window.rate and pattern not in ("Gamma", "Weibull", "Poisson", "Exponential"):
                raise ValueError(f"gaps of a distribution {pattern!r}; Gamma or Weibull is known")
            if window.rate and not 0 < window.shape < inf:
                raise ValueError(f"a shape of {shape}")
            if windows and window.begins_s <= windows[-1].begins_s:
                raise ValueError("the clock runs backwards")
        except ValueError as error:
            raise ConfigError(
                f"trace {file}, line {number:,}: {error}. Wanted: begin, rate, cv, Gamma or "
                f"Weibull, shape, scale"
            ) from error
        windows.append(window)
    return windows


def _datasets(file: Path) -> dict[float, dict[str, _Lengths]]:
    """Read a client's lengths by the start of a window. Raises: ConfigError."""
    found = {}
    try:
        for begins, fields in json.loads(_text(file)).items():
            several = {name: _lengths(fields[name]) for name in ("input_tokens", "output_tokens")}
            if all(len(each.tokens) for each in several.values()):
                found[float(begins)] = several
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"trace {file}: {what}. Wanted: windows with input_tokens and output_tokens, each "
            f"lengths and their shares"
        ) from error
    return found


def _lengths(shares: Any) -> _Lengths:
    """Parse a distribution of lengths. Raises: ValueError."""
    text = str(shares).strip()
    if not text.startswith("{") or not text.endswith("}"):
        raise ValueError(f"{text[:40]!r} is not a dictionary of lengths and shares")
    # Parsed by hand: ast.literal_eval would build a tree of a hundred thousand lengths.
    several = (pair.split(":") for pair in text[1:-1].split(",") if pair.strip())
    pairs = sorted((int(length.strip(" '")), float(share)) for length, share in several)
    tokens = np.array([length for length, _ in pairs], np.int64)
    weights = np.array([share for _, share in pairs], np.float64)
    if len(pairs) and (tokens[0] < 0 or weights.min() < 0 or not 0 < weights.sum() < inf):
        raise ValueError("lengths and shares must be at least 0, and some share above 0")
    return _Lengths(tokens=tokens, cumulative=weights.cumsum())


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {file} cannot be read: {error}") from error
