"""A server's process: what it says of itself when it begins, and how it is told to stop."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from quire.config import ServerConfig

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

# -- startup ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Facts, to be shown once."""

    url: str
    model: str  # as clients call it
    strategy: str
    kv_bytes: int
    kv_tokens: int  # that these hold, while nothing is forgotten
    kv_bound: str  # what decided that they are so many
    max_model_len: int
    num_longest: float  # sequences of that length that fit
    max_num_seqs: int
    num_keys: int
    has_admin_key: bool
    is_local: bool

    @property
    def is_open(self) -> bool:
        """Whether clients of other machines may ask, and need no key."""
        return not self.is_local and not self.num_keys


def start_up(llm: "AsyncLLM", config: ServerConfig, url: str) -> StartUp:
    """Of an engine and how it is served."""
    own = llm.llm
    kv_bytes = own.ledger.kv_bytes
    return StartUp(
        url=url,
        model=config.served_model_name[0] if config.served_model_name else own.name,
        strategy=own.config.cache,
        kv_bytes=kv_bytes,
        kv_tokens=kv_bytes // max(1, own.spec.bytes_per_token),
        kv_bound=own.ledger.bound,
        max_model_len=own.max_model_len,
        num_longest=kv_bytes / max(1, own.spec.bytes_for(own.max_model_len)),
        max_num_seqs=own.config.max_num_seqs,
        num_keys=len(set(config.api_key)),
        has_admin_key=bool(config.admin_api_key),
        is_local=config.is_local,
    )


# -- stop ------------------------------------------------------------------------------------------

# How a process is told to stop: the first signal asks it to, the second one ends it.


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAID = b"stopped\n"


@final
class StopSignals:
    """SIGTERM and SIGINT, while it is entered; in the main thread only.

    A process that is the first of its container gets no signal that it has no handler for, so there
    must be one from the beginning. Before ``when_asked`` the first signal ends the process with 0,
    after it the second one does, whatever its threads do: an exception may be lost in the midst of
    an import. ``last`` is called then, which must not wait for anything.
    """

    def __init__(self, last: Callable[[], None] = lambda: None) -> None:
        self.asked: signal.Signals | None = None
        self._last = last
        self._when_asked: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def when_asked(self, function: Callable[[], object]) -> None:
        """Call it at the first signal from now on."""
        self._when_asked = function

    def __enter__(self) -> "StopSignals":
        self._before = {each: signal.signal(each, self._take) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self._when_asked is None or self.asked is not None:
            self._last()
            if self.asked is None:
                with suppress(OSError):
                    os.write(2, _SAID)  # what is buffered may be held by what was interrupted
            os._exit(0)
        self.asked = signal.Signals(number)
        self._when_asked()
