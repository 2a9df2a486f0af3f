"""``LLM``: the engine with a model, a cache and a tokenizer around it. Text in, text out."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quire.attention import choose_backend
from quire.config import KV_CACHE_DTYPES, EngineConfig, kernel_dir
from quire.engine.detokenizer import Detokenizer
from quire.engine.elastic import Elastic, Elasticity
from quire.engine.engine import Engine
from quire.engine.prompts import Prompt, encode, split
from quire.engine.runner import (
    ModelRunner,
    refuse_recurrent,
    refuse_switching_positions,
    refuse_too_little,
)
from quire.engine.sampler import Sampler
from quire.engine.scheduler import Scheduler, TokenOutput
from quire.engine.sequence import FinishReason, Request, SamplingParams, Sequence
from quire.engine.sizing import cache_config, kv_ledger
from quire.errors import ConfigError, MemoryUnavailable, RequestError
from quire.memory import MemoryProvider
from quire.memory.governor import Governor
from quire.memory.machine.readings import Gauge, HostGauge
from quire.memory.residency import Residency, Resident, host_memory
from quire.models.loader import LoadedModel, adopt, load
from quire.strategies import Usage, build_accounting, build_storage
from quire.strategies.layout import attention_spec
from quire.units import format_bytes, parse_bytes

Observer: TypeAlias = Callable[[Usage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of one prompt's continuation."""

    index: int  # of the prompt
    text: str
    token_id: int | None
    finish_reason: FinishReason | None  # None while it goes on
    detail: str = ""  # why it ended early; empty otherwise
    num_cached_tokens: int = 0  # of the prompt, found computed by an earlier one


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt's continuation."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    detail: str  # why it ended early; empty otherwise
    num_cached_tokens: int = 0  # of the prompt, found computed by an earlier one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listener:
    """Where one sequence's pieces go. The sequences of one call share the queue."""

    index: int
    detokenizer: Detokenizer | None
    deltas: deque[TextDelta]


