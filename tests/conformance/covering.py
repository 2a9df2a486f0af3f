"""Samples of a grid in which every pair of levels meets: most defects need no more than two.

Greedy, and the same on every machine: a row is the one of some random candidates that has the most
pairs that are still missing.
"""

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[str, Any]
_RUNS_ALL = "QUIRE_TESTS_RUN_ALL"


def cover(factors: Mapping[str, Sequence[Any]], *, fixed: Sequence[str] = ()) -> list[Row]:
    """Rows in which each pair of levels of two factors occurs.

    The levels of the ``fixed`` factors come first in every combination; if that is not enough for
    all pairs, more rows follow.
    """
    rows: list[Row] = []
    missing = all_pairs(factors)
    choose = random.Random(0)
    for levels in product(*(factors[name] for name in fixed)) if fixed else ():
        rows.append(_best(factors, dict(zip(fixed, levels, strict=True)), missing, choose))
        missing -= pairs_of(rows[-1])
    while missing:
        # A pair that is still missing is in the row for certain, so this ends.
        rows.append(_best(factors, dict(min(missing, key=repr)), missing, choose))
        missing -= pairs_of(rows[-1])
    return rows


def spread(factors: Mapping[str, Sequence[Any]], fixed: Sequence[str]) -> list[Row]:
    """Every combination of the ``fixed`` factors once, with as many other pairs as that allows."""
    count = len(list(product(*(factors[name] for name in fixed))))
    return cover(factors, fixed=fixed)[:count]


def by_pairs(**factors: Sequence[Any]) -> list[Any]:
    """Every combination, for ``parametrize``: those of ``cover`` run, the others are ``full``."""
    covered = cover(factors)
    rows = [dict(zip(factors, levels, strict=True)) for levels in product(*factors.values())]
    return [
        pytest.param(*row.values(), marks=[] if row in covered else pytest.mark.full)
        for row in rows
    ]


def in_turn(
    rows: Iterable[Any],
    columns: Sequence[Any],
    *,
    each: int = 1,
    kept: Sequence[Any] | None = None,
) -> list[Any]:
    """Pairs, for ``parametrize``: a row runs with ``each`` of the columns, the next row with those
    that follow; the others are ``full``. So are all of a row that is not ``kept``, if some are.
    """
    rows, pairs, num_before = [*rows], [], 0
    for row in rows:
        runs = kept is None or row in kept
        for turn, column in enumerate(columns):
            own = runs and (turn - num_before) % len(columns) < each
            pairs.append(pytest.param(row, column, marks=[] if own else pytest.mark.full))
        num_before += each * runs
    return pairs


def only(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values, for ``parametrize``: those that are ``kept`` run, the others are ``full``."""
    return [pytest.param(v, marks=[] if v in kept else pytest.mark.full) for v in values]


def examples(num: int, *, of: int) -> int:
    """So many of a property's examples run, and ``of`` them where tests marked ``full`` do."""
    return of if _RUNS_ALL in os.environ else num


def run_all(asked: bool) -> None:
    """Say whether all of them run, before tests are imported."""
    if asked:
        os.environ[_RUNS_ALL] = "1"
    else:
        os.environ.pop(_RUNS_ALL, None)


def beyond_samples(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Cases of tests marked ``sampled(n)`` that are not among the n that run.

    Those n have as many levels of each parameter as so few can, and then as many pairs of levels.
    """
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_sampled = item.get_closest_marker("sampled") and not item.get_closest_marker("full")
        if is_sampled and isinstance(item, pytest.Function):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for several in cases.values() for item in _beyond(several)]


def _beyond(cases: list[pytest.Function]) -> list[pytest.Function]:
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    left, levels, pairs = [*cases], set[Any](), set[Any]()

    def news(case: pytest.Function) -> tuple[int, int]:
        row = _row(case)
        return len(row.items() - levels), len(pairs_of(row) - pairs)

    for _ in range(min(marker.args[0], len(cases))):
        best = max(left, key=news)  # of equals the first
        left.remove(best)
        levels |= _row(best).items()
        pairs |= pairs_of(_row(best))
    return left


def _row(case: pytest.Function) -> Row:
    return {name: repr(level) for name, level in case.callspec.params.items()}


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Any]:
    return {
        ((a, x), (b, y))
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
    }


def pairs_of(row: Mapping[str, Any]) -> set[Any]:
    return set(combinations(row.items(), 2))


def _best(
    factors: Mapping[str, Sequence[Any]], given: Row, missing: set[Any], choose: random.Random
) -> Row:
    def candidate() -> Row:
        # In the factors' own order, as the names of pairs are.
        return {n: given.get(n, choose.choice(levels)) for n, levels in factors.items()}

    return max((candidate() for _ in range(40)), key=lambda row: len(pairs_of(row) & missing))


def levels_in(rows: Iterable[Row]) -> set[tuple[str, Any]]:
    return {item for row in rows for item in row.items()}
