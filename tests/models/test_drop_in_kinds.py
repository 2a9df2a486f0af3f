"""The drop-in cache and every kind of layer: recurrent ones above all, and both kinds in one.

One model for each mechanism that ``test_drop_in`` does not have; Transformers' own cache is the
reference.
"""

from collections.abc import Callable
from functools import cache as once
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import quire
from conformance.covering import in_turn
from quire.errors import ConfigError, MemoryUnavailable, OutOfKVMemory, UnsupportedModel
from quire.kv import STRATEGIES, Usage
from quire.memory import CheckedMemory, CountedMemory, FailingMemory, HostMemory
from quire.models.drop_in import DropInCache
from quire.models.drop_in.row_states import RowStates, state_row_bytes
from quire.spec import Group, ModelSpec, RecurrentState
from quire.spec.layer_specs import StateTensor
from zoo.build import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

SHARED = "virtual-shared"
STORED = (*STRATEGIES, SHARED)
OPTIONS: dict[str, Any] = dict(
    max_model_len=64, kv_cache_memory_bytes="8MB", block_size=4, growth_tokens=8
)
GREEDY: dict[str, Any] = dict(max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0)
PROMPT = 13  # longer than a window or a chunk

model_named = once(tiny_model)


def spec_of(name: str) -> ModelSpec:
    return ModelSpec.from_config(model_named(name).config.to_dict()).computed_in("float32")


def make(model: PreTrainedModel, stored: str, **options: Any) -> DropInCache:
    """``quire.cache``, which also knows ``virtual-shared``."""
    options = {**OPTIONS, **options}
    if stored == SHARED:
        return quire.cache(model, "virtual", shares_pages=True, **options)
    return quire.cache(model, stored, **options)


# -- the same tokens as Hugging Face --------------------------------------------------------------


def ids(num_rows: int, num_tokens: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (num_rows, num_tokens), generator=generator)


def left_padded() -> Tensor:
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def generate(model: PreTrainedModel, kept: Any, **mode: Any) -> Tensor:
    torch.manual_seed(1)
    name = "cache_params" if "Mamba" in type(model).__name__ else "past_key_values"
    asked = {"input_ids": ids(2, PROMPT), "attention_mask": left_padded(), **GREEDY, **mode}
    result: Tensor = model.generate(**{name: kept}, **asked)
    return result


def two_turns(model: PreTrainedModel, kept: Any) -> Tensor:
    first = generate(model, kept)
    both = torch.cat([first, ids(2, 5, seed=3)], 1)
    more = torch.ones(2, both.shape[1] - PROMPT, dtype=torch.long)
    mask = torch.cat([left_padded(), more], 1)
    return generate(model, kept, input_ids=both, attention_mask=mask)


Mode = Callable[[PreTrainedModel, Any], Tensor]
MODES: dict[str, Mode] = {
    "two-turns": two_turns,
    "beams": lambda model, kept: generate(model, kept, num_beams=3),
}
RETURNS: Mode = lambda model, kept: generate(  # noqa: E731
    model, kept, do_sample=True, num_return_sequences=2
)
LOOKUP: Mode = lambda model, kept: generate(  # noqa: E731
    model,
    kept,
    input_ids=ids(1, 4).repeat(1, 4),  # it repeats itself, so that guesses are made
    attention_mask=torch.ones(1, 16, dtype=torch.long),
    prompt_lookup_num_tokens=3,
)
MECHANISMS: dict[str, dict[str, Mode]] = {
    "mamba": {**MODES, "returns-2": RETURNS},  # states, and nothing else
    "falcon_h1": MODES,  # a state beside the attention of each layer
    "inkling_text": MODES,  # four convolutions beside it
    "qwen3_next": MODES,  # a convolution and a scan
    "lfm2": {**MODES, "lookup": LOOKUP},  # convolutions alone, which can go back
    "gemma4_text": {
        **MODES,
        "returns-2": RETURNS,
        "lookup": LOOKUP,
    },  # layers of two shapes, and some read another's
    "llama4_text": {**MODES, "lookup": LOOKUP},  # chunks
    "bailing_hybrid": MODES,  # states, and latents
    "gpt_neox_japanese": MODES,  # must have keys in one piece
}


@once
def reference(name: str, mode: str) -> Tensor:
    model = model_named(name)
    return MECHANISMS[name][mode](model, DynamicCache(config=model.config))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "strategy"), in_turn(MECHANISMS, STORED))
def test_the_same_tokens(strategy: str, name: str) -> None:
    model = model_named(name)
    for mode, run in MECHANISMS[name].items():
        provider = CheckedMemory(HostMemory())
        with make(model, strategy, provider=provider) as kept:
            assert torch.equal(run(model, kept), reference(name, mode)), mode
            usage = kept.usage()
            assert kept.memory.committed_bytes == usage.committed_bytes
            assert kept.memory.reserved_bytes == usage.reserved_bytes
            assert usage.used_bytes > 0
            assert not [tensor for layer in kept.layers for tensor in on_the_heap(layer, kept)]
        assert kept.memory.committed_bytes == kept.memory.reserved_bytes == 0


