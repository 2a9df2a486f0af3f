"""Recorded passes: what the model computes itself, and only as long as it is the same."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from conformance.covering import in_turn, only
from quire import LLM, SamplingParams
from quire.kv import STRATEGIES
from quire.models.recorded import recordings as recordings_module
from quire.models.recorded.operations import Arena
from quire.models.recorded.recordings import SIZES, Recordings
from tiny import CONFIGS, tiny_model, tokens

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (5, 17, 1, 30)]


@pytest.fixture(autouse=True)
def _recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings_module, "WORTH_IT", 1)


@cache
def shared_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Which no test changes."""
    return tiny_model(name).to(dtype)


def llm_of(model: PreTrainedModel, **options: Any) -> LLM:
    sizes = dict(max_model_len=64, kv_cache_memory_bytes="16MB", max_num_seqs=8)
    return LLM(model, **(sizes | options))


def recordings(llm: LLM) -> Recordings:
    found = llm.engine._runner._model._recordings  # type: ignore[attr-defined]
    assert isinstance(found, Recordings)
    return found


def texts(llm: LLM, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


def unrecorded_texts(model: PreTrainedModel, **options: Any) -> list[tuple[int, ...]]:
    with llm_of(model, **options) as llm:
        llm.engine._runner._model._recordings = None  # type: ignore[attr-defined]
        return texts(llm)


# -- the same tokens ------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_says_the_same(name: str) -> None:
    model = shared_model(name)
    with llm_of(model) as llm:
        got = texts(llm)
        assert recordings(llm)._made
    assert got == unrecorded_texts(model)


@pytest.mark.parametrize("name", only(CONFIGS, "llama"))
def test_models_in_bfloat16_are_recorded(name: str) -> None:
    """A row may be rounded otherwise beside more rows, so tokens may differ."""
    with llm_of(shared_model(name, torch.bfloat16)) as llm:
        texts(llm)
        assert recordings(llm)._made


@pytest.mark.parametrize(
    ("strategy", "backend"), in_turn([*STRATEGIES], ["cpu", "sdpa", "reference"])
)
def test_every_strategy_and_every_attention_says_the_same(strategy: str, backend: str) -> None:
    model = shared_model("gemma3")
    options = dict(cache=strategy, attention_backend=backend)
    with llm_of(model, **options) as llm:
        got = texts(llm)
        assert recordings(llm)._made
    assert got == unrecorded_texts(model, **options)


@pytest.mark.parametrize("kept_as", ["int8_per_token_head", "fp8"])
def test_codes_are_written_the_same(kept_as: str) -> None:
    model = shared_model("qwen3")
    with llm_of(model, kv_cache_dtype=kept_as) as llm:
        got = texts(llm)
    assert got == unrecorded_texts(model, kv_cache_dtype=kept_as)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 13, 33, 128, 129])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_are_those_of_the_model(name: str, num_tokens: int) -> None:
    """Of a step that has fewer rows than its recording; of one with more there is none."""
    with llm_of(shared_model(name), max_model_len=256) as llm:
        recordings(llm)._made.clear()  # what the trial at load has led to
        prompt = [tokens(1, num_tokens, seed=3)[0].tolist()]
        told = llm.generate(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=0))[0]
        made = recordings(llm)._made
        assert [size for size in made if size >= 14] == [
            size for size in SIZES if size >= max(14, num_tokens)
        ][: num_tokens > 12]
        llm.engine._runner._model._recordings = None  # type: ignore[attr-defined]
        want = llm.generate(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=0))[0]
    assert told.token_ids == want.token_ids
    assert told.prompt_logprobs is not None
    assert want.prompt_logprobs is not None
    for got, other in zip(told.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
        assert got is not None
        assert other is not None
        assert got.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_cache_that_begins_anew_is_read_where_it_lies() -> None:
    with llm_of(shared_model("llama")) as llm:
        want = texts(llm)
        llm._kv.restart()
        llm.engine.scheduler.restart(llm._kv.accounting)
        assert texts(llm) == want


def test_a_smaller_step_is_played_by_a_larger_recording_until_it_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with llm_of(shared_model("llama")) as llm:
        found = recordings(llm)
        texts(llm)
        assert set(found._made) >= {4}
        monkeypatch.setattr(recordings_module, "WORTH_IT", 2)
        step: Any = SimpleNamespace(specs={})
        assert 3 not in found._made
        assert found.find(step, 3) is found._made[4]
        assert found._asked[3] == 1


# -- a model that is changed ----------------------------------------------------------------------


def change_in_place(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj.weight.data.mul_(-1.5)


def change_parameter(model: PreTrainedModel) -> None:
    norm = model.model.layers[2].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 3)


def change_place(model: PreTrainedModel) -> None:
    embedding = model.get_input_embeddings()
    embedding.weight.data = embedding.weight.data.flip(0).clone()


def change_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = model.model.layers[3].mlp


def change_forward(model: PreTrainedModel) -> None:
    layer = model.model.layers[1].mlp
    own = layer.forward
    layer.forward = lambda x: 2 * own(x)


CHANGES = (change_in_place, change_parameter, change_place, change_layer, change_forward)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_holds_from_the_next_step_on(change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_model("llama")
    with llm_of(model, enable_prefix_caching=False) as llm:
        before = texts(llm)
        assert recordings(llm)._made
        change(model)
        after = texts(llm)
    assert after != before
    assert after == unrecorded_texts(model)


def test_hooks_are_called_as_long_as_they_are_there() -> None:
    model = tiny_model("llama")
    seen: list[int] = []
    with llm_of(model) as llm:
        want = texts(llm)
        handle = model.model.layers[2].register_forward_hook(lambda *_: seen.append(1))
        assert texts(llm) == want
        num_passes = len(seen)
        assert num_passes >= GREEDY.max_tokens
        assert not recordings(llm)._made
        handle.remove()
        assert texts(llm) == want
        assert recordings(llm)._made
        assert len(seen) == num_passes


def test_another_number_of_threads_is_recorded_anew() -> None:
    before = torch.get_num_threads()
    with llm_of(shared_model("llama")) as llm:
        try:
            torch.set_num_threads(1)
            want = texts(llm)
            made = list(recordings(llm)._made.values())
            torch.set_num_threads(2)
            assert texts(llm) == want
            assert not any(each is old for each in recordings(llm)._made.values() for old in made)
        finally:
            torch.set_num_threads(before)


# -- models that cannot be recorded ---------------------------------------------------------------


def looks_at_its_input(x: Tensor) -> Tensor:
    return x * 2 if bool((x > 0).any()) else x


def picks_some(x: Tensor) -> Tensor:
    return x + x[x > 0].mean()


def throws_dice(x: Tensor) -> Tensor:
    return x + 0 * torch.rand_like(x)


COUNTER = torch.zeros(1)


def counts(x: Tensor) -> Tensor:
    COUNTER.add_(1)
    return x


def remembers(x: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006 - it is meant to
    seen.append(x.sum())
    return x + 0.01 * len(seen)


REASONS = {
    looks_at_its_input: "depends on its input",
    picks_some: "depends on its input",
    throws_dice: "depends on its input",
    counts: "changes what outlives the pass",
    remembers: "gives something else than the model",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("does", REASONS)
def test_what_differs_from_step_to_step_is_not_recorded(
    does: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("qwen3")
    kind = type(model.model.layers[0].mlp.act_fn)
    own = kind.forward
    with llm_of(model) as llm:
        recordings(llm)._made.clear()  # of the trial; from here on it does something else
        monkeypatch.setattr(kind, "forward", lambda self, x: does(own(self, x)))
        llm.engine._runner._model._stand_ins = None  # type: ignore[attr-defined]
        with caplog.at_level(logging.INFO, "quire"):
            texts(llm)
        assert not recordings(llm)._works
        assert not recordings(llm)._made
    assert REASONS[does] in caplog.text


def test_a_recording_that_finds_no_memory_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm_of(shared_model("llama")) as llm:
        found, own = recordings(llm), Recordings._make
        failures = iter([True, True])

        def make(self: Recordings, *arguments: Any) -> Any:
            if next(failures, False):
                raise MemoryError
            return own(self, *arguments)

        monkeypatch.setattr(Recordings, "_make", make)
        got = texts(llm)
        assert found._made
    assert got == unrecorded_texts(shared_model("llama"))


# -- memory ---------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


def still_there(held: list[tuple[Tensor, int]]) -> bool:
    return all(bool((tensor == written).all()) for tensor, written in held)


@given(st.lists(st.tuples(SHAPES, st.booleans(), st.integers(0, 9)), max_size=40))
def test_no_two_tensors_that_live_share_a_piece(steps: list[tuple[list[int], bool, int]]) -> None:
    pieces = Arena()
    held: list[tuple[Tensor, int]] = []  # with what was written to it
    for number, (shape, turned, dropped) in enumerate(steps):
        like = torch.empty(shape, dtype=(torch.float32, torch.int64)[number % 2])
        like = like.transpose(0, -1) if turned else like
        made = pieces.like(like).fill_(number)
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
        held.append((made[0], number))  # only a view of it lives on
        pieces.saw(held[-1][0])
        del made
        if dropped < len(held):
            del held[dropped]
        assert still_there(held)
    num_made = sum(map(len, pieces._free.values())) + len(pieces._lent)
    assert num_made <= len(steps)
    held.clear()
    assert not pieces._lent
    assert sum(map(len, pieces._free.values())) == num_made
