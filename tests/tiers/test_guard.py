"""A guarded tier: what it counts and says, and what it lets through, whatever the tier does."""

import threading

import pytest

from quire.tiers import Deadline, TierError, TierTraits, TierUsage
from quire.tiers.guard import Breaker, GuardedTier
from quire.tiers.host_memory import HostMemoryTier
from tiers.faulty import FaultyTier
from tiers.records import chain_of_blocks, right_record, small_format

FORMAT = small_format()


def guarded(tier: object = None) -> GuardedTier:
    own = HostMemoryTier(16 * FORMAT.num_bytes, FORMAT.num_bytes) if tier is None else tier
    return GuardedTier("attic:", own, [FORMAT])  # type: ignore[arg-type]


def soon() -> Deadline:
    return Deadline.after(10)


def stored(tier: GuardedTier, count: int = 4) -> list[bytes]:
    names, records = zip(
        *(right_record(FORMAT, block) for block in chain_of_blocks(count)), strict=True
    )
    assert tier.store(names, [memoryview(record) for record in records], soon()) == count
    return list(names)


def test_a_suspect_tier_is_loaded_from_again_once_it_is_trusted() -> None:
    tier = guarded()
    names = stored(tier)
    for name in names[:2]:
        assert tier.state == "ok"
        tier.note_bad(name, "checksum")
    assert tier.state == "suspect"
    assert tier.find(names[2:], soon()) == 0
    tier.trust()
    assert tier.state == "ok"
    assert tier.find(names[2:], soon()) == 2
    counted = tier.counted()
    assert counted.num_bad == {"checksum": 2}
    tier.note_bad(names[2], "size")
    assert counted.num_bad == {"checksum": 2}, "a copy goes on"


def test_a_tier_that_did_not_forget_all_is_not_loaded_from_until_it_has() -> None:
    class Slow:
        """A tier whose clearing takes longer than there is time."""

        traits = HostMemoryTier.traits

        def __init__(self) -> None:
            self.own, self.fails = HostMemoryTier(16 * FORMAT.num_bytes, FORMAT.num_bytes), True
            self.find, self.load, self.store = self.own.find, self.own.load, self.own.store
            self.drop, self.usage, self.close = self.own.drop, self.own.usage, self.own.close

        def clear(self, deadline: Deadline) -> None:
            if self.fails:
                tier.trust()  # an administrator does, meanwhile
                raise TierError("attic: out of time")
            self.own.clear(deadline)

    own = Slow()
    tier = guarded(own)
    names = stored(tier)
    assert tier.may_clear
    assert tier.clear(soon()) == "attic: out of time"
    assert (tier.state, tier.find(names, soon())) == ("suspect", 0)
    assert tier.counted().num_errors == {"clear": 1}
    own.fails = False
    assert tier.clear(soon()) is None
    assert tier.state in ("ok", "broken")  # after the error, nothing is stored for a second
    assert tier.find(names, soon()) == 0
    assert tier.usage().num_records == 0
    assert not guarded(FaultyTier(own.own)).may_clear


def test_what_a_tier_holds_is_known_without_asking_it() -> None:
    """Not even one that hangs, or that raises what no tier may raise."""

    class Away:
        traits = TierTraits(is_shared=True, is_persistent=True)
        entered, go_on = threading.Event(), threading.Event()

        def usage(self) -> TierUsage:
            raise ValueError("no such attribute")

        def store(self, *_: object) -> int:
            self.entered.set()
            assert self.go_on.wait(10)
            return 1

    tier, away = guarded(Away()), Away
    assert tier.usage() == TierUsage()
    thread = threading.Thread(target=tier.store, args=([bytes(32)], [memoryview(b"")], soon()))
    thread.start()
    assert away.entered.wait(10)
    assert tier.usage() == TierUsage()
    assert (tier.state, tier.counted().num_stored) == ("ok", 0)
    away.go_on.set()
    thread.join()
    assert tier.counted().num_stored == 1


