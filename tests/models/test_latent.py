"""Latents are read where they are kept: nothing is expanded, and logits are the model's own."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    LongcatFlashConfig,
    MiniCPM3Config,
    Mistral4Config,
    PreTrainedConfig,
    PreTrainedModel,
    YoutuConfig,
)
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from models.steps import LENGTH, World, alone, deviation, world_of
from quire.attention import SdpaAttention
from quire.kv import STRATEGIES
from quire.models.executors import latent as latent_read
from quire.models.executors.latent import LatentLayers
from quire.spec import AttentionSpec, LatentAttention
from tiny import VOCAB, random_model, tokens

RANK, ROPE, HEADS, KEY, VALUE = 16, 8, 4, 20, 12
TOLERANCE = 1e-5  # of the largest logit, fp32
SPEC = LatentAttention(latent_dim=RANK, rope_dim=ROPE, dtype="float32")

_MLA: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    q_lora_rank=24,
    kv_lora_rank=RANK,
    qk_rope_head_dim=ROPE,
    qk_nope_head_dim=KEY,
    v_head_dim=VALUE,
)
_EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1
)


def longcat() -> PreTrainedConfig:
    own = {k: v for k, v in _MLA.items() if k not in ("intermediate_size", "num_hidden_layers")}
    return LongcatFlashConfig(
        **own,
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        head_dim=ROPE,
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v3": lambda: DeepseekV3Config(**_MLA, **_EXPERTS, first_k_dense_replace=2),
    # As many inputs as the part that expands latents has: that one is told from it by trial.
    "equal_ranks": lambda: DeepseekV3Config(
        **{**_MLA, "q_lora_rank": RANK, "v_head_dim": ROPE}, **_EXPERTS, first_k_dense_replace=3
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **{**_MLA, "q_lora_rank": None}, **_EXPERTS, first_k_dense_replace=2, head_dim=ROPE
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(
        **_MLA, **_EXPERTS, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    "minicpm3": lambda: MiniCPM3Config(**_MLA),
    "youtu": lambda: YoutuConfig(**_MLA),
    "longcat_flash": longcat,
    "mistral4": lambda: Mistral4Config(
        **_MLA, **_EXPERTS, first_k_dense_replace=2, head_dim=KEY + ROPE
    ),
}


def fresh_model(name: str) -> PreTrainedModel:
    if name != "mistral4":
        return random_model(CONFIGS[name]())
    torch.manual_seed(0)  # Transformers knows it as the text half of another model only
    return Mistral4ForCausalLM(CONFIGS[name]()).eval()


@cache
def model_of(name: str) -> PreTrainedModel:
    """Which no test changes."""
    return fresh_model(name)


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "kv_b_proj")]


@contextmanager
def tried(model: PreTrainedModel, backend: str = "cpu", **options: Any) -> Iterator[World]:
    with world_of(model, backend=backend, **options) as world:
        world.runner.try_out(max_tokens=LENGTH)
        yield world


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[Counter[str]]:
    """Tokens that were expanded, and calls of what expands them, all layers together."""
    seen: Counter[str] = Counter()
    kind = type(attentions(model)[0])
    own, linear = kind.expand_kv, nn.Linear.forward
    parts = {id(attention.kv_b_proj) for attention in attentions(model)}

    def expand_kv(self: nn.Module, latents: Tensor, rotary: Tensor) -> Any:
        seen["tokens"] += latents.shape[2]
        return own(self, latents, rotary)

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        seen["calls"] += id(self) in parts
        return linear(self, x)

    kind.expand_kv, nn.Linear.forward = expand_kv, forward
    try:
        yield seen
    finally:
        kind.expand_kv, nn.Linear.forward = own, linear


# -- what it gives --------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_models_own_and_nothing_is_expanded(name: str) -> None:
    model = model_of(name)
    with tried(model) as world:
        assert world.runner.way == "table"
        layers = len(attentions(model))
        per_token = sum(group.bytes_per_token for group in world.kv.accounting.groups)
        assert per_token == layers * (RANK + ROPE) * 4
        assert deviation(world) <= TOLERANCE
        texts = tokens(3, LENGTH)
        world.kv.accounting.add(0, max_tokens=LENGTH)
        with counted(model) as seen:
            world.logits([(0, 0, 9)], texts)
            world.logits([(0, 9, 10)], texts)
        assert not +seen


@pytest.mark.sampled(6)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", ["cpu", "sdpa", "reference"])
def test_every_backend_reads_them_from_every_strategy(strategy: str, backend: str) -> None:
    with tried(model_of("minicpm3"), strategy=strategy, backend=backend) as world:
        assert world.runner.way == "table"
        assert deviation(world) <= TOLERANCE


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_latents_kept_in_bfloat16(backend: str) -> None:
    """Held against the model itself with latents rounded alike; sums in another order remain."""
    with tried(model_of("minicpm3"), kept_as="bfloat16", backend=backend) as world:
        per_token = sum(group.bytes_per_token for group in world.kv.accounting.groups)
        assert per_token == 3 * (RANK + ROPE) * 2
        assert deviation(world, kept_as="bfloat16") <= TOLERANCE


def test_a_model_in_bfloat16() -> None:
    model = fresh_model("minicpm3").bfloat16()
    with tried(model, kept_as="bfloat16") as world:
        assert world.runner.way == "table"
        assert deviation(world, kept_as="bfloat16") <= 5e-2


# -- what is its owner's --------------------------------------------------------------------------


def test_between_two_passes_a_model_expands_as_it_did() -> None:
    model = fresh_model("minicpm3")
    texts = tokens(3, LENGTH)
    before = alone(model, texts)
    with tried(model) as world:
        world.kv.accounting.add(0, max_tokens=LENGTH)
        world.logits([(0, 0, 5)], texts)
        handle = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            world.logits([(0, 5, 6)], texts)
        handle.remove()
        assert not any("expand_kv" in vars(attention) for attention in attentions(model))
        assert torch.equal(alone(model, texts), before)


class Adapted(nn.Module):
    """A linear layer and something besides, as adapters are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.more = nn.Linear(linear.in_features, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.more(x)


def adapt(attention: Any) -> None:
    attention.kv_b_proj = Adapted(attention.kv_b_proj)


def listen(attention: Any) -> None:
    attention.kv_b_proj.register_forward_hook(lambda *given: given[2] * 1.5)


def exchange(attention: Any) -> None:
    own = attention.expand_kv
    attention.expand_kv = lambda c, r: tuple(x * 0.5 for x in own(c, r))


def scale(attention: Any) -> None:
    with torch.no_grad():
        attention.kv_b_proj.weight *= 1.5


def renew(attention: Any) -> None:
    attention.kv_b_proj.weight = nn.Parameter(attention.kv_b_proj.weight.detach() * 1.5)


@pytest.mark.parametrize("change", [adapt, listen, exchange, scale, renew])
def test_what_an_owner_changes_later_counts(
    change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A weight that was changed where it lies is still absorbed; the rest is expanded again."""
    model = fresh_model("minicpm3")
    with tried(model) as world, caplog.at_level(logging.INFO, "quire.models.executors.latent"):
        own = alone(model, tokens(3, LENGTH))
        change(attentions(model)[1])
        assert not torch.allclose(alone(model, tokens(3, LENGTH)), own)
        assert deviation(world) <= TOLERANCE
        spoken = [r for r in caplog.records if "layer 1 is not what it was" in r.getMessage()]
        assert len(spoken) == (change is not scale)
        if change is exchange:
            del attentions(model)[1].expand_kv
            assert deviation(world) <= TOLERANCE


# -- what cannot be absorbed ----------------------------------------------------------------------


@pytest.mark.parametrize("change", [adapt, listen, exchange])
def test_what_is_not_one_matrix_is_gathered(
    change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh_model("minicpm3")
    change(attentions(model)[1])
    with tried(model) as world:
        assert world.runner.way == "gathered"
        assert "layer 1 keeps latents that cannot be absorbed" in caplog.text
        assert deviation(world) <= TOLERANCE
        with counted(model) as seen:
            world.kv.accounting.add(0, max_tokens=LENGTH)
            world.logits([(0, 0, 9)], tokens(3, LENGTH))
        assert seen["tokens"] >= 2 * 9


class Expanding(nn.Module):
    """Something that has what it takes, in one form or another."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer_idx, self.form = 0, form
        self.kv_b_proj = nn.Linear(RANK, HEADS * (KEY + VALUE), bias=form == "bias")

    def expand_kv(self, latents: Tensor, rotary: Tensor) -> Any:
        both = self.kv_b_proj(latents)[0, 0].view(latents.shape[2], HEADS, -1).transpose(0, 1)
        k, v = both[None].split([KEY, VALUE], -1)
        if self.form == "values first":
            v, k = both[None].split([VALUE, KEY], -1)
        if self.form == "rotary first":
            return torch.cat([rotary.expand(-1, HEADS, -1, -1), k], -1), v
        if self.form == "turned":
            k = torch.tanh(k)
        keys = torch.cat([k, rotary.expand(-1, HEADS, -1, -1)], -1)
        return keys if self.form == "keys only" else (keys, v)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("plain", None),
        ("bias", "its kv_b_proj has a bias"),
        ("values first", "does not multiply by one matrix"),
        ("rotary first", "does not multiply by one matrix"),
        ("turned", "does not multiply by one matrix"),
        ("keys only", "gives something else than keys and values"),
    ],
)
def test_what_a_module_computes_decides_not_its_name(form: str, reason: str | None) -> None:
    refused = LatentLayers(Expanding(form), {0: SPEC}).refused
    assert (0 in refused) == (reason is not None)
    assert reason is None or reason in refused[0]


