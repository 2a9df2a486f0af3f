"""Sequences see shared blocks through windows: one copy, read by unmodified attention."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from conformance.memory_cases import memfd_bytes, rollup_bytes
from kv.geometry import MIB, QWEN3_4B, config, spec_of
from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kv import (
    Commit,
    Extension,
    Fits,
    Map,
    NotNow,
    StorageOp,
    Unmap,
    build_accounting,
    build_storage,
)
from quire.kv.layout import stacked_block_size
from quire.kv.virtual import VirtualAccounting
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.memory import HostMemory
from quire.memory.machine.probe import num_mappings
from quire.spec import (
    AttentionSpec,
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    SlidingWindow,
)
from tiny import tiny_model, tokens

pytestmark = pytest.mark.skipif(HostMemory().cannot_share is not None, reason="no heaps here")

# One head of 64 in bfloat16: 16 tokens of a layer are a page of 4,096 bytes.
FULL = FullAttention(num_kv_heads=1, head_dim=64, dtype="bfloat16")
WINDOW = SlidingWindow(num_kv_heads=1, head_dim=64, dtype="bfloat16", window=20)
CHUNKED = ChunkedAttention(num_kv_heads=1, head_dim=64, dtype="bfloat16", chunk=32)
SIZE, PAGE = 16, 4096
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 16 * MIB, "max_model_len": 256}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


class Cache:
    """Both halves, and what was written: entry t of a sequence is drawn from its seed and t."""

    def __init__(self, *layers: AttentionSpec, **changed: Any) -> None:
        given = {"shares_pages": True, "capacity_bytes": 64 * MIB, "max_model_len": 1024} | changed
        spec = spec_of(*layers)
        accounting = build_accounting("virtual", spec, config(**given))
        assert isinstance(accounting, SharedVirtualAccounting)
        self.accounting = accounting
        self.storage = build_storage("virtual", accounting, HostMemory())
        self.layers = layers

    def step(self) -> list[StorageOp]:
        changes = self.accounting.drain()
        self.storage.apply(changes)
        self.accounting.check()
        assert self.storage.memory.committed_bytes == self.accounting.usage().committed_bytes
        return changes

    def begin(self, seq_id: int, prompt: Sequence[int]) -> tuple[int, list[StorageOp]]:
        """A prompt, computed whole. Returns: tokens of it that were found, and the changes."""
        ids = np.array(prompt, np.int32)
        self.accounting.add(seq_id)
        hit = self.accounting.match_prefix(seq_id, ids)
        assert not isinstance(
            self.accounting.try_extend(seq_id, len(ids), Extension(hit=hit)), NotNow
        )
        changes, found = self.step(), hit.num_tokens
        self.write(seq_id, found, len(ids))
        self.accounting.mark_computed([seq_id], [len(ids) - found], ids[found:])
        return found, changes

    def extend(self, seq_id: int, num_tokens: int) -> list[StorageOp]:
        self.accounting.try_extend(seq_id, num_tokens)
        return self.step()

    def free(self, seq_id: int) -> list[StorageOp]:
        self.accounting.free(seq_id)
        return self.step()

    def write(self, seq_id: int, start: int, stop: int) -> None:
        for index, group in enumerate(self.accounting.groups):
            slots = torch.from_numpy(self.accounting.slots(index, seq_id, start, stop))
            for layer in group.layers:
                shapes = self.layers[layer].entry_shapes
                k, v = (torch.randn(stop - start, *shape, dtype=torch.bfloat16) for shape in shapes)
                self.storage.write(layer, slots, k, v)

    def seen(self, seq_id: int, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values as a kernel is given them, [1, K, num_tokens, D]."""
        (group,) = (i for i, g in enumerate(self.accounting.groups) if layer in g.layers)
        (row,) = self.accounting.table(group, seq_id)
        view = self.storage.view(layer)
        return view.k[row][None, :, :num_tokens], view.v[row][None, :, :num_tokens]

    def attend(self, seq_id: int, layer: int, num_tokens: int) -> Tensor:
        k, v = self.seen(seq_id, layer, num_tokens)
        q = torch.ones(1, k.shape[1], 4, k.shape[3], dtype=k.dtype)
        return scaled_dot_product_attention(q, k, v)


