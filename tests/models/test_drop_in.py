"""The drop-in cache: Hugging Face's own answers, token for token, in every strategy and mode.

The whole product of strategies, models and modes is run; each reference is computed once.
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

from conformance.covering import by_pairs, in_turn
from quire.errors import (
    ConfigError,
    MemoryUnavailable,
    OutOfKVMemory,
    RequestTooLong,
    UnsupportedModel,
)
from quire.kv import STRATEGIES, Copy, StorageOp
from quire.kv.storage.per_layer import RangeStorage
from quire.memory import CheckedMemory, FailingMemory, HostMemory
from quire.models.drop_in import DropInCache, cache
from tiny import CONFIGS, WINDOW, tiny_model, tokens

NEW_TOKENS = 16  # with a prompt of 11 a window of 9 is left behind, and several blocks of 4
GREEDY: dict[str, Any] = dict(
    max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
)
OPTIONS: dict[str, Any] = dict(
    max_model_len=128, kv_cache_memory_bytes="64MB", block_size=4, growth_tokens=8
)
SHARED = "virtual-shared"
STORED = (*STRATEGIES, SHARED)

model_named = once(tiny_model)


def make(model: PreTrainedModel, stored: str, **options: Any) -> DropInCache:
    """``cache``, which also knows ``virtual-shared``."""
    if stored == SHARED:
        return cache(model, "virtual", shares_pages=True, **options)
    return cache(model, stored, **options)


# -- the same tokens as Hugging Face --------------------------------------------------------------


def left_padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": tokens(2, 11), "attention_mask": mask}


def generate(model: PreTrainedModel, kept: Any, **mode: Any) -> Tensor:
    torch.manual_seed(1)
    result: Tensor = model.generate(past_key_values=kept, **{**GREEDY, **left_padded(), **mode})
    return result


def two_turns(model: PreTrainedModel, kept: Any) -> Tensor:
    """The second turn continues from what the first left in the cache."""
    padded = left_padded()
    first = generate(model, kept)
    ids = torch.cat([first, tokens(2, 5, seed=3)], 1)
    more = torch.ones(2, ids.shape[1] - 11, dtype=torch.long)
    mask = torch.cat([padded["attention_mask"], more], 1)
    return generate(model, kept, input_ids=ids, attention_mask=mask)


Mode = Callable[[PreTrainedModel, Any], Tensor]
MODES: dict[str, Mode] = {
    "greedy": generate,
    "sampling": lambda model, kept: generate(model, kept, do_sample=True, top_k=30),
    "beams": lambda model, kept: generate(model, kept, num_beams=4),
    "returns-3": lambda model, kept: generate(model, kept, do_sample=True, num_return_sequences=3),
    "prompt-lookup": lambda model, kept: generate(
        model,
        kept,
        input_ids=tokens(1, 4).repeat(1, 4),  # it repeats itself, so that guesses are made
        attention_mask=torch.ones(1, 16, dtype=torch.long),
        prompt_lookup_num_tokens=3,
    ),
    "chunked-prefill": lambda model, kept: generate(model, kept, prefill_chunk_size=4),
    "two-turns": two_turns,
}


@once
def reference(name: str, mode: str) -> Tensor:
    model = model_named(name)
    return MODES[mode](model, DynamicCache(config=model.config))


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("strategy", "name", "mode"), by_pairs(strategy=STORED, name=[*CONFIGS], mode=[*MODES])
)
def test_the_same_tokens(strategy: str, name: str, mode: str) -> None:
    model = model_named(name)
    provider = CheckedMemory(HostMemory())
    with make(model, strategy, provider=provider, **OPTIONS) as kept:
        assert torch.equal(MODES[mode](model, kept), reference(name, mode))
        usage = kept.usage()
        assert kept.memory.committed_bytes == usage.committed_bytes
        assert kept.memory.reserved_bytes == usage.reserved_bytes
        assert usage.used_bytes > 0
    assert kept.memory.committed_bytes == kept.memory.reserved_bytes == 0


def test_the_references_say_something() -> None:
    """Models that repeat one token would agree on anything."""
    for name in CONFIGS:
        assert len(set(reference(name, "sampling").flatten().tolist())) > 20


@pytest.mark.parametrize("strategy", ["paged", "virtual", SHARED])
def test_windows_are_given_back_while_generating(strategy: str) -> None:
    model = model_named("gemma3")  # half of its layers look back 9 tokens
    ids = tokens(1, 300)
    mode = dict(input_ids=ids, attention_mask=torch.ones_like(ids), prefill_chunk_size=64)
    options = {**OPTIONS, "max_model_len": 400, "block_size": 16}
    with make(model, strategy, **options) as kept:
        got = generate(model, kept, **mode)
        last_bytes = kept.usage().committed_bytes
        assert kept.memory.returned_bytes > 0
    with cache(model, "contiguous", **options) as whole:
        assert torch.equal(generate(model, whole, **mode), got)
        assert last_bytes < 0.65 * whole.usage().committed_bytes
    assert torch.equal(generate(model, DynamicCache(config=model.config), **mode), got)


# -- rows that are copied, dropped and cut --------------------------------------------------------


class Pair:
    """Our cache and Hugging Face's, given the same random keys and values."""

    def __init__(self, name: str, strategy: str, num_rows: int) -> None:
        model = model_named(name)
        options = {**OPTIONS, "max_num_seqs": 64}
        self.ours = make(model, strategy, provider=CheckedMemory(HostMemory()), **options)
        self.theirs = DynamicCache(config=model.config)
        for layer in self.theirs.layers:
            if layer.is_sliding:
                layer.activate_past_recording()
        self.num_rows = num_rows
        self.last = 0  # tokens of the last update: what may be cut off
        self.shape = {"llama": (2, 16), "gemma3": (2, 16)}[name]

    def update(self, num_tokens: int) -> None:
        heads, width = self.shape
        for layer in range(4):
            k, v = torch.randn(2, self.num_rows, heads, num_tokens, width)
            wanted = self.theirs.update(k, v, layer)
            got = self.ours.update(k, v, layer)
            for want, have in zip(wanted, got, strict=True):
                assert torch.equal(have, want)
        self.last = num_tokens
        assert self.ours.get_seq_length() == self.theirs.get_seq_length()

    def both(self, verb: str, argument: Any) -> None:
        for kept in (self.ours, self.theirs):
            getattr(kept, verb)(argument)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "strategy"), in_turn(["llama", "gemma3"], STORED, each=2))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rows_change_as_in_their_cache(strategy: str, name: str, data: st.DataObject) -> None:
    torch.manual_seed(0)
    pair = Pair(name, strategy, data.draw(st.integers(1, 3)))
    pair.update(data.draw(st.integers(1, 12)))
    for _ in range(data.draw(st.integers(1, 7))):
        verb = data.draw(st.sampled_from(["update", "reorder", "repeat", "select", "crop"]))
        row = st.integers(0, pair.num_rows - 1)
        if verb == "update":
            pair.update(data.draw(st.integers(1, 5)))
        elif verb == "reorder":
            rows = data.draw(st.lists(row, min_size=pair.num_rows, max_size=pair.num_rows))
            pair.both("reorder_cache", torch.tensor(rows))
        elif verb == "repeat" and pair.num_rows <= 6:
            repeats = data.draw(st.integers(1, 3))
            pair.both("batch_repeat_interleave", repeats)
            pair.num_rows *= repeats
        elif verb == "select":
            rows = data.draw(st.lists(row, min_size=1, max_size=4))
            pair.both("batch_select_indices", torch.tensor(rows))
            pair.num_rows = len(rows)
        elif verb == "crop":
            removed = data.draw(st.integers(0, pair.last))
            if pair.ours.get_seq_length() > removed:
                pair.both("crop", -removed)
                pair.last = 0  # theirs remembers only what the last update added
    pair.update(1)
    usage = pair.ours.usage()
    assert usage.num_sequences == pair.num_rows
    assert usage.committed_bytes == pair.ours.memory.committed_bytes
    pair.ours.close()


