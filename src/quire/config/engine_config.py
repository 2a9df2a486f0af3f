"""Define the options of an engine. Command-line flags are made from the fields."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from quire.attention import BACKENDS
from quire.config.environment import EnvironmentValue, number, read, said, switch
from quire.config.kv_events import KVEventsConfig
from quire.config.kv_transfer import KVTransferConfig
from quire.config.option import ADVANCED, in_range, object_of, one_of, option
from quire.config.option import switch as check_switch
from quire.errors import ConfigError
from quire.kv import DEFAULT_POLICY, EVICTION_POLICIES, STRATEGIES
from quire.memory import PROVIDERS
from quire.memory.budget import BUDGETS
from quire.spec.weight_forms import weight_form
from quire.tiers import TIERS, TierAddress
from quire.units import parse_bytes

# -- images ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """How many of each kind a prompt may have, with vLLM's names. No audio is read.

    Raises: ConfigError with the kind and the number.
    """

    image: int = 64
    video: int = 8
    audio: int = 0

    def __post_init__(self) -> None:
        for kind in ("image", "video", "audio"):
            in_range(f"limit_mm_per_prompt: {kind}", getattr(self, kind), 0, 2**20)

    @classmethod
    def parse(cls, given: Any) -> "MediaLimits | None":
        """Read JSON, a mapping, or ``image=4``. Raises: ConfigError."""
        if isinstance(given, str) and not given.lstrip().startswith("{"):
            pairs = (pair.partition("=") for pair in given.split(","))
            numbers = {kind.strip(): number.strip() for kind, _, number in pairs}
            given = {
                kind: int(text) if text.isdecimal() else text for kind, text in numbers.items()
            }
        return object_of("limit_mm_per_prompt", cls, given)


# -- speculative decoding --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Options of speculative decoding, with vLLM's names.

    ``ngram`` drafts the tokens that followed the last occurrence of the longest n-gram at the end
    of the sequence, of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens. ``draft_model``
    drafts with a smaller ``model`` of the same vocabulary: a folder, a hub name, or a model in
    memory.

    Raises: ConfigError with the option, its value and its limit.
    """

    method: str | None = None  # None: draft_model if there is a model, else ngram
    num_speculative_tokens: int = 4  # most drafts per step
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    model: Any = None

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        one_of("speculative_config: method", str(self.method), ("ngram", "draft_model"))
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                f"speculative_config: method {self.method} "
                f"{'needs a' if self.model is None else 'takes no'} model"
            )
        for name, least, most in (
            ("num_speculative_tokens", 1, 64),
            ("prompt_lookup_min", 1, 64),
            ("prompt_lookup_max", self.prompt_lookup_min, 64),
        ):
            in_range(f"speculative_config: {name}", getattr(self, name), least, most)

    @classmethod
    def parse(cls, given: Any) -> "SpeculativeConfig | None":
        """Parse a JSON object, as text or as a mapping. Raises: ConfigError."""
        return object_of("speculative_config", cls, given)


# -- the engine ------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

TIERS_PANEL = "Tiers"  # the help panel of options for blocks outside the KV memory

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")

# vLLM's names of the dtypes for keys and values (and float32) → a layer spec's name. None: the
# model's own dtype.
KV_CACHE_DTYPES: Mapping[str, str | None] = MappingProxyType(
    {
        "auto": None,
        "float32": "float32",
        "bfloat16": "bfloat16",
        "float16": "float16",
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "int8_per_token_head": "int8",
    }
)


