"""The two seams: they carry every layer, or the model is refused by name; then they are gone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    Llama4TextConfig,
    Phi3Config,
    PreTrainedModel,
)

from conformance.covering import in_turn
from quire import LLM, SamplingParams
from quire.errors import ConfigError, UnsupportedModel
from quire.memory import CountedMemory, HostMemory
from quire.models.cache_argument import cache_argument
from quire.models.executors.hooks import (
    ATTENTION_NAME,
    EngineCache,
    PackedStep,
    attend,
    reading_through_attend,
)
from tiny import CONFIGS, random_model, tiny_model

_TINY: dict[str, Any] = dict(vocab_size=99, bos_token_id=1, eos_token_id=2)


def llm_of(model: PreTrainedModel, **options: Any) -> LLM:
    return LLM(model, max_model_len=32, kv_cache_memory_bytes="16MB", max_num_seqs=2, **options)


def refusal(model: PreTrainedModel) -> str:
    """What the refusal says. Whatever it was, nothing is left behind."""
    memory, own = CountedMemory(HostMemory()), model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        llm_of(model, provider=memory)
    assert model.config._attn_implementation == own
    assert memory.reserved_bytes == memory.committed_bytes == 0
    return str(caught.value)


# -- models that cannot be carried ----------------------------------------------------------------


def test_positions_that_one_long_sequence_would_turn_for_all_are_refused() -> None:
    """Phi 3's longrope: in one batch with a long sequence, a short one would read other texts."""
    rope = dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0] * 8,
        long_factor=[4.0] * 8,
        original_max_position_embeddings=32,
    )
    config = Phi3Config(
        **_TINY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters=rope,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    llm_of(model).close()
    with pytest.raises(ConfigError, match=r"longrope.*max_model_len=128 must be at most 32"):
        LLM(model, kv_cache_memory_bytes="16MB", max_num_seqs=2)


class Replaced(torch.nn.Module):
    """In place of one layer's attention."""

    def __init__(self, attention: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.attention, self._forward = attention, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.attention, *args, **kwargs)


def with_layer_replaced(layer: int, forward: Callable[..., Any]) -> PreTrainedModel:
    model = tiny_model("llama")
    model.model.layers[layer].self_attn = Replaced(model.model.layers[layer].self_attn, forward)
    return model


def test_layers_that_never_report_are_named() -> None:
    """A layer with a mixer of its own: what it should remember never came by."""

    def average(attention: torch.nn.Module, hidden_states: torch.Tensor, **_: Any) -> Any:
        count = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        return hidden_states.cumsum(1) / count, None

    message = refusal(with_layer_replaced(2, average))
    assert "table, gathered, alone: layers [2] never reached the cache" in message


def test_a_layer_that_writes_and_does_not_read_has_its_model_run_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def eager(attention: Any, hidden_states: Any, **given: Any) -> Any:
        cache = given.get(cache_argument(type(attention).forward))
        if cache is not None:
            k = torch.zeros(1, 2, hidden_states.shape[1], 16)
            cache.update(k, k, 1)
        return hidden_states, None

    with llm_of(with_layer_replaced(1, eager)) as llm:
        assert llm.attention_way == "alone"
    assert "table, gathered: layers [1] never reached the cache" in caplog.text


def test_a_layer_that_asks_the_cache_for_something_else_is_refused() -> None:
    def odd(attention: Any, hidden_states: Any, **given: Any) -> Any:
        cache = given.get(cache_argument(type(attention).forward))
        if cache is not None:
            cache.layers[3].keys.sum()
        return hidden_states, None

    message = refusal(with_layer_replaced(3, odd))
    assert "LlamaForCausalLM (llama) runs in none of the ways" in message
    assert "IndexError" in message


def test_a_layer_that_keeps_the_step_to_itself_has_its_model_run_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def alone(attention: Any, *args: Any, quire_step: Any = None, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)

    with llm_of(with_layer_replaced(0, alone)) as llm:
        assert llm.attention_way == "alone"
    assert "keyword arguments did not reach" in caplog.text


def test_other_logits_than_alone_are_refused_with_both_figures() -> None:
    """Here a layer depends on how many tokens come at once, as no packed layer may."""

    def counting(attention: Any, hidden_states: Any, **kwargs: Any) -> Any:
        out, weights = attention(hidden_states, **kwargs)
        return out * hidden_states.shape[1], weights

    message = refusal(with_layer_replaced(0, counting))
    assert "gives other logits than by itself" in message
    assert "1e-03 allowed" in message


def test_entries_of_another_shape_than_the_config_says_are_refused() -> None:
    model = tiny_model("llama")
    model.config.num_key_value_heads = 4
    assert "this layer keeps 4 heads" in refusal(model)


# -- both seams -----------------------------------------------------------------------------------


def test_a_step_knows_who_has_not_both_written_and_read() -> None:
    step = PackedStep(storage=None, backend=None, specs={0: None, 1: None, 5: None}, batches={})  # type: ignore[arg-type,dict-item]
    assert step.silent == [0, 1, 5]
    step.written |= {0, 1}
    step.read |= {1, 5}
    assert step.silent == [0, 5]


def test_the_cache_tells_the_model_nothing_of_lengths() -> None:
    """Positions are given and no mask is built, so nothing may be derived from a length."""
    step = PackedStep(storage=None, backend=None, specs={}, batches={})  # type: ignore[arg-type]
    cache = EngineCache(step, torch.tensor([0, 1, 2, 9, 5]))
    assert cache.get_seq_length() == 0
    assert (torch.arange(5) + cache.get_seq_length(3)).tolist() == [0, 1, 2, 9, 5]
    assert cache.get_mask_sizes(7, 0) == (7, 0)


def test_attention_without_a_step_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="keyword arguments did not reach"):
        attend(torch.nn.Module(), *[torch.zeros(1, 2, 3, 4)] * 3, None)


