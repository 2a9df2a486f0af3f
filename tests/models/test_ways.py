"""Each model runs in the fastest way that is right for it, and says the same in all that are."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    BloomConfig,
    CodeGenConfig,
    DiffLlamaConfig,
    DogeConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXJapaneseConfig,
    HrmTextConfig,
    JetMoeConfig,
    MptConfig,
    PreTrainedConfig,
    PreTrainedModel,
    XGLMConfig,
)

from models.steps import LENGTH, World, alone, deviation, world_of
from quire import LLM, SamplingParams
from quire.errors import UnsupportedModel
from quire.kv import STRATEGIES, Extension, Fits
from quire.models.executors.choice import WAYS, Trial
from quire.spec import FullAttention, SlidingWindow
from tiny import CONFIGS, VOCAB, WINDOW, random_model, tiny_model, tokens

# Which Transformers 5.24 wrote anew: attention is a function that an engine can give.
_REWRITTEN = "table" if Version(transformers.__version__) >= Version("5.24") else "alone"

TOLERANCE = 1e-5  # of the largest logit, fp32
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

_TINY: dict[str, Any] = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_LLAMA: dict[str, Any] = dict(
    **_TINY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
_GPT: dict[str, Any] = dict(**_TINY, n_embd=64, n_layer=3, n_head=4, n_positions=128)

# The way that each takes, and what it is.
TAKES: dict[str, tuple[str, Callable[[], PreTrainedConfig]]] = {
    "diffllama": ("gathered", lambda: DiffLlamaConfig(**_LLAMA)),
    "jetmoe": (
        "gathered",
        lambda: JetMoeConfig(
            **{k: v for k, v in _LLAMA.items() if k != "num_attention_heads"},
            kv_channels=16,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "bloom": ("alone", lambda: BloomConfig(**_TINY, hidden_size=64, n_layer=3, n_head=4)),
    "gptj": (_REWRITTEN, lambda: GPTJConfig(**_GPT, rotary_dim=8)),
    "codegen": (_REWRITTEN, lambda: CodeGenConfig(**_GPT, rotary_dim=8)),
    "mpt": (
        "alone",
        lambda: MptConfig(**_TINY, d_model=64, n_layers=3, n_heads=4, max_seq_len=128),
    ),
    "falcon": (
        "alone",
        lambda: FalconConfig(**_TINY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4),
    ),
    "falcon_alibi": (
        "alone",
        lambda: FalconConfig(
            **_TINY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=True
        ),
    ),
    "gpt_neo": (
        "alone",
        lambda: GPTNeoConfig(
            **_TINY,
            hidden_size=64,
            num_layers=4,
            num_heads=4,
            attention_types=[[["global", "local"], 2]],
            window_size=WINDOW,
            max_position_embeddings=128,
        ),
    ),
    "gpt_neox_japanese": (
        "alone",
        lambda: GPTNeoXJapaneseConfig(
            **_TINY,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
        ),
    ),
    "xglm": (
        "alone",
        lambda: XGLMConfig(
            **_TINY,
            d_model=64,
            ffn_dim=96,
            num_layers=3,
            attention_heads=4,
            max_position_embeddings=128,
        ),
    ),
    # One module serves several layers; masks that may be left out.
    "hrm_text": ("table", lambda: HrmTextConfig(**{**_LLAMA, "num_key_value_heads": 4})),
    "doge": ("table", lambda: DogeConfig(**_LLAMA)),
}
SLOWER = ("diffllama", "jetmoe", "bloom", "gptj", "mpt", "falcon")


@cache
def model_of(name: str) -> PreTrainedModel:
    """Which no test changes."""
    return random_model(TAKES[name][1]())


def taken(world: World) -> str:
    world.runner.try_out(max_tokens=LENGTH)
    return world.runner.way


def llm_of(model: PreTrainedModel, **options: Any) -> LLM:
    sizes = dict(max_model_len=64, kv_cache_memory_bytes="16MB", max_num_seqs=4)
    return LLM(model, **{**sizes, **options})


def generated(model: PreTrainedModel, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [
        tuple(model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist()) for p in prompts
    ]


# -- what each takes, and what it gives ------------------------------------------------------------


@pytest.mark.parametrize("name", TAKES)
def test_each_takes_the_fastest_way_that_is_right(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    way, _ = TAKES[name]
    with world_of(model_of(name)) as world, caplog.at_level(logging.INFO, "quire.engine.runner"):
        assert taken(world) == way
        (record,) = [r for r in caplog.records if r.name == "quire.engine.runner"]
        assert f"runs by way of '{way}'" in record.getMessage()
        assert (record.levelno == logging.WARNING) == (way != "table")
        assert way == "table" or "table" in record.getMessage()
        assert deviation(world) <= TOLERANCE


@pytest.mark.parametrize("kept_as", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["diffllama", "bloom"])
def test_entries_kept_in_fewer_bits(name: str, kept_as: str) -> None:
    """An entry at the edge between two of them may be rounded to the other one."""
    with world_of(model_of(name), kept_as=kept_as) as world:
        assert taken(world) == TAKES[name][0]
        assert deviation(world, kept_as=kept_as) <= 10 * TOLERANCE


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", ["gathered", "alone"])  # tables: engine/test_packed_logits.py
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_windows_and_sinks_in_slower_ways(name: str, way: str, strategy: str) -> None:
    """Windows of ``WINDOW`` tokens: what is behind them is neither gathered nor read."""
    model = tiny_model(name)
    model.set_attn_implementation("eager")
    with world_of(model, strategy=strategy) as world:
        world.runner.go(way)
        assert deviation(world) <= TOLERANCE


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in ("gemma3", "gpt_oss")])
@pytest.mark.parametrize("way", ["gathered", "alone"])
def test_what_runs_by_tables_says_the_same_in_slower_ways(name: str, way: str) -> None:
    model = tiny_model(name)
    model.set_attn_implementation("eager")  # Transformers' SDPA path left Gemma 2's softcap out
    with world_of(model) as world:
        world.runner.go(way)
        assert deviation(world) <= TOLERANCE


@pytest.mark.parametrize("name", SLOWER)
def test_a_fork_and_a_cached_prefix_are_read_like_tokens_of_ones_own(name: str) -> None:
    texts = tokens(1, LENGTH).repeat(3, 1)
    texts[1, 21:] = tokens(1, LENGTH, seed=1)[0, 21:]
    texts[2, 18:] = tokens(1, LENGTH, seed=2)[0, 18:]
    with world_of(model_of(name)) as world:
        taken(world)
        want = alone(model_of(name), texts)
        accounting = world.kv.accounting
        accounting.add(0, max_tokens=LENGTH)
        world.logits([(0, 0, 20)], texts)
        world.logits([(0, 20, 21)], texts)
        accounting.mark_computed([0], [21], texts[0, :21].numpy().astype(np.int32))
        assert isinstance(accounting.fork(0, 1), Fits)
        accounting.add(2, max_tokens=LENGTH)
        hit = accounting.match_prefix(2, texts[2, :30].numpy().astype(np.int32))
        assert hit.num_tokens >= 16
        assert isinstance(accounting.try_extend(2, 30, Extension(hit=hit)), Fits)
        chunks = [(0, 21, 22), (1, 21, 25), (2, hit.num_tokens, 30)]
        got = world.logits(chunks, texts)
        wanted = torch.cat([want[n, start:stop] for n, start, stop in chunks])
        assert (got - wanted).abs().max() / want.abs().max() <= TOLERANCE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SLOWER)
def test_tokens_are_those_of_generate(name: str) -> None:
    model, prompts = model_of(name), [tokens(1, n, seed=n)[0].tolist() for n in (24, 2, 33)]
    prompts.append([*prompts[2][:20], 7, 8, 9])
    want = generated(model, prompts)
    with llm_of(model, max_num_batched_tokens=16, block_size=4) as llm:
        assert llm.attention_way == TAKES[name][0]
        got = llm.generate(prompts, GREEDY)
        assert [completion.token_ids for completion in got] == want
        again = llm.generate(prompts, GREEDY)
        assert [completion.token_ids for completion in again] == want
        assert all(completion.num_cached_tokens for completion in again[2:])
        (both,) = llm.generate([prompts[0]], SamplingParams(**{**vars_of(GREEDY), "n": 2}))
        assert [choice.token_ids for choice in both.choices] == [want[0]] * 2


def test_making_room_for_others_changes_no_token() -> None:
    """Two sequences of 40 tokens in memory for about one and a half: one makes room meanwhile."""
    model = model_of("bloom")
    prompts = [tokens(1, 30, seed=n)[0].tolist() for n in range(3)]
    want = generated(model, prompts)
    token_bytes = 3 * 2 * 64 * 4
    with llm_of(
        model, block_size=4, kv_cache_memory_bytes=64 * token_bytes, enable_prefix_caching=False
    ) as llm:
        got = llm.generate(prompts, GREEDY)
    assert [completion.token_ids for completion in got] == want


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("max_tokens", "temperature", "ignore_eos")}


# -- the trial -------------------------------------------------------------------------------------


def full(**options: Any) -> FullAttention:
    return FullAttention(num_kv_heads=1, head_dim=16, dtype="float32", **options)


def sliding(window: int) -> SlidingWindow:
    return SlidingWindow(num_kv_heads=1, head_dim=16, dtype="float32", window=window)


@pytest.mark.parametrize(
    ("specs", "most", "num_tokens"),
    [
        ([full()], 64, 12),
        ([full()], 5, 5),
        ([full(), sliding(9)], 64, 17),
        ([full(), sliding(3)], 64, 12),
        ([sliding(100), sliding(30)], 64, 38),
        ([sliding(100)], 64, 64),
        ([sliding(256)], 512, 264),
        ([sliding(257)], 512, 12),  # too long to be waited for
    ],
)
def test_a_small_window_has_passed_before_the_second_chunk(
    specs: Any, most: int, num_tokens: int
) -> None:
    with world_of(tiny_model("llama")) as world:
        trial = Trial(world.loaded, specs, torch.float32, most)
        assert len(trial.token_ids) == num_tokens
        stop = trial.first_stop(num_tokens)
        assert 0 < stop <= num_tokens
        windows = [s.window for s in specs if isinstance(s, SlidingWindow)]
        if windows and min(windows) + 8 <= min(most, 264):
            assert min(windows) < stop < num_tokens
        assert trial.first_stop(4) == 2
        assert trial.first_stop(1) == 1


@pytest.mark.parametrize("said", [None, WINDOW + 2])
def test_a_window_in_the_mask_alone_is_seen(said: int | None) -> None:
    """A model with another window than its spec: where the model's own masks count, it is right."""
    model = tiny_model("mistral")
    model.config.sliding_window = said
    with world_of(model) as world:
        model.config.sliding_window = WINDOW
        assert taken(world) == "alone"
        # The model computes within its window; what the spec keeps beyond it is not read.
        assert deviation(world) <= TOLERANCE


