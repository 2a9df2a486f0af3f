"""Equal prefixes that come together are computed once; what is looked at for a newcomer."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.scheduler_machine import Watch
from engine.test_progress import five, watch
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.scheduling.policy import POLICIES
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Sampled, TokenLogprobs
from quire.kv import STRATEGIES, CacheConfig, PrefixKeys
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.spec import FullAttention, Group, RecurrentState, StateTensor

FULL = Group(spec=FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16"), layers=(0,))
BLOCK = 16


def scheduler(
    num_blocks: int,
    *,
    groups: tuple[Group, ...] = (FULL,),
    budget: int = 2048,
    max_num_seqs: int = 300,
    caching: bool = True,
    headroom: bool = True,
    policy: str = "fcfs",
) -> Scheduler:
    config = CacheConfig(
        max_model_len=20_000,
        max_num_seqs=max_num_seqs,
        capacity_bytes=num_blocks * BLOCK * sum(g.bytes_per_token for g in groups),
        block_size=BLOCK,
        page_bytes=64,
        enable_prefix_caching=caching,
    )
    limits = SchedulerLimits(
        max_model_len=20_000,
        policy=policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        headroom=headroom,
    )
    return Scheduler(STRATEGIES["paged"].make_accounting(groups, config), limits)


def asked(
    number: int, tokens: Iterable[int], max_tokens: int = 2, *, sure: bool = True, **more: Any
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=sure)
    return Request(request_id=number, prompt_token_ids=tuple(tokens), params=params, **more)


def prompts(count: int, num_shared: int, num_own: int) -> list[list[int]]:
    return [
        [*range(num_shared), *range(10_000 * (1 + n), 10_000 * (1 + n) + num_own)]
        for n in range(count)
    ]


def step(one: Scheduler, between: Callable[[], None] = lambda: None) -> dict[int, int]:
    """Tokens computed, by sequence."""
    plan = one.plan()
    computing = {chunk.sequence.seq_id for chunk in plan.chunks}
    assert all(other.seq_id in computing for other in one.held_back.values())
    assert not computing & one.held_back.keys()
    between()
    logprobs = (TokenLogprobs(token_id=7, logprob=0.0, rank=1),)
    one.update(plan, [Sampled(token_ids=(7,), logprobs=logprobs) for _ in plan.draws])
    one.check()
    return {c.sequence.seq_id: c.stop - c.start for c in plan.chunks}


def until_prompts_are_computed(one: Scheduler, sequences: list[Sequence]) -> tuple[int, int]:
    """Tokens of prompts that were computed, and steps."""
    total = num_steps = 0
    while any(
        s.num_computed_tokens < s.num_prompt_tokens and not s.finish_reason for s in sequences
    ):
        before = {s.seq_id: s.num_output_tokens for s in sequences}
        total += sum(count for seq_id, count in step(one).items() if not before[seq_id])
        num_steps += 1
        assert num_steps < 100
    return total, num_steps


@pytest.mark.parametrize(
    ("count", "num_shared", "num_own", "most_steps"),
    [
        (4, 400, 0, 2),  # vLLM computes 448 of these, and we did 1,600
        (16, 4000, 20, 4),  # 4,320, and 6,288
        (64, 48, 0, 2),
        (256, 512, 16, 4),
        (32, 300, 1000, 18),
    ],
)
def test_a_burst_computes_its_distinct_tokens(
    count: int, num_shared: int, num_own: int, most_steps: int
) -> None:
    one = scheduler(6000)
    several = [one.add(asked(n, p))[0] for n, p in enumerate(prompts(count, num_shared, num_own))]
    total, num_steps = until_prompts_are_computed(one, several)
    # The last token of each prompt is computed in any case.
    distinct = num_shared + count * max(1, num_own)
    assert total <= 1.05 * distinct
    assert num_steps <= most_steps


def test_others_than_those_that_wait_come_beside_the_one_that_computes() -> None:
    one = scheduler(1000)
    a, b, c = range(0, 100), range(1000, 1100), range(2000, 2030)
    texts = [a, a, b, b, a, c]
    several = [one.add(asked(n, text))[0] for n, text in enumerate(texts)]
    assert step(one).keys() == {0, 2, 5}
    assert one.waiting_by_reason["prefix"] == 3
    assert {n: s.seq_id for n, s in one.held_back.items()} == {1: 0, 3: 2, 4: 0}
    assert step(one) == {0: 1, 1: 4, 2: 1, 3: 4, 4: 4, 5: 1}
    assert [s.num_cached_tokens for s in several] == [0, 96, 0, 96, 96, 0]


@pytest.mark.parametrize("differ", ["salt", "adapter", "caching is off", "few tokens"])
def test_none_waits_for_what_it_could_not_share(differ: str) -> None:
    one = scheduler(1000, caching=differ != "caching is off")
    several = {"salt": PrefixKeys(salt="a"), "adapter": PrefixKeys(lora="a" * 64)}
    keys = several.get(differ, PrefixKeys())
    text = range(BLOCK if differ == "few tokens" else 200)
    for n, own in enumerate([PrefixKeys(), keys]):
        one.add(asked(n, text, keys=own))
    assert step(one).keys() == {0, 1}
    assert not one.held_back


@pytest.mark.parametrize("when", ["before its step ends", "after its first step"])
def test_if_the_one_that_computes_is_aborted_the_next_one_computes(when: str) -> None:
    one = scheduler(1000, budget=128)
    several = [one.add(asked(n, range(320)))[0] for n in range(6)]
    first = several[0]

    def abort() -> None:
        one.finish(first, "abort")

    step(one, abort if when == "before its step ends" else lambda: None)
    abort()
    total, num_steps = until_prompts_are_computed(one, several[1:])
    assert total <= 320 + 5
    assert num_steps <= 4


def test_if_the_one_that_computes_fails_the_next_one_computes() -> None:
    one = scheduler(1000)
    several = [one.add(asked(n, range(200)))[0] for n in range(6)]
    plan = one.plan()
    assert one.held_back.keys() == {1, 2, 3, 4, 5}
    failed = replace(Sampled(token_ids=()), error="no numbers", fault="model")
    one.update(plan, [failed for _ in plan.draws])
    assert several[0].finish_reason == "error"
    total, num_steps = until_prompts_are_computed(one, several)
    assert (total, num_steps) == (200 + 4 * 8, 2)  # of the last block each has but a part


def test_waits_in_vain_come_to_an_end() -> None:
    """Whatever becomes of those that compute: nothing is found in the end, and none starves."""
    one = scheduler(1000)
    several = [one.add(asked(n, range(200)))[0] for n in range(9)]
    for number in range(4):
        assert len(one.held_back) in (0, 8 - number + 1)

        def abort(number: int = number) -> None:
            one.finish(several[number], "abort")

        step(one, abort)
    step(one)
    assert not one.held_back
    assert one.num_running == 5


def test_who_waits_keeps_its_seat_and_its_room() -> None:
    one = scheduler(1000, max_num_seqs=3)
    for n, text in enumerate([range(100), range(100), range(100), range(5000, 5100)]):
        one.add(asked(n, text))
    assert step(one).keys() == {0}, "seats are kept for the two that wait"
    assert step(one).keys() == {0, 1, 2}
    # 13 blocks for the first, and 10 of its own for the second: none of them is for the third.
    one = scheduler(13 + 10 + 4, headroom=0.0)
    own = [*range(200), *range(700, 860)]
    for n, text in enumerate([range(200), own, range(5000, 5100)]):
        one.add(asked(n, text))
    assert step(one).keys() == {0}
    assert one.held_back.keys() == {1}
    assert step(one).keys() == {0, 1}


def test_where_states_are_kept_at_a_few_places_none_waits_in_vain() -> None:
    state = StateTensor(name="ssm", shape=(64,), dtype="float32")
    recurrent = Group(spec=RecurrentState(states=(state,)), layers=(1,))
    one = scheduler(1000, groups=(FULL, recurrent))
    same = [one.add(asked(n, range(400)))[0] for n in range(3)]
    until_prompts_are_computed(one, same)
    assert [s.num_cached_tokens for s in same] == [0, 384, 384]
    # They part after 100 tokens, and the first one's state is kept far behind that.
    for n, text in enumerate(prompts(3, 100, 300)):
        one.add(asked(10 + n, [3, *text]))
    assert len(step(one)) == 6
    assert not one.held_back


def test_a_long_prefix_in_a_small_memory_and_preemption() -> None:
    """The one that computes loses its room on the way; those that wait go on all the same."""
    one: Watch = watch(96, max_num_seqs=6, budget=16, headroom=0.0, shared_tokens=4)
    for number in range(8):
        tokens = (*range(28), *[100 + number] * 3)
        params = SamplingParams(max_tokens=24)
        one.add(Request(request_id=number, prompt_token_ids=tokens, params=params))
    one.drain(five)
    assert {s.finish_reason for s in one.sequences} == {"length"}
    assert one.num_held_back
    assert one.scheduler.num_preemptions
    assert one.num_computed.total() - one.num_recomputed.total() <= 28 + 8 * (3 + 24)


# -- what a newcomer costs -------------------------------------------------------------------------


class Looks:
    """How often sequences, or bytes of them, are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, one: Scheduler) -> None:
        self.counts: Counter[str] = Counter()
        accounting = one._accounting
        for name in ("bytes_alone", "num_tokens", "match_prefix"):
            monkeypatch.setattr(accounting, name, self._counted(name, getattr(accounting, name)))
        monkeypatch.setattr(one, "_grade", self._counted("grade", one._grade))
        queues = one._queues
        monkeypatch.setattr(queues, "_rank", self._counted("rank", queues._rank))
        monkeypatch.setattr(queues, "_grade", self._counted("grade", queues._grade))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            # Bytes of several sequences at once are so many looks.
            size = np.size(arguments[0]) if name == "bytes_alone" else 1
            self.counts[name] += size
            return function(*arguments, **options)

        return counted

    def of(self, work: Callable[[], Any]) -> int:
        before = self.counts.total()
        work()
        return self.counts.total() - before