def _addresses(text: str) -> tuple[str, ...]:
    """Parse addresses of tiers with spaces between them. Raises: ConfigError."""
    if not isinstance(text, str):  # of a list in Python
        raise ConfigError("kv_tier must be a list of addresses, each a text")
    addresses = tuple(text.split())
    for address in addresses:
        TierAddress.parse(address)
    return addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine. Raises: ConfigError with the option, its value and its limit."""

    device: str = option(
        "auto",
        "Device that the model runs on: auto (a GPU if one can be used, else the CPU), cpu, cuda, "
        "cuda:1.",
    )
    dtype: str = option(
        "auto",
        "Data type of weights and of keys and values: auto (the checkpoint's), float32, bfloat16, "
        "float16.",
    )
    quantization: str | None = option(
        None,
        "Keep the weights of linear layers in 8 or 4 bits: int8, int4; on a CPU also with a "
        "group's size and with zeros, as int4-g128 or int8-g32-asym (on a GPU int8 alone, which "
        "needs quire-kv[int8]). Default: none.",
        short=("-q",),
    )
    dynamic_quantization: bool = option(
        True,
        "Round what weights in 8 or 4 bits are multiplied with to 8 bits, a scale for each token "
        "and group: faster on a CPU that multiplies bytes (AVX-512 VNNI), of no effect on others, "
        "with --dtype float32 and on a GPU. Without it such inputs are as exact as --dtype.",
    )
    tokenizer: str | None = option(
        None,
        "Folder or hub name of another tokenizer than the model's own, for a GGUF file whose own "
        "cannot be read. Default: the model's.",
    )
    kv_cache_dtype: str = option(
        "auto",
        f"Data type of keys and values: {', '.join(KV_CACHE_DTYPES)} (auto is the same as "
        "--dtype).",
    )
    cache: str = option(
        "paged",
        f"KV-cache strategy: {', '.join(STRATEGIES.own_names)}, or one that a package adds.",
    )
    attention_backend: str = option(
        "auto",
        "Attention backend: auto (the fastest that supports the model), cpu (Quire's kernels for "
        "a CPU), triton (Quire's kernels for a GPU), flashinfer (GPU), sdpa (torch's), reference "
        "(slow, in float64), or one that a package adds.",
        panel=ADVANCED,
    )
    enforce_eager: bool = option(
        False,
        "Run the model's own Python in each step: no CUDA graphs and no copies beside the steps "
        "on a GPU, no recorded passes on a CPU.",
        panel=ADVANCED,
    )
    batch_invariant: bool = option(
        False,
        "Compute a text to the same bit whatever else is in the batch, however its prompt is cut "
        "into chunks, and after a preemption or a prefix hit. Slower; on a CPU, for models of "
        "plain linear layers and attention. VLLM_BATCH_INVARIANT=1 says the same.",
    )
    max_model_len: int | None = option(
        None,
        "Maximum length of a sequence in tokens, prompt and output together. Default: the model's.",
    )
    max_num_seqs: int = option(64, "Maximum number of sequences that run at once.")
    max_num_batched_tokens: int = option(
        512, "Maximum number of tokens in one step, of all sequences together."
    )
    block_size: int = option(
        16, "Number of tokens per block (for the caches paged and virtual).", panel=ADVANCED
    )
    enable_prefix_caching: bool = option(
        True,
        "Keep the blocks of earlier prompts for prompts with the same prefix (for the caches paged "
        "and virtual). Without it, virtual uses a layout that attention reads faster.",
    )
    prefix_caching_policy: str = option(
        DEFAULT_POLICY,
        "Eviction policy of the prefix cache: choice, lru, lru-2, bip, or one that a package adds.",
        panel=ADVANCED,
    )
    prefix_caching_retention: float = option(
        0.25,
        "Share of the KV memory in which the prefix cache keeps what clients ask it to keep for a "
        "while (cache_control, prompt_cache_retention). 0: what they ask for is not heeded.",
        panel=ADVANCED,
    )
    watermark: float = option(
        0.01,
        "Fraction of the KV memory that stays free when a sequence is admitted beside others.",
        panel=ADVANCED,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of requests: fcfs (first come, first served), priority (lower numbers run first, "
        "and preempt others), shortest (the shortest maximum length runs first).",
    )
    swap_space: int = option(
        0,
        "Host memory for swapping out preempted sequences, in bytes or e.g. 4GiB (quire serve "
        "reads 4 as 4GiB, as vLLM does). Without it, or if swapping is slower, they are "
        "recomputed.",
        flag_type=str,
        parse=parse_bytes,
    )
    swap_path: str | None = option(
        None,
        "Folder for a temporary file that is used as --swap-space, instead of memory.",
        panel=ADVANCED,
    )
    kv_tier: tuple[str, ...] = option(
        (),
        "Place for blocks outside the KV memory, which keeps prefixes over restarts or for several "
        "servers: file:PATH?size=50GiB&age=7d, memory:?size=4GiB, redis://HOST, s3://BUCKET, or "
        "one that a package adds. May be given several times, the nearest first.",
        secret=True,  # an address may hold a password
        flag_type=list[str] | None,
        parse=_addresses,
        panel=TIERS_PANEL,
    )
    kv_tier_key: str | None = option(
        None,
        "File with a secret key of at least 32 bytes. With it, records in tiers that others share "
        "are sealed: only holders of the key can read or write them (needs quire-kv[tiers]).",
        panel=TIERS_PANEL,
    )
    kv_tier_trusted: bool = option(
        False,
        "Use shared tiers without --kv-tier-key. Any program that can write to them then chooses "
        "this server's answers.",
        panel=TIERS_PANEL,
    )
    kv_tier_write: Literal["auto", "always", "never"] = option(
        "auto",
        "Blocks that are stored in tiers: auto (those that are likely to be asked for again, by "
        "what storing and computing cost), always (all), never (tiers are only read).",
        panel=TIERS_PANEL,
    )
    kv_offloading_size: int = option(
        0,
        "Host memory for blocks outside the KV memory, as the nearest tier: in bytes or e.g. 4GiB "
        "(quire serve reads 4 as 4GiB, as vLLM does).",
        flag_type=str,
        parse=parse_bytes,
        panel=TIERS_PANEL,
    )
    kv_transfer_config: KVTransferConfig | None = option(  # noqa: RUF009 - it makes a field
        None,
        "Blocks that servers hand to each other (prefill and decode apart): a JSON object with "
        "vLLM's fields. kv_connector: QuireConnector, or OffloadingConnector for tiers. Default: "
        "none.",
        flag_type=str | None,
        parse=KVTransferConfig.parse,
        panel=TIERS_PANEL,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Maximum size of the KV memory in bytes, or e.g. 2GiB. Default: the size that --budget "
        "gives.",
        flag_type=str | None,
        parse=parse_bytes,
    )
    budget: str = option(
        "auto",
        "Rule that sets the size of the KV memory: auto (available memory less headroom), vllm, "
        "mistralrs, llamacpp, fraction. quire doctor shows what each rule gives on this machine.",
    )
    memory_utilization: float | None = option(
        None,
        "Fraction of the memory, 0 to 1, that the rules vllm, mistralrs and fraction may take. "
        "Default: 0.9.",
    )
    memory_mode: Literal["shared", "dedicated"] = option(
        "shared",
        "Headroom for other programs, as a part of the tightest memory limit: shared leaves 15 %, "
        "but at least min(4GiB, 1/4), dedicated 2 %, but at least min(512MiB, 1/4). Beside a "
        "budget in bytes it is at most half of what that leaves.",
        panel=ADVANCED,
    )
    residency: Literal["on-demand", "prefault", "lock"] = option(
        "on-demand",
        "When KV pages are taken from the system: on-demand (as tokens come), prefault (all at the "
        "start), or lock (all at the start, and never swapped out).",
        panel=ADVANCED,
    )
    memory_provider: str = option(
        "auto",
        "Where KV pages come from: auto (the device's memory), or a name that a package adds.",
        panel=ADVANCED,
    )
    growth: Literal["uniform", "doubling", "staggered"] = option(
        "uniform",
        "How the buffers of the cache growing grow: uniform (by --growth-tokens), doubling, or "
        "staggered (layer after layer).",
        panel=ADVANCED,
    )
    growth_tokens: int = option(
        256,
        "Number of tokens by which a growing buffer grows, or at which doubling begins.",
        panel=ADVANCED,
    )
    reserve: Literal["max_model_len", "request"] = option(
        "max_model_len",
        "Tokens that the cache contiguous reserves for a sequence: --max-model-len, or the "
        "request's own maximum.",
        panel=ADVANCED,
    )
    speculative_config: SpeculativeConfig | None = option(  # noqa: RUF009 - it makes a field
        None,
        "Speculative decoding, as JSON: "
        '{"method": "ngram", "num_speculative_tokens": 4} drafts tokens from the text so far, '
        '{"model": "folder"} with a smaller model. Default: none.',
        flag_type=str | None,
        parse=SpeculativeConfig.parse,
    )
    limit_mm_per_prompt: MediaLimits | None = option(  # noqa: RUF009 - it makes a field
        None,
        "Maximum number of images and videos in a prompt, as JSON. Default: "
        '{"image": 64, "video": 8}.',
        flag_type=str | None,
        parse=MediaLimits.parse,
        panel=ADVANCED,
    )
    kv_events_config: KVEventsConfig | None = option(  # noqa: RUF009 - it makes a field
        None,
        "Events of the prefix cache for routers, as JSON with vLLM's fields: "
        '{"enable_kv_cache_events": true} publishes them at tcp://127.0.0.1:5557. Needs '
        "quire-kv[events]. Default: none.",
        flag_type=str | None,
        parse=KVEventsConfig.parse,
        panel=ADVANCED,
    )
    tensor_parallel_size: int = option(
        1,
        "Number of processes (ranks) that share each layer and the KV memory; on CUDA one per "
        "device. Memory sizes are per rank. Needs quire-kv[tp].",
        short=("--tp", "-tp"),
    )
    seed: int = option(0, "Random seed for requests that set none.", panel=ADVANCED)

    def __post_init__(self) -> None:
        speculative = SpeculativeConfig.parse(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculative)
        object.__setattr__(self, "limit_mm_per_prompt", MediaLimits.parse(self.limit_mm_per_prompt))
        events = KVEventsConfig.parse(self.kv_events_config)
        object.__setattr__(self, "kv_events_config", events)
        transfer = KVTransferConfig.parse(self.kv_transfer_config)
        object.__setattr__(self, "kv_transfer_config", transfer)
        if events is not None and events.publishes and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config: enable_kv_cache_events needs enable_prefix_caching: without it "
                "no block is kept that could be announced"
            )
        in_range("max_num_seqs", self.max_num_seqs, 1, 2**20)
        for name in ("max_num_batched_tokens", "block_size", "growth_tokens"):
            in_range(name, getattr(self, name), 1)
        if self.max_model_len is not None:
            in_range(
                "max_model_len", self.max_model_len, 2
            )  # a token of the prompt, and one generated
        if self.kv_cache_memory_bytes is not None:
            in_range("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, 2**63)
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark={self.watermark!r} must be at least 0 and below 1")
        if not 0 <= self.prefix_caching_retention <= 1:
            raise ConfigError(
                f"prefix_caching_retention={self.prefix_caching_retention!r} must be from 0 to 1"
            )
        EVICTION_POLICIES.require(self.prefix_caching_policy, "prefix_caching_policy")
        if self.memory_utilization is not None and not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"memory_utilization={self.memory_utilization!r} must be above 0 and at most 1"
            )
        one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority", "shortest"))
        in_range("swap_space", self.swap_space, 0, 2**63)
        self._check_tiers()
        if self.swap_path is not None and not self.swap_space:
            raise ConfigError(f"swap_path={self.swap_path!r} needs swap_space, its size in bytes")
        one_of("budget", self.budget, tuple(BUDGETS))
        one_of("memory_mode", self.memory_mode, ("shared", "dedicated"))
        one_of("residency", self.residency, ("on-demand", "prefault", "lock"))
        in_range("seed", self.seed, 0, 2**63)
        in_range("tensor_parallel_size", self.tensor_parallel_size, 1, 1024)
        self._check_switches()
        STRATEGIES.require(self.cache, "cache")
        PROVIDERS.require(self.memory_provider, "memory_provider")
        if self.memory_provider != "auto" and self.residency == "lock":
            raise ConfigError(
                f"residency=lock is for Quire's own memory: memory_provider={self.memory_provider} "
                f"says by itself whether its pages stay"
            )
        BACKENDS.require(self.attention_backend, "attention_backend")
        one_of("growth", self.growth, ("uniform", "doubling", "staggered"))
        one_of("reserve", self.reserve, ("max_model_len", "request"))
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device {self.device!r} is unknown; known: auto, cpu, cuda, cuda:1")
        one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.quantization is not None:
            weight_form(self.quantization)
        one_of("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_CACHE_DTYPES))

    def _check_switches(self) -> None:
        for field in fields(self):
            if field.type is bool:
                check_switch(field.name, getattr(self, field.name))
        if self.batch_invariant and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"batch_invariant needs tensor_parallel_size=1, and it is "
                f"{self.tensor_parallel_size}: ranks add up their parts in an order that goes by "
                f"the number of tokens"
            )

    def _check_tiers(self) -> None:
        given: Any = self.kv_tier
        if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
            raise ConfigError("kv_tier must be a list of addresses, each a text")
        in_range("kv_offloading_size", self.kv_offloading_size, 0, 2**63)
        for address in self.tiers:
            TIERS.require(address.kind, "kv_tier")
        one_of("kv_tier_write", self.kv_tier_write, ("auto", "always", "never"))
        transfer = self.kv_transfer_config
        addresses = () if transfer is None else transfer.addresses
        if self.kv_tier_key is not None and not (self.kv_tier or addresses):
            raise ConfigError(
                f"kv_tier_key={self.kv_tier_key!r} needs kv_tier, a shared one, or "
                f"kv_transfer_config with peers"
            )
        if transfer is not None and transfer.offloaded and self.kv_offloading_size:
            raise ConfigError(
                f"kv_transfer_config: OffloadingConnector and kv_offloading_size="
                f"{self.kv_offloading_size:,} name the same memory: give one of them"
            )
        if not (self.kv_tier_key or self.kv_tier_trusted):
            for peer in addresses:
                if not peer.is_unix:
                    raise ConfigError(
                        f"kv_transfer_config: {peer} is reached over TCP, where others could "
                        f"read prompts and plant answers: set kv_tier_key to a file with a secret "
                        f"key, or kv_tier_trusted if only trusted engines can reach it; or use "
                        f"unix:/PATH"
                    )

    @property
    def most_media(self) -> dict[Literal["image", "video"], int]:
        """How many images and videos a prompt may have."""
        limits = self.limit_mm_per_prompt or MediaLimits()
        return {"image": limits.image, "video": limits.video}

    @property
    def tiers(self) -> tuple[TierAddress, ...]:
        """Where blocks outside the KV memory go, the nearest first."""
        addresses = [TierAddress.parse(text) for text in self.kv_tier]
        if self.kv_offloading_size:
            addresses.insert(0, TierAddress.parse(f"memory:?size={self.kv_offloading_size}"))
        if self.kv_transfer_config is not None:
            offloaded = self.kv_transfer_config.offloaded
            addresses = [*map(TierAddress.parse, offloaded), *addresses]
        return tuple(addresses)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Make a config from keyword arguments and the environment (``QUIRE_MAX_NUM_SEQS=8``).

        Raises: ConfigError, for an unknown argument with the nearest known name.
        """
        return read(cls, options, _vllms_own)


def _vllms_own(given: set[str]) -> dict[str, EnvironmentValue]:
    """Read variables of vLLM that have an option's meaning, where none of Quire's says it."""
    found = _vllms_space(given)
    if "batch_invariant" not in given:
        invariant = said("VLLM_BATCH_INVARIANT", switch)
        if invariant is not None:
            found["batch_invariant"] = invariant
    return found


def _vllms_space(given: set[str]) -> dict[str, EnvironmentValue]:
    """Read vLLM's ``VLLM_CPU_KVCACHE_SPACE`` (GiB; 0 is vLLM's default).

    It counts only if no option of Quire sizes the KV memory.
    """
    variable = "VLLM_CPU_KVCACHE_SPACE"
    if {"kv_cache_memory_bytes", "budget", "memory_utilization"} & given:
        return {}
    space = said(variable, lambda text: int(number(text, float) * 2**30))
    if space is None or not space.value:
        return {}
    log.info("kv_cache_memory_bytes: %s says %s", variable, f"{space.value / 2**30:g} GiB")
    return {"kv_cache_memory_bytes": space}
