"""How a recorded pass is played."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from torch import Tensor

from quire.attention import AttentionBatch, FindWords, VaryingCall
from quire.kernels.player import Player
from quire.kernels.threads import Call
from quire.layers.cpu import CpuLinear
from quire.models.hooks import Step
from quire.models.recorded.parts import Attend, Part, Write

Run: TypeAlias = Callable[[Step, int], None]  # (the step, how many rows of the pass are wanted)
# With the number of its layer, if it differs from step to step.
LayerCall: TypeAlias = tuple[Call | VaryingCall, int | None]


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
        self._positions[:asked] = positions  # the rest computes something that nobody asks for
        for run in self._runs:
            run(step, asked)
        step.written |= self._layers
        step.read |= self._layers
        return self._logits[:asked]

    def _joined(self, step: Step) -> list[Run]:
        """Calls that follow one another become one run."""
        runs: list[Run] = []
        calls: list[LayerCall] = []
        for part in self._parts:
            if isinstance(part, Call):
                calls.append((part, None))
                continue
            if isinstance(part, Write | Attend) and (call := part.call(step)) is not None:
                calls.append((call, part.layer))
                continue
            runs += [*self._stretch(calls, step), part]
            calls = []
        return runs + self._stretch(calls, step)

    def _stretch(self, calls: list[LayerCall], step: Step) -> list[Run]:
        return [Stretch(calls, step, self._cpu)] if calls else []


class Stretch:
    """Calls of kernels, made without coming back to Python between them."""

    def __init__(self, calls: list[LayerCall], step: Step, cpu: CpuLinear) -> None:
        plain = [call.call if isinstance(call, VaryingCall) else call for call, _ in calls]
        self._player = Player(plain, cpu.kernels, cpu.threads)
        self._kept = [call for call, _ in calls]  # for what their frames point to
        # The layers of a group have one batch, and most often one kernel.
        alike: dict[tuple[FindWords, AttentionBatch], list[tuple[int, int, int]]] = {}
        for number, (call, layer) in enumerate(calls):
            if isinstance(call, VaryingCall):
                assert layer is not None
                key = call.find, step.batches[layer]
                alike.setdefault(key, []).append((number, call.first, layer))
        self._alike = [_Alike(find, which, self._player) for (find, _), which in alike.items()]

    def __call__(self, step: Step, asked: int) -> None:
        for several in self._alike:
            several.fit(step)
        self._player()


class _Alike:
    """Calls of one kernel whose frames change in the same way from step to step."""

    def __init__(self, find: FindWords, which: list[tuple[int, int, int]], player: Player) -> None:
        """``which``: the number of a call, the first of the words that change, its layer."""
        self._find, self._player = find, player
        self._numbers = np.array([number for number, _, _ in which])
        self._layer = which[0][2]
        _, first, _ = which[0]
        self._starts = player.starts[self._numbers] + first
        self._num_threads = 0

    def fit(self, step: Step) -> None:
        words, num_threads = self._find(step.batches[self._layer])
        self._player.frames[self._starts[:, None] + np.arange(len(words))] = words
        if num_threads != self._num_threads:
            self._player.set_threads(self._numbers, num_threads)
            self._num_threads = num_threads
