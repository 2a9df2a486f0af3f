"""Admission control: what is let in or refused, and how long to wait, on the test's own clock."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.admission_control import AdmissionControl, Bounds, Permit
from quire.server.api_keys import Caller
from quire.server.wire.error_responses import Refused

ALICE, BOB = Caller(number=0, salt="a"), Caller(number=1, salt="b")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def control(
    queued: int | None = None, tokens: int | None = None, each: int | None = None
) -> tuple[AdmissionControl, Clock]:
    clock = Clock()
    bounds = Bounds(num_queued_reqs=queued, num_queued_tokens=tokens, num_reqs_per_key=each)
    return AdmissionControl(bounds, clock), clock


@contextmanager
def one(own: AdmissionControl, caller: Caller, sequences: int, tokens: int) -> Iterator[Permit]:
    with own.admit(caller, [(sequences, tokens)]) as (passing,):
        yield passing


def refusal(of: AdmissionControl, caller: Caller, sequences: int = 1, tokens: int = 10) -> Refused:
    with ExitStack() as stack, pytest.raises(Refused) as found:
        stack.enter_context(one(of, caller, sequences, tokens))
    return found.value


def test_a_full_queue_refuses_and_has_room_when_one_begins() -> None:
    own, _ = control(queued=2)
    with ExitStack() as stack:
        first = stack.enter_context(one(own, ALICE, 1, 5))
        stack.enter_context(one(own, BOB, 1, 5))
        refused = refusal(own, ALICE)
        assert (refused.status, refused.code) == (503, "max_num_queued_reqs")
        assert "max_num_queued_reqs=2" in refused.message
        with pytest.raises(Refused, match="max_num_queued_reqs"), own.arrive(BOB):
            pass
        own.note_piece(first, 0)
        with own.arrive(BOB), one(own, BOB, 1, 5):
            assert own.num_under_way == 3
    assert (own.num_under_way, own.num_queued) == (0, 0)


def test_tokens_are_bounded_too_but_an_empty_queue_takes_anything() -> None:
    own, _ = control(tokens=100)
    with one(own, ALICE, 1, 1000) as alone:
        assert refusal(own, BOB).code == "max_num_queued_tokens"
        own.note_piece(alone, 0)
        with one(own, BOB, 1, 60):
            assert refusal(own, BOB, tokens=50).code == "max_num_queued_tokens"
            with one(own, BOB, 1, 40):
                pass


def test_one_key_cannot_take_all_seats() -> None:
    own, _ = control(each=2)
    with one(own, ALICE, 9, 1) as mine:
        for choice in range(9):
            own.note_piece(mine, choice)
        with one(own, ALICE, 1, 1):
            refused = refusal(own, ALICE)
            assert (refused.status, refused.code) == (429, "max_num_reqs_per_key")
            assert refused.retry_after_s is not None
            with one(own, BOB, 1, 1):
                pass
    with one(own, ALICE, 1, 1):
        pass


def test_going_down_lets_nobody_in() -> None:
    own, _ = control()
    with one(own, ALICE, 1, 1):
        own.draining = True
        refused = refusal(own, BOB)
        assert (refused.status, refused.code) == (503, "draining")
        assert own.num_under_way == 1


@given(pace_s=st.floats(0.01, 20), num_waiting=st.integers(1, 40), num_before=st.integers(3, 200))
def test_retry_after_is_what_the_drain_takes(
    pace_s: float, num_waiting: int, num_before: int
) -> None:
    """With servers that begin one each ``pace_s``, the forecast is the time that it then takes."""
    own, clock = control()
    for _ in range(num_before):
        clock.now_s += pace_s
        with one(own, ALICE, 1, 1) as passing:
            own.note_piece(passing, 0)
    with ExitStack() as stack:
        for _ in range(num_waiting):
            stack.enter_context(one(own, ALICE, 1, 1))
        said_s, real_s = own.drain_s(), num_waiting * pace_s
        assert min(600, 0.5 * real_s) <= said_s <= max(1, 1.5 * real_s + 1)


def test_a_standstill_makes_the_wait_longer() -> None:
    own, clock = control()
    with one(own, ALICE, 1, 1) as first:
        own.note_piece(first, 0)
    with one(own, ALICE, 4, 1):
        clock.now_s += 1
        soon = own.drain_s()
        clock.now_s += 60
        assert own.drain_s() > 10 * soon
        clock.now_s += 10_000
        assert own.drain_s() == 600


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50), st.integers(0, 4)), max_size=20))
def test_what_came_in_goes_out(requests: list[tuple[int, int, int]]) -> None:
    own, _ = control(queued=10, tokens=100, each=5)
    with ExitStack() as stack:
        for sequences, tokens, begun in requests:
            try:
                passing = stack.enter_context(one(own, ALICE, sequences, tokens))
            except Refused:
                continue
            for choice in range(min(begun, sequences)):
                own.note_piece(passing, choice)
            assert 0 <= own.num_queued <= max(10, sequences)
    assert own.num_queued == own.num_under_way == 0
    with one(own, ALICE, 10, 1000):
        pass


def test_several_prompts_come_in_together_or_not_at_all() -> None:
    """Otherwise a request of more prompts than may wait would be refused by its own, for ever."""
    own, _ = control(queued=10, each=1)
    with own.admit(ALICE, [(1, 5)] * 25) as passes:
        assert (own.num_under_way, own.num_queued) == (1, 25)
        assert refusal(own, BOB).code == "max_num_queued_reqs"
        for passing in passes[:20]:
            own.note_piece(passing, 0)
        assert refusal(own, BOB, sequences=6).code == "max_num_queued_reqs"
        assert own.num_queued == 5
        with own.admit(BOB, [(2, 5), (3, 5)]):
            assert own.num_queued == 10
    assert own.num_queued == own.num_under_way == 0


def test_what_has_been_read_takes_a_place() -> None:
    """While a prompt is made nothing is in the queue yet; a burst is bounded all the same."""
    own, _ = control(queued=3)
    with ExitStack() as door:
        for _ in range(3):
            door.enter_context(own.prepare())
        for late in (own.prepare(), own.arrive(BOB)):
            with pytest.raises(Refused) as refused:
                door.enter_context(late)
            assert refused.value.code == "max_num_queued_reqs"
            assert refused.value.retry_after_s == 3
        with one(own, ALICE, 2, 5):  # one of the three, which is in front of the others
            pass
    with own.prepare(), own.prepare(), own.prepare():
        pass


def test_what_has_not_come_yet_counts_for_its_key_alone() -> None:
    own, _ = control(queued=1, each=3)
    with ExitStack() as door:
        for _ in range(3):
            door.enter_context(own.arrive(ALICE))
        with pytest.raises(Refused) as refused:
            door.enter_context(own.arrive(ALICE))
        assert (refused.value.status, refused.value.code) == (429, "max_num_reqs_per_key")
        with own.arrive(BOB), own.prepare(), one(own, BOB, 1, 5):
            pass
    with own.arrive(ALICE):
        pass
