"""What runs in place of a model's own part: found by its structure, accepted by a trial.

A part is a ``torch.nn`` module of any class. Which of the known forms it has is not read from its
name: each is tried on random inputs, and the one that gives what the part itself gives is taken.
Before every pass it is asked whether the part is still what it was then.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains, is_
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from quire.kernels.compile import KINDS
from quire.layers.cpu.activation import ACTIVATIONS, torch_activation
from quire.layers.cpu.linear import BoundLinear, CpuLinear, Weight
from quire.layers.cpu.row_kernels import (
    ROW_KINDS,
    GateKernel,
    GateShape,
    Norm,
    NormForm,
    NormShape,
    Rotary,
    RotaryShape,
)
from quire.layers.packed_linear import MOST_CODE, PackedLinear
from quire.layers.watch import FileReads, WeightsWatch

# -- what a fused module is ------------------------------------------------------------------------


Slot: TypeAlias = tuple[dict[str, Any], str, object]  # whose value, by that name, is that


class KeptParts:
    """What modules are made of, to be looked at before every pass: as flat lists, all at once."""

    def __init__(
        self,
        slots: Collection[Slot],
        plain: Collection[nn.Module],  # calling them does what their classes say, nothing more
        hooked: Collection[nn.Module] = (),  # these may have hooks besides
    ) -> None:
        self._owners = [slot[0] for slot in slots]
        self._names = [slot[1] for slot in slots]
        self._values = [slot[2] for slot in slots]
        self._hooks = [hooks for m in plain for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [m.__dict__ for m in (*plain, *hooked)]

    def holds(self) -> bool:
        """Tell whether all of it is still there."""
        found = map(dict.get, self._owners, self._names)
        return (
            all(map(is_, found, self._values))
            and not any(self._hooks)
            and not any(map(contains, self._attributes, repeat("forward")))
        )


def slots_of(*several: dict[str, Any]) -> tuple[Slot, ...]:
    """List what dictionaries hold, as slots."""
    return tuple((own, name, value) for own in several for name, value in own.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedModule:
    """Runs in place of ``module.forward``."""

    module: nn.Module
    forward: Callable[..., Any]
    inside: tuple[nn.Module, ...]  # its children that are not called meanwhile
    holds: Callable[[], bool]  # whether the module is still what it was then


def stand_in(
    module: nn.Module,
    forward: Callable[..., Any],
    inside: tuple[nn.Module, ...] = (),
    *,
    file_reads: FileReads,
) -> FusedModule | str:
    """Make a fused module; or say why none is made.

    A module that cannot be watched might do something else by now.
    """
    if "forward" in vars(module):
        return "its owner has put another forward in its place"
    watch = WeightsWatch(module, file_reads=file_reads)
    if watch.unseen:
        return f"it keeps what cannot be watched: {', '.join(watch.unseen)}"
    return FusedModule(module=module, forward=forward, inside=inside, holds=watch.holds)


def is_plain(module: nn.Module) -> bool:
    """Tell whether calling a module does what its class says, and nothing more."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def random_like(like: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Make random numbers [*shape] of a tensor's dtype, where it lies, about one in size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like)


def answer(part: Callable[..., Any], *given: Tensor) -> Any:
    """Call a part with tensors [...]; None if it takes something else."""
    try:
        return part(*given)
    except Exception:  # it is code that we know nothing of
        return None


