"""Cost models: a fit finds what steps were made of, a file keeps it, rooflines have two limits."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, RequestError
from quire.planner.hardware import roofline
from quire.planner.simulation.cost_model import (
    COEFFICIENTS,
    FittedCosts,
    RooflineCosts,
    StepWork,
    features,
    fit,
    nonnegative_least_squares,
)
from quire.planner.simulation.result import ACCURACY, Quantiles
from quire.planner.subject import find_subject

TRUTH = FittedCosts(
    step_s=1e-3,
    long_step_s=2e-3,
    sequence_s=1e-4,
    sample_s=2e-5,
    prompt_s=3e-4,
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
        read, attended = sequences * context, tokens * context
        made.append(StepWork(tokens, sequences, sampled, read, attended, prompts))
    return made


def test_a_fit_finds_what_steps_were_made_of() -> None:
    rng = np.random.default_rng(0)
    measured = [(work, TRUTH.seconds(work)) for work in works(rng)]
    found = fit(measured)
    assert found.median_error < 1e-3
    for name in COEFFICIENTS:
        assert getattr(found.costs, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name


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


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    TRUTH.write(path)
    assert FittedCosts.read(path) == TRUTH


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step_s": 1}'])
def test_what_no_calibration_wrote_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"wrong\.json"):
        FittedCosts.read(path)


def test_a_coefficient_below_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    TRUTH.write(path)
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"read_s": -1.0}))
    with pytest.raises(ConfigError, match=r"read_s=-1\.0"):
        FittedCosts.read(path)


def test_a_roofline_is_the_longer_of_two_times() -> None:
    costs = RooflineCosts(
        flops_per_s=1e12,
        bytes_per_s=1e11,
        host_bytes_per_s=1e10,
        step_s=0.0,
        weights_bytes=10**9,
        flops_per_token=1e9,
        flops_per_pair=0.0,
        entry_bytes=1000,
    )
    assert costs.seconds(StepWork(1, 1, 1, 0.0, 0.0)) == pytest.approx(
        0.01, rel=1e-4
    )  # the weights
    assert costs.seconds(StepWork(1000, 1, 1, 0.0, 0.0)) == pytest.approx(1.0)  # the products


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
