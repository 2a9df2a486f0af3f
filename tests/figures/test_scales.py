"""Places on a plot: within its frame for any values, and round where a person reads them."""

from itertools import pairwise
from math import isfinite

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.figures import Scale, spread, ticks, ticks_of_powers, ticks_of_time

POSITIVE = st.floats(1e-300, 1e300, allow_nan=False)


@given(POSITIVE, st.integers(1, 8), st.sampled_from([10, 1024]))
def test_ticks_reach_the_highest_value_in_few_steps(highest: float, steps: int, base: int) -> None:
    marks = ticks(highest, num_steps=steps, base=base)
    assert marks[0] == 0
    assert marks[-1] >= highest * (1 - 1e-9)
    assert len(marks) <= steps + 2
    assert all(a < b for a, b in pairwise(marks))


def test_ticks_are_round() -> None:
    assert ticks(0.37) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert ticks(7) == [0, 2, 4, 6, 8]
    assert ticks(3 * 2**30, base=1024) == [n * 2**30 for n in range(4)]
    assert ticks(0) == ticks(1)


@given(POSITIVE, POSITIVE)
def test_powers_enclose_their_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    marks = ticks_of_powers(low, high)
    assert marks[0] <= low * (1 + 1e-9)
    assert marks[-1] >= high * (1 - 1e-9)


@pytest.mark.parametrize(
    ("longest_s", "last", "unit"),
    [
        (0.02, 0.02, "seconds"),
        (100, 100, "seconds"),
        (540, 540, "minutes"),
        (10_800, 10_800, "hours"),
        (7 * 86_400, 6 * 86_400, "days"),
    ],
)
def test_time_is_read_in_a_unit_that_suits_it(longest_s: float, last: float, unit: str) -> None:
    marks, unit_s, name = ticks_of_time(longest_s)
    assert name == unit
    assert marks[-1] <= longest_s
    assert last - marks[-1] < marks[1]
    assert all((2 * mark / unit_s) % 1 == 0 for mark in marks) or longest_s < 10
    assert len(marks) <= 8


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.booleans())
@example(0.0, 5e-324, 0.0, False)
def test_a_place_is_within_the_frame(
    one: float, other: float, value: float, logarithmic: bool
) -> None:
    low, high = sorted((one, other))
    if logarithmic:
        low, high = max(abs(low), 1e-300), max(abs(low), abs(high), 1e-300)
    place = Scale(low=low, high=high, start=300, stop=12, logarithmic=logarithmic)(value)
    assert isfinite(place)
    assert 12 - 1e-6 <= place <= 300 + 1e-6


@given(st.lists(st.floats(0, 300), min_size=1, max_size=8))
def test_labels_keep_their_order_and_apart(places: list[float]) -> None:
    moved = spread(places, 15, 300)
    assert max(moved) <= 300 + 1e-9
    order = sorted(range(len(places)), key=places.__getitem__)
    assert all(moved[b] - moved[a] >= 15 - 1e-9 for a, b in pairwise(order))