def test_memory_is_given_back_at_the_end_and_what_persists_is_told_as_it_was() -> None:
    tier = guarded()
    stored(tier)
    before = tier.usage()
    assert before.num_records == 4
    assert before.used_bytes
    tier.close()
    after = tier.usage()
    assert (after.num_records, after.used_bytes) == (0, 0)
    assert after.capacity_bytes == before.capacity_bytes


# -- which calls are a tier's fault ----------------------------------------------------------------


def hanging(num_calls: int) -> FaultyTier:
    """A tier whose first calls hang."""
    own = HostMemoryTier(16 * FORMAT.num_bytes, FORMAT.num_bytes)
    return FaultyTier(own, script=dict.fromkeys(range(num_calls), "hang"))


def test_a_caller_with_little_time_takes_the_tier_from_no_other() -> None:
    """Nor does one whose time was over before: another tier may have had it."""
    tier = guarded(hanging(999))
    name, buffer = bytes(32), memoryview(bytearray(FORMAT.num_bytes))
    assert tier.find([name], Deadline.after(0.01)) == 0
    assert tier.load([name], [buffer], Deadline.after(0.01)) == 0
    for _ in range(99):
        assert tier.find([name], Deadline.after(0.0)) == 0
        assert tier.load([name], [buffer], Deadline.after(0.0)) == 0
    assert tier.counted().num_errors == {"find": 1, "load": 1}
    assert (tier.state, tier.may_load) == ("ok", True)


def test_a_tier_that_hangs_is_left_alone_when_several_have_waited_in_vain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.tiers.guard._PATIENCE_S", 0.5)
    tier, num_asked = guarded(hanging(99)), 0
    while tier.may_load and num_asked < 20:
        tier.find([bytes(32)], Deadline.after(0.05))
        num_asked += 1
    assert 1 < num_asked <= 10
    assert tier.state == "broken"
    assert [each.getMessage() for each in caplog.records] == [
        "tier attic:: loading fails, and goes on without it: a tier that fails on purpose: out of "
        "time"
    ]


LATE = TierError("out of time")


def test_waiting_in_vain_adds_up_until_an_answer_comes() -> None:
    breaker = Breaker("attic", "loading")
    for _ in range(3):
        breaker.note_late("find", 0.6, LATE)
        assert breaker.is_closed
        breaker.note_success("find", 0.0)
    breaker.note_late("find", 0.6, LATE)
    breaker.note_success("load", 0.0)  # which says nothing of find
    breaker.note_late("find", 0.6, LATE)
    assert not breaker.is_closed


def test_a_tier_that_answers_slowly_is_not_blamed_for_less_time() -> None:
    """But for as much it is; and what it took long ago is forgotten."""
    breaker = Breaker("attic", "loading")
    breaker.note_success("load", 4.0)
    for _ in range(20):
        breaker.note_late("load", 1.2, LATE)
        assert breaker.is_closed
    for _ in range(10):
        breaker.note_late("load", 1.2, LATE)
    assert not breaker.is_closed
    slow = Breaker("attic", "loading")
    slow.note_success("load", 4.0)
    slow.note_late("load", 4.5, LATE)
    assert not slow.is_closed


def test_a_break_is_as_long_as_several_in_vain_each_time() -> None:
    """A short wait that is the first after a break does not double it."""
    breaker = Breaker("attic", "loading")
    breaker.note_late("find", 1.5, LATE)
    assert breaker._break_s == 1.0
    breaker.note_late("find", 0.1, LATE)
    assert breaker._break_s == 1.0
    breaker.note_late("find", 0.95, LATE)
    assert breaker._break_s == 2.0


def test_a_tier_that_finds_and_does_not_load_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaker = Breaker("attic", "loading")
    for _ in range(3):
        breaker.note_success("find", 0.0)
        breaker.note_failure("load", OSError("a bad disk"))
    breaker.note_failure("find", OSError("a bad disk"))
    breaker.note_success("find", 0.0)
    assert (breaker.is_broken, breaker._break_s) == (True, 8.0)
    breaker.note_success("load", 0.0)
    assert not breaker.is_broken
    breaker.note_failure("find", OSError("a bad disk"))
    breaker.note_success("find", 0.0)
    assert not breaker.is_broken
    said = [each.getMessage().partition(",")[0] for each in caplog.records]
    assert said == ["tier attic: loading fails", "tier attic: loading works again"] * 2
    breaker.note_failure("load", OSError("a bad disk"))
    breaker._open_until_s -= 61.0  # and no load has been tried since
    breaker.note_success("find", 0.0)
    assert not breaker.is_broken, "it is told to be broken for ever where nothing is to be loaded"


