"""What keys share before their requests are queued: memory for bodies, and threads for texts.

No key can take all of either.
"""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar, final

from quire.server.api_keys import Caller
from quire.server.wire.error_responses import Refused
from quire.units import format_bytes

T = TypeVar("T")

_LONG_BYTES = 2**15  # from here on a text is long; tokenizers read about 1 MB/s
_NICENESS = 10  # a tenth of a processor while the engine uses all of it


@final
class Bodies:
    """Counts bytes of bodies from when they are read until their requests join the queue; of files,
    until their requests end.

    A key may have as many bytes as it leaves free: half of all while it is alone, a third while
    there are two keys.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_key: Counter[int] = Counter()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all bodies."""
        return self._by_key.total()

    @contextmanager
    def one(self, caller: Caller) -> Iterator[Callable[[int], None]]:
        """Give a function that counts more bytes of one body, until the block is left.

        That function raises: Refused (503).
        """
        own = 0

        def take(num_bytes: int) -> None:
            nonlocal own
            of_key = self._by_key[caller.number]
            if of_key + num_bytes > self._most_bytes - self.num_bytes - num_bytes:
                raise Refused(
                    503,
                    f"this key's bodies that are being read have {format_bytes(of_key)} together: "
                    f"a key may take as much of {format_bytes(self._most_bytes)} (16 times "
                    "max_request_bytes) as it leaves free: try again",
                    code="bodies_full",
                    retry_after_s=1,
                )
            own += num_bytes
            self._by_key[caller.number] += num_bytes

        try:
            yield take
        finally:
            self._by_key[caller.number] -= own
            if not self._by_key[caller.number]:
                del self._by_key[caller.number]


@final
class TextThreads:
    """Threads that make prompts of texts and templates: two for long texts, four for the rest.

    A key has half of either at once, and its other texts wait. A text that has begun is not
    stopped. Threads of long texts have a low priority, so that one key's texts take no time from
    the engine's steps; short ones would wait longer than they take.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(4, thread_name_prefix="quire-text")
        self._long = ThreadPoolExecutor(
            2, thread_name_prefix="quire-long-text", initializer=_give_way
        )
        self._turns: dict[tuple[int, bool], asyncio.Semaphore] = {}

    async def run(self, work: Callable[[], T], caller: Caller, *, num_bytes: int) -> T:
        """Run ``work``, on about so many bytes of text, in a thread and return what it gives."""
        is_long, loop = num_bytes > _LONG_BYTES, asyncio.get_running_loop()
        half = asyncio.Semaphore(1 if is_long else 2)
        turn = self._turns.setdefault((caller.number, is_long), half)
        await turn.acquire()
        doing = (self._long if is_long else self._short).submit(work)

        def give_back(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(turn.release)

        doing.add_done_callback(
            give_back
        )  # a caller that leaves keeps its turn until the text is done
        return await asyncio.wrap_future(doing)

    def close(self) -> None:
        """End the threads when they have nothing to do."""
        self._short.shutdown(wait=False)
        self._long.shutdown(wait=False)


def _give_way() -> None:
    """Lower this thread's priority. On Linux that is a thread's own, and needs no right."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
