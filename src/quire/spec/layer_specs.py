"""What one layer must remember: six kinds, a closed union.

Each kind answers the same questions, and this is the only place where the KV formula stands:

* ``bytes_per_token``     what one more token costs while nothing is forgotten;
* ``live_start(n)``       the first of n tokens that a later token can still read;
* ``live_range(n)``       all of those, as a range;
* ``bytes_for(n)``        bytes that must be kept once n tokens are computed and more may follow;
* ``peak_tokens(n, s)``   the most tokens held at once on the way to n, in steps of s tokens;
* ``block_bytes(B)``      bytes of one block of B tokens in this layer.

How the bytes are laid out, who holds which block and how much room there is, other rooms decide.
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
# What gives whole numbers a range: one for each token's key in each head, and one for its value.
SCALE_BYTES: Mapping[str, int] = MappingProxyType({"int8": 4})  # float32; fp8 has a range itself


Count = TypeVar("Count", int, "npt.NDArray[np.int64]")  # one number of tokens, or many at once


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises: ConfigError naming the known dtypes."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def scale_bytes(dtype: str) -> int:
    """Bytes of the scale beside one head's key, or value, of a token; 0 where there is none."""
    return SCALE_BYTES.get(dtype, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeysAndValues:
    """What full, sliding and chunked attention have in common: a key and a value a head and token.

    Source: block bytes = 2 x block_size x kv_heads x head_size x dtype bytes, Kwon et al. 2023 §4;
    int8 with a scale for each token and head as vLLM's ``int8_per_token_head``.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    value_head_dim: int | None = None  # None: as wide as the key

    @property
    def entry_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of one token's key and value: ([K, D], [K, Dv])."""
        return (
            (self.num_kv_heads, self.head_dim),
            (self.num_kv_heads, self.value_head_dim or self.head_dim),
        )

    @property
    def bytes_per_token(self) -> int:
        return _entry_bytes(self.entry_shapes, self.dtype)

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(_KeysAndValues):
    """Every token's key and value, for as long as the sequence lives."""

    def live_start(self, num_tokens: Count) -> Count:
        return 0 * num_tokens

    def live_range(self, num_tokens: int) -> range:
        return range(num_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        return num_tokens * self.bytes_per_token

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        return num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(_KeysAndValues):
    """Keys and values of the last ``window`` tokens: token i reads (i - window, i].

    Before token n is computed, its window holds n - window + 1 … n - 1: that is what stays live.
    """

    window: int  # tokens, the reading token included

    def live_start(self, num_tokens: Count) -> Count:
        return (num_tokens - self.window + 1) * (num_tokens >= self.window)

    def live_range(self, num_tokens: int) -> range:
        return range(self.live_start(num_tokens), num_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        return len(self.live_range(num_tokens)) * self.bytes_per_token

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        return min(num_tokens, self.window - 1 + step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedAttention(_KeysAndValues):
    """Keys and values of the current chunk: token i reads [i - i % chunk, i] (Llama 4)."""

    chunk: int  # tokens

    def live_start(self, num_tokens: Count) -> Count:
        return num_tokens - num_tokens % self.chunk

    def live_range(self, num_tokens: int) -> range:
        return range(self.live_start(num_tokens), num_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        return len(self.live_range(num_tokens)) * self.bytes_per_token

    def peak_tokens(self, num_tokens: int, step_tokens: int = 1) -> int:
        return min(num_tokens, self.chunk - 1 + step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """One compressed latent and one rotary key a token, shared by all heads (MLA).

    A model that also compresses along the tokens keeps ``1 / compress_ratio`` of them.
    Source: DeepSeek-V2 §2.1; stored block = block_size // compress_ratio as in vLLM's MLA spec.
    """

    latent_dim: int
    rope_dim: int
    dtype: str
    compress_ratio: int = 1

    @property
    def entry_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of one token's latent and rotary key: ([1, latent], [1, rope])."""
        return ((1, self.latent_dim), (1, self.rope_dim))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one stored entry, which stands for ``compress_ratio`` tokens."""
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
        """Entries stored for a block of ``block_size`` tokens."""
        return block_size // self.compress_ratio

    def block_bytes(self, block_size: int) -> int:
        return self.storage_block_size(block_size) * self.bytes_per_token


# Names of states that a layer keeps in the dtype of its weights; others have one of their own.
IN_WEIGHTS_DTYPE = ("conv", "value", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a recurrent layer's state."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_convolution(self) -> bool:
        """Whether it is one of a layer's windows over its latest inputs; else what a scan keeps."""
        return self.name.startswith("conv")

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * dtype_bytes(self.dtype)


class _InOnePlace:
    """What recurrent states and sources have in common: tensors of one size, whatever the length.

    No token has a slot there; the latest one stands for the whole, which all that follow read.
    """

    __slots__ = ()
    states: tuple[StateTensor, ...]

    @property
    def num_places(self) -> int:
        """Places of a sequence, each for the whole."""
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
        """Bytes of the whole, whatever the block size."""
        return self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState(_InOnePlace):
    """A state of fixed size that each token overwrites (Mamba, linear attention, convolution).

    Speculation keeps one further state for each draft token, so that a rejected one can be undone.
    """

    states: tuple[StateTensor, ...]
    num_speculative_blocks: int = 0

    @property
    def num_places(self) -> int:
        return 1 + self.num_speculative_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention(_InOnePlace):
    """Keys and values of a source that an encoder has read: written once, and then only read.

    They come with the first token of a text and no other adds to them, so that the whole source is
    one thing to keep, with one place for the longest: for Whisper exactly what it always is.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    source_tokens: int  # the most that a source can have
    value_head_dim: int | None = None  # None: as wide as the key

    @property
    def states(self) -> tuple[StateTensor, ...]:  # type: ignore[override]
        """The longest source's keys and values: [K, source tokens, D] and […, Dv]."""
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
# What is kept in one piece, in a place of its own (``num_places``), however long the text is: no
# token has a slot there.
KeptWhole: TypeAlias = RecurrentState | CrossAttention
AttentionSpec: TypeAlias = FullAttention | SlidingWindow | ChunkedAttention | LatentAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: what it remembers, and whose memory it reads instead."""

    specs: tuple[LayerSpec, ...]  # () for none; two where attention and Mamba run side by side,
    # or where it attends to a source besides
    shares_with: int | None = None  # index of the layer whose keys and values this one reads


def _entry_bytes(shapes: tuple[tuple[int, int], ...], dtype: str) -> int:
    """One token's keys and values, and their scales."""
    return sum(heads * (width * dtype_bytes(dtype) + scale_bytes(dtype)) for heads, width in shapes)
