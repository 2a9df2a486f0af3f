"""An engine for a model and options, or an error that says why there can be none."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quire.config import EngineConfig, kernel_dir, sets_allocator
from quire.devices import on_default_stream, refuse_other_device, warn_if_none
from quire.engine.assembly import assemble
from quire.engine.cache_lock import CacheLock
from quire.engine.core import Engine
from quire.engine.elastic import Elastic
from quire.engine.fallbacks import OtherAttention
from quire.engine.kv_budget import cache_config, kv_ledger, named_memory
from quire.engine.kv_cache import KVCache
from quire.engine.kv_sizing import longest_tokens, stored_spec
from quire.engine.open_tiers import make_offloading
from quire.engine.parallel.leader import LeaderGroup
from quire.engine.parallel.model_part import PartedModel, load_parts
from quire.engine.profile import StepBytes, measured_step_bytes
from quire.engine.sampling.sampler import LogitsSampler
from quire.engine.scheduler import Scheduler
from quire.engine.scheduling.policy import SchedulerLimits
from quire.engine.scheduling.step_costs import Costs
from quire.engine.scheduling.swap_space import SwapSpace
from quire.engine.source_prompts import SourcePrompts
from quire.engine.speculation.drafters import (
    draft_bytes,
    load_draft,
    make_drafter,
    refuse_speculation,
)
from quire.engine.statistics import Statistics
from quire.engine.swap.swapper import make_swap_store
from quire.errors import ConfigError, MemoryUnavailable
from quire.memory import MemoryProvider
from quire.memory.budget import EncoderFootprint
from quire.memory.budget.ledger import Ledger
from quire.memory.by_device import gauge_for, give_back_kept, make_resident
from quire.memory.controller import MemoryController
from quire.memory.machine import CudaPeak
from quire.memory.machine.readings import Gauge
from quire.memory.residency import Resident
from quire.models.encoder_peak import encoder_footprints
from quire.models.footprint import footprint
from quire.models.loader import LoadedModel, adopt, load
from quire.models.model_watch import turn_of
from quire.models.quantized import rounds_inputs
from quire.models.vision import Vision
from quire.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """One engine and all that belongs to it."""

    spec: ModelSpec  # with the dtypes in which keys and values are stored
    ledger: Ledger
    settled: EngineConfig  # with the sizes in place, to build the same engine again
    max_model_len: int
    most_bytes: int  # of KV memory, at any time
    attention_backend: str
    attention_way: str
    engine: Engine
    kv: KVCache
    team: LeaderGroup | None  # the other ranks' parts
    resident: Resident
    elastic: Elastic
    source_prompts: SourcePrompts | None  # reads the prompts of an encoder-decoder
    vision: Vision  # makes images ready


def build(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    provider: MemoryProvider | None = None,
    gauge: Gauge | None = None,
    lock: CacheLock | None = None,
    statistics: Statistics | None = None,
) -> BuiltEngine:
    """Size the cache, take its addresses, and try the model out.

    ``lock`` and ``statistics`` are those of an engine that this one replaces. An attention backend
    whose kernels fail or are wrong is passed over for the next one that serves the model, unless an
    option names it.

    Raises: ConfigError, UnsupportedModel, MemoryUnavailable. Nothing is held then.
    """
    warn_if_none(loaded.device)
    other = OtherAttention(config, loaded)
    # On the stream on which steps run, too, and while no other engine's step runs this model.
    with on_default_stream(loaded.device), turn_of(loaded.model):
        while True:
            try:
                return _built(config, loaded, provider, gauge, lock, statistics)
            except Exception as error:  # of any type: compilers, drivers and models raise it
                found = other.instead(error)
            # After the error, whose frames hold memory that the next attempt needs.
            config = replace(config, attention_backend=found)


def _built(
    config: EngineConfig,
    loaded: LoadedModel,
    provider: MemoryProvider | None,
    gauge: Gauge | None,
    lock: CacheLock | None,
    statistics: Statistics | None,
) -> BuiltEngine:
    refuse_speculation(config, loaded)
    device = loaded.device
    provider = _provider(provider, config, device)
    parted: PartedModel | None = loaded.ranks
    draft = load_draft(config, loaded)
    vision = _vision(config, loaded)
    ledger = _claimed(config, loaded, draft, provider, vision)
    kv_bytes = ledger.require()
    for_drafts = draft_bytes(kv_bytes, stored_spec(config, loaded.spec), draft)
    sizes = cache_config(config, loaded, provider, kv_bytes - for_drafts)
    residency = config.residency
    if ledger.committed_whole and residency == "on-demand":
        residency = "prefault"  # the rule takes memory at the start
    resident = make_resident(
        provider, residency, sizes.capacity_bytes, keeps_freed=not sets_allocator()
    )
    spec = stored_spec(config, loaded.spec)
    with ExitStack() as undo:
        undo.callback(resident.close)
        team = None
        if parted is not None:
            team = parted.team(spec, config.cache, sizes, config, residency)
            undo.callback(team.close)
            resident = team.resident(resident, residency)
        model = assemble(
            loaded,
            spec,
            config.cache,
            sizes,
            resident.provider,
            config,
            team,
            vision=vision,
        )
        kv = model.kv
        undo.callback(kv.close)
        undo.callback(model.runner.close)
        resident.prefault()
        model.capture(config, sizes.max_model_len)
        drafter = make_drafter(
            config,
            draft,
            loaded,
            provider,
            max_model_len=sizes.max_model_len,
            capacity_bytes=for_drafts,
        )
        if drafter is not None:
            undo.callback(drafter.close)
        costs = Costs(bytes_per_token=sum(group.bytes_per_token for group in kv.accounting.groups))
        swap = None
        if config.swap_space:
            around = None if team is None else partial(team.open_swap, config.swap_path)
            swap = make_swap_store(
                kv, config.swap_path, costs, sizes.max_model_len, loaded.device, around=around
            )
        offload = make_offloading(config, loaded, kv, costs, perf_counter)
        if offload is not None:
            undo.callback(offload.close)
        sampler = LogitsSampler(config.seed, _eos_token_ids(loaded))
        if device.type != "cpu":
            sampler.try_out(device, loaded.model.dtype, loaded.vocab_size)
        undo.pop_all()  # nothing can be refused any more
    gauge = gauge or gauge_for(device)
    spare_bytes = ledger.spare_bytes  # beside a stated budget
    room_bytes = None if spare_bytes is None else spare_bytes + sizes.capacity_bytes
    limits = SchedulerLimits(
        max_model_len=sizes.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=_eos_token_ids(loaded),
        policy=config.scheduling_policy,
        watermark_bytes=int(config.watermark * sizes.capacity_bytes),
        whole_images=model.runner.needs_whole_images,
    )
    if resident.prepares:
        model.runner.prepare_pages = resident.prepare
    scheduler = Scheduler(
        kv.accounting,
        limits,
        swap=SwapSpace(config.swap_space),
        costs=costs,
        statistics=statistics,
        offload=offload,
    )
    return BuiltEngine(
        spec=spec,
        ledger=ledger,
        settled=replace(
            config,
            max_model_len=sizes.max_model_len,
            kv_cache_memory_bytes=kv_bytes,
            residency=residency,
        ),
        max_model_len=sizes.max_model_len,
        most_bytes=sizes.most_bytes,
        attention_backend=model.backend.name,
        attention_way=model.attention_way,
        engine=Engine(scheduler, kv, model.runner, sampler, drafter, swap),
        kv=kv,
        team=team,
        resident=resident,
        elastic=Elastic(
            kv,
            resident,
            scheduler,
            MemoryController(config.memory_mode, room_bytes=room_bytes),
            gauge if team is None else team.gauge(gauge),
            lock or CacheLock(partial(on_default_stream, device)),
            _step_bytes(config, loaded, spec, ledger, vision.encoder)
            if device.type == "cpu"
            else None,
        ),
        source_prompts=SourcePrompts(loaded, spec.source_tokens) if spec.source_tokens else None,
        vision=model.vision,
    )


def loaded_model(
    model: Any, tokenizer: Any, config: EngineConfig, *, show_progress: bool = False
) -> LoadedModel:
    """Load the model that ``LLM`` was given. Raises: ConfigError, ModelNotLoadable."""
    if model is None or isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise ConfigError(
                f"a tokenizer ({type(tokenizer).__name__}) goes with a model in memory: beside a "
                f"folder or hub name, tokenizer= takes the folder or hub name of another one"
            )
        own = load_named(model, config, show_progress=show_progress)
        return replace(own, is_private=own.ranks is None)
    loaded = model if isinstance(model, LoadedModel) else adopt(model, tokenizer)
    if config.quantization is not None:
        raise ConfigError("quantization= goes with a folder or a name: quantize the model first")
    if rounds_inputs(loaded.model) and not config.dynamic_quantization:
        raise ConfigError(
            "dynamic_quantization=False: the model was loaded with it. Load it without, or give "
            "its folder or name"
        )
    if config.tokenizer is not None:
        raise ConfigError(
            f"tokenizer={config.tokenizer} goes with a folder or a name: give a model in memory "
            f"its tokenizer itself"
        )
    refuse_other_device(config.device, loaded.device)
    if config.dtype not in ("auto", loaded.dtype):
        raise ConfigError(
            f"dtype={config.dtype} is not the model's, {loaded.dtype}: cast it, or leave dtype auto"
        )
    return loaded


def load_named(
    name: str | Path | None, config: EngineConfig, *, show_progress: bool = False
) -> LoadedModel:
    """Load a folder, a hub name or a GGUF file as an engine's options say, in one rank or more.

    Raises: ConfigError, ModelNotLoadable, UnsupportedModel, RankLost.
    """
    if config.tensor_parallel_size > 1:
        return load_parts(
            name,
            config.tensor_parallel_size,
            device=config.device,
            dtype=config.dtype,
            tokenizer=config.tokenizer,
            show_progress=show_progress,
        )
    return load(
        name,
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        dynamic_quantization=config.dynamic_quantization,
        tokenizer=config.tokenizer,
        show_progress=show_progress,
        kernel_dir=kernel_dir(),
    )


def _vision(config: EngineConfig, loaded: LoadedModel) -> Vision:
    """Return what makes images ready, up to a size that memory can be planned for.

    Raises: ConfigError.
    """
    vision = Vision.of(loaded, config.most_media)
    if config.batch_invariant and not vision.why_not:
        # An encoder is torch's, and reads the images of a step together.
        vision = vision.without("image", "batch_invariant serves text alone")
    longest = longest_tokens(config, loaded.name, loaded.spec)
    video_tokens = config.max_num_batched_tokens
    encoders = encoder_footprints(vision, loaded.model, longest, video_tokens=video_tokens)
    return replace(vision, encoders=encoders)


def _claimed(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    provider: MemoryProvider,
    vision: Vision,
) -> Ledger:
    """Return the budget's ledger; on a GPU with the measured size of a step.

    Raises: ConfigError, UnsupportedModel, MemoryUnavailable.
    """
    device, page_bytes, measured = loaded.device, provider.page_bytes, None
    encoder = vision.encoder
    if device.type == "cuda":
        try:
            measured = measured_step_bytes(
                config, loaded, provider, CudaPeak(device.index or 0), vision
            )
        except MemoryUnavailable:
            # The ledger's own error says what has the memory, and what would fit.
            kv_ledger(config, loaded, page_bytes, draft, encoder=encoder).require()
            raise
        give_back_kept(provider)  # the pages of that step
    return kv_ledger(config, loaded, page_bytes, draft, measured_bytes=measured, encoder=encoder)


def _provider(
    given: MemoryProvider | None, config: EngineConfig, device: torch.device
) -> MemoryProvider:
    if given is None:
        return named_memory(config, device)
    if config.memory_provider != "auto":
        raise ConfigError(
            f"provider= and memory_provider={config.memory_provider} both say where the pages come "
            f"from: leave one out"
        )
    if config.residency == "lock":
        raise ConfigError("residency=lock is for Quire's own memory: leave out provider=")
    return given


def _step_bytes(
    config: EngineConfig,
    loaded: LoadedModel,
    spec: ModelSpec,
    ledger: Ledger,
    encoder: EncoderFootprint | None,
) -> StepBytes:
    speculative = config.speculative_config
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    return StepBytes(
        ledger.step_bytes,
        replace(footprint(loaded.model), encoder=encoder),
        max_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        logits_each=1 + num_drafts,
        kv_bytes_per_token=spec.bytes_per_token,
        block_size=config.block_size,
        least_tokens=spec.source_tokens,
    )


def _eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Return the end-of-text tokens of the generation config, or else of the config."""
    for config in (loaded.model.generation_config, loaded.model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
