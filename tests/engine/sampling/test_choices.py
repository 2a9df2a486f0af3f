"""How a step's rows are worked on: what is held, what goes over, and what is waited for.

What is chosen in the end is judged by the twin, in ``test_sampler``.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.covering import examples
from engine.sampling.cases import (
    HAS_GPU,
    any_batch,
    assert_follows,
    plan_of,
    row_of,
    rows,
    sequence,
)
from quire.devices import Results, to_device
from quire.engine.sampling import DEAREST, LogitsSampler, choices
from quire.engine.sampling.draws import FEW, Filters, cut, floors_by_sorting, floors_of_largest
from quire.engine.sampling.rng import padded
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import PromptRows, Sampled, StepPlan

CPU = torch.device("cpu")
DEVICES = [CPU, *([pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)] if HAS_GPU else [])]
devices = pytest.mark.parametrize("device", DEVICES, ids=str)
EOS = frozenset([0, 3])


@pytest.mark.gpu
def test_a_gpu_was_there() -> None:
    if not HAS_GPU:
        pytest.skip("no GPU: nothing here is known of sampling on one, only of the same operations")


# -- selected or sorted ---------------------------------------------------------------------------


@st.composite
def any_weights(draw: st.DrawFn) -> tuple[Tensor, Filters]:
    """Whole multiples of 1/64, so that sums are exact however they are made; many are equal."""
    size = draw(st.sampled_from([1, 3, 100, 128, 129, 400]))
    num_rows = draw(st.integers(1, 4))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = numbers.integers(0, draw(st.sampled_from([2, 5, 65])), (num_rows, size)) / 64
    weights[:, 0] = 1.0
    column = {"min_size": num_rows, "max_size": num_rows}
    top_k = draw(st.lists(st.integers(1, size), **column))
    # The eighth, so that a share falls on sums too.
    tails = draw(st.lists(st.integers(0, 7), **column))
    min_p = draw(st.lists(st.sampled_from([0.0, 1 / 64, 0.3, 1.0]), **column))
    return padded(torch.from_numpy(weights).float()), Filters(
        torch.tensor(top_k), torch.tensor(tails).double() / 8, torch.tensor(min_p)
    )


def floor_by_definition(weights: list[float], top_k: int, tail: float, min_p: float) -> float:
    """The least weight that is kept: of the smallest those go that add up to the tail at most."""
    floor = max(min_p, sorted(weights)[-top_k])
    left = sorted(weight for weight in weights if weight >= floor)
    gone = 0.0
    for weight in left:
        gone += weight
        if gone > tail * math.fsum(left):
            break
    return max(floor, weight)


@devices
@given(given_weights=any_weights())
@settings(max_examples=examples(70, of=200))
def test_what_is_kept_is_the_same_sorted_or_not(
    device: torch.device, given_weights: tuple[Tensor, Filters]
) -> None:
    weights, kept = given_weights
    columns = zip(weights.tolist(), *(each.tolist() for each in kept), strict=True)
    floors = torch.tensor([floor_by_definition(*own) for own in columns])
    want = weights * (weights >= floors[:, None])
    there, kept = weights.to(device), Filters(*(each.to(device) for each in kept))
    most = int(kept.top_k.max())
    for found_floors in (floors_by_sorting(there, kept), floors_of_largest(there, kept, most)):
        found = there.clone()
        cut(found, found_floors)
        assert torch.equal(found.cpu(), want)


# -- the way through ------------------------------------------------------------------------------

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.2, "logprobs": 3},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},  # as most models recommend it
    {"top_k": FEW + 40, "min_p": 0.01, "logprobs": 0},
    {"min_p": 0.05, "frequency_penalty": 0.3},
    {"logit_bias": {5: 4.0, 7: -100.0}, "logprobs": -1},
    {},
]


def mixed_batch(vocab: int = 1000) -> tuple[list[Sequence], list[tuple[int, ...]], Tensor]:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, vocab, (len(MIXED), 30), generator=generator).tolist()
    batch = [
        sequence(prompt[:20], prompt[20:], seq_id=i, seed=i, **kind)
        for i, (prompt, kind) in enumerate(zip(prompts, MIXED, strict=True))
    ]
    drafts: list[tuple[int, ...]] = [(), (3, 4)] * (len(batch) // 2)
    return batch, drafts, rows(len(batch) + len(batch), vocab, spread=3.0)


@pytest.mark.parametrize("kind", [{"top_k": 300, "top_p": 0.9}, {"top_k": 40, "top_p": 0.9}, {}])
def test_draws_follow_the_weights_of_a_larger_vocabulary(kind: dict[str, Any]) -> None:
    """More than two blocks, so that both rounds of the race count."""
    num_draws, logits = 4000, rows(1, vocab=400, seed=3, spread=0.7)
    kept = row_of(sequence(**kind), logits[0]).kept()
    batch = [sequence(seq_id=i, **kind) for i in range(num_draws)]
    results = LogitsSampler(1).sample(logits.expand(num_draws, -1), plan_of(batch))
    counts = np.bincount([result.token_ids[0] for result in results], minlength=400)
    weights = np.array([kept.get(token, 0.0) for token in range(400)])
    groups = np.arange(400) * 40 // 400
    expected = np.bincount(groups, weights) * num_draws / weights.sum()
    assert not counts[weights == 0].any()
    assert_follows(np.bincount(groups, counts), expected)


def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows a few at a time: nothing changes."""
    batch, drafts, logits = mixed_batch()
    prompts = tuple(
        PromptRows(sequence=own, row=i, start=i, num_rows=5) for i, own in enumerate(batch[:3])
    )
    plan = StepPlan(chunks=(), draws=plan_of(batch, drafts).draws, prompt_rows=prompts)

    def sampled() -> tuple[list[Sampled], Any]:
        for own in batch:
            own.prompt_logprobs = []
        found = LogitsSampler(0, EOS).sample(logits, plan)
        return found, [own.prompt_logprobs for own in batch]

    want = sampled()
    assert all(len(found) == 5 for found in want[1][:3])
    monkeypatch.setattr(choices, "_AT_ONCE_CPU", 2500)
    assert sampled() == want


