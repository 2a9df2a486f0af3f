"""Graphs of decode steps of models with recurrent layers: states of sequences and of padding."""

import logging
from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import Any

import pytest
import torch
from transformers import JambaConfig, PreTrainedModel

import pretend
from conformance.covering import only
from devices.interpreted import launch_there
from models.test_recurrent import GREEDY, HYBRIDS, JAMBA, PURE, without_a_cache
from pretend import Gpu, PretendAttention, PretendMemory
from quire import LLM, SamplingParams
from quire.engine import assembly
from quire.kv import STRATEGIES
from quire.models.cuda_graphs import CapturedDecodes
from quire.models.states import recurrent_layers as recurrent
from quire.models.states.state_batch import state_groups
from tiny import random_model
from zoo import build as zoo

MODELS = {**HYBRIDS, **PURE, "jamba": lambda: JambaConfig(**JAMBA)}
PROMPTS = [[3 + (7 * i + 5 * j) % 90 for i in range(n)] for j, n in enumerate((4, 19, 11, 1))]
SIZES: dict[str, Any] = dict(
    max_model_len=64, kv_cache_memory_bytes="16MB", max_num_seqs=4, max_num_batched_tokens=16
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Attention computes as the reference does; rows are moved by the kernel."""
    launch_there(monkeypatch)
    monkeypatch.setattr(assembly, "choose_backend", lambda *_, **__: PretendAttention())
    with pretend.cuda() as found:
        yield found


def on(gpu: Gpu, model: PreTrainedModel, **options: Any) -> LLM:
    return LLM(model.to("cuda"), provider=PretendMemory(gpu), **{**SIZES, **options})


def lfm2() -> tuple[PreTrainedModel, list[list[int]]]:
    """A small one, and what it says."""
    model = random_model(HYBRIDS["lfm2"]())
    return model, [without_a_cache(model, prompt) for prompt in PROMPTS]


def texts(llm: LLM, params: Any = GREEDY) -> list[list[int]]:
    return [list(c.token_ids) for c in llm.generate(PROMPTS, params)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", only(MODELS, "lfm2", "mamba2"))
def test_in_any_company_a_sequence_says_what_it_says_alone(
    name: str, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    """Three in a graph for four; one leaves, one makes room, one goes on to its end by itself."""
    caplog.set_level(logging.INFO)
    model = random_model(MODELS[name]())
    want = [without_a_cache(model, prompt) for prompt in PROMPTS]
    llm = on(gpu, model)
    assert "3 CUDA graphs of decode steps, up to 4 sequences" in caplog.text
    gpu.reset()
    pieces: list[list[int]] = [[] for _ in PROMPTS]
    started = [
        llm.start(
            llm.request(prompt, GREEDY),
            lambda delta: pieces[delta.index].append(delta.token_id),
            index=index,
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    for _ in range(5):
        llm.step()
    assert gpu.num_replays == 2
    assert llm.engine.scheduler.preempt_youngest(spare_oldest=True)
    llm.step()
    llm.abandon(started[0])
    while llm.step():
        pass
    assert gpu.num_replays >= 7
    assert llm.engine.scheduler.num_preemptions == 1
    assert pieces[1:] == want[1:]
    assert pieces[0] == want[0][: len(pieces[0])]
    assert llm._kv.accounting.held_bytes == 0


@pytest.mark.full
def test_states_that_a_module_keeps_itself(gpu: Gpu) -> None:
    model = zoo.tiny_model("recurrent_gemma")
    want = [without_a_cache(model, prompt) for prompt in PROMPTS]
    llm = on(gpu, model)
    gpu.reset()
    assert texts(llm) == want
    assert gpu.num_replays >= 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", only(STRATEGIES, "growing", "paged"))
@pytest.mark.parametrize("name", only(["lfm2", "mamba2"], "lfm2"))
def test_under_every_strategy(name: str, strategy: str, gpu: Gpu) -> None:
    model = random_model(MODELS[name]())
    want = [without_a_cache(model, prompt) for prompt in PROMPTS]
    llm = on(gpu, model, cache=strategy)
    gpu.reset()
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 5, 7, 2)]
    assert texts(llm, params) == [t[: p.max_tokens] for t, p in zip(want, params, strict=True)]
    assert gpu.num_replays >= 6  # of four, of three, of two and of one


def test_padding_changes_no_state(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows there are, the step's own change: others', kept ones and free ones do not."""
    own, steps = CapturedDecodes.replay, []

    def replay(self: CapturedDecodes, cache: Any, batches: Any, given: Any) -> Any:
        (group,) = state_groups(llm._kv.accounting)
        rows = cache.states(group)._rows.inner
        before = rows.clone()
        logits = own(self, cache, batches, given)
        if logits is not None:
            changed = (rows != before).any(1).nonzero()[:, 0].tolist()
            steps.append((changed, sorted(given.states.slots[0].tolist())))
        return logits

    model, want = lfm2()
    llm = on(gpu, model, cache="paged", block_size=4)
    monkeypatch.setattr(CapturedDecodes, "replay", replay)
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 9, 9, 3)]
    assert texts(llm, params) == [t[: p.max_tokens] for t, p in zip(want, params, strict=True)]
    assert {2, 3, 4} == {len(slots) for _, slots in steps}
    assert all(changed == slots for changed, slots in steps)