@pytest.mark.parametrize("strategy", STORED)
def test_rows_can_be_chosen_by_a_mask(strategy: str) -> None:
    pair = Pair("llama", strategy, 4)
    pair.update(6)
    pair.both("batch_select_indices", torch.tensor([True, False, True, True]))
    pair.num_rows = 3
    pair.update(1)
    pair.ours.close()


@pytest.mark.parametrize("strategy", STORED)
def test_cutting_back_behind_a_window_is_refused(strategy: str) -> None:
    pair = Pair("gemma3", strategy, 1)
    for _ in range(4):
        pair.update(100 // 4)
    if strategy in ("paged", SHARED):  # the others still hold the pages
        usage = pair.ours.usage()
        with pytest.raises(ValueError, match="cannot go back to 40 tokens"):
            pair.ours.crop(-60)
        assert pair.ours.usage() == usage
        assert pair.ours.get_seq_length() == 100
    pair.ours.crop(torch.tensor(-20))  # as assisted generation said it in Transformers 5.17
    assert pair.ours.get_seq_length() == 80
    assert type(pair.ours.get_seq_length()) is int
    pair.ours.crop(78)  # what is left, as Transformers said it before 5.18
    assert pair.ours.get_seq_length() == 78
    pair.ours.crop(500)
    assert pair.ours.get_seq_length() == 78
    pair.ours.close()


# -- beams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["contiguous", "growing", "virtual"])
def test_beams_move_no_keys_or_values(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[StorageOp] = []
    written: list[int] = []
    apply, write = RangeStorage.apply, RangeStorage.write

    def seen_apply(self: RangeStorage, asked: Any) -> None:
        changes.extend(asked := list(asked))
        apply(self, asked)

    def seen_write(self: RangeStorage, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        written.extend([len(slots)] if layer == 0 else [])
        write(self, layer, slots, k, v)

    monkeypatch.setattr(RangeStorage, "apply", seen_apply)
    monkeypatch.setattr(RangeStorage, "write", seen_write)
    options = {**OPTIONS, "growth_tokens": 128}  # a buffer that never has to grow
    with make(model_named("llama"), strategy, **options) as kept:
        got = generate(model_named("llama"), kept, num_beams=4)
        assert torch.equal(got, reference("llama", "beams"))
    assert not any(isinstance(change, Copy) for change in changes)
    assert written == [2 * 4 * 11] + [2 * 4] * (NEW_TOKENS - 1)


@pytest.mark.parametrize("strategy", ["paged", SHARED])
def test_beams_share_blocks(strategy: str) -> None:
    """Four beams after a long prompt hold little more than one sequence."""
    model, ids = model_named("llama"), tokens(1, 256)
    mode = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    options = {**OPTIONS, "max_model_len": 512, "block_size": 16}
    with make(model, strategy, **options) as one:
        generate(model, one, **mode)
        alone_bytes = one.memory.committed_bytes
    with make(model, strategy, **options) as four:
        got = generate(model, four, num_beams=4, **mode)
        assert four.memory.committed_bytes < 1.5 * alone_bytes
        # Hugging Face computes the prompt once a beam; each then gives its copy back.
        assert four.memory.peak_committed_bytes > 3 * alone_bytes
    theirs = DynamicCache(config=model.config)
    assert torch.equal(got, generate(model, theirs, num_beams=4, **mode))


# -- life and errors ------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STORED)
def test_nothing_is_taken_before_and_all_is_given_back_after(strategy: str) -> None:
    model = model_named("llama")
    kept = make(model, strategy, **OPTIONS)
    assert kept.rows is None
    assert kept.memory.reserved_bytes == kept.usage().committed_bytes == 0
    for give_back in (kept.reset, kept.close):
        assert torch.equal(generate(model, kept), reference("llama", "greedy"))
        assert kept.memory.committed_bytes > 0
        give_back()
        give_back()
        assert kept.memory.committed_bytes == kept.memory.reserved_bytes == 0
        assert kept.usage().num_tokens == kept.get_seq_length() == 0
    with kept:
        generate(model, kept)
    assert kept.memory.committed_bytes == 0
    assert kept.memory.peak_committed_bytes > 0


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="strategy='page' is no cache strategy; known: contiguous, growing, paged"
    ):
        cache(model_named("llama"), "page")


@pytest.mark.parametrize("option", ["max_model_len", "block_size", "growth_tokens", "max_num_seqs"])
def test_sizes_must_be_positive(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}=0 must be at least 1"):
        cache(model_named("llama"), **{option: 0})


def test_more_memory_than_there_is() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes=.* more than the machine has"):
        cache(model_named("llama"), kv_cache_memory_bytes="900TB")


@pytest.mark.parametrize("strategy", STORED)
def test_longer_than_the_longest(strategy: str) -> None:
    with (
        make(model_named("llama"), strategy, **{**OPTIONS, "max_model_len": 20}) as kept,
        pytest.raises(RequestTooLong, match=r"21 tokens need .*at most 20 .*raise max_model_len"),
    ):
        generate(model_named("llama"), kept)


@pytest.mark.parametrize("strategy", STORED)
def test_more_than_could_ever_be_held(strategy: str) -> None:
    ceiling = 8 if strategy in (SHARED, "paged") else 12  # a page has entries of all layers there
    options = {**OPTIONS, "kv_cache_memory_bytes": f"{ceiling}KiB"}
    with (
        make(model_named("llama"), strategy, **options) as kept,
        pytest.raises(
            RequestTooLong, match=rf"{ceiling}.00 KiB can ever be had.*raise kv_cache_memory"
        ),
    ):
        generate(model_named("llama"), kept)
    assert kept.memory.peak_committed_bytes <= ceiling * 1024


@pytest.mark.parametrize("strategy", STORED)
def test_more_rows_than_fit(strategy: str) -> None:
    """One row of 128 tokens takes 128 KiB here, four do not fit."""
    model = model_named("llama")
    ids = tokens(4, 100)
    options = {**OPTIONS, "kv_cache_memory_bytes": "300KiB"}
    with make(model, strategy, **options) as kept:
        with pytest.raises(OutOfKVMemory, match=r"4 rows of .*raise kv_cache_memory_bytes"):
            generate(model, kept, input_ids=ids, attention_mask=torch.ones_like(ids))
        assert kept.get_seq_length() == kept.usage().num_tokens == 0
        kept.reset()
        generate(model, kept, input_ids=ids[:2], attention_mask=torch.ones_like(ids[:2]))


@pytest.mark.parametrize("strategy", STORED)
def test_more_rows_than_there_may_be(strategy: str) -> None:
    options = {**OPTIONS, "max_num_seqs": 1}
    with (
        make(model_named("llama"), strategy, **options) as kept,
        pytest.raises(OutOfKVMemory, match="2 rows asked, 1 at most: raise max_num_seqs"),
    ):
        generate(model_named("llama"), kept)


@pytest.mark.parametrize("strategy", STORED)
def test_as_many_rows_as_there_may_be(strategy: str) -> None:
    """Beams that continue others need no more than that."""
    with make(model_named("llama"), strategy, **{**OPTIONS, "max_num_seqs": 8}) as kept:
        got = generate(model_named("llama"), kept, num_beams=4)
    assert torch.equal(got, reference("llama", "beams"))


@pytest.mark.parametrize("strategy", STORED)
def test_the_system_refuses_pages(strategy: str) -> None:
    """Half a step was carried out: the cache is empty afterwards, and works again."""
    model = model_named("llama")
    failing = FailingMemory(CheckedMemory(HostMemory()), failing={6})
    kept = make(model, strategy, provider=failing, **OPTIONS)
    with pytest.raises(MemoryUnavailable, match="as it was told"):
        generate(model, kept)
    assert kept.memory.committed_bytes == kept.memory.reserved_bytes == 0
    assert kept.get_seq_length() == 0
    assert torch.equal(generate(model, kept), reference("llama", "greedy"))
    kept.close()


def test_another_number_of_rows_needs_another_cache() -> None:
    with cache(model_named("llama"), **OPTIONS) as kept:
        generate(model_named("llama"), kept)
        with pytest.raises(ConfigError, match="holds 2 rows and was given 3"):
            kept.update(*torch.zeros(2, 3, 2, 1, 16), 0)


def test_devices_and_dtypes_that_cannot_be_kept() -> None:
    kept = cache(model_named("llama"), **OPTIONS)
    for wrong, message in (
        (torch.zeros(2, 2, 2, 1, 16, device="meta"), "runs on meta; this cache keeps CPU"),
        (torch.zeros(2, 2, 2, 1, 16, dtype=torch.complex64), "'complex64' is unknown; known: flo"),
    ):
        with pytest.raises(ConfigError, match=message):
            kept.update(*wrong, 0)
    kept.update(*torch.zeros(2, 2, 2, 1, 16), 0)
    for other in (torch.float16, torch.float64):
        with pytest.raises(ConfigError, match=f"holds torch.float32 and was given {other}"):
            kept.update(*torch.zeros(2, 2, 2, 1, 16, dtype=other), 0)
    kept.close()


def test_entries_of_another_shape_are_refused() -> None:
    kept = cache(model_named("llama"), **OPTIONS)
    with pytest.raises(
        UnsupportedModel, match=r"layer 1 was given .*\(4, 16\).*LlamaFor.* has \(\(2, 16\)"
    ):
        kept.update(*torch.zeros(2, 2, 4, 1, 16), 1)
    kept.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_entries_are_kept_in_the_model_s_dtype(dtype: torch.dtype) -> None:
    with cache(model_named("llama"), **OPTIONS) as kept:
        kept.update(*torch.zeros(2, 1, 2, 4, 16, dtype=dtype), 0)
        k, v = kept.update(*torch.ones(2, 1, 2, 1, 16, dtype=dtype), 1)
        assert k.dtype == v.dtype == dtype
        assert kept.usage().used_bytes == 4 * 4 * 2 * 16 * 2 * 2


def test_layers_are_what_generate_asks_for() -> None:
    kept = cache(model_named("gemma3"), **OPTIONS)
    assert isinstance(kept, DropInCache)
    assert [layer.is_sliding for layer in kept.layers] == [True, False] * 2
    k = torch.zeros(1, 2, 20, 16)
    for index in range(4):
        kept.update(k, k, index)
    assert [kept.get_mask_sizes(1, index) for index in (0, 1)] == [(WINDOW, 12), (21, 0)]
    kept.close()
