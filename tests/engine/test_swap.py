"""Swap under a real model: what comes back is what went, in every strategy, and nothing is lost."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.covering import in_turn
from conformance.strategy_cases import layers_of, model_spec
from engine.test_llm import ids, model_of, prompts
from models.test_recurrent import HYBRIDS
from quire import LLM, SamplingParams
from quire.engine import kv_sizing as needs
from quire.engine.kv_cache import KVCache
from quire.engine.scheduling.swap_space import readable_tokens, slots_of
from quire.engine.sequence import Sequence
from quire.engine.swap.kv_mover import HostTimer, KVMover, StoreMover
from quire.engine.swap.kv_store import FileKVStore, KVStore, MemoryKVStore, _forms
from quire.engine.swap.swapper import make_swap_store
from quire.errors import ConfigError
from quire.kv import Accounting, CacheConfig, Storage, build_accounting, build_storage
from quire.memory import HostMemory
from tiny import random_model, tiny_model

KIB = 1 << 10  # of a token's keys and values, in these models
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
LENGTHS = (50, 40, 60, 55)
CACHES: dict[str, dict[str, Any]] = {
    "growing": dict(cache="growing", growth_tokens=16),
    "paged": dict(cache="paged"),
    "paged without prefix caching": dict(cache="paged", enable_prefix_caching=False),
    "virtual": dict(cache="virtual", enable_prefix_caching=False),
    "virtual, shared": dict(cache="virtual"),
}


def made(name: str = "llama", num_tokens: int = 256, **options: Any) -> LLM:
    """Room for two or three of the four sequences; and saving is thought cheaper than computing."""
    defaults: dict[str, Any] = dict(
        max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=num_tokens * KIB, swap_space="1MB"
    )
    llm = LLM(model_of(name), **{**defaults, **options})
    llm.engine.scheduler.costs.note_step = lambda *_: None  # type: ignore[method-assign]
    return llm


def outputs(llm: LLM) -> list[tuple[int, ...]]:
    return ids(llm.generate(prompts(LENGTHS), GREEDY))


def undisturbed(name: str, **options: Any) -> list[tuple[int, ...]]:
    with made(name, 1024, swap_space=0, **options) as llm:
        texts = outputs(llm)
        assert not llm.engine.scheduler.num_preemptions
    return texts


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("cache", "name"), in_turn(CACHES, ["gemma3", "llama"]))
def test_preempted_sequences_go_on_with_the_same_tokens(
    cache: str, name: str, tmp_path: Path
) -> None:
    """By swap to memory and to a file nothing is computed twice; by recompute something is."""
    options = CACHES[cache]
    expected = undisturbed(name, **options)
    for swapping in (dict(), dict(swap_path=str(tmp_path)), dict(swap_space=0)):
        room = 256 if name == "llama" else 160  # windows need less
        with made(name, room, **{**options, **swapping}) as llm:
            assert outputs(llm) == expected
            stats = llm.engine.scheduler.statistics
            assert not list(tmp_path.iterdir()), "a swap file has no name"
        assert llm.engine.scheduler.swap.used_bytes == 0
        if "swap_space" in swapping:
            assert stats.num_swaps == 0
        else:
            assert stats.num_swaps == stats.num_preemptions > 0
            assert 0 < stats.loaded_bytes <= stats.saved_bytes
            assert stats.num_recomputed_tokens == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kept_as", ["int8_per_token_head", "fp8", "bfloat16"])
@pytest.mark.parametrize("cache", ["growing", "paged", "virtual, shared"])
def test_codes_come_back_with_their_scales(cache: str, kept_as: str) -> None:
    options = {**CACHES[cache], "kv_cache_dtype": kept_as}
    with made(num_tokens=1024, **options) as llm:
        accounting, storage = llm._kv.accounting, llm._kv.storage
        accounting.add(7, max_tokens=64)
        accounting.try_extend(7, 40)
        llm._kv.carry_out()
        torch.manual_seed(1)
        for number, group in enumerate(accounting.groups):
            slots = torch.from_numpy(accounting.slots(number, 7, 0, 40))
            back = torch.from_numpy(accounting.slots(number, 7, 5, 25))
            for layer in group.layers:
                (heads, width), (_, value_width) = group.spec.entry_shapes
                storage.write(
                    layer, slots, torch.randn(40, heads, width), torch.randn(40, heads, value_width)
                )
                saved = storage.save(layer, slots)
                assert sum(part.nbytes for part in saved) == 40 * group.spec.bytes_per_token
                storage.load(layer, back, [part[20:] for part in saved])
                again = storage.save(layer, back)
                for part, other in zip(saved, again, strict=True):
                    assert part[20:].view(torch.uint8).equal(other.view(torch.uint8))
        accounting.free(7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kept_as", ["auto", "int8_per_token_head"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "falcon_h1"])
def test_a_buffer_of_a_gpu_holds_every_layer_and_hardly_more(
    name: str, kept_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "_SWAP_PIECE_BYTES", 0)
    model = random_model(HYBRIDS[name]()) if name in HYBRIDS else tiny_model(name)
    options: dict[str, Any] = dict(max_model_len=128, max_num_seqs=4, swap_space="1MB")
    with LLM(model, kv_cache_dtype=kept_as, kv_cache_memory_bytes="4MiB", **options) as llm:
        accounting, sizes = llm._kv.accounting, list[int]()
        accounting.add(7, max_tokens=128)
        accounting.try_extend(7, 128)
        llm._kv.carry_out()
        mover: Any = llm.engine._swap._mover  # type: ignore[union-attr]
        for number, of in enumerate(readable_tokens(accounting.groups, 0, 128)):
            slots = torch.from_numpy(slots_of(accounting, number, 7, of))
            sizes += [_forms([parts])[1] for parts in mover._taken_out(number, slots)]
        accounting.free(7)
        buffer_bytes = needs.swap_buffer_bytes(accounting.groups, 128)
        assert buffer_bytes - 64 <= max(sizes) <= buffer_bytes


class FailingShelf:
    """Keeps nothing, or gives nothing back, now and then."""

    def __init__(self, fails_to: str) -> None:
        self.shelf: KVStore = MemoryKVStore()
        self.fails_to, self.num_calls = fails_to, 0

    def put(self, seq_id: int, layers: list[Any]) -> None:
        self._fail("put", seq_id)
        self.shelf.put(seq_id, layers)

    def get(self, seq_id: int) -> list[Any]:
        self._fail("get", seq_id)
        return self.shelf.get(seq_id)

    def drop(self, seq_id: int) -> None:
        self.shelf.drop(seq_id)

    def close(self) -> None:
        self.shelf.close()

    def _fail(self, verb: str, seq_id: int) -> None:
        if verb == self.fails_to:
            self.num_calls += 1
            raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize(
    ("verb", "cache"), in_turn(["put", "get"], ["virtual, shared", "paged without prefix caching"])
)
def test_what_swap_cannot_do_is_computed_again(
    cache: str, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = undisturbed("llama", **CACHES[cache])
    with made(**CACHES[cache]) as llm:
        shelf = FailingShelf(verb)
        llm.engine._swap._mover._shelf = shelf  # type: ignore[union-attr]
        assert outputs(llm) == expected
        stats = llm.engine.scheduler.statistics
        assert shelf.num_calls > 0
        assert llm.engine.scheduler.swap.used_bytes == 0
        assert stats.num_recomputed_tokens > 0
    assert "no space left" in caplog.text


def test_an_exception_in_a_step_that_brings_something_back_loses_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = undisturbed("llama")
    with made() as llm:
        runner = llm.engine._runner
        run, num_failures = runner.run, 0

        def fail_once(plan: Any) -> Any:
            nonlocal num_failures
            if any(chunk.num_restored for chunk in plan.chunks) and len(plan.chunks) > 1:
                num_failures += 1
                raise RuntimeError("the step fails")
            return run(plan)

        monkeypatch.setattr(runner, "run", fail_once)
        assert outputs(llm) == expected
        assert num_failures > 0
        assert llm.engine.scheduler.statistics.num_recomputed_tokens == 0


@pytest.mark.parametrize("to_file", [False, True])
def test_who_ends_while_swapped_out_leaves_nothing(to_file: bool, tmp_path: Path) -> None:
    with made(swap_path=str(tmp_path) if to_file else None) as llm:
        started = [llm.start(llm.request(p, GREEDY), lambda _: None) for p in prompts(LENGTHS)]
        space = llm.engine.scheduler.swap
        while not space.used_bytes:
            assert llm.step()
        for sequences in started:
            llm.abandon(sequences)
        assert space.used_bytes == 0
        assert not llm.engine._swap._firsts  # type: ignore[union-attr]


@pytest.mark.parametrize("to_file", [False, True])
def test_what_is_saved_anew_is_not_dropped_for_what_was_saved_before(
    to_file: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A search gives a place that is swapped out another text, and it makes room at once."""
    short, prompt = replace(GREEDY, max_tokens=12), prompts((50,))[0]
    options: dict[str, Any] = dict(num_tokens=1024, cache="growing", max_num_seqs=2)
    options["swap_path"] = str(tmp_path) if to_file else None
    with made(scheduling_policy="priority", **options) as llm:

        def started(priority: int) -> Sequence:
            request = llm.request(prompt, short, priority=priority)
            (sequence,) = llm.start(request, lambda _: None)
            llm.step()
            return sequence

        parent, place, urgent = (started(priority) for priority in (0, 0, -1))
        assert place.num_saved_tokens
        llm.abandon([urgent])
        llm.engine.scheduler.replace(place, parent)
        assert place.num_computed_tokens == parent.num_computed_tokens
        started(-1)
        assert place.num_saved_tokens
        while llm.step():
            llm.engine.scheduler.check()
        assert place.output_token_ids == parent.output_token_ids
        assert llm.engine.scheduler.statistics.num_swaps == 2
        assert llm.engine.scheduler.statistics.num_recomputed_tokens == 0
    assert "failed" not in caplog.text


