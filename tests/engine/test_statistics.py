"""What the engine counts is what a slow twin counts that watches it from outside."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.covering import in_turn, only
from engine.test_llm import GREEDY, prompts, small
from engine.twin import Hands, Twin, same
from quire import LLM, SamplingParams
from quire.engine.sequence import Sequence
from quire.engine.statistics import MISS_REASONS, Histogram, Statistics, token_bounds
from quire.engine.step_plan import StepPlan
from quire.kv import PrefixKeys
from tiny import tokens

SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
LONG = tokens(1, 60, seed=9)[0].tolist()
CROWDED = dict(kv_cache_memory_bytes=150_000, watermark=0)
OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": dict(max_num_batched_tokens=16),
    "two seats": dict(max_num_seqs=2),
    "no cache of prefixes": dict(enable_prefix_caching=False),
    "recompute": CROWDED,
    "swap": dict(**CROWDED, swap_space="1MB"),
    "growing": dict(cache="growing", kv_cache_memory_bytes=400_000),
    "virtual": dict(cache="virtual", max_num_seqs=3),
    "guesses": dict(
        speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    ),
}


def crowded(**options: Any) -> LLM:
    """No room is left for what those that run will need."""
    llm = small(**{**CROWDED, **options})
    object.__setattr__(llm.engine.scheduler.limits, "headroom", False)
    return llm


@pytest.fixture
def llm() -> Iterator[LLM]:
    with small() as own:
        yield own


# -- against the twin -----------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", only(range(2), 1))
@pytest.mark.parametrize("name", OPTIONS)
def test_the_twin_counts_the_same(name: str, seed: int) -> None:
    """Prompts that begin alike, several continuations, clients that leave: in any order."""
    rng = random.Random(seed)
    make = crowded if "kv_cache_memory_bytes" in OPTIONS[name] else small
    with make(**OPTIONS[name]) as own:
        twin, running = Twin(own, seed), list[Sequence]()
        for _ in range(24):
            if rng.random() < 0.6:
                prompt = LONG[: rng.randint(1, 60)] + [rng.randint(3, 150)] * rng.randrange(4)
                params = replace(
                    rng.choice([SAMPLED, GREEDY]),
                    n=rng.choice([1, 1, 3]),
                    max_tokens=rng.choice([1, 2, 9, 40]),
                )
                running += twin.start(prompt, params)
            own.step()
            if running and rng.random() < 0.2:
                twin.abort(rng.choice(running))
        twin.run()
        twin.check()
        if name in ("recompute", "swap"):
            assert own.statistics.num_preemptions
        if name == "guesses":
            assert own.statistics.num_accepted_tokens


def test_preempted_work_is_counted_once_and_what_it_costs_apart() -> None:
    with crowded(max_num_seqs=4) as own:
        twin = Twin(own)
        for number in range(4):
            twin.start(tokens(1, 30, seed=number)[0].tolist(), replace(GREEDY, max_tokens=60))
        twin.run()
        twin.check()
        counted = own.statistics
        assert counted.num_preemptions > 0
        assert counted.num_recomputed_tokens > 0
        assert counted.num_prompt_tokens == 4 * 30
        assert counted.num_generation_tokens == 4 * 60
        assert counted.prefix_query_tokens == 4 * 30, "a prompt is looked up once"
        assert counted.request_preemptions.sum == counted.num_preemptions
        assert own.engine.scheduler.statistics.num_preemptions == counted.num_preemptions


def test_a_prompt_that_several_share_counts_once(llm: LLM) -> None:
    llm.generate([LONG], replace(SAMPLED, n=4, ignore_eos=True))
    counted = llm.statistics
    assert counted.num_prompt_tokens == counted.prefix_query_tokens == 60
    assert counted.num_generation_tokens == 4 * 12
    assert counted.num_finished["length"] == counted.prompt_tokens.count == 4
    assert (counted.num_choices.count, counted.num_choices.sum) == (1, 4)
    assert counted.longest_generation_tokens.count == 1


def test_why_a_prefix_is_not_found(llm: LLM) -> None:
    def missed(prompt: list[int], **more: Any) -> dict[str, int]:
        before = dict(llm.statistics.prefix_missed_tokens)
        sequence = llm.start(llm.request(prompt, replace(GREEDY, max_tokens=1), **more), print)[0]
        while sequence.finish_reason is None:
            llm.step()
        after = llm.statistics.prefix_missed_tokens
        return {r: after[r] - before[r] for r in MISS_REASONS if after[r] > before[r]}

    salted = PrefixKeys(salt="a tenant's")
    assert missed(LONG, keys=salted) == {"salt": 59}
    assert missed(LONG) == {"unknown": 59}
    assert missed(LONG) == {"unknown": 11}, "blocks of 16 tokens: three are whole"
    assert missed([*LONG[:32], 3, 4, 5]) == {"unknown": 2}
    assert missed(LONG[:49], keys=salted) == {}
    with small(enable_prefix_caching=False) as llm:
        assert missed(LONG) == {"strategy": 59}


def test_prompts_whose_logprobs_are_asked_for_look_nothing_up(llm: LLM) -> None:
    llm.generate([LONG], replace(GREEDY, prompt_logprobs=0))
    assert llm.statistics.num_prompt_tokens == 60
    assert llm.statistics.prefix_query_tokens == 0


def test_latencies_come_with_the_last_piece(llm: LLM) -> None:
    llm.engine.clock, deltas = Hands(0), list[Any]()
    request = llm.request(LONG, replace(GREEDY, max_tokens=4))
    (sequence,) = llm.start(request, deltas.append, arrived_s=-5.0)
    while llm.step():
        pass
    assert all(delta.latencies is None for delta in deltas[:-1])
    took = deltas[-1].latencies
    assert sequence.last_token_s is not None
    assert took.e2e_s == sequence.last_token_s + 5
    assert took.queue_s + took.prefill_s == pytest.approx(took.first_token_s)
    assert took.prefill_s + took.decode_s == pytest.approx(took.inference_s)
    assert took.decode_s > 0


def test_all_that_run_when_it_is_closed_are_aborted() -> None:
    llm = small(max_num_seqs=1)
    for prompt in prompts():
        llm.start(llm.request(prompt, GREEDY), lambda _: None)
    llm.step()
    llm.close()
    assert llm.is_closed
    assert llm.statistics.num_finished["abort"] == len(prompts())
    assert llm.usage(wait=False).committed_bytes == llm.usage().committed_bytes == 0


# -- why they wait ---------------------------------------------------------------------------------


def waiting(llm: LLM) -> dict[str, int]:
    counts = llm.engine.scheduler.waiting_by_reason
    assert sum(counts.values()) == llm.engine.scheduler.num_waiting
    return {reason: count for reason, count in counts.items() if count}


def started(llm: LLM, count: int, length: int = 30, **params: Any) -> list[Sequence]:
    several = []
    for number in range(count):
        prompt = tokens(1, length, seed=number)[0].tolist()
        request = llm.request(prompt, replace(GREEDY, max_tokens=60, **params))
        several += llm.start(request, lambda _: None)
    return several


def test_who_just_came_waits_for_the_next_step(llm: LLM) -> None:
    assert waiting(llm) == {}
    started(llm, 2)
    assert waiting(llm) == {"next_step": 2}
    llm.step()
    assert waiting(llm) == {}
    started(llm, 1)
    assert waiting(llm) == {"next_step": 1}


def test_seats_tokens_and_bytes_are_told_apart() -> None:
    with small(max_num_seqs=2) as llm:
        started(llm, 5)
        llm.step()
        assert waiting(llm) == {"max_num_seqs": 3}
    with small(max_num_batched_tokens=16) as llm:
        started(llm, 3)
        llm.step()
        assert waiting(llm) == {"token_budget": 2}
    with crowded() as llm:
        started(llm, 8, length=60)
        llm.step()
        assert waiting(llm).keys() == {"kv_memory"}
        while not llm.statistics.num_preemptions:
            assert llm.step()
        assert waiting(llm).keys() <= {"preempted", "kv_memory"}


def test_continuations_wait_for_their_prompt() -> None:
    with small(max_num_batched_tokens=16) as llm:
        started(llm, 1, n=3, temperature=1.0)
        llm.step()
        assert waiting(llm) == {"sibling": 2}
        llm.step()
        assert waiting(llm) == {}


# -- logits that are no numbers --------------------------------------------------------------------


def spoil(llm: LLM, victim: list[int], value: float, after: int) -> None:
    """From its ``after``-th token on, the rows of logits of a prompt's sequences are this value."""
    run: Callable[[StepPlan], torch.Tensor] = llm.engine._runner.run

    def spoiled(plan: StepPlan) -> torch.Tensor:
        logits = run(plan).clone()
        for draw in plan.draws:
            sequence = draw.sequence
            mine = list(sequence.request.prompt_token_ids) == victim
            if mine and sequence.num_output_tokens >= after:
                # One -inf is nothing unusual: then it is all of them.
                logits[draw.row, 7 if value != -torch.inf else slice(None)] = value
        return logits

    llm.engine._runner.run = spoiled  # type: ignore[method-assign]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("value", "cache"), in_turn([torch.nan, torch.inf, -torch.inf], ["paged", "virtual", "growing"])
)
@pytest.mark.parametrize("after", [0, 5])
def test_no_number_ends_one_request_and_leaves_nothing_of_it(
    value: float, after: int, cache: str
) -> None:
    victim = [*LONG[:48], 5]  # begins as a healthy one does, and comes in chunks
    healthy = [LONG[:40], *prompts()]
    exact = replace(GREEDY, logprobs=3)
    # Without it, the victim has a token more when the step is over, and ends with that one.
    each = [replace(exact, max_tokens=after + 1), *[exact] * len(healthy)]
    with small(cache=cache, max_num_batched_tokens=32) as llm:
        want = llm.generate([victim, *healthy], each)
    with small(cache=cache, max_num_batched_tokens=32) as llm:
        run = llm.engine._runner.run
        spoil(llm, victim, value, after)
        got = llm.generate([victim, *healthy], exact)
        llm.engine.scheduler.check()
        assert got[0].finish_reason == "error"
        assert "logits" in got[0].detail
        assert got[0].token_ids == want[0].token_ids[:after]
        assert got[1:] == [
            replace(w, num_cached_tokens=g.num_cached_tokens)
            for w, g in zip(want[1:], got[1:], strict=True)
        ]
        counted = llm.statistics
        assert counted.num_corrupted == counted.num_finished["error"] == 1

        llm.engine._runner.run = run  # type: ignore[method-assign]
        again = llm.generate([victim], exact)[0]
        assert again.num_cached_tokens <= 40, "something of it is in the prefix cache"
        assert again.token_ids[: after + 1] == want[0].token_ids
        assert llm.statistics.num_corrupted == 1
        assert llm.reset_prefix_cache()
        assert llm.memory.committed_bytes == 0


