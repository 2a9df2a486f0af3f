"""Batches of events arrive late, twice, not at all or broken: what is known is never wrong."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.test_event_publisher import SIZE, world
from fleet.told import KEY, Prompt, groups_of
from quire.engine.event_format import EventEncoder
from quire.errors import ConfigError
from quire.fleet.event_follower import BatchOrder, ZmqFollower
from quire.fleet.prefix_directory import PrefixDirectory
from quire.fleet.replica import EventEndpoints

GROUPS = groups_of()
PATIENCE_S = 10.0


class Replica:
    """One that publishes: what it has, and each batch since it began."""

    def __init__(self, kept: int) -> None:
        self.encoder = EventEncoder(GROUPS, 2, key=KEY)
        self.kept = kept
        self.batches: list[bytes] = []
        self.has: set[int] = set()  # prompts of one block each

    def toggle(self, which: int) -> int:
        prompt = Prompt((which, which))
        doing = prompt.removed if which in self.has else prompt.stored
        self.has ^= {which}
        self.batches.append(self.encoder.encode(0.0, doing(2, [0])))
        return len(self.batches) - 1

    def restart(self) -> None:
        self.batches, self.has = [], set()

    def replay(self, order: BatchOrder) -> None:
        if (first := order.wanted) is not None:
            for number in range(max(first, len(self.batches) - self.kept), len(self.batches)):
                order.replayed(number, self.batches[number])
            order.replay_ended()


def known(directory: PrefixDirectory, name: str = "r") -> set[int]:
    return {
        which
        for which in range(6)
        if directory.find(directory.hashes((which, which), Prompt(()).keys), [name])
    }


def ordered(directory: PrefixDirectory, *, can_ask: bool = True) -> BatchOrder:
    return BatchOrder(
        lambda events: directory.apply("r", events),
        lambda: directory.forget("r"),
        can_ask=can_ask,
    )


DOING = st.one_of(
    st.tuples(st.sampled_from(["sent", "sent", "lost", "twice"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["replay", "restart"]), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(done=st.lists(DOING, max_size=30), kept=st.integers(0, 8), can_ask=st.booleans())
def test_what_is_known_is_never_wrong(done, kept, can_ask) -> None:
    """Batches are lost, or come again by a replay that reaches back only so far."""
    directory, replica = PrefixDirectory(GROUPS, 2, key=KEY), Replica(kept)
    order = ordered(directory, can_ask=can_ask)
    lacks = is_cut = False  # batches that a replay can bring; that one left out
    for what, which in done:
        lacks = (lacks or what == "lost") and what not in ("replay", "restart")
        is_cut = is_cut or (lacks and what == "twice")  # an answer that begins behind the gap
        if what == "replay":
            replica.replay(order)
        elif what == "restart":
            replica.restart()
            number = replica.toggle(which)
            order.live(number, replica.batches[number])
        else:
            number = replica.toggle(which)
            if what != "lost":
                order.live(number, replica.batches[number])
            if what == "twice":
                order.replayed(number, replica.batches[number])
    # One more batch shows whether any is missing, and it is asked for.
    number = replica.toggle(5)
    order.live(number, replica.batches[number])
    replica.replay(order)
    assert known(directory) <= replica.has
    if can_ask and kept >= len(replica.batches) and not is_cut:
        assert known(directory) == replica.has
    directory.check()


@settings(max_examples=100, deadline=None)
@given(
    sent=st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 2**64 - 1) | st.integers(0, 9), st.binary(max_size=40)
        ),
        max_size=20,
    ),
    real=st.lists(st.integers(0, 5), max_size=8),
)
def test_whatever_comes_nothing_raises(sent, real) -> None:
    directory, replica = PrefixDirectory(GROUPS, 2, key=KEY), Replica(99)
    order = ordered(directory)
    for which in real:
        replica.toggle(which)
    for is_live, number, junk in sent:
        payload = replica.batches[number] if number < len(replica.batches) else junk
        (order.live if is_live else order.replayed)(number, payload)
        if number % 3 == 0:
            order.replay_ended()
    order.replay_ended()
    directory.check()


def test_batches_that_wait_for_a_missing_one_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr("quire.fleet.event_follower._MAX_HELD", 3)
    directory, replica = PrefixDirectory(GROUPS, 2), Replica(0)
    order = ordered(directory)
    order.replay_ended()
    for which in (0, 1, 2, 3, 4, 5):
        number = replica.toggle(which)
        if which != 1:
            order.live(number, replica.batches[number])
    assert (order.wanted, order.num_gaps) == (None, 1)
    assert known(directory) == {2, 3, 4, 5}  # 0 may be gone by what 1 said


def test_a_garbled_batch_is_one_that_is_missing() -> None:
    directory, replica = PrefixDirectory(GROUPS, 2), Replica(9)
    order = ordered(directory)
    for which in (0, 1, 2):
        replica.toggle(which)
    order.live(0, replica.batches[0])
    order.live(1, b"\xc1")
    order.live(2, replica.batches[2])
    assert order.num_garbled == 1
    assert known(directory) == {2}


# -- over sockets ----------------------------------------------------------------------------------


def facts(publisher, block_size: int = SIZE):
    events = EventEndpoints(
        endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, topic=""
    )
    return SimpleNamespace(events=events, block_size=block_size)


def until(what) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until_s, "it did not come to pass"
        time.sleep(0.005)


def test_it_has_what_came_before_it_and_what_comes() -> None:
    with world(replay_endpoint="tcp://127.0.0.1:0") as own:
        directory = PrefixDirectory(own.cache.blocks.groups, SIZE)
        follower = ZmqFollower(directory)
        for _ in range(3):
            own.note()
        follower.follow("r", facts(own.publisher))
        until(lambda: directory.num_blocks("r") == 3)
        own.note()
        until(lambda: directory.num_blocks("r") == 4)
        assert sum(follower.num_gaps.values()) == 0
        follower.forget("r")
        until(lambda: directory.num_blocks("r") == 0)
        asyncio.run(follower.close())
        asyncio.run(follower.close())


def test_a_replica_that_answers_no_question_is_given_up(monkeypatch) -> None:
    """Its replay endpoint is there, and silent."""
    monkeypatch.setattr("quire.fleet.event_follower._ANSWER_S", 0.05)
    with world() as own:
        directory = PrefixDirectory(own.cache.blocks.groups, SIZE)
        follower = ZmqFollower(directory)
        own.note()
        silent = SimpleNamespace(
            endpoint=own.publisher.endpoint, replay_endpoint="tcp://127.0.0.1:1"
        )
        follower.follow("r", facts(silent))

        def comes_through() -> bool:
            own.note()
            return directory.num_blocks("r") > 0

        until(comes_through)
        asyncio.run(follower.close())


def test_what_cannot_be_followed_says_why() -> None:
    follower = ZmqFollower(PrefixDirectory(GROUPS, 16))
    with pytest.raises(ConfigError, match="blocks of 8 tokens"):
        follower.follow("r", facts(SimpleNamespace(endpoint="", replay_endpoint=None), 8))
    follower.follow("r", SimpleNamespace(events=None, block_size=8))
    follower.forget("r")
    asyncio.run(follower.close())
