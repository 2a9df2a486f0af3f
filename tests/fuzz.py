"""Use the state machines at random for as long as asked, with a new seed each turn.

    python tests/fuzz.py --minutes 10 [--seed N] [--only NAME] [--shrink]
    python tests/fuzz.py --world N

The machines take turns, in an order that the seed draws: next is the one that has had the least
time. Beside them whole engines run (``engine.simulation``), a few a turn. Progress is a line a
round, in which each had a turn. The first failure is printed as it was found, with the command that
replays it, and ends the run with exit code 1. A turn depends on its machine and its seed alone, so
a replay is exact as long as the tests are the same; with --shrink it looks for a smaller example of
the same failure, which may take minutes.
"""

import argparse
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from conformance.sharing_machine import SharingMachine
from conformance.sharing_model import SHARING_KINDS
from conformance.strategy_cases import KINDS, OPTIONS
from conformance.strategy_machine import SlotStore, StrategyMachine
from engine.scheduler_machine import SchedulerMachine
from engine.simulation import replay
from quire.kv import Accounting, CacheConfig

SETTINGS = settings(
    max_examples=5,  # of a turn
    stateful_step_count=80,
    deadline=None,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _store(accounting: Accounting, config: CacheConfig) -> SlotStore:
    return SlotStore(accounting, config.capacity_bytes)


# name → a class of machines, and what one of them is made from
MACHINES: Mapping[str, tuple[type[RuleBasedStateMachine], Callable[[type], Any]]] = {
    **{
        f"strategy/{option}/{page_bytes}": (
            StrategyMachine,
            lambda cls, option=option, page_bytes=page_bytes: cls(
                option, _store, page_bytes=page_bytes
            ),
        )
        for option in OPTIONS
        for page_bytes in (128, 2048)
    },
    **{
        f"sharing/{kind}": (SharingMachine, lambda cls, kind=kind: cls(kind))
        for kind in SHARING_KINDS
    },
    **{
        f"sharing-windows/{kind}": (
            SharingMachine,
            lambda cls, kind=kind: cls(kind, through_windows=True),
        )
        for kind in KINDS
    },
    **{
        f"scheduler/{option}": (SchedulerMachine, lambda cls, option=option: cls(option))
        for option in OPTIONS
    },
}


WORLDS = "worlds"  # beside the machines: so many whole engines a turn
NUM_WORLDS = 5


class Counter:
    """Steps that machines have made."""

    def __init__(self) -> None:
        self.num_steps = 0

    def counted(self, machine: type[RuleBasedStateMachine]) -> type[RuleBasedStateMachine]:
        """The same machine; its steps are counted where its invariants would be checked."""

        def check_invariants(this: Any, *arguments: Any, **options: Any) -> None:
            self.num_steps += 1
            machine.check_invariants(this, *arguments, **options)

        return type(machine.__name__, (machine,), {"check_invariants": check_invariants})


class Turns:
    """Whose turn it is, and with which seed."""

    def __init__(self, names: Sequence[str], first_seed: int) -> None:
        order = random.Random(first_seed).sample(names, len(names))
        self._first_seed = first_seed
        self.seconds = dict.fromkeys(order, 0.0)  # that each has had
        self.counts = dict.fromkeys(order, 0)

    def next(self) -> tuple[str, int]:
        """The name of the one that has had the least time, the first in the order among equals."""
        name = min(self.seconds, key=self.seconds.__getitem__)
        return name, self._first_seed + self.counts[name]

    def took(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds
        self.counts[name] += 1

    @property
    def num_rounds(self) -> int:
        """Turns that each has had."""
        return min(self.counts.values())


def fuzz(names: Sequence[str], first_seed: int, seconds: float, *, shrink: bool = False) -> int:
    """Turns until the time is over; 0 seconds: one of each. Returns: the exit code."""
    counter, turns, start, told = Counter(), Turns(names, first_seed), time.monotonic(), 0
    print(f"{len(names)} machines, {seconds / 60:g} minutes, from seed {first_seed}", flush=True)
    elapsed = 0.0
    while elapsed < seconds or (not seconds and not turns.num_rounds):
        name, number = turns.next()
        if not turn(name, number, counter, shrink=shrink):
            return 1
        before, elapsed = elapsed, time.monotonic() - start
        turns.took(name, elapsed - before)
        if turns.num_rounds > told:
            told = turns.num_rounds
            print(
                f"round {told}: {counter.num_steps:,} steps in {elapsed:.0f} s, "
                f"{counter.num_steps / elapsed:,.0f} a second",
                flush=True,
            )
    if missed := list(turns.counts.values()).count(0):
        print(f"no time for {missed} of {len(names)}: another seed begins with others")
    return 0


def turn(name: str, number: int, counter: Counter, *, shrink: bool = False) -> bool:
    """One machine with one seed, or a few whole engines. Returns: whether all went well."""
    if name == WORLDS:
        return not first_failing(range(number * NUM_WORLDS, (number + 1) * NUM_WORLDS))
    phases = [Phase.generate, Phase.shrink] if shrink else SETTINGS.phases
    machine, make = MACHINES[name]
    counted = counter.counted(machine)
    try:
        run_state_machine_as_test(
            seed(number)(lambda: make(counted)), settings=settings(SETTINGS, phases=phases)
        )
    except Exception as error:
        traceback.print_exception(error)
        print(f"\n{name} fails. To replay:", file=sys.stderr)
        print(
            f"  {sys.executable} {sys.argv[0]} --minutes 0 --seed {number} --only {name}",
            file=sys.stderr,
        )
        return False
    return True


def first_failing(worlds: range) -> int:
    """Run whole engines. Returns: the exit code."""
    for world in worlds:
        try:
            replay(world)
        except AssertionError as error:
            traceback.print_exception(error)
            print(f"\nA world fails. To replay:\n  {sys.executable} {sys.argv[0]} --world {world}")
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--minutes", type=float, default=10, help="0: one turn of each (default: 10)"
    )
    parser.add_argument("--seed", type=int, help="the first turns' (default: the time)")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this machine, or those that begin so"
    )
    parser.add_argument("--shrink", action="store_true", help="make what fails smaller")
    parser.add_argument("--world", type=int, metavar="N", help="only this one whole engine")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # thousands of faults on purpose
    if options.world is not None:
        return first_failing(range(options.world, options.world + 1))
    known = [*MACHINES, WORLDS]
    exact = [name for name in options.only or () if name in known]
    names = exact or [n for n in known if n.startswith(tuple(options.only or [""]))]
    if not names:
        parser.error(f"no machine begins with {options.only}; there are: {', '.join(known)}")
    first_seed = options.seed if options.seed is not None else int(time.time())
    return fuzz(names, first_seed, 60 * options.minutes, shrink=options.shrink)


if __name__ == "__main__":
    sys.exit(main())
