"""Whether a model is still what it was; changes by its owner and by its passes are told apart."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel

from quire.layers.watch import Place, WeightsWatch

_LOCK = Lock()
_TURNS: WeakKeyDictionary[PreTrainedModel, AbstractContextManager[object]] = WeakKeyDictionary()


def turn_of(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Return what engines over one model object enter in turn: a thread may enter it again.

    A pass has parts of the model exchanged, which another engine's thread would take for a change
    by the model's owner, or would compute with.
    """
    with _LOCK:
        return _TURNS.setdefault(model, RLock())


class ModelWatch:
    """Looks at a model before each pass. ``version`` grows whenever it finds something new.

    What was computed before its owner changed a model is another model's: keys and values too. What
    a pass changes by itself is no such change; what it changes again and again is left out from
    then on, and there is a reason why the model cannot be recorded.
    """

    def __init__(self, model: PreTrainedModel, *, is_private: bool = False) -> None:
        """``is_private``: nothing outside of the engine has it, and there is nothing to look at."""
        self.model = model
        self.turn = turn_of(model)
        self._is_private = is_private
        self._hooks_of_all = _hooks_of_all()
        self._watch: WeightsWatch | None = None
        self._places: list[int] = []
        self._changed_by_passes: frozenset[Place] = frozenset()
        self._apart: frozenset[Place] = frozenset()
        self.lent: frozenset[Place] = frozenset()  # what the engine exchanges itself
        self.version = 0

    def look(self) -> bool:
        """Tell, before a pass, whether the model is what it was after the last one."""
        if self._hooks_of_all != (hooks := _hooks_of_all()):
            self._hooks_of_all = hooks
            self.version += 1
            return False
        if self._is_private:
            return True
        if self._watch is None:
            self._begin()
            return True
        if self._is_same(self._watch):
            return True
        self._changed_by_passes = self._apart = frozenset()
        self._begin()
        return False

    @property
    def all_are_heard(self) -> bool:
        """Whether there are hooks of all modules, of this model and of others."""
        return any(self._hooks_of_all)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Watch a pass of the model's own Python: what changes meanwhile, the pass changes."""
        try:
            yield
        finally:
            if self._watch is not None and not self._is_same(self._watch):
                changed = self._watch.changed()
                self._apart |= changed & self._changed_by_passes
                self._changed_by_passes |= changed
                self._begin()

    def why_not_recorded(self) -> str | None:
        """Say why a pass may do something else another time, without a sign of it beforehand."""
        if self._watch is None:
            self._begin()
        assert self._watch is not None
        if self._watch.is_heard or self.all_are_heard:
            return "its owner listens to what it does"
        if self._watch.unseen:
            return f"it keeps what cannot be watched: {', '.join(self._watch.unseen)}"
        if self._apart:
            return "every pass changes what the model keeps"
        return None

    def _is_same(self, watch: WeightsWatch) -> bool:
        return watch.holds() and watch.places() == self._places

    def _begin(self) -> None:
        self._watch = WeightsWatch(self.model, apart=self._apart | self.lent)
        self._places = self._watch.places()
        self.version += 1


def _hooks_of_all() -> tuple[dict[int, Any], dict[int, Any]]:
    return dict(torch_modules._global_forward_hooks), dict(torch_modules._global_forward_pre_hooks)
