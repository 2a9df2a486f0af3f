"""What code around ``generate`` does with a cache: it looks into layers, copies, trains, mistakes.

Transformers' own cache is the reference wherever it has an answer.
"""

import pickle
import threading
from collections.abc import Callable
from copy import copy, deepcopy
from functools import cache as once
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from conformance.covering import in_turn
from quire.errors import ConfigError, MemoryUnavailable, OutOfKVMemory, UnsupportedModel
from quire.kv import STRATEGIES
from quire.memory import CheckedMemory, FailingMemory, HostMemory
from quire.models.drop_in import DropInCache, cache
from quire.models.loader import adopt
from readers import source_ids, tiny_reader
from tiny import tiny_model, tokens
from zoo.build import tiny_model as zoo_model

pytestmark = pytest.mark.filterwarnings("ignore")

SHARED = "virtual-shared"
STORED = (*STRATEGIES, SHARED)
OPTIONS: dict[str, Any] = dict(
    max_model_len=128, kv_cache_memory_bytes="64MB", block_size=4, growth_tokens=8
)
GREEDY: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
ZOO = ("falcon_h1", "qwen3_next", "mamba", "lfm2")

reader = once(tiny_reader)


@once
def model_named(name: str) -> PreTrainedModel:
    return zoo_model(name) if name in ZOO else tiny_model(name)


def make(name: str, stored: str, **options: Any) -> DropInCache:
    options = {**OPTIONS, **options}
    if stored == SHARED:
        stored, options = "virtual", {**options, "shares_pages": True}
    made = cache(model_named(name), stored, **options)
    assert isinstance(made, DropInCache)
    return made


def generate(name: str, kept: Any, ids: Tensor, **mode: Any) -> Tensor:
    given_as = "cache_params" if name == "mamba" else "past_key_values"
    asked = {**GREEDY, given_as: kept, "attention_mask": torch.ones_like(ids), **mode}
    result: Tensor = model_named(name).generate(ids, **asked)
    return result


def theirs(name: str) -> DynamicCache:
    return DynamicCache(config=model_named(name).config)


# -- what layers hold -----------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "stored"), in_turn(["gemma3", "deepseek_v3"], STORED, each=2))
def test_keys_and_values_are_what_transformers_would_keep(stored: str, name: str) -> None:
    """After beams too, of which a row's tokens lie in several ranges; and they stay."""
    for mode in ({}, {"num_beams": 3}):
        own = theirs(name)
        with make(name, stored) as kept:
            assert [layer.keys for layer in kept.layers] == [None] * 4
            for each in (kept, own):
                generate(name, each, tokens(2, 11), **mode)
            shown = [(layer.keys, layer.values) for layer in kept.layers]
            first = shown[0][0].clone()
            kept.crop(-1)
            assert kept.layers[1].keys.shape[2] == shown[1][0].shape[2] - 1
        assert kept.layers[0].values is None
        for layer, (keys, values) in zip(own.layers, shown, strict=True):
            assert torch.allclose(keys, layer.keys, atol=1e-5)
            assert torch.allclose(values, layer.values, atol=1e-5)
        assert torch.equal(first, shown[0][0]), "a copy, which outlives the cache"


def test_recurrent_layers_are_of_transformers_own_class() -> None:
    """Code tells layers apart by ``type(layer) is LinearAttentionLayer``."""
    name, own = "qwen3_next", theirs("qwen3_next")
    with make(name, "paged") as kept:
        for each in (kept, own):
            generate(name, each, tokens(2, 9))
        linear = [type(layer) is LinearAttentionLayer for layer in kept.layers]
        assert linear == [type(layer) is LinearAttentionLayer for layer in own.layers]
        assert 0 < sum(linear) < len(linear)
        for ours, reference in zip(kept.layers, own.layers, strict=True):
            if type(ours) is LinearAttentionLayer:
                for at in range(ours.number_of_states):
                    assert torch.equal(ours.conv_states[at], reference.conv_states[at])
                    assert torch.equal(ours.recurrent_states[at], reference.recurrent_states[at])


# -- copies ---------------------------------------------------------------------------------------


