"""Describe the KV memory of one layer: six kinds, each with the same methods.

This is the only place with the formula for KV bytes. The layout of the bytes, and which sequence
holds which block, are decided elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from quire.errors import ConfigError
from quire.units import ceil_div

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
    }
)
# The float32 scale of each token's key in each head, and of its value; fp8 needs none.
SCALE_BYTES: Mapping[str, int] = MappingProxyType({"int8": 4})


Count = TypeVar("Count", int, "npt.NDArray[np.int64]")  # one number of tokens, or many at once


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises: ConfigError with the known dtypes."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def scale_bytes(dtype: str) -> int:
    """Return the bytes of the scale of a token's key (or value) in one head, or 0."""
    return SCALE_BYTES.get(dtype, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeysAndValues:
    """Keys and values, which full, sliding and chunked attention keep per head and token.

    Source: block bytes = 2 x block_size x kv_heads x head_size x dtype bytes, Kwon et al. 2023 §4;
    int8 with a scale for each token and head as vLLM's ``int8_per_token_head``.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    value_head_dim: int | None = None  # None: as wide as the key

    @property
    def entry_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of one token's key and value: ([K, D], [K, Dv])."""
        return (
            (self.num_kv_heads, self.head_dim),
            (self.num_kv_heads, self.value_head_dim or self.head_dim),
        )

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one more token, while no window passes any."""
        return _entry_bytes(self.entry_shapes, self.dtype)

    def live_start(self, num_tokens: Count) -> Count:
        """Return the first of ``num_tokens`` tokens that a later token can still read."""
        raise NotImplementedError

    def live_range(self, num_tokens: int) -> range:
        """Return the tokens that a later token can still read."""
        return range(self.live_start(num_tokens), num_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes to keep once ``num_tokens`` are computed and more may follow."""
        return len(self.live_range(num_tokens)) * self.bytes_per_token

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Return the most tokens held at once on the way there, in steps of ``step_tokens``."""
        raise NotImplementedError

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of ``block_size`` tokens in this layer."""
        return block_size * self.bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(_KeysAndValues):
    """Every token's key and value, for as long as the sequence lives."""

    def live_start(self, num_tokens: Count) -> Count:
        return 0 * num_tokens

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        return num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(_KeysAndValues):
    """Keys and values of the last ``window`` tokens: token i reads (i - window, i].

    Before token n is computed, its window holds n - window + 1 … n - 1, and these stay live.
    """

    window: int  # tokens, with the query's own

    def live_start(self, num_tokens: Count) -> Count:
        return (num_tokens - self.window + 1) * (num_tokens >= self.window)

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        return min(num_tokens, self.window - 1 + step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedAttention(_KeysAndValues):
    """Keys and values of the current chunk: token i reads [i - i % chunk, i] (Llama 4)."""

    chunk: int  # tokens

    def live_start(self, num_tokens: Count) -> Count:
        return num_tokens - num_tokens % self.chunk

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        return min(num_tokens, self.chunk - 1 + step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """One compressed latent and one rotary key per token, shared by all heads (MLA).

    A model that also compresses along the tokens keeps one entry per ``compress_ratio`` tokens.
    Source: DeepSeek-V2 §2.1; stored block = block_size // compress_ratio as in vLLM's MLA spec.
    """

    latent_dim: int
    rope_dim: int
    dtype: str
    compress_ratio: int = 1

    @property
    def entry_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of one token's latent and rotary key: ([1, latent], [1, rope])."""
        return ((1, self.latent_dim), (1, self.rope_dim))

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one entry, which stands for ``compress_ratio`` tokens."""
        return _entry_bytes(self.entry_shapes, self.dtype)

    def live_start(self, num_tokens: Count) -> Count:
        return 0 * num_tokens

    def live_range(self, num_tokens: int) -> range:
        return range(num_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.compress_ratio) * self.bytes_per_token

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        return num_tokens

    def storage_block_size(self, block_size: int) -> int:
        """Return the number of entries of a block of ``block_size`` tokens."""
        return block_size // self.compress_ratio

    def block_bytes(self, block_size: int) -> int:
        return self.storage_block_size(block_size) * self.bytes_per_token


# Names of states in the dtype of the layer's weights; others have a dtype of their own.
IN_WEIGHTS_DTYPE = ("conv", "value", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a recurrent layer's state."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_convolution(self) -> bool:
        """Return whether it is a window over the latest inputs, and not the state of a scan."""
        return self.name.startswith("conv")

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * dtype_bytes(self.dtype)


class _InOnePlace:
    """Tensors of a fixed size per sequence, as recurrent states and sources are.

    Tokens have no slots of their own. The latest token stands for the whole, which later ones read.
    """

    __slots__ = ()
    states: tuple[StateTensor, ...]

    @property
    def num_places(self) -> int:
        """Return how many such places a sequence has."""
        return 1

    @property
    def state_bytes(self) -> int:
        return sum(state.num_bytes for state in self.states)

    @property
    def bytes_per_token(self) -> int:
        return 0

    def live_start(self, num_tokens: Count) -> Count:
        return (num_tokens - 1) * (num_tokens > 0)

    def live_range(self, num_tokens: int) -> range:
        return range(self.live_start(num_tokens), num_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        return self.state_bytes * self.num_places if num_tokens else 0

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        return min(num_tokens, 1)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of the whole, for any block size."""
        return self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState(_InOnePlace):
    """A state of fixed size that each token overwrites (Mamba, linear attention, convolution).

    Speculation keeps one more state per draft token, to go back when a draft is rejected.
    """

    states: tuple[StateTensor, ...]
    num_speculative_blocks: int = 0

    @property
    def num_places(self) -> int:
        return 1 + self.num_speculative_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention(_InOnePlace):
    """Keys and values of a source that an encoder has read: written once, with the first token.

    The whole source has one place, of the size of the longest source, which is every source's size
    for Whisper.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    source_tokens: int  # of the longest source
    value_head_dim: int | None = None  # None: as wide as the key

    @property
    def states(self) -> tuple[StateTensor, ...]:  # type: ignore[override]
        """Return the tensors of keys and values: [K, source tokens, D] and […, Dv]."""
        heads, length = self.num_kv_heads, self.source_tokens
        values = (heads, length, self.value_head_dim or self.head_dim)
        return (
            StateTensor(name="keys", shape=(heads, length, self.head_dim), dtype=self.dtype),
            StateTensor(name="values", shape=values, dtype=self.dtype),
        )


LayerSpec: TypeAlias = (
    FullAttention
    | SlidingWindow
    | ChunkedAttention
    | LatentAttention
    | RecurrentState
    | CrossAttention
)
# Memory of a fixed size per sequence, in which tokens have no slots.
KeptWhole: TypeAlias = RecurrentState | CrossAttention
AttentionSpec: TypeAlias = FullAttention | SlidingWindow | ChunkedAttention | LatentAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: its own memory, or the layer whose memory it reads."""

    # None; one; or two, if attention runs beside Mamba, or the layer also attends to a source.
    specs: tuple[LayerSpec, ...]
    shares_with: int | None = None  # index of the layer whose keys and values this one reads


def _entry_bytes(shapes: tuple[tuple[int, int], ...], dtype: str) -> int:
    """Return the bytes of one token's keys and values, with their scales."""
    return sum(heads * (width * dtype_bytes(dtype) + scale_bytes(dtype)) for heads, width in shapes)
