"""Byte truth under forks: contents, counters and the kernel's own figures, in any order."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conformance.sequences_world import OPERATIONS, SequencesWorld
from quire.memory import HostMemory

pytestmark = pytest.mark.skipif(HostMemory().cannot_share is not None, reason="no heaps here")
WEIGHTS = (3, 8, 8, 3, 3, 1, 2, 1)  # of OPERATIONS: more growing than shrinking


class SequencesMachine(RuleBasedStateMachine):
    """Hypothesis chooses the verbs, and by a shrinkable chance what they are about."""

    @initialize()
    def reserve(self) -> None:
        self.world = SequencesWorld()

    @rule(operation=st.sampled_from(OPERATIONS), random=st.randoms(use_true_random=False))
    def operate(self, operation, random: Random) -> None:
        operation(self.world, random)

    @rule()
    def ask_the_system(self) -> None:
        self.world.check_system()

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check_counters()
            self.world.check_bytes()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


TestSequences = SequencesMachine.TestCase
TestSequences.settings = settings(max_examples=3, stateful_step_count=40, deadline=None)


def run(seed: int, num_operations: int, num_between: int) -> None:
    """Checks the counters after each operation, and all else every ``num_between``."""
    random = Random(seed)
    world = SequencesWorld()
    for step in range(num_operations):
        random.choices(OPERATIONS, WEIGHTS)[0](world, random)
        world.check_counters()
        if step % num_between == 0:
            world.check_system()
            world.check_bytes()
    world.check_system()
    world.check_bytes()
    assert world.counted.returned_bytes > num_operations * world.page // 4  # much has happened
    world.close()


def test_a_thousand_operations() -> None:
    run(seed=0, num_operations=1_000, num_between=20)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_operations(seed: int) -> None:
    run(seed=seed, num_operations=10_000, num_between=5 if seed == 0 else 25)
