"""Which passes of a model are recorded, when, and for how long they hold."""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.attention import AttentionBatch, FindWords, VaryingCall
from quire.kernels.player import Player
from quire.kernels.threads import KernelCall
from quire.layers.cpu import CpuLinear
from quire.models.executors.hooks import PackedStep
from quire.models.model_watch import ModelWatch
from quire.models.recorded.operations import Arena, Attend, Part, Write
from quire.models.recorded.recorder import MadeUp, NotRecordable, Recorder
from quire.spec import AttentionSpec

# -- recording -------------------------------------------------------------------------------------

# How a recorded pass is played.


Run: TypeAlias = Callable[
    [PackedStep, int], None
]  # (the step, how many rows of the pass are wanted)


class LayerCall(NamedTuple):
    """A call that differs from step to step, and the number of its layer."""

    call: VaryingCall
    layer: int


class RecordedPass:
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

    def play(self, step: PackedStep, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute logits [S, vocabulary] of S tokens i64[S], good until the next pass is played."""
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

    def _joined(self, step: PackedStep) -> list[Run]:
        """Join calls that follow one another into one run."""
        runs: list[Run] = []
        calls: list[KernelCall | LayerCall] = []
        for part in self._parts:
            if isinstance(part, KernelCall):
                calls.append(part)
                continue
            if isinstance(part, Write | Attend) and (call := part.call(step)) is not None:
                calls.append(LayerCall(call, part.layer))
                continue
            runs += [*self._stretch(calls, step), part]
            calls = []
        return runs + self._stretch(calls, step)

    def _stretch(self, calls: list[KernelCall | LayerCall], step: PackedStep) -> list[Run]:
        return [Stretch(calls, step, self._cpu)] if calls else []


class Stretch:
    """Calls of kernels, made without coming back to Python between them."""

    def __init__(
        self, calls: list[KernelCall | LayerCall], step: PackedStep, cpu: CpuLinear
    ) -> None:
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

    def __call__(self, step: PackedStep, asked: int) -> None:
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

    def fit(self, step: PackedStep) -> None:
        words, num_threads = self._find(step.batches[self._layer])
        self._player.frames[self._places] = words
        if num_threads != self._num_threads:
            self._player.set_threads(self._numbers, num_threads)
            self._num_threads = num_threads


# -- recordings ------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

# A step is played by the recording of the next larger one. Products of as many rows cost about the
# same: they wait for their weights.
SIZES = (1, 2, 3, 4, 6, 8, 12, *range(16, 65, 8), 80, 96, 112, 128)
# Steps of a size, after which it is recorded: that takes as long as five of them, and each one that
# is played afterwards is a fifth shorter.
WORTH_IT = 24

# (step, token ids, positions, the tokens whose logits are wanted) to logits [S, vocabulary]
RunModel = Callable[[PackedStep, Tensor, Tensor, Tensor], Tensor]


class Recordings:
    """All of one model's recordings: made when they are worth it, dropped when it changes."""

    def __init__(self, watch: ModelWatch, cpu: CpuLinear, run: RunModel) -> None:
        self._model = watch.model
        self._cpu = cpu
        self._watch = watch
        self._run = run
        self._pieces = Arena()
        self._asked: Counter[int] = Counter()
        self._made: dict[int, RecordedPass] = {}
        self._are_of = (-1, 0)  # a version of the model, and a number of threads
        self._refused_at = -1  # a version that cannot be recorded
        self._works = all(p.is_cpu for p in self._model.parameters())

    def find(self, step: PackedStep, num_tokens: int) -> RecordedPass | None:
        """Find a recording that can play a step, if there is one or it is time to make it."""
        if not self._works or num_tokens > SIZES[-1] or torch.is_autocast_enabled("cpu"):
            return None
        now = self._watch.version, torch.get_num_threads()
        if self._are_of != now:
            self._made, self._asked, self._are_of = {}, Counter(), now
        if self._refused_at == self._watch.version:
            return None
        size = SIZES[bisect_left(SIZES, num_tokens)]
        if size not in self._made:
            self._asked[size] += 1
            if self._asked[size] < WORTH_IT:
                larger = [n for n in self._made if num_tokens < n <= 2 * num_tokens]
                return self._made[min(larger)] if larger else None
            if reason := self._watch.why_not_recorded():
                log.info("%s runs without recordings: %s", type(self._model).__name__, reason)
                self._refused_at = self._watch.version
                return None
            self._are_of = self._watch.version, now[1]  # it may have looked for the first time
            try:
                self._made[size] = self._make(size, dict(step.specs))
            except NotRecordable as error:
                log.info("%s runs without recordings: %s", type(self._model).__name__, error)
                self._works = False
                return None
            except MemoryError:
                self._asked[size] = 0
                return None
        return self._made[size]

    def _make(self, size: int, specs: dict[int, AttentionSpec]) -> RecordedPass:
        """Raises: NotRecordable."""
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        every = torch.arange(size)
        other_ids, other_positions = (5 + 11 * every) % vocab_size, 3 + every
        token_ids, positions = (torch.zeros(size, dtype=torch.long) for _ in range(2))
        try:
            # First without a recorder, for what is done only the first time.
            want = self._run(_made_up_step(MadeUp(), specs), other_ids, other_positions, every)
            recorder = Recorder(self._pieces, self._cpu)
            with recorder.listening():
                made_up = self._run(_made_up_step(recorder, specs), token_ids, positions, every)
                logits = recorder.still(made_up)
            recording = RecordedPass(token_ids, positions, logits, recorder.parts, self._cpu)
            got = recording.play(_made_up_step(MadeUp(), specs), other_ids, other_positions)
        except (NotRecordable, MemoryError):
            raise
        except Exception as error:  # it is code that we know nothing of
            raise NotRecordable(f"{error!r}") from error
        if not torch.equal(got, want):
            raise NotRecordable("played again it gives something else than the model")
        return recording


def _made_up_step(keeper: Any, specs: dict[int, AttentionSpec]) -> PackedStep:
    batches: Any = dict.fromkeys(specs, _NoBatch())
    return PackedStep(storage=keeper, backend=keeper, specs=specs, batches=batches)


class _NoBatch:
    """The batch of a step that is made up."""

    slots = None

    def slots_on(self, _: torch.device) -> None:
        """Return nothing: no entry is written."""
