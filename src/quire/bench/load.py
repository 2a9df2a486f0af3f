"""Send a workload, and note the times of the answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from quire.bench.workload import Query, Vocabulary
from quire.errors import ConfigError
from quire.http import Http, RefusedByServer
from quire.kv import Usage
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """A piece of an answer, at the moment of its arrival."""

    text: str = ""
    num_tokens: int | None = None  # None: unknown
    prompt_tokens: int | None = None  # of the whole prompt, if the target reports it
    output_tokens: int | None = None  # of the whole answer, if the target reports it
    cached_tokens: int = 0  # tokens of the prompt that were in the prefix cache


class Target(Protocol):
    """What a load is sent to: a server, or an engine of this process."""

    def answer(self, query: Query) -> AsyncIterator[AnswerPiece]:
        """Yield the pieces of an answer. Raises: any error; the request fails and others go on."""
        ...


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one request."""

    prompt_tokens: int
    queue_s: float = 0.0  # it waited here for ``max_concurrency``
    start_s: float = 0.0  # when it was sent, by ``perf_counter``
    ttft_s: float = 0.0  # from ``start_s``
    itls_s: list[float] = field(default_factory=list)  # between one piece and the next
    latency_s: float = 0.0  # from ``start_s`` to the last piece
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
    """Send all queries at their times; ``report`` is called when one has ended.

    If the task is cancelled, this ends the cancellation, and unfinished queries have no outcome.

    Returns: the outcome of each query or None, and the seconds of the whole run.
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
    """Send one query now. An error becomes part of the outcome."""
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
            if piece.num_tokens == 0:  # a piece without generated text, as one with the usage
                continue
            if counted:
                outcome.itls_s.append(now - last)
            else:
                outcome.ttft_s = now - outcome.start_s
            counted += 1 if piece.num_tokens is None else piece.num_tokens
            texts.append(piece.text)
            last = now
        if not counted:
            outcome.error = "the answer has no tokens"
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency_s = last - outcome.start_s
    outcome.output_tokens = counted if told is None else told
    outcome.text = "".join(texts)
    return outcome


# -- an engine of this process ---------------------------------------------------------------------


def vocabulary_of(llm: "LLM") -> Vocabulary:
    """Return the tokens of an engine's tokenizer without special ones."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return Vocabulary()
    return Vocabulary(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))


class EngineHere:
    """A target that answers with an ``AsyncLLM``."""

    def __init__(self, llm: "AsyncLLM", *, temperature: float, ignore_eos: bool) -> None:
        self._llm = llm
        self._temperature, self._ignore_eos = temperature, ignore_eos

    async def answer(self, query: Query) -> AsyncIterator[AnswerPiece]:
        params = SamplingParams(
            max_tokens=query.max_tokens, temperature=self._temperature, ignore_eos=self._ignore_eos
        )
        async for delta in self._llm.generate(query.token_ids, params):
            yield AnswerPiece(
                text=delta.text,
                num_tokens=len(delta.token_ids),
                cached_tokens=delta.num_cached_tokens,
            )
            if delta.finish_reason not in (None, "stop", "length"):
                raise RuntimeError(f"ended by {delta.finish_reason}: {delta.detail}")


class CacheWatch:
    """Collects the KV cache's usage after each step."""

    def __init__(self) -> None:
        self._peak: Usage | None = None
        self._used_bytes = self._held_bytes = 0  # sums over the steps with sequences
        self._before = (0, 0, 0)

    def begin(self, llm: "AsyncLLM") -> None:
        """Forget the steps so far."""
        self._peak, self._used_bytes, self._held_bytes = None, 0, 0
        self._before = _counts(llm)

    def __call__(self, usage: Usage) -> None:
        if self._peak is None or _size(usage) > _size(self._peak):
            self._peak = usage
        if usage.num_sequences:
            self._used_bytes += usage.used_bytes
            self._held_bytes += usage.used_bytes + usage.wasted_bytes

    def figures(self, llm: "AsyncLLM", outcomes: list[Outcome]) -> dict[str, Any]:
        """Return the figures since ``begin``; bytes are those of the committed peak."""
        peak = self._peak
        preemptions, swaps, recomputed = (
            now - before for now, before in zip(_counts(llm), self._before, strict=True)
        )
        done = [outcome for outcome in outcomes if outcome.succeeded]
        num_cached = sum(outcome.cached_tokens for outcome in done)
        num_input = sum(outcome.prompt_tokens for outcome in done)
        return {
            "strategy": llm.llm.config.cache,
            "peak_committed_bytes": peak.committed_bytes if peak else 0,
            "used_bytes": peak.used_bytes if peak else 0,
            "cached_bytes": peak.cached_bytes if peak else 0,
            "wasted_bytes": peak.wasted_bytes if peak else 0,
            "mean_utilization": self._used_bytes / self._held_bytes if self._held_bytes else 0.0,
            "num_preemptions": preemptions,
            "num_swaps": swaps,
            "num_recomputed_tokens": recomputed,
            "num_cached_tokens": num_cached,
            "prefix_hit_rate": num_cached / num_input if num_input else 0.0,
        }


def _counts(llm: "AsyncLLM") -> tuple[int, int, int]:
    stats = llm.llm.engine.scheduler.statistics
    return stats.num_preemptions, stats.num_swaps, stats.num_recomputed_tokens


def _size(usage: Usage) -> tuple[int, int]:
    return usage.committed_bytes, usage.used_bytes


# -- a server --------------------------------------------------------------------------------------


class CompletionsServer:
    """A target behind OpenAI's ``/v1/completions``; its usage tells the lengths."""

    def __init__(self, http: Http, model: str, *, temperature: float, ignore_eos: bool) -> None:
        self._http, self.model = http, model
        self._temperature, self._ignore_eos = temperature, ignore_eos

    async def answer(self, query: Query) -> AsyncIterator[AnswerPiece]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": query.token_ids,
            "max_tokens": query.max_tokens,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:  # not in OpenAI's API, so a strict server may refuse it
            body["ignore_eos"] = True
        async with aclosing(self._http.events("/v1/completions", body)) as events:
            async for event in events:
                yield _piece(event)


async def first_model(http: Http) -> str:
    """Return the name of the server's first model. Raises: ConfigError."""
    return (await models_of(http))[0]


async def models_of(http: Http) -> list[str]:
    """Return the names of the server's models, at least one. Raises: ConfigError."""
    try:
        answer = await http.get("/v1/models")
        names: list[str] = [str(model["id"]) for model in answer["data"]]
        names[0]
    except RefusedByServer as error:
        raise ConfigError(f"--url {http.url} refuses: {error.reason}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--url {http.url}: /v1/models does not list a model ({type(error).__name__}: "
            f"{error}). Is the server up? --model names a model without this request"
        ) from error
    return names


def _piece(event: str) -> AnswerPiece:
    """Parse an event. Raises: ValueError for an error, or for no JSON object."""
    data = json.loads(event)
    if not isinstance(data, dict) or data.get("error"):
        raise ValueError(f"the server says {event[:300]}")
    choices, usage = data.get("choices") or [], data.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return AnswerPiece(
        text=(choices[0].get("text") or "") if choices else "",
        num_tokens=None if choices else 0,
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
        cached_tokens=cached or 0,
    )
