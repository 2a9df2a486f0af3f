"""Copies of grown buffers run beside the steps, on a GPU with several streams.

Whatever is not waited for is done too late to be of use (see ``pretend.late``). The driver's
emulator has the same streams: what is unmapped while a copy is still to be made ends the test.
"""

from typing import Any

import pytest
import torch

import pretend
from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from pretend import Gpu, PretendAttention, PretendMemory
from quire import LLM, SamplingParams
from quire.attention import SdpaAttention
from quire.engine import assembly
from quire.engine import kv_sizing as needs
from quire.engine.step_plan import StepPlan
from quire.kv import FITS, CacheConfig, GrowingAccounting, StackedStorage
from quire.memory.cuda import CudaMemory
from quire.spec import FullAttention, Group
from tiny import tiny_model, tokens

PAGE = 4096  # 16 tokens of a layer
NEW = 30
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 17, 9)]
SIZES: dict[str, Any] = dict(
    cache="growing",
    growth_tokens=16,
    max_model_len=80,
    kv_cache_memory_bytes="4MiB",
    max_num_seqs=3,
    max_num_batched_tokens=20,
)


class Device:
    """A GPU and its driver."""

    def __init__(self, gpu: Gpu, driver: EmulatedDriver) -> None:
        self.gpu, self.driver = gpu, driver
        self.memory = CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=8 * PAGE)
        self.provider = PretendMemory(gpu, self.memory)

    def llm(self, model: Any, **options: Any) -> LLM:
        llm = LLM(model.to("cuda"), provider=self.provider, **{**SIZES, **options})
        storage = llm._kv.storage
        assert isinstance(storage, StackedStorage)
        num_streams = 1 if options.get("enforce_eager") else 2
        assert len(self.memory._granules.fences.streams) == num_streams
        return llm


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    attends = {"eager": SdpaAttention, "captured": PretendAttention}[request.param]
    monkeypatch.setattr(assembly, "choose_backend", lambda *_, **__: attends())
    monkeypatch.setattr(needs, "suited_to", lambda page_bytes: 1)  # a layer by itself
    return str(request.param)


def own(model: Any) -> list[tuple[int, ...]]:
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [
        tuple(model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist()) for p in PROMPTS
    ]


