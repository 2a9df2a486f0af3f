"""What a soak asks: a trace's prompts at a trace's times, by clients of every kind.

Each client's manners come from one seed: streams and whole answers, both interfaces, several keys
and salts, choices, forms, logprobs; those who leave in the middle, read slowly, or ask for what
cannot be.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.server import Answer, post, wire
from quire.bench.traffic import replay
from quire.bench.workload import Query, Vocabulary
from quire.traces import TraceRequest, open_trace

KEYS = ("soak-alice", "soak-bob", "soak-carol")
SALTS = (None, None, None, "one", "two")
MOST_PROMPT, MOST_OUTPUT = 0.75, 0.2  # of the context
FORMS: tuple[dict[str, Any], ...] = (
    {"choice": ["yes", "no", "perhaps"]},
    {"regex": "[a-z]{3,12}( [a-z]{3,12}){2,6}"},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
)
WRONG: tuple[dict[str, Any], ...] = (
    {"n": 10**6}, {"temperature": -1}, {"prompt": [10**9]}, {"max_tokens": 10**7}, {"stop": [""]},
    {"structured_outputs": {"regex": "("}}, {"logit_bias": {"x": 1}}, {"messages": 5},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One client's request, and how it behaves."""

    at_s: float
    kind: str
    data: bytes
    leaves_after: int = 0  # events; then it is gone
    reads_slowly: bool = False
    leaves_at_once_s: float | None = None  # without having read anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a trace is fitted to a machine."""

    rate: float  # requests a second, on average
    scale: float  # of prompts' lengths
    output_scale: float
    max_model_len: int


def visits(path: Path, shape: Shape, seed: int) -> Iterator[Visit]:
    """Without end: a trace that is over begins again with other prompts."""
    requests = list(open_trace(path))
    speed = shape.rate * max(requests[-1].at_s, 1.0) / len(requests)
    begin_s, turn = 0.0, 0
    while True:
        rng = random.Random(f"{seed} {turn}")
        for query, output_tokens in _each(requests, seed + turn, shape.scale, speed):
            max_tokens = min(output_tokens * shape.output_scale, shape.max_model_len * MOST_OUTPUT)
            prompt = query.token_ids[: max(1, int(shape.max_model_len * MOST_PROMPT))]
            yield _visit(prompt, max(1, int(max_tokens)), rng, begin_s + query.at_s)
        begin_s += requests[-1].at_s / speed
        turn += 1


def _each(
    requests: list[TraceRequest], seed: int, scale: float, speed: float
) -> Iterator[tuple[Query, int]]:
    """A few hundred at a time: all prompts of a trace are gigabytes of token ids."""
    for place in range(0, len(requests), 256):
        part = requests[place : place + 256]
        queries = replay(part, Vocabulary(range(20, 4000)), seed=seed, scale=scale, speed=speed)
        yield from zip(queries, (each.output_tokens for each in part), strict=True)


def _visit(prompt: list[int], max_tokens: int, rng: random.Random, at_s: float) -> Visit:
    is_chat, streams = rng.random() < 0.25, rng.random() < 0.75
    fields: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "stream": streams}
    kind = ("chat" if is_chat else "completion") + (", streamed" if streams else "")
    if is_chat:
        words = " ".join(f"w{token_id}" for token_id in prompt[: len(prompt) // 4 + 1])
        fields |= {"messages": [{"role": "user", "content": words}]}
    else:
        fields |= {"prompt": prompt}
    if (salt := rng.choice(SALTS)) is not None:
        fields["cache_salt"] = salt
    lot = rng.random()
    manners: dict[str, Any] = {}
    if lot < 0.08:
        manners = {"leaves_after": rng.randrange(1, 20)} if streams else {}
        manners = manners or {"leaves_at_once_s": rng.random()}
        kind = "leaves"
    elif lot < 0.10:
        manners, kind = {"leaves_at_once_s": rng.random() / 4}, "leaves early"
    elif lot < 0.13 and streams:
        manners, kind = {"reads_slowly": True}, "reads slowly"
        fields["logprobs" if not is_chat else "n"] = 2
    elif lot < 0.18:
        fields |= {"n": rng.randrange(2, 5), "temperature": 0.8}
        kind = "several choices"
    elif lot < 0.23:
        fields |= {"structured_outputs": rng.choice(FORMS), "ignore_eos": False}
        kind = "form"
    elif lot < 0.25:
        fields |= rng.choice(WRONG)
        kind = "wrong"
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return Visit(at_s=at_s, kind=kind, data=post(path, fields, rng.choice(KEYS)), **manners)


async def visit(port: int, own: Visit) -> Answer | None:
    """What became of it; None if the client did not wait for it."""
    receive_bytes = 4096 if own.reads_slowly else None
    async with wire(port, receive_bytes=receive_bytes, limit=2**16) as connection:
        if own.leaves_at_once_s is not None:
            connection.writer.write(own.data)
            await asyncio.sleep(own.leaves_at_once_s)
            return None
        if own.reads_slowly:
            connection.writer.write(own.data)
            for _ in range(100):  # 2 kB/s, for ten seconds
                if not await connection.reader.read(200):
                    break
                await asyncio.sleep(0.1)
            return None
        return await connection.ask(own.data, keeps=False, leave_after=own.leaves_after)


def said(answer: Answer) -> str:
    """Why it was refused, as far as that is said."""
    try:
        return str(json.loads(answer.body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "?"