def shown_slots(changes: list[StorageOp]) -> int:
    return sum(change.num_slots for change in changes if isinstance(change, Map))


def prompt(num_tokens: int, *, own: int = 0) -> list[int]:
    """Token ids that prompts of any length begin with, and ``own`` more that no other has."""
    return [*range(num_tokens), *(10_000 + own + i for i in range(8 if own else 0))]


# -- how large a block is ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_bytes", "layers_per_page", "num_tokens", "num_bytes"),
    [
        (4096, None, 16, 16 * 147_456),
        (4096, 1, 16, 16 * 147_456),
        (2 * MIB, None, 128, 18 * MIB),
        (2 * MIB, 4, 128, 18 * MIB),
        (2 * MIB, 1, 512, 72 * MIB),
    ],
)
def test_a_block_is_whole_pages(
    page_bytes: int, layers_per_page: int | None, num_tokens: int, num_bytes: int
) -> None:
    """Qwen3-4B, and granules as a GPU has them."""
    size = stacked_block_size(QWEN3_4B.groups, 16, page_bytes, layers_per_page)
    assert size == num_tokens
    assert size * QWEN3_4B.bytes_per_token == num_bytes


def test_a_block_suits_every_group_and_a_shorter_last_stack() -> None:
    wide = FullAttention(num_kv_heads=3, head_dim=80, dtype="bfloat16")  # 960 bytes: 64 tokens
    assert stacked_block_size(spec_of(wide).groups, 1, PAGE, None) == 64
    assert stacked_block_size(spec_of(wide, WINDOW).groups, 24, PAGE, None) == 192
    # Stacks of 4 and of 1: 1,024 bytes a token, and as many, of which 256 are used.
    assert stacked_block_size(spec_of(*[FULL] * 5).groups, 1, PAGE, 4) == 4


def test_scales_across_their_own_size_are_refused() -> None:
    odd = FullAttention(num_kv_heads=1, head_dim=3, dtype="int8")
    with pytest.raises(ConfigError, match=r"6 bytes of int8.*multiple of 4.*kv_cache_dtype"):
        Cache(odd)
    Cache(FullAttention(num_kv_heads=2, head_dim=3, dtype="int8"))


# -- one copy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers_per_page", [None, 1])
def test_a_common_prefix_is_one_copy(layers_per_page: int | None) -> None:
    before = memfd_bytes()
    cache = Cache(FULL, FULL, layers_per_page=layers_per_page)
    cache.begin(0, prompt(512, own=1))
    found, changes = cache.begin(1, prompt(512, own=2))
    assert found == 512
    assert [c.stop - c.start for c in changes if isinstance(c, Commit)] == [SIZE]
    assert memfd_bytes() - before == (512 + 2 * SIZE) * 512 == cache.storage.memory.committed_bytes
    for layer in range(2):
        pairs = zip(cache.seen(0, layer, 512), cache.seen(1, layer, 512), strict=True)
        assert all(torch.equal(one, two) and one.any() for one, two in pairs)
        assert torch.equal(cache.attend(0, layer, 512), cache.attend(1, layer, 512))
        assert not torch.equal(cache.attend(0, layer, 520), cache.attend(1, layer, 520))