def test_layers_without_a_part_that_expands_are_refused() -> None:
    assert LatentLayers(nn.Linear(3, 3), {0: SPEC}).refused == {0: "no part of it expands latents"}
    wide = LatentAttention(latent_dim=RANK + 1, rope_dim=ROPE, dtype="float32")
    refused = LatentLayers(Expanding("plain"), {0: wide}).refused
    assert refused == {0: "Expanding has no linear layer that takes them"}


def test_the_two_products_have_no_copy_of_the_weight() -> None:
    module = Expanding("plain")
    with LatentLayers(module, {0: SPEC}).in_place() as absorbed:
        weight = module.kv_b_proj.weight
        for half in absorbed[0].halves:
            assert half.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        c, r = torch.randn(1, 1, 5, RANK), torch.randn(1, 1, 5, ROPE)
        assert module.expand_kv(c, r) == (c, r)


# -- long chunks ----------------------------------------------------------------------------------

# Long ones that begin a sequence, beside a short one, one that goes on and a decode.
LONG_STEPS = (
    ((0, 6), (1, 9), (2, 5)),
    ((1, 11), (3, 8), (2, 1)),
    ((3, 1), (1, 9), (4, 10), (5, 3)),
)


@pytest.mark.parametrize("backend", ["cpu", "sdpa", "reference"])
@pytest.mark.parametrize("strategy", ["paged", "contiguous"])
def test_long_chunks_that_begin_a_sequence_are_expanded_and_no_more(
    strategy: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_read, "WORTH_EXPANDING", 8)
    model, texts = model_of("minicpm3"), tokens(6, LENGTH)
    want = alone(model, texts)
    with world_of(model, strategy=strategy, backend=backend, max_num_seqs=6) as world:
        world.runner.go("table")
        for sequence in range(6):
            world.kv.accounting.add(sequence, max_tokens=LENGTH)
        done = [0] * 6
        for step in LONG_STEPS:
            chunks = [(n, done[n], done[n] + count) for n, count in step]
            with counted(model) as seen:
                got = world.logits(chunks, texts)
            wanted = torch.cat([want[n, start:stop] for n, start, stop in chunks])
            assert (got - wanted).abs().max() / want.abs().max() <= TOLERANCE
            begun = sum(count for n, count in step if not done[n] and count >= 8)
            assert seen["tokens"] == 3 * begun  # in each of three layers
            for n, count in step:
                done[n] += count


