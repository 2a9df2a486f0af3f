"""Two ranks on two GPUs, where there are so many: what ``test_ranks_on_cuda`` pretends, by NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.parallel.ranks import CACHES, GREEDY, PROMPTS, Folder, generated, texts
from quire.engine.parallel.worker_group import WorkerGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),  # of Transformers, about plans and RoPE
]

MIB = 2**20
ROOM: dict[str, Any] = dict(kv_cache_memory_bytes="256MiB")  # pages are large there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    pytest.importorskip("accelerate", reason="Transformers loads parts of a model with it")
    crew = WorkerGroup(2, "cuda").start()
    yield Folder(tmp_path_factory.mktemp("models"), crew)
    crew.close()


@pytest.mark.parametrize("cache", CACHES)
def test_every_strategy_gives_the_tokens_of_one_gpu(folder: Folder, cache: str) -> None:
    with folder.alone("llama", device="cuda:0", **CACHES[cache], **ROOM) as llm:
        expected = texts(llm.generate(PROMPTS, GREEDY))
    assert generated(folder.ranked("llama", **CACHES[cache], **ROOM)) == expected


def test_what_is_taken_at_the_start_is_taken_of_both_and_goes_back(folder: Folder) -> None:
    free = [torch.cuda.mem_get_info(index)[0] for index in (0, 1)]
    options = dict(residency="prefault", kv_cache_memory_bytes=2048 * MIB)
    with folder.ranked("llama", **options) as llm:
        for index in (0, 1):
            assert free[index] - torch.cuda.mem_get_info(index)[0] > 1536 * MIB
        assert generated(llm)
    for index in (0, 1):
        assert free[index] - torch.cuda.mem_get_info(index)[0] < 512 * MIB
