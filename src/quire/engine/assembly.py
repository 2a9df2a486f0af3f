"""A model over a cache of its own, with the fastest attention that serves it, tried out."""

from dataclasses import dataclass

from quire.attention import choose_backend
from quire.config import EngineConfig, kernel_dir
from quire.engine.kv_cache import KVCache
from quire.engine.runner import ModelRunner, refuse_switching_positions, refuse_too_little
from quire.memory import MemoryProvider
from quire.models.loader import LoadedModel
from quire.models.stand_ins import StandIns
from quire.spec import ModelSpec
from quire.strategies import Accounting, CacheConfig, Storage, build_accounting, build_storage
from quire.strategies.layout import attention_groups, attention_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What computes a model's steps."""

    kv: KVCache
    runner: ModelRunner
    attention_backend: str
    attention_way: str  # one of ``models.ways``


def assemble(
    loaded: LoadedModel,
    spec: ModelSpec,
    strategy: str,
    sizes: CacheConfig,
    provider: MemoryProvider,
    config: EngineConfig,
) -> Assembly:
    """``spec`` has keys and values as they are kept.

    Raises: ConfigError, UnsupportedModel, MemoryUnavailable. Nothing is held then.
    """
    refuse_switching_positions(loaded, sizes.max_model_len)
    empty = build_accounting(strategy, spec, sizes)
    refuse_too_little(empty, sizes.max_model_len)
    backend = choose_backend(
        config.attention_backend,
        [attention_spec(group) for group in attention_groups(empty.groups)],
        loaded.device,
        kernel_dir=kernel_dir(),
    )

    def make_pair() -> tuple[Accounting, Storage]:
        accounting = build_accounting(strategy, spec, sizes)
        return accounting, build_storage(strategy, accounting, provider, backend.make_writer)

    kv = KVCache(make_pair)
    try:
        on_cpu = loaded.device.type == "cpu"
        stand_ins = StandIns(loaded.model, kernel_dir()) if on_cpu else None
        runner = ModelRunner(loaded, kv, backend, stand_ins)
        runner.try_out(max_tokens=sizes.max_model_len)
    except BaseException:
        kv.close()
        raise
    return Assembly(kv=kv, runner=runner, attention_backend=backend.name, attention_way=runner.way)
