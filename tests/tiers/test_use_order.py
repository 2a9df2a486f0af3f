"""The order in which a tier's records go, beside a slow twin that sorts them."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.covering import examples
from conformance.tier_cases import new_names
from quire.tiers.use_order import TURN_S, UseOrder

_UNITS = 32  # of room: a turn is over when one was entered, and it is time


def _order() -> UseOrder:
    # Of so many records a sample is watched that no name here is in, so that the last use counts.
    return UseOrder(_UNITS, _UNITS, lambda record: 1, expected=2**20)


class Twin:
    """Sorts by the turn of the last use; of one turn what was used once, and the latest, goes."""

    def __init__(self) -> None:
        self.turn, self.entered, self.next_s, self.count = 0, 0, 0.0, 0
        self.kept: dict[int, tuple[int, bool, int]] = {}

    def note(self, record: int, now_s: float) -> None:
        if not self.entered:
            self.next_s = now_s + TURN_S
        elif now_s >= self.next_s:
            self.turn, self.entered, self.next_s = self.turn + 1, 0, now_s + TURN_S
        self.count += 1
        self.entered += record not in self.kept
        self.kept[record] = (self.turn, record in self.kept, -self.count)

    def oldest(self, held: set[int]) -> int | None:
        return min((r for r in self.kept if r not in held), key=self.kept.__getitem__, default=None)


@settings(max_examples=examples(20, of=300), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_it_sorts_as_the_twin_does_however_many_turns_go_by(seed: int) -> None:
    draw, order, twin, now_s = random.Random(seed), _order(), Twin(), 0.0
    names = {record: name for record, name in enumerate(new_names(_UNITS))}
    pace = draw.choice((0.3, 2.0))  # of turns
    for _ in range(draw.choice((50, 400, 1500))):
        now_s += draw.random() * pace * TURN_S
        free = [record for record in names if record not in twin.kept]
        if twin.kept and (not free or draw.random() < 0.4):
            record = draw.choice(list(twin.kept))
            if draw.random() < 0.5:
                order.use(record, names[record], now_s)
                twin.note(record, now_s)
            else:
                order.remove(record)
                del twin.kept[record]
        elif free:
            record = draw.choice(free)
            order.add(record, names[record], now_s)
            twin.note(record, now_s)
        held = set(draw.sample(sorted(twin.kept), draw.randrange(1 + len(twin.kept))))
        assert order.oldest(held) == twin.oldest(held)
        assert order.oldest(()) == twin.oldest(set())
        assert order.total_weight == len(twin.kept)


def test_what_is_older_than_all_turns_that_are_told_apart_goes_first() -> None:
    order, names = _order(), new_names(3)
    for record in (0, 1):
        order.add(record, names[record], 0.0)
    for turn in range(1, 700):
        order.add(2, names[2], 2 * TURN_S * turn)
        assert (order.oldest(()), order.oldest({1}), order.oldest({0, 1})) == (1, 0, 2)
        order.remove(2)


def test_what_was_used_again_stays_where_the_use_before_the_last_decides() -> None:
    """All names are watched. Some come round, after more others than there is room for."""
    order = UseOrder(_UNITS, 2 * _UNITS, lambda record: 1, expected=_UNITS)
    free, kept, now_s = list(range(2 * _UNITS)), dict[bytes, int](), 0.0
    good = new_names(20)

    def ask(name: bytes) -> bool:
        nonlocal now_s
        now_s += 2 * TURN_S
        if name in kept:
            order.use(kept[name], name, now_s)
            return True
        while order.total_weight >= _UNITS:
            oldest = order.oldest(())
            assert oldest is not None
            gone = next(name for name, record in kept.items() if record == oldest)
            order.evict(oldest, gone)
            free.append(kept.pop(gone))
        kept[name] = free.pop()
        order.add(kept[name], name, now_s)
        return False

    found = []
    for _ in range(30):
        found.append(sum(map(ask, good)))
        for name in new_names(_UNITS):
            ask(name)
    assert found[:3] == [0, 0, 0]
    assert min(found[20:]) >= 18
