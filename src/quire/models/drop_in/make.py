"""``quire.cache``: what a user calls, and how the options become a cache."""

from collections.abc import Iterable
from dataclasses import replace

from transformers import PreTrainedModel

from quire.attention import BACKENDS, AttentionBackend, SdpaAttention, choose_backend
from quire.errors import ConfigError
from quire.kv import STRATEGIES, CacheConfig, Growth
from quire.kv.layout import suited_to
from quire.memory import CountedMemory, MemoryProvider
from quire.memory.budget import make_ledger
from quire.memory.budget.ledger import Needs
from quire.memory.by_device import known_machine, memory_for
from quire.memory.machine.probe import spare_mappings
from quire.models.drop_in.cache import DropInCache
from quire.models.drop_in.encoder_decoder import SourceCache
from quire.models.drop_in.rows import BatchRows, CacheFamily
from quire.models.footprint import weights_of
from quire.models.states.mixers import find_mixers
from quire.spec import AttentionSpec, Layer, ModelSpec, RecurrentState
from quire.units import format_count, parse_bytes


def cache(  # noqa: PLR0913 - each is an option of its own, and the defaults work
    model: PreTrainedModel,
    strategy: str = "paged",
    *,
    max_model_len: int | None = None,
    kv_cache_memory_bytes: int | str | None = None,
    max_num_seqs: int | None = None,
    block_size: int = 16,
    growth: Growth = "uniform",
    growth_tokens: int = 256,
    keep_old: bool = False,
    shares_pages: bool = False,
    max_source_tokens: int | None = None,
    attention_backend: str = "auto",
    provider: MemoryProvider | None = None,
) -> DropInCache | SourceCache:
    """Make a cache for one ``model.generate(…, past_key_values=quire.cache(model, strategy))``.

    ``strategy`` is ``contiguous``, ``growing``, ``paged``, ``virtual`` or the name of one that a
    package adds. ``max_model_len``
    (tokens, prompt and continuation) defaults to the model's own; ``kv_cache_memory_bytes``, the
    ceiling, to what the machine has available, less headroom; ``max_num_seqs`` to enough rows for
    this batch and its beams. ``block_size`` is for ``paged``; ``growth``, ``growth_tokens`` and
    ``keep_old`` are for ``growing``. With ``shares_pages``, ``virtual`` has one copy of what beams
    have in common, in a layout that is slower to read. Of an encoder-decoder each row also has room
    for a source of ``max_source_tokens``, the model's own longest. ``provider`` is where the pages
    come from.

    Where the model attends through torch (``attn_implementation="sdpa"``, the default), Quire's
    kernels read keys and values where they lie; ``attention_backend="sdpa"`` leaves that to torch.

    The states of recurrent layers lie there too, but for those of models that keep them in their
    own modules (RecurrentGemma). Mamba's classes take the cache as ``cache_params=…``.

    Raises: ConfigError, UnsupportedModel.
    """
    STRATEGIES.require(strategy, "strategy")
    spec = ModelSpec.from_config(model.config.to_dict(), type(model).__name__ + ".config")
    longest = spec.max_model_len if max_model_len is None else max_model_len
    if spec.recurrent_layers:
        spec = spec.computed_in(str(model.dtype).removeprefix("torch."))
        spec = _with_states_that_caches_see(model, spec)
    BACKENDS.require(attention_backend, "attention_backend")
    _at_least_one(max_model_len=longest, block_size=block_size, growth_tokens=growth_tokens)
    if max_num_seqs is not None:
        _at_least_one(max_num_seqs=max_num_seqs)
    device = model.device
    memory = CountedMemory(memory_for(device, "on-demand") if provider is None else provider)
    if shares_pages and memory.cannot_share is not None:
        raise ConfigError(f"shares_pages=True is not possible: {memory.cannot_share}; leave it out")
    spec = _with_source(model, spec, max_source_tokens)
    asked = None if kv_cache_memory_bytes is None else parse_bytes(kv_cache_memory_bytes)
    ceiling = _ceiling(model, spec, longest, asked)

    def choose(specs: Iterable[AttentionSpec]) -> AttentionBackend | None:
        chosen = choose_backend(attention_backend, specs, device)
        return None if isinstance(chosen, SdpaAttention) else chosen

    def make_rows(spec: ModelSpec, num_rows: int) -> BatchRows:
        config = CacheConfig(
            max_model_len=longest,
            max_num_seqs=max_num_seqs or max(16, 2 * num_rows),
            capacity_bytes=ceiling,
            block_size=block_size,
            page_bytes=memory.page_bytes,
            layers_per_page=suited_to(memory.page_bytes),
            growth=growth,
            growth_tokens=growth_tokens,
            keep_old=keep_old,
            shares_pages=shares_pages,
            max_mappings=spare_mappings() if shares_pages and device.type == "cpu" else None,
        )
        return BatchRows(CacheFamily(strategy, spec, config, memory, num_rows, choose), num_rows)

    name, dtype = type(model).__name__, model.dtype  # the cache outlives the model
    if spec.source_tokens:
        return SourceCache(
            model.config,
            spec,
            make_rows,
            lambda config, text, make: DropInCache(name, config, text, memory, make, dtype),
        )
    return DropInCache(name, model.config, spec, memory, make_rows, dtype)


def _ceiling(model: PreTrainedModel, spec: ModelSpec, longest: int, asked: int | None) -> int:
    """What may be committed: as asked, or by the budget rule ``auto``. Raises: ConfigError."""
    weights_bytes, counted_bytes = weights_of(model)
    needs = Needs(
        weights_bytes=weights_bytes,
        counted_weights_bytes=counted_bytes,
        bytes_per_token=spec.bytes_per_token,
        context_tokens=longest,
        least_bytes=spec.bytes_per_token + spec.state_bytes,
    )
    machine = known_machine(model.device, asked, limits_only=True)
    return make_ledger(machine, needs, kv_cache_memory_bytes=asked).require()


def _with_source(
    model: PreTrainedModel, spec: ModelSpec, max_source_tokens: int | None
) -> ModelSpec:
    """With room for sources as long as asked, if it reads any. Raises: ConfigError."""
    if max_source_tokens is None:
        return spec
    if not spec.source_tokens:
        raise ConfigError(
            f"max_source_tokens={format_count(max_source_tokens)}: {type(model).__name__} reads no "
            f"source; leave it out"
        )
    _at_least_one(max_source_tokens=max_source_tokens)
    return spec.with_source_tokens(max_source_tokens)


def _with_states_that_caches_see(model: PreTrainedModel, spec: ModelSpec) -> ModelSpec:
    """Less the states that modules keep for themselves, or in a cache of their own kind."""
    seen = {mixer.layer for mixer in find_mixers(model) if mixer.attributes is None}

    def without(layer: Layer) -> Layer:
        specs = tuple(kept for kept in layer.specs if not isinstance(kept, RecurrentState))
        return replace(layer, specs=specs)

    layers = (layer if n in seen else without(layer) for n, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def _at_least_one(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"{name}={format_count(value)} must be at least 1")
