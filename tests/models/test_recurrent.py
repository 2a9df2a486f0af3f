"""Recurrent layers in packed steps: in any company each sequence says what it says alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
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

from conformance.covering import in_turn, only
from quire import LLM, SamplingParams
from quire.config import SpeculativeConfig
from quire.engine.runner import ModelRunner
from quire.engine.scheduler import NO_DRAFTS, Drafts
from quire.engine.scheduling.step_costs import Prices
from quire.engine.step_plan import StepPlan
from quire.errors import ConfigError, UnsupportedModel
from quire.kv import STRATEGIES
from quire.kv.layout import slot_bytes
from quire.sampling_params import BeamSearchParams
from quire.spec import ModelSpec, RecurrentState
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
_CHUNK = 16  # a scan pads its tokens to so many, and compares each of them with each
_MAMBA: dict[str, Any] = dict(
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_n_groups=1,
    mamba_d_state=16,
    mamba_expand=2,
    mamba_chunk_size=_CHUNK,
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
        mamba_chunk_size=_CHUNK,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **_COMMON,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=_CHUNK,
        hybrid_override_pattern="M*M-",
    ),
}
# Their layers are those of qwen3_next, or of granitemoehybrid.
_PURE: dict[str, Any] = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4)
PURE: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba": lambda: MambaConfig(**_PURE),
    "mamba2": lambda: Mamba2Config(
        **_PURE, num_heads=2, head_dim=16, n_groups=1, chunk_size=_CHUNK
    ),
}
JAMBA: dict[str, Any] = dict(
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", only(HYBRIDS, "falcon_h1", "lfm2", "qwen3_next"))
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
        assert llm._kv.accounting.held_bytes == 0
        assert runner_of(llm)._model._recordings is None  # states are its own matter
    assert forwards(model) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", only(STRATEGIES, "contiguous", "growing"))
def test_under_every_strategy(
    hybrid: PreTrainedModel, alone: list[list[int]], strategy: str
) -> None:
    with llm_of(hybrid, cache=strategy) as llm:
        assert texts(llm) == alone


def test_siblings_share_the_prompt(hybrid: PreTrainedModel) -> None:
    """A seat for one or for all of them: the text is the same."""
    params = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
    with llm_of(hybrid) as llm:
        (together,) = llm.generate([PROMPTS[1]], params)
        assert llm.engine.scheduler.statistics.num_recomputed_tokens == 0
    with llm_of(hybrid, max_num_seqs=1) as llm:
        (one_by_one,) = llm.generate([PROMPTS[1]], params)
    assert [c.token_ids for c in together.choices] == [c.token_ids for c in one_by_one.choices]
    assert len({c.token_ids for c in together.choices}) == 3


def test_beams_go_on_from_copies_of_states(hybrid: PreTrainedModel) -> None:
    """What a beam says is as likely as when it is computed without a cache."""
    with llm_of(hybrid) as llm:
        (found,) = llm.beam_search([PROMPTS[2]], BeamSearchParams(beam_width=3, max_tokens=6))
    for choice in found.choices:
        text = [*PROMPTS[2], *choice.token_ids]
        with torch.inference_mode():
            logprobs = hybrid(torch.tensor([text])).logits[0].log_softmax(-1)
        steps = range(len(PROMPTS[2]), len(text))
        total = sum(float(logprobs[at - 1, text[at]]) for at in steps)
        assert choice.cumulative_logprob == pytest.approx(total, abs=1e-3)
    assert len({choice.token_ids for choice in found.choices}) == 3


# -- prefixes -------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "paged") for name in ("falcon_h1", "mamba2")),
        ("lfm2", "virtual"),
        *(
            pytest.param(name, cache, marks=pytest.mark.full)
            for name, cache in (
                ("lfm2", "paged"),
                ("granitemoehybrid", "virtual"),
                ("granitemoehybrid", "paged"),
                ("falcon_h1", "virtual"),
                ("mamba2", "virtual"),
            )
        ),
    ],
)
def test_who_begins_alike_goes_on_from_a_copy_of_the_state(name: str, cache: str) -> None:
    model = random_model({**HYBRIDS, **PURE}[name]())
    begin = [3 + 7 * i % 90 for i in range(40)]
    prompts = [begin, [*begin[:36], 5, 6, 7, 8, 9], [*begin[:20], 11, 12], begin[:33]]
    want = [without_a_cache(model, prompt) for prompt in prompts]
    # As many tokens a block as a page of the small model's has, where pages are shared.
    with llm_of(model, cache=cache, block_size=8, max_num_batched_tokens=64) as llm:
        size = llm._kv.accounting.state_block_size
        cached = []
        for prompt, text in zip(prompts, want, strict=True):
            (said,) = llm.generate([prompt], GREEDY)
            assert list(said.token_ids) == text
            cached.append(said.num_cached_tokens)
            assert llm._kv.accounting.held_bytes == 0
        # Kept where the first prompt's last full block ends, and where those of the others do.
        assert 39 // size * size == 32
        assert cached == [0, 32, 0, 32]
        llm._kv.accounting.check()
        assert llm.reset_prefix_cache()
        assert llm._kv.accounting.usage().cached_bytes == 0


def without_a_cache(model: PreTrainedModel, prompt: list[int], count: int = 9) -> list[int]:
    """The likeliest tokens by the model's own full forward."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("at", "late"), [(3, False), (8, True)])
