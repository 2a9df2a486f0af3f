"""y = x · Wᵀ for few rows, at the speed at which memory gives the weights.

Weights stay as they lie: row after row, in whatever memory, without a second copy. Where torch is
faster (many rows), or where there is no kernel for what is given, a call is torch's own.

The kernels add up every sum in the same order, however many rows there are; torch does not. A
product that is to be ``batch_invariant`` takes many rows piece by piece instead, and is never
torch's; so does one for which torch is not faster: of pairs of bfloat16, in 16 bits that the CPU
does not know, and of floats on some CPUs. Where many rows are the lanes there are two orders, one
for few rows, unless there is to be one.
"""

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.compile import KINDS, Kernels, source_hash, usable_isa, with_dense_rows
from quire.kernels.language import LANES, Isa
from quire.kernels.threads import Scratch, Threads
from quire.layers.cpu.activation import ACTIVATIONS, torch_activation
from quire.layers.cpu.linear_frame import BLOCK, FRAME, MATRIX, Numbers, ProductShape, items_of
from quire.layers.cpu.linear_kernel import write_worker
from quire.layers.cpu.packed_product import PackedProduct
from quire.layers.cpu.packed_product import unsupported as packed_unsupported
from quire.layers.cpu.packed_weight import PackedForm, PackedWeight
from quire.layers.cpu.quantize import Quantizer
from quire.units import align_up, ceil_div

_FOLDER = Path(__file__).parent
source_hash(_FOLDER)  # of what is imported here, not of what may lie there later
_WORTH_THREADS = 2**17  # bytes of weights
_SOURCES = ("f32", "f16", "bf16")
_COMPILED = (torch.bfloat16, torch.float16)  # by oneDNN, for each number of rows
Biases = Sequence[Tensor | None]
Weight = Tensor | PackedWeight


class CpuLinear:
    """Kernels compiled for this machine on their first use, and kept for the next process."""

    def __init__(
        self,
        isa: Isa | None = None,
        kernel_dir: Path | None = None,
        *,
        most_rows: int | None = None,  # with more of them torch multiplies; None: as measured
        batch_invariant: bool = False,  # torch never multiplies, and ``most_rows`` go at a time
    ) -> None:
        self.kernels = Kernels(usable_isa(isa), kernel_dir, sources=_FOLDER)
        self.threads = Threads()
        self.scratch = Scratch()
        self.most_rows = most_rows
        self.batch_invariant = batch_invariant

    def unsupported(self, several: Sequence[Weight]) -> str | None:
        """Say why there is no kernel for weights [N, K] of one input; None if there is one."""
        packed = [weight for weight in several if isinstance(weight, PackedWeight)]
        weights = [weight for weight in several if isinstance(weight, Tensor)]
        if packed and weights:
            return "weights of one input are all packed, or none"
        if packed:
            return packed_unsupported(packed)
        first = weights[0]
        if first.device.type != "cpu":
            return f"it reads memory of the CPU, not of {first.device}"
        if KINDS.get(first.dtype) not in _SOURCES:
            return f"it has no kernel for {first.dtype}"
        for weight in weights:
            if weight.dim() != 2 or weight.dtype != first.dtype or weight.device != first.device:
                return "weights of one input are matrices of one dtype"
            if weight.shape[1] != first.shape[1]:
                return f"weights are of {first.shape[1]} and of {weight.shape[1]} inputs"
            if weight.shape[0] < BLOCK:
                return f"it finds {BLOCK} outputs at a time, of {weight.shape[0]}"
            if not weight.shape[1]:
                return "there are no inputs"
            if weight.stride(1) != 1:
                return "a row of weights does not lie side by side"
        return None

    def bind(
        self,
        weights: Sequence[Weight],
        biases: Biases | None = None,
        dtype: torch.dtype | None = None,
        *,
        rounds_inputs: bool = False,
    ) -> "BoundLinear":
        """Make the products of the same input: weights [N, K], biases [N] or none.

        ``dtype``: of inputs and outputs, for packed weights, which do not say it themselves.
        ``rounds_inputs``: packed weights are multiplied with inputs of 8 bits, where the CPU
        multiplies bytes.
        Raises: ValueError where ``unsupported`` gives a reason, or for biases of other shapes.
        """
        return BoundLinear(self._product(weights, biases, None, dtype, rounds_inputs))

    def bind_gated(
        self,
        gate: Weight,
        up: Weight,
        activation: str,
        biases: Biases | None = None,
        dtype: torch.dtype | None = None,
        *,
        rounds_inputs: bool = False,
    ) -> "BoundGated":
        """Make act(x · Gᵀ) * (x · Uᵀ) of G, U [N, K], for an activation of ``ACTIVATIONS``.

        ``dtype`` and ``rounds_inputs`` are as in ``bind``.
        Raises: ValueError as ``bind``, and for gate and up of different shapes.
        """
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: there are {', '.join(ACTIVATIONS)}")
        if gate.shape != up.shape:
            raise ValueError(f"gate is {list(gate.shape)}, up is {list(up.shape)}")
        product = self._product((gate, up), biases, activation, dtype, rounds_inputs)
        return BoundGated(product, activation)

    def quantizer(self, form: PackedForm) -> Quantizer:
        """Make what rounds weights [N, K] to packed ones."""
        return Quantizer(form, self.kernels, self.threads)

    def _product(
        self,
        several: Sequence[Weight],
        biases: Biases | None,
        activation: str | None,
        dtype: torch.dtype | None,
        rounds_inputs: bool,
    ) -> "_Product | PackedProduct":
        if reason := self.unsupported(several):
            raise ValueError(f"no kernel: {reason}")
        weights = [weight for weight in several if isinstance(weight, Tensor)]
        if weights:
            return _Product(self, weights, biases, activation)
        if dtype is None:
            raise ValueError("packed weights do not say the dtype of their inputs: give dtype")
        packed = [weight for weight in several if isinstance(weight, PackedWeight)]
        return PackedProduct(
            packed,
            biases,
            activation,
            dtype,
            kernels=self.kernels,
            threads=self.threads,
            scratch=self.scratch,
            rounds_inputs=rounds_inputs,
            most_rows=self.most_rows,
            batch_invariant=self.batch_invariant,
        )


