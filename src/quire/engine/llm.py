"""``LLM``: an engine with a model, a cache and a tokenizer. It takes text and returns text."""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import Any, TypeAlias

from quire.config import EngineConfig
from quire.engine.beam_search import BeamSearch
from quire.engine.build import build, loaded_model
from quire.engine.cache_lock import CacheLock
from quire.engine.chat_prompts import NO_KWARGS, ChatPrompts, Messages
from quire.engine.elastic import Elasticity
from quire.engine.event_publisher import EventPublisher
from quire.engine.kv_fingerprint import BlockLayout, kv_fingerprint
from quire.engine.offloading.forgetting import CLEAR_S
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
from quire.engine.prompts import Prompt, params_for_each, split
from quire.engine.request_maker import ModelFacts, RequestMaker
from quire.engine.scheduling.offload_policy import OffloadReport
from quire.engine.sequence import FinishReason, Request, Sequence
from quire.engine.statistics import Statistics
from quire.engine.step_plan import TokenOutput
from quire.errors import ConfigError, MemoryUnavailable, RankLost, RequestError
from quire.kv import NO_KEYS, Accounting, PrefixKeys, Usage
from quire.kv.interface import found_block_size
from quire.kv.page_tables import usage_with_tables
from quire.memory import CountedMemory, MemoryProvider
from quire.memory.machine.readings import Gauge
from quire.models.file_hashes import CannotName
from quire.models.loader import LoadedModel
from quire.models.speech import Hearing
from quire.sampling_params import (
    SAMPLING_DEFAULTS,
    BeamSearchParams,
    Params,
    PoolingParams,
    SamplingParams,
)
from quire.tiers import TierError
from quire.tiers.fingerprint import Fingerprint
from quire.units import format_bytes, parse_bytes

log = logging.getLogger(__name__)

Observer: TypeAlias = Callable[[Usage], None]

_USAGE_AGE_S = 0.25  # the most that the noted usage is old when a step begins
MOST_CLEAR_S = 2 * CLEAR_S  # that a caller waits for tiers, and for what they do before
STILL_CLEARING = (
    f"reset_external: tiers are still busy after {MOST_CLEAR_S:g} s; nothing is loaded from them "
    f"until they have forgotten all"
)


