"""``LLM``: the engine with a model, a cache and a tokenizer around it. Text in, text out."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from threading import Event, Lock
from typing import Any, TypeAlias

from quire.config import EngineConfig
from quire.engine.beam_search import BeamSearch
from quire.engine.build import build, loaded_model
from quire.engine.cache_lock import CacheLock
from quire.engine.elastic import Elasticity
from quire.engine.outputs import (
    CompletionOutput,
    Deliver,
    End,
    Listener,
    TextDelta,
    completion,
    embedding_of,
)
from quire.engine.parallel.model_part import refuse_options
from quire.engine.pooling import Poolable, PromptEmbedding, pairs, scores
from quire.engine.prompts import (
    Prompt,
    bad_word_ids,
    encode,
    params_for_each,
    refuse_unknown_ids,
    split,
)
from quire.engine.sequence import FinishReason, Request, Sequence
from quire.engine.statistics import Statistics
from quire.engine.step_plan import TokenOutput
from quire.engine.structured import Grammars
from quire.errors import ConfigError, MemoryUnavailable, RankLost, RequestError
from quire.kv import NO_KEYS, Accounting, PrefixKeys, Usage
from quire.kv.page_tables import usage_with_tables
from quire.memory import CountedMemory, MemoryProvider
from quire.memory.machine.readings import Gauge
from quire.models.executors.encoder_source import Source
from quire.models.loader import LoadedModel
from quire.models.speech import Hearing
from quire.sampling_params import (
    SAMPLING_DEFAULTS,
    BeamSearchParams,
    Params,
    PoolingParams,
    SamplingParams,
)
from quire.units import format_bytes, parse_bytes

log = logging.getLogger(__name__)

Observer: TypeAlias = Callable[[Usage], None]

_USAGE_AGE_S = 0.25  # how old what is noted of it may be when a step begins


class LLM:
    """A model behind the engine.

    ``model`` is a local folder, a hub name, a Transformers model in memory, what
    ``models.loader.load`` gave, or None for the demo model. Options are the fields of
    ``EngineConfig``. ``show_progress`` lets Transformers draw bars while it loads. ``memory``
    counts what was taken from the system; leaving a ``with`` block gives it back, and a model that
    was loaded for it. A model in memory stays as it was: its own
    ``generate`` works all the while.

    From the first run on the cache shrinks while the machine is short of memory, as ``gauge`` reads
    it, and grows again later (``elastic``). No sequence ends because of that.

    ``statistics`` counts what it does: tokens, hits and misses of the prefix cache, preemptions,
    why requests end, how long their parts take. Any thread may read them at any moment, during a
    step and after ``close`` too.

    Raises: ConfigError, ModelNotLoadable, UnsupportedModel, MemoryUnavailable.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        provider: MemoryProvider | None = None,
        gauge: Gauge | None = None,
        show_progress: bool = False,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_options(**options)
        refuse_options(self.config, model, provider)
        self._has_own_model = model is None or isinstance(model, (str, Path))
        self._provider, self._gauge = provider, gauge
        loaded = self._build(self.config, model, tokenizer, show_progress=show_progress)
        self._model_name = model if self._has_own_model else None
        self.name, self.tokenizer = loaded.name, loaded.tokenizer
        said = {
            name: getattr(loaded.model.generation_config, name, None) for name in SAMPLING_DEFAULTS
        }
        self.sampling_defaults = {name: value for name, value in said.items() if value is not None}
        self.vocab_size = loaded.vocab_size
        self._grammars = Grammars(
            self.tokenizer, self.vocab_size, self.engine.scheduler.limits.eos_token_ids
        )
        self.statistics = self.engine.scheduler.statistics
        self._noted_usage, self._noted_s = self._usage_now(), self.now_s()
        self._listeners: dict[int, Listener | BeamSearch] = {}  # of each that has not ended
        self._ids = count(1)
        self.sleep_level = 0  # 1: without KV memory; 2: and without the model
        self._closed, self._close_is_over = False, Event()
        self._closing = Lock()  # of two threads that close it, one does
        self.has_failed = False  # it was closed since it could not go on

    def _build(
        self,
        config: EngineConfig,
        model: Any,
        tokenizer: Any,
        *,
        show_progress: bool = False,
        lock: CacheLock | None = None,
        statistics: Statistics | None = None,
    ) -> LoadedModel:
        """Load the model and put an engine around it, or anew with what it had.

        Raises: as the constructor.
        """
        loaded = loaded_model(model, tokenizer, config, show_progress=show_progress)
        # The processes of a model that was loaded elsewhere belong to the caller that loaded it.
        ranks = None if isinstance(model, LoadedModel) else loaded.ranks
        try:
            parts = build(
                config,
                loaded,
                provider=self._provider,
                gauge=self._gauge,
                lock=lock,
                statistics=statistics,
            )
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        self._ranks, self._settled = ranks, parts.settled
        self.spec, self.ledger = parts.spec, parts.ledger
        self.max_model_len = parts.max_model_len
        self.attention_backend, self.attention_way = parts.attention_backend, parts.attention_way
        self.engine, self._kv, self._team = parts.engine, parts.kv, parts.team
        self._resident, self._elastic = parts.resident, parts.elastic
        self._most_bytes = parts.most_bytes
        self._source_prompts = parts.source_prompts
        self.embeddings = Poolable.of(loaded)
        begins = () if parts.source_prompts is None else parts.source_prompts.text_begins
        self.hearing = Hearing.of(loaded, begins, parts.max_model_len)
        return loaded

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        observe: Observer | None = None,
    ) -> list[CompletionOutput]:
        """Continue every prompt (text, or token ids); all of them run together.

        For an encoder-decoder a prompt is the source, and its text begins as ``generate`` has it:
        with decoder_start_token_id and what the generation config forces next, which count as the
        prompt. ``{"source": …, "prompt_token_ids": […]}`` lets it begin otherwise. A source is
        text, token ids, or the input_features of a speech model (a tensor [mels, frames]).

        ``params`` are for all of them, or one for each. ``observe`` is called with the cache's
        usage after each step.

        Raises: RequestError for a prompt that cannot run, and then none has been started;
        MemoryUnavailable where it has not even addresses left, and then the LLM is closed.
        """
        return self._completions(self._requests(prompts, params), observe)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        observe: Observer | None = None,
    ) -> Iterator[TextDelta]:
        """Like ``generate``, piece by piece. Leaving the loop early ends what still runs.

        Nothing runs before the first piece is asked for. Several streams may be read in turns.
        """
        return self._run(self._requests(prompts, params), observe, [])

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams
    ) -> list[CompletionOutput]:
        """The likeliest continuations of every prompt, the best choice first.

        Raises: as ``generate``.
        """
        self._refuse_if_out()
        return self._completions([self.request(prompt, params) for prompt in split(prompts)], None)

    def embed(
        self, prompts: Prompt | Iterable[Prompt], pooling_params: PoolingParams | None = None
    ) -> list[PromptEmbedding]:
        """The embedding of every prompt: its last token's hidden state, behind the last norm.

        Prompts are computed with what else runs, chunk by chunk, and found in the prefix cache as
        those of ``generate`` are.

        Raises: RequestError for a prompt that cannot run, for a model that has none, and for one of
        which none came.
        """
        asked = pooling_params or PoolingParams()
        requests = [self.request(prompt, asked) for prompt in split(prompts)]
        found: list[TextDelta] = sorted(self._run(requests, None, []), key=lambda end: end.index)
        return [
            PromptEmbedding(
                prompt_token_ids=request.prompt_token_ids,
                embedding=embedding_of(end),
                num_cached_tokens=end.num_cached_tokens,
            )
            for request, end in zip(requests, found, strict=True)
        ]

    def score(
        self, text_1: Prompt | Iterable[Prompt], text_2: Prompt | Iterable[Prompt]
    ) -> list[float]:
        """How alike texts are: the cosine of the embeddings of each pair, from -1 to 1.

        One text is compared with each of several, or each of several with the one at its place.

        Raises: as ``embed``, and RequestError for other numbers of texts.
        """
        first, second = split(text_1), split(text_2)
        compared = pairs(len(first), len(second))
        found = [each.embedding for each in self.embed([*first, *second])]
        return scores(found, [(one, len(first) + other) for one, other in compared])

    def usage(self, *, wait: bool = True) -> Usage:
        """Bytes reserved, committed, used and wasted at this moment.

        Without ``wait``, while a step is under way: as it was a moment before that step, or a
        quarter of a second earlier at most.
        """
        if self._elastic.lock.acquire(blocking=wait):
            try:
                self._note_usage()
            finally:
                self._elastic.lock.release()
        return self._noted_usage

    def now_s(self) -> float:
        """Of the clock that ``statistics`` go by."""
        return self.engine.clock()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or has failed: nothing runs any more."""
        return self._closed

    @property
    def accounting(self) -> Accounting:
        """The books: which sequence holds which tokens. Another object after trouble.

        For the thread that steps, between two steps.
        """
        return self._kv.accounting

    @property
    def memory(self) -> CountedMemory:
        """KV memory as it was taken from the system and given back."""
        return self._kv.memory

    @property
    def elastic(self) -> Elasticity:
        """Where the ceiling on KV memory is at this moment, why, and what moving it has cost."""
        return self._elastic.state

    def resize(self, kv_cache_memory_bytes: int | str) -> None:
        """Change the capacity while prompts run. It holds when this returns, after a step at most.

        What is only cached goes first; then sequences make room and compute again later, and one
        that is too long for it ends with its text so far.

        Raises: ConfigError for more than the LLM was made with. RequestError after ``close``, and
        while it is asleep.
        """
        self._refuse_if_out()
        wanted = kv_cache_memory_bytes
        wanted = parse_bytes(wanted) if isinstance(wanted, str) else wanted
        if not 0 < wanted <= self._most_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes={kv_cache_memory_bytes!r} must be above 0 and at most the "
                f"{format_bytes(self._most_bytes)} ({self._most_bytes:,}) that this LLM was made "
                f"with: for more, make a new one"
            )
        self._elastic.resize(wanted)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Give back what is kept for later prompts; False, and nothing is done, while one runs.

        With ``reset_running_requests`` those that run compute their tokens again.
        """
        with self._elastic.lock:
            if reset_running_requests:
                while self.engine.scheduler.preempt_youngest(spare_oldest=False):
                    pass
            done = self._kv.accounting.reset_prefix_cache()
            self._kv.carry_out()
        return done

    def sleep(self, level: int = 1) -> bool:
        """Give memory back until ``wake_up``; False, and nothing is done, while a sequence runs.

        Level 1 gives back all KV memory and what it cached, level 2 the model too, with all that
        was made from it. Prompts are refused meanwhile.

        Raises: RequestError for another level, after ``close``, and for level 2 where the model was
        handed in, since it cannot be read again.
        """
        self.check_sleep(level)
        with self._elastic.lock:
            self._refuse_if_closed()
            if self.engine.scheduler.has_unfinished:
                return False
            if not self.sleep_level:
                self._kv.accounting.reset_prefix_cache()
                self._elastic.sleep()
                self._note_usage()
                self.sleep_level = 1
            if level > self.sleep_level:
                self._elastic.close()
                self.sleep_level = 2
                self._let_go(End("abort", "the LLM was put to sleep"))
        return True

    def check_sleep(self, level: int) -> None:
        """Raises: RequestError for a level that ``sleep`` cannot do."""
        if level not in (1, 2) or isinstance(level, bool):
            raise RequestError(f"level={level!r} must be 1 (KV memory) or 2 (the model too)")
        if level == 2 and not self._has_own_model:
            raise RequestError(
                f"level=2 gives the model back, and {self.name} was handed in as an object, which "
                f"cannot be read again: use level=1, or load it by its folder or name"
            )

    def wake_up(self) -> None:
        """Run again, after ``sleep``. A model that was given back is read again, which takes as
        long as the first time. It does nothing to an LLM that is awake.

        Raises: as the constructor, RequestError after ``close``; the LLM is asleep then as before.
        """
        with self._elastic.lock:
            self._refuse_if_closed()
            if self.sleep_level == 2:
                before, watch = self.elastic, self.engine.watch
                self._build(
                    self._settled,
                    self._model_name,
                    None,
                    lock=self._elastic.lock,
                    statistics=self.statistics,
                )
                self.engine.watch = watch
                self._elastic.count_on(before)
                if before.capacity_bytes != self.elastic.capacity_bytes:
                    self._elastic.resize(before.capacity_bytes)
            elif self.sleep_level:
                self._elastic.wake_up()
            self.sleep_level = 0
            self._note_usage()

    @property
    def is_sleeping(self) -> bool:
        """Whether it was put to sleep, and runs nothing."""
        return self.sleep_level > 0

    def close(self) -> None:
        """End what still runs, and let go of the model and of all KV memory.

        A model that the LLM loaded itself goes, with all that was made from its weights. One that
        was handed in stays as usable as it was, without what was made from it here. Tensors that
        were taken out of either stay valid; addresses of the cache go with the last tensor over
        them. Figures can still be read. A second call does nothing.
        """
        self._close("abort", "the LLM was closed")

    def fail(self, detail: str) -> None:
        """``close``, since it cannot go on: what still runs ends with an error."""
        self.has_failed = True
        self._close("error", detail)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
    ) -> Request:
        """A prompt as a request that can run: for text, for that of a search, or its embedding.

        Raises: RequestError.
        """
        self._refuse_if_out()
        pooling = params if isinstance(params, PoolingParams) else None
        if pooling is not None:
            self.embeddings.check(pooling)
        beam = params if isinstance(params, BeamSearchParams) else None
        if beam is not None:
            params = beam.sampling(self.engine.scheduler.limits.eos_token_ids, self.vocab_size)
        params = params if isinstance(params, SamplingParams) else SamplingParams()
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError("this model has no tokenizer: stop and bad_words cannot be found")
        for name in ("logit_bias", "allowed_token_ids"):
            refuse_unknown_ids(getattr(params, name) or (), self.vocab_size, name)
        structured = params.structured_outputs
        source, token_ids = self._read(prompt)
        sources = self._source_prompts
        request = Request(
            request_id=next(self._ids),
            prompt_token_ids=token_ids,
            params=params,
            source=source,
            keys=keys,
            priority=priority,
            pooling=pooling,
            beam=beam,
            bad_words=bad_word_ids(params.bad_words, self.tokenizer, self.vocab_size),
            grammar=None if structured is None else self._grammars.compile(structured),
            suppressed=() if sources is None else sources.suppressed,
            suppressed_first=() if sources is None else sources.suppressed_first,
        )
        self.engine.scheduler.check_request(request)
        return request

    def start(
        self,
        request: Request,
        deliver: Deliver,
        *,
        index: int = 0,
        arrived_s: float | None = None,
    ) -> list[Sequence]:
        """Let a request wait for its turn; ``deliver`` gets its pieces, from within ``step``.

        ``arrived_s``: when it was made, if not just now (``now_s``). What ``deliver`` raises ends
        its sequence with an error. Raises: RequestError after ``close``.
        """
        with self._elastic.lock:
            self._refuse_if_out()
            self._elastic.watch()
            self._resident.watch()
            arrived_s = self.now_s() if arrived_s is None else arrived_s
            sequences = self.engine.scheduler.add(request, arrived_s=arrived_s)
            if request.beam is not None:
                ends = self.engine.scheduler.limits.eos_token_ids
                search = BeamSearch(
                    self.engine, request.beam, sequences, ends, self.tokenizer, index, deliver
                )
                self._listeners.update((sequence.seq_id, search) for sequence in sequences)
            else:
                for sequence in sequences:
                    self._listeners[sequence.seq_id] = Listener(
                        sequence, self.tokenizer, index, deliver
                    )
        return sequences

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """End what still runs of these, and give back what only they hold.

        The reader of a search gets what it has found so far.
        """
        with self._elastic.lock:
            for sequence in sequences:
                listener = self._listeners.pop(sequence.seq_id, None)
                if isinstance(listener, BeamSearch):
                    listener.end(End("abort", "abandoned"))
                self.engine.finish(sequence, "abort", "abandoned")
            self._kv.carry_out()

    def step(self) -> bool:
        """One step for all; False if there is nothing to do any more, as after ``close``.

        Where the system would end the process for lack of memory, it only waits for a moment.

        Raises: MemoryUnavailable where that lasts, or where the system has not even addresses left
        for an empty cache, and RankLost; the LLM is closed then. RequestError from within
        ``deliver`` while the LLM is being closed: ``close`` could not end before this call does.
        """
        try:
            with self._elastic.lock:
                if self.is_sleeping:
                    return False
                is_closed = self._closed
                if is_closed and self._elastic.lock.is_nested:
                    raise RequestError(
                        "step() was called from a deliver callback while the LLM is closed: "
                        "let the callback return first"
                    )
                if not is_closed:
                    self._elastic.settle()
                    outputs = self.engine.step() if self._elastic.may_step() else None
                    for output in outputs or ():
                        self._tell(output)
                    if self.statistics.now_s - self._noted_s > _USAGE_AGE_S:
                        self._note_usage()
                    has_unfinished = self.engine.scheduler.has_unfinished
            if not is_closed:
                if outputs is None and has_unfinished:
                    self._elastic.pause()
                return has_unfinished
        except (MemoryUnavailable, RankLost) as error:
            self.fail(str(error))
            raise
        self._close_is_over.wait()  # without the lock, which the thread that closes may wait for
        return False

    def _tell(self, output: TokenOutput) -> None:
        """Let the reader of a sequence, or its search, hear what a step did.

        What goes wrong there ends that sequence. Raises: MemoryUnavailable, as ``step``.
        """
        sequence = output.sequence
        listener = self._listeners.get(sequence.seq_id)
        if listener is None:  # its text has ended with a token before this one
            return
        try:
            end = listener.hear(output)
        except (MemoryUnavailable, RankLost):
            raise
        except Exception as error:
            log.exception("a piece of sequence %d cannot be delivered", sequence.seq_id)
            end = End("error", f"a piece of it could not be delivered: {error!r}")
            listener.end(end)
        if end is not None:
            self.engine.finish(sequence, end.reason, end.detail)
        if isinstance(listener, BeamSearch):
            for own in listener.sequences if listener.is_over else ():
                self._listeners.pop(own.seq_id, None)
        elif end is not None or output.finish_reason is not None:
            self._listeners.pop(sequence.seq_id, None)

    def _read(self, prompt: Prompt) -> tuple[Source | None, tuple[int, ...]]:
        """What an encoder reads, if there is one, and the text so far. Raises: RequestError."""
        if self._source_prompts is not None:
            return self._source_prompts.read(prompt)
        return None, encode(prompt, self.tokenizer, self.vocab_size)

    def _note_usage(self) -> None:
        """For callers that do not wait."""
        if not self._closed and self.sleep_level < 2:
            self._noted_usage, self._noted_s = self._usage_now(), self.now_s()

    def _usage_now(self) -> Usage:
        return usage_with_tables(self._kv.accounting, self._kv.memory.page_bytes)

    def _close(self, reason: FinishReason, detail: str) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        with ExitStack() as parts:  # all of them, whatever one raises
            parts.callback(self._close_is_over.set)
            self._elastic.close()
            parts.enter_context(self._elastic.lock)
            if self.sleep_level < 2:
                self._let_go(End(reason, detail))

    def _let_go(self, end: End) -> None:
        """Of the model, of all KV memory, and of what still runs."""
        with ExitStack() as parts:
            for part in (self._ranks, self._team):
                if part is not None:
                    parts.callback(part.close)
            # What was kept for it is of no use now, nor what held its own model.
            parts.callback(self._resident.rest, short=not self._has_own_model)
            parts.callback(self._kv.close)
            parts.callback(self._resident.close)
            parts.callback(self._tell_the_end, end)
            self._noted_usage = Usage.nothing()
            self.engine.close(end.reason, end.detail)

    def _tell_the_end(self, end: End) -> None:
        """Of the LLM, to all that still listen."""
        for listener in dict.fromkeys(self._listeners.values()):  # a search is there once a beam
            listener.end(end)
        self._listeners.clear()

    def _requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
    ) -> list[Request]:
        """Every prompt as a request that can run. Raises: RequestError."""
        self._refuse_if_out()
        several = split(prompts)
        each = params_for_each(params, len(several))
        return [self.request(prompt, own) for prompt, own in zip(several, each, strict=True)]

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RequestError("this LLM is closed: make a new one")

    def _refuse_if_out(self) -> None:
        self._refuse_if_closed()
        if self.is_sleeping:
            raise RequestError(f"this LLM is asleep (level {self.sleep_level}): call wake_up()")

    def _completions(
        self, requests: list[Request], observe: Observer | None
    ) -> list[CompletionOutput]:
        sequences: list[list[Sequence]] = []
        pieces: list[list[TextDelta]] = [[] for _ in requests]
        for delta in self._run(requests, observe, sequences):
            pieces[delta.index].append(delta)
        return [completion(*each) for each in zip(requests, sequences, pieces, strict=True)]

    def _run(
        self, requests: list[Request], observe: Observer | None, started: list[list[Sequence]]
    ) -> Iterator[TextDelta]:
        """Step until these have ended; what the steps do for others goes to their own queues.

        ``started`` gets the sequences of each request.
        """
        deltas: deque[TextDelta] = deque()
        sequences: list[Sequence] = []
        try:
            for index, request in enumerate(requests):
                started.append(self.start(request, deltas.append, index=index))
                sequences += started[-1]
            # In this order: a listener goes when its last piece is there, in whatever thread.
            while any(own.seq_id in self._listeners for own in sequences) or deltas:
                if not deltas:
                    self.step()
                    if observe is not None:
                        observe(self.usage())
                while deltas:
                    yield deltas.popleft()
        finally:
            self.abandon(sequences)
