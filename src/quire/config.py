"""Every option of the engine, once. Command-line flags are made from these fields.

Names are vLLM's where vLLM has one. No other module touches the environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from quire.blocks import DEFAULT_POLICY, POLICIES
from quire.errors import ConfigError
from quire.strategies import STRATEGIES
from quire.units import parse_bytes

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


def _option(default: Any, help: str, *, flag_type: Any = None) -> Any:
    """A field and its description. ``flag_type``: what a flag takes, if not the field's type."""
    extra = {} if flag_type is None else {"flag_type": flag_type}
    return field(default=default, metadata=MappingProxyType({"help": help, **extra}))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is built. Raises: ConfigError naming the option, its value and its limit."""

    dtype: str = _option(
        "auto", "Weights and KV: auto (the checkpoint's), float32, bfloat16, float16."
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
    block_size: int = _option(16, "Tokens in a block (paged).")
    enable_prefix_caching: bool = _option(
        True, "Keep what has been computed, for prompts that begin alike (paged)."
    )
    prefix_caching_policy: str = _option(
        DEFAULT_POLICY, f"What of it goes first when room is needed: {', '.join(POLICIES)} (paged)."
    )
    watermark: float = _option(
        0.01, "Share of the KV memory that a newcomer leaves free while others run."
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "Ceiling on KV memory, e.g. 2GiB. Default: 80 % of what is available.",
        flag_type=str | None,
    )
    growth: Literal["uniform", "doubling", "staggered"] = _option(
        "uniform", "How buffers grow (growing)."
    )
    growth_tokens: int = _option(256, "Step, first size or base of that growth, in tokens.")
    reserve: Literal["max_model_len", "request"] = _option(
        "max_model_len", "What a sequence reserves (contiguous): the longest, or its own maximum."
    )
    seed: int = _option(0, "Seed of requests that bring none.")

    def __post_init__(self) -> None:
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
        _in_range("seed", self.seed, 0, 2**63)
        _one_of("cache", self.cache, tuple(STRATEGIES))
        _one_of("growth", self.growth, ("uniform", "doubling", "staggered"))
        _one_of("reserve", self.reserve, ("max_model_len", "request"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_CACHE_DTYPES))

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """From keyword arguments; an unknown one is refused with the nearest known name."""
        known = {option.name for option in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{_nearest(name, known)}")
        memory = options.get("kv_cache_memory_bytes")
        if isinstance(memory, str):
            options["kv_cache_memory_bytes"] = parse_bytes(memory)
        return cls(**options)


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
