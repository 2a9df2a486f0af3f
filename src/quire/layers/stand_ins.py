"""What runs in place of a model's own part: found by its structure, accepted by a trial.

A part is a ``torch.nn`` module of any class. Which of the known forms it has is not read from its
name: each is tried on random inputs, and the one that gives what the part itself gives is taken.
Whoever puts it in place asks before every pass whether the part is still what it was then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Slot: TypeAlias = tuple[dict[str, Any], str, object]  # whose value, by that name, is that


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """Runs in place of ``module.forward``."""

    module: nn.Module
    forward: Callable[..., Any]
    inside: tuple[nn.Module, ...]  # its children that are not called meanwhile
    slots: tuple[Slot, ...]  # where the module keeps what this was made of

    def holds(self) -> bool:
        """Whether the module is still what it was then."""
        return (
            "forward" not in self.module.__dict__
            and all(map(is_plain, self.inside))
            and all(own.get(name) is value for own, name, value in self.slots)
        )


def stand_in(
    module: nn.Module, forward: Callable[..., Any], inside: tuple[nn.Module, ...] = ()
) -> StandIn:
    kept: list[dict[str, Any]] = [part._parameters for part in (module, *inside)]
    if inside:
        kept.append(module._modules)
    slots = tuple((own, name, value) for own in kept for name, value in own.items())
    return StandIn(module=module, forward=forward, inside=inside, slots=slots)


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module does what its class says, and nothing more."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def random_like(like: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Of its dtype, about one in size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like.dtype)


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