class LLM:
    """A model behind an engine.

    ``model`` is a local folder, a hub name, a Transformers model in memory, what
    ``models.loader.load`` returned, or None for the demo model. Options are the fields of
    ``EngineConfig``. ``show_progress`` lets Transformers draw bars while it loads. ``memory``
    counts the bytes that were taken from the system. Leaving a ``with`` block gives them back, and
    a model that the LLM loaded. A model in memory stays as it was, and its own ``generate`` works.

    Once a request has run, the cache shrinks while the machine is short of memory, as ``gauge``
    reads it, and grows again later (``elastic``). No sequence ends because of that.

    ``statistics`` counts tokens, hits and misses of the prefix cache, preemptions, why requests
    end, and the seconds of their parts. Any thread may read them, during a step and after
    ``close`` too. ``kv_events`` publishes what comes into the prefix cache and what goes, if
    ``kv_events_config`` asks for it; else it is None.

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
        if isinstance(tokenizer, (str, Path)):
            options["tokenizer"], tokenizer = str(tokenizer), None
        self.config = EngineConfig.from_options(**options)
        refuse_options(self.config, model, provider)
        self._has_own_model = model is None or isinstance(model, (str, Path))
        self._provider, self._gauge = provider, gauge
        self.kv_events = events = EventPublisher.of(self.config.kv_events_config)
        with ExitStack() as undo:
            if events is not None:
                undo.callback(events.close)
            loaded = self._build(self.config, model, tokenizer, show_progress=show_progress)
            undo.pop_all()
        self._model_name = model if self._has_own_model else None
        self.name, self.tokenizer = loaded.name, loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        self._maker = RequestMaker(self._facts(loaded))
        self.statistics = self.engine.scheduler.statistics
        self._noted_usage, self._noted_s = self._usage_now(), self.now_s()
        self._listeners: dict[int, Listener | BeamSearch] = {}  # of unfinished sequences, by id
        self.sleep_level = 0  # 1: KV memory is given back; 2: and the model
        self._closed, self._close_is_over = False, Event()
        self._closing = Lock()  # lets one of two threads close
        self.has_failed = False  # closed after an error
        if events is not None:
            weakref.finalize(self, _close_collected, events.close)
            try:
                blocks = self._kv.accounting
                events.start(blocks, found_block_size(blocks, self.config.block_size))
            except BaseException:
                self.close()
                raise

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
        """Load the model and build an engine for it. Raises: as the constructor."""
        loaded = loaded_model(model, tokenizer, config, show_progress=show_progress)
        # The ranks of a model that the caller loaded are the caller's.
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
        self._loaded: LoadedModel | None
        self.spec, self.ledger = parts.spec, parts.ledger
        self.max_model_len = parts.max_model_len
        self.attention_backend, self.attention_way = parts.attention_backend, parts.attention_way
        self.engine, self._kv, self._team = parts.engine, parts.kv, parts.team
        self._resident, self._elastic = parts.resident, parts.elastic
        if self.kv_events is not None:
            self._elastic.after_idle = partial(self.kv_events.take_from, parts.kv)
        self._most_bytes = parts.most_bytes
        if (offload := parts.engine.scheduler.offload) is not None:
            offload.store_when_idle(partial(_store_when_idle, weakref.ref(self)))
            weakref.finalize(self, _close_collected, offload.close)
        self._source_prompts, self._loaded = parts.source_prompts, loaded
        self._vision = parts.vision
        return loaded

    def _facts(self, loaded: LoadedModel) -> ModelFacts:
        sources, transfer = self._source_prompts, self.config.kv_transfer_config
        defaults = {
            name: getattr(loaded.model.generation_config, name, None) for name in SAMPLING_DEFAULTS
        }
        begins = () if sources is None else sources.text_begins
        return ModelFacts(
            name=loaded.name,
            model_type=self.spec.model_type,
            tokenizer=loaded.tokenizer,
            vocab_size=loaded.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.engine.scheduler.limits.eos_token_ids,
            sampling_defaults={name: own for name, own in defaults.items() if own is not None},
            embeddings=Poolable.of(loaded),
            hearing=Hearing.of(loaded, begins, self.max_model_len),
            vision=self._vision,
            source_prompts=sources,
            takes_blocks=transfer is not None and transfer.is_own,
        )

    def fingerprint(self) -> Fingerprint | None:
        """Return what the entries of its cache mean: the model by content, and options.

        Weights are hashed, if they have not been. None where it cannot be told, and while the LLM
        has no model: after ``close`` and asleep at level 2.
        """
        loaded = self._loaded
        if loaded is None:
            return None
        try:
            layout = BlockLayout.of(self._kv.accounting, self._kv.storage)
            return kv_fingerprint(loaded, self.config, layout)
        except CannotName as error:
            log.warning("%s cannot be told from other models: %s", self.name, error)
            return None

    @property
    def facts(self) -> ModelFacts:
        """What can be known of the model without its weights."""
        return self._maker.facts

    @cached_property
    def _chats(self) -> ChatPrompts:
        """Made by the first ``chat``: it reads the whole vocabulary."""
        return ChatPrompts(self.facts)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        observe: Observer | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> list[CompletionOutput]:
        """Continue every prompt (text, or token ids); all of them run together.

        A prompt of an encoder-decoder is the source. Its text begins as with Transformers'
        ``generate``: with decoder_start_token_id and the tokens that the generation config forces
        next, which count as the prompt. ``{"source": …, "prompt_token_ids": […]}`` replaces them. A
        source is text, token ids, or the input_features of a speech model (a tensor
        [mels, frames]).

        ``{"prompt": text, "multi_modal_data": {"image": …}}`` shows a model that sees one image or
        a list of them, Pillow's or u8[height, width, 3]: the text has its processor's placeholder
        for each.

        ``params`` are for all prompts, or one for each. ``observe`` is called with the cache's
        usage after each step. ``kv_transfer_params`` are those of ``request``, for all prompts.

        Raises: RequestError for a prompt that cannot run, before any is started; MemoryUnavailable
        where the system has no addresses left, and then the LLM is closed.
        """
        requests = self._requests(prompts, params, kv_transfer_params)
        return self._completions(requests, observe)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] = NO_KWARGS,
        observe: Observer | None = None,
    ) -> list[CompletionOutput]:
        """Answer a conversation, or each of several, as ``generate`` continues prompts.

        Messages are OpenAI's. Content may have images among its parts: ``{"type": "image_pil",
        "image_pil": …}`` with one of Pillow's or u8[height, width, 3], or ``image_url`` with a
        ``data:`` URL. ``chat_template``, a file or the template itself, takes the place of the
        model's own. The answer's text is as it was generated, with reasoning and calls in it.

        Raises: RequestError, also for messages that the template refuses; ConfigError for a
        template that is none; as ``generate``.
        """
        self._refuse_if_out()
        prompts = self._chats.of(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        each = [
            replace(own, stop=(*own.stop, *self._chats.stop))
            for own in params_for_each(params, len(prompts))
        ]
        return self._completions(self._requests(prompts, each), observe)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        observe: Observer | None = None,
    ) -> Iterator[TextDelta]:
        """Continue prompts as ``generate`` does, piece by piece.

        Leaving the loop ends what still runs. Nothing runs before the first piece is asked for.
        Several streams may be read in turns.
        """
        return self._run(self._requests(prompts, params), observe, [])

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams
    ) -> list[CompletionOutput]:
        """Find the likeliest continuations of every prompt, the best choice first.

        Raises: as ``generate``.
        """
        self._refuse_if_out()
        return self._completions([self.request(prompt, params) for prompt in split(prompts)], None)

    def embed(
        self, prompts: Prompt | Iterable[Prompt], pooling_params: PoolingParams | None = None
    ) -> list[PromptEmbedding]:
        """Return the embedding of every prompt: its last token's hidden state after the last norm.

        Prompts are computed beside other requests, chunk by chunk, and found in the prefix cache.

        Raises: RequestError for a prompt that cannot run or ended early, and for a model without
        embeddings.
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
        """Return the cosine of the embeddings of each pair of texts, from -1 to 1.

        One text is compared with each of several, or each of several with the one at its place.

        Raises: as ``embed``, and RequestError for other numbers of texts.
        """
        first, second = split(text_1), split(text_2)
        compared = pairs(len(first), len(second))
        found = [each.embedding for each in self.embed([*first, *second])]
        return scores(found, [(one, len(first) + other) for one, other in compared])

    def usage(self, *, wait: bool = True) -> Usage:
        """Return the bytes reserved, committed, used and wasted at this moment.

        Without ``wait``, while a step runs, they are those before that step, or up to a quarter of
        a second older.
        """
        if self._elastic.lock.acquire(blocking=wait):
            try:
                self._note_usage()
            finally:
                self._elastic.lock.release()
        return self._noted_usage

    def now_s(self) -> float:
        """Return the time of the clock of ``statistics``, in seconds."""
        return self.engine.clock()

    @property
    def is_closed(self) -> bool:
        """Whether the LLM was closed, or has failed."""
        return self._closed

    @property
    def accounting(self) -> Accounting:
        """Which sequence holds which tokens; another object after the cache began anew.

        For the thread that steps, between two steps.
        """
        return self._kv.accounting

    @property
    def memory(self) -> CountedMemory:
        """KV memory that was taken from the system and given back."""
        return self._kv.memory

    @property
    def elastic(self) -> Elasticity:
        """Where the ceiling on KV memory is, why, and what moving it has cost."""
        return self._elastic.state

    def resize(self, kv_cache_memory_bytes: int | str) -> None:
        """Change the capacity in bytes while prompts run. It waits for the step under way.

        Blocks that are only cached go first. Then sequences are preempted, and one that is too long
        for the capacity ends with its text so far.

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
        with self._elastic.lock:
            self._publish_events()

    @property
    def tiers(self) -> OffloadReport | None:
        """What tiers hold and have done; None without tiers. No tier is asked, and no step waits.

        Any thread may read it, during a step and after ``close`` too.
        """
        offload = self.engine.scheduler.offload
        return None if offload is None else offload.report()

    def trust_tiers(self, name: str | None = None) -> None:
        """Load from tiers again that gave bad records: from one, or from each (None).

        Raises: RequestError without tiers, and for a name that none of them has.
        """
        names = self._tier_names()
        if name is not None and name not in names:
            raise RequestError(f"tier={name[:80]!r} is none of this engine's: {', '.join(names)}")
        offload = self.engine.scheduler.offload
        assert offload is not None
        offload.trust(name)

    def _tier_names(self) -> list[str]:
        report = self.tiers
        if report is None:
            raise RequestError("this engine has no tiers: kv_tier names them")
        return [tier.name for tier in report.tiers]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_external: bool = False
    ) -> bool:
        """Drop the blocks that are kept for later prompts. Return False while a request runs.

        With ``reset_running_requests`` running requests compute their tokens again. Records in
        tiers stay, but for a model in memory whose weights are not what they were: tiers are not
        used any more then, since its records would be another model's. With ``reset_external``
        tiers forget all that they have of this model in this configuration, for every engine that
        shares them; the call waits for that.

        Raises: RequestError where ``reset_external`` cannot be done, before anything is; TierError
        where a tier could not forget all. Nothing is loaded from such a tier until it is trusted.
        """
        clearing = self.begin_reset(reset_running_requests, reset_external)
        if clearing is None:
            return False
        try:
            require_cleared(clearing.result(MOST_CLEAR_S))
        except TimeoutError:
            raise TierError(STILL_CLEARING) from None
        return True

    def check_reset_external(self) -> None:
        """Check that all tiers can forget what they have of this model. Raises: RequestError."""
        self._tier_names()
        report = self.tiers
        assert report is not None
        if unable := [tier.name for tier in report.tiers if not tier.may_clear]:
            raise RequestError(
                f"reset_external: {', '.join(unable)} cannot find all records of one model: "
                f"remove them by its own means, or take it out of kv_tier"
            )

    def begin_reset(
        self, reset_running_requests: bool, reset_external: bool
    ) -> "Future[Mapping[str, str]] | None":
        """Reset as ``reset_prefix_cache`` does, without waiting for tiers.

        Returns: None while a request runs; else a future of why a tier has not forgotten all, by
        its name. Raises: RequestError.
        """
        if reset_external:
            self._refuse_if_closed()
            self.check_reset_external()
        with self._elastic.lock:
            if self.engine.scheduler.offload is not None:
                self.engine.scheduler.offload.check_model()
            if reset_running_requests:
                while self.engine.scheduler.preempt_youngest(spare_oldest=False):
                    pass
            done = self._kv.accounting.reset_prefix_cache()
            self._kv.carry_out()
            clearing = Future[Mapping[str, str]]()
            if done and reset_external and self.engine.scheduler.offload is not None:
                clearing = self.engine.scheduler.offload.clear()
            else:
                clearing.set_result({})
            self._publish_events()
        return clearing if done else None

    def sleep(self, level: int = 1) -> bool:
        """Give memory back until ``wake_up``. Return False, and do nothing, while a request runs.

        Level 1 gives back all KV memory, level 2 the model too, with what was made from it. Prompts
        are refused meanwhile.

        Raises: RequestError for another level, after ``close``, and for level 2 with a model in
        memory, which cannot be read again.
        """
        self.check_sleep(level)
        with self._elastic.lock:
            self._refuse_if_closed()
            if self.engine.scheduler.has_unfinished:
                return False
            if not self.sleep_level:
                self._kv.accounting.reset_prefix_cache()
                self._elastic.sleep()
                self._publish_events()
                self._note_usage()
                self.sleep_level = 1
            if level > self.sleep_level:
                self._elastic.close()
                self.sleep_level = 2
                self._let_go(End("abort", "the LLM was put to sleep"))
        return True

    def check_sleep(self, level: int) -> None:
        """Check a level of ``sleep``. Raises: RequestError."""
        if level not in (1, 2) or isinstance(level, bool):
            raise RequestError(f"level={level!r} must be 1 (KV memory) or 2 (the model too)")
        if level == 2 and not self._has_own_model:
            raise RequestError(
                f"level=2 gives the model back, and {self.name} was handed in as an object, which "
                f"cannot be read again: use level=1, or load it by its folder or name"
            )

    def wake_up(self) -> None:
        """Run again after ``sleep``. A model that was given back is loaded again.

        It does nothing to an LLM that is awake.

        Raises: as the constructor, and RequestError after ``close``; the LLM stays asleep then.
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
        """Whether the LLM was put to sleep."""
        return self.sleep_level > 0

    def store_hottest(self, seconds: float) -> int:
        """Store the hottest cached blocks for those who come after, for so many seconds.

        They go to tiers that persist or are shared, and to the peer ``drain_to`` of
        ``kv_transfer_config``. No step is run meanwhile. Returns: the number of blocks copied out.
        """
        with self._elastic.lock:
            offload = None if self._closed else self.engine.scheduler.offload
            if offload is None or self.is_sleeping:
                return 0
            offload.check_model()
            return offload.drain(seconds)

    def close(self) -> None:
        """End what still runs, and give the model and all KV memory back.

        A model that the LLM loaded goes, with what was made from its weights. A model in memory
        stays usable. Tensors of either stay valid; the cache's addresses go with the last tensor
        over them. Statistics can still be read. A second call does nothing.
        """
        self._close("abort", "the LLM was closed")

    def fail(self, detail: str) -> None:
        """Close after an error: what still runs ends with it."""
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
        kv_transfer_params: Mapping[str, Any] | None = None,
        output_token_ids: tuple[int, ...] = (),
    ) -> Request:
        """Make a request of a prompt: for text, a beam search or an embedding, by its params.

        ``kv_transfer_params`` are vLLM's: ``{"do_remote_decode": True}`` leaves the prompt's blocks
        for another server, and what that answers brings them there. Without a
        ``kv_transfer_config`` they have no effect.

        ``output_token_ids`` are the first tokens of its one continuation, which another engine has
        generated. They are computed as a preempted sequence's are, and count for all limits, rules
        and draws; what comes is what follows them, text included. If they end it already, its only
        piece says so.

        Raises: RequestError.
        """
        self._refuse_if_out()
        request = self._maker.make(
            prompt,
            params,
            priority=priority,
            keys=keys,
            kv_transfer_params=kv_transfer_params,
            output_token_ids=output_token_ids,
        )
        self.engine.scheduler.check_request(request)
        return request

    def adopt(self, request: Request) -> Request:
        """Check a request that another process has made, and make it this engine's.

        Raises: RequestError.
        """
        self._refuse_if_out()
        request = self._maker.adopt(request)
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
        """Queue a request. ``deliver`` is called with its pieces, from within ``step``.

        ``arrived_s`` is the time of its arrival in seconds, if not now (``now_s``). An error of
        ``deliver`` ends the sequence. Raises: RequestError after ``close``.
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
                return sequences
            for sequence in sequences:
                listener = Listener(sequence, self.tokenizer, index, deliver)
                begun = request.resumption
                if begun is None or begun.finish_reason is None:
                    self._listeners[sequence.seq_id] = listener
                    continue
                # What was generated elsewhere is all of it.
                listener.end(End(begun.finish_reason, stopped_by=begun.stopped_by))
                self.engine.finish(sequence, begun.finish_reason)
        return sequences

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """End what still runs of these, and free what they alone hold.

        The reader of a beam search gets what it has found so far.
        """
        with self._elastic.lock:
            for sequence in sequences:
                listener = self._listeners.pop(sequence.seq_id, None)
                if isinstance(listener, BeamSearch):
                    listener.end(End("abort", "abandoned"))
                self.engine.finish(sequence, "abort", "abandoned")
            self._kv.carry_out()

    def step(self) -> bool:
        """Take one step for all requests. Return False if none is left, as after ``close``.

        Where the system would end the process for lack of memory, it only waits for a moment.

        Raises: MemoryUnavailable where that lasts, or where the system has no addresses left for an
        empty cache, and RankLost; the LLM is closed then. RequestError from within
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
                    self._publish_events()
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
        self._close_is_over.wait()  # without the lock, for which the closing thread may wait
        return False

    def _tell(self, output: TokenOutput) -> None:
        """Hand what a step did for a sequence to its listener, or to its beam search.

        An error there ends that sequence. Raises: MemoryUnavailable and RankLost, as ``step``.
        """
        sequence = output.sequence
        listener = self._listeners.get(sequence.seq_id)
        if listener is None:  # an earlier token has ended its text
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

    def _publish_events(self) -> None:
        """Hand what the cache has noted to the publisher, between two steps."""
        if self.kv_events is not None and self.sleep_level < 2 and not self._closed:
            offload = self.engine.scheduler.offload
            of_tiers = () if offload is None else offload.take_events()
            self.kv_events.take_from(self._kv, of_tiers)

    def _note_usage(self) -> None:
        """Note the usage for callers that do not wait."""
        if not self._closed and self.sleep_level < 2:
            self._noted_usage, self._noted_s = self._usage_now(), self.now_s()

    def _usage_now(self) -> Usage:
        return usage_with_tables(self._kv.accounting, self._kv.memory.page_bytes)

    def _close(self, reason: FinishReason, detail: str) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        with ExitStack() as parts:  # all callbacks run, even if one raises
            parts.callback(self._close_is_over.set)
            if self.kv_events is not None:
                parts.callback(self.kv_events.close)
            self._elastic.close()
            parts.enter_context(self._elastic.lock)
            if self.sleep_level < 2:
                self._let_go(End(reason, detail))

    def _let_go(self, end: End) -> None:
        """End what still runs, and give back the model and all KV memory."""
        with ExitStack() as parts:
            for part in (self._ranks, self._team):
                if part is not None:
                    parts.callback(part.close)
            # Nothing needs the memory that was kept for the cache, or that held the model.
            self._loaded = None
            parts.callback(self._resident.rest, short=not self._has_own_model)
            parts.callback(self._kv.close)
            parts.callback(self._resident.close)
            parts.callback(self._tell_the_end, end)
            self._noted_usage = Usage.nothing()
            self.engine.close(end.reason, end.detail)

    def _tell_the_end(self, end: End) -> None:
        """Hand the LLM's end to all listeners."""
        for listener in dict.fromkeys(self._listeners.values()):  # a search listens to each beam
            listener.end(end)
        self._listeners.clear()

    def _requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """Make a request of every prompt. Raises: RequestError."""
        self._refuse_if_out()
        several = split(prompts)
        each = params_for_each(params, len(several))
        return [
            self.request(prompt, own, kv_transfer_params=kv_transfer_params)
            for prompt, own in zip(several, each, strict=True)
        ]

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
        """Step until these requests have ended. ``started`` receives the sequences of each.

        Pieces of other requests go to their own queues.
        """
        deltas: deque[TextDelta] = deque()
        sequences: list[Sequence] = []
        try:
            for index, request in enumerate(requests):
                started.append(self.start(request, deltas.append, index=index))
                sequences += started[-1]
            # In this order: another thread removes a listener after it has put the last piece.
            while any(own.seq_id in self._listeners for own in sequences) or deltas:
                if not deltas:
                    self.step()
                    if observe is not None:
                        observe(self.usage())
                while deltas:
                    yield deltas.popleft()
        finally:
            self.abandon(sequences)