class Family:
    """A cache of ours and one of theirs, and their copies: each pair is given the same."""

    def __init__(self, name: str, stored: str) -> None:
        ours = make(name, stored, provider=CheckedMemory(HostMemory()), max_num_seqs=64)
        own = theirs(name)
        for layer in own.layers:
            if layer.is_sliding:
                layer.activate_past_recording()
        self.pairs = [(ours, own)]
        self.last = [0]  # tokens of each pair's last update: what may be cut off

    def update(self, which: int, num_tokens: int) -> None:
        ours, own = self.pairs[which]
        for layer in range(4):
            k, v = torch.randn(2, 2, 2, num_tokens, 16)
            for want, got in zip(own.update(k, v, layer), ours.update(k, v, layer), strict=True):
                assert torch.equal(want, got)
        self.last[which] = num_tokens

    def copy(self, which: int) -> None:
        ours, own = self.pairs[which]
        self.pairs.append((deepcopy(ours), deepcopy(own)))
        self.last.append(self.last[which])

    def check(self) -> None:
        """Each holds its own tokens, whatever the others did."""
        for ours, own in self.pairs:
            for mine, reference in zip(ours.layers, own.layers, strict=True):
                if reference.get_seq_length():
                    visible = mine.keys.shape[2]
                    assert torch.equal(mine.keys, reference.keys[:, :, -visible:])
                    assert torch.equal(mine.values, reference.values[:, :, -visible:])
        usage, memory = self.pairs[0][0].usage(), self.pairs[0][0].memory
        if any(ours.rows is not None for ours, _ in self.pairs):
            assert usage.committed_bytes == memory.committed_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "stored"), in_turn(["llama", "gemma3"], STORED, each=2))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_copies_go_their_own_ways(stored: str, name: str, data: st.DataObject) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        family = Family(name, stored)
        family.update(0, data.draw(st.integers(1, 14)))
        for _ in range(data.draw(st.integers(2, 8))):
            which = data.draw(st.integers(0, len(family.pairs) - 1))
            ours, own = family.pairs[which]
            verb = data.draw(
                st.sampled_from(["update", "copy", "crop", "reorder", "drop", "reset"])
            )
            if verb == "update":
                family.update(which, data.draw(st.integers(1, 6)))
            elif verb == "copy" and len(family.pairs) < 5:
                family.copy(which)
            elif verb == "crop" and family.last[which] and own.get_seq_length() > 1:
                most = min(family.last[which], own.get_seq_length() - 1)
                removed = data.draw(st.integers(1, most))
                ours.crop(-removed)
                own.crop(-removed)
                family.last[which] = 0
            elif verb == "reorder" and own.get_seq_length():
                rows = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=2)))
                ours.reorder_cache(rows)
                own.reorder_cache(rows)
            elif verb == "drop" and len(family.pairs) > 1:
                del family.pairs[which], family.last[which], ours, own
            elif verb == "reset":
                ours.reset()
                own.reset()
                family.last[which] = 0
                family.update(which, 3)
            family.check()
        memory = family.pairs[0][0].memory
        for ours, _ in family.pairs:
            ours.close()
        assert memory.committed_bytes == memory.reserved_bytes == 0


def run(name: str, kept: Any, ids: Tensor) -> Tensor:
    """Logits of the last token, given one after the other."""
    given_as = "cache_params" if name == "mamba" else "past_key_values"
    with torch.no_grad():
        for token in ids.T:
            last = model_named(name)(token[:, None], **{given_as: kept}, use_cache=True)
    logits: Tensor = last.logits[:, -1]
    return logits


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "stored"), in_turn(["llama", "falcon_h1", "mamba", "lfm2"], STORED, each=2)
)
def test_one_prompt_is_continued_in_several_ways(stored: str, name: str) -> None:
    prompt, ways = tokens(2, 7), [tokens(2, 4, seed=seed) for seed in (1, 2, 3)]
    with make(name, stored) as kept:
        run(name, kept, prompt)
        twins = [deepcopy(kept), copy(kept), kept]
        got = [run(name, twin, more) for twin, more in zip(twins, ways, strict=True)]
        for more, logits in zip(ways, got, strict=True):
            own = theirs(name)
            run(name, own, prompt)
            assert torch.allclose(logits, run(name, own, more), rtol=1e-4, atol=1e-4)
        usage = kept.usage()
        assert usage.num_sequences in (0, 6)  # Mamba has none, only states
        assert usage.committed_bytes == kept.memory.committed_bytes
        for twin in twins:
            twin.close()
        assert kept.memory.committed_bytes == kept.memory.reserved_bytes == 0


@pytest.mark.parametrize("stored", ["paged", SHARED])
def test_a_copy_shares_the_blocks_of_its_prompt(stored: str) -> None:
    prompt = tokens(1, 96)
    with make("llama", stored, block_size=16) as kept:
        generate("llama", kept, prompt, max_new_tokens=1)
        alone_bytes = kept.memory.committed_bytes
        with deepcopy(kept) as twin:
            assert kept.memory.committed_bytes == alone_bytes
            got = generate("llama", twin, torch.cat([prompt, tokens(1, 5)], 1))
            assert kept.memory.committed_bytes < 1.5 * alone_bytes
            assert torch.equal(
                got, generate("llama", theirs("llama"), torch.cat([prompt, tokens(1, 5)], 1))
            )
        assert kept.memory.committed_bytes == alone_bytes


