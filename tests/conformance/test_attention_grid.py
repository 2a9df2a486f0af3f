"""Every kind of layer in every kind of step gives what the formula gives, on each instruction set.

``make test`` runs a sample; ``make test-all`` the grid, in some minutes for each instruction set.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from attention.machines import ISAS, cpu_backend, isa_or_skip
from conformance.attention_cases import TOLERANCE, Case, error, formula
from conformance.attention_grid import SAMPLE, SAMPLED, STEP, build, grid, name_of, steps_of
from conformance.covering import Row, all_pairs, levels_in, pairs_of
from quire.attention import AttentionBackend, SdpaAttention

Threads = Callable[[int], None]


@cache
def sampled(number: int, n: int) -> tuple[Case, Row, torch.Tensor] | None:
    built = build(SAMPLE[number], steps_of(number)[n])
    return None if built is None else (*built, formula(built[0], **built[1]))


def complaint(backend: AttentionBackend, case: Case, options: Row, want: torch.Tensor) -> str:
    if backend.unsupported(case.spec, torch.device("cpu")) is not None:
        return ""
    got = case.attend(backend, **options)
    assert got.shape == want.shape
    assert got.dtype == case.q.dtype
    found = error(got, want)
    return "" if found <= TOLERANCE[got.dtype] else f"error {found:.1e}"


@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=[name_of(row) for row in SAMPLE])
def test_the_cpu_gives_what_the_formula_gives(number: int, use_threads: Threads) -> None:
    isa_or_skip(SAMPLE[number]["isa"])
    backend = cpu_backend(SAMPLE[number]["isa"])
    for n, step in enumerate(steps_of(number)):
        use_threads(step["threads"])
        if (found := sampled(number, n)) is not None:
            assert not complaint(backend, *found), step


def test_torch_gives_what_the_formula_gives() -> None:
    for number, kernel in enumerate(SAMPLE):
        for n, step in enumerate(steps_of(number)):
            if (found := sampled(number, n)) is not None:
                assert not complaint(SdpaAttention(), *found), (kernel, step)


def test_the_sample_has_every_level_and_every_pair_of_a_step() -> None:
    levels = {(name, level) for name, all_levels in SAMPLED.items() for level in all_levels}
    assert levels_in(SAMPLE) >= levels
    served: list[Any] = [step for number in range(len(SAMPLE)) for step in steps_of(number)]
    assert set().union(*map(pairs_of, served)) == all_pairs(STEP)


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
def test_the_whole_grid(isa: str, use_threads: Threads) -> None:
    isa_or_skip(isa)
    failed, served = [], 0
    for number, kernel in enumerate(grid(isa)):
        backend = cpu_backend(isa)
        for step in steps_of(number):
            use_threads(step["threads"])
            if (built := build(kernel, step)) is not None:
                served += 1
                if found := complaint(backend, *built, formula(built[0], **built[1])):
                    failed.append(f"{name_of(kernel)}, {step}: {found}")
    assert not failed, f"{len(failed)} of {served} steps:\n" + "\n".join(failed)