@pytest.mark.parametrize(
    ("name", "eager"), in_turn(CONFIGS, [False, True], kept=["llama", "gemma2", "gemma3"])
)
def test_a_model_has_its_own_attention_back(name: str, eager: bool) -> None:
    model = tiny_model(name)
    if eager:
        model.set_attn_implementation("eager")
    own = model.config._attn_implementation
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model(ids).logits
    with reading_through_attend(model):
        assert model.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(ZeroDivisionError), reading_through_attend(model):
        raise ZeroDivisionError
    with llm_of(model) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2))
        assert model.config._attn_implementation == own
        assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == own


def test_a_step_that_fails_leaves_the_model_and_the_others_as_they_were() -> None:
    model = tiny_model("llama")
    own = model.config._attn_implementation
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with llm_of(model) as llm:
        (want,) = llm.generate([[5, 6, 7]], greedy)
        stream = llm.stream([[5, 6, 7]], greedy)
        got = [next(stream)]

        def fail(_: Any, given: tuple[torch.Tensor]) -> None:
            # Not where the other one is computed alone: its text anew, for a hook is a change.
            if given[0].shape[1] not in (1, 4):
                raise ZeroDivisionError

        handle = model.model.layers[2].register_forward_pre_hook(fail)
        (failed,) = llm.generate([[8, 9]], greedy)
        handle.remove()
        assert failed.finish_reason == "error"
        assert "ZeroDivisionError" in failed.detail
        assert model.config._attn_implementation == own
        got += stream
        assert tuple(delta.token_id for delta in got) == want.token_ids
        assert llm.memory.committed_bytes == 0


def test_gpt2_runs() -> None:
    """Learned positions, and a cache that it makes itself when none is given."""
    config = GPT2Config(**_TINY, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt = [5, 6, 7, 8]
    want = model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 4:]
    with llm_of(model) as llm:
        greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        assert llm.generate([prompt], greedy)[0].token_ids == tuple(want.tolist())


def test_a_layer_that_counts_positions_itself_counts_each_sequences_own() -> None:
    """Llama 4 tempers its queries by position, from the length that it asks the cache for."""
    config = Llama4TextConfig(
        **_TINY,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        attention_chunk_size=16,
        no_rope_layers=[1, 1, 0, 0],
        attn_temperature_tuning=True,
        floor_scale=4,
        attn_scale=2.0,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    prompts = [torch.arange(3, 3 + length).tolist() for length in (4, 40, 21)]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    want = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    with LLM(model, kv_cache_memory_bytes="16MB", max_num_seqs=4, max_num_batched_tokens=30) as llm:
        got = [list(c.token_ids) for c in llm.generate(prompts, greedy)]
    assert got == want


def test_layers_that_share_another_layers_memory_read_it_in_a_packed_step() -> None:
    config = Gemma3nTextConfig(
        **_TINY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_kv_shared_layers=1,
        max_position_embeddings=128,
        pad_token_id=0,
        vocab_size_per_layer_input=99,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=None,
    )
    model = random_model(config)
    prompts = [[3 + (7 * i + j) % 90 for i in range(20 + j)] for j in range(3)]
    with llm_of(model, max_num_batched_tokens=13) as llm:
        assert llm.attention_way == "table"
        said = llm.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True, temperature=0))
    for prompt, completion in zip(prompts, said, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.inference_mode():
            likeliest = model(ids, use_cache=False).logits[0].argmax(-1)
        assert likeliest[len(prompt) - 1 : -1].tolist() == list(completion.token_ids)