def test_copies_that_are_dropped_give_back_what_they_held() -> None:
    """Sixteen rows at most by default, and many more than that one after the other."""
    with make("llama", "paged") as kept:
        run("llama", kept, tokens(1, 20))
        held = kept.usage()
        for seed in range(20):
            run("llama", deepcopy(kept), tokens(1, 3, seed=seed))
        assert kept.usage() == held


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_copies_have_one_ceiling(name: str) -> None:
    with make(name, "paged", kv_cache_memory_bytes="256KiB", max_num_seqs=3) as kept:
        run(name, kept, tokens(1, 30))
        first, second = deepcopy(kept), deepcopy(kept)
        with pytest.raises(OutOfKVMemory, match="raise max_num_seqs"):
            deepcopy(kept)
        kept.reset()
        run(name, kept, tokens(1, 30))  # it begins anew beside its copies
        assert kept.usage().num_sequences == 3
        every = [twin for _ in range(90) for twin in (first, second, kept)]
        with pytest.raises(OutOfKVMemory):
            [run(name, twin, tokens(1, 1)) for twin in every]
        assert kept.memory.peak_committed_bytes <= 256 * 1024
        kept.close()
        k = torch.zeros(1, 2, 1, 16, dtype=torch.float64)
        with pytest.raises(ConfigError, match=r"given torch.float64, and its copies hold torch"):
            kept.update(k, k, len(kept.layers) - 1)


class Switch:
    """Which calls fail: all, while it is on."""

    on = False

    def __contains__(self, _: object) -> bool:
        return self.on


@pytest.mark.parametrize("stored", STORED)
def test_pages_that_are_refused_to_a_copy(stored: str) -> None:
    """What is half made belongs to all copies: each says so, and begins anew."""
    refusing = Switch()
    provider = FailingMemory(CheckedMemory(HostMemory()), failing=refusing)
    kept = make("llama", stored, provider=provider)
    run("llama", kept, tokens(2, 4))
    twin = deepcopy(kept)
    refusing.on = True
    if stored not in ("contiguous", "virtual"):  # a copy has all these pages from the beginning
        with pytest.raises(MemoryUnavailable, match="as it was told"):
            run("llama", twin, tokens(2, 60))
        assert twin.get_seq_length() == 0
        with pytest.raises(MemoryUnavailable, match="to a copy of this cache"):
            run("llama", kept, tokens(2, 60))
    refusing.on = False
    twin.close()
    kept.reset()
    assert kept.memory.committed_bytes == kept.memory.reserved_bytes == 0
    ids = tokens(2, 6)
    assert torch.equal(generate("llama", kept, ids), generate("llama", theirs("llama"), ids))
    kept.close()


def test_a_copy_of_what_has_a_source() -> None:
    model, ids = reader("bart"), source_ids(2, 9)
    begin = torch.full((2, 3), 5)
    kept, own = (
        cache(model, "paged", **{**OPTIONS, "max_model_len": 48}),
        EncoderDecoderCache(DynamicCache(), DynamicCache()),
    )
    with torch.no_grad():
        for each in (kept, own):
            model(input_ids=ids, decoder_input_ids=begin, past_key_values=each)
        twins = [deepcopy(kept), copy(kept)]
        kept.close()
        for twin in twins:
            assert twin.is_updated[0]
            got, wanted = (
                model(
                    input_ids=ids, decoder_input_ids=begin[:, :1], past_key_values=deepcopy(each)
                ).logits
                for each in (twin, own)
            )
            assert torch.allclose(got, wanted, atol=1e-5)
            twin.close()
    assert kept.memory.committed_bytes == 0


@pytest.mark.parametrize("used", [False, True])
def test_no_cache_is_pickled(used: bool) -> None:
    with make("llama", "virtual") as kept:
        if used:
            generate("llama", kept, tokens(1, 5))
        with pytest.raises(ConfigError, match=r"cannot be pickled: .*use copy.deepcopy"):
            pickle.dumps(kept)


# -- gradients ------------------------------------------------------------------------------------


