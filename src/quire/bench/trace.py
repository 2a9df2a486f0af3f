"""A trace's requests as prompts to be sent: of its lengths, at its times, alike where its are.

And what was sent as a trace. Reading is left to ``quire.traces``.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from quire.bench.load import Outcome
from quire.bench.workload import Query, Vocabulary
from quire.errors import ConfigError
from quire.traces import RequestLog, TraceRequest, open_trace


def read_trace(
    source: str | Path, num_requests: int, *, max_skipped: int | None = 0
) -> list[TraceRequest]:
    """The first requests of a file or a web address; the first of them comes at 0.

    Raises: ConfigError naming the source, the line and the forms that can be read.
    """
    trace = iter(open_trace(source, max_skipped=max_skipped))
    return list(islice(trace, num_requests))


def write_trace(path: Path, queries: Iterable[Query], outcomes: Iterable[Outcome]) -> None:
    """What was sent, when, and how much came back, as Quire's own trace; of failures nothing.

    Raises: ConfigError.
    """
    sent = [pair for pair in zip(queries, outcomes, strict=True) if pair[1].succeeded]
    sent.sort(key=lambda pair: pair[1].start_s)
    try:
        with path.open("wb") as file:
            log = RequestLog(file)
            for query, outcome in sent:
                at_s = outcome.start_s - sent[0][1].start_s
                log.write(at_s, query.token_ids, outcome.output_tokens)
    except OSError as error:
        raise ConfigError(f"--save-trace {path} cannot be written: {error.strerror}") from error


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
    num_each = max(1, round(request.id_tokens * scale))
    token_ids: list[int] = []
    for hash_id in request.hash_ids:
        token_ids += vocabulary.draw(np.random.default_rng((seed, 1, hash_id)), num_each)
    # Rounding may leave a few tokens over, which no other request has.
    missing = max(0, num_tokens - len(token_ids))
    token_ids += vocabulary.draw(np.random.default_rng((seed, 0, place)), missing)
    return token_ids[:num_tokens]