def test_a_full_swap_space_recomputes() -> None:
    expected = undisturbed("llama")
    with made(num_tokens=160, swap_space=60 * KIB) as llm:  # a short one, and no longer ones
        assert outputs(llm) == expected
        stats = llm.engine.scheduler.statistics
    assert 0 <= stats.num_swaps < stats.num_preemptions


def test_a_file_shelf_uses_its_holes_again_and_grows_no_larger_than_needed(tmp_path: Path) -> None:
    shelf = FileKVStore(tmp_path)
    layers = [[[torch.randn(n, 3), torch.arange(n)] for _ in range(2)] for n in (5, 9, 4, 7)]
    for seq_id, parts in enumerate(layers):
        shelf.put(seq_id, parts)
    size = os.fstat(shelf._file).st_size
    assert size == sum(part.nbytes for each in layers for parts in each for part in parts)
    shelf.drop(1)
    shelf.put(4, layers[0])
    shelf.put(5, layers[2])  # both fit where the one was
    for seq_id, number in ((0, 0), (2, 2), (3, 3), (4, 0), (5, 2)):
        for parts, kept in zip(layers[number], shelf.get(seq_id), strict=True):
            assert all(part.equal(other) for part, other in zip(parts, kept, strict=True))
    assert os.fstat(shelf._file).st_size == size
    for seq_id in (0, 2, 3, 4, 5):
        shelf.drop(seq_id)
    assert os.fstat(shelf._file).st_size == 0
    shelf.close()


