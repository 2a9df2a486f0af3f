"""How much a program does: one small table, so that no request waits for a trial of sizes.

The table has reasons and no measurements: decision 38.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.attention.gather import query_sharing
from quire.kv import LayerView
from quire.spec import AttentionSpec, ChunkedAttention, LatentAttention, SlidingWindow
from quire.units import ceil_div

# -- a GPU's facts ---------------------------------------------------------------------------------

# What the kernels are made for: a GPU's facts, or the interpreter's in place of one.


LEAST_CAPABILITY = 8, 0  # bfloat16 products, and copies into shared memory without a wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device, as far as a kernel's shape depends on it."""

    num_processors: int  # streaming multiprocessors
    shared_bytes: int  # that one program may have
    fp8_converts: bool  # float8_e4m3fn, in an instruction
    products_from_shared: bool  # tensor cores of Hopper and the large Blackwells: wgmma, tcgen05
    emulated: bool  # Triton's interpreter runs the kernels, on the CPU


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET was set at the import of Triton, which decides for all."""
    return bool(triton.knobs.runtime.interpret)


def find_gpu(device: torch.device) -> Gpu | str:
    """Read a device's facts, or say why the kernels cannot run there."""
    if interpreted() and device.type in ("cpu", "cuda"):
        return Gpu(  # an H200's figures, so that what is split there is split here
            num_processors=132,
            shared_bytes=227 * 1024,
            fp8_converts=False,
            products_from_shared=True,
            emulated=True,
        )
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device} (but in Triton's interpreter: TRITON_INTERPRET=1)"
    if torch.version.hip is not None:
        return "its kernels are made for NVIDIA's GPUs, and this torch is for AMD's"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    facts = torch.cuda.get_device_properties(device)
    capability = (facts.major, facts.minor)
    if capability < LEAST_CAPABILITY:
        return (
            f"{facts.name} has compute capability {facts.major}.{facts.minor}, and it needs "
            f"{'.'.join(map(str, LEAST_CAPABILITY))} (Ampere) or more"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    try:  # which looks for the driver, and for a C compiler unless it has done so before
        limits = triton.runtime.driver.active.utils.get_device_properties(index)
    except Exception as error:
        return f"Triton cannot use {facts.name}: {' '.join(str(error).split())[:300]}"
    return Gpu(
        num_processors=facts.multi_processor_count,
        shared_bytes=limits["max_shared_mem"],
        fp8_converts=capability >= (8, 9),
        products_from_shared=facts.major in (9, 10),
        emulated=False,
    )


# -- tile sizes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The shape of a program."""

    rows: int  # queries × the heads that share a key-value head
    tokens: int  # of a step
    num_warps: int
    buffers: int  # steps whose entries are on their way while one is worked on

    def num_stages(self, *, looked_up: bool) -> int:
        """Return Triton's number of stages for the buffers.

        Where a table tells each step's entries, the table's entry is on its way first, and Triton
        divides the stages evenly between the two.
        """
        return 1 + self.buffers * (2 if looked_up else 1)

    def heads(self, sharing: int) -> int:
        """Return the heads in a tile: all that share a key-value head, or an equal part."""
        return ceil_div(sharing, ceil_div(sharing, self.rows))

    def queries(self, sharing: int) -> int:
        """Return the queries in a tile."""
        return self.rows // self.heads(sharing)


# By the wider of an entry's two parts, in elements: it decides what lies in registers.
_FEW = (
    (128, Tile(rows=16, tokens=64, num_warps=4, buffers=2)),
    (256, Tile(rows=16, tokens=32, num_warps=4, buffers=2)),
    (512, Tile(rows=16, tokens=32, num_warps=4, buffers=2)),
)
_MANY = (
    (128, Tile(rows=128, tokens=64, num_warps=8, buffers=2)),
    (256, Tile(rows=64, tokens=32, num_warps=8, buffers=2)),
    (512, Tile(rows=32, tokens=32, num_warps=8, buffers=2)),
)
# Codes pass through registers on their way: more programs side by side hide it.
_FEW_OF_CODES = ((128, Tile(rows=16, tokens=64, num_warps=2, buffers=2)), *_FEW[1:])
# Where products take both sides from registers, or codes pass through them on their way.
_MANY_IN_REGISTERS = (
    (128, Tile(rows=128, tokens=32, num_warps=8, buffers=2)),
    *_MANY[1:],
)
# Products of float32 are no tensor core's work: every factor passes through registers.
_PLAIN_FEW = (
    (128, Tile(rows=16, tokens=32, num_warps=8, buffers=1)),
    (512, Tile(rows=16, tokens=16, num_warps=8, buffers=0)),
)
_PLAIN_MANY = (
    (128, Tile(rows=32, tokens=16, num_warps=8, buffers=1)),
    (512, Tile(rows=16, tokens=16, num_warps=8, buffers=0)),
)
MOST_WIDTH = 512
LEAST_STEPS = 4  # of a split: joining costs about as much as a step or two
MOST_SPLITS = 64
_LITTLE_BYTES = 4096  # that Triton takes for places, maxima and the like
# What a processor should have at a time: of decoding, eight warps, which keep its memory busy (more
# splits than that cost their joining: on an H200 eight programs of four took 7 % longer than two,
# and 30 % with one sequence); of long chunks, two programs, for the last ones not to be waited for.
FEW_WARPS, MANY_PROGRAMS = 8, 2


def room(width: int) -> int:
    """Round up to a power of two, which Triton has vectors of; 16 at least, for products."""
    return max(16, 1 << (width - 1).bit_length())


def few_queries(
    *, key: int, value: int, entry_bytes: int, plain: bool, sharing: int, gpu: Gpu
) -> Tile:
    """Choose for sequences with a tile of queries at most, as in decoding: the memory decides."""
    width = max(room(key), room(value))
    of_codes = _FEW_OF_CODES if entry_bytes == 1 else _FEW
    tile = _first(_PLAIN_FEW if plain else of_codes, width)
    if not plain:
        rows = min(room(sharing), 64 if width <= 256 else 32)
        num_warps = 8 if rows * width > 32 * 128 else tile.num_warps
        tile = replace(tile, rows=rows, num_warps=num_warps)
    return _fitting(tile, room(key) + room(value), entry_bytes, gpu)


def many_queries(*, key: int, value: int, entry_bytes: int, plain: bool, gpu: Gpu) -> Tile:
    """Choose for longer chunks: arithmetic decides."""
    from_shared = gpu.products_from_shared and entry_bytes > 1
    table = _MANY if from_shared else _MANY_IN_REGISTERS
    tile = _first(_PLAIN_MANY if plain else table, max(room(key), room(value)))
    if entry_bytes == 1 and not gpu.products_from_shared:  # two sides and codes in registers
        tile = replace(tile, rows=min(tile.rows, 64))
    return _fitting(tile, room(key) + room(value), entry_bytes, gpu)


def num_splits(num_programs: int, num_tokens: int, tile: Tile, wanted_programs: int) -> int:
    """Split each walk over ``num_tokens`` at most into parts that keep the processors busy."""
    wanted = ceil_div(wanted_programs, max(1, num_programs))
    possible = ceil_div(num_tokens, LEAST_STEPS * tile.tokens)
    return max(1, min(wanted, possible, MOST_SPLITS))


def _first(table: tuple[tuple[int, Tile], ...], width: int) -> Tile:
    return next(tile for most, tile in table if width <= most)


def _fitting(tile: Tile, width: int, entry_bytes: int, gpu: Gpu) -> Tile:
    """Take fewer steps on their way, or shorter ones, where they do not fit beside the queries.

    Where products are read from shared memory, the step that is worked on stays there meanwhile.
    """
    own = tile.rows * width * max(entry_bytes, 2) + _LITTLE_BYTES
    while True:
        fits = (gpu.shared_bytes - own) // (tile.tokens * width * entry_bytes)
        fits -= gpu.products_from_shared
        if fits >= min(tile.buffers, 1) or tile.tokens == 16:
            return replace(tile, buffers=max(0, min(tile.buffers, fits)))
        tile = replace(tile, tokens=tile.tokens // 2)


# -- what is compiled for --------------------------------------------------------------------------

# What a layer's kernels are compiled for, beside the sizes that a step brings.


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendLaunch:
    """One kind of layer and of queries."""

    kv_heads: int
    sharing: int  # query heads of a key-value head
    key: int  # width, in elements; of a latent
    value: int  # … of its rotary key
    reads: str  # "full", "sliding" or "chunked"
    reach: int  # tokens of a window or a chunk
    latent: bool
    kept: str  # "plain", "int8" or "fp8"
    kept_bytes: int  # of an element
    dtype: torch.dtype  # in which factors are multiplied

    @property
    def output_width(self) -> int:
        return self.key if self.latent else self.value

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.sharing


def shape_of(q: Tensor, view: LayerView, spec: AttentionSpec) -> AttendLaunch:
    """Describe the kind of layer and of queries [T, H, D].

    Raises: ValueError where queries do not fit the view.
    """
    latent = isinstance(spec, LatentAttention)
    sharing = query_sharing(q, view, spec)
    (_, kv_heads, _, key), value = view.k.shape, view.v.shape[-1]
    if q.dtype not in _FLOATS:
        raise ValueError(f"there is no kernel for queries in {q.dtype}")
    reads, reach = "full", 0
    if isinstance(spec, SlidingWindow):
        reads, reach = "sliding", spec.window
    elif isinstance(spec, ChunkedAttention):
        reads, reach = "chunked", spec.chunk
    kept = kept_as(view.k.dtype)
    return AttendLaunch(
        kv_heads=kv_heads,
        sharing=sharing,
        key=key,
        value=value,
        reads=reads,
        reach=reach,
        latent=latent,
        kept=kept,
        kept_bytes=view.k.element_size(),
        # One that holds both; codes are exact in any.
        dtype=torch.promote_types(q.dtype, view.k.dtype) if kept == "plain" else q.dtype,
    )


def kept_as(dtype: torch.dtype) -> str:
    """Return how a dtype is kept. Raises: ValueError for one that no kernel reads."""
    if dtype in _FLOATS:
        return "plain"
    if dtype == torch.int8:
        return "int8"
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    raise ValueError(f"there is no kernel for {dtype}")


# -- addresses -------------------------------------------------------------------------------------

# How a kernel is told where a cache's entries lie: see ``kernels.elements_at``.

ELEMENTS = MappingProxyType(
    {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.int8: tl.int8,
        torch.float8_e4m3fn: tl.uint8,  # codes
        torch.uint8: tl.uint8,
    }
)
_WIDEST_ACCESS = 16  # bytes of a load or a store


def address_of(x: Tensor | None) -> int:
    """Return the address of the first element of a tensor of any shape; 0 of what is not there."""
    return 0 if x is None else x.data_ptr()


def alignment_of(*tensors: Tensor) -> int:
    """Return a power of two in bytes, up to what one access takes, that divides each address."""
    together = _WIDEST_ACCESS
    for x in tensors:
        together |= x.data_ptr()
    return together & -together