class LLM:
    """A model behind the engine.

    ``model`` is a local folder, a hub name, a Transformers model in memory, what
    ``models.loader.load`` gave, or None for the demo model. Options are the fields of
    ``EngineConfig``. ``memory`` counts what was taken from the system; leaving a ``with`` block
    gives it back. A model in memory stays as it was: its own ``generate`` works all the while.

    From the first run on the cache shrinks while the machine is short of memory, as ``gauge`` reads
    it, and grows again later (``elastic``). No sequence ends because of that.

    Raises: ConfigError, ModelNotLoadable, UnsupportedModel, MemoryUnavailable.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Any = None,
        provider: MemoryProvider | None = None,
        gauge: Gauge | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_options(**options)
        loaded = _loaded(model, tokenizer, self.config.dtype)
        refuse_recurrent(loaded.spec)
        self.name, self.tokenizer = loaded.name, loaded.tokenizer
        kept_as = KV_CACHE_DTYPES[self.config.kv_cache_dtype]
        self.spec = loaded.spec if kept_as is None else loaded.spec.with_kv_dtype(kept_as)
        provider = _provider(provider, self.config.residency)
        self.ledger = kv_ledger(self.config, loaded, provider.page_bytes)
        sizes = cache_config(self.config, loaded, provider, self.ledger.require())
        self._resident = Resident(provider, self._residency, sizes.capacity_bytes)
        self.max_model_len = sizes.max_model_len
        refuse_switching_positions(loaded, self.max_model_len)
        self._accounting = build_accounting(self.config.cache, self.spec, sizes)
        refuse_too_little(self._accounting, self.max_model_len)
        backend = choose_backend(
            self.config.attention_backend,
            [attention_spec(group) for group in self._accounting.groups],
            loaded.model.device,
            kernel_dir=kernel_dir(),
        )
        self.attention_backend = backend.name
        self._storage = build_storage(
            self.config.cache, self._accounting, self._resident.provider, backend.make_writer
        )
        self.memory = self._storage.memory
        self._vocab_size: int = loaded.model.get_input_embeddings().weight.shape[0]
        scheduler = Scheduler(
            self._accounting,
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            eos_token_ids=_eos_token_ids(loaded),
            watermark_bytes=int(self.config.watermark * sizes.capacity_bytes),
        )
        try:
            runner = ModelRunner(loaded, self._accounting, self._storage, backend)
            runner.try_out(loaded, max_tokens=self.max_model_len)
            self._resident.prefault()
        except BaseException:
            self._storage.close()
            raise
        self.engine = Engine(scheduler, runner, Sampler(self.config.seed))
        self._most_bytes = sizes.most_bytes
        self._elastic = Elastic(
            self._accounting,
            self._storage,
            self._resident,
            scheduler,
            Governor(self.config.memory_mode),
            HostGauge() if gauge is None else gauge,
        )
        self._listeners: dict[int, _Listener] = {}  # of each sequence that has not ended
        self._next_id = 0
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        observe: Observer | None = None,
    ) -> list[Completion]:
        """Continue every prompt (text, or token ids); all of them run together.

        ``params`` are for all of them, or one for each. ``observe`` is called with the cache's
        usage after each step.

        Raises: RequestError for a prompt that cannot run, and then none has been started;
        MemoryUnavailable where the system has no pages left, and then the LLM is closed.
        """
        requests = self._requests(prompts, params)
        pieces: list[list[TextDelta]] = [[] for _ in requests]
        for delta in self._run(requests, observe):
            pieces[delta.index].append(delta)
        return [
            Completion(
                prompt_token_ids=request.prompt_token_ids,
                token_ids=tuple(d.token_id for d in deltas if d.token_id is not None),
                text="".join(delta.text for delta in deltas),
                finish_reason=deltas[-1].finish_reason or "stop",
                detail=deltas[-1].detail,
                num_cached_tokens=deltas[-1].num_cached_tokens,
            )
            for request, deltas in zip(requests, pieces, strict=True)
        ]

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
        return self._run(self._requests(prompts, params), observe)

    def usage(self) -> Usage:
        """Bytes reserved, committed, used and wasted at this moment."""
        with self._elastic.lock:
            return self._accounting.usage()

    @property
    def _residency(self) -> Residency:
        """As asked for; a rule that takes memory at the start asks for it too."""
        if self.ledger.committed_whole and self.config.residency == "on-demand":
            return "prefault"
        return self.config.residency

    @property
    def elastic(self) -> Elasticity:
        """Where the ceiling on KV memory is at this moment, why, and what moving it has cost."""
        return self._elastic.state

    def resize(self, kv_cache_memory_bytes: int | str) -> None:
        """Change the capacity while prompts run. It holds when this returns, after a step at most.

        What is only cached goes first; then sequences make room and compute again later, and one
        that is too long for it ends with its text so far.

        Raises: ConfigError for more than the LLM was made with. RequestError after ``close``.
        """
        self._refuse_if_closed()
        wanted = kv_cache_memory_bytes
        wanted = parse_bytes(wanted) if isinstance(wanted, str) else wanted
        if not 0 < wanted <= self._most_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes={kv_cache_memory_bytes!r} must be above 0 and at most the "
                f"{format_bytes(self._most_bytes)} ({self._most_bytes:,}) that this LLM was made "
                f"with: for more, make a new one"
            )
        self._elastic.resize(wanted)

    def reset_prefix_cache(self) -> bool:
        """Give back what is kept for later prompts; False, and nothing is done, while one runs."""
        with self._elastic.lock:
            done = self._accounting.reset_prefix_cache()
            self._storage.apply(self._accounting.drain())
        return done

    def close(self) -> None:
        """End what still runs and give all KV memory back. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._elastic.close()
        self._resident.close()
        with self._elastic.lock:
            self.engine.scheduler.finish_all("stop", "the LLM was closed")
            self._accounting.drain()  # closing gives back all that these would
            self._storage.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
    ) -> list[Request]:
        """Every prompt as a request that can run. Raises: RequestError."""
        self._refuse_if_closed()
        several = split(prompts)
        requests = []
        for prompt, own in zip(several, _params_for_each(params, len(several)), strict=True):
            if own.stop and self.tokenizer is None:
                raise RequestError("this model has no tokenizer: stop strings cannot be found")
            self._next_id += 1
            token_ids = encode(prompt, self.tokenizer, self._vocab_size)
            requests.append(
                Request(request_id=self._next_id, prompt_token_ids=token_ids, params=own)
            )
            self.engine.scheduler.check_request(requests[-1])
        return requests

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RequestError("this LLM is closed: make a new one")

    def _run(self, requests: list[Request], observe: Observer | None) -> Iterator[TextDelta]:
        """Step until these have ended; what the steps do for others goes to their own queues."""
        if self._closed:
            return
        deltas: deque[TextDelta] = deque()
        self._elastic.watch()
        self._resident.watch()
        with self._elastic.lock:
            sequences = [self.engine.scheduler.add(request) for request in requests]
        for index, sequence in enumerate(sequences):
            self._listeners[sequence.seq_id] = self._listener(index, sequence, deltas)
        try:
            while deltas or any(sequence.finish_reason is None for sequence in sequences):
                if not deltas:
                    self._step(observe)
                while deltas:
                    yield deltas.popleft()
        finally:
            with self._elastic.lock:
                for sequence in sequences:
                    self.engine.finish(sequence, "stop", "abandoned")
                    del self._listeners[sequence.seq_id]
                self._storage.apply(self._accounting.drain())

    def _step(self, observe: Observer | None) -> None:
        """One step. Closes the LLM where the system refuses pages that accounting counts on.

        Raises: MemoryUnavailable.
        """
        try:
            with self._elastic.lock:
                self._elastic.settle()
                for output in self.engine.step():
                    self._deliver(output)
        except MemoryUnavailable:
            self.close()
            raise
        if observe is not None:
            observe(self.usage())

    def _listener(self, index: int, sequence: Sequence, deltas: deque[TextDelta]) -> _Listener:
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, stop=sequence.request.params.stop)
        return _Listener(index=index, detokenizer=detokenizer, deltas=deltas)

    def _deliver(self, output: TokenOutput) -> None:
        """Put what a step did for a sequence into its queue; end it where a stop string is."""
        sequence, reason, text = output.sequence, output.finish_reason, ""
        listener = self._listeners[sequence.seq_id]
        detokenizer = listener.detokenizer
        if detokenizer is not None:
            if output.token_id is None:
                text = detokenizer.flush()
            else:
                text = detokenizer.add(output.token_id, last=reason is not None)
            if detokenizer.stopped:
                reason = "stop"
                self.engine.finish(sequence, reason)
        listener.deltas.append(
            TextDelta(
                index=listener.index,
                text=text,
                token_id=output.token_id,
                finish_reason=reason,
                detail=sequence.finish_detail,
                num_cached_tokens=sequence.num_cached_tokens,
            )
        )


def _provider(given: MemoryProvider | None, residency: Residency) -> MemoryProvider:
    if given is None:
        return host_memory(residency)
    if residency == "lock":
        raise ConfigError("residency=lock is for Quire's own memory: leave out provider=")
    return given


def _params_for_each(
    params: SamplingParams | Iterable[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    several = list(params) if isinstance(params, Iterable) else [params]
    for own in several:
        if not isinstance(own, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(own).__name__}")
    if len(several) != num_prompts:
        raise RequestError(
            f"{len(several)} params for {num_prompts} prompts: give one, or one each"
        )
    return several


def _loaded(model: Any, tokenizer: Any, dtype: str) -> LoadedModel:
    if model is None or isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise ConfigError("tokenizer= goes with a model in memory; a folder brings its own")
        return load(model, dtype=dtype)
    loaded = model if isinstance(model, LoadedModel) else adopt(model, tokenizer)
    if dtype not in ("auto", loaded.dtype):
        raise ConfigError(
            f"dtype={dtype} is not the model's, {loaded.dtype}: cast it, or leave dtype auto"
        )
    return loaded


def _eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """What ends a text: the generation config's word, else the config's."""
    for config in (loaded.model.generation_config, loaded.model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
