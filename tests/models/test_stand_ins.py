"""Stand-ins for a model's parts: the same logits with them, and the same model after them."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama import modeling_llama

from attention.machines import kernel_folder
from quire.models.fused_modules import FusedModules
from tiny import CONFIGS, tiny_model, tokens

# Of logits, in parts of the largest: sums in another order, and one more rounding here or there.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def stand_ins(model: PreTrainedModel) -> FusedModules:
    return FusedModules(model, kernel_folder())


def in_place(found: FusedModules) -> AbstractContextManager[None]:
    """As before a step."""
    found.watch.look()
    return found.in_place()


@torch.inference_mode()
def logits(model: PreTrainedModel, num_tokens: int = 9) -> Tensor:
    found: Tensor = model(tokens(1, num_tokens), use_cache=False).logits
    return found


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def outside(model: PreTrainedModel) -> list[Any]:
    """All that stand-ins touch."""
    parts = [(name, m, dict(m.__dict__), m.forward) for name, m in model.named_modules()]
    names = {type(m).__module__ for m in model.modules()}
    python = [vars(__import__("sys").modules[name]).get("apply_rotary_pos_emb") for name in names]
    return [(n, m, sorted(d), f.__func__, f.__self__) for n, m, d, f in parts] + python


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_says_the_same(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name).to(dtype)
    found = stand_ins(model)
    for num_tokens in (1, 9, 150):
        want = logits(model, num_tokens)
        with in_place(found):
            got = logits(model, num_tokens)
        if dtype == torch.float32 or not hasattr(model.config, "num_experts_per_tok"):
            assert apart(got, want) <= LIMITS[dtype]
        assert torch.equal(logits(model, num_tokens), want)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_as_it_was(name: str) -> None:
    model = tiny_model(name)
    before = outside(model)
    found = stand_ins(model)
    assert outside(model) == before
    with in_place(found):
        assert "forward" in model.lm_head.__dict__
        logits(model)
    assert outside(model) == before
    with pytest.raises(ZeroDivisionError), in_place(found):
        raise ZeroDivisionError
    assert outside(model) == before
    model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), in_place(found):
        logits(model)
    assert [m.__dict__.get("forward") for m in model.modules()] == [None] * len([*model.modules()])


def test_what_is_found_and_what_is_not_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3")
    for layer in model.model.layers[:2]:
        layer.self_attn.o_proj = OddLinear(64, 64)
    with caplog.at_level(logging.INFO, "quire.models.fused_modules"):
        stand_ins(model)
    told = [r.getMessage() for r in caplog.records if r.name == "quire.models.fused_modules"]
    # Three of each layer's linear layers make one of its gated ones.
    assert told == [
        f"stand-ins for {4 * 4 - 2 + 1} Linear, 4 Qwen3Attention, 4 Qwen3MLP, "
        f"{4 * 4 + 1} Qwen3RMSNorm",
        "OddLinear runs as it is: it is a linear layer of another kind",
    ]


class OddLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(-1)


class Adapter(nn.Module):
    """Put in front of a linear layer, as adapters are."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) * 1.5
        return found


def other_weights(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.flip(0))
        layer.input_layernorm.weight = nn.Parameter(torch.rand(64))
        layer.self_attn.k_proj.weight = nn.Parameter(layer.self_attn.k_proj.weight.flip(0))


def other_numbers(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 9)


def adapters(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapter(layer.mlp.up_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)


def hooks(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, __, out: out * 2)
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
        layer.post_attention_layernorm.register_forward_hook(lambda _, __, out: out + 1)


def other_forward(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = lambda x: x.sin()
        layer.self_attn.o_proj.forward = lambda x: x.cos()


def other_dtype(model: PreTrainedModel) -> None:
    model.bfloat16()


@pytest.mark.parametrize(
    "change", [other_weights, other_numbers, adapters, hooks, other_forward, other_dtype]
)
def test_what_the_owner_changes_afterwards_holds(change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_model("llama")
    found = stand_ins(model)
    first = logits(model)
    change(model)
    before = outside(model) if change is not other_forward else None
    want = logits(model)
    assert apart(want, first) > 0.005
    with in_place(found):
        got = logits(model)
    assert apart(got, want) <= LIMITS[model.dtype]
    assert before is None or outside(model) == before
    assert torch.equal(logits(model), want)


def test_the_function_that_turns_positions_is_exchanged_for_one_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, beside = tiny_model("llama"), tiny_model("llama", seed=1)
    found = stand_ins(model)
    called: list[int] = []
    own = modeling_llama.apply_rotary_pos_emb

    def counted(*given: Tensor, **options: Any) -> Any:
        called.append(1)
        return own(*given, **options)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", counted)
    with in_place(found):
        logits(model)  # a new function is tried once, and again inside of what was tried
        called.clear()
        logits(model)
        assert not called
        logits(beside)
        assert len(called) == len(beside.model.layers)
        assert modeling_llama.apply_rotary_pos_emb is counted

    def other(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q.flip(-1), k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    want = logits(model)
    with in_place(found):
        assert apart(logits(model), want) <= LIMITS[torch.float32]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Of every weight, as a training step in another thread finds them."""
    found: dict[str, Tensor] = {}

    def step() -> None:
        ids = tokens(1, 7)
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None, name
            found[name] = weight.grad.clone()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(step).result()
    return found


@pytest.mark.parametrize("which", ["another", "the same"])
def test_another_thread_trains_meanwhile(which: str) -> None:
    """What it computes leaves no trace in what is heard of this thread, and has its gradients."""
    model = tiny_model("qwen3")
    trained = model if which == "the same" else tiny_model("qwen3", seed=1)
    want = gradients(trained)
    found = stand_ins(model)
    with in_place(found), found.cpu.threads.listening():
        got = gradients(trained)
        assert not found.cpu.threads.take_heard()
        logits(model)
        assert found.cpu.threads.take_heard()
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_two_at_once_undo_only_their_own() -> None:
    """Of one class, as two engines have them: the second finds the first one's in its place."""
    models = tiny_model("llama"), tiny_model("llama", seed=1)
    before = [outside(model) for model in models]
    found = [stand_ins(model) for model in models]
    with in_place(found[0]), in_place(found[1]), in_place(found[0]):
        pass
    assert [outside(model) for model in models] == before


def test_weights_as_a_model_begins_with_tell_forms_of_norms_apart() -> None:
    """All ones: a model that gets its weights later gets the form that the class has."""
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    found = stand_ins(model)
    norm = model.model.norm
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(1, 7, 32).bfloat16()
    want = norm(x)
    with in_place(found):
        assert torch.equal(norm(x), want)
