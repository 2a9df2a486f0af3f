"""A model over a cache of its own, with the fastest attention that serves it, tried out."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from quire.attention import BY_TORCH, AttentionBackend, backend_for_graphs, choose_backend
from quire.config import EngineConfig, kernel_dir
from quire.engine.kv_cache import KVCache, MakePair
from quire.engine.kv_sizing import image_bytes
from quire.engine.parallel.leader import LeaderGroup
from quire.engine.runner import ModelRunner
from quire.errors import ConfigError, MemoryUnavailable
from quire.kv import Accounting, CacheConfig, Never, Storage, build_accounting, build_storage
from quire.kv.layout import attention_groups, attention_spec
from quire.memory import MemoryProvider
from quire.memory.by_device import give_back_kept, memory_for
from quire.models.executors.choice import hides_errors
from quire.models.executors.small_copy import small_copy
from quire.models.fused_modules import FusedModules
from quire.models.loader import LoadedModel
from quire.models.model_watch import ModelWatch
from quire.models.vision import Vision
from quire.spec import ModelSpec
from quire.units import format_bytes, format_count

log = logging.getLogger(__name__)

_SMALL_CACHE_BYTES, _SMALL_MODEL_LEN = 2**26, 128  # of a small copy: addresses, more than pages
_TRIAL_ID = -1  # requests count from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A cache and what computes a model's steps over it."""

    kv: KVCache
    runner: ModelRunner
    backend: AttentionBackend
    attention_way: str  # one of ``models.executors``
    vision: Vision

    def capture(self, config: EngineConfig, max_model_len: int) -> None:
        """Capture decode steps as graphs, where there is a GPU for them and graphs are wanted."""
        if config.enforce_eager:
            return
        groups = attention_groups(self.kv.accounting.groups)
        graphs_by = backend_for_graphs(
            self.backend,
            config.attention_backend,
            [attention_spec(group) for group in groups],
            self.runner.device,
        )
        self.runner.capture(
            max_model_len=max_model_len, max_num_seqs=config.max_num_seqs, backend=graphs_by
        )


def assemble(
    loaded: LoadedModel,
    spec: ModelSpec,
    strategy: str,
    sizes: CacheConfig,
    provider: MemoryProvider,
    config: EngineConfig,
    team: LeaderGroup | None = None,
    vision: Vision | None = None,
) -> Assembly:
    """Put a model over a cache, and try it out. ``team`` has the rest of the model.

    ``spec`` has the dtypes in which keys and values are stored. It is shown
    images by ``vision``, none without it.

    Raises: ConfigError, UnsupportedModel, MemoryUnavailable. Nothing is held then.
    """
    vision = vision or Vision(name=loaded.name).without("image", "it drafts")
    _refuse_switching_positions(loaded, sizes.max_model_len)
    if config.batch_invariant:
        _refuse_variance(loaded, team)
    _refuse_too_little(build_accounting(strategy, spec, sizes), sizes.max_model_len)
    backend, make_pair = prepare(loaded, spec, strategy, sizes, provider, config, team)
    kv = KVCache(make_pair, team)
    # A rank's part of a layer has no stand-in: its call joins it to the other ranks' parts.
    can_exchange = team is None and loaded.device.type == "cpu"
    watch = ModelWatch(loaded.model, is_private=loaded.is_private)
    stand_ins = None
    if can_exchange:
        stand_ins = FusedModules(
            loaded.model, kernel_dir(), watch, batch_invariant=config.batch_invariant
        )
    try:
        runner = ModelRunner(
            loaded, kv, backend, stand_ins, team, watch, records=not config.enforce_eager
        )
        with _small_runner(loaded, spec, strategy, sizes, provider, config, team) as small:
            runner.try_out(max_tokens=sizes.max_model_len, small=small)
        if not vision.why_not:
            vision = runner.try_images(
                vision,
                max_tokens=sizes.max_model_len,
                most_bytes=image_bytes(config, vision.encoder) if vision.encoder else 0,
            )
    except BaseException:
        kv.close()
        raise
    return Assembly(kv=kv, runner=runner, backend=backend, attention_way=runner.way, vision=vision)


