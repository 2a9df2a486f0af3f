"""Cost models: a fit finds what steps were made of, a file keeps it, rooflines have two limits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, RequestError
from quire.planner.hardware import BANDWIDTH_FRACTION, roofline
from quire.planner.simulation.cost_model import (
    COEFFICIENTS,
    RECORDED_SIZES,
    FittedCosts,
    Mixture,
    Product,
    RooflineCosts,
    StepWork,
    features,
    fit,
    nonnegative_least_squares,
    played,
)
from quire.planner.simulation.result import ACCURACY, Quantiles
from quire.planner.subject import find_subject

TRUTH = FittedCosts(
    step_s=1e-3,
    long_step_s=2e-3,
    sequence_s=1e-4,
    sample_s=2e-5,
    prompt_s=3e-4,
    outlook_s=4e-4,
    token_s=1e-4,
    next_token_s=5e-5,
    further_token_s=3e-5,
    long_token_s=2e-5,
    read_s=1e-7,
    attended_s=1e-8,
)


def works(rng: np.random.Generator, count: int = 400) -> list[StepWork]:
    made = []
    for _ in range(count):
        sequences = int(rng.integers(1, 33))
        tokens = sequences + int(rng.integers(0, 256)) * int(rng.integers(0, 2))
        context = float(rng.integers(8, 2000))
        sampled = int(rng.integers(0, sequences + 1))
        prompts = int(rng.integers(0, sequences + 1))
        outlooks = int(rng.integers(0, 2))
        read, attended = sequences * context, tokens * context
        made.append(StepWork(tokens, sequences, sampled, read, attended, prompts, outlooks))
    return made


def test_a_fit_finds_what_steps_were_made_of() -> None:
    rng = np.random.default_rng(0)
    measured = [(work, TRUTH.seconds(work)) for work in works(rng)]
    found = fit(measured)
    assert found.median_error < 1e-3
    for name in COEFFICIENTS:
        assert getattr(found.costs, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name


def test_a_step_takes_as_long_as_the_recorded_pass_that_plays_it() -> None:
    rng, truth = np.random.default_rng(3), replace(TRUTH, is_recorded=True)
    measured = [(work, truth.seconds(work)) for work in works(rng)]
    found = fit(measured)
    assert found.costs.is_recorded
    assert not fit([(work, TRUTH.seconds(work)) for work in works(rng)]).costs.is_recorded
    for tokens, size in ((5, 6), (64, 64), (65, 80), (127, 128), (129, 129)):
        work, as_played = (StepWork(n, 2, 2, 500.0, 500.0, 1) for n in (tokens, size))
        assert played(work) == as_played
        assert truth.seconds(work) == TRUTH.seconds(as_played)
        assert found.costs.seconds(work) == pytest.approx(truth.seconds(work), rel=1e-2)


def test_a_pass_of_a_size_of_its_own_takes_what_it_takes() -> None:
    """Kernels take four rows at once: a pass of three may take longer than one of four."""
    beyond_s = [0.0] * len(RECORDED_SIZES)
    beyond_s[RECORDED_SIZES.index(3)], beyond_s[RECORDED_SIZES.index(4)] = 6e-4, -2e-4
    truth = replace(TRUTH, is_recorded=True, beyond_s=tuple(beyond_s))
    three = StepWork(3, 3, 3, 200.0, 200.0)
    assert truth.seconds(three) == pytest.approx(TRUTH.seconds(three) + 6e-4)
    rng = np.random.default_rng(4)
    few = [
        StepWork(tokens, tokens, tokens, tokens * context, tokens * context)
        for tokens in range(1, 13)
        for context in (16.0, 100.0, 300.0, 900.0)
    ]
    found = fit([(work, truth.seconds(work)) for work in few + works(rng)])
    for tokens in range(1, 13):
        work = StepWork(tokens, tokens, tokens, 200.0, 200.0)
        assert found.costs.seconds(work) == pytest.approx(truth.seconds(work), rel=0.02), tokens


def test_a_size_differs_only_by_what_its_kinds_have_in_common() -> None:
    """Of four kinds of a size one was disturbed by 3 ms, and one ran quicker by nothing of note."""
    truth = replace(TRUTH, is_recorded=True)
    kinds = [StepWork(48, n, n, 48.0 * n, 48.0 * n, 1) for n in (2, 4, 8, 16)]
    measured = [(work, truth.seconds(work)) for work in works(np.random.default_rng(5))]
    measured += [(work, truth.seconds(work) + late_s) for work, late_s in zip(
        kinds, (3e-3, 0.0, -1e-6, 0.0), strict=True
    )]  # fmt: skip
    at_48 = fit(measured).costs.beyond_s[RECORDED_SIZES.index(48)]
    assert abs(at_48) < 1e-4


def test_recorded_passes_are_of_the_sizes_that_a_fit_knows() -> None:
    from quire.models.recorded.recordings import SIZES

    assert SIZES == RECORDED_SIZES


def test_a_fit_is_not_led_astray_by_what_disturbed_some_steps() -> None:
    rng = np.random.default_rng(1)
    measured = []
    for work in works(rng):
        slow = 10.0 if rng.random() < 0.05 else 1.0
        measured.append((work, slow * TRUTH.seconds(work) * float(rng.uniform(0.98, 1.02))))
    found = fit(measured)
    fresh = works(np.random.default_rng(2), 50)
    errors = [found.costs.seconds(work) / TRUTH.seconds(work) - 1 for work in fresh]
    assert np.median(np.abs(errors)) < 0.03


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(RequestError, match="too few"):
        fit([(StepWork(1, 1, 1, 1.0, 1.0), 0.01)] * 3)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_nonnegative_least_squares_is_the_best_there_is(seed: int) -> None:
    """No step into the allowed region makes it better (the conditions of Karush, Kuhn, Tucker)."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
    solution = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ solution - target)
    assert (solution >= 0).all()
    assert (gradient > -1e-7).all()
    assert abs(gradient @ solution) < 1e-7


