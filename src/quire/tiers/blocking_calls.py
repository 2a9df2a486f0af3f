"""``BlockingCalls``: calls of a client that knows no deadline, side by side in threads.

A caller waits for them in order, and no longer than its deadline. A call that is late goes on until
its client gives up, so it must neither read nor write a caller's buffer: it returns what it has
read, and is given a copy of what it writes. What is to be forgotten waits for it: else it could be
stored again behind that.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, final

from quire.tiers.tier import Deadline, TierError

T = TypeVar("T")

_SHOWN_CHARACTERS = 300  # of an error's text


@final
class BlockingCalls:
    """At most so many calls at once. Threads begin with the first one."""

    def __init__(
        self,
        label: str,  # of the tier, in messages
        num_calls: int,
        in_words: Callable[[Exception], str],  # what a client's error says
    ) -> None:
        self._label, self._num_calls, self._in_words = label, num_calls, in_words
        self._threads = ThreadPoolExecutor(num_calls, "quire-tier")
        self._going_on = set[Future[Any]]()
        self._late = set[Future[Any]]()  # of these, that no caller waits for any more
        self._is_closed = False

    def count(
        self,
        num: int,
        begin: Callable[[int], Callable[[], T]],  # makes a call, which a thread carries out
        is_good: Callable[[int, T], bool],  # looks at what came of each, in order
        deadline: Deadline,
    ) -> int:
        """Make so many calls, and count the good ones from the first one on.

        FileNotFoundError of a call says that there is no record. ``begin`` and ``is_good`` run in
        the caller's own thread. Raises: TierError if the first fails for another reason.
        """
        self.require_open()
        num_good = num_begun = 0
        under_way: deque[Future[T]] = deque()
        try:
            while num_good < num:
                deadline.check(self._label)
                while num_begun < min(num, num_good + self._num_calls):
                    under_way.append(self._begun(begin(num_begun)))
                    num_begun += 1
                if not is_good(num_good, under_way[0].result(deadline.left_s)):
                    break
                under_way.popleft()
                num_good += 1
        except FileNotFoundError:
            pass
        except Exception as error:  # a client's, and Python's own
            if not num_good:
                raise self._failure(error) from None
        finally:
            for future in under_way:
                if not future.cancel():
                    self._late.add(future)
                    future.add_done_callback(self._late.discard)
        return num_good

    def make_all(
        self, num: int, begin: Callable[[int], Callable[[], object]], deadline: Deadline
    ) -> None:
        """Make so many calls, behind all late ones. Raises: TierError unless all are made."""
        done = 0
        if wait(list(self._late), deadline.left_s).not_done:
            raise TierError(f"{self._label}: out of time: late calls still go on")

        def begin_next(number: int) -> Callable[[], object]:
            return begin(done + number)

        while done < num:
            made = self.count(num - done, begin_next, lambda *_: True, deadline)
            if not made:
                raise TierError(f"{self._label}: it does not say what was forgotten")
            done += made

    def require_open(self) -> None:
        """Raise TierError after ``close``."""
        if self._is_closed:
            raise TierError(f"{self._label}: closed")

    def close(self, *, wait_s: float = 0.0) -> bool:
        """Begin no more calls. Return whether those under way have ended, after ``wait_s``."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        return not wait(list(self._going_on), wait_s).not_done

    def _begun(self, call: Callable[[], T]) -> Future[T]:
        future = self._threads.submit(call)
        self._going_on.add(future)
        future.add_done_callback(self._going_on.discard)
        return future

    def _failure(self, error: Exception) -> TierError:
        if isinstance(error, TierError):
            return error
        is_late = isinstance(error, TimeoutError)
        told = "out of time" if is_late else self._in_words(error)[:_SHOWN_CHARACTERS]
        return TierError(f"{self._label}: {told}")
