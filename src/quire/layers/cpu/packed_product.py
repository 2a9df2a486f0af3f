"""y = x · Wᵀ for weights in 8 or 4 bits, which are read as they lie (``packed_weight``).

Few rows are multiplied with the codes themselves. For many rows some outputs' weights at a time
become numbers, and torch multiplies with those: the whole of a weight is never expanded. A product
that is to be ``batch_invariant`` multiplies them with the codes too, piece by piece.
"""

import struct
import sys
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from quire.kernels.compile import KINDS, Kernels, with_dense_rows
from quire.kernels.language import Isa
from quire.kernels.threads import Scratch, Threads
from quire.layers.cpu.linear_frame import Numbers, cut
from quire.layers.cpu.packed_frame import FRAME, MATRIX, UNPACK_FRAME, PackedShape
from quire.layers.cpu.packed_kernel import write_unpacker, write_worker
from quire.layers.cpu.packed_weight import BLOCK, PackedWeight
from quire.units import ceil_div

_WORTH_THREADS = 2**16  # bytes of weights
_ITEM_BYTES = 2**17  # of weights, at most: threads end at about the same time
_TILE_BYTES = 2**21  # of weights that have become numbers
_MOST_ROWS = 256  # whose sums and inputs a thread keeps at hand

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs and outputs


def unsupported(weights: Sequence[PackedWeight]) -> str | None:
    """Say why there is no kernel for packed weights of one input; None if there is one."""
    first = weights[0]
    for weight in weights:
        if weight.data.device.type != "cpu":
            return f"it reads memory of the CPU, not of {weight.data.device}"
        if weight.form != first.form:
            return "weights of one input are packed in one form"
        if weight.num_inputs != first.num_inputs:
            return f"weights are of {first.num_inputs} and of {weight.num_inputs} inputs"
        if not weight.num_inputs or not weight.num_outputs:
            return "there are no inputs, or no outputs"
        if not weight.data.is_contiguous():
            return "a record does not lie side by side"
    return None


def usual_rows(isa: Isa, dtype: torch.dtype) -> int:
    """Return the most rows that are multiplied with codes, and not with numbers by torch.

    Measured on two cores with AVX-512 VNNI and without bfloat16, where inputs of two bytes are 1.7
    times as fast as torch's floats, and on two of Zen 5, where they are 0.9 to 1.8 times as fast as
    torch's pairs of bfloat16, which round the weights besides. Tiles multiply more.
    """
    if _is_fast_in_16_bits(isa, dtype) and (isa.amx or not isa.byte_dot):
        return _MOST_ROWS // 4
    return sys.maxsize if isa.byte_dot and dtype != torch.float32 else _MOST_ROWS


def _is_fast_in_16_bits(isa: Isa, dtype: torch.dtype) -> bool:
    """Tell whether torch's products are faster in a dtype than in float32."""
    return dtype == torch.bfloat16 and (isa.bf16_convert or isa.amx)


