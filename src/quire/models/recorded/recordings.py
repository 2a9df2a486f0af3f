"""Which passes of a model are recorded, when, and for how long they hold."""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.layers.cpu import CpuLinear
from quire.models.recorded.pieces import Pieces
from quire.models.recorded.recorder import MadeUp, NotRecordable, Recorder
from quire.models.recorded.recording import Recording
from quire.models.watched import ModelWatch
from quire.models.ways.hooks import Step
from quire.spec import AttentionSpec

log = logging.getLogger(__name__)

# A step is played by the recording of the next larger one. Products of as many rows cost about the
# same: they wait for their weights.
SIZES = (1, 2, 3, 4, 6, 8, 12, *range(16, 65, 8), 80, 96, 112, 128)
# Steps of a size, after which it is recorded: that takes as long as five of them, and each one that
# is played afterwards is a fifth shorter.
WORTH_IT = 24

# (step, token ids, positions, the tokens whose logits are wanted) to logits [S, vocabulary]
Run = Callable[[Step, Tensor, Tensor, Tensor], Tensor]


class Recordings:
    """All of one model's, made when they are worth it and dropped when the model changes."""

    def __init__(self, watch: ModelWatch, cpu: CpuLinear, run: Run) -> None:
        self._model = watch.model
        self._cpu = cpu
        self._watch = watch
        self._run = run
        self._pieces = Pieces()
        self._asked: Counter[int] = Counter()
        self._made: dict[int, Recording] = {}
        self._are_of = (-1, 0)  # a version of the model, and a number of threads
        self._refused_at = -1  # a version that cannot be recorded
        self._works = all(p.is_cpu for p in self._model.parameters())

    def find(self, step: Step, num_tokens: int) -> Recording | None:
        """A recording that can play a step, if there is one or it is time to make it."""
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

    def _make(self, size: int, specs: dict[int, AttentionSpec]) -> Recording:
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
            recording = Recording(token_ids, positions, logits, recorder.parts, self._cpu)
            got = recording.play(_made_up_step(MadeUp(), specs), other_ids, other_positions)
        except (NotRecordable, MemoryError):
            raise
        except Exception as error:  # it is code that we know nothing of
            raise NotRecordable(f"{error!r}") from error
        if not torch.equal(got, want):
            raise NotRecordable("played again it gives something else than the model")
        return recording


def _made_up_step(keeper: Any, specs: dict[int, AttentionSpec]) -> Step:
    batches: Any = dict.fromkeys(specs, _NoBatch())
    return Step(storage=keeper, backend=keeper, specs=specs, batches=batches)


class _NoBatch:
    """Of a step that is made up."""

    slots = None

    def slots_on(self, _: torch.device) -> None:
        """Nowhere."""
