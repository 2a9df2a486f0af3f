"""Sends a workload and keeps the times at which answers came."""

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


# -- load ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """A part of an answer, at the moment when it came."""

    text: str = ""
    num_tokens: int | None = None  # None: it is not known how many
    prompt_tokens: int | None = None  # of the whole prompt, once the target says so
    output_tokens: int | None = None  # of the whole answer, once the target says so
    cached_tokens: int = 0  # of the prompt, that did not have to be computed


class Target(Protocol):
    """What answers: a server, or an engine in this process."""

    def answer(self, query: Query) -> AsyncIterator[AnswerPiece]:
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


# -- here ------------------------------------------------------------------------------------------

# The engine of this process as a target, and what its KV cache took meanwhile.


def vocabulary_of(llm: "LLM") -> Vocabulary:
    """What its tokenizer has, but for special tokens."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return Vocabulary()
    return Vocabulary(set(range(tokenizer.vocab_size)) - set(tokenizer.all_special_ids))


class EngineHere:
    """Answers with an ``AsyncLLM``. An answer that ends in an error has failed."""

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
    """The cache's usage after each step, as few numbers."""

    def __init__(self) -> None:
        self._peak: Usage | None = None
        self._used_bytes = self._held_bytes = 0  # summed over steps in which a sequence ran
        self._before = (0, 0, 0)

    def begin(self, llm: "AsyncLLM") -> None:
        """Forget what was before."""
        self._peak, self._used_bytes, self._held_bytes = None, 0, 0
        self._before = _counts(llm)

    def __call__(self, usage: Usage) -> None:
        if self._peak is None or _size(usage) > _size(self._peak):
            self._peak = usage
        if usage.num_sequences:
            self._used_bytes += usage.used_bytes
            self._held_bytes += usage.used_bytes + usage.wasted_bytes

    def figures(self, llm: "AsyncLLM", outcomes: list[Outcome]) -> dict[str, Any]:
        """Since ``begin``; bytes are those of the step with most committed."""
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


# -- server ----------------------------------------------------------------------------------------

# A server elsewhere as a target: OpenAI's ``/v1/completions``, streamed.


class CompletionsServer:
    """Sends prompts as token ids; usage is asked for, so that lengths are the server's own."""

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
        if self._ignore_eos:  # not OpenAI's: a server that is strict is asked without it
            body["ignore_eos"] = True
        async with aclosing(self._http.events("/v1/completions", body)) as events:
            async for event in events:
                yield _piece(event)


async def first_model(http: Http) -> str:
    """What the server calls the first of its models. Raises: ConfigError."""
    return (await models_of(http))[0]


async def models_of(http: Http) -> list[str]:
    """What the server calls its models, at least one. Raises: ConfigError."""
    try:
        answer = await http.get("/v1/models")
        names: list[str] = [str(model["id"]) for model in answer["data"]]
        names[0]
    except RefusedByServer as error:
        raise ConfigError(f"--url {http.url} refuses: {error.reason}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--url {http.url}: no model can be had from /v1/models ({type(error).__name__}: "
            f"{error}). Is the server up? --model names one without asking"
        ) from error
    return names


def _piece(event: str) -> AnswerPiece:
    """Raises: ValueError for an event that is an error, or no JSON object."""
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
