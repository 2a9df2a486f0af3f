"""Recurrent layers in packed steps: in any company each sequence says what it says alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import LinearAttentionLayer

from quire import LLM, SamplingParams
from quire.config import SpeculativeConfig
from quire.engine.beam import BeamSearchParams
from quire.engine.runner import ModelRunner
from quire.errors import ConfigError, RequestError, UnsupportedModel
from quire.models.recurrent import KEPT_STATES, States
from quire.strategies import STRATEGIES
from tiny import random_model, tiny_model

_COMMON: dict[str, Any] = dict(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_DELTA: dict[str, Any] = dict(
    head_dim=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
)
_EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2)
_MAMBA: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_expand=2
)
HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: Qwen3NextConfig(
        **_COMMON, **_DELTA, **_EXPERTS, num_experts=4, moe_intermediate_size=32
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**_COMMON, **_DELTA),
    "lfm2": lambda: Lfm2Config(**_COMMON, layer_types=["conv", "conv", "full_attention", "conv"]),
    "bamba": lambda: BambaConfig(**_COMMON, **_MAMBA, attn_layer_indices=[2]),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **_COMMON,
        **_MAMBA,
        **_EXPERTS,
        num_local_experts=4,
        shared_intermediate_size=32,
        layer_types=["mamba", "mamba", "attention", "mamba"],
    ),
    "falcon_h1": lambda: FalconH1Config(
        **_COMMON,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **_COMMON,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        hybrid_override_pattern="M*M-",
    ),
}
_PURE: dict[str, Any] = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4)
PURE: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba": lambda: MambaConfig(**_PURE),
    "mamba2": lambda: Mamba2Config(**_PURE, num_heads=2, head_dim=16, n_groups=1),
}
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
# One longer than several steps take in, one of a single token.
PROMPTS = [[3 + (7 * i + 5 * j) % 190 for i in range(n)] for j, n in enumerate((4, 23, 11, 1, 17))]


@pytest.fixture(scope="module")
def hybrid() -> PreTrainedModel:
    return random_model(HYBRIDS["granitemoehybrid"]())


@pytest.fixture(scope="module")
def alone(hybrid: PreTrainedModel) -> list[list[int]]:
    return generated(hybrid)


def generated(model: PreTrainedModel) -> list[list[int]]:
    """What Transformers makes of each prompt by itself."""
    options = dict(max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


def llm_of(model: PreTrainedModel, **options: Any) -> LLM:
    """One in which prompts come chunk by chunk, and not all at once."""
    small = dict(kv_cache_memory_bytes="16MB", max_num_seqs=4, max_num_batched_tokens=9)
    return LLM(model, max_model_len=64, **{**small, **options})


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.engine._runner
    assert isinstance(runner, ModelRunner)
    return runner


def texts(llm: LLM) -> list[list[int]]:
    return [list(c.token_ids) for c in llm.generate(PROMPTS, GREEDY)]


def forwards(model: PreTrainedModel) -> list[str]:
    """Modules with a forward that is not their class's."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


# -- the same tokens as alone ---------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
def test_in_any_company_a_sequence_says_what_it_says_alone(name: str) -> None:
    """Chunk by chunk, beside others, begun anew after it has made room, beside one that leaves."""
    model = random_model(HYBRIDS[name]())
    want = generated(model)
    assert len({token for text in want for token in text}) > 8  # it has something to say
    with llm_of(model) as llm:
        assert texts(llm) == want
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
        assert llm.engine.scheduler.preempt_youngest(spare_oldest=True)
        llm.step()
        llm.abandon(started[0])
        while llm.step():
            pass
        assert llm.engine.scheduler.num_preemptions == 1
        assert pieces[1:] == want[1:]
        assert pieces[0] == want[0][: len(pieces[0])]
        assert runner_of(llm).state_bytes == 0
        assert runner_of(llm)._model._recordings is None  # states are its own matter
    assert forwards(model) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_every_strategy(
    hybrid: PreTrainedModel, alone: list[list[int]], strategy: str
) -> None:
    with llm_of(hybrid, cache=strategy) as llm:
        assert texts(llm) == alone


def test_siblings_compute_the_prompt_themselves(hybrid: PreTrainedModel) -> None:
    """A seat for one or for all of them: the text is the same."""
    params = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
    with llm_of(hybrid) as llm:
        (together,) = llm.generate([PROMPTS[1]], params)
    with llm_of(hybrid, max_num_seqs=1) as llm:
        (one_by_one,) = llm.generate([PROMPTS[1]], params)
    assert [c.token_ids for c in together.choices] == [c.token_ids for c in one_by_one.choices]
    assert len({c.token_ids for c in together.choices}) == 3


# -- steps that fail ------------------------------------------------------------------------------


