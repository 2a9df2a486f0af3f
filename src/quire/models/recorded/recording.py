"""How a recorded pass is played."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from quire.attention import AttentionBatch, FindWords, VaryingCall
from quire.kernels.player import Player
from quire.kernels.threads import Call
from quire.layers.cpu import CpuLinear
from quire.models.recorded.parts import Attend, Part, Write
from quire.models.ways.hooks import Step

Run: TypeAlias = Callable[[Step, int], None]  # (the step, how many rows of the pass are wanted)


class LayerCall(NamedTuple):
    """A call that differs from step to step, and the number of its layer."""

    call: VaryingCall
    layer: int


class Recording:
    """A pass over so many tokens, ready to be played."""

    def __init__(
        self,
        token_ids: Tensor,  # i64[T], where it reads them
        positions: Tensor,  # i64[T]
        logits: Tensor,  # [T, vocabulary], where it leaves them
        parts: list[Part],
        cpu: CpuLinear,
    ) -> None:
        self._token_ids, self._positions, self._logits = token_ids, positions, logits
        self._parts = parts
        self._layers = {part.layer for part in parts if isinstance(part, Write | Attend)}
        self._cpu = cpu
        self._storage: object = None  # that it is joined for
        self._runs: list[Run] = []

    def play(self, step: Step, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits of at most so many tokens [S, vocabulary], good until the next pass is played."""
        if self._storage is not step.storage:
            self._runs, self._storage = self._joined(step), step.storage
        asked = len(token_ids)
        self._token_ids[:asked] = token_ids
        self._positions[:asked] = positions  # the rest computes what is not asked for
        for run in self._runs:
            run(step, asked)
        step.written |= self._layers
        step.read |= self._layers
        return self._logits[:asked]

    def _joined(self, step: Step) -> list[Run]:
        """Calls that follow one another become one run."""
        runs: list[Run] = []
        calls: list[Call | LayerCall] = []
        for part in self._parts:
            if isinstance(part, Call):
                calls.append(part)
                continue
            if isinstance(part, Write | Attend) and (call := part.call(step)) is not None:
                calls.append(LayerCall(call, part.layer))
                continue
            runs += [*self._stretch(calls, step), part]
            calls = []
        return runs + self._stretch(calls, step)

    def _stretch(self, calls: list[Call | LayerCall], step: Step) -> list[Run]:
        return [Stretch(calls, step, self._cpu)] if calls else []


class Stretch:
    """Calls of kernels, made without coming back to Python between them."""

    def __init__(self, calls: list[Call | LayerCall], step: Step, cpu: CpuLinear) -> None:
        plain = [each.call.call if isinstance(each, LayerCall) else each for each in calls]
        self._player = Player(plain, cpu.kernels, cpu.threads)
        self._kept = calls  # for what their frames point to
        # The layers of a group have one batch, and most often one kernel.
        alike: dict[tuple[FindWords, AttentionBatch], list[tuple[int, LayerCall]]] = {}
        for number, each in enumerate(calls):
            if isinstance(each, LayerCall):
                key = each.call.find, step.batches[each.layer]
                alike.setdefault(key, []).append((number, each))
        self._alike = [_Alike(several, self._player) for several in alike.values()]

    def __call__(self, step: Step, asked: int) -> None:
        for several in self._alike:
            several.fit(step)
        self._player()


class _Alike:
    """Calls of one kernel whose frames change in the same way from step to step."""

    def __init__(self, several: list[tuple[int, LayerCall]], player: Player) -> None:
        """``several``: each with its number among the player's calls."""
        _, (first, self._layer) = several[0]
        self._find, self._player = first.find, player
        self._numbers = np.array([number for number, _ in several])
        self._places = player.starts[self._numbers][:, None] + np.array(first.words)
        self._num_threads = 0

    def fit(self, step: Step) -> None:
        words, num_threads = self._find(step.batches[self._layer])
        self._player.frames[self._places] = words
        if num_threads != self._num_threads:
            self._player.set_threads(self._numbers, num_threads)
            self._num_threads = num_threads