class PackedProduct:
    """What stays the same from call to call, and one call of it."""

    def __init__(  # noqa: PLR0913
        self,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor | None] | None,
        activation: str | None,
        dtype: torch.dtype,
        *,
        kernels: Kernels,
        threads: Threads,
        scratch: Scratch,
        rounds_inputs: bool = False,  # to 8 bits, where the CPU multiplies bytes
        most_rows: int | None,  # None: as measured
        batch_invariant: bool = False,  # torch never multiplies, and ``most_rows`` go at a time
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"no kernel: it has none for {dtype}")
        self._weights = tuple(weights)
        self._biases = _checked(self._weights, biases, dtype)
        self._threads, self._scratch = threads, scratch
        self._kernels = kernels  # whose code is good as long as it lives
        self._isa = kernels.isa
        self._dtype, self._num_inputs = dtype, weights[0].num_inputs
        self._num_groups = weights[0].data.shape[1]
        self._widths = tuple(weight.num_outputs for weight in weights)
        # A gate's outputs come with those that it gates.
        self._outs = 1 if activation else len(weights)
        form = weights[0].form
        self._shape = PackedShape(
            kind=KINDS[dtype], form=form, activation=activation, rounds_inputs=rounds_inputs
        )
        usual = most_rows
        if usual is None:
            usual = usual_rows(self._isa, dtype)
        self.most_rows = sys.maxsize if batch_invariant else usual
        self._at_once = _MOST_ROWS if most_rows is None else most_rows
        self._work = kernels.address(
            f"packed {self._shape}", lambda module: write_worker(module, self._shape, self._isa)
        )
        fast_in_16 = _is_fast_in_16_bits(self._isa, dtype)
        self._by_torch_dtype = dtype if fast_in_16 else torch.float32
        self._plain = PackedShape(kind=KINDS[self._by_torch_dtype], form=form)
        self._unpacker = 0  # compiled when there are many rows for the first time
        size = dtype.itemsize
        self._matrices = [
            (weight.data, width, bias, width * size)
            for weight, width, bias in zip(self._weights, self._widths, self._biases, strict=True)
        ]
        self._frame = struct.Struct(f"{len(FRAME) + len(weights) * len(MATRIX)}q")
        weights_bytes = sum(weight.data.nbytes for weight in self._weights)
        self._is_worth_threads = weights_bytes >= _WORTH_THREADS
        # By the number of threads. None is dropped: a recorded call reads its items.
        self._plans: dict[int, Numbers] = {}

    def run(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Multiply inputs [..., K] by our kernel; None if torch is to do it."""
        lead = x.shape[:-1]
        num_rows = prod(lead)
        if x.shape[-1] != self._num_inputs or not 0 < num_rows <= self.most_rows:
            return None
        if x.dtype is not self._dtype or not x.is_cpu:
            return None
        if torch.is_grad_enabled() and x.requires_grad:
            return None
        row_bytes = self._num_inputs * x.itemsize
        if not x.is_contiguous():
            x = with_dense_rows(x.reshape(num_rows, self._num_inputs))
            row_bytes = x.stride(0) * x.itemsize
        most = self._threads.most if self._is_worth_threads else 1
        items = self._plans.get(most)
        if items is None:
            items = self._plans.setdefault(most, self._items(most))
        outs = tuple(
            [torch.empty(*lead, width, dtype=self._dtype) for width in self._widths[: self._outs]]
        )
        most_rows = min(num_rows, self._at_once)
        scratch_bytes = self._shape.scratch_bytes(self._isa, most_rows, self._num_groups)
        num_threads = min(most, len(items))
        scratch = self._scratch.take(scratch_bytes * num_threads)
        for first in range(0, num_rows, self._at_once):
            words = [
                0, 0, scratch.data_ptr(), scratch_bytes, items.ctypes.data, len(items),
                x.data_ptr() + first * row_bytes, row_bytes,
                min(self._at_once, num_rows - first), self._num_inputs, self._num_groups,
            ]  # fmt: skip
            for n, (data, width, bias, out_row) in enumerate(self._matrices):
                out = (outs[n] if n < self._outs else outs[0]).data_ptr() + first * out_row
                words += data.data_ptr(), width, bias.data_ptr(), out, out_row
            self._threads.run(self._work, self._frame.pack(*words), num_threads)
        self._scratch.give_back(scratch)
        return outs

    def by_torch(self, x: Tensor) -> tuple[Tensor, ...]:
        """Multiply any inputs [..., K] with weights that have become numbers, some at a time."""
        lead, rows = x.shape[:-1], x.reshape(-1, self._num_inputs)
        rows = rows.to(self._by_torch_dtype)
        outs = []
        for weight, bias in zip(self._weights, self._biases, strict=True):
            out = self._multiplied(rows, weight)
            out += bias[: weight.num_outputs]
            outs.append(out.to(x.dtype).view(*lead, weight.num_outputs))
        return tuple(outs)

    def _multiplied(self, rows: Tensor, weight: PackedWeight) -> Tensor:
        dtype, (num_blocks, num_groups, _) = self._by_torch_dtype, weight.data.shape
        padded = num_groups * weight.form.group_size
        some = max(1, _TILE_BYTES // (padded * BLOCK * dtype.itemsize))
        tile_bytes = some * BLOCK * padded * dtype.itemsize
        scratch = self._scratch.take(tile_bytes)
        out = torch.empty(len(rows), weight.num_outputs, dtype=dtype)
        for start in range(0, num_blocks, some):
            stop = min(start + some, num_blocks)
            width = (stop - start) * BLOCK
            tile = scratch[: padded * width * dtype.itemsize].view(dtype).view(padded, width)
            self._unpack(weight, start, stop, tile)
            first, last = start * BLOCK, min(stop * BLOCK, weight.num_outputs)
            numbers = tile[: self._num_inputs, : last - first]
            torch.mm(rows, numbers, out=out[:, first:last])
        self._scratch.give_back(scratch)
        return out

    def _unpack(self, weight: PackedWeight, start: int, stop: int, tile: Tensor) -> None:
        """Blocks of a weight become numbers [K, outputs], with zeros behind the last of each."""
        self._unpacker = self._unpacker or self._kernels.address(
            f"unpack {self._plain}", lambda m: write_unpacker(m, self._plain, self._isa)
        )
        words = (
            0, weight.data.data_ptr(), start, stop, weight.data.shape[1], tile.data_ptr(),
            tile.stride(0) * tile.itemsize,
        )  # fmt: skip
        frame = struct.pack(f"{len(UNPACK_FRAME)}q", *words)
        self._threads.run(self._unpacker, frame, min(self._threads.most, stop - start))

    def _items(self, most_threads: int) -> Numbers:
        """How threads share the blocks: i64[items, len(ITEM)]."""
        sizes = [weight.data.shape[0] for weight in self._weights[: self._outs]]
        block_bytes = self._weights[0].data[0].nbytes
        blocks = sum(sizes)
        step = max(1, min(_ITEM_BYTES // block_bytes, ceil_div(blocks, most_threads * 4)))
        return cut(sizes, blocks if most_threads == 1 else step)


def _checked(
    weights: Sequence[PackedWeight], biases: Sequence[Tensor | None] | None, dtype: torch.dtype
) -> list[Tensor]:
    """Biases of whole blocks: where they lie, or a copy of one that ends inside of a block.

    Raises: ValueError for those that do not fit the weights.
    """
    if biases is None:
        biases = [None] * len(weights)
    if len(biases) != len(weights):
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights")
    found = []
    for weight, bias in zip(weights, biases, strict=True):
        if bias is not None and (bias.shape != (weight.num_outputs,) or bias.dtype != dtype):
            raise ValueError(
                f"a bias is {list(bias.shape)} in {bias.dtype} for {weight.num_outputs} outputs "
                f"in {dtype}"
            )
        outputs = weight.data.shape[0] * BLOCK
        if bias is None or len(bias) < outputs or bias.stride(0) != 1:
            whole = torch.zeros(outputs, dtype=dtype)
            if bias is not None:
                whole[: weight.num_outputs] = bias
            bias = whole
        found.append(bias)
    return found
