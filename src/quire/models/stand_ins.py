"""A model's own parts exchanged for faster ones that compute the same, for one pass at a time.

What has no stand-in runs as it is, and the log says why, once for each class. Between two passes
the model is its owner's, as it was. Whatever he has changed meanwhile (weights, hooks, layers in
place of layers) keeps that part from being exchanged.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel

from quire.layers.cpu import CpuLinear
from quire.layers.gated import GatedLayers
from quire.layers.linears import Linears
from quire.layers.norms import Norms
from quire.layers.rotation import Rotation
from quire.layers.stand_ins import Kept, StandIn

log = logging.getLogger(__name__)

_ROTARY = "apply_rotary_pos_emb"


class StandIns:
    """All that were found for one model."""

    def __init__(self, model: PreTrainedModel, kernel_dir: Path | None = None) -> None:
        self.cpu = CpuLinear(kernel_dir=kernel_dir)  # what they compute with
        self._held = _Held(_find(model, self.cpu))
        self._rotations = [
            (vars(m), Rotation(vars(m)[_ROTARY], self.cpu)) for m in _with_rotary(model)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts the model computes with them; then it has its own parts back."""
        parts = self._held.now()
        rotations = [(names, r) for names, r in self._rotations if names[_ROTARY] is r.own]
        placed = [part.module.__dict__ for part in parts]
        try:
            for own, part in zip(placed, parts, strict=True):
                own["forward"] = part.forward  # what a module's __setattr__ does, ten times faster
            for names, rotation in rotations:
                names[_ROTARY] = rotation
            yield
        finally:
            for own in placed:
                own.pop("forward", None)
            for names, rotation in rotations:
                names[_ROTARY] = rotation.own


class _Held:
    """Stand-ins, and whether the parts that they stand for are still what they were."""

    def __init__(self, parts: list[StandIn]) -> None:
        self._parts = parts
        self._kept = Kept(
            [slot for part in parts for slot in part.slots],
            [module for part in parts for module in part.inside],
            [part.module for part in parts],
        )

    def now(self) -> list[StandIn]:
        """Those that may be put in place."""
        if self._kept.holds():
            return self._parts
        return [part for part in self._parts if part.holds()]


def _find(model: PreTrainedModel, cpu: CpuLinear) -> list[StandIn]:
    """The largest parts first: what they contain needs nothing of its own."""
    linears = Linears(cpu)
    gated, norms = GatedLayers(cpu, linears), Norms(cpu)
    parts: list[StandIn] = []
    done: set[nn.Module] = set()
    refused: dict[tuple[str, str], None] = {}

    def take(found: StandIn | str | None, module: nn.Module) -> None:
        if isinstance(found, StandIn):
            parts.append(found)
            done.update((module, *found.inside))
        elif found is not None:
            refused[type(module).__name__, found] = None

    modules = list(model.modules())
    for module in modules:
        take(gated.find(module), module)
    for module in modules:
        for part in linears.find_siblings(module):
            take(part, part.module)
    for find in (linears.find, norms.find):
        for module in modules:
            if module not in done:
                take(find(module), module)
    counts = Counter(type(part.module).__name__ for part in parts)
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    log.info("stand-ins for %s", told or "nothing")
    for name, reason in refused:
        log.info("%s runs as it is: %s", name, reason)
    return parts


def _with_rotary(model: PreTrainedModel) -> list[ModuleType]:
    """The Python modules of a model's classes that turn queries and keys by that function."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    found = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in found if callable(vars(module).get(_ROTARY))]
