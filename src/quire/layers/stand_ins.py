"""What runs in place of a model's own part: found by its structure, accepted by a trial.

A part is a ``torch.nn`` module of any class. Which of the known forms it has is not read from its
name: each is tried on random inputs, and the one that gives what the part itself gives is taken.
Before every pass it is asked whether the part is still what it was then.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import repeat
from operator import contains, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quire.layers.watch import Watch

Slot: TypeAlias = tuple[dict[str, Any], str, object]  # whose value, by that name, is that


class Kept:
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
        """Whether all of it is still there."""
        found = map(dict.get, self._owners, self._names)
        return (
            all(map(is_, found, self._values))
            and not any(self._hooks)
            and not any(map(contains, self._attributes, repeat("forward")))
        )


def slots_of(*several: dict[str, Any]) -> tuple[Slot, ...]:
    return tuple((own, name, value) for own in several for name, value in own.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """Runs in place of ``module.forward``."""

    module: nn.Module
    forward: Callable[..., Any]
    inside: tuple[nn.Module, ...]  # its children that are not called meanwhile
    holds: Callable[[], bool]  # whether the module is still what it was then


def stand_in(
    module: nn.Module, forward: Callable[..., Any], inside: tuple[nn.Module, ...] = ()
) -> StandIn | str:
    """Or why there is none: nothing would tell that the module does something else by now."""
    if "forward" in vars(module):
        return "its owner has put another forward in its place"
    watch = Watch(module)
    if watch.unseen:
        return f"it keeps what cannot be watched: {', '.join(watch.unseen)}"
    return StandIn(module=module, forward=forward, inside=inside, holds=watch.holds)


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module does what its class says, and nothing more."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def random_like(like: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Of its dtype and where it lies, about one in size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like)


def answer(part: Callable[..., Any], *given: Tensor) -> Any:
    """What a part gives; None if it takes something else."""
    try:
        return part(*given)
    except Exception:  # it is code that we know nothing of
        return None


def agrees(got: Tensor, want: Any, *, of_sums: bool = False) -> bool:
    """Equal within one rounding of their dtype.

    In float32 sums that are taken in another order differ by some of its roundings: sixteen are
    allowed. ``of_sums``: what is computed is a sum, so one term's rounding is what counts, not that
    of a sum that came out small.
    """
    if not isinstance(want, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    rounding = max(torch.finfo(want.dtype).eps, 16 * torch.finfo(torch.float32).eps)
    got, want = got.float(), want.float()
    size = want.abs()
    if of_sums and want.numel():
        size = size.max()
    return bool(((got - want).abs() <= rounding * size + 1e-30).all())


def settings(module: nn.Module) -> frozenset[tuple[str, object]]:
    """The plain values that a module has been made with: it may do something else by them."""
    plain = (int, float, str, type(None))
    return frozenset((n, v) for n, v in vars(module).items() if isinstance(v, plain))