def test_forks_are_one_copy_until_they_diverge() -> None:
    before = memfd_bytes()
    cache = Cache(FULL, FULL, max_num_seqs=33)
    cache.begin(0, prompt(1000))
    one = memfd_bytes() - before
    for seq_id in range(1, 33):
        cache.accounting.fork(0, seq_id)
    cache.step()
    assert memfd_bytes() - before == one
    for seq_id in range(33):
        cache.extend(seq_id, 1001)
        cache.write(seq_id, 1000, 1001)
    assert memfd_bytes() - before == one + 32 * SIZE * 512
    for seq_id in range(1, 33):
        assert torch.equal(cache.attend(0, 1, 1000), cache.attend(seq_id, 1, 1000))
        assert not torch.equal(cache.attend(0, 1, 1001), cache.attend(seq_id, 1, 1001))
    for seq_id in range(33):
        cache.free(seq_id)
    cache.accounting.reset_prefix_cache()
    cache.step()
    assert memfd_bytes() == before


def test_reading_past_the_end_is_harmless() -> None:
    """A kernel may read the longest sequence's addresses under a mask: zeros, and no memory."""
    cache = Cache(FULL, max_model_len=16_384)
    cache.begin(0, prompt(100))
    k, v = cache.seen(0, 0, 16_384)
    q = torch.randn(1, 1, 4, 64, dtype=torch.bfloat16)
    mask = torch.arange(16_384)[None] < 100
    taken = memfd_bytes(), rollup_bytes("Pss_Shmem")
    over = scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    assert (memfd_bytes(), rollup_bytes("Pss_Shmem")) == taken
    k, v = cache.seen(0, 0, 100)
    exact = scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert (over - exact).abs().max() < 1e-5
    assert not cache.seen(0, 0, 16_384)[0][..., 112:, :].any()