@contextmanager
def failing_once(owner: Any, name: str, at: int, *, late: bool) -> Iterator[None]:
    """The ``at``-th call of a method raises, before or after it has done its work."""
    own, left = getattr(owner, name), [at]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not late:
            raise MemoryError("before")
        result = own(*args, **kwargs)
        if left[0] == 0:
            raise MemoryError("after")
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, own)
    assert left[0] <= 0, "there were not so many calls"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_step_computed_again_gives_the_same(
    hybrid: PreTrainedModel, alone: list[list[int]], at: int, late: bool
) -> None:
    with llm_of(hybrid) as llm:
        with failing_once(llm.engine._sampler, "sample", at, late=late):
            assert texts(llm) == alone
        with failing_once(runner_of(llm), "run", at, late=late):
            assert texts(llm) == alone
        assert runner_of(llm).state_bytes == 0


def test_a_pass_that_fails_half_way_leaves_states_and_model_as_they_were(
    hybrid: PreTrainedModel, alone: list[list[int]]
) -> None:
    ids = torch.tensor([PROMPTS[0]])
    before = hybrid(ids).logits
    with llm_of(hybrid) as llm:
        last = hybrid.model.layers[3]
        left = [5]  # by then some decode and one is in the middle of its prompt

        def fail(*_: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                assert forwards(hybrid)
                raise ZeroDivisionError

        handle = last.register_forward_pre_hook(fail)
        assert texts(llm) == alone
        handle.remove()
        assert left[0] < 0
        assert forwards(hybrid) == []
        assert torch.equal(hybrid(ids).logits, before)
        stream = llm.stream(PROMPTS, GREEDY)
        got = [next(stream)]
        assert torch.equal(hybrid(ids).logits, before)  # between two steps
        got += stream
        assert [[d.token_id for d in got if d.index == i] for i in range(len(alone))] == alone


def test_a_forward_of_the_owners_own_is_used_and_stays(alone: list[list[int]]) -> None:
    model = random_model(HYBRIDS["granitemoehybrid"]())
    mixer = model.model.layers[0].mamba
    calls: list[int] = []
    own = mixer.forward

    def counting(hidden_states: torch.Tensor, cache_params: Any = None, **kwargs: Any) -> Any:
        calls.append(hidden_states.shape[1])
        return own(hidden_states, cache_params=cache_params, **kwargs)

    mixer.forward = counting
    with llm_of(model) as llm:
        calls.clear()
        assert texts(llm) == alone
    assert sum(calls) > 0
    assert mixer.forward is counting


# -- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3_next", torch.float32),
        ("lfm2", torch.bfloat16),
        ("granitemoehybrid", torch.float32),
        ("granitemoehybrid", torch.bfloat16),
    ],
)
def test_states_take_the_bytes_that_the_spec_says_and_are_given_back(
    name: str, dtype: torch.dtype
) -> None:
    model = random_model(HYBRIDS[name]()).to(dtype)
    with llm_of(model) as llm:
        runner = runner_of(llm)
        assert runner.state_bytes == 0  # nothing is left of the trial
        most = 0
        stream = llm.stream(PROMPTS, GREEDY)
        for _ in stream:
            num_running = llm.engine.scheduler.num_running
            most = max(most, runner.state_bytes)
            assert runner.state_bytes % llm.spec.state_bytes == 0
            assert runner.state_bytes <= KEPT_STATES * llm.spec.state_bytes * (num_running + 1)
        assert most > KEPT_STATES * llm.spec.state_bytes
        assert most <= llm.ledger.state_bytes == 4 * KEPT_STATES * llm.spec.state_bytes
        assert runner.state_bytes == 0
        next(llm.stream(PROMPTS, GREEDY))  # and left early
        assert runner.state_bytes == 0
        stream = llm.stream(PROMPTS, GREEDY)
        next(stream)
        assert runner.state_bytes > 0
    assert runner.state_bytes == 0


def test_who_makes_room_keeps_no_state(hybrid: PreTrainedModel) -> None:
    with llm_of(hybrid) as llm:
        stream = llm.stream([PROMPTS[0], PROMPTS[2]], GREEDY)
        for _ in range(6):
            next(stream)
        assert runner_of(llm).state_bytes == 2 * KEPT_STATES * llm.spec.state_bytes
        while llm.engine.scheduler.preempt_youngest(spare_oldest=False):
            pass
        llm.step()
        assert runner_of(llm).state_bytes == 2 * llm.spec.state_bytes  # the first chunk's
        list(stream)