@pytest.mark.parametrize("fault", ["error", "full", "hang"])
def test_what_is_not_taken_is_counted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.tiers.guard._PATIENCE_S", 0.04)
    own = HostMemoryTier(16 * FORMAT.num_bytes, FORMAT.num_bytes)
    tier = guarded(FaultyTier(own, script={0: fault}))
    name, record = right_record(FORMAT, chain_of_blocks(1)[0])
    assert tier.store([name], [memoryview(record)], Deadline.after(0.05)) == 0
    counted = tier.counted()
    assert (counted.num_stores_dropped, counted.num_errors) == (1, {"store": 1})
    assert tier.state == "broken"


def test_no_error_comes_out_whatever_a_tier_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Tiers of other packages raise what no tier should, and memory may run out in any."""

    class Buggy:
        traits = HostMemoryTier.traits

        def find(self, *_: object) -> int:
            raise MemoryError

        def load(self, *_: object) -> int:
            return None  # type: ignore[return-value]

        def store(self, *_: object) -> int:
            raise ValueError("no such attribute")

        def drop(self, *_: object) -> None:
            raise KeyError("name")

        def usage(self) -> TierUsage:
            return TierUsage()

        def clear(self, deadline: Deadline) -> None:
            raise OSError

        def close(self) -> None:
            raise RuntimeError("closed twice")

    name, record = bytes(32), memoryview(bytearray(8))
    for ask, call in (
        (lambda tier: tier.find([name], soon()), "find"),
        (lambda tier: tier.load([name], [record], soon()), "load"),
        (lambda tier: tier.store([name], [record], soon()), "store"),
        (lambda tier: int(tier.drop([name], soon())), "drop"),
    ):
        tier = guarded(Buggy())
        assert ask(tier) == 0
        assert tier.counted().num_errors == {call: 1}
        assert (tier.may_load, tier.may_store, tier.may_forget) == (
            call not in ("find", "load"),
            call != "store",
            call != "drop",
        )
        assert tier.state == ("ok" if call == "drop" else "broken")
    assert tier.clear(soon()) == "OSError"
    assert tier.state == "suspect"
    tier.close()
    shown = [each for each in caplog.records if each.exc_info]
    assert len(shown) == 6, "each with where it is from"
    assert any("MemoryError" in each.getMessage() for each in caplog.records)


def test_bad_records_that_lie_far_apart_are_no_sign_of_a_bad_tier() -> None:
    tier = guarded()
    names = stored(tier)
    for name in names:
        tier.note_bad(name, "checksum")
        assert tier.state == "ok"
        for _ in range(1000):
            tier.note_good(1)


@pytest.mark.parametrize(("said", "believed"), [(99, 2), (-5, 0), (1, 1)])
def test_a_tier_counts_no_more_than_it_was_asked_for(said: int, believed: int) -> None:
    class Boastful:
        traits, usage = HostMemoryTier.traits, TierUsage

        def __init__(self) -> None:
            self.num_loads = 0

        def find(self, *_: object) -> int:
            return said

        store = find

        def load(self, *_: object) -> int:
            self.num_loads += 1
            return said

    tier = guarded(own := Boastful())
    names, records = [bytes(32), bytes(32)], [memoryview(bytearray(8)), memoryview(bytearray(8))]
    assert tier.find(names, soon()) == believed
    assert tier.load(names, records, soon()) == believed
    assert tier.store(names, records, soon()) == believed
    assert tier.counted().num_stored == believed
    assert tier.counted().num_stores_dropped == 2 - believed
    tier.is_suspect = True
    assert (tier.find(names, soon()), tier.load(names, records, soon())) == (0, 0)
    assert own.num_loads == 1, "a suspect tier was asked"