GEOMETRIES: dict[str, tuple[AttentionSpec, ...]] = {
    "several groups": (
        FullAttention(num_kv_heads=2, head_dim=16, dtype="bfloat16"),
        SlidingWindow(num_kv_heads=1, head_dim=16, dtype="bfloat16", window=400),
        FullAttention(num_kv_heads=2, head_dim=16, dtype="bfloat16"),
    ),
    "odd widths": (
        FullAttention(num_kv_heads=3, head_dim=24, value_head_dim=40, dtype="bfloat16"),
    ),
    "latents": (LatentAttention(latent_dim=24, rope_dim=8, dtype="bfloat16"),) * 2,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_entries_are_those_of_private_ranges(name: str, dtype: str) -> None:
    """To the bit, scales too, as gathered and as seen."""
    spec = spec_of(*GEOMETRIES[name]).with_kv_dtype(dtype)
    given = config(capacity_bytes=8 * MIB, max_model_len=512, max_num_seqs=2, shares_pages=True)
    private = config(capacity_bytes=8 * MIB, max_model_len=512, max_num_seqs=2)
    read = []
    for one in (given, private):
        accounting = build_accounting("virtual", spec, one)
        storage = build_storage("virtual", accounting, HostMemory())
        for seq_id in range(2):
            accounting.add(seq_id)
            accounting.try_extend(seq_id, 300)
        storage.apply(accounting.drain())
        generator, found = torch.Generator().manual_seed(0), []
        for index, group in enumerate(accounting.groups):
            slots = torch.from_numpy(accounting.slots(index, 1, 0, 300))
            (row,) = accounting.table(index, 1)
            for layer in group.layers:
                shapes = spec.layers[layer].specs[0].entry_shapes  # type: ignore[union-attr]
                k, v = (torch.randn(300, *shape, generator=generator) for shape in shapes)
                storage.write(layer, slots, k, v)
                view = storage.view(layer)
                parts = [view.k[row, :, :300], view.v[row, :, :300]]
                parts += [x[row, :, :300] for x in (view.k_scale, view.v_scale) if x is not None]
                found += [*storage.gather(layer, slots), *parts]
        read.append([x.clone() for x in found])
        storage.close()
    assert len(read[0]) == len(read[1])
    for shared, own in zip(*read, strict=True):
        assert shared.dtype == own.dtype
        assert torch.equal(shared.float(), own.float())
        assert shared.float().any()


# -- what a window shows -------------------------------------------------------------------------


def decode(cache: Cache, num_tokens: int) -> list[StorageOp]:
    """A sequence from nothing, token by token."""
    cache.accounting.add(0)
    changes = []
    for end in range(1, num_tokens + 1):
        changes += cache.extend(0, end)
        cache.write(0, end - 1, end)
    return changes


def test_what_a_sliding_window_has_passed_is_hidden() -> None:
    cache = Cache(FULL, WINDOW)
    decode(cache, 100)
    passed, _ = cache.seen(0, 1, 112)
    assert not passed[..., :80, :].any()
    assert passed[..., 80:100, :].any(-1).all()
    whole, _ = cache.seen(0, 0, 100)
    assert whole.any(-1).all()
    assert cache.accounting.usage().committed_bytes == (112 + 32) * 256


def test_a_window_that_slides_leaves_what_it_reads_where_it_is() -> None:
    """A page that is mapped anew faults when it is read."""
    cache = Cache(FULL, WINDOW)
    hidden = [change for change in decode(cache, 100) if isinstance(change, Unmap)]
    assert {change.group for change in hidden} == {1}
    assert sum(change.stop - change.start for change in hidden) == 80  # it reads from 80 on


def test_a_parked_window_is_adopted() -> None:
    """What a prompt has in common with one that ended is shown already."""
    cache = Cache(FULL)
    cache.begin(0, prompt(512, own=1))
    expected = cache.attend(0, 0, 512)
    (row,) = cache.accounting.table(0, 0)
    cache.free(0)
    found, changes = cache.begin(1, prompt(512, own=2))
    assert found == 512
    assert cache.accounting.table(0, 1).tolist() == [row]
    assert shown_slots(changes) == SIZE
    assert torch.equal(cache.attend(1, 0, 512), expected)
    # While a sequence has that one, another window is filled anew.
    found, changes = cache.begin(2, prompt(512, own=3))
    assert (found, shown_slots(changes)) == (512, 512 + SIZE)
    assert torch.equal(cache.attend(2, 0, 512), expected)


def test_the_most_alike_of_parked_windows_is_adopted() -> None:
    cache = Cache(FULL)
    for seq_id, length in enumerate((64, 256, 128)):
        cache.begin(seq_id, prompt(length, own=100 * (seq_id + 1)))
    rows = [int(cache.accounting.table(0, seq_id)[0]) for seq_id in range(3)]
    for seq_id in range(3):
        cache.free(seq_id)
    _, changes = cache.begin(3, prompt(320))
    assert cache.accounting.table(0, 3).tolist() == [rows[1]]
    assert shown_slots(changes) == 320 - 256


def test_parked_windows_are_given_up_by_a_resize() -> None:
    cache = Cache(FULL)
    cache.begin(0, prompt(512))
    cache.free(0)
    capacity_bytes = cache.accounting.ceiling.now_bytes
    cache.accounting.resize(capacity_bytes - PAGE, for_now=True)
    changes = cache.step()
    assert [type(change) for change in changes] == [Unmap]
    assert cache.accounting.usage().cached_bytes == 512 * 256  # only addresses have gone
    cache.accounting.resize(capacity_bytes)
    found, changes = cache.begin(1, prompt(512))
    assert (found, shown_slots(changes)) == (511, 512)  # a prompt's last token is computed


# -- limits --------------------------------------------------------------------------------------


def test_mappings_that_others_hold_are_waited_for() -> None:
    cache = Cache(FULL, max_mappings=10)
    cache.begin(0, prompt(64))
    cache.begin(1, prompt(8, own=1))
    cache.accounting.add(2)
    before = cache.accounting.usage()
    verdict = cache.accounting.try_extend(2, 300)
    assert isinstance(verdict, NotNow)
    assert (verdict.option, verdict.holders) == ("vm.max_map_count", (0, 1))
    assert "raise vm.max_map_count" in str(verdict)
    assert cache.accounting.usage() == before
    assert cache.step() == []
    for seq_id in (0, 1):
        cache.free(seq_id)
    cache.extend(2, 300)  # alone it may try, and takes three: its blocks are neighbours
    assert cache.accounting.num_tokens(2) == 300


def test_a_fork_needs_as_many_mappings() -> None:
    cache = Cache(FULL, max_mappings=5)
    cache.begin(0, prompt(64))
    verdict = cache.accounting.fork(0, 1)
    assert isinstance(verdict, NotNow)
    assert verdict.option == "vm.max_map_count"
    cache.accounting.check()
    assert cache.accounting.usage().num_sequences == 1


def test_forks_of_one_step_are_counted_together() -> None:
    cache = Cache(FULL, max_mappings=10)
    cache.begin(0, prompt(64))
    verdicts = [type(cache.accounting.fork(0, new)).__name__ for new in (1, 2, 3)]
    assert verdicts == ["Fits", "Fits", "NotNow"]
    cache.step()
    assert isinstance(cache.accounting.fork(0, 3), NotNow)


def test_the_limit_holds_within_a_step() -> None:
    """Each who is let in counts for those who ask after it, drained or not."""
    cache = Cache(FULL, max_mappings=30, max_num_seqs=50)
    accounting, windows = cache.accounting, cache.accounting._windows
    for seq_id in range(20):
        accounting.add(seq_id)
        accounting.try_extend(seq_id, SIZE)
    cache.step()
    assert windows.num_mappings == 30
    for seq_id in range(5, 10):
        cache.free(seq_id)
    forked = [not isinstance(accounting.fork(0, new), NotNow) for new in range(100, 110)]
    assert forked == [True] * 5 + [False] * 5
    cache.step()
    assert windows.num_mappings == 30
    for num_tokens in range(2 * SIZE, 10 * SIZE, SIZE):
        assert accounting.try_extend_each([0, 1, 2], [num_tokens] * 3) < 3
        assert isinstance(accounting.try_extend(1, num_tokens), NotNow)
        cache.step()


def test_the_limit_holds_from_call_to_call_of_a_step() -> None:
    """What a call may add counts for the next one, before anything is drained."""
    cache = Cache(FULL, max_mappings=14, max_num_seqs=8)
    for seq_id in range(4):
        cache.accounting.add(seq_id)
        cache.accounting.try_extend(seq_id, SIZE)
    cache.step()
    assert cache.accounting._windows.num_mappings == 12
    grown = [cache.accounting.try_extend_each([seq_id], [2 * SIZE]) for seq_id in range(4)]
    assert grown == [1, 1, 0, 0]
    cache.step()


def fill_alike(cache: Cache, *, num_marked: int, others: int = 0) -> None:
    """Two fill the same blocks at the same time, and the first tokens of the second are marked."""
    cache.begin(0, prompt(4 * SIZE))
    cache.accounting.add(1)
    assert not isinstance(cache.accounting.try_extend(1, 4 * SIZE), NotNow)
    cache.step()
    for seq_id in range(2, 2 + others):
        cache.begin(seq_id, prompt(8, own=seq_id))
    ids = np.array(prompt(num_marked), np.int32)
    cache.accounting.mark_computed([1], [num_marked], ids)


@pytest.mark.parametrize(("others", "num_merged"), [(0, 2), (1, 0)])
def test_blocks_are_merged_where_there_are_mappings(others: int, num_merged: int) -> None:
    """A window that shows what another one filled, and then its own again, is cut in two."""
    cache = Cache(FULL, max_mappings=9)
    fill_alike(cache, num_marked=2 * SIZE, others=others)
    cache.step()
    assert cache.accounting._windows.num_mappings == (9 if others else 7)
    num_blocks = 8 + others - num_merged
    assert cache.accounting.usage().used_bytes == num_blocks * SIZE * 256


def test_a_merge_that_takes_no_mapping_needs_none() -> None:
    """A fork's last block, filled like its parent's, goes back behind those that they share."""
    cache = Cache(FULL, max_mappings=7)
    windows = cache.accounting._windows
    cache.begin(0, prompt(2 * SIZE - 1))
    cache.accounting.fork(0, 1)
    cache.step()
    for seq_id in (0, 1):
        assert not isinstance(cache.accounting.try_extend(seq_id, 2 * SIZE), NotNow)
    cache.step()
    assert windows.num_mappings == 7
    cache.accounting.mark_computed([1, 0], None, np.array([5, 5], np.int32))
    cache.step()
    assert windows.num_mappings == 6


def test_a_copy_before_room_for_drafts_takes_two_mappings() -> None:
    cache = Cache(FULL, max_mappings=7)
    cache.begin(0, prompt(20))
    cache.accounting.try_extend(0, 21, Extension(lookahead_tokens=20))
    cache.step()
    cache.accounting.fork(0, 1)
    cache.step()
    assert cache.accounting._windows.num_mappings == 6
    verdict = cache.accounting.try_extend(0, 22)
    assert isinstance(verdict, NotNow)
    assert verdict.option == "vm.max_map_count"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("layer", "left"), [(FULL, 0), (CHUNKED, 32)])
