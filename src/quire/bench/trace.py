"""Traffic as it was met elsewhere: lengths, times, and which prompts begin alike.

Two published forms are read. CSV with ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens`` is
Azure's LLM inference trace (Azure/AzurePublicDataset); nothing is said of texts, so that no prompts
begin alike. JSON lines with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and
``hash_ids`` are Mooncake's: an id stands for 512 tokens and all before them, and is the same tokens
wherever it comes.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.workload import Query, Vocabulary
from quire.errors import ConfigError

_ID_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # each of 512 tokens, the last one of fewer


def read_trace(path: Path, num_requests: int) -> list[TraceRequest]:
    """The first requests of a file; the first of them comes at 0.

    Raises: ConfigError naming the file, the line and the forms that can be read.
    """
    parse = {".csv": _azure, ".jsonl": _mooncake}.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(
            f"--trace {path}: neither .csv (Azure's LLM trace) nor .jsonl (Mooncake's)"
        )
    try:
        with path.open(newline="", encoding="utf-8") as file:
            requests = list(islice(parse(path, file), num_requests))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error
    if not requests:
        raise ConfigError(f"--trace {path} has no requests")
    first_s = min(request.at_s for request in requests)
    return [
        TraceRequest(
            at_s=request.at_s - first_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            hash_ids=request.hash_ids,
        )
        for request in requests
    ]


def replay(
    requests: Iterable[TraceRequest],
    vocabulary: Vocabulary,
    *,
    seed: int,
    scale: float = 1.0,
    speed: float = 1.0,
) -> list[Query]:
    """Prompts of a trace's lengths × ``scale``, ``speed`` times as fast.

    Prompts that begin alike in the trace do so here, up to the same share of their length.

    Raises: ConfigError.
    """
    for name, value in (("--trace-scale", scale), ("--trace-speed", speed)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name} {value} must be a number above 0")
    return [
        Query(
            token_ids=_prompt(request, place, vocabulary, seed, scale),
            max_tokens=max(1, round(request.output_tokens * scale)),
            at_s=request.at_s / speed,
        )
        for place, request in enumerate(requests)
    ]


def _prompt(
    request: TraceRequest, place: int, vocabulary: Vocabulary, seed: int, scale: float
) -> list[int]:
    num_tokens = max(1, round(request.input_tokens * scale))
    if not request.hash_ids:
        return vocabulary.draw(np.random.default_rng((seed, 0, place)), num_tokens)
    num_each = max(1, round(_ID_TOKENS * scale))
    token_ids: list[int] = []
    for hash_id in request.hash_ids:
        token_ids += vocabulary.draw(np.random.default_rng((seed, 1, hash_id)), num_each)
    # Rounding may leave a few tokens over, which are nobody else's.
    missing = max(0, num_tokens - len(token_ids))
    token_ids += vocabulary.draw(np.random.default_rng((seed, 0, place)), missing)
    return token_ids[:num_tokens]


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            yield TraceRequest(
                at_s=_seconds(row["TIMESTAMP"]),
                input_tokens=_length(row["ContextTokens"]),
                output_tokens=_length(row["GeneratedTokens"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _wrong_line(path, number, error) from error


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        try:
            row: dict[str, Any] = json.loads(line)
            yield TraceRequest(
                at_s=float(row["timestamp"]) / 1e3,
                input_tokens=_length(row["input_length"]),
                output_tokens=_length(row["output_length"]),
                hash_ids=tuple(int(hash_id) for hash_id in row.get("hash_ids", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _wrong_line(path, number, error) from error


def _seconds(text: str) -> float:
    """Azure writes seven digits of a second, one more than Python reads."""
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")


def _length(value: Any) -> int:
    length = int(value)
    if length < 0:
        raise ValueError(f"a length of {length}")
    return length


def _wrong_line(path: Path, number: int, error: Exception) -> ConfigError:
    what = f"no column {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(
        f"--trace {path}, line {number}: {what}. Wanted: TIMESTAMP, ContextTokens, GeneratedTokens "
        f"(.csv), or timestamp, input_length, output_length (.jsonl)"
    )