@pytest.mark.full
def test_who_begins_alike_goes_on_from_a_copy_of_the_state(gpu: Gpu) -> None:
    model = random_model(HYBRIDS["lfm2"]())
    begin = [3 + 7 * i % 90 for i in range(40)]
    prompts = [begin, [*begin[:36], 5, 6, 7, 8, 9], begin[:33]]
    want = [without_a_cache(model, prompt) for prompt in prompts]
    llm = on(gpu, model, cache="paged", block_size=8)
    gpu.reset()
    cached = []
    for prompt, text in zip(prompts, want, strict=True):
        (said,) = llm.generate([prompt], GREEDY)
        assert list(said.token_ids) == text
        cached.append(said.num_cached_tokens)
    assert cached == [0, 32, 32]
    # The last token of the second prompt, and of the third, goes on from what was kept.
    assert gpu.num_replays == 3 * 8 + 2


@pytest.mark.full  # without graphs: tests/models/test_recurrent.py
def test_siblings_part_from_one_state(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = lfm2()
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=7, ignore_eos=True)
    said = []
    for _ in range(2):
        llm = on(gpu, model)
        gpu.reset()
        (completion,) = llm.generate([PROMPTS[1]], params)
        said.append([choice.token_ids for choice in completion.choices])
        monkeypatch.setattr(CapturedDecodes, "replay", lambda *_: None)
    assert said[0] == said[1]
    assert len(set(said[0])) == 3


@pytest.mark.full  # without graphs: tests/models/test_recurrent.py
def test_who_makes_room_is_swapped_and_comes_back(gpu: Gpu) -> None:
    model, want = lfm2()
    llm = on(gpu, model, cache="paged", swap_space="4MB", enable_prefix_caching=False)
    scheduler = llm.engine.scheduler
    scheduler.costs.recompute_s = lambda _: inf  # type: ignore[method-assign]
    own, plans = scheduler.plan, iter(range(100))

    def plan(*drafts: Any) -> Any:
        if next(plans) in (4, 7):
            scheduler._preempt(scheduler._queues.running[-1], "a test")
        return own(*drafts)

    scheduler.plan = plan  # type: ignore[method-assign]
    gpu.reset()
    assert texts(llm) == want
    assert scheduler.statistics.num_swaps == 2
    assert gpu.num_replays >= 8


@pytest.mark.full
def test_a_texts_first_token_has_no_state_and_is_not_replayed(gpu: Gpu) -> None:
    model, _ = lfm2()
    want = without_a_cache(model, [5])
    llm = on(gpu, model)
    gpu.reset()
    (said,) = llm.generate([[5]], GREEDY)
    assert list(said.token_ids) == want
    assert gpu.num_replays == GREEDY.max_tokens - 1


def test_a_step_copies_once_and_waits_once(gpu: Gpu) -> None:
    """Where states are is told with all else, of steps that are replayed and of others."""
    model, _ = lfm2()
    llm = on(gpu, model)
    counts: list[tuple[int, int]] = []
    llm.engine.watch = lambda plan: counts.append((len(gpu.waits), gpu.num_uploads))
    gpu.reset()
    texts(llm)
    counts.append((len(gpu.waits), gpu.num_uploads))
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)]
    assert len(steps) > 8
    assert max(waits for waits, _ in steps) <= 1
    assert {uploads for _, uploads in steps} == {1}


@pytest.mark.full  # without states: test_captured.py
def test_a_cache_that_began_anew_is_captured_anew(gpu: Gpu) -> None:
    """In the middle of a step, for the states that its sequences then have."""
    model, want = lfm2()
    llm = on(gpu, model)
    assert texts(llm) == want
    llm.engine.begin_anew()
    assert texts(llm) == want
    captured = llm.engine._runner._captured  # type: ignore[attr-defined]
    assert captured._works
    assert len(captured._graphs) >= 1


@pytest.mark.full
def test_a_mixer_that_asks_the_host_runs_without(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    model, want = lfm2()
    projection = model.model.layers[1].conv.out_proj

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return projection(x) if bool((x == x).all()) else x

    model.model.layers[1].conv.out_proj = Asks()
    projection.to("cuda")
    llm = on(gpu, model)
    gpu.reset()
    assert texts(llm) == want
    assert not gpu.num_replays
    said = [r.message for r in caplog.records if "CUDA graphs" in r.message]
    assert len(said) == 1
    assert "not permitted when stream is capturing" in said[0]


@pytest.mark.full
def test_where_no_kernel_leaves_out_padding_there_are_none(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(recurrent, "find_padded_rows", lambda _: "Triton cannot be imported")
    model, want = lfm2()
    llm = on(gpu, model)
    assert "states of padding cannot be left out: Triton cannot be imported" in caplog.text
    gpu.reset()
    assert texts(llm) == want
    assert not gpu.num_replays


def test_a_model_that_never_attends_asks_no_backend(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    launch_there(monkeypatch)
    monkeypatch.setattr("quire.devices.why_no_memory", lambda device: None)
    llm = on(gpu, random_model(PURE["mamba2"]()), attention_backend="sdpa")
    gpu.reset()
    llm.generate(PROMPTS[:1], GREEDY)
    assert gpu.num_replays == GREEDY.max_tokens - 1