def test_a_window_that_shows_nothing_begins_anew(
    layer: AttentionSpec, left: int, at_once: bool
) -> None:
    """After a trim, for instance to a chunk's end; what it had belongs to others by then."""
    cache = Cache(layer, max_mappings=7)
    cache.begin(0, prompt(32))
    cache.extend(0, 33)
    cache.accounting.trim(0, left)
    cache.step()
    assert cache.accounting._windows.num_mappings == 0
    cache.begin(1, prompt(8, own=1))
    cache.begin(2, prompt(8, own=2))
    if at_once:
        assert cache.accounting.try_extend_each([0], [left + 1]) == 0
    assert isinstance(cache.accounting.try_extend(0, left + 1), NotNow)


def test_a_fork_shows_what_was_merged_in_this_step() -> None:
    """Not what its parent's window shows until then."""
    cache = Cache(FULL, max_mappings=10)
    fill_alike(cache, num_marked=2 * SIZE)
    assert isinstance(cache.accounting.fork(1, 2), NotNow)


def test_parked_windows_make_way_at_the_limit() -> None:
    """The one that has waited longest first; what it showed stays cached."""
    cache = Cache(FULL, max_mappings=13)
    for seq_id in range(3):
        cache.begin(seq_id, prompt(8, own=100 * (seq_id + 1)))
    first = int(cache.accounting.table(0, 0)[0])
    for seq_id in range(3):
        cache.free(seq_id)
    _, changes = cache.begin(3, prompt(64))
    hidden = [change.start for change in changes if isinstance(change, Unmap)]
    assert hidden[0] == first
    assert cache.accounting.usage().cached_bytes == 3 * SIZE * 256
    found, _ = cache.begin(4, [*prompt(8, own=100), 5])
    assert found == SIZE


