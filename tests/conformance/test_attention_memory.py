"""Attention reads what its queries may read, and not one bit else of the memory around it.

The kernels are the grid's sample, so that each is compiled once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.machines import cpu_backend, isa_or_skip
from conformance.attention_cases import CHUNKS, STORED, Case, error, make_case, make_spec, same_bits
from conformance.attention_grid import MIXES, SAMPLE, build, name_of
from quire.attention import AttentionBackend, SdpaAttention
from quire.attention.cpu import backend as cpu
from quire.kernels.threads import Scratch
from quire.kv import LayerView

Threads = Callable[[int], None]
# Tables with windows, and sequences that are split among threads.
STEPS = (
    {"kind": ("sliding", 70), "mix": "mixed", "strategy": "virtual"},
    {"kind": ("full", 0), "mix": "one long", "strategy": "paged"},
    {"kind": ("chunked", 100), "mix": "a long chunk", "strategy": "paged"},
    {"kind": ("sliding", 9), "mix": "later chunks", "strategy": "virtual-shared"},
)
every_kernel = pytest.mark.parametrize(
    "number", range(len(SAMPLE)), ids=[name_of(row) for row in SAMPLE]
)


@cache
def cases(number: int) -> list[tuple[Case, dict[str, Any]]]:
    """Steps for one kernel. They are left poisoned, or not: no result may tell."""
    common = {"block_size": 16, "scores": "usual"}
    return [built for step in STEPS if (built := build(SAMPLE[number], {**common, **step}))]


def backend_for(number: int) -> AttentionBackend:
    isa_or_skip(SAMPLE[number]["isa"])
    backend = cpu_backend(SAMPLE[number]["isa"])
    if reason := backend.unsupported(cases(number)[0][0].spec, torch.device("cpu")):
        pytest.skip(reason)
    return backend


@every_kernel
def test_what_no_query_may_read_changes_no_bit(number: int, use_threads: Threads) -> None:
    use_threads(2)
    backend = backend_for(number)
    for case, options in cases(number):
        case.poison()
        poisoned = case.attend(backend, **options)
        assert poisoned.isfinite().all()
        case.poison(with_byte=0)
        assert same_bits(case.attend(backend, **options), poisoned)


@pytest.mark.parametrize("strategy", STORED)
def test_poison_of_this_suite_is_poison(strategy: str) -> None:
    """With one live token poisoned too, its readers' outputs are NaN, and no others."""
    spec = make_spec("full", kv_heads=2, dims=(24, 40), dtype="float32")
    case = make_case(spec, sharing=2, strategy=strategy, chunks=CHUNKS)
    case.poison()
    clean = case.attend(SdpaAttention(), scale=0.2)
    nan = torch.full((1, 2, 40), torch.nan)
    case.storage.write(0, case.slots[1][:1], nan[:, :, :24], nan)
    got = case.attend(SdpaAttention(), scale=0.2)
    begin, end = case.batch.query_starts[1:3].tolist()
    assert got[begin:end].isnan().all()
    assert same_bits(got[:begin], clean[:begin])
    assert same_bits(got[end:], clean[end:])


@pytest.mark.sampled(9)
@every_kernel
def test_what_lies_in_fresh_working_memory_changes_no_bit(
    number: int, use_threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads get memory as it comes: all NaN here, all zeros there."""
    use_threads(2)
    backend = backend_for(number)

    def filled(byte: int) -> SimpleNamespace:
        def empty(*size: Any, **given: Any) -> torch.Tensor:
            shape = size[0] if isinstance(size[0], tuple) else size
            return torch.full(shape, byte, **given)

        return SimpleNamespace(**{**vars(torch), "empty": empty})

    for case, options in cases(number):
        found = []
        for byte in (0, 0xFF):
            monkeypatch.setattr(cpu, "torch", filled(byte))
            fresh = Scratch()
            fresh.give_back(torch.full((2**25,), byte, dtype=torch.uint8))
            monkeypatch.setattr(backend, "_scratch", fresh)
            found.append(case.attend(backend, **options))
        assert found[0].isfinite().all()
        assert same_bits(*found)


@every_kernel
def test_where_blocks_lie_changes_no_bit(number: int, use_threads: Threads) -> None:
    use_threads(2)
    backend = backend_for(number)
    case, options = cases(number)[1]
    view, tables = case.view, case.batch.tables
    order = torch.randperm(len(view.k), generator=torch.Generator().manual_seed(2))

    def moved(blocks: torch.Tensor | None) -> torch.Tensor | None:
        """Block i becomes block ``order[i]``."""
        if blocks is None:
            return None
        result = torch.empty_like(blocks)
        bits = torch.uint8 if blocks.element_size() == 1 else blocks.dtype
        result.view(bits)[order] = blocks.view(bits)
        return result

    elsewhere = LayerView(
        k=moved(view.k),
        v=moved(view.v),
        k_scale=moved(view.k_scale),
        v_scale=moved(view.v_scale),
        slots_per_row=view.slots_per_row,
    )
    there = replace(case.fresh_batch(), tables=torch.where(tables < 0, tables, order[tables]))
    got = backend.attend(case.q, elsewhere, there, spec=case.spec, **options)
    assert same_bits(got, case.attend(backend, **options))


@every_kernel
def test_the_same_call_gives_the_same_bits_on_as_many_threads(
    number: int, use_threads: Threads
) -> None:
    """The last thread merges the parts, always in their order. Other parts round otherwise."""
    backend = backend_for(number)
    for case, options in cases(number):
        first = {}
        for threads in (1, 2, 3):
            use_threads(threads)
            first[threads] = case.attend(backend, **options)
            for _ in range(3):
                assert same_bits(case.attend(backend, **options), first[threads])
            # A rounding of a weight, at most, and of the result.
            assert error(first[threads], first[1]) <= torch.finfo(case.q.dtype).eps * 8


@every_kernel
def test_a_batch_serves_every_layer_of_its_step(number: int, use_threads: Threads) -> None:
    """What is remembered of the first call does the same for the second."""
    use_threads(2)
    backend = backend_for(number)
    for case, options in cases(number):
        batch = case.fresh_batch()
        found = [
            backend.attend(q, case.view, batch, spec=case.spec, **options)
            for q in (case.q, case.q.flip(0), case.q)
        ]
        assert batch.memo
        assert same_bits(found[0], found[2])
        want = replace(case, q=case.q.flip(0)).attend(backend, **options)
        assert same_bits(found[1], want)


def test_the_longest_of_this_suite_are_split() -> None:
    """Else the tests above would say nothing about it."""
    assert max(map(sum, MIXES["one long"])) > 4 * cpu.KEYS
