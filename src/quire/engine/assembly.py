"""A model over a cache of its own, with the fastest attention that serves it, tried out."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from quire.attention import AttentionBackend, backend_for_graphs, choose_backend
from quire.config import EngineConfig, kernel_dir
from quire.engine.kv_cache import KVCache, MakePair
from quire.engine.parallel.leader import LeaderGroup
from quire.engine.runner import ModelRunner
from quire.engine.validation import refuse_switching_positions, refuse_too_little
from quire.errors import ConfigError, MemoryUnavailable
from quire.kv import Accounting, CacheConfig, Storage, build_accounting, build_storage
from quire.kv.layout import attention_groups, attention_spec
from quire.memory import MemoryProvider
from quire.memory.by_device import give_back_kept, memory_for
from quire.models.executors.choice import hides_errors
from quire.models.executors.small_copy import small_copy
from quire.models.fingerprint import ModelFingerprint
from quire.models.fused_modules import FusedModules
from quire.models.loader import LoadedModel
from quire.spec import ModelSpec

_SMALL_CACHE_BYTES, _SMALL_MODEL_LEN = 2**26, 128  # of a small copy: addresses, more than pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What computes a model's steps."""

    kv: KVCache
    runner: ModelRunner
    backend: AttentionBackend
    attention_way: str  # one of ``models.executors``

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
) -> Assembly:
    """``spec`` has keys and values as they are kept; ``team`` has the rest of the model.

    Raises: ConfigError, UnsupportedModel, MemoryUnavailable. Nothing is held then.
    """
    refuse_switching_positions(loaded, sizes.max_model_len)
    refuse_too_little(build_accounting(strategy, spec, sizes), sizes.max_model_len)
    backend, make_pair = prepare(loaded, spec, strategy, sizes, provider, config, team)
    kv = KVCache(make_pair, team)
    # Parts of layers have no stand-ins: what joins them to the others' is in their calls.
    can_exchange = team is None and loaded.device.type == "cpu"
    watch = ModelFingerprint(loaded.model, is_private=loaded.is_private)
    stand_ins = FusedModules(loaded.model, kernel_dir(), watch) if can_exchange else None
    try:
        runner = ModelRunner(
            loaded, kv, backend, stand_ins, team, watch, records=not config.enforce_eager
        )
        with _small_runner(loaded, spec, strategy, sizes, provider, config, team) as small:
            runner.try_out(max_tokens=sizes.max_model_len, small=small)
    except BaseException:
        kv.close()
        raise
    return Assembly(kv=kv, runner=runner, backend=backend, attention_way=runner.way)


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
    """What runs a small copy of the model, over a cache of its own; None where none is needed.

    None too where none can be made. Where what attends in the model cannot in the copy, torch does.
    """
    specs = [attention_spec(group) for group in attention_groups(spec.groups)]
    # Other ranks have no copy; what reads a source has more parts than a copy would be cut by.
    copied = None
    if team is None and not loaded.spec.source_tokens and hides_errors(loaded.model.dtype, specs):
        copied = small_copy(loaded)
    if copied is None:
        yield None
        return
    # On the host what is kept for the model's own cache stays untouched.
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
        config = replace(config, attention_backend="sdpa")
        backend, make_pair = prepare(copied, copied.spec, strategy, cut, memory, config)
    kv = KVCache(make_pair)
    try:
        yield ModelRunner(copied, kv, backend)
    finally:
        kv.close()
        with suppress(MemoryUnavailable):  # as after a fault in a kernel, which is to be said
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
    """What attends, and what makes a cache's pair. Raises: ConfigError."""
    backend = choose_backend(
        config.attention_backend,
        [attention_spec(group) for group in attention_groups(spec.groups)],
        loaded.device,
        kernel_dir=kernel_dir(),
    )

    make_writer = backend.make_writer  # all that the cache needs of it, once steps have ended

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