def test_there_is_a_window_for_max_num_seqs() -> None:
    cache = Cache(FULL, max_num_seqs=2)
    for seq_id in range(2):
        cache.begin(seq_id, prompt(20))
    cache.accounting.add(2)
    verdict = cache.accounting.try_extend(2, 20)
    assert isinstance(verdict, NotNow)
    assert (verdict.option, verdict.holders) == ("max_num_seqs", (0, 1))
    verdict = cache.accounting.fork(0, 3)
    assert isinstance(verdict, NotNow)
    assert verdict.option == "max_num_seqs"
    cache.free(0)
    cache.extend(2, 20)
    assert cache.accounting.num_tokens(2) == 20


@pytest.mark.parametrize("step", [SIZE, 256])
def test_mappings_are_few_and_never_more_than_counted(step: int) -> None:
    """Sequences that grow in turn lie in runs of blocks, and a run is one mapping."""
    num_seqs, longest = 100, 256
    cache = Cache(FULL, max_num_seqs=num_seqs, max_model_len=longest)
    before = num_mappings()
    for seq_id in range(num_seqs):
        cache.accounting.add(seq_id)
    for num_tokens in range(step, longest + 1, step):
        for seq_id in range(num_seqs):
            cache.accounting.try_extend(seq_id, num_tokens)
        cache.step()
        counted = cache.accounting._windows.num_mappings
        assert num_mappings() - before <= counted <= 4 * num_seqs
    for seq_id in range(num_seqs):
        cache.accounting.free(seq_id)
    cache.step()
    assert cache.accounting._windows.num_mappings == 0
    assert num_mappings() - before <= 2