def on_the_heap(layer: Any, kept: DropInCache) -> list[Tensor]:
    """What a layer of the cache holds that is not ours."""
    held = [*getattr(layer, "conv_states", {}).values()]
    held += getattr(layer, "recurrent_states", {}).values()
    held += [vars(layer).get("keys"), vars(layer).get("values")]
    index = kept.layers.index(layer)
    ours = {state.data_ptr() for state in kept.states_of(index)} if held[:-2] else set()
    return [t for t in held if t is not None and t.numel() and t.data_ptr() not in ours]


def test_the_references_say_something() -> None:
    for name in MECHANISMS:
        said = [*reference(name, "two-turns")[:, PROMPT:], *reference(name, "beams")[:, PROMPT:]]
        assert len(set(torch.cat(said).tolist())) > 10


# -- what states take -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STORED)
def test_states_are_counted(strategy: str) -> None:
    """A row's states in whole pages, whatever its length; given back with the rest."""
    model, spec = model_named("mamba"), spec_of("mamba")
    with make(model, strategy) as kept:
        generate(model, kept)
        page = kept.memory.page_bytes
        assert kept.usage().used_bytes == 2 * spec.state_bytes
        row_bytes = -(-spec.state_bytes // page) * page
        assert kept.memory.committed_bytes == kept.usage().committed_bytes == 2 * row_bytes
        for give_back in (kept.reset, kept.close):
            give_back()
            assert kept.memory.committed_bytes == kept.memory.reserved_bytes == 0
            generate(model, kept)
            assert kept.memory.committed_bytes == 2 * row_bytes


@pytest.mark.parametrize("strategy", STORED)
def test_states_are_under_the_ceiling(strategy: str) -> None:
    model = model_named("mamba")
    with (
        make(model, strategy, kv_cache_memory_bytes="32KiB") as kept,
        pytest.raises(OutOfKVMemory, match=r"states of 2 rows take .* 32.00 KiB can ever be had"),
    ):
        generate(model, kept)
    assert kept.memory.peak_committed_bytes == 0


@pytest.mark.parametrize("strategy", STORED)
def test_keys_get_what_states_leave(strategy: str) -> None:
    model, spec = model_named("falcon_h1"), spec_of("falcon_h1")
    tokens_bytes = 64 * spec.bytes_per_token
    states_bytes = 2 * state_row_bytes(spec.groups, HostMemory().page_bytes)
    ceiling = states_bytes + 2 * tokens_bytes
    with make(model, strategy, kv_cache_memory_bytes=ceiling, growth_tokens=64) as kept:
        assert torch.equal(two_turns(model, kept), reference("falcon_h1", "two-turns"))
        before = kept.usage()
        with pytest.raises(OutOfKVMemory):
            kept.batch_repeat_interleave(40)  # more than there may be
        with pytest.raises(OutOfKVMemory, match="raise kv_cache_memory_bytes"):
            kept.batch_repeat_interleave(4)
        assert kept.usage() == before
        assert kept.memory.peak_committed_bytes <= ceiling


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_the_system_refuses_pages(failing: int) -> None:
    """The cache is empty afterwards, and works again."""
    model = model_named("falcon_h1")
    provider = FailingMemory(CheckedMemory(HostMemory()), failing={failing})
    kept = make(model, "paged", provider=provider)
    with pytest.raises(MemoryUnavailable, match="as it was told"):
        generate(model, kept, num_beams=3)
    assert kept.memory.committed_bytes == kept.memory.reserved_bytes == 0
    assert torch.equal(two_turns(model, kept), reference("falcon_h1", "two-turns"))
    kept.close()


def test_what_a_model_keeps_for_itself_is_not_counted() -> None:
    model, spec = model_named("recurrent_gemma"), spec_of("recurrent_gemma")
    with make(model, "virtual") as kept:
        first, own = (generate(model, each) for each in (kept, DynamicCache(config=model.config)))
        assert torch.equal(first, own)
        held = kept.get_seq_length()
        assert kept.usage().used_bytes == 2 * (spec.bytes_for(held) - spec.state_bytes)


# -- rows that change -----------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_states_go_where_their_rows_go(data: st.DataObject) -> None:
    shapes = ((3, 2), (5,)), ((70, 20),)
    groups = [
        Group(
            spec=RecurrentState(
                states=tuple(
                    StateTensor(name=f"conv{at}", shape=shape, dtype="float32")
                    for at, shape in enumerate(each)
                )
            ),
            layers=layers,
        )
        for each, layers in zip(shapes, ((0, 2), (1,)), strict=True)
    ]
    memory = CountedMemory(CheckedMemory(HostMemory()))
    states = RowStates(memory, groups, 2, max_rows=6)
    # Each state's values say which layer, which tensor and which row they were written for.
    wanted = [0.0, 1.0]

    def write() -> None:
        for layer in range(3):
            for at, kept in enumerate(states.layer(layer)):
                for row, value in enumerate(wanted):
                    kept[row] = value + 100 * layer + 10 * at

    write()
    for _ in range(data.draw(st.integers(1, 5))):
        row = st.integers(0, len(wanted) - 1)
        rows = data.draw(st.lists(row, min_size=1, max_size=6))
        states.select(rows)
        wanted = [wanted[row] for row in rows]
        for layer in range(3):
            for at, kept in enumerate(states.layer(layer)):
                assert len(kept) == len(rows)
                for row, value in enumerate(wanted):
                    assert (kept[row] == value + 100 * layer + 10 * at).all()
        row_bytes = state_row_bytes(groups, memory.page_bytes)
        assert memory.committed_bytes == len(rows) * row_bytes
        nothing = Usage(
            reserved_bytes=0, committed_bytes=0, used_bytes=0, num_sequences=0, num_tokens=0
        )
        usage = states.added_to(nothing)
        assert usage.committed_bytes == memory.committed_bytes
        assert usage.reserved_bytes == memory.reserved_bytes
        if data.draw(st.booleans()):
            wanted = [float(row) for row in range(len(rows))]
            write()
    states.close()
    assert memory.committed_bytes == memory.reserved_bytes == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "records"), [("falcon_h1", False), ("lfm2", True)])