def peak_bytes(run: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return int(held.max(initial=0))


def test_no_row_takes_more_memory_than_the_dearest() -> None:
    num_rows, vocab = 8, 12_800
    logits = rows(num_rows, vocab)
    held = []
    for kind in [*MIXED, {"top_p": 0.9, "logprobs": 20}]:
        if kind.get("logprobs") != -1:
            batch = [sequence(seq_id=i, **kind) for i in range(num_rows)]
            plan, sampler = plan_of(batch), LogitsSampler()
            held.append(peak_bytes(lambda: sampler.sample(logits, plan)))  # noqa: B023
    requests = [Request(request_id=i, prompt_token_ids=(1,), params=DEAREST) for i in range(8)]
    plan = plan_of([Sequence(request, seq_id=request.request_id) for request in requests])
    dearest = peak_bytes(lambda: LogitsSampler().sample(logits, plan))
    assert max(held) <= dearest * 1.01
    assert dearest <= 25 * num_rows * vocab
    with pytest.MonkeyPatch.context() as patch:
        # A row at once: all that grows are edited logits.
        patch.setattr(choices, "_AT_ONCE_CPU", vocab)
        in_pieces = peak_bytes(lambda: LogitsSampler().sample(logits, plan))
    assert in_pieces <= 4 * num_rows * vocab + 25 * vocab + 2**16


# -- what goes over, and what is waited for -------------------------------------------------------


class NothingRead(TorchDispatchMode):
    """No operation for which a device's host would have to wait for a value."""

    WAITS = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        assert func.overloadpacket.__name__ not in self.WAITS, f"{func} waits for a value"
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):
            assert all(each is None or each.dtype is not torch.bool for each in args[1]), (
                "an index of truths waits for their number"
            )
        return func(*args, **(kwargs or {}))


@given(batch=any_batch())
@settings(max_examples=40)
def test_nothing_is_waited_for_before_all_is_under_way(batch: Any) -> None:
    sequences, drafts, logits = batch
    copies: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "to_device", counted(to_device, "there", copies))
        patch.setattr(Results, "arrive", counted(Results.arrive, "back", copies))
        with NothingRead():
            LogitsSampler(0, EOS).sample(logits, plan_of(sequences, drafts))
    assert copies in (["there", "back"], ["back"])


def test_of_plain_rows_nothing_goes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes: list[int] = []

    def spied(arrays: list[Any], device: torch.device) -> list[Tensor]:
        num_bytes.append(sum(array.nbytes for array in arrays))
        return to_device(arrays, device)

    monkeypatch.setattr(choices, "to_device", spied)
    sampler = LogitsSampler()
    sampler.sample(rows(4), plan_of([sequence(seq_id=i, temperature=0.0) for i in range(4)]))
    assert num_bytes == []
    for vocab in (50, 5000):  # what goes over does not grow with the vocabulary
        sampler.sample(rows(4, vocab), plan_of([sequence(seq_id=i, top_p=0.9) for i in range(4)]))
    assert num_bytes[0] == num_bytes[1] <= 4 * 40


def counted(function: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return call


def test_a_long_row_has_the_same_norm_beside_others() -> None:
    """To the bit: torch's threads share the sum of a single long row, and not those of several."""
    logits = torch.randn(4, 50_001, generator=torch.Generator().manual_seed(0))

    def norms(rows: Tensor) -> list[float]:
        results = Results(CPU)
        described = choices.describe(rows, rows.argmax(-1), 1, results)
        found: list[float] = results.arrive()[described.norms].tolist()
        return found

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert norms(logits) == [norm for row in logits for norm in norms(row[None])]
    finally:
        torch.set_num_threads(before)
