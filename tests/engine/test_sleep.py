"""Asleep an LLM has given its memory back, by the system's own figures; awake it does as before."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from quire import LLM, SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.errors import MemoryUnavailable, ModelNotLoadable, RequestError
from quire.memory.residency import trim_allocator
from tiny import heavy_model, tiny_model

MIB = 2**20
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(
    max_model_len=2048, max_num_seqs=8, kv_cache_memory_bytes="64MiB", memory_mode="dedicated"
)
PROMPTS = [[5 + n, 6, 7, 8] * 256 for n in range(8)]  # 32 MiB of keys and values


def resident_bytes() -> int:
    """What the system says this process has in memory."""
    gc.collect()
    trim_allocator()
    said = Path("/proc/self/status").read_text()
    return int(said.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens take 4 KiB each."""
    path = tmp_path_factory.mktemp("model")
    heavy_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


def test_each_level_gives_back_what_it_says(llm: LLM) -> None:
    expected, count = answers(llm), llm.statistics.num_generation_tokens
    sizes = llm.max_model_len, llm.elastic.capacity_bytes, llm.ledger.require()
    awake = resident_bytes()
    assert llm.memory.committed_bytes >= 32 * MIB
    assert llm.sleep(1)
    level_1 = resident_bytes()
    assert awake - level_1 > 28 * MIB
    assert llm.usage().committed_bytes == llm.memory.committed_bytes == 0
    assert llm.sleep(2)
    level_2 = resident_bytes()
    assert level_1 - level_2 > 50 * MIB
    assert llm.sleep(1)
    assert llm.sleep_level == 2  # as deep as it was
    llm.wake_up()
    assert (llm.max_model_len, llm.elastic.capacity_bytes, llm.ledger.require()) == sizes
    assert answers(llm) == expected
    assert llm.statistics.num_generation_tokens == 2 * count  # of the same LLM
    assert resident_bytes() - level_2 > 80 * MIB
    llm.wake_up()  # which it is


def test_a_capacity_that_was_lowered_stays_lowered(llm: LLM) -> None:
    answers(llm)
    llm.resize("8MiB")
    llm.resize("48MiB")
    llm.sleep(2)
    before = llm.elastic
    llm.wake_up()
    assert llm.elastic.capacity_bytes == 48 * MIB
    assert llm.elastic.returned_bytes >= before.returned_bytes > 8 * MIB  # counters only grow
    assert llm.elastic.num_shrinks >= before.num_shrinks
    llm.resize("64MiB")
    llm.sleep()
    llm.wake_up()
    assert llm.elastic.ceiling_bytes == llm.elastic.capacity_bytes == 64 * MIB


def test_what_is_taken_at_the_start_is_given_back_and_taken_again(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with LLM(model, residency="prefault", **OPTIONS) as llm:
        awake = resident_bytes()
        llm.sleep()
        assert awake - resident_bytes() > 56 * MIB
        assert llm._resident.kept_bytes == 0
        llm.step()  # nothing is done, and nothing is taken
        llm._elastic.settle()
        assert (llm._resident.kept_bytes, llm.elastic.ceiling_bytes) == (0, 0)
        llm.wake_up()
        assert llm._resident.kept_bytes == 64 * MIB
        with pytest.raises(RequestError, match=r"level=2 .* was handed in .* use level=1"):
            llm.sleep(2)
        with pytest.raises(RequestError, match=r"level=3 must be 1 .* or 2"):
            llm.sleep(3)
        llm.sleep()
    with pytest.raises(RequestError, match="closed"):
        llm.wake_up()


def test_it_does_not_sleep_while_a_sequence_runs_nor_run_while_it_sleeps(llm: LLM) -> None:
    pieces = llm.stream([5, 6, 7], GREEDY)
    next(pieces)
    assert not llm.sleep(2)
    assert not llm.is_sleeping
    assert len(list(pieces)) == 7
    for level in (1, 2):
        assert llm.sleep(level)
        assert llm.is_sleeping
        for refused in (lambda: llm.generate([5]), lambda: llm.resize("8MiB")):
            with pytest.raises(RequestError, match=rf"asleep \(level {level}\): call wake_up"):
                refused()
        assert llm.step() is False
        assert llm.reset_prefix_cache()
    llm.wake_up()


def test_one_that_cannot_wake_up_stays_asleep(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.sleep(2)

    def missing(*_: object, **__: object) -> None:
        raise ModelNotLoadable("the folder is gone")

    with monkeypatch.context() as patch:
        patch.setattr("quire.engine.llm.loaded_model", missing)
        with pytest.raises(ModelNotLoadable):
            llm.wake_up()
    assert llm.sleep_level == 2
    llm.wake_up()
    assert len(llm.generate([5, 6], GREEDY)[0].token_ids) == 8


def test_an_async_llm_sleeps_between_steps_and_a_failed_wake_up_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_model("llama"), kv_cache_memory_bytes="4MiB") as llm:
            before = await llm.complete([5, 6], GREEDY)
            assert await llm.sleep()
            with pytest.raises(RequestError, match="asleep"):
                await llm.complete([5, 6], GREEDY)

            def short() -> None:
                raise MemoryUnavailable("no pages")

            with monkeypatch.context() as patch:
                patch.setattr(llm.llm._resident, "prefault", short)
                with pytest.raises(MemoryUnavailable, match="no pages"):
                    await llm.wake_up()
            assert (llm.llm.is_sleeping, llm.failure) == (True, None)
            await llm.wake_up()
            assert (await llm.complete([5, 6], GREEDY)).token_ids == before.token_ids

    asyncio.run(run())


def test_it_can_be_closed_asleep(folder: Path) -> None:
    with LLM(folder, **OPTIONS) as llm:
        llm.sleep(2)
    assert (llm.is_closed, llm.usage().reserved_bytes) == (True, 0)