def agrees(got: Tensor, want: Any, *, of_sums: bool = False, least: float = 0.0) -> bool:
    """Tell whether two tensors [*shape] are equal within one rounding of their dtype.

    In float32 sums that are taken in another order differ by some of its roundings: sixteen are
    allowed. ``of_sums``: what is computed is a sum, so one term's rounding is what counts, not that
    of a sum that came out small. ``least``: a share that is allowed in any dtype.
    """
    if not isinstance(want, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    rounding = max(torch.finfo(want.dtype).eps, 16 * torch.finfo(torch.float32).eps, least)
    got, want = got.float(), want.float()
    size = want.abs()
    if of_sums and want.numel():
        size = size.max()
    return bool(((got - want).abs() <= rounding * size + 1e-30).all())


def settings(module: nn.Module) -> frozenset[tuple[str, object]]:
    """Collect the plain values that a module has been made with: they may decide what it does."""
    plain = (int, float, str, type(None))
    return frozenset((n, v) for n, v in vars(module).items() if isinstance(v, plain))


# -- linears ---------------------------------------------------------------------------------------

# Stand-ins for linear layers, alone or side by side on one input.


_SIBLINGS = ("q_proj", "k_proj", "v_proj")
Linear: TypeAlias = nn.Linear | PackedLinear


def is_linear(module: object) -> TypeGuard[Linear]:
    """Tell whether a module is a linear layer, of numbers or of codes."""
    return isinstance(module, nn.Linear | PackedLinear)


def weight_of(layer: Linear) -> Weight:
    """Return a layer's weight, where it lies now."""
    return layer.packed_weight if isinstance(layer, PackedLinear) else layer.weight


def dtype_of(layer: Linear) -> torch.dtype:
    """Return the dtype of a layer's inputs and outputs."""
    return layer.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype


def rounds_inputs(layer: Linear) -> bool:
    """Tell whether a layer's inputs become 8 bits."""
    return isinstance(layer, PackedLinear) and layer.rounds_inputs


def kind_of(layer: Linear) -> tuple[object, ...]:
    """Return all that the code of a layer's product depends on."""
    form = layer.packed_weight.form if isinstance(layer, PackedLinear) else None
    sizes = layer.out_features, layer.in_features
    return *sizes, dtype_of(layer), form, rounds_inputs(layer), layer.bias is None


def inputs_like(layer: Linear, num_rows: int) -> Tensor:
    """Make random inputs [1, rows, K] for a layer."""
    device = layer.packed.device if isinstance(layer, PackedLinear) else layer.weight.device
    like = torch.empty(0, dtype=dtype_of(layer), device=device)
    return random_like(like, 1, num_rows, layer.in_features)


def bind(cpu: CpuLinear, layers: Sequence[Linear]) -> BoundLinear:
    """Make the products of layers that have one input."""
    first, weights, biases = layers[0], [weight_of(x) for x in layers], [x.bias for x in layers]
    return cpu.bind(weights, biases, dtype_of(first), rounds_inputs=rounds_inputs(first))


class Linears:
    """Finds them. What was tried on one is not tried again on others of its size."""

    def __init__(self, cpu: CpuLinear, file_reads: FileReads | None = None) -> None:
        self._cpu = cpu
        self._tried: dict[object, bool] = {}
        self.file_reads: FileReads = {} if file_reads is None else file_reads

    def find(self, module: nn.Module) -> FusedModule | str | None:
        """Find a stand-in; or say why there is none; None for what is no linear layer."""
        if not is_linear(module):
            return None
        if reason := self.unsupported(module):
            return reason
        bound = bind(self._cpu, [module])

        def forward(x: Tensor) -> Tensor:
            return bound(x)[0]

        return stand_in(module, forward, file_reads=self.file_reads)

    def find_siblings(self, module: nn.Module) -> list[FusedModule]:
        """Find stand-ins for the layers that make queries, keys and values in one product."""
        layers = [getattr(module, name, None) for name in _SIBLINGS]
        plain = [x for x in layers if is_linear(x) and not self.unsupported(x)]
        inputs = {(x.in_features, dtype_of(x), rounds_inputs(x)) for x in plain}
        if len(plain) < len(layers) or len(inputs) > 1:
            return []
        if self._cpu.unsupported([weight_of(x) for x in plain]):
            return []
        together = _Together(bind(self._cpu, plain), [bind(self._cpu, [x]) for x in plain])
        forwards = map(together.forward_of, range(len(plain)))
        found = [
            stand_in(layer, forward, file_reads=self.file_reads)
            for layer, forward in zip(plain, forwards, strict=True)
        ]
        return [part for part in found if isinstance(part, FusedModule)]

    def unsupported(self, layer: Linear) -> str | None:
        """Say why a linear layer keeps its own product; None if it need not."""
        if type(layer) not in (nn.Linear, PackedLinear):
            return "it is a linear layer of another kind"
        given = [p for p in layer._parameters.values() if p is not None]
        if any(type(p) is not nn.Parameter for p in given) or not is_plain(layer):
            return "its weights or its call are not torch's own"
        if reason := self._cpu.unsupported([weight_of(layer)]):
            return reason
        key = kind_of(layer)
        if key not in self._tried:
            self._tried[key] = self._try(layer)
        return None if self._tried[key] else "it computes something else"

    def _try(self, layer: Linear) -> bool:
        bound = bind(self._cpu, [layer])
        with torch.inference_mode():
            inputs = [inputs_like(layer, n) for n in (1, 3)]
            return all(agrees(bound(x)[0], layer(x), of_sums=True) for x in inputs)


class _Together:
    """Products of one input: the first call for it computes all, the others take theirs.

    A call with another input than the last one computes all again; so each is right, whatever the
    model does between them, and only a model that gives each its own input loses by it.
    """

    def __init__(self, bound: BoundLinear, alone: Sequence[BoundLinear]) -> None:
        self._bound = bound
        self._alone = alone
        self._input: Tensor | None = None  # of what waits to be taken
        self._waiting: dict[int, Tensor] = {}

    def forward_of(self, index: int) -> Callable[[Tensor], Tensor]:
        """Return what the layer of that number computes."""

        def forward(x: Tensor) -> Tensor:
            if x is not self._input:
                if x.numel() // x.shape[-1] > self._bound.most_rows:
                    return self._alone[index](x)[0]
                self._input, self._waiting = x, dict(enumerate(self._bound(x)))
            found = self._waiting.pop(index, None)
            if not self._waiting:
                self._input = None
            return self._alone[index](x)[0] if found is None else found

        return forward


# -- gated -----------------------------------------------------------------------------------------

# Stand-ins for gated feed-forward layers: ``down(act(gate(x)) * up(x))`` as a whole.


_NAMES = ("gate_proj", "up_proj", "down_proj")
_MANY_ROWS = 256  # behind which torch multiplies, if it does at all
_INPUT_STEPS = 6.0  # of inputs in 8 bits, that a trial allows; 3.4 were met
_REACH = 2.0  # of a trial's inputs to the activation, where kinds of it differ


class GatedLayers:
    """Finds them. What one was found to be, all of its class, sizes and settings are."""

    def __init__(self, cpu: CpuLinear, linears: Linears) -> None:
        self._cpu = cpu
        self._linears = linears
        self._tried: dict[object, bool] = {}

    def find(self, module: nn.Module) -> FusedModule | str | None:
        """Find a stand-in; or say why there is none; None for what is no such layer."""
        children = [module._modules.get(name) for name in _NAMES]
        if None in children:
            return None
        layers = [child for child in children if is_linear(child)]
        if len(layers) < len(_NAMES):
            return "it has other parts than linear layers and an activation"
        for layer in layers:
            if reason := self._linears.unsupported(layer):
                return reason
        others = [child for child in module.children() if child not in layers]
        name = _activation(others[0]) if len(others) == 1 else None
        if name is None or module._parameters or module._buffers:
            return "it has other parts than linear layers and an activation with a kernel"
        gate, up, _ = layers
        if kind_of(gate)[:-1] != kind_of(up)[:-1]:
            return "its gate and what it gates differ in shape"
        gated = _Gated(self._cpu, name, layers, module.forward)
        sizes = map(kind_of, layers)
        key = type(module), settings(module), name, *sizes
        if key not in self._tried:
            self._tried[key] = _try(module, gate, gated)
        if not self._tried[key]:
            return "it computes something else than a gated layer"
        inside = (*layers, *others)
        return stand_in(module, gated, inside, file_reads=self._linears.file_reads)


class _Gated:
    """The whole layer: all of it by kernels for few rows, all but the products for many."""

    def __init__(
        self, cpu: CpuLinear, activation: str, layers: Sequence[Linear], own: Callable[..., Any]
    ) -> None:
        gate, up, down = layers
        self._own = own
        self._dtype = dtype_of(gate)
        self._gated = cpu.bind_gated(
            weight_of(gate), weight_of(up), activation, [gate.bias, up.bias], self._dtype,
            rounds_inputs=rounds_inputs(gate),
        )  # fmt: skip
        self._both = bind(cpu, [gate, up])
        shape = GateShape(width=gate.out_features, activation=activation, kind=KINDS[self._dtype])
        self._join = GateKernel(shape, cpu.kernels, cpu.threads)
        self._down = bind(cpu, [down])
        self.most_rows = self._gated.most_rows  # that are few

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dtype is not self._dtype:
            return self._own(x, *args, **kwargs)
        if x.numel() // x.shape[-1] <= self.most_rows:
            return self._down(self._gated(x))[0]
        return self._down(self._join(*self._both(x)))[0]


def _try(module: nn.Module, gate: Linear, gated: _Gated) -> bool:
    # Where inputs become 8 bits, one rounding before ``down`` may be some of their steps behind it.
    least = _INPUT_STEPS / MOST_CODE if rounds_inputs(gate) else 0.0
    with torch.inference_mode():
        for num_rows in (1, 3, min(gated.most_rows, _MANY_ROWS) + 1):
            x = inputs_like(gate, num_rows)
            x *= _REACH / gate(x).float().std()
            if not agrees(gated(x), answer(module, x), of_sums=True, least=least):
                return False
    return True


def _activation(module: nn.Module, *, of_sums: bool = False) -> str | None:
    """The name of the kernel that does what a module does; None if there is none."""
    if not is_plain(module) or [*module.parameters()]:
        return None
    x = torch.linspace(-12, 12, 241)
    with torch.inference_mode():
        y = answer(module, x)
        found = ((a, torch_activation(a)(x)) for a in ACTIVATIONS)
        return next((a for a, got in found if agrees(got, y, of_sums=of_sums)), None)


# -- activations -----------------------------------------------------------------------------------

# Stand-ins for activations by themselves. torch is as fast, but computes the last few elements of a
# thread's share otherwise than the others: these are for what is to be batch-invariant.


class Activations:
    """Finds them."""

    def __init__(self, cpu: CpuLinear, file_reads: FileReads) -> None:
        self._cpu = cpu
        self._file_reads = file_reads
        self._kernels: dict[GateShape, GateKernel] = {}

    def find(self, module: nn.Module) -> FusedModule | str | None:
        """Find a stand-in; or say why there is none; None for what is no activation of ours."""
        if module._modules or module._parameters or module._buffers:
            return None
        # Where a formula cancels, as that of GPT-2's gelu, its rounding shows beside small results.
        name = _activation(module, of_sums=True)
        if name is None:
            return None
        own = module.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            kind = KINDS.get(x.dtype)
            if args or kwargs or kind not in ROW_KINDS or not x.numel():
                return own(x, *args, **kwargs)
            shape = GateShape(width=x.shape[-1], activation=name, kind=kind, alone=True)
            return self._kernel(shape)(x, x)

        return stand_in(module, forward, file_reads=self._file_reads)

    def _kernel(self, shape: GateShape) -> GateKernel:
        found = self._kernels.get(shape)
        if found is None:
            found = self._kernels[shape] = GateKernel(shape, self._cpu.kernels, self._cpu.threads)
        return found


# -- norms -----------------------------------------------------------------------------------------

# Stand-ins for norms: modules with one vector of weights and a small number for safety.


_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
# Llama's and Gemma's first.
_FORMS = tuple(
    NormForm(rounds_first=first, from_one=one)
    for first, one in ((True, False), (False, True), (False, False), (True, True))
)


class Norms:
    """Finds them. What one was found to be, all of its class, size and settings are."""

    def __init__(self, cpu: CpuLinear, file_reads: FileReads | None = None) -> None:
        self._cpu = cpu
        self._tried: dict[object, Norm | None] = {}
        self._file_reads: FileReads = {} if file_reads is None else file_reads

    def find(self, module: nn.Module) -> FusedModule | str | None:
        """Find a stand-in; or say why there is none; None for what is no such norm."""
        weight, eps = module._parameters.get("weight"), _epsilon(module)
        if weight is None or weight.dim() != 1 or eps is None or module._modules:
            return None
        if module._buffers or any(
            p is not weight for p in module._parameters.values() if p is not None
        ):
            return "it has more than one vector of weights"
        if KINDS.get(weight.dtype) not in ROW_KINDS:
            return f"there is no kernel for {weight.dtype}"
        key = type(module), settings(module), len(weight), weight.dtype, eps
        if key not in self._tried:
            self._tried[key] = self._try(module, weight, eps)
        norm = self._tried[key]
        if norm is None:
            return "it is no root mean square norm of a known form"
        forward = _forward(module, norm, weight.dtype)
        return stand_in(module, forward, file_reads=self._file_reads)

    def _try(self, module: nn.Module, weight: Tensor, eps: float) -> Norm | None:
        width, kind = len(weight), KINDS[weight.dtype]
        # With other weights than its own: ones, as a model has before it is trained, tell nothing.
        twin, weights = copy.copy(module), random_like(weight, width)
        twin._parameters = {"weight": nn.Parameter(weights)}
        sizes = (1.0, 30.0, eps**0.5)
        inputs = [random_like(weight, 1, 3, width, seed=n) * size for n, size in enumerate(sizes)]
        with torch.inference_mode():
            wanted = [answer(twin, x) for x in inputs]
            for form in _FORMS:
                shape = NormShape(width=width, kind=kind, eps=eps, form=form)
                norm = Norm(shape, self._cpu.kernels, self._cpu.threads)
                if all(agrees(norm(x, weights), y) for x, y in zip(inputs, wanted, strict=True)):
                    return norm
        return None


def _epsilon(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((eps for eps in found if isinstance(eps, float)), None)


def _forward(module: nn.Module, norm: Norm, dtype: torch.dtype) -> Callable[..., Any]:
    own, weight = module.forward, module.weight

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.dtype is not dtype or weight.dtype is not dtype:
            return own(x, *args, **kwargs)
        return norm(x, weight)

    return forward


# -- rotation --------------------------------------------------------------------------------------

# Stand-ins for attention layers whose file has a function that turns queries and keys.
#
# Such a layer runs its class's own code, in which the function's name means a kernel. The file
# itself is left alone: other models are computed by it at the same time, and some of them are
# trained.


log = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"


class Rotations:
    """Finds them."""

    def __init__(self, cpu: CpuLinear, file_reads: FileReads | None = None) -> None:
        self._cpu = cpu
        self._made: dict[FunctionType, FunctionType] = {}
        self._file_reads = file_reads
        self._watches: dict[int, WeightsWatch] = {}  # of files, by the functions' ids

    def find(self, module: nn.Module) -> FusedModule | None:
        """Find a stand-in for a layer whose code calls that function by its name."""
        forward = type(module).forward
        if not isinstance(forward, FunctionType):
            return None
        inner = inspect.unwrap(forward)  # Transformers decorates one whose argument it renames
        if not isinstance(inner, FunctionType) or ROTARY not in inner.__code__.co_names:
            return None
        own = inner.__globals__.get(ROTARY)
        if not isinstance(own, FunctionType) or "forward" in vars(module):
            return None
        if forward not in self._made:
            made = _with(forward, {ROTARY: Rotation(own, self._cpu)})
            if made is None:
                return None
            self._made[forward] = made
        watch = self._watches.get(id(own)) or self._watches.setdefault(
            id(own), WeightsWatch(own, inner, file_reads=self._file_reads)
        )

        def holds() -> bool:
            is_called = type(module).forward is forward and "forward" not in vars(module)
            return is_called and watch.holds()

        turned = MethodType(self._made[forward], module)
        return FusedModule(module=module, forward=turned, inside=(), holds=holds)


class _RotationNames(dict[str, Any]):
    """Some names of a file mean something else; all the others what they mean there by then."""

    def __init__(self, file: dict[str, Any], others: dict[str, Any]) -> None:
        super().__init__(others)
        self._file = file

    def __missing__(self, name: str) -> Any:
        return self._file[name]


def _with(function: FunctionType, others: dict[str, Any]) -> FunctionType | None:
    """The same code, in which some of the names that it reads mean something else.

    Of a decorated function it is the innermost code that reads them so, and its decorators stay:
    each keeps the function that it calls in a closure. None where one keeps it elsewhere.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names = _RotationNames(function.__globals__, others)
        return _twin(function, names, function.__closure__)
    made = _with(inner, others) if isinstance(inner, FunctionType) else None
    cells = function.__closure__ or ()
    if made is None or not any(_holds(cell, inner) for cell in cells):
        return None
    within = tuple(CellType(made) if _holds(cell, inner) else cell for cell in cells)
    twin = _twin(function, function.__globals__, within)
    twin.__dict__["__wrapped__"] = made  # which its signature is read from
    return twin


def _twin(
    function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _holds(cell: CellType, function: FunctionType) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # nothing has been closed over yet
        return False


class Rotation:
    """Called as the model's own function is: ``(q, k, cos, sin)``.

    Heads of each new shape are tried when they first come. What does not turn out the same, and
    what is given otherwise, the function itself computes.
    """

    def __init__(self, own: Callable[..., Any], cpu: CpuLinear) -> None:
        self.own = own
        self._cpu = cpu
        self._tried: dict[object, Rotary | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rotary = self._kernel(*args) if len(args) == 4 and not kwargs else None
        return self.own(*args, **kwargs) if rotary is None else rotary(*args)

    def _kernel(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotary | None:
        """For q [1, H, T, D], k [1, K, T, D], cos and sin [1, T, turned] of one dtype."""
        heads, kept, angles = q.shape, k.shape, cos.shape
        if len(heads) != 4 or len(angles) != 3 or heads[0] != 1 or angles[:2] != (1, heads[2]):
            return None
        if sin.shape != angles or kept[2:] != heads[2:] or not q.dtype is k.dtype is cos.dtype:
            return None
        key = heads[1], kept[1], heads[3], angles[2], q.dtype
        try:
            return self._tried[key]
        except KeyError:
            found = self._tried[key] = self._try(q, k, cos)
            return found

    def _try(self, q: Tensor, k: Tensor, cos: Tensor) -> Rotary | None:
        """On random heads of these shapes."""
        (_, num_heads, _, width), kv_heads, turned = q.shape, k.shape[1], cos.shape[2]
        if KINDS.get(q.dtype) not in ROW_KINDS or turned % 2 or turned > width:
            return None
        shape = RotaryShape(
            query_heads=num_heads,
            kv_heads=kv_heads,
            width=width,
            turned=turned,
            kind=KINDS[q.dtype],
        )
        rotary = Rotary(shape, self._cpu.kernels, self._cpu.threads)
        given = (
            random_like(q, 1, 3, num_heads, width).transpose(1, 2),
            random_like(q, 1, 3, kv_heads, width, seed=1).transpose(1, 2),
            random_like(q, 1, 3, turned, seed=2),
            random_like(q, 1, 3, turned, seed=3),
        )
        with torch.inference_mode():
            wanted = answer(self.own, *given)
            if isinstance(wanted, tuple) and len(wanted) == 2:
                pairs = zip(rotary(*given), wanted, strict=True)
                if all(agrees(got, want, of_sums=True) for got, want in pairs):
                    return rotary
        log.info("%s keeps its own rotary positions for %s", self.own.__module__, shape)
        return None
