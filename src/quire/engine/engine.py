"""The loop: plan, run, sample, update. Read ``Engine.step`` first.

``LLM`` is the engine with a tokenizer around it: text in, text out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quire.attention import SdpaAttention
from quire.config import EngineConfig
from quire.engine.detokenizer import Detokenizer
from quire.engine.runner import ModelRunner, Runner
from quire.engine.sampler import Sampler
from quire.engine.scheduler import Scheduler, TokenOutput
from quire.engine.sequence import FinishReason, Request, SamplingParams, Sequence
from quire.errors import ConfigError, RequestError
from quire.memory import CountedMemory, HostMemory, MemoryProvider
from quire.memory.probe import available_bytes
from quire.models.loader import LoadedModel, adopt, load
from quire.strategies import CacheConfig, Usage, build_accounting, build_storage
from quire.units import format_bytes, format_count

Prompt: TypeAlias = str | list[int]


class Engine:
    """Sequences in, tokens out."""

    def __init__(self, scheduler: Scheduler, runner: Runner, sampler: Sampler) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._sampler = sampler

    def step(self) -> list[TokenOutput]:
        """One forward pass over whatever is due; what it did for each sequence that it served."""
        plan = self.scheduler.plan()
        tokens: list[int] = []
        if plan.chunks:
            logits = self._runner.run(plan)
            tokens = self._sampler.sample(logits, plan.sampling)
        outputs = self.scheduler.update(plan, tokens)
        for output in outputs:
            if output.finish_reason is not None:
                self._sampler.forget(output.sequence)
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of one prompt's continuation."""

    index: int  # of the prompt
    text: str
    token_id: int | None
    finish_reason: FinishReason | None  # None while it goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt's continuation."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    detail: str  # why it ended early; empty otherwise


class LLM:
    """A model behind the engine.

    ``model`` is a local folder, a hub name, a Transformers model in memory, or None for the demo
    model. Options are the fields of ``EngineConfig``. ``memory`` counts what was taken from the
    system; leaving a ``with`` block gives it back.

    Raises: ConfigError, ModelNotLoadable, UnsupportedModel.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        provider: MemoryProvider | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_options(**options)
        loaded = _loaded(model, tokenizer, self.config.dtype)
        self.name, self.spec, self.tokenizer = loaded.name, loaded.spec, loaded.tokenizer
        self.memory = CountedMemory(HostMemory() if provider is None else provider)
        cache_config = _cache_config(self.config, loaded, self.memory.page_bytes)
        self.max_model_len = cache_config.max_model_len
        self._accounting = build_accounting(self.config.cache, loaded.spec, cache_config)
        self._storage = build_storage(self.config.cache, self._accounting, self.memory)
        self._vocab_size: int = loaded.model.get_input_embeddings().weight.shape[0]
        scheduler = Scheduler(
            self._accounting,
            max_model_len=cache_config.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            eos_token_ids=_eos_token_ids(loaded),
        )
        runner = ModelRunner(loaded, self._accounting, self._storage, SdpaAttention())
        self.engine = Engine(scheduler, runner, Sampler(self.config.seed))
        self._next_id = 0

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue every prompt (text, or token ids); all of them run together.

        Raises: RequestError for a prompt that cannot run; then none has been started.
        """
        sequences = self._add(prompts, params)
        texts = [""] * len(sequences)
        for delta in self._run(sequences):
            texts[delta.index] += delta.text
        return [
            Completion(
                prompt_token_ids=sequence.request.prompt_token_ids,
                token_ids=tuple(sequence.output_token_ids),
                text=text,
                finish_reason=sequence.finish_reason or "stop",
                detail=sequence.finish_detail,
            )
            for sequence, text in zip(sequences, texts, strict=True)
        ]

    def stream(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """Like ``generate``, piece by piece. Leaving the loop early ends what still runs."""
        return self._run(self._add(prompts, params))

    def usage(self) -> Usage:
        """Bytes reserved, committed, used and wasted at this moment."""
        return self._accounting.usage()

    def close(self) -> None:
        """Give all KV memory back."""
        self._storage.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None
    ) -> list[Sequence]:
        one = isinstance(prompts, str) or (
            isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)
        )
        several: Any = [prompts] if one else list(prompts)
        requests = [self._request(prompt, params or SamplingParams()) for prompt in several]
        for request in requests:
            self.engine.scheduler.check_request(request)
        return [self.engine.scheduler.add(request) for request in requests]

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: give the prompt as token ids")
            token_ids = tuple(self.tokenizer(prompt)["input_ids"])
        else:
            token_ids = tuple(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        for token_id in token_ids:
            if not (isinstance(token_id, int) and 0 <= token_id < self._vocab_size):
                raise RequestError(
                    f"token id {token_id!r} is not in the vocabulary of "
                    f"{format_count(self._vocab_size)}"
                )
        self._next_id += 1
        return Request(request_id=self._next_id, prompt_token_ids=token_ids, params=params)

    def _run(self, sequences: list[Sequence]) -> Iterator[TextDelta]:
        """Step until these have ended."""
        index_of = {sequence.seq_id: index for index, sequence in enumerate(sequences)}
        detokenizers = [
            Detokenizer(self.tokenizer, stop=sequence.request.params.stop) for sequence in sequences
        ]
        try:
            while any(sequence.finish_reason is None for sequence in sequences):
                for output in self.engine.step():
                    index = index_of.get(output.sequence.seq_id)
                    if index is not None:
                        yield self._delta(output, index, detokenizers[index])
        finally:
            for sequence in sequences:
                self.engine.scheduler.finish(sequence, "stop", "abandoned")
            self._storage.apply(self._accounting.drain())

    def _delta(self, output: TokenOutput, index: int, detokenizer: Detokenizer) -> TextDelta:
        reason, text = output.finish_reason, ""
        if self.tokenizer is not None:
            if output.token_id is None:
                text = detokenizer.flush()
            else:
                text = detokenizer.add(output.token_id, last=reason is not None)
            if detokenizer.stopped and reason is None:
                reason = "stop"
                self.engine.scheduler.finish(output.sequence, reason)
        return TextDelta(index=index, text=text, token_id=output.token_id, finish_reason=reason)


def _loaded(model: Any, tokenizer: Any, dtype: str) -> LoadedModel:
    if model is None or isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise ConfigError("tokenizer= goes with a model in memory; a folder brings its own")
        return load(model, dtype=dtype)
    return adopt(model, tokenizer)


def _cache_config(config: EngineConfig, loaded: LoadedModel, page_bytes: int) -> CacheConfig:
    """The cache's numbers: what the user said, else what the model and the machine allow."""
    longest = config.max_model_len or loaded.spec.max_model_len
    if longest > loaded.spec.max_model_len:
        raise ConfigError(
            f"max_model_len={format_count(longest)} is more than {loaded.name} was made for, "
            f"{format_count(loaded.spec.max_model_len)}: lower it"
        )
    available = available_bytes()
    ceiling = config.kv_cache_memory_bytes
    if ceiling is None:
        ceiling = available * 4 // 5
    elif ceiling > available:
        raise ConfigError(
            f"kv_cache_memory_bytes={format_bytes(ceiling)} is more than the machine has "
            f"available, {format_bytes(available)}: lower it"
        )
    return CacheConfig(
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs,
        capacity_bytes=ceiling,
        block_size=config.block_size,
        page_bytes=page_bytes,
        reserve=config.reserve,
        growth=config.growth,
        growth_tokens=config.growth_tokens,
    )


def _eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """What ends a text: the generation config's word, else the config's."""
    for config in (loaded.model.generation_config, loaded.model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