class OnlyLatents(SdpaAttention):
    """As FlashInfer, whose kernels for latents say nothing of the widths they expand to."""

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return None if isinstance(spec, LatentAttention) else "its heads are 64 wide, not 20"

    def attend(self, q: Tensor, view: Any, batch: Any, *, spec: AttentionSpec, **given: Any) -> Any:
        assert isinstance(spec, LatentAttention)
        return super().attend(q, view, batch, spec=spec, **given)


def test_who_cannot_read_what_is_expanded_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_read, "WORTH_EXPANDING", 8)
    model, texts = model_of("minicpm3"), tokens(1, LENGTH)
    want = alone(model, texts)[0, :20]
    with world_of(model) as world:
        world.runner.go("table")
        world.runner._backend = OnlyLatents()
        world.kv.accounting.add(0, max_tokens=LENGTH)
        with counted(model) as seen:
            got = world.logits([(0, 0, 20)], texts)
        assert (got - want).abs().max() / want.abs().max() <= TOLERANCE
        assert seen["tokens"] == 3 * 20


def test_what_is_read_is_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fewer bits than the model's own nothing is expanded: it would not have been rounded."""
    monkeypatch.setattr(latent_read, "WORTH_EXPANDING", 8)
    model = model_of("minicpm3")
    texts = tokens(3, LENGTH)
    with world_of(model, kept_as="bfloat16") as world:
        world.runner.go("table")
        assert deviation(world, kept_as="bfloat16") <= TOLERANCE
        world.kv.accounting.add(0, max_tokens=LENGTH)
        with counted(model) as seen:
            world.logits([(0, 0, 20)], texts)
        assert not +seen
