"""Every option of the engine, once. Command-line flags are made from these fields.

Names are vLLM's where vLLM has one. A flag or an argument counts before the environment
(``QUIRE_BLOCK_SIZE=32``), and that before the default. No other module touches the environment.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import isfinite, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from quire.blocks import DEFAULT_POLICY, POLICIES
from quire.errors import ConfigError
from quire.memory.budget import BUDGETS
from quire.strategies import STRATEGIES
from quire.units import parse_bytes

log = logging.getLogger(__name__)

_SWITCHES: Mapping[str, bool] = MappingProxyType(
    {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
)

# How keys and values may be kept: the names are vLLM's (but for float32), with what a layer spec
# calls each. None: as the model has them.
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


def _option(default: Any, help: str, **extra: Any) -> Any:
    """A field and its description.

    ``flag_type`` is what a flag takes, if not the field's type; ``parse`` reads it then.
    """
    return field(default=default, metadata=MappingProxyType({"help": help, **extra}))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed ahead; names are vLLM's.

    ``ngram`` looks up what followed the last time that a sequence's own tokens read like this, over
    the longest n-gram of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens. ``draft_model``
    asks a smaller ``model`` of the same vocabulary: a folder, a hub name, or a model in memory.

    Raises: ConfigError naming the option, its value and its limit.
    """

    method: str | None = None  # None: draft_model where there is a model, else ngram
    num_speculative_tokens: int = 4  # at most
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    model: Any = None

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        _one_of("speculative_config: method", str(self.method), ("ngram", "draft_model"))
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
            _in_range(f"speculative_config: {name}", getattr(self, name), least, most)

    @classmethod
    def parse(cls, given: Any) -> "SpeculativeConfig | None":
        """From a JSON object, as text or as a mapping. Raises: ConfigError."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"speculative_config {given!r} is not JSON: {error}") from error
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config={given!r} must be a JSON object")
        known = {option.name for option in fields(cls)}
        for name in given:
            if name not in known:
                raise ConfigError(f"speculative_config: unknown {name!r}{_nearest(name, known)}")
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is built. Raises: ConfigError naming the option, its value and its limit."""

    dtype: str = _option(
        "auto", "Weights and KV: auto (the checkpoint's), float32, bfloat16, float16."
    )
    quantization: str | None = _option(
        None, "int8 keeps the weights of linear layers in eight bits (needs quire[int8])."
    )
    kv_cache_dtype: str = _option(
        "auto", f"How keys and values are kept, auto as they are: {', '.join(KV_CACHE_DTYPES)}."
    )
    cache: str = _option("paged", f"KV-cache strategy: {', '.join(STRATEGIES)}.")
    attention_backend: str = _option(
        "auto",
        "What computes attention: auto (the fastest that can), cpu (own kernels), sdpa (torch), "
        "reference (slow, float64).",
    )
    max_model_len: int | None = _option(
        None, "Longest sequence in tokens, prompt included. Default: the model's own."
    )
    max_num_seqs: int = _option(64, "Sequences that may run at once.")
    max_num_batched_tokens: int = _option(
        512, "Tokens computed in one step, all sequences together."
    )
    block_size: int = _option(16, "Tokens in a block (paged, virtual).")
    enable_prefix_caching: bool = _option(
        True,
        "Keep what has been computed, for prompts that begin alike (paged, virtual). Without, "
        "virtual has a layout that is read faster.",
    )
    prefix_caching_policy: str = _option(
        DEFAULT_POLICY, f"What of it goes first when room is needed: {', '.join(POLICIES)}."
    )
    watermark: float = _option(
        0.01, "Share of the KV memory that a newcomer leaves free while others run."
    )
    scheduling_policy: str = _option(
        "fcfs",
        "Who goes first: fcfs (who came first), priority (smaller numbers, which others make room "
        "for), shortest (what may become the shortest).",
    )
    swap_space: int = _option(
        0,
        "Memory for sequences that make room, e.g. 4GiB (vLLM counts in GiB). Without, or where it "
        "takes longer, they compute their tokens again.",
        flag_type=str,
        parse=parse_bytes,
    )
    swap_path: str | None = _option(
        None, "A folder for a file of that size instead of memory. It has no name while it is used."
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "Ceiling on KV memory, e.g. 2GiB. Default: what --budget allows.",
        flag_type=str | None,
        parse=parse_bytes,
    )
    budget: str = _option(
        "auto",
        "Rule for that ceiling: auto (what is available, less headroom), vllm, mistralrs, "
        "llamacpp, fraction. quire doctor shows what each gives here.",
    )
    memory_utilization: float | None = _option(
        None, "Share of the machine that vllm, mistralrs and fraction may take. Default: 0.9."
    )
    memory_mode: Literal["shared", "dedicated"] = _option(
        "shared",
        "Whether other programs need memory here too: shared leaves them 15 % or more (auto), "
        "dedicated 2 %.",
    )
    residency: Literal["on-demand", "prefault", "lock"] = _option(
        "on-demand",
        "When KV pages are taken: as tokens come, all at the start, or also locked against swap.",
    )
    growth: Literal["uniform", "doubling", "staggered"] = _option(
        "uniform", "How buffers grow (growing)."
    )
    growth_tokens: int = _option(256, "Step, first size or base of that growth, in tokens.")
    reserve: Literal["max_model_len", "request"] = _option(
        "max_model_len", "What a sequence reserves (contiguous): the longest, or its own maximum."
    )
    speculative_config: SpeculativeConfig | None = _option(  # noqa: RUF009 - it makes a field
        None,
        "Guess tokens ahead, as JSON: "
        '{"method": "ngram", "num_speculative_tokens": 4} looks them up in the text so far, '
        '{"model": "folder"} asks a smaller model.',
        flag_type=str | None,
        parse=SpeculativeConfig.parse,
    )
    seed: int = _option(0, "Seed of requests that bring none.")

    def __post_init__(self) -> None:
        speculative = SpeculativeConfig.parse(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculative)
        _in_range("max_num_seqs", self.max_num_seqs, 1, 2**20)
        for name in ("max_num_batched_tokens", "block_size", "growth_tokens"):
            _in_range(name, getattr(self, name), 1)
        if self.max_model_len is not None:
            _in_range("max_model_len", self.max_model_len, 2)  # a prompt and a token
        if self.kv_cache_memory_bytes is not None:
            _in_range("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, 2**63)
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark={self.watermark!r} must be at least 0 and below 1")
        _one_of("prefix_caching_policy", self.prefix_caching_policy, tuple(POLICIES))
        if self.memory_utilization is not None and not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"memory_utilization={self.memory_utilization!r} must be above 0 and at most 1"
            )
        _one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority", "shortest"))
        _in_range("swap_space", self.swap_space, 0, 2**63)
        if self.swap_path is not None and not self.swap_space:
            raise ConfigError(f"swap_path={self.swap_path!r} needs swap_space, its size in bytes")
        _one_of("budget", self.budget, tuple(BUDGETS))
        _one_of("memory_mode", self.memory_mode, ("shared", "dedicated"))
        _one_of("residency", self.residency, ("on-demand", "prefault", "lock"))
        _in_range("seed", self.seed, 0, 2**63)
        _one_of("cache", self.cache, tuple(STRATEGIES))
        _one_of("growth", self.growth, ("uniform", "doubling", "staggered"))
        _one_of("reserve", self.reserve, ("max_model_len", "request"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.quantization is not None:
            _one_of("quantization", self.quantization, ("int8",))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_CACHE_DTYPES))

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """From keyword arguments, else from the environment: ``QUIRE_MAX_NUM_SEQS=8``.

        An unknown argument is refused with the nearest known name.
        """
        known = {option.name for option in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{_nearest(name, known)}")
        options = {**_from_environment(cls, set(options)), **options}
        for option in fields(cls):
            if isinstance(options.get(option.name), str) and "parse" in option.metadata:
                options[option.name] = option.metadata["parse"](options[option.name])
        return cls(**options)


def _from_environment(config: type[EngineConfig], given: set[str]) -> dict[str, Any]:
    """What ``QUIRE_*`` says of the options that were not given.

    vLLM's ``VLLM_CPU_KVCACHE_SPACE`` (GiB; 0 is vLLM's default) counts where nothing of Quire's
    says how much memory to take.

    Raises: ConfigError naming the variable.
    """
    found: dict[str, Any] = {}
    for option in fields(config):
        variable = f"QUIRE_{option.name.upper()}"
        text = os.environ.get(variable)
        if text and option.name not in given:
            with _naming(variable):
                found[option.name] = _parse(text, option)
                config(**{option.name: found[option.name]})
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if space and not {"kv_cache_memory_bytes", "budget", "memory_utilization"} & {*given, *found}:
        with _naming("VLLM_CPU_KVCACHE_SPACE"):
            num_bytes = int(_number(space, float) * 2**30)
            config(kv_cache_memory_bytes=num_bytes or None)
        if num_bytes:
            log.info("kv_cache_memory_bytes: VLLM_CPU_KVCACHE_SPACE says %s GiB", space)
            found["kv_cache_memory_bytes"] = num_bytes
    return found


@contextmanager
def _naming(variable: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"environment variable {variable}: {error}") from None


def _parse(text: str, option: Any) -> Any:
    """A value of an option's type. Raises: ConfigError."""
    kinds = get_args(option.type) or (option.type,)
    if "parse" in option.metadata:
        return option.metadata["parse"](text)
    if bool in kinds:
        if text.lower() not in _SWITCHES:
            raise ConfigError(f"{text!r} is neither of {', '.join(_SWITCHES)}")
        return _SWITCHES[text.lower()]
    for kind in (int, float):
        if kind in kinds:
            return _number(text, kind)
    return text


def _number(text: str, kind: type[float]) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise ConfigError(f"{text!r} is not a {'whole ' if kind is int else ''}number")
    return number


def kernel_dir() -> Path | None:
    """Where compiled kernels are kept, if the user has a place for caches of his own."""
    for name, inside in (("QUIRE_CACHE_DIR", "."), ("XDG_CACHE_HOME", "quire")):
        if os.environ.get(name):
            return Path(os.environ[name]) / inside
    return None


def wait_patiently() -> None:
    """Let idle OpenMP threads sleep instead of spinning, unless the user has said otherwise.

    A small model runs five to ten times slower where spinning threads and other work share the
    cores. It must be said before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _nearest(name: str, known: set[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def _in_range(name: str, value: Any, least: int, most: int = 2**40) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be a whole number")
    if not least <= value <= most:
        raise ConfigError(f"{name}={value:,} must be from {least:,} to {most:,}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; known: {', '.join(known)}")
