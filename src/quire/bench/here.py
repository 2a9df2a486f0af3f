"""The engine of this process as a target, and what its KV cache took meanwhile."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from quire.bench.load import Outcome, Piece
from quire.bench.workload import Query, Vocabulary
from quire.engine.params import SamplingParams
from quire.kv import Usage

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm import LLM


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

    async def answer(self, query: Query) -> AsyncIterator[Piece]:
        params = SamplingParams(
            max_tokens=query.max_tokens, temperature=self._temperature, ignore_eos=self._ignore_eos
        )
        async for delta in self._llm.generate(query.token_ids, params):
            yield Piece(
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
    stats = llm.llm.engine.scheduler.stats
    return stats.num_preemptions, stats.num_swaps, stats.num_recomputed_tokens


def _size(usage: Usage) -> tuple[int, int]:
    return usage.committed_bytes, usage.used_bytes