def require_cleared(left: Mapping[str, str]) -> None:
    """Raise TierError if a tier has not forgotten all. ``left``: why, by the tier's name."""
    if left:
        several = "; ".join(f"{name}: {why}" for name, why in left.items())
        raise TierError(
            f"reset_external: records may be left, and nothing is loaded from these tiers until "
            f"they are cleared or trusted: {several}"
        )


def _close_collected(close: Callable[[], None]) -> None:
    """Close what a collected LLM has left behind.

    A collector runs in any thread, also in one that is to be ended, which may hold a lock that
    closing takes. The main thread is none of these; in place of another one a new one closes.
    """
    if current_thread() is main_thread():
        close()
        return
    with suppress(RuntimeError):  # the system has none left: what is open ends with the process
        Thread(target=close, name="quire-close").start()


def _store_when_idle(llm_ref: "weakref.ref[LLM]") -> bool:
    """Store blocks for tiers, unless a thread uses the cache. Return False if some are left."""
    llm = llm_ref()
    if llm is None or llm.is_closed:
        return True
    lock = llm._elastic.lock
    if not lock.acquire(blocking=False):
        return False
    try:
        is_done = llm.is_closed or llm.is_sleeping or llm.engine.store_blocks()
        llm._publish_events()  # of what was stored since the last step
        return is_done
    finally:
        lock.release()