def test_nothing_is_found_of_a_request_that_was_alone() -> None:
    victim = LONG[:49]
    with small(max_num_batched_tokens=16) as llm:
        spoil(llm, victim, torch.nan, 0)
        assert llm.generate([victim], GREEDY)[0].finish_reason == "error"
        assert llm.usage().cached_bytes == llm.usage().committed_bytes == 0


def test_what_a_grammar_forbids_is_not_corrupted(llm: LLM) -> None:
    every = {token: -100.0 for token in range(10)}
    done = llm.generate([LONG], replace(GREEDY, logit_bias=every))[0]
    assert done.finish_reason == "length"
    assert llm.statistics.num_corrupted == 0


# -- cheap and readable ----------------------------------------------------------------------------


def test_a_histogram_counts_a_bound_as_within() -> None:
    histogram = Histogram((1, 2, 5))
    for value, times in ((0.5, 1), (1, 2), (1.5, 1), (5, 1), (5.1, 3)):
        histogram.observe(value, times)
    assert histogram.counts == [3, 1, 1, 3]
    same(histogram, [0.5, 1, 1, 1.5, 5, 5.1, 5.1, 5.1])


def test_bounds_of_tokens_end_at_the_longest() -> None:
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(199) == (1, 2, 5, 10, 20, 50, 100)
    assert Statistics(1).prompt_tokens.bounds == (1,)


def test_equal_gaps_are_observed_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sequences decode: what each costs is a few assignments."""
    calls = []
    observe = Histogram.observe

    def counted(own: Histogram, value: float, times: int = 1) -> None:
        calls.append((own is llm.statistics.inter_token_s, times))
        observe(own, value, times)

    started(llm, 8, length=5)
    for _ in range(4):
        llm.step()
    monkeypatch.setattr(Histogram, "observe", counted)
    for _ in range(10):
        llm.step()
    assert calls == [(False, 1), (True, 8)] * 10
