"""Swapping out of a device that is not there: the same bits back, and no wait of the host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pretend
from pretend import Gpu, PretendMemory
from quire import LLM, SamplingParams
from quire.engine.runner import ModelRunner
from quire.engine.swap import kv_mover as mover
from quire.engine.swap import kv_store as pinned
from quire.engine.swap.kv_mover import DeviceTimer
from quire.engine.swap.kv_store import PinnedKVStore
from quire.errors import MemoryUnavailable
from tiny import tiny_model, tokens

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretend.cuda() as found:
        yield found


@pytest.mark.parametrize("buffer_bytes", [176, 300, 10**6])
def test_pieces_come_back_bit_for_bit(
    buffer_bytes: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest layer takes 176 bytes."""
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 64)
    shelf = PinnedKVStore(DEVICE, buffer_bytes)
    host = [
        [torch.randn(n, 3), torch.arange(n, dtype=torch.int8), torch.randn(n, 2).bfloat16()]
        for n in (5, 1, 9, 4)
    ]
    there = [[part.to(DEVICE) for part in parts] for parts in host]
    gpu.reset()
    shelf.put(1, iter(there))
    shelf.put(2, iter(there[:2]))
    assert not gpu.waits
    for parts in there:
        for part in parts:
            part.zero_()  # the cache gives their room to others
    for seq_id, several in ((1, host), (2, host[:2]), (1, host)):
        back = shelf.get(seq_id)
        for parts, want in zip(back, several, strict=True):
            assert [part.device for part in parts] == [DEVICE] * 3
            for part, other in zip(parts, want, strict=True):
                assert part.cpu().equal(other)
    shelf.drop(1)
    shelf.drop(3)
    shelf.close()


def test_who_writes_to_a_new_buffer_waits_for_what_its_memory_was(gpu: Gpu) -> None:
    """Kernels that were launched before may still read there, on the other stream."""
    torch.ones(3, device=DEVICE).add_(1)
    launched = gpu.mark
    shelf = PinnedKVStore(DEVICE, 100)
    for _ in range(2):
        _, spare = shelf._next_buffer()
        assert spare._mark >= launched > 0


def test_what_a_device_takes_is_told_when_it_is_known(gpu: Gpu) -> None:
    timer, told = DeviceTimer(DEVICE, torch.cuda.Stream(DEVICE)), list[float]()
    begun = timer.begin()
    torch.ones(3, device=DEVICE).add_(1)
    timer.end(begun, told.append)
    timer.settle()
    assert not told
    timer.settle(wait=True)
    assert len(told) == 1
    assert told[0] > 0


@pytest.mark.parametrize(("layer_tokens", "swaps"), [(0, True), (2**20, True), (0, False)])
def test_the_ledger_has_the_buffers_that_are_taken(
    layer_tokens: int, swaps: bool, gpu: Gpu, tmp_path: Path
) -> None:
    """Of 32 MiB, or of a layer at its longest; none where a file takes what is swapped."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = max(128, layer_tokens)
    with LLM(
        model.to("cuda"),
        provider=PretendMemory(gpu),
        attention_backend="sdpa",
        max_num_seqs=1,
        max_num_batched_tokens=64,
        memory_mode="dedicated",
        swap_space="1MB",
        swap_path=None if swaps else str(tmp_path),
    ) as llm:
        terms = {term.label: -term.num_bytes for term in llm.ledger.terms}
        swap: Any = llm.engine._swap
        shelf = swap._mover._shelf
        taken = sum(map(len, shelf._buffers)) if isinstance(shelf, PinnedKVStore) else 0
        assert not gpu.num_host_emptied
    assert gpu.num_host_emptied == 1  # on closing: else torch keeps pinned memory
    each = max(32 * 2**20, layer_tokens * 256 + 64)
    assert terms.get("swap buffers", 0) == taken == swaps * 2 * each


def test_tokens_are_the_same_after_a_swap(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda self, plan: run(self, plan).cpu())
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (50, 40, 60, 55)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    model = tiny_model("llama").to("cuda")

    def outputs(num_tokens: int) -> list[tuple[int, ...]]:
        with LLM(
            model,
            provider=PretendMemory(gpu),
            attention_backend="sdpa",  # kernels in an interpreter take minutes
            max_model_len=128,
            max_num_seqs=4,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=num_tokens * 1024,
            swap_space="1MB",
        ) as llm:
            llm.engine.scheduler.costs.note_step = lambda *_: None  # type: ignore[method-assign]
            texts = [each.token_ids for each in llm.generate(prompts, params)]
            stats = llm.engine.scheduler.statistics
            assert stats.num_swaps == stats.num_preemptions
            assert (stats.num_swaps > 0) == (num_tokens < 1000)
            assert stats.num_recomputed_tokens == 0
            return texts

    assert outputs(256) == (want := outputs(1024))
    monkeypatch.setattr("quire.engine.swap.kv_mover.PinnedKVStore", no_pinned_memory)
    assert outputs(256) == want
    assert "swap_space: steps wait for what is saved and brought back" in caplog.text


def no_pinned_memory(*_: Any) -> None:
    raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")


def test_a_device_without_room_for_the_buffers_says_so(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")

    monkeypatch.setattr(mover, "PinnedKVStore", refused)
    memory = PretendMemory(gpu)
    options: dict[str, Any] = dict(max_model_len=128, kv_cache_memory_bytes="1MB", swap_space="1MB")
    with pytest.raises(MemoryUnavailable, match=r"two swap buffers of 32.00 MiB: lower kv_cache"):
        LLM(tiny_model("llama").to("cuda"), provider=memory, attention_backend="sdpa", **options)