def test_features_are_what_seconds_adds_up() -> None:
    for work in works(np.random.default_rng(3), 40):
        terms = (getattr(TRUTH, n) * f for n, f in zip(COEFFICIENTS, features(work), strict=True))
        assert sum(terms) == pytest.approx(TRUTH.seconds(work))


ALL = len(RECORDED_SIZES)


@pytest.mark.parametrize("beyond_s", [(), tuple(n * 1e-4 for n in range(-1, ALL - 1))])
def test_a_calibration_is_read_as_it_was_written(tmp_path: Path, beyond_s: Any) -> None:
    path, written = tmp_path / "here.json", replace(TRUTH, is_recorded=True, beyond_s=beyond_s)
    written.write(path)
    assert FittedCosts.read(path) == written


@pytest.mark.parametrize("beyond_s", [None, [1.0], ["a"] * ALL, [1e400] * ALL, [10**400] * ALL])
def test_what_passes_take_beyond_is_checked(tmp_path: Path, beyond_s: Any) -> None:
    path = tmp_path / "here.json"
    TRUTH.write(path)
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"beyond_s": beyond_s}))
    with pytest.raises(ConfigError, match="beyond_s"):
        FittedCosts.read(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step_s": 1}'])
def test_what_no_calibration_wrote_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"wrong\.json"):
        FittedCosts.read(path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"about": "x"}, "about an object"),
        ({"is_recorded": "false"}, "is_recorded"),
        ({"step_s": 10**400}, "step_s"),
        ({"door_busy_s": -0.001}, "door_busy_s"),
        ({"is_recorded": True, "beyond_s": [-1.0] * ALL}, "a step of 1 tokens"),
        (dict.fromkeys(COEFFICIENTS, 0), "a step of 1 tokens"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    path = tmp_path / "here.json"
    TRUTH.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(ConfigError, match=said):
        FittedCosts.read(path)


def test_a_coefficient_below_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    TRUTH.write(path)
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"read_s": -1.0}))
    with pytest.raises(ConfigError, match=r"read_s=-1\.0"):
        FittedCosts.read(path)


def costs_of(**given: Any) -> RooflineCosts:
    standing: dict[str, Any] = {
        "flops_per_s": 1e12,
        "bytes_per_s": 1e11,
        "host_bytes_per_s": 1e10,
        "step_s": 0.0,
        "products": (Product(num_bytes=10**9, flops_per_token=1e9, flops_per_s=1e12),),
        "head": Product(num_bytes=10**8, flops_per_token=1e8, flops_per_s=1e12),
        "flops_per_pair": 0.0,
        "entry_bytes": 1000,
    }
    return RooflineCosts(**standing | given)


def test_a_roofline_is_the_longer_of_two_times() -> None:
    costs = costs_of()
    # the weights and the head
    assert costs.seconds(StepWork(1, 1, 1, 0.0, 0.0)) == pytest.approx(0.011, rel=1e-4)
    # the products, and the entries that are written
    assert costs.seconds(StepWork(1000, 1, 1, 0.0, 0.0)) == pytest.approx(1.001, rel=1e-4)
    # a step within a prompt makes no logits
    assert costs.seconds(StepWork(1, 1, 0, 0.0, 0.0)) == pytest.approx(0.01, rel=1e-4)


def test_states_are_read_and_written_for_each_sequence() -> None:
    few, many = (StepWork(count, count, 0, 0.0, 0.0) for count in (1, 11))
    costs = costs_of(products=(), state_bytes=10**7)
    added = costs.seconds(many) - costs.seconds(few)
    assert added == pytest.approx(10 * 2 * 10**7 / 1e11 + 10 * 1000 / 1e11)