def crowd(
    num_running: int, num_blocks: int, *, num_waiting: int, policy: str = "fcfs", sure: bool = True
) -> Scheduler:
    """Sequences that generate, and others that come beside them."""
    seats = num_running + num_waiting
    one = scheduler(num_blocks, budget=10**6, max_num_seqs=seats, policy=policy)
    for n in range(num_running):
        one.add(asked(n, range(100 * n, 100 * n + 20), 60, sure=sure))
    step(one)
    for n in range(num_running, seats):
        one.add(asked(n, range(100 * n, 100 * n + 20), 60, sure=sure))
    return one


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_looked_at_for_a_newcomer_does_not_grow_with_those_that_run(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_one = []
    for num_running in (64, 1024):
        # Less than what all may take, and more than what is expected.
        num_blocks = 9 * (num_running + 9) // 2
        one = crowd(num_running, num_blocks, num_waiting=9, policy=policy, sure=False)
        looks = Looks(monkeypatch, one)
        one._queues.check(one._accounting)
        assert looks.counts.total() > num_running, "looks at each are counted"
        before: list[int] = []
        admit = one._admit

        def noted(*arguments: Any, counts: Counter[str] = looks.counts, admit: Any = admit) -> bool:
            before.append(counts.total())  # noqa: B023 - called before it is another one
            return bool(admit(*arguments))

        monkeypatch.setattr(one, "_admit", noted)
        one.plan()
        assert one.num_running == num_running + 9
        for_one.append(before[-1] - before[-2])  # what all will need was worked out for the first
    # A few searches, which take four looks more among 16 times as many; and some more moments.
    assert for_one[1] <= for_one[0] + 5 * 4 + 64


def test_who_waits_is_looked_at_again_when_that_can_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = crowd(100, 370, num_waiting=100)
    assert one.num_running < 100
    step(one)
    looks, waiting = Looks(monkeypatch, one), one.num_waiting
    for _ in range(3):
        step(one)
    assert one.num_waiting == waiting
    assert not looks.counts["match_prefix"], "it is asked in vain"
    one.finish(one._queues.running[0], "abort")
    step(one)
    assert looks.counts["match_prefix"]


def test_a_plan_in_which_very_many_give_way_is_made_without_recursion() -> None:
    """More beams await a choice than Python calls may be nested, and one that came needs all."""
    count = 1050
    one = scheduler(count + 10, budget=10**6, max_num_seqs=count + 10, headroom=0.0)
    for n in range(count):
        one.add(asked(n, range(40 * n, 40 * n + 10), 30, beam=BeamSearchParams(beam_width=1)))
    step(one)
    assert one.num_running == count
    (large,) = one.add(asked(count, range(10**6, 10**6 + 16 * 1040), 4))
    step(one)
    assert large.num_computed_tokens == 16 * 1040
    assert one.num_preemptions >= 1030