def gradients(
    name: str, kept: Any, chunks: list[Tensor], *, first: bool = True
) -> dict[str, Tensor]:
    """Of all chunks' logits; ``first``: those of the first chunk too."""
    model = model_named(name)
    model.zero_grad()
    given_as = "cache_params" if name == "mamba" else "past_key_values"
    logits = []
    for number, chunk in enumerate(chunks):
        with torch.set_grad_enabled(first or number > 0):
            logits.append(model(chunk, **{given_as: kept}, use_cache=True).logits)
    torch.cat(logits, 1).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "stored"), in_turn(["llama", "gemma3", "falcon_h1", "mamba"], STORED, each=2)
)
def test_gradients_of_one_forward(stored: str, name: str) -> None:
    ids = tokens(2, 12)
    with make(name, stored) as kept:
        same_gradients(gradients(name, kept, [ids]), gradients(name, theirs(name), [ids]))


@pytest.mark.parametrize(("name", "stored"), in_turn(["llama", "gemma3"], STORED, each=2))
def test_gradients_after_tokens_that_need_none(stored: str, name: str) -> None:
    chunks = [tokens(2, 9), tokens(2, 4, seed=1)]
    with make(name, stored) as kept:
        got = gradients(name, kept, chunks, first=False)
        same_gradients(got, gradients(name, theirs(name), chunks, first=False))


def same_gradients(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(got[name], gradient, rtol=1e-3, atol=1e-5), name
    assert any(gradient.abs().max() > 1e-3 for gradient in wanted.values())


# Mamba's own code overwrites what a backward pass needs, with any cache.
@pytest.mark.parametrize(("name", "stored"), in_turn(["llama", "falcon_h1"], STORED, each=3))
def test_gradients_of_several_forwards_are_refused_in_words(stored: str, name: str) -> None:
    """At the backward pass: a caller that only forgot ``no_grad`` is not disturbed."""
    ids = tokens(2, 8)
    given_as = "cache_params" if name == "mamba" else "past_key_values"
    with make(name, stored) as kept:
        own = theirs(name)
        for token in ids.T:
            got, wanted = (
                model_named(name)(token[:, None], **{given_as: each}, use_cache=True).logits
                for each in (kept, own)
            )
            assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)
        with pytest.raises(ConfigError, match=r"earlier forward.*keeps .* without their gradients"):
            got.sum().backward()
        kept.reset()
        same_gradients(gradients(name, kept, [ids]), gradients(name, theirs(name), [ids]))


def test_gradients_of_a_source() -> None:
    model = reader("bart")
    given = dict(input_ids=source_ids(2, 9), decoder_input_ids=torch.full((2, 3), 5))
    found = []
    with cache(model, "paged", **{**OPTIONS, "max_model_len": 48}) as kept:
        for each in (kept, EncoderDecoderCache(DynamicCache(), DynamicCache())):
            model.zero_grad()
            model(**given, past_key_values=each).logits.square().mean().backward()
            found.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
        same_gradients(*found)
        with pytest.raises(ConfigError, match="without their gradients"):
            model(**given, past_key_values=kept).logits.sum().backward()


@pytest.mark.parametrize("stored", STORED)
def test_a_cache_goes_on_outside_of_inference_mode(stored: str) -> None:
    for name in ("llama", "falcon_h1"):
        with make(name, stored) as kept:
            with torch.inference_mode():
                model_named(name)(tokens(1, 6), past_key_values=kept)
            own = theirs(name)
            run(name, own, tokens(1, 6))
            more = tokens(1, 2, seed=1)
            wanted = run(name, own, more)
            assert torch.allclose(run(name, kept, more), wanted, rtol=1e-4, atol=1e-4)


# -- mistakes -------------------------------------------------------------------------------------


def test_another_models_layers_are_named() -> None:
    k = torch.zeros(1, 2, 3, 16)
    with make("llama", "paged") as kept:
        with pytest.raises(UnsupportedModel, match=r"layer 4, and LlamaForC.* has 4 layers: it is"):
            kept.update(k, k, 4)
        with pytest.raises(UnsupportedModel, match=r"layer 0 was given .*\(8, 16\).* LlamaForCaus"):
            kept.update(k.repeat(1, 4, 1, 1), k, 0)
        with pytest.raises(
            UnsupportedModel, match=r"a recurrent state in its layer 1, .*Llama.*Dr"
        ):
            kept.update_recurrent_state(k, 1)
        with pytest.raises(UnsupportedModel, match=r"a model has a convolution's state in its"):
            kept.update_conv_state(k, 1)
    with (
        make("qwen3_next", "paged") as kept,
        pytest.raises(UnsupportedModel, match="LinearAttenti"),
    ):
        kept.update(k, k, 0)