# -- in the engine -------------------------------------------------------------------------------


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Of two calls: what the second one's begin with was computed by the first."""
    several = [tokens(1, length, seed=7)[0].tolist() for length in (40, 60, 60, 50)]
    return several[:2], several


@cache
def model_of(name: str) -> PreTrainedModel:
    return tiny_model(name)


@cache
def by_paged(name: str) -> list[tuple[int, ...]]:
    with LLM(model_of(name), cache="paged", **OPTIONS) as llm:
        return generated(llm)


def generated(llm: LLM) -> list[tuple[int, ...]]:
    return [done.token_ids for each in prompts() for done in llm.generate(each, GREEDY)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_texts_are_those_of_paged(name: str) -> None:
    with LLM(model_of(name), cache="virtual", attention_backend="sdpa", **OPTIONS) as llm:
        assert isinstance(llm._kv.accounting, SharedVirtualAccounting)
        assert generated(llm) == by_paged(name)
        again = llm.generate([prompts()[1][1]], GREEDY)
        assert again[0].num_cached_tokens >= SIZE


def test_what_cannot_share_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    provider = HostMemory(portable=True)
    with (
        caplog.at_level(logging.WARNING, "quire.engine.kv_budget"),
        LLM(model_of("llama"), cache="virtual", provider=provider, **OPTIONS) as llm,
    ):
        assert isinstance(llm._kv.accounting, VirtualAccounting)
        assert generated(llm) == by_paged("llama")
    (record,) = (r for r in caplog.records if "virtual shares no pages" in r.message)
    assert str(provider.cannot_share) in record.message


def test_at_the_limit_of_mappings_sequences_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.kv_budget.spare_mappings", lambda: 20)
    with LLM(model_of("gemma3"), cache="virtual", **OPTIONS) as llm:
        windows = llm._kv.accounting._windows  # type: ignore[attr-defined]
        several, seen = prompts()[1], []
        llm.generate(several, GREEDY, observe=lambda _: seen.append(windows.num_mappings))
        assert 0 < max(seen) <= 20
        assert generated(llm) == by_paged("gemma3")


def test_without_prefix_caching_ranges_are_private() -> None:
    with LLM(model_of("llama"), cache="virtual", enable_prefix_caching=False, **OPTIONS) as llm:
        assert isinstance(llm._kv.accounting, VirtualAccounting)


def test_a_copy_of_a_sequence_whose_only_block_has_passed_shows_nothing() -> None:
    """Cut back to a block's end, where a window of one token reads nothing before the next one."""
    cache = Cache(FULL, replace(WINDOW, window=1))
    cache.accounting.add(1)
    for num_tokens in (SIZE, SIZE + 1, SIZE + 2):
        cache.extend(1, num_tokens)
    cache.accounting.trim(1, SIZE)
    cache.step()
    assert isinstance(cache.accounting.fork(1, 2), Fits)
    shown = [change for change in cache.step() if isinstance(change, Map)]
    assert [change.group for change in shown] == [0]
    cache.extend(2, 2 * SIZE)
