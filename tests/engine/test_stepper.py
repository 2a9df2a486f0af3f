"""The stepping thread: jobs between steps, sleep without them, and one way to end."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from quire.engine.engine_thread import EngineThread
from quire.errors import MemoryUnavailable, RequestError, RequestTooLong


class Work:
    """So many steps to do; notes what happens, and in which thread."""

    def __init__(self) -> None:
        self.left, self.notes, self.threads = 0, [], set()
        self.in_step, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.error: BaseException | None = None
        self.ends: list[BaseException | None] = []
        self.stepper = EngineThread(self.step, self.ends.append)

    def step(self) -> bool:
        self.note("step")
        self.in_step.set()
        assert self.go_on.wait(100)
        if self.error is not None:
            raise self.error
        self.left -= self.left > 0
        return self.left > 0

    def note(self, what: str) -> None:
        self.notes.append(what)
        self.threads.add(threading.current_thread().name)

    def job(self, what: str) -> Callable[[], None]:
        return lambda: self.note(what)


def test_jobs_come_in_order_and_before_the_next_step() -> None:
    work = Work()
    work.left = 3
    work.go_on.clear()
    work.stepper.post(work.job("a"))
    assert work.in_step.wait(100)
    for name in "bcd":
        work.stepper.post(work.job(name))
    work.go_on.set()
    assert work.stepper.call(lambda: 42).result(100) == 42
    work.stepper.close()
    assert work.notes[:6] == ["a", "step", "b", "c", "d", "step"]
    assert work.threads == {"quire-step"}
    assert work.ends == [None]


def test_it_steps_until_there_is_nothing_to_do_and_then_sleeps() -> None:
    work = Work()
    assert work.notes == []  # nothing runs before the first job
    for num_steps in (5, 1, 3):
        work.notes.clear()
        work.left = num_steps
        work.stepper.call(work.job("job")).result(100)
        end = time.monotonic() + 100
        while work.left or not work.stepper._changed._waiters:  # type: ignore[attr-defined]
            assert time.monotonic() < end, "it does not go to sleep"
        assert work.notes == ["job"] + ["step"] * num_steps
    work.stepper.close()


def test_closing_does_what_was_asked_for_and_no_step_more() -> None:
    work = Work()
    work.left = 100
    work.go_on.clear()
    work.stepper.post(work.job("first"))
    assert work.in_step.wait(100)
    future = work.stepper.call(lambda: "done")
    closing = threading.Thread(target=work.stepper.close)
    closing.start()
    while not work.stepper._over:
        pass
    with pytest.raises(RequestError, match="closed"):
        work.stepper.post(work.job("late"))
    work.go_on.set()
    closing.join(100)
    assert future.result(0) == "done"
    assert work.notes == ["first", "step"]
    assert work.ends == [None]
    work.stepper.close()
    assert work.ends == [None]


def test_closing_before_the_first_job_starts_no_thread() -> None:
    work = Work()
    work.stepper.close()
    work.stepper.close()
    assert (work.ends, work.threads) == ([None], set())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryUnavailable("no pages left"), MemoryUnavailable("no pages left")),
        (KeyError("x"), RuntimeError("the engine has failed: KeyError('x')")),
    ],
)
def test_an_error_ends_everything_and_all_callers_hear_the_reason(
    error: Exception, raised: Exception
) -> None:
    work = Work()
    work.error = error
    work.go_on.clear()
    work.stepper.post(work.job("first"))
    assert work.in_step.wait(100)
    waiting = work.stepper.call(lambda: "never")
    work.go_on.set()
    with pytest.raises(type(raised), match=str(raised.args[0])[:20]):
        waiting.result(100)
    for _ in range(2):
        with pytest.raises(type(raised)) as caught:
            work.stepper.post(work.job("late"))
        assert caught.value is not error  # each gets its own: a traceback belongs to one raise
        assert str(caught.value) == str(raised)
    work.stepper.close()
    assert work.ends == [error]


@pytest.mark.parametrize(
    ("error", "fatal"), [(MemoryUnavailable("gone"), None), (KeyError("lost"), True)]
)
def test_what_a_call_raises_is_its_callers_unless_it_ends_the_engine(
    error: Exception, fatal: bool | None
) -> None:
    def fail(error: Exception) -> None:
        raise error

    work = Work()
    with pytest.raises(RequestTooLong, match="7 tokens"):
        work.stepper.call(lambda: fail(RequestTooLong("7 tokens"))).result(100)
    assert work.stepper.call(lambda: 1).result(100) == 1
    with pytest.raises(type(error)):
        work.stepper.call(lambda: fail(error), fatal=fatal).result(100)
    work.stepper.close()
    assert work.ends == [error]


def test_a_call_whose_caller_has_given_up_is_not_made() -> None:
    work = Work()
    work.go_on.clear()
    work.stepper.post(work.job("first"))
    assert work.in_step.wait(100)
    future = work.stepper.call(work.job("never"))
    assert future.cancel()
    work.go_on.set()
    work.stepper.close()
    assert "never" not in work.notes


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_closes_nothing() -> None:
    work = Work()
    work.stepper.call(work.job("here")).result(100)
    child = os.fork()
    if not child:
        code = 1
        try:
            work.stepper.close()
            work.stepper.post(work.job("there"))
        except RequestError as error:
            code = 0 if "belongs to the parent process" in str(error) and not work.ends else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert work.stepper.call(lambda: "still").result(100) == "still"
    work.stepper.close()