class BoundLinear:
    """Weights that are multiplied with one input in one call."""

    def __init__(self, product: "_Product | PackedProduct") -> None:
        self._product = product
        self.most_rows = product.most_rows

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:  # [..., K] -> [..., N] of each weight
        outs = self._product.run(x)
        return self._product.by_torch(x) if outs is None else outs


class BoundGated:
    """A gate and what it gates."""

    def __init__(self, product: "_Product | PackedProduct", activation: str) -> None:
        self._product = product
        self._activation = torch_activation(activation)
        self.most_rows = product.most_rows

    def __call__(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        outs = self._product.run(x)
        if outs is None:
            gate, up = self._product.by_torch(x)
            return self._activation(gate) * up
        return outs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What inputs of one shape have in common."""

    num_rows: int
    at_once: int  # of them
    out_shapes: tuple[tuple[int, ...], ...]
    scratch_bytes: int  # of a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How threads share the outputs."""

    num_threads: int
    items: Numbers
    words: tuple[int, int]  # of a frame: where the items are, and how many


class _Product:
    """What stays the same from call to call, and one call of it."""

    def __init__(
        self,
        linears: CpuLinear,
        weights: Sequence[Tensor],
        biases: Biases | None,
        activation: str | None,
    ) -> None:
        self._weights = tuple(weights)
        self._biases = _checked(self._weights, biases)
        self._threads, self._scratch = linears.threads, linears.scratch
        self._kernels = linears.kernels  # whose code is good as long as it lives
        self._isa = linears.kernels.isa
        self._dtype, self._num_inputs = weights[0].dtype, weights[0].shape[1]
        self._widths = tuple(weight.shape[0] for weight in weights)
        # A gate's outputs come with those that it gates.
        self._outs = 1 if activation else len(weights)
        shape = ProductShape(
            kind=KINDS[self._dtype],
            tiles=self._isa.amx and self._dtype == torch.bfloat16,
            activation=activation,
        )
        if linears.batch_invariant and shape.panel_rows(self._isa) is not None:
            shape = replace(shape, one_order=True)  # the others have one as it is
        self._shape = shape
        given = linears.most_rows
        usual = self._shape.most_rows(self._isa) if given is None else given
        self.most_rows = sys.maxsize if linears.batch_invariant else usual
        in_pieces = given is None and self.most_rows == sys.maxsize
        self._at_once = (
            self._shape.rows_at_once(self._isa, self._num_inputs) if in_pieces else usual
        )
        self._work = linears.kernels.address(
            f"linear {self._shape}", lambda module: write_worker(module, self._shape, self._isa)
        )
        zeros = torch.zeros(max(self._widths), dtype=self._dtype)  # a bias that is missing
        size = weights[0].element_size()
        self._matrices = [
            (weight, weight.stride(0) * size, width, zeros if bias is None else bias, width * size)
            for weight, width, bias in zip(self._weights, self._widths, self._biases, strict=True)
        ]
        self._frame = struct.Struct(f"{len(FRAME) + len(weights) * len(MATRIX)}q")
        self._steps: dict[tuple[int, ...], _Step] = {}
        # By torch's number of threads. None is dropped: a recorded call reads its items.
        self._plans: dict[int, _Plan] = {}

    def _step_for(self, x: Tensor) -> _Step | None:
        step = self._steps.get(x.shape) or self._prepare(x.shape)
        if step is None or x.dtype is not self._dtype or not x.is_cpu:
            return None
        return None if torch.is_grad_enabled() and self._needs_grad(x) else step

    def by_torch(self, x: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(self._weights, self._biases, strict=True)
        num_rows = x.numel() // self._num_inputs
        more = 0 if torch.is_grad_enabled() or x.dtype not in _COMPILED else rows_more(num_rows)
        if not (more and x.is_cpu):
            return tuple([functional.linear(x, weight, bias) for weight, bias in pairs])
        rows = functional.pad(x.reshape(num_rows, self._num_inputs), (0, 0, 0, more))
        outs = [functional.linear(rows, weight, bias)[:num_rows] for weight, bias in pairs]
        return tuple([out.view(*x.shape[:-1], out.shape[1]) for out in outs])

    def run(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Multiply by our kernel; None if torch is to do it."""
        step = self._step_for(x)
        if step is None:
            return None
        row_bytes = self._num_inputs * x.itemsize
        if not x.is_contiguous():
            x = with_dense_rows(x.reshape(step.num_rows, self._num_inputs))
            row_bytes = x.stride(0) * x.itemsize
        most = self._threads.most
        plan = self._plans.get(most) or self._plans.setdefault(most, self._plan_for(most))
        outs = tuple([torch.empty(shape, dtype=self._dtype) for shape in step.out_shapes])
        scratch = self._scratch.take(step.scratch_bytes * plan.num_threads)
        for first in range(0, step.num_rows, step.at_once):
            some = min(step.at_once, step.num_rows - first)
            words = [
                0, 0, scratch.data_ptr(), step.scratch_bytes, *plan.words,
                x.data_ptr() + first * row_bytes, row_bytes, some, self._num_inputs,
            ]  # fmt: skip
            for n, (weight, weight_row, width, bias, out_row) in enumerate(self._matrices):
                out = (outs[n] if n < self._outs else outs[0]).data_ptr() + first * out_row
                words += weight.data_ptr(), weight_row, width, bias.data_ptr(), out, out_row
            self._threads.run(self._work, self._frame.pack(*words), plan.num_threads)
        self._scratch.give_back(scratch)
        return outs

    def _prepare(self, shape: torch.Size) -> _Step | None:
        num_rows = prod(shape[:-1])
        if shape[-1:] != (self._num_inputs,) or not 0 < num_rows <= self.most_rows:
            return None
        # Pieces of about one size: for a few rows that are left, weights would be read once more.
        pieces = ceil_div(num_rows, self._at_once)
        at_once = min(self._at_once, align_up(ceil_div(num_rows, pieces), LANES))
        step = _Step(
            num_rows=num_rows,
            at_once=at_once,
            out_shapes=tuple((*shape[:-1], width) for width in self._widths[: self._outs]),
            scratch_bytes=self._shape.scratch_bytes(
                self._isa, min(num_rows, at_once), self._num_inputs
            ),
        )
        if pieces == 1:  # many rows come in thousands of shapes, and take longer than this
            self._steps[shape] = step
        return step

    def _needs_grad(self, x: Tensor) -> bool:
        given = (x, *self._weights, *(bias for bias in self._biases if bias is not None))
        return any(tensor.requires_grad for tensor in given)

    def _plan_for(self, most_threads: int) -> _Plan:
        row_bytes = self._num_inputs * self._shape.element_bytes
        items = items_of(self._widths[: self._outs], row_bytes, most_threads)
        little = sum(self._widths) * row_bytes < _WORTH_THREADS
        return _Plan(
            num_threads=1 if little else min(most_threads, len(items)),
            items=items,
            words=(items.ctypes.data, len(items)),
        )


def rows_more(num_rows: int) -> int:
    """Count the rows of zeros that torch multiplies besides: seven, or an eighth at most.

    In 16 bits oneDNN compiles a product for every number of rows, which takes milliseconds, and
    keeps it: half a MiB of each for as long as the process lives. So there are eight numbers from
    one power of two to the next, and multiples of eight below: the sizes of recorded steps.
    """
    granule = max(8, (1 << max(0, (num_rows - 1).bit_length() - 1)) // 8)
    return align_up(num_rows, granule) - num_rows


def _checked(weights: Sequence[Tensor], biases: Biases | None) -> tuple[Tensor | None, ...]:
    """Raises: ValueError for biases that do not fit the weights."""
    if biases is None:
        return (None,) * len(weights)
    if len(biases) != len(weights):
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights")
    for weight, bias in zip(weights, biases, strict=True):
        if bias is None:
            continue
        if bias.shape != weight.shape[:1] or bias.dtype != weight.dtype or bias.stride(0) != 1:
            raise ValueError(f"a bias is {list(bias.shape)} for weights {list(weight.shape)}")
    return tuple(biases)
