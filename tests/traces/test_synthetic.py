"""Drawn traffic: its rates, its burstiness, its lengths, and that a seed says all."""

from itertools import islice, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.traces.synthetic import Bursts, ClosedLoop, Gamma, LogNormal, Synthetic


def drawn(arrivals: Any = None, count: int = 4000, **options: Any) -> Synthetic:
    return Synthetic(
        **{
            "arrivals": arrivals or Gamma(rate=2.0),
            "input_tokens": LogNormal(mean_tokens=100, sigma=1.0),
            "output_tokens": LogNormal(mean_tokens=20),
            "num_requests": count,
            **options,
        }
    )


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_their_rate_and_burstiness(cv: float) -> None:
    times = [each.at_s for each in drawn(Gamma(rate=2.0, cv=cv), 40_000)]
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_bursts() -> None:
    times = [each.at_s for each in drawn(Bursts(size=3, every_s=10), 7)]
    assert times == [0, 0, 0, 10, 10, 10, 20]


def test_users_of_a_closed_loop_think() -> None:
    found = list(drawn(ClosedLoop(users=3, think_s=4.0), 9000))
    assert [each.session for each in found[:7]] == [0, 1, 2, 0, 1, 2, 0]
    assert [each.think_s for each in found[:3]] == [None] * 3
    thoughts = [each.think_s for each in found[3:] if each.think_s is not None]
    assert len(thoughts) == 8997
    assert np.mean(thoughts) == pytest.approx(4, rel=0.05)


@given(seed=st.integers(0, 2**40), sigma=st.sampled_from([0.0, 0.5, 2.0]))
def test_a_seed_says_all(seed: int, sigma: float) -> None:
    lengths = LogNormal(mean_tokens=50, sigma=sigma, max_tokens=400)
    trace = drawn(count=200, input_tokens=lengths, seed=seed)
    found = list(trace)
    assert found == list(trace)
    assert all(each.problem() is None for each in found)
    assert all(1 <= each.input_tokens <= 400 for each in found)
    assert all(a.at_s <= b.at_s for a, b in pairwise(found))
    faster = drawn(Gamma(rate=9.0, cv=2), 200, input_tokens=lengths, seed=seed)
    assert [each.input_tokens for each in faster] == [each.input_tokens for each in found]


def test_lengths_have_their_mean() -> None:
    lengths = [each.input_tokens for each in drawn(count=40_000)]
    assert np.mean(lengths) == pytest.approx(100, rel=0.05)
    assert np.std(np.log(lengths)) == pytest.approx(1, rel=0.05)
    assert {each.output_tokens for each in drawn(count=50)} == {20}


def test_what_all_prompts_begin_with() -> None:
    for each in drawn(count=10, prefix_tokens=40):
        assert each.input_tokens > 40
        assert each.hash_ids == (0, 1)
        assert each.id_tokens == 16


def test_without_a_number_there_is_no_end() -> None:
    assert len(list(islice(drawn(num_requests=None), 5000))) == 5000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gamma(rate=0), "rate 0 must be a number above 0"),
        (lambda: Gamma(rate=1, cv=-1), "cv -1 must be a number of at least 0"),
        (lambda: Gamma(rate=inf), "rate inf"),
        (lambda: Bursts(size=0, every_s=1), "size 0 of a burst"),
        (lambda: Bursts(size=1, every_s=0), "every_s 0"),
        (lambda: ClosedLoop(users=0), "users 0 must be at least 1"),
        (lambda: ClosedLoop(users=1, think_s=inf), "think_s inf"),
        (lambda: LogNormal(mean_tokens=0), "mean_tokens=0 must be from 1"),
        (lambda: LogNormal(mean_tokens=9, max_tokens=8), "max_tokens=8"),
        (lambda: LogNormal(mean_tokens=9, sigma=9), "sigma 9 must be from 0 to 5"),
        (lambda: drawn(count=0), "num_requests 0 must be at least 1"),
        (lambda: drawn(prefix_tokens=-1), "prefix_tokens -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