def test_another_model_with_more_layers_is_refused() -> None:
    """``generate`` of a model of eight layers, with the cache of one of four."""
    with make("llama", "paged") as kept, pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        generate("qwen3_next", kept, tokens(1, 5))


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call gives, or raises, in a thread of its own."""
    found: list[Any] = []

    def catch() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=catch, name="another")
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def step(kept: DropInCache, layers: range = range(4)) -> None:
    for layer in layers:
        kept.update(*torch.zeros(2, 1, 2, 1, 16), layer)


def test_a_second_thread_in_the_midst_of_a_step_is_refused() -> None:
    with make("llama", "paged") as kept:
        step(kept)
        in_thread(lambda: step(kept))  # between steps it may go from one to the other
        step(kept)
        step(kept, range(2))
        for use in (
            lambda: step(kept),
            lambda: kept.crop(-1),
            lambda: kept.reorder_cache(torch.tensor([0])),
            lambda: kept.batch_repeat_interleave(2),
            lambda: kept.batch_select_indices(torch.tensor([0])),
            lambda: deepcopy(kept),
        ):
            with pytest.raises(ConfigError, match=r"'another' uses .* step of thread 'MainThread'"):
                in_thread(use)
        step(kept, range(2, 4))  # the first one goes on undisturbed
        assert kept.get_seq_length() == 4
        in_thread(lambda: step(kept))


def test_threads_whose_tokens_are_mixed_are_both_refused() -> None:
    """The second one came in between two steps of the first: neither may go on."""
    with make("llama", "paged") as kept:
        step(kept)
        at_work, may_end = threading.Event(), threading.Event()
        refused: list[Exception] = []

        def second() -> None:
            step(kept, range(2))
            at_work.set()
            may_end.wait(10)
            try:
                step(kept, range(2, 4))
            except ConfigError as error:
                refused.append(error)

        thread = threading.Thread(target=second, name="another")
        thread.start()
        at_work.wait(10)
        with pytest.raises(ConfigError, match=r"Tokens of both lie in it: reset\(\) it"):
            step(kept)
        may_end.set()
        thread.join()
        assert "Tokens of both" in str(refused[0])
        with pytest.raises(ConfigError, match="Tokens of both"):
            step(kept)
        kept.reset()
        step(kept)


def test_a_step_that_failed_is_over() -> None:
    with make("llama", "paged", max_model_len=4) as kept:
        for _ in range(4):
            step(kept)
        with pytest.raises(ValueError, match="max_model_len"):
            in_thread(lambda: step(kept))
        kept.crop(-1)
        step(kept)
        in_thread(lambda: step_and_die(kept))
        assert kept.get_seq_length() == 4


def step_and_die(kept: DropInCache) -> None:
    """A thread that has ended holds nothing."""
    kept.crop(-1)
    step(kept, range(1))


def test_copies_are_used_in_threads_of_their_own() -> None:
    for stored in STORED:
        with make("llama", stored) as kept:
            prompt = tokens(1, 9)
            run("llama", kept, prompt)
            asked = [torch.cat([prompt, tokens(1, 4, seed=seed)], 1) for seed in range(3)]
            found: dict[int, Any] = {}

            def answer(number: int, twin: Any, asked: Any = asked, found: Any = found) -> None:
                found[number] = generate("llama", twin, asked[number])

            twins = [deepcopy(kept) for _ in asked]
            threads = [
                threading.Thread(target=answer, args=(number, twin))
                for number, twin in enumerate(twins)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for number, ids in enumerate(asked):
                assert torch.equal(found[number], generate("llama", theirs("llama"), ids))
            for twin in twins:
                twin.close()


class Adapter:
    def __init__(self, is_prompt_learning: bool) -> None:
        self.is_prompt_learning = is_prompt_learning


class Wrapper:
    """What PEFT puts around a model, as far as it can be told from outside."""

    def __init__(self, inside: PreTrainedModel, *, is_prompt_learning: bool) -> None:
        self._inside = inside
        self.peft_config = {"default": Adapter(is_prompt_learning)}

    def get_base_model(self) -> PreTrainedModel:
        return self._inside


def test_a_model_in_pefts_wrapper_is_told_how() -> None:
    model = model_named("llama")
    with pytest.raises(ConfigError, match=r"not Wrapper: pass its LlamaFor.* model.get_base_model"):
        adopt(Wrapper(model, is_prompt_learning=False))
    with pytest.raises(ConfigError, match="are prompts, which lie outside of its LlamaForCausalLM"):
        adopt(Wrapper(model, is_prompt_learning=True))
