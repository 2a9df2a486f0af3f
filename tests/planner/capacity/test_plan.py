"""What fits, by the engine's own accounting: golden numbers, and counts that hold when driven."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.places import GIB, THOUSAND, card, host, planned
from quire.config import EngineConfig
from quire.engine.kv_sizing import kv_needs, ledger_for, stored_spec
from quire.errors import ConfigError
from quire.kv import STRATEGIES, Fits, build_accounting
from quire.memory.budget import BUDGETS
from quire.planner.capacity import CapacityPlan, sizes_of, typical
from quire.planner.sequence_memory import PlannedLengths, lengths, moments
from quire.planner.subject import find_subject

MIB = 1 << 20


def test_golden_a_sequence_of_qwen3_4b() -> None:
    """36 layers × 40,960 tokens × 8 heads × 128 × 2 × 2 bytes."""
    found = planned("Qwen3-4B", host())
    assert found.spec.bytes_for(40_960) == 5.625 * GIB
    assert found.spec.bytes_for(100) / MIB == pytest.approx(14.06, abs=0.005)
    assert found.needs.bytes_per_token == 147_456


def test_golden_growing_by_4096_tokens() -> None:
    """16 MiB a layer, 576 MiB in all layers; while one layer grows, it is there twice."""
    found = planned(
        "Qwen3-4B",
        host(),
        cache="growing",
        growth_tokens=4096,
        request=PlannedLengths(input_tokens=4096, output_tokens=2),
    )
    each_layer = 16 * MIB
    course = found.cell.course
    assert course.end.committed_bytes == 2 * 36 * each_layer == 2 * 576 * MIB
    # The last layer grows from 16 to 32 MiB: for a moment it holds both.
    assert course.peak_bytes == course.end.committed_bytes + each_layer


def test_golden_blocks_of_38_tokens() -> None:
    """16 + 16 + 6 tokens: three blocks, ten places of the last one empty."""
    found = planned("Qwen3-4B", host(), request=PlannedLengths(input_tokens=20, output_tokens=19))
    end = found.cell.course.end
    assert end.num_tokens == 38
    assert end.committed_bytes == 3 * 16 * 147_456
    assert end.committed_bytes - end.used_bytes == 10 * 147_456


def test_the_ledger_is_the_engines() -> None:
    config = EngineConfig(budget="vllm", max_model_len=8192, max_num_seqs=8)
    subject, place = find_subject("Qwen3-4B"), host()
    found = planned(subject, place, budget="vllm", max_model_len=8192, max_num_seqs=8)
    needs = kv_needs(config, subject.name, subject.spec, subject.own, 4096)
    assert found.needs == needs
    assert found.ledger == ledger_for(config, needs, place.machine)


def test_every_strategy_under_every_rule_and_the_options_among_them() -> None:
    found = planned("Llama-3.1-8B", card("h100"), compare=True, max_model_len=8192)
    pairs = {(cell.strategy, cell.ledger.rule) for cell in found.cells}
    assert pairs == {(strategy, rule) for strategy in STRATEGIES for rule in BUDGETS}
    assert found.cell in found.cells
    assert (found.cell.strategy, found.cell.ledger.rule) == ("paged", "auto")
    given = planned(
        "Llama-3.1-8B", card("h100"), compare=True, kv_cache_memory_bytes=GIB, max_model_len=4096
    )
    assert given.ledger.rule == "given"
    assert given.cell.kv_bytes == GIB


def test_a_strategy_of_another_package_is_planned_under_every_rule() -> None:
    STRATEGIES.register("another", STRATEGIES["virtual"])
    try:
        found = planned(
            "Llama-3.1-8B", card("h100"), compare=True, cache="another", max_model_len=8192
        )
    finally:
        STRATEGIES.unregister("another")
    rules = [cell.ledger.rule for cell in found.cells if cell.strategy == "another"]
    assert sorted(rules) == sorted(BUDGETS)


def test_bytes_that_a_rule_refuses_hold_nothing() -> None:
    asked = 4096 * GIB
    found = planned("Llama-3.1-8B", card("h100"), kv_cache_memory_bytes=asked)
    assert found.ledger.refusal is not None
    assert found.ledger.kv_bytes == asked
    assert (found.cell.kv_bytes, found.cell.num_sequences) == (0, 0)


def test_reserving_the_longest_wastes_and_blocks_do_not() -> None:
    cells = {
        cell.strategy: cell
        for cell in planned(
            "Llama-3.1-8B", card("h100"), compare=True, max_model_len=8192, max_num_seqs=1024
        ).cells
        if cell.ledger.rule == "vllm"
    }
    assert cells["contiguous"].waste_fraction == pytest.approx(1 - 1249 / 8192)
    assert cells["paged"].waste_fraction < 0.02
    assert cells["paged"].num_fitting > 6 * cells["contiguous"].num_fitting


def driven(found: CapacityPlan, most: int) -> int:
    """How many typical sequences the accounting takes, one after the other, to their ends."""
    strategy, request = found.config.cache, found.request
    spec = stored_spec(found.config, found.subject.spec)
    config = replace(found.config, max_num_seqs=max(1, most))
    sizes = sizes_of(config, found.subject.spec, found.place, found.cell.kv_bytes)
    accounting = build_accounting(strategy, spec, sizes)
    for index in range(most):
        accounting.add(index, max_tokens=request.num_tokens + 1)
        for num_tokens in lengths(request, config.max_num_batched_tokens):
            if not isinstance(accounting.try_extend(index, num_tokens), Fits):
                return index
            accounting.drain()
    return most


@settings(max_examples=20, deadline=None)
@given(
    strategy=st.sampled_from(sorted(STRATEGIES)),
    model=st.sampled_from(["SmolLM2-135M", "gemma-3-1b-it", "DeepSeek-V2-Lite"]),
    input_tokens=st.integers(1, 700),
    output_tokens=st.integers(1, 90),
    capacity_mib=st.integers(60, 600),
    block_size=st.sampled_from([4, 16, 32]),
    reserve=st.sampled_from(["max_model_len", "request"]),
    page_bytes=st.sampled_from([4096, 2**21]),
)
def test_so_many_sequences_really_fit(
    strategy: str,
    model: str,
    input_tokens: int,
    output_tokens: int,
    capacity_mib: int,
    block_size: int,
    reserve: str,
    page_bytes: int,
) -> None:
    """Never fewer than planned, also where neighbours share a granule of large pages."""
    found = planned(
        model,
        replace(host(), page_bytes=page_bytes),
        request=PlannedLengths(input_tokens=input_tokens, output_tokens=output_tokens),
        cache=strategy,
        max_model_len=1024,
        block_size=block_size,
        reserve=reserve,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=capacity_mib * MIB,
    )
    count = found.cell.num_fitting
    assert driven(found, min(count, 40)) == min(count, 40)
    if strategy == "paged" and count < 40:  # nor so few that many more would fit
        assert driven(found, 2 * count + 3) <= count + max(3, count // 4)


@settings(max_examples=12, deadline=None)
@given(
    strategy=st.sampled_from(sorted(STRATEGIES)),
    input_tokens=st.integers(1, 600),
    output_tokens=st.integers(1, 60),
)
def test_a_sequence_never_holds_less_than_its_tokens_nor_more_than_it_counts(
    strategy: str, input_tokens: int, output_tokens: int
) -> None:
    found = planned(
        "gemma-3-1b-it",
        host(),
        request=PlannedLengths(input_tokens=input_tokens, output_tokens=output_tokens),
        cache=strategy,
        max_model_len=1024,
    )
    course = found.cell.course
    assert course.end.used_bytes == found.spec.bytes_for(course.end.num_tokens)
    assert course.end.used_bytes <= course.end.committed_bytes <= course.alone_bytes
    assert course.peak_bytes >= course.end.committed_bytes
    assert course.together_bytes(1) >= course.end.committed_bytes
    counts = [course.together_bytes(n) for n in range(6)]
    assert counts == sorted(counts)
    assert course.num_in(counts[5]) >= 5


@pytest.mark.parametrize("max_model_len", [1, 2, 5, 600, 2048, 131_072])
def test_a_typical_request_is_one_that_may_be_asked(max_model_len: int) -> None:
    if max_model_len < 2:
        return
    request = typical(max_model_len)
    assert request.input_tokens >= 1
    assert request.output_tokens >= 1
    assert request.input_tokens + request.output_tokens <= max_model_len


def test_neighbours_share_a_granule_of_large_pages() -> None:
    """61 layers × 16 tokens × 1,152 bytes: a block is no whole pages, 1,024 of them are."""
    found = planned("DeepSeek-V3", card("h200"), num_ranks=16, budget="vllm", max_model_len=8192)
    course = found.cell.course
    assert course.shares is not None
    (share,) = course.shares
    assert share.granule == 1024 * 16 * 61 * 1152
    assert share.end == 79 * 16 * 61 * 1152  # 1,249 tokens
    assert course.together_bytes(1) == course.end.committed_bytes == share.granule
    assert course.together_bytes(12) == share.granule
    assert course.together_bytes(13) == 2 * share.granule
    assert found.cell.num_fitting > 400


def test_steps_of_a_prompt_and_then_of_its_answer() -> None:
    assert list(lengths(PlannedLengths(input_tokens=10, output_tokens=3), 4)) == [4, 8, 10, 11, 12]
    assert list(lengths(PlannedLengths(input_tokens=8, output_tokens=1), 4)) == [4, 8]
    assert list(lengths(PlannedLengths(input_tokens=1, output_tokens=1), 4)) == [1]


def test_a_cache_that_is_too_small_says_so() -> None:
    found = planned("SmolLM2-135M", host())
    sizes = sizes_of(found.config, found.subject.spec, found.place, MIB)
    with pytest.raises(ConfigError, match="no room for 1,000 tokens"):
        list(moments("paged", found.spec, sizes, [1000], 1001))


def test_memory_of_a_request_is_the_same_however_long_the_model_is() -> None:
    short, long = (
        planned("Llama-3.1-8B", host(), max_model_len=n, request=THOUSAND).cell.course.end
        for n in (2048, 131_072)
    )
    assert short == long