@settings(max_examples=30, deadline=None)
@given(
    num_experts=st.integers(1, 64),
    share=st.floats(0, 1),
    skew=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    num_tokens=st.integers(0, 200),
)
def test_a_step_touches_the_experts_that_its_tokens_choose(num_experts, share, skew, num_tokens):
    num_chosen = max(1, round(share * num_experts))
    mixture = Mixture(num_experts, num_chosen, skew)
    touched = mixture.touched(num_tokens)
    assert touched <= mixture.touched(num_tokens + 1) + 1e-9
    assert -1e-9 <= touched <= num_experts + 1e-9
    assert mixture.touched(1) == pytest.approx(num_chosen)
    # What is preferred is chosen again, so that fewer are touched than if all are chosen alike.
    assert touched <= Mixture(num_experts, num_chosen).touched(num_tokens) + 1e-6


def test_the_experts_of_a_step_are_as_many_as_are_drawn() -> None:
    rng = np.random.default_rng(0)
    for num_tokens in (1, 7, 40):
        drawn = [
            len({int(each) for _ in range(num_tokens) for each in rng.choice(64, 4, replace=False)})
            for _ in range(400)
        ]
        expected = Mixture(64, 4).touched(num_tokens)
        assert float(np.mean(drawn)) == pytest.approx(expected, rel=0.03)


def test_a_mixture_reads_what_one_token_chooses_and_in_the_end_all() -> None:
    """Of Qwen3-30B-A3B's 30.5 billion weights a token is multiplied by three."""
    subject = find_subject("Qwen3-30B-A3B")
    costs = roofline(subject, subject.spec, "h200", 1)

    def seconds(num_tokens: int) -> float:
        return costs.seconds(StepWork(num_tokens, num_tokens, num_tokens, 0.0, 0.0))

    active_bytes = 2 * subject.num_active_parameters
    assert seconds(1) - costs.step_s == pytest.approx(active_bytes / costs.bytes_per_s, rel=0.01)
    read_bytes = subject.own.weights_bytes - subject.weights.table
    assert seconds(128) - costs.step_s == pytest.approx(read_bytes / costs.bytes_per_s, rel=0.05)
    skewed = roofline(subject, subject.spec, "h200", 1, expert_skew=1.0)
    work = StepWork(32, 32, 32, 0.0, 0.0)
    assert skewed.seconds(work) < costs.seconds(work)
    with pytest.raises(ConfigError, match="--expert-skew -1"):
        roofline(subject, subject.spec, "h200", 1, expert_skew=-1)


# layers that attend × query heads × (2 × width of a query + 2 × width of a result), by hand.
PAIR_FLOPS = {
    "Qwen3-4B": 36 * 32 * 4 * 128,
    "Llama-3.1-8B": 32 * 32 * 4 * 128,
    "DeepSeek-V3": 61 * 128 * (2 * (512 + 64) + 2 * 512),  # latents, absorbed
    "Qwen3-Next-80B-A3B-Thinking": 12 * 16 * 4 * 256,  # one layer in four
    "gemma-3-27b-it": 62 * 32 * 4 * 128,
}


@pytest.mark.parametrize("name", PAIR_FLOPS)
def test_a_pair_costs_what_its_layers_compute(name: str) -> None:
    subject = find_subject(name)
    assert subject.pair_flops == PAIR_FLOPS[name]
    assert roofline(subject, subject.spec, "h200", 1).flops_per_pair == PAIR_FLOPS[name]


def test_an_untied_embedding_is_neither_read_nor_multiplied() -> None:
    subject = find_subject("Llama-3.1-8B")
    costs = roofline(subject, subject.spec, "h100", 1)
    table = 128_256 * 4096
    read = sum(each.num_bytes for each in costs.products) + costs.head.num_bytes
    assert read == 2 * (subject.num_parameters - table)
    multiplied = sum(each.flops_per_token for each in costs.products)
    assert multiplied == 2 * (subject.num_parameters - 2 * table)
    assert costs.head.flops_per_token == 2 * table


def test_ranks_share_the_weights_and_take_time_to_exchange() -> None:
    subject = find_subject("Llama-3.3-70B-Instruct")
    one, four = (roofline(subject, subject.spec, "h100", ranks) for ranks in (1, 4))
    assert 4 * four.products[0].num_bytes == one.products[0].num_bytes
    assert one.exchange_s_per_token == 0
    assert four.step_s > one.step_s
    # two all-reduces a layer of 8,192 elements of two bytes, sent 2 × 3/4 times
    sent = 80 * 2 * 8192 * 2 * 1.5
    assert four.exchange_s_per_token == pytest.approx(sent / (BANDWIDTH_FRACTION * 450e9))


def test_a_device_without_a_known_speed_is_refused_with_the_way_out() -> None:
    subject = find_subject(None)
    with pytest.raises(ConfigError, match="--calibrate"):
        roofline(subject, subject.spec, "abacus", 1)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=200),
    percentile=st.sampled_from([1, 50, 90, 99, 100]),
)
def test_a_percentile_is_near_a_value_that_was_there(values, percentile) -> None:
    several = Quantiles()
    for value in values:
        several.note(value)
    exact = float(np.percentile(values, percentile, method="inverted_cdf"))
    assert several.percentile(percentile) == pytest.approx(exact, rel=2.1 * ACCURACY)
