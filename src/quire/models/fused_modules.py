"""A model's own parts exchanged for faster ones that compute the same, for one pass at a time.

What has no stand-in runs as it is, and the log says why, once for each class. Between two passes
the model is its owner's, as it was. What the owner has changed meanwhile is tried anew, and other
threads that use a module during a pass find it as it is.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quire.errors import UnsupportedModel
from quire.layers.cpu import CpuLinear
from quire.layers.fused import Activations, FusedModule, GatedLayers, Linears, Norms, Rotations
from quire.layers.watch import FileReads
from quire.models.model_watch import ModelWatch

log = logging.getLogger(__name__)


class FusedModules:
    """All that were found for one model, as it was when ``watch`` last looked at it."""

    def __init__(
        self,
        model: PreTrainedModel,
        kernel_dir: Path | None = None,
        watch: ModelWatch | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        # What they compute with.
        self.cpu = CpuLinear(kernel_dir=kernel_dir, batch_invariant=batch_invariant)
        self.watch = watch or ModelWatch(model)
        self._model = model
        self._told: list[str] = []
        self._turn = _Turn()
        self._version = self.watch.version
        self._parts: list[FusedModule] = []
        self._forwards: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        self._find()

    def in_place(self) -> AbstractContextManager[None]:
        """Have this thread compute with them; afterwards the model has its own parts back.

        Raises: UnsupportedModel where a batch-invariant pass would have to do without them.
        """
        if self._version != self.watch.version:
            self._version = self.watch.version
            if not all(part.holds() for part in self._parts):
                self._find()
        # Hooks of all modules hear those inside of a part too, which a stand-in does not call.
        if torch.is_autocast_enabled("cpu") or self.watch.all_are_heard:
            if self.cpu.batch_invariant:
                raise UnsupportedModel(
                    "batch_invariant computes without autocast and without hooks of all modules"
                )
            return nullcontext()
        return self._exchanged()

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        forwards, turn = self._forwards, self._turn
        before, turn.thread = turn.thread, get_ident()
        try:
            for own, forward in forwards:
                own["forward"] = forward  # what a module's __setattr__ does, ten times faster
            yield
        finally:
            turn.thread = before
            for own, _ in forwards:
                own.pop("forward", None)

    def _find(self) -> None:
        """Find all anew: what changed in a class or a file, changed what was tried of it."""
        self._parts, told = _found(self._model, self.cpu)
        if told != self._told:
            for line in told:
                log.info("%s", line)
        self._told = told
        self._forwards = [
            (vars(part.module), _forward_of(part, self._turn)) for part in self._parts
        ]


class _Turn:
    """Which thread computes with a model's stand-ins at this moment."""

    thread = 0


def _forward_of(part: FusedModule, turn: _Turn) -> Callable[..., Any]:
    own, ours = part.module.forward, part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Kernels give no gradients, and remember from one module to the next.
        return (ours if get_ident() == turn.thread else own)(*args, **kwargs)

    return forward


def _found(model: PreTrainedModel, cpu: CpuLinear) -> tuple[list[FusedModule], list[str]]:
    """The largest parts first: what they contain needs nothing of its own. And what to tell."""
    file_reads: FileReads = {}  # of the model's files: each is looked through once
    linears, norms = Linears(cpu, file_reads), Norms(cpu, file_reads)
    gated, rotations = GatedLayers(cpu, linears), Rotations(cpu, file_reads)
    parts: list[FusedModule] = []
    done: set[nn.Module] = set()
    refused: dict[tuple[str, str], None] = {}

    def take(found: FusedModule | str | None, module: nn.Module) -> None:
        if isinstance(found, FusedModule):
            parts.append(found)
            done.update((module, *found.inside))
        elif found is not None:
            refused[type(module).__name__, found] = None

    modules = list(model.modules())
    for find in (gated.find, rotations.find):
        for module in modules:
            take(find(module), module)
    for module in modules:
        for part in linears.find_siblings(module):
            take(part, part.module)
    alone = [linears.find, norms.find]
    if cpu.batch_invariant:
        alone.append(Activations(cpu, file_reads).find)
    for find in alone:
        for module in modules:
            if module not in done:
                take(find(module), module)
    counts = Counter(type(part.module).__name__ for part in parts)
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    reasons = [f"{name} runs as it is: {reason}" for name, reason in refused]
    return parts, [f"stand-ins for {told or 'nothing'}", *reasons]