@contextmanager
def _small_runner(
    loaded: LoadedModel,
    spec: ModelSpec,
    strategy: str,
    sizes: CacheConfig,
    provider: MemoryProvider,
    config: EngineConfig,
    team: LeaderGroup | None,
) -> Iterator[ModelRunner | None]:
    """Run a small copy of the model over its own cache; None where it needs or has no copy.

    Where the model's attention backend cannot serve the copy, torch attends in it.
    """
    specs = [attention_spec(group) for group in attention_groups(spec.groups)]
    # Other ranks have no copy, and an encoder-decoder has parts that a copy would not cut.
    copied = None
    if team is None and not loaded.spec.source_tokens and hides_errors(loaded.model.dtype, specs):
        copied = small_copy(loaded)
    if copied is None:
        yield None
        return
    config = replace(config, batch_invariant=False)  # it is tried by torch alone
    # On the host the memory for the model's own cache stays untouched.
    on_host = loaded.device.type == "cpu"
    memory = memory_for(loaded.device, "on-demand") if on_host else provider
    cut = replace(
        sizes,
        page_bytes=memory.page_bytes,
        max_num_seqs=1,
        capacity_bytes=_SMALL_CACHE_BYTES,
        max_capacity_bytes=None,
        max_model_len=_SMALL_MODEL_LEN,
    )
    try:
        backend, make_pair = prepare(copied, copied.spec, strategy, cut, memory, config)
    except ConfigError:  # FlashInfer has no kernels for float32
        config = replace(config, attention_backend=BY_TORCH[0])
        backend, make_pair = prepare(copied, copied.spec, strategy, cut, memory, config)
    kv = KVCache(make_pair)
    try:
        yield ModelRunner(copied, kv, backend, watch=ModelWatch(copied.model, is_private=True))
    finally:
        kv.close()
        with suppress(MemoryUnavailable):  # after a kernel's fault, whose error goes first
            give_back_kept(memory)


def prepare(
    loaded: LoadedModel,
    spec: ModelSpec,
    strategy: str,
    sizes: CacheConfig,
    provider: MemoryProvider,
    config: EngineConfig,
    team: LeaderGroup | None = None,
) -> tuple[AttentionBackend, MakePair]:
    """Choose the attention backend and return it with the cache's maker. Raises: ConfigError."""
    backend = choose_backend(
        config.attention_backend,
        [attention_spec(group) for group in attention_groups(spec.groups)],
        loaded.device,
        kernel_dir=kernel_dir(),
        batch_invariant=config.batch_invariant,
    )
    make_writer = backend.make_writer  # without the rest of the backend, which outlives steps

    def make_pair() -> tuple[Accounting, Storage]:
        accounting = build_accounting(strategy, spec, sizes)

        def make_storage() -> Storage:
            return build_storage(
                strategy,
                accounting,
                provider,
                make_writer,
                one_stream=config.enforce_eager,
            )

        return accounting, make_storage() if team is None else team.make_storage(make_storage)

    return backend, make_pair


def _refuse_variance(loaded: LoadedModel, team: LeaderGroup | None) -> None:
    """Refuse what is known to add up in other orders in other batches. Raises: ConfigError.

    What a model's own code does shows when it is tried out.
    """
    if loaded.device.type != "cpu":
        reason = f"its kernels are of the CPU, and the model is on {loaded.device}"
    elif team is not None:
        reason = "ranks add up their parts in an order that goes by the number of tokens"
    elif loaded.spec.recurrent_layers:
        reason = "recurrent layers scan a chunk of tokens in another order than one token"
    elif loaded.spec.source_tokens:
        reason = "texts that read a source are computed one at a time, by torch"
    else:
        return
    raise ConfigError(f"batch_invariant cannot serve {loaded.name}: {reason}")


def _refuse_switching_positions(loaded: LoadedModel, max_model_len: int) -> None:
    """Refuse a length at which one sequence would turn the positions of all others.

    Transformers' "longrope" takes other frequencies for a whole batch as soon as one of its
    positions is past the length of the original training. Raises: ConfigError.
    """
    parameters = getattr(loaded.model.config.get_text_config(), "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            limit = rope["original_max_position_embeddings"]
            if max_model_len > limit:
                raise ConfigError(
                    f"{loaded.name} turns its positions otherwise past {format_count(limit)} "
                    f"tokens (longrope), which cannot be done for one sequence of a batch: "
                    f"max_model_len={format_count(max_model_len)} must be at most "
                    f"{format_count(limit)}"
                )


def _refuse_too_little(accounting: Accounting, max_tokens: int) -> None:
    """Refuse a cache in which even a short sequence finds no room. Raises: ConfigError."""
    least = min(max_tokens, 2)  # a prompt and a token
    accounting.add(_TRIAL_ID, max_tokens=least)
    verdict = accounting.try_extend(_TRIAL_ID, least)
    accounting.free(_TRIAL_ID)
    accounting.drain()
    if isinstance(verdict, Never):
        raise ConfigError(
            f"{format_bytes(verdict.capacity_bytes)} of KV memory cannot hold even a short "
            f"sequence, which takes {format_bytes(verdict.need_bytes)}: raise "
            f"kv_cache_memory_bytes or lower what one sequence takes (max_model_len, block_size, "
            f"growth_tokens)"
        )