def test_a_step_computed_again_gives_the_same(
    hybrid: PreTrainedModel, alone: list[list[int]], at: int, late: bool
) -> None:
    with llm_of(hybrid) as llm:
        with failing_once(llm.engine._sampler, "sample", at, late=late):
            assert texts(llm) == alone
        with failing_once(runner_of(llm), "run", at, late=late):
            assert texts(llm) == alone
        assert llm._kv.accounting.held_bytes == 0
        assert not llm.engine.scheduler.suspects or llm.engine.scheduler.plan().num_tokens == 0


def test_who_fails_every_time_ends_and_the_others_go_on(
    hybrid: PreTrainedModel, alone: list[list[int]]
) -> None:
    """All states are lost with the step; each is computed alone until the guilty one is found."""
    with llm_of(hybrid) as llm:
        runner, poison = runner_of(llm), PROMPTS[1][-1]
        own = runner.run

        def run(plan: StepPlan) -> torch.Tensor:
            logits = own(plan)
            if any(poison in chunk.token_ids for chunk in plan.chunks):
                raise MemoryError("poison")
            return logits

        runner.run = run  # type: ignore[method-assign]
        said = llm.generate(PROMPTS, GREEDY)
        ends = [completion.finish_reason for completion in said]
        assert ends == ["length", "error", "length", "length", "length"]
        for index in (0, 2, 3, 4):
            assert list(said[index].token_ids) == alone[index]
        llm._kv.accounting.check()
        assert llm._kv.accounting.held_bytes == 0


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

    @wraps(own)
    def counting(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(hidden_states.shape[1])
        return own(hidden_states, *args, **kwargs)

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
        pytest.param("granitemoehybrid", torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_states_take_the_bytes_that_the_spec_says_and_are_given_back(
    name: str, dtype: torch.dtype
) -> None:
    """One row of pages for each sequence, in all layers together, and no second one."""
    model = random_model(HYBRIDS[name]()).to(dtype)
    with llm_of(model, enable_prefix_caching=False) as llm:
        accounting = llm._kv.accounting
        (group,) = (g for g in accounting.groups if isinstance(g.spec, RecurrentState))
        row_bytes = slot_bytes(group, 4096)
        assert group.bytes_for(1) <= row_bytes < group.bytes_for(1) + 4096 + 8 * group.num_layers
        assert accounting.held_bytes == 0  # nothing is left of the trial
        for _ in llm.stream(PROMPTS, GREEDY):
            tokens = [accounting.num_tokens(s.seq_id) for s in llm.engine.scheduler._queues.running]
            full = [g for g in accounting.groups if g is not group]
            blocks = sum(-(-n // 16) for n in tokens)
            in_blocks = sum(g.block_bytes(16) for g in full) * blocks
            assert accounting.held_bytes >= len(tokens) * row_bytes + in_blocks
            assert llm._kv.memory.committed_bytes == accounting.usage().committed_bytes
        assert accounting.held_bytes == 0
        assert llm._kv.memory.committed_bytes == 0
        next(llm.stream(PROMPTS, GREEDY))  # and left early
        assert accounting.held_bytes == 0


def test_a_short_prompt_beside_a_large_pool_takes_its_state_and_little_else() -> None:
    """No block of one group is padded to another's: 12 tokens in a pool for 100,000."""
    config = JAMBA | {"hidden_size": 512, "num_hidden_layers": 8, "attn_layer_offset": 4}
    model = random_model(JambaConfig(**config | {"attn_layer_period": 8}))
    pool = 100_000 * ModelSpec.from_config(model.config.to_dict()).bytes_per_token
    with LLM(model, kv_cache_memory_bytes=pool, max_model_len=256, max_num_seqs=2) as llm:
        stream = llm.stream([list(range(3, 15))], GREEDY)
        next(stream)
        taken = llm._kv.memory.committed_bytes
        assert llm.spec.state_bytes < taken
        assert taken - llm.spec.state_bytes <= 0.01 * pool
        assert taken <= 1.1 * llm.spec.bytes_for(16)  # a block of 16 tokens


def test_who_makes_room_keeps_no_state(hybrid: PreTrainedModel) -> None:
    with llm_of(hybrid, enable_prefix_caching=False) as llm:
        stream = llm.stream([PROMPTS[0], PROMPTS[2]], GREEDY)
        for _ in range(6):
            next(stream)
        assert llm._kv.accounting.held_bytes > 2 * llm.spec.state_bytes
        while llm.engine.scheduler.preempt_youngest(spare_oldest=False):
            pass
        assert llm._kv.accounting.held_bytes == 0
        list(stream)


@pytest.mark.parametrize(
    ("cache", "to_file"), in_turn(["paged", "virtual", "growing"], [False, True])
)
def test_who_makes_room_may_have_its_state_saved(
    hybrid: PreTrainedModel, alone: list[list[int]], cache: str, to_file: bool, tmp_path: Path
) -> None:
    where = str(tmp_path) if to_file else None
    swap = dict(swap_space="4MB", swap_path=where, enable_prefix_caching=False)
    with llm_of(hybrid, cache=cache, **swap) as llm:
        scheduler = llm.engine.scheduler
        scheduler.costs.recompute_s = lambda _: inf  # type: ignore[method-assign]
        scheduler.costs.give(Prices(step_s=1.0, token_s=1.0))
        own, plans = scheduler.plan, iter(range(100))

        def plan(drafts: Drafts = NO_DRAFTS) -> StepPlan:
            if next(plans) in (4, 7, 8):
                scheduler._preempt(scheduler._queues.running[-1], "a test")
            return own(drafts)

        scheduler.plan = plan  # type: ignore[method-assign]
        assert texts(llm) == alone
        stats = scheduler.statistics
        assert stats.num_swaps == 3
        assert stats.num_recomputed_tokens == 0
        assert stats.loaded_bytes == stats.saved_bytes >= 3 * llm.spec.state_bytes


def test_states_and_tokens_draw_on_one_budget(hybrid: PreTrainedModel) -> None:
    with llm_of(hybrid, kv_cache_memory_bytes="1MB") as llm:
        assert llm._kv.accounting.ceiling.capacity_bytes == 10**6
        row = next(line for line in llm.ledger.explain().splitlines() if "states" in line)
        assert "max_num_seqs" in row
    with pytest.raises(ConfigError, match="cannot hold even a short sequence"):
        llm_of(hybrid, kv_cache_memory_bytes="20KB")


def test_a_rule_that_gives_what_is_asked_for_gives_room_for_the_states_too(
    hybrid: PreTrainedModel,
) -> None:
    with llm_of(hybrid, kv_cache_memory_bytes=None, budget="llamacpp") as llm:
        assert llm.ledger.kv_bytes == 64 * llm.spec.bytes_per_token + llm.ledger.state_bytes
        (completion,) = llm.generate([PROMPTS[0]], GREEDY)
        assert completion.finish_reason == "length"


# -- what such a model cannot have ----------------------------------------------------------------


def test_speculation_is_refused(hybrid: PreTrainedModel) -> None:
    lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=r"layers \[0, 1, 3\].*after a wrong draft"):
        llm_of(hybrid, speculative_config=lookup)
    draft = SpeculativeConfig(model=hybrid, num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=r"draft model GraniteMoeHybrid.*after a wrong draft"):
        llm_of(tiny_model("llama"), speculative_config=draft)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("strategy", "name"), in_turn([*STRATEGIES], [*PURE]))
def test_a_model_of_recurrent_layers_alone(name: str, strategy: str) -> None:
    model = random_model(PURE[name]())
    prompts = [[token % 99 for token in prompt] for prompt in PROMPTS]
    with llm_of(model, cache=strategy, kv_cache_memory_bytes="64KB") as llm:
        said = llm.generate(prompts, GREEDY)
        assert [list(c.token_ids) for c in said] == [without_a_cache(model, p) for p in prompts]
        assert llm._kv.accounting.held_bytes == 0


def test_a_scan_that_begins_anew_with_each_chunk_gets_its_tokens_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Jamba's, in Transformers itself, so that its own generate() is no measure here."""
    model = random_model(JambaConfig(**JAMBA))
    with caplog.at_level(logging.WARNING), llm_of(model) as llm:
        assert any("JambaMambaMixer cannot go on" in r.message for r in caplog.records)
        assert texts(llm) == [without_a_cache(model, prompt) for prompt in PROMPTS]
    assert forwards(model) == []


def test_a_scan_that_does_not_go_on_at_all_is_sent_to_generate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(HYBRIDS["lfm2"]())
    mixer = type(model.model.layers[0].conv)
    own = mixer.forward

    @functools.wraps(own)
    def forgetful(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states + hidden_states.shape[1], *args, **kwargs)

    monkeypatch.setattr(mixer, "forward", forgetful)
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