@pytest.mark.parametrize(
    ("backend", "growth"),
    [
        ("captured", "uniform"),
        pytest.param("eager", "staggered", marks=pytest.mark.full),
        pytest.param("eager", "uniform", marks=pytest.mark.full),
        pytest.param("captured", "doubling", marks=pytest.mark.full),
    ],
    indirect=["backend"],
)
def test_tokens_are_those_of_generate(backend: str, growth: str) -> None:
    model = tiny_model("llama")
    want = own(model)
    driver = EmulatedDriver(granularity=PAGE, total_bytes=2**26, fills_at_once=True)
    with pretend.cuda(queues=driver.streams) as gpu:
        device = Device(gpu, driver)
        llm = device.llm(model, growth=growth)
        assert gpu.late is not None
        begun = gpu.late.num_late
        hidden: list[int] = []

        def watch(plan: StepPlan) -> None:
            hidden.append(device.memory.hidden_bytes)

        llm.engine.watch = watch
        got = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
        assert got == want
        assert gpu.late.num_late - begun >= 3 * 3  # each text grew, in each of three layers
        assert max(hidden) > 0  # buffers that were still being copied when the step began
        assert (gpu.num_replays > NEW // 2) is (backend == "captured")
        llm.engine.begin_anew()
        assert len(device.memory._granules.fences.streams) == 2
        llm.close()
        assert len(device.memory._granules.fences.streams) == 1
        device.memory.trim()
    assert driver.physical_bytes == 0
    assert driver.refused == []


@pytest.mark.parametrize("backend", ["captured"], indirect=True)
def test_enforce_eager_copies_in_line_with_the_steps(backend: str) -> None:
    """One stream, and one order: nothing has to be waited for."""
    model = tiny_model("llama")
    want = own(model)
    driver = EmulatedDriver(granularity=PAGE, total_bytes=2**26, fills_at_once=True)
    with pretend.cuda(queues=driver.streams) as gpu:
        device = Device(gpu, driver)
        llm = device.llm(model, enforce_eager=True)
        assert gpu.late is not None
        begun = gpu.late.num_late
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == want
        assert gpu.late.num_late == begun
        llm.engine.begin_anew()
        assert len(device.memory._granules.fences.streams) == 1
        llm.close()
        device.memory.trim()
    assert driver.physical_bytes == 0
    assert driver.refused == []


@pytest.mark.parametrize("backend", ["eager"], indirect=True)
@pytest.mark.parametrize(
    "cache",
    [
        "virtual-shared",
        *(
            pytest.param(cache, marks=pytest.mark.full)
            for cache in ("contiguous", "growing", "virtual")
        ),
    ],
)
def test_continuations_of_one_text_are_copied_beside(backend: str, cache: str) -> None:
    """Of the text that is copied, tokens are written over in the next step."""
    strategy, _, shares = cache.partition("-")
    options: dict[str, Any] = {**SIZES, "cache": strategy, "enable_prefix_caching": bool(shares)}
    options["max_num_seqs"] = 6
    sampled = SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    model = tiny_model("llama")
    with LLM(model, **options) as llm:
        want = [x.token_ids for c in llm.generate(PROMPTS, sampled) for x in c.choices]
    driver = EmulatedDriver(granularity=PAGE, total_bytes=2**26, fills_at_once=True)
    with pretend.cuda(queues=driver.streams) as gpu:
        device = Device(gpu, driver)
        llm = device.llm(model, **options)
        got = [x.token_ids for c in llm.generate(PROMPTS, sampled) for x in c.choices]
        assert got == want
        llm.close()
        device.memory.trim()
    assert driver.physical_bytes == 0


def test_a_layer_waits_for_its_own_copies_only() -> None:
    config = CacheConfig(
        max_model_len=64,
        max_num_seqs=2,
        capacity_bytes=2**20,
        page_bytes=PAGE,
        growth_tokens=16,
        layers_per_page=2,
    )
    full = FullAttention(num_kv_heads=2, head_dim=16, dtype="float32")
    groups = (Group(spec=full, layers=(0, 1, 2, 3, 4)),)
    driver = EmulatedDriver(granularity=PAGE, total_bytes=2**26, fills_at_once=True)
    with pretend.cuda(queues=driver.streams) as gpu, torch.inference_mode():
        accounting = GrowingAccounting(groups, config)
        device = Device(gpu, driver)
        storage = StackedStorage(accounting, device.provider)
        accounting.add(1)
        assert accounting.try_extend(1, 16) is FITS
        storage.apply(accounting.drain())
        entries = torch.randn(16, 2, 16, device="cuda")
        for number, group in enumerate(accounting.groups):
            there = torch.from_numpy(accounting.slots(number, 1, 0, 16)).to("cuda")
            for layer in group.layers:
                storage.write(layer, there, entries + layer, entries - layer)
        assert accounting.try_extend(1, 17) is FITS
        storage.apply(accounting.drain())
        copies = [work for queue in driver.streams.queues.values() for work in queue if work.ranges]
        assert len(copies) == 3  # stacks
        mapped = driver.physical_bytes
        assert mapped == accounting.usage().committed_bytes * 3 // 2  # old and new
        for layer, left in [(1, 2), (0, 2), (4, 0)]:  # the last one's were made in order
            number = next(i for i, g in enumerate(accounting.groups) if layer in g.layers)
            there = torch.from_numpy(accounting.slots(number, 1, 0, 16)).to("cuda")
            k, v = storage.gather(layer, there)
            assert torch.equal(k.cpu(), (entries + layer).transpose(0, 1).cpu())
            assert torch.equal(v.cpu(), (entries - layer).transpose(0, 1).cpu())
            assert sum(not work.is_done for work in copies) == left
        storage.settle()
        storage.close()
        device.memory.trim()
    assert driver.physical_bytes == 0
