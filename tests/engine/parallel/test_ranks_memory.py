"""Pages around the cache, in every rank: prepared ahead, kept, held, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.parallel.emulated import KEPT_PAGES, PAGE, drivers, physical_bytes
from engine.parallel.ranks import GREEDY, PROMPTS, Folder, Watch, texts
from memory.cuda.emulator import EmulatedDriver
from quire.engine.parallel.leader import RankedGauge
from quire.engine.parallel.messages import Answer, Done, Failed
from quire.engine.parallel.worker import _Engine
from quire.engine.parallel.worker_group import WorkerGroup
from quire.errors import MemoryUnavailable, RankLost
from quire.kv import Usage
from quire.memory.machine.readings import HostGauge, MemoryReading

pytest.importorskip("accelerate", reason="Transformers loads parts of a model with it")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks would be placed on the GPU"),
    pytest.mark.filterwarnings("ignore"),  # of Transformers, about plans and RoPE
]

MIB = 2**20


@pytest.fixture(scope="module")
def driver() -> Iterator[EmulatedDriver]:
    with drivers() as found:
        yield found


@pytest.fixture(scope="module")
def folder(driver: EmulatedDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    crew = WorkerGroup(2).start()
    yield Folder(tmp_path_factory.mktemp("models"), crew)
    crew.close()


@pytest.fixture(scope="module")
def expected(folder: Folder) -> Any:
    with folder.alone("llama") as llm:
        return texts(llm.generate(PROMPTS, GREEDY))


# With an engine of one process: tests/engine/test_device_memory.py and test_residency.py.
@pytest.mark.full
@pytest.mark.parametrize("cache", ["growing", "paged", "virtual"])
def test_every_rank_prepares_as_many_pages_and_gives_them_back(
    folder: Folder, driver: EmulatedDriver, expected: Any, cache: str
) -> None:
    with folder.ranked("llama", cache=cache) as llm:
        watch, num_ahead = Watch(llm), 0

        def look(usage: Usage) -> None:
            nonlocal num_ahead
            watch(usage)
            here, there = physical_bytes(llm, driver)
            assert here == there >= usage.committed_bytes
            num_ahead += here > usage.committed_bytes

        assert texts(llm.generate(PROMPTS, GREEDY, observe=look)) == expected
        assert num_ahead > 8
        llm.reset_prefix_cache()
        assert physical_bytes(llm, driver) == [KEPT_PAGES * PAGE] * 2
        llm.resize(16 * PAGE)
        assert texts(llm.generate(PROMPTS[:1], GREEDY, observe=look)) == expected[:1]
        assert max(physical_bytes(llm, driver)) <= 16 * PAGE
        llm.reset_prefix_cache()
        llm._resident.rest(short=False)
        assert physical_bytes(llm, driver) == [0, 0]


@pytest.mark.full
def test_what_a_closed_engine_has_kept_is_gone(folder: Folder, driver: EmulatedDriver) -> None:
    with folder.ranked("llama") as llm:
        llm.generate(PROMPTS, GREEDY)
        assert min(physical_bytes(llm, driver)) > 0
    assert driver.physical_bytes == 0
    with folder.ranked("llama") as llm:
        llm._resident.rest(short=False)  # what its own trial has left
        assert physical_bytes(llm, driver) == [0, 0]


@pytest.mark.full
def test_prefault_takes_the_capacity_in_every_rank(
    folder: Folder, driver: EmulatedDriver, expected: Any
) -> None:
    with folder.ranked("llama", residency="prefault") as llm:
        assert physical_bytes(llm, driver) == [MIB, MIB]
        assert texts(llm.generate(PROMPTS, GREEDY, observe=Watch(llm))) == expected
        assert physical_bytes(llm, driver) == [MIB, MIB]
        llm.resize(MIB // 2)
        assert physical_bytes(llm, driver) == [MIB // 2, MIB // 2]
    assert driver.physical_bytes == 0


# -- where it is scarcest --


class Told:
    """Ranks that answer what they are told."""

    def __init__(self, answer: Answer | None) -> None:
        self.answer, self.called = answer, list[str]()

    def all_of(self, method: str, *, own: Any) -> Any:
        self.called.append(method)
        if self.answer is None:
            raise RankLost("rank 1 (process 7) was ended by SIGKILL")
        return own(), [self.answer]


class Says:
    now_s = HostGauge().now_s

    def read(self) -> MemoryReading:
        return reading(5)


def reading(available_bytes: int) -> MemoryReading:
    return MemoryReading(total_bytes=8, available_bytes=available_bytes)


@pytest.mark.parametrize(
    ("answer", "left"), [(Done(reading(3)), 3), (Done(reading(7)), 5), (None, 5)]
)
def test_the_ceiling_goes_by_the_device_that_has_the_least(
    answer: Answer | None, left: int
) -> None:
    team: Any = Told(answer)
    assert RankedGauge(team, Says()).read().available_bytes == left
    assert team.called == ["read_memory"]


def test_a_device_that_does_not_say_how_much_it_has_left_is_an_error() -> None:
    team: Any = Told(Failed(MemoryUnavailable("CUDA device 1 has disappeared")))
    with pytest.raises(MemoryUnavailable, match="device 1 has disappeared"):
        RankedGauge(team, Says()).read()


class Closing:
    """A part of an engine, which notes that it is closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed

    def close(self) -> None:
        self.closed.append(self.name)
        if self.name == "mover":
            raise RuntimeError("CUDA error: unspecified launch failure")

    def rest(self, *, short: bool) -> None:
        self.closed.append(f"{self.name} rests")


def test_a_rank_gives_back_all_parts_of_an_engine_whatever_one_raises() -> None:
    closed: list[str] = []
    parts: dict[str, Any] = {name: Closing(name, closed) for name in ("resident", "kv", "mover")}
    outer: Any = None
    engine = _Engine(outer, outer, outer, max_model_len=8, **parts)
    with pytest.raises(RuntimeError, match="unspecified launch"):
        engine.close()
    assert closed == ["resident", "mover", "kv", "resident rests"]
