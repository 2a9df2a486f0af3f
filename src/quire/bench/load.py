"""Sends a workload and keeps the times at which answers came."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from quire.bench.workload import Query


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an answer, at the moment when it came."""

    text: str = ""
    num_tokens: int | None = None  # None: it is not known how many
    prompt_tokens: int | None = None  # of the whole prompt, once the target says so
    output_tokens: int | None = None  # of the whole answer, once the target says so
    cached_tokens: int = 0  # of the prompt, that did not have to be computed


class Target(Protocol):
    """What answers: a server, or an engine in this process."""

    def answer(self, query: Query) -> AsyncIterator[Piece]:
        """Its pieces. Raises: anything; the request has failed then, and the others go on."""
        ...


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request.

    Units: seconds; ``start_s`` by the clock of ``perf_counter``, what follows counted from it.
    """

    prompt_tokens: int
    queue_s: float = 0.0  # that it waited here for a place among ``max_concurrency``
    start_s: float = 0.0  # when it was sent
    ttft_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)  # between one piece and the next
    latency_s: float = 0.0  # to the last piece
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.error


async def send_all(
    target: Target,
    queries: Sequence[Query],
    *,
    max_concurrency: int | None = None,
    report: Callable[[], None] = lambda: None,
) -> tuple[list[Outcome | None], float]:
    """Every query at its time; what became of each, and how many seconds all of it took.

    ``report`` is called when one has ended. If the task is cancelled, what has not ended is None,
    and the cancellation is done with.
    """
    seats = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    begin = perf_counter()

    async def one(query: Query) -> Outcome:
        await asyncio.sleep(query.at_s - (perf_counter() - begin))
        arrival = perf_counter()
        async with seats:
            outcome = await send(target, query)
        outcome.queue_s = outcome.start_s - arrival
        report()
        return outcome

    each = [asyncio.create_task(one(query)) for query in queries]
    try:
        await asyncio.gather(*each)
    except asyncio.CancelledError:
        duration_s = perf_counter() - begin
        await asyncio.gather(*each, return_exceptions=True)
        if (own := asyncio.current_task()) is not None:
            own.uncancel()
        return [None if task.cancelled() else task.result() for task in each], duration_s
    return [task.result() for task in each], perf_counter() - begin


async def send(target: Target, query: Query) -> Outcome:
    """One query, now."""
    outcome = Outcome(prompt_tokens=len(query.token_ids))
    texts: list[str] = []
    counted, told = 0, None
    last = outcome.start_s = perf_counter()
    try:
        async for piece in target.answer(query):
            now = perf_counter()
            if piece.output_tokens is not None:
                told = piece.output_tokens
            if piece.prompt_tokens is not None:
                outcome.prompt_tokens = piece.prompt_tokens
            outcome.cached_tokens = max(outcome.cached_tokens, piece.cached_tokens)
            if piece.num_tokens == 0:  # nothing was generated: it only says something
                continue
            if counted:
                outcome.itls_s.append(now - last)
            else:
                outcome.ttft_s = now - outcome.start_s
            counted += 1 if piece.num_tokens is None else piece.num_tokens
            texts.append(piece.text)
            last = now
        if not counted:
            outcome.error = "no token came"
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency_s = last - outcome.start_s
    outcome.output_tokens = counted if told is None else told
    outcome.text = "".join(texts)
    return outcome