def test_in_fewer_bits_a_window_in_the_mask_alone_is_seen_too() -> None:
    """There the median counts, and most tokens of the trial are within the window."""
    model = tiny_model("mistral").bfloat16()
    model.config.sliding_window = WINDOW + 2
    with world_of(model, kept_as="bfloat16") as world:
        model.config.sliding_window = 3
        assert taken(world) == "alone"


def test_in_fewer_bits_the_few_tokens_past_a_window_are_judged_by_themselves() -> None:
    model = tiny_model("mistral").bfloat16()
    with world_of(model, kept_as="bfloat16") as world:
        trial = Trial(world.loaded, [sliding(9)], torch.bfloat16, 64)
        logits = alone(model, torch.tensor([trial.token_ids]))[0].float()
        first = len(logits) - 3
        trial.judge(logits, first)
        logits[first:] = logits[first:].flip(-1)
        with pytest.raises(UnsupportedModel, match="of the largest"):
            trial.judge(logits, first)


@pytest.mark.parametrize("row", [2, 15])
def test_what_is_no_number_is_never_right(row: int) -> None:
    model = tiny_model("mistral")
    with world_of(model) as world:
        trial = Trial(world.loaded, [sliding(9)], torch.float32, 64)
        logits = alone(model, torch.tensor([trial.token_ids]))[0]
        trial.judge(logits, 13)
        logits[row, 3] = torch.nan
        with pytest.raises(UnsupportedModel, match="nan of the largest"):
            trial.judge(logits, 13)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_finds_room_is_judged(strategy: str) -> None:
    """The least in which two tokens fit is enough to see what is wrong with a table."""
    with world_of(model_of("diffllama"), strategy=strategy) as world:
        accounting = world.kv.accounting

        def fits(capacity_bytes: int) -> bool:
            accounting.resize(capacity_bytes)
            accounting.add(0, max_tokens=2)
            verdict = accounting.try_extend(0, 2)
            accounting.free(0)
            world.kv.carry_out()
            return isinstance(verdict, Fits)

        assert next(pages for pages in range(1, 200) if fits(pages * 4096))
        assert taken(world) == "gathered"


def test_a_model_that_no_way_is_right_for_is_refused_in_one_line() -> None:
    def counting(_: Any, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out * given[0].shape[1]

    model = tiny_model("llama")
    model.model.norm.register_forward_hook(counting)
    with pytest.raises(UnsupportedModel) as caught:
        llm_of(model)
    message = str(caught.value)
    assert message.startswith("LlamaForCausalLM (llama) runs in none of the ways: ")
    assert "\n" not in message
    for way in WAYS:
        assert way in message


def test_errors_of_several_lines_are_told_in_one() -> None:
    def failing(*_: Any) -> None:
        raise ValueError("first\nsecond " + "x" * 1000)

    model = tiny_model("llama")
    with world_of(model) as world:
        handle = model.model.layers[1].register_forward_pre_hook(failing)
        with pytest.raises(
            UnsupportedModel, match="table, gathered, alone: it does not run"
        ) as got:
            taken(world)
        handle.remove()
    assert "\n" not in str(got.value)
    assert len(str(got.value)) < 400