def test_kv_and_states_stay_within_the_ceiling(hybrid: PreTrainedModel) -> None:
    with llm_of(hybrid, kv_cache_memory_bytes="1MB") as llm:
        states = 4 * KEPT_STATES * llm.spec.state_bytes
        capacity = llm._kv.accounting.ceiling.capacity_bytes
        assert 0 < capacity <= 10**6 - states
        row = next(line for line in llm.ledger.explain().splitlines() if "states" in line)
        assert "max_num_seqs" in row
    with pytest.raises(ConfigError, match="cannot hold the states of 4 sequences"):
        llm_of(hybrid, kv_cache_memory_bytes="100KB")


def test_a_rule_that_gives_what_is_asked_for_gives_room_for_the_states_too(
    hybrid: PreTrainedModel,
) -> None:
    with llm_of(hybrid, kv_cache_memory_bytes=None, budget="llamacpp") as llm:
        assert llm.ledger.kv_bytes == 64 * llm.spec.bytes_per_token + llm.ledger.state_bytes
        (completion,) = llm.generate([PROMPTS[0]], GREEDY)
        assert completion.finish_reason == "length"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["on", "again", "anew", "ends"]), st.integers(1, 5)
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_states_are_those_of_the_tokens_before(steps: list[tuple[int, str, int]]) -> None:
    """A step that goes on, is computed again, or begins anew finds what a list of all would say."""
    states = States()
    computed = {0: [0], 1: [0], 2: [0]}  # after how many tokens each has been, since it began
    for sequence, what, num_tokens in steps:
        been = computed[sequence]
        if what == "ends":
            states.forget(sequence)
            computed[sequence] = [0]
            continue
        if what == "anew":
            been[:] = [0]
        elif what == "again" and len(been) > 1:
            been.pop()
        start = been[-1]
        before = states.at(sequence, start)
        assert [layer.conv_states[0].item() for layer in before.values()] == [start][: len(before)]
        assert bool(before) == (start > 0)
        layer = LinearAttentionLayer()
        layer.conv_states[0] = torch.tensor([float(start + num_tokens)])
        states.put(sequence, start + num_tokens, {0: layer})
        been[:] = [start, start + num_tokens]
        assert states.num_bytes <= 3 * KEPT_STATES * 4
    for sequence in computed:
        states.forget(sequence)
    assert states.num_bytes == 0


def test_a_state_that_is_not_there_is_an_error() -> None:
    states = States()
    states.put(3, 8, {})
    with pytest.raises(RuntimeError, match=r"goes on after 5 tokens.*\[8\]"):
        states.at(3, 5)


# -- what such a model cannot have ----------------------------------------------------------------


def test_what_needs_earlier_states_is_left_out_and_said(
    hybrid: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), llm_of(hybrid, swap_space="1MB") as llm:
        assert [r.message.split(",")[0].split(": ")[1] for r in caplog.records] == [
            "no prefix caching",
            "no swap_space",
        ]
        first, again = llm.generate([PROMPTS[1]], GREEDY) + llm.generate([PROMPTS[1]], GREEDY)
        assert first.token_ids == again.token_ids
        assert again.num_cached_tokens == 0


def test_speculation_and_beams_are_refused(hybrid: PreTrainedModel) -> None:
    lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=r"layers \[0, 1, 3\].*guess was wrong"):
        llm_of(hybrid, speculative_config=lookup)
    draft = SpeculativeConfig(model=hybrid, num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=r"draft model GraniteMoeHybrid.*guess was wrong"):
        llm_of(tiny_model("llama"), speculative_config=draft)
    with llm_of(hybrid) as llm, pytest.raises(RequestError, match="beams cannot share"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=3))


@pytest.mark.parametrize("name", PURE)
def test_a_model_of_recurrent_layers_alone_is_sent_to_generate(name: str) -> None:
    message = rf"{name}: layers \[0, 1\] keep a recurrent state.*past_key_values=quire.cache"
    with pytest.raises(UnsupportedModel, match=message):
        llm_of(random_model(PURE[name]()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_continue_a_prompt_exactly_is_sent_to_generate(
    dtype: torch.dtype,
) -> None:
    """Jamba's scan begins anew with each chunk of several tokens, in Transformers itself."""
    config = JambaConfig(
        **_COMMON,
        **_EXPERTS,
        num_experts=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    )
    model = random_model(config).to(dtype)
    with pytest.raises(UnsupportedModel, match=r"1e-03 allowed.*past_key_values=quire.cache"):
        llm_of(model)
    assert forwards(model) == []


def test_a_layer_whose_state_cannot_be_reached_is_refused_by_number(
    hybrid: PreTrainedModel,
) -> None:
    model = random_model(HYBRIDS["granitemoehybrid"]())
    model.model.layers[1].mamba = torch.nn.Identity()
    with pytest.raises(UnsupportedModel, match=r"layers \[0, 1, 3\].*are layers \[0, 3\]"):
        llm_of(model)
