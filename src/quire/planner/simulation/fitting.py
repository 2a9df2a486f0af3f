"""From measured steps to a cost model: least differences with no coefficient below zero.

Of steps that are alike the median counts, so that what disturbed some of them does not. Errors
count in proportion to a step's time, so that short steps are as right as long ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.planner.simulation.costs import COEFFICIENTS, FittedCosts, features
from quire.planner.simulation.work import Work

Array = npt.NDArray[np.float64]

_ROUNDS = 12
_NEAR = 0.1  # errors that count squared; what is farther off counts less
_MOST_COUNTED = 8  # steps of a kind
_ALIKE = 4.0  # classes of contexts for each doubling of their length


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients, and how far measured steps are from them."""

    costs: FittedCosts
    num_steps: int
    num_kinds: int  # of steps that are alike
    median_error: float  # of a kind's time, as a share of it
    p90_error: float
    total_error: float  # of all kinds together: below zero, the model is too quick
    spread: float  # of steps that are alike: half of them are within it, as a share


def fit(measured: Sequence[tuple[Work, float]]) -> Fit:
    """Raises: RequestError for fewer steps than coefficients."""
    if len(measured) < 2 * len(COEFFICIENTS):
        raise RequestError(
            f"{len(measured)} steps are too few to fit {len(COEFFICIENTS)} coefficients: make the "
            f"KV memory larger, so that the grid of steps fits in"
        )
    kinds: dict[tuple[int, ...], list[tuple[Work, float]]] = {}
    for work, seconds in measured:
        kinds.setdefault(_kind(work), []).append((work, seconds))
    rows = np.array(
        [np.mean([features(work) for work, _ in alike], axis=0) for alike in kinds.values()]
    )
    medians = np.array([np.median([each for _, each in alike]) for alike in kinds.values()])
    counts = np.minimum([len(alike) for alike in kinds.values()], _MOST_COUNTED)
    solution = _solve(rows, medians, medians)
    for _ in range(_ROUNDS):
        # Against what it should be, not what it was: else steps that were quick would count most.
        # And not squared: what is far off was something else, as a kernel that was compiled.
        fitted = rows @ solution
        far = np.maximum(np.abs(medians / fitted - 1), _NEAR)
        solution = _solve(rows, medians, fitted * np.sqrt(far / counts))
    errors = rows @ solution / medians - 1
    spreads = [
        abs(seconds / middle - 1)
        for middle, alike in zip(medians.tolist(), kinds.values(), strict=True)
        for _, seconds in alike
    ]
    return Fit(
        costs=FittedCosts(**dict(zip(COEFFICIENTS, solution.tolist(), strict=True))),
        num_steps=len(measured),
        num_kinds=len(kinds),
        median_error=float(np.median(np.abs(errors))),
        p90_error=float(np.percentile(np.abs(errors), 90)),
        total_error=float((rows @ solution).sum() / medians.sum() - 1),
        spread=float(np.median(spreads)),
    )


def _kind(work: Work) -> tuple[int, ...]:
    context = round(_ALIKE * log2(max(1.0, work.num_read)))
    return work.num_tokens, work.num_sequences, work.num_sampled, context


def _solve(rows: Array, seconds: Array, weights: Array) -> Array:
    relative = rows / weights[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    scaled: Array = nonnegative_least_squares(relative / scale, seconds / weights) / scale
    return scaled


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """x ≥ 0 with the least |matrix·x − target|.

    Source: Lawson and Hanson, Solving Least Squares Problems, algorithm NNLS.
    """
    count = matrix.shape[1]
    solution, passive = np.zeros(count), np.zeros(count, bool)
    for _ in range(3 * count):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-10:
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            falling = passive & (trial <= 0)
            if not falling.any():
                solution = trial
                break
            # Go towards it until the first one is zero, and leave that one there.
            steps = solution[falling] / (solution[falling] - trial[falling])
            solution = solution + min(1.0, float(steps.min())) * (trial - solution)
            passive &= solution > 1e-12
            solution[~passive] = 0.0
    return solution
