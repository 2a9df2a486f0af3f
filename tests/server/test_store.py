"""The store of responses: its bound, whose is whose, and who loses what when it is full."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.server.response_store import Store, StoredResponse

MOST_BYTES = 40_000
CALLERS, NAMES = st.integers(0, 2), st.sampled_from("abcdefgh")


class Keeping(RuleBasedStateMachine):
    """Against a list of all that was put, in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(MOST_BYTES)
        self.used: list[tuple[int, str, StoredResponse]] = []

    def cost(self, caller: int | None = None) -> int:
        own = [kept for whose, _, kept in self.used if caller in (None, whose)]
        return sum(kept.num_bytes + 1024 for kept in own)

    def find(self, caller: int, name: str) -> tuple[int, str, StoredResponse] | None:
        return next((use for use in self.used if use[:2] == (caller, name)), None)

    @rule(caller=CALLERS, name=NAMES, sizes=st.lists(st.integers(0, 12_000), max_size=4))
    def put(self, caller: int, name: str, sizes: list[int]) -> None:
        kept = StoredResponse(
            response=b"x" * sum(sizes[:1]), before=tuple(b"y" * n for n in sizes[1:])
        )
        self.store.put(caller, name, kept)
        self.used = [use for use in self.used if use[:2] != (caller, name)]
        if kept.num_bytes + 1024 > MOST_BYTES:
            return
        self.used.append((caller, name, kept))
        while self.cost() > MOST_BYTES:
            most = max(map(self.cost, range(3)))
            oldest = [
                next(use for use in self.used if use[0] == caller)
                for caller in range(3)
                if self.cost(caller) == most
            ]
            # Of several who hold as much, any may lose its oldest.
            self.used.remove(next(use for use in oldest if not self.holds(use)))

    def holds(self, use: tuple[int, str, StoredResponse]) -> bool:
        return use[1] in self.store._by_caller.get(use[0], {})

    @rule(caller=CALLERS, name=NAMES)
    def get(self, caller: int, name: str) -> None:
        use = self.find(caller, name)
        assert self.store.get(caller, name) is (None if use is None else use[2])
        if use is not None:
            self.used.remove(use)
            self.used.append(use)

    @rule(caller=CALLERS, name=NAMES)
    def drop(self, caller: int, name: str) -> None:
        use = self.find(caller, name)
        assert self.store.drop(caller, name) is (use is not None)
        if use is not None:
            self.used.remove(use)

    @invariant()
    def it_holds_what_it_should_and_no_more_than_it_may(self) -> None:
        assert self.store.num_bytes == self.cost() <= MOST_BYTES
        assert len(self.store) == len(self.used)


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def kept(num_bytes: int, **fields: Any) -> StoredResponse:
    return StoredResponse(response=b"x" * num_bytes, **fields)


def test_one_who_keeps_much_pushes_out_nobody_else() -> None:
    store = Store(100_000)
    store.put(1, "mine", kept(1000))
    for number in range(1000):
        store.put(2, str(number), kept(5000))
    assert store.get(1, "mine") is not None
    assert store.get(2, "0") is None
    assert store.get(2, "999") is not None
    assert store.num_bytes <= 100_000


def test_what_is_used_stays() -> None:
    store = Store(10_000)
    store.put(0, "old", kept(100))
    for number in range(50):
        store.put(0, str(number), kept(2000))
        assert store.get(0, "old") is not None


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = Store(0)
    store.put(0, "a", kept(0))
    assert len(store) == store.num_bytes == 0
    assert store.get(0, "a") is None


def test_events_and_earlier_items_are_counted() -> None:
    assert kept(10, before=(b"123", b"4"), events=(b"56",)).num_bytes == 16
