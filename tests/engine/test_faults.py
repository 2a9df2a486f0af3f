"""What fails in the middle of a step: the others go on, and nothing is lost or held."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.covering import only
from engine.simulation import replay
from engine.test_llm import GREEDY, ids, prompts, small
from quire import LLM
from quire.engine.outputs import TextDelta
from quire.engine.step_plan import StepPlan
from quire.kv import STRATEGIES
from quire.models.recorded import recordings

BRIEF = replace(GREEDY, max_tokens=5)


class FailingOperators(TorchDispatchMode):
    """Counts torch's operators; the ``failing``-th one finds no memory."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.failing, self.num_called = failing, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_called += 1
        if self.num_called == self.failing:
            raise MemoryError(f"operator {self.failing}, {func}")
        return func(*args, **(kwargs or {}))


def finished(
    llm: LLM, failing: int, before: Callable[[], object] = lambda: None
) -> tuple[list[tuple[int, ...]], int]:
    """The texts, if in the third step an operator fails; and how many that step has."""
    deltas: list[Any] = []
    sequences = [
        sequence
        for index, prompt in enumerate(prompts())
        for sequence in llm.start(llm.request(prompt, BRIEF), deltas.append, index=index)
    ]
    llm.step()
    llm.step()
    before()
    with FailingOperators(failing) as operators:
        llm.step()
    while llm.step():
        pass
    told = [tuple(s.output_token_ids) for s in sequences]
    heard = [tuple(d.token_id for d in deltas if d.index == i) for i in range(len(told))]
    assert heard == told
    assert {s.finish_reason for s in sequences} == {"length"}
    return told, operators.num_called


def test_an_operator_without_memory_costs_no_request_a_token() -> None:
    with small(enable_prefix_caching=False) as llm:
        want = ids(llm.generate(prompts(), BRIEF))
        told, num_operators = finished(llm, failing=-1)
        assert told == want
        assert num_operators > 50
        for failing in range(1, num_operators + 1, 2):
            assert finished(llm, failing)[0] == want, failing
            usage = llm.usage()
            assert usage.num_sequences == usage.used_bytes == usage.committed_bytes == 0


def test_a_recording_without_memory_costs_no_request_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is made in the third step, and some operator of it or of the step itself fails."""
    monkeypatch.setattr(recordings, "WORTH_IT", 1)
    with small(enable_prefix_caching=False) as llm:
        want = ids(llm.generate(prompts(), BRIEF))
        found = llm.engine._runner._model._recordings  # type: ignore[attr-defined]
        failing = num_operators = 0  # at first none fails, so that all are counted
        while failing <= num_operators:
            told, num_called = finished(llm, failing, before=found._made.clear)
            assert told == want, failing
            assert found._works
            num_operators = max(num_operators, num_called)
            failing += 61
        assert num_operators > 500


VERBS = (
    "add", "match_prefix", "try_extend", "try_extend_each", "mark_computed", "fork", "trim", "free",
    "drain",
)  # fmt: skip


class FailingVerbs:
    """Counts the calls of an accounting's verbs; the ``failing``-th fails, before or after."""

    def __init__(self, accounting: Any, failing: int, *, after: bool) -> None:
        self.failing, self.after, self.num_called = failing, after, 0
        for name in VERBS:
            setattr(accounting, name, self._counted(name, getattr(accounting, name)))

    def _counted(self, name: str, verb: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.num_called += 1
            fails = self.num_called == self.failing
            result = None if fails and not self.after else verb(*arguments, **options)
            if fails:
                raise MemoryError(f"call {self.failing}, {name}")
            return result

        return call


@pytest.mark.parametrize(
    ("strategy", "after"),
    [
        ("paged", True),
        pytest.param("growing", False, marks=pytest.mark.full),
        pytest.param("paged", False, marks=pytest.mark.full),
        pytest.param("growing", True, marks=pytest.mark.full),
    ],
)
def test_accounting_without_memory_costs_no_request_a_token(strategy: str, after: bool) -> None:
    params = replace(GREEDY, n=2, max_tokens=6)
    with small(cache=strategy) as llm:
        want = [c.choices for c in llm.generate(prompts(), params)]
        failing = num_called = 0  # at first none fails, so that all are counted
        while failing <= num_called:
            llm._kv.restart()
            llm.engine.scheduler.restart(llm._kv.accounting)
            deltas: list[TextDelta] = []
            started = [
                llm.start(llm.request(prompt, params), deltas.append, index=index)
                for index, prompt in enumerate(prompts())
            ]
            calls = FailingVerbs(llm._kv.accounting, failing, after=after)
            while llm.step():
                llm.engine.scheduler.check()
            for index, own in enumerate(started):
                for sequence, choice in zip(own, want[index], strict=True):
                    told = [d for d in deltas if (d.index, d.choice) == (index, sequence.index)]
                    heard = tuple(token for delta in told for token in delta.token_ids)
                    assert heard == tuple(sequence.output_token_ids) == choice.token_ids, failing
            num_called = max(num_called, calls.num_called)
            failing += 1
        assert failing > 30


@contextmanager
def spoiled(llm: LLM, prompt: list[int], how: Any) -> Iterator[None]:
    """While it lasts, the logits of the sequences that begin so are what ``how`` makes of them."""
    run = llm.engine._runner.run

    def spoiling(plan: StepPlan) -> torch.Tensor:
        logits = run(plan).clone()
        for draw in plan.draws:
            if list(draw.sequence.request.prompt_token_ids) == prompt:
                logits[draw.row] = how(logits[draw.row])
        return logits

    llm.engine._runner.run = spoiling  # type: ignore[method-assign]
    yield
    llm.engine._runner.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("value", only([float("-inf"), float("inf")], float("inf")))
@pytest.mark.parametrize("strategy", only(STRATEGIES, "contiguous"))
def test_logits_that_are_no_numbers_end_their_own_sequence(strategy: str, value: float) -> None:
    with small(cache=strategy) as llm:
        want = ids(llm.generate(prompts(), GREEDY))
        llm.reset_prefix_cache()
        with spoiled(llm, prompts()[1], lambda row: torch.full_like(row, value)):
            got = llm.generate(prompts(), GREEDY)
        assert [c.finish_reason == "error" for c in got] == [False, True, False, False]
        assert got[1].token_ids == ()
        assert "logits" in got[1].detail
        assert [*ids(got[:1]), *ids(got[2:])] == [want[0], *want[2:]]
        assert llm.reset_prefix_cache()
        assert llm.usage().committed_bytes == 0
        assert ids(llm.generate(prompts(), GREEDY)) == want


@pytest.mark.parametrize(
    "seeds",
    [
        range(12),
        *(pytest.param(range(n, n + 344), marks=pytest.mark.full) for n in (12, 334, 656)),
    ],
)
def test_a_thousand_worlds(seeds: range) -> None:
    num_steps = sum(replay(seed) for seed in seeds)
    assert num_steps > len(seeds) * 10


def test_a_world_replays_from_its_seed() -> None:
    assert replay(7) == replay(7)
