"""`make fuzz`: each machine gets its share of the time, and a failure is replayed as it was."""

import random
import re
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import fuzz

NAMES = [f"machine/{n}" for n in range(40)]


def order(seed: int, count: int) -> list[str]:
    """The first turns, each as long as every other."""
    turns = fuzz.Turns(NAMES, seed)
    found = []
    for _ in range(count):
        found.append(turns.next()[0])
        turns.took(found[-1], 1.0)
    return found


def test_a_short_run_reaches_any_machine() -> None:
    reached = set().union(*(order(seed, 5) for seed in range(200)))
    assert reached == set(NAMES)
    assert order(3, 80) == order(3, 80)
    assert sorted(order(3, 40)) == sorted(NAMES)


def test_the_time_is_shared_and_no_seed_comes_twice() -> None:
    turns, draw = fuzz.Turns(NAMES, 100), random.Random(1)
    pace = {name: draw.uniform(0.1, 3) for name in NAMES}
    seen: set[tuple[str, int]] = set()
    while turns.num_rounds < 3:
        name, number = turns.next()
        assert (name, number) not in seen
        seen.add((name, number))
        turns.took(name, pace[name])
    assert min(number for _, number in seen) == 100
    # None is further ahead of another one than its own last turn.
    assert max(turns.seconds.values()) - min(turns.seconds.values()) <= max(pace.values())


def test_what_failed_is_replayed_step_by_step(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[int] = []  # of the last turn

    class Sound(RuleBasedStateMachine):
        @rule()
        def nothing(self) -> None:
            """Never fails."""

    class Broken(RuleBasedStateMachine):
        @rule(n=st.integers(0, 2**30))
        def take(self, n: int) -> None:
            steps.append(n)
            assert n % 997 != 7

    machines: dict[str, Any] = {
        "sound": (Sound, lambda cls: cls()),
        "broken": (Broken, lambda cls: cls()),
    }
    own = fuzz.turn

    def turn(name: str, number: int, counter: fuzz.Counter, *, shrink: bool) -> bool:
        if name == "broken":
            steps.clear()
        return own(name, number, counter, shrink=shrink)

    monkeypatch.setattr(fuzz, "MACHINES", machines)
    monkeypatch.setattr(fuzz, "turn", turn)
    assert fuzz.fuzz(["sound", "broken"], 1, 60) == 1
    replay = re.search(r"--minutes 0 --seed (\d+) --only broken", capfd.readouterr().err)
    assert replay is not None
    failed = [*steps]
    assert failed[-1] % 997 == 7
    assert fuzz.fuzz(["broken"], int(replay[1]), 0) == 1
    assert steps == failed


def test_a_run_says_what_it_had_no_time_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "turn", lambda *_, **__: True)
    assert fuzz.fuzz(NAMES, 5, 1e-9) == 0
    assert "no time for 39 of 40" in capfd.readouterr().out
    assert fuzz.fuzz(NAMES, 5, 0) == 0
    assert "no time" not in capfd.readouterr().out