def test_what_is_found_here_is_not_brought_back() -> None:
    """Twelve tokens are saved, the first eight are in the cache when it comes back."""
    spec = model_spec(layers_of("full", "float32", wide=False))
    config = CacheConfig(max_model_len=64, max_num_seqs=2, capacity_bytes=2**20, block_size=4)

    def pair() -> tuple[Accounting, Storage]:
        accounting = build_accounting("paged", spec, config)
        return accounting, build_storage("paged", accounting, HostMemory())

    kv = KVCache(pair)
    for seq_id in range(2):
        kv.accounting.add(seq_id)
        kv.accounting.try_extend(seq_id, 12)
    kv.storage.apply(kv.accounting.drain())
    here, there = (kv.accounting.slots(0, seq_id, 0, 12) for seq_id in range(2))
    entries = torch.arange(12.0)[:, None, None].expand(12, 2, 16)
    kv.storage.write(0, torch.from_numpy(here), entries, -entries)
    mover = StoreMover(kv, MemoryKVStore(), HostTimer(time.perf_counter))
    mover.save(0, [here])
    mover.put_back(0, [there[8:]], [8])
    k, v = kv.storage.gather(0, torch.from_numpy(there[8:]))
    assert k[0, :, 0].tolist() == [8, 9, 10, 11]
    assert v[0, :, 0].tolist() == [-8, -9, -10, -11]
    mover.close()


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="swap_path='/nowhere/at/all'"):
        made(swap_path="/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"swap_path=.* needs swap_space"):
        made(swap_path="/tmp", swap_space=0)


def test_a_place_that_the_other_ranks_cannot_have_is_closed(tmp_path: Path) -> None:
    def refuse(_: KVMover) -> KVMover:
        raise ConfigError("rank 1: there can be no file")

    with made() as llm:
        num_open = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="rank 1"):
            make_swap_store(llm._kv, str(tmp_path), llm.engine.scheduler.costs, 64, around=refuse)
        assert len(os.listdir("/proc/self/fd")) == num_open