@pytest.mark.parametrize("strategy", STORED)
def test_rows_are_repeated_and_chosen_in_every_layer(
    strategy: str, name: str, records: bool
) -> None:
    """What the rows of a hybrid say next is what the rows that they were would have said."""
    model = model_named(name)
    first, following = ids(2, PROMPT), ids(2, 1, seed=5)

    def logits(kept: DropInCache, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = model(tokens, past_key_values=kept).logits[:, -1]
        return out

    with make(model, strategy) as whole:
        logits(whole, first)
        wanted = logits(whole, following)
    with make(model, strategy) as kept:
        if records:  # more of the convolutions than their states, elsewhere until they move
            kept.activate_past_recording()
        logits(kept, first)
        kept.batch_repeat_interleave(3)  # 0 0 0 1 1 1
        kept.reorder_cache(torch.tensor([3, 0, 0, 1, 4, 5]))  # 1 0 0 0 1 1
        kept.batch_select_indices(torch.tensor([0, 1, 4]))  # 1 0 1
        rows = [1, 0, 1]
        got = logits(kept, following[rows])
        assert torch.allclose(got, wanted[rows], rtol=1e-4, atol=1e-4)
        assert kept.usage().num_sequences == 3
        assert kept.usage().committed_bytes == kept.memory.committed_bytes


# -- what is refused ------------------------------------------------------------------------------


def test_states_do_not_go_back_unless_told_to_record() -> None:
    """And then no key is forgotten either."""
    model = model_named("falcon_h1")
    with make(model, "paged") as kept:
        generate(model, kept)
        held = kept.get_seq_length()
        with pytest.raises(RuntimeError, match="does not track past states"):
            kept.crop(-1)
        assert kept.get_seq_length() == held


def test_states_that_are_not_as_the_config_says() -> None:
    kept = make(model_named("lfm2"), "paged")
    layer = spec_of("lfm2").recurrent_layers[0]
    (spec,) = spec_of("lfm2").layers[layer].specs
    assert isinstance(spec, RecurrentState)
    channels, taps = spec.states[0].shape
    for wrong in (
        torch.zeros(1, channels + 1, taps),
        torch.zeros(1, channels, taps, dtype=torch.float64),
    ):
        with pytest.raises(UnsupportedModel, match=rf"layer {layer} was given, as convolution 0"):
            kept.update_conv_state(wrong, layer)
    with pytest.raises(UnsupportedModel, match=rf"layer {layer} was given, as scan 0"):
        kept.update_recurrent_state(torch.zeros(1, 3), layer)
    with pytest.raises(ConfigError, match="runs on meta"):
        kept.update_conv_state(torch.zeros(1, channels, taps, device="meta"), layer)
    assert kept.memory.reserved_bytes == 0
    kept.close()


def test_layers_are_what_generate_asks_for() -> None:
    kept = make(model_named("falcon_h1"), "paged")
    assert not any(kept.is_linear)
    assert not kept.is_compileable
    kept = make(model_named("qwen3_next"), "paged")
    linear = [i for i, linear in enumerate(kept.is_linear) if linear]
    assert linear == list(spec_of("qwen3_next").recurrent_layers)
