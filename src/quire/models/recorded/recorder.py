"""Writes down what a model computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quire.layers.cpu import CpuLinear
from quire.layers.cpu.row_kernels import Sums
from quire.models.recorded.operations import Arena, Attend, Operator, Part, Write
from quire.spec import AttentionSpec, LatentAttention

_INPUT_DEPENDENT = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_PLAIN = (Tensor, torch.nn.Parameter)
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


class NotRecordable(Exception):
    """What a model does depends on more than it shows, or is not seen."""


class MadeUp:
    """A step's storage and its backend where nothing is kept.

    The result depends on every argument, each token by itself.
    """

    plays = None

    def __init__(self) -> None:
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def view(self, layer: int) -> int:
        """Return what stands for a layer's view: its number."""
        return layer

    def write(self, layer: int, slots: Tensor | None, k: Tensor, v: Tensor) -> None:
        self._written[layer] = k, v

    def attend(
        self, q: Tensor, view: int, batch: object, *, spec: AttentionSpec, **_: object
    ) -> Tensor:
        """Give as much of each token's value as its query and key have in common: [T, H, Dv]."""
        kept = self._written.pop(view)
        if isinstance(spec, LatentAttention):
            kept = torch.cat(kept, -1), kept[0]
        k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in kept)
        shares = torch.sigmoid((q.float() * k).mean(-1, keepdim=True))
        return (shares * v).to(q.dtype)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is computed while it is entered.

    It is also what keeps and reads keys and values meanwhile, or rather makes some up.
    """

    plays = None

    def __init__(self, pieces: Arena, cpu: CpuLinear) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[Part] = []
        self._pieces = pieces
        self._cpu = cpu
        self._sums = Sums(cpu.kernels, cpu.threads)
        self._made_up = MadeUp()
        self._unseen = False  # what is computed at this moment is no part of the pass

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Write down all that this thread computes while it lasts."""
        with self._cpu.threads.listening():
            with self._cpu.scratch.apart(), self:
                yield
            self._take_calls()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._unseen:
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        _refuse(func, args, given)
        if func._schema.is_mutable:
            self._refuse_outside(func, args, kwargs)
            self._add(Operator(func, self._kept((args, kwargs)), []))
            return func(*args, **kwargs)
        if func is torch.ops.aten.add.Tensor and (out := self._sum(*args, **kwargs)) is not None:
            return out
        result = func(*args, **kwargs)
        if not all(isinstance(x, Tensor | None) for x in tree_leaves(result)):
            raise NotRecordable(f"what {func} gives depends on its input")
        places = {x.untyped_storage().data_ptr() for x in given}
        computes = func._schema.name not in _EMPTY
        fresh: list[Tensor] = []

        def placed(out: Tensor) -> Tensor:
            if self._pieces.holds(out):  # it is another view of a piece
                self._pieces.saw(out)
                return out
            if out.untyped_storage().data_ptr() in places:  # or of what lies elsewhere and stays
                return out
            made = self._pieces.like(out)
            fresh.append(made)
            return made.copy_(out) if computes else made

        outs = tree_map_only(Tensor, placed, result)
        if 0 < len(fresh) < len(tree_leaves(result)):
            raise NotRecordable(f"{func} gives something new and something that was there")
        if fresh and computes:
            self._add(Operator(func, self._kept((args, kwargs)), self._kept(fresh)))
        return outs

    def _sum(self, a: Any, b: Any, **options: Any) -> Tensor | None:
        """Add by our own kernel, which can be played with those before and after it."""
        if options or not self._sums.fit(a, b):
            return None
        out = self._pieces.like(a)
        self._sums(a, b, out)
        return out

    # What a step's storage and its backend do:

    def view(self, layer: int) -> int:
        """Return what stands for a layer's view: its number."""
        return layer

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self._kept([k, v])
        self._add(Write(layer=layer, k=keys, v=values))
        with self._unwatched():
            self._made_up.write(layer, slots, k, v)

    def attend(
        self,
        q: Tensor,
        view: int,  # as ``view`` gives it
        batch: object,
        *,
        spec: AttentionSpec,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        with self._unwatched():
            made_up = self._made_up.attend(q, view, batch, spec=spec)
            out = self._pieces.like(made_up).copy_(made_up)
        queries, outs, sinks = self._kept([q, out, sinks])
        self._add(
            Attend(layer=view, q=queries, out=outs, scale=scale, softcap=softcap, sinks=sinks)
        )
        return out

    def still(self, logits: Tensor) -> Tensor:
        """Return logits [S, vocabulary] that can be read as long as nothing else is played."""
        kept: Tensor = self._kept(logits)
        return kept

    def _add(self, part: Part) -> None:
        self._take_calls()
        self.parts.append(part)

    def _take_calls(self) -> None:
        """The kernels called since the last part come before the next one."""
        self.parts += self._cpu.threads.take_heard()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    def _kept(self, tree: Any) -> Any:
        """The same with other tensors over the same memory: those do not keep it from being lent.

        A weight stays itself.
        """

        def kept(tensor: Tensor) -> Tensor:
            return torch.ops.aten.alias(tensor) if self._pieces.holds(tensor) else tensor

        with self._unwatched():
            return tree_map_only(Tensor, kept, tree)

    def _refuse_outside(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises: NotRecordable for a change of what is not a pass's own."""
        for n, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            changed = args[n] if n < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(changed):
                if isinstance(tensor, Tensor) and not self._pieces.holds(tensor):
                    raise NotRecordable(f"{func} changes what outlives the pass")


def _refuse(func: Any, args: Any, given: list[Tensor]) -> None:
    """Raises: NotRecordable."""
    if func.namespace != "aten":
        raise NotRecordable(f"{func} is none of torch's own operators")
    by_number = func._schema.name == "aten::index" and not any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )
    if not by_number and any(tag in func.tags for tag in _INPUT_DEPENDENT):
        raise NotRecordable(f"what {func} gives depends on its input")
    if any(type(x) not in _PLAIN for x in given):
        raise NotRecordable(f"{func} takes tensors of another kind")
