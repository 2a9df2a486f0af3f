"""What replicas hear of each other's trials: added up once, of alike pools alone, and bounded."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet.replicas import fleet_of, until
from quire.fleet.shared_evidence import SharedEvidence
from quire.kv.evidence import Evidence
from quire.planner.simulation.routing import Router
from quire.spec import FullAttention, Group
from quire.traces import TraceRequest
from server.asking import run

OWN = Evidence(
    policy="choice",
    block_tokens=16,
    num_blocks=1000,
    accounts=(0.0, 10.0, -20.0),
    promises=(1.0, 2.0, 3.0),
)
UNLIKE: list[dict[str, Any]] = [{"policy": "other"}, {"block_tokens": 32}, {"num_blocks": 2000}]
UNSOUND: list[dict[str, Any]] = [
    {"accounts": (0.0, nan, 0.0)},
    {"accounts": (0.0, inf, 0.0)},
    {"promises": ("many", 0.0, 0.0)},
    {"promises": (0.0,) * 1000},
    {"promises": None},
    {"num_blocks": 0},
    {"num_blocks": "many"},
]


class Told(RuleBasedStateMachine):
    """A fleet's evidence beside a plain list of what each replica said last."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.said = SharedEvidence(), dict[str, Evidence]()

    @rule(
        name=st.sampled_from("abcd"),
        accounts=st.lists(st.integers(-250, 250), min_size=3, max_size=3),
        num_blocks=st.sampled_from((950, 1000, 2000)),
        num_pools=st.sampled_from((1, 10**9)),
    )
    def says(self, name: str, accounts: list[int], num_blocks: int, num_pools: int) -> None:
        figures = tuple(float(each) for each in accounts)
        self.said[name] = replace(OWN, accounts=figures, num_blocks=num_blocks, num_pools=num_pools)
        self.shared.note(name, (self.said[name],))

    @rule(name=st.sampled_from("abcd"))
    def goes(self, name: str) -> None:
        self.said.pop(name, None)
        self.shared.forget(name)

    @invariant()
    def nothing_is_earned_by_telling(self) -> None:
        """What alike replicas hear adds up to what they said, and each is counted as one."""
        for is_large in (False, True):
            alike = {
                name: said
                for name, said in self.said.items()
                if (said.num_blocks > 1500) is is_large
            }
            heard = {name: self.shared.of_others(name)[0] for name in alike}
            if len(alike) < 2:
                assert set(heard.values()) <= {None}
                continue
            for order in range(3):
                told = [each.accounts[order] for each in heard.values() if each is not None]
                assert sum(told) == pytest.approx(
                    sum(each.accounts[order] for each in alike.values())
                )
            assert {each and each.num_pools for each in heard.values()} == {len(alike) - 1}


TestTold = Told.TestCase
TestTold.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("change", UNLIKE, ids=str)
def test_what_is_of_other_pools_is_left_out(change: dict[str, Any]) -> None:
    shared = SharedEvidence()
    shared.note("a", (OWN, None))
    shared.note("b", (replace(OWN, **change), OWN))
    assert shared.of_others("a") == (None, None)
    shared.note("b", (OWN,))
    assert shared.of_others("a") == (OWN, None)
    assert shared.of_others("z") == ()


@pytest.mark.parametrize("change", UNSOUND, ids=str)
def test_what_is_no_evidence_is_none(change: dict[str, Any]) -> None:
    shared = SharedEvidence()
    shared.note("a", (OWN,))
    shared.note("b", (replace(OWN, **change),))
    shared.note("c", ("evidence",))  # type: ignore[arg-type]
    assert shared.of_others("a") == (None,)


def test_replicas_of_a_fleet_hear_of_each_other() -> None:
    async def main() -> None:
        async with fleet_of("a", "b") as fleet:
            first, second = fleet.replicas
            await until(lambda: bool(first.heard and second.heard), within_s=30)
            own = (await first.report()).evidence[0]
            assert own is not None
            assert second.heard[0] == (own,)
            policy = second.llm.llm.accounting.pools[0].evictable
            assert policy._trials._num_others == 1
            await fleet.engine.leave("a")
            assert fleet.engine._members._evidence.of_others("b") == (None,)

    run(main())


def test_a_simulated_fleet_tells_it_late() -> None:
    spec = FullAttention(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn")
    router = Router("round-robin", 2, (Group(spec=spec, layers=(0,)),), 16, delay_s=1.0)
    first, second = router.line(0), router.line(1)
    assert first.tell_evidence(0.0, (OWN,)) == ()
    for number, at_s in enumerate((0.5, 1.5)):
        router.choose(TraceRequest(at_s=at_s, input_tokens=4, output_tokens=1), number)
        second.tell_evidence(at_s, (OWN,))
    router.choose(TraceRequest(at_s=3.0, input_tokens=4, output_tokens=1), 2)
    assert second.tell_evidence(3.0, (OWN,)) == (OWN,)
