"""The step that is measured before the cache is sized: the largest there may be, and then gone."""

from typing import Any

import pytest
import torch

from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from quire.config import EngineConfig
from quire.engine import profile
from quire.engine.kv_budget import kv_ledger
from quire.engine.kv_sizing import kv_needs
from quire.engine.profile import StepBytes, measured_step_bytes
from quire.engine.runner import ModelRunner
from quire.engine.step_plan import StepPlan
from quire.errors import MemoryUnavailable
from quire.memory.budget import Footprint
from quire.memory.cuda import CudaMemory
from quire.models.footprint import footprint
from quire.models.loader import adopt
from tiny import tiny_model


class Meter:
    """Has begun, or not."""

    begun = False

    def begin(self) -> None:
        self.begun = True

    def peak_bytes(self) -> int:
        return 12_345


def emulated() -> tuple[EmulatedDriver, CudaMemory]:
    driver = EmulatedDriver()
    return driver, CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=0)


def test_smaller_steps_take_less_and_what_was_measured_counts() -> None:
    own = Footprint(
        weights_bytes=0,
        counted_bytes=0,
        hidden_size=64,
        widest_rows=256,
        vocab_size=1000,
        item_bytes=4,
    )
    whole = own.activation_bytes(512, 8) * 3  # as the ledger has it: measured, say
    sizes = StepBytes(
        whole, own, max_tokens=512, max_num_seqs=8, kv_bytes_per_token=1024, block_size=16
    )
    assert sizes.of(512, 8) == whole + (512 + 16) * 1024
    each = [sizes.of(n, 8) for n in range(1, 513)]
    assert each == sorted(each)
    assert each[0] < each[-1] // 40
    for left in (each[0] - 1, each[0], each[99], each[99] + 1, each[-1] * 2):
        assert sizes.most_tokens(left, 8) == sum(size <= left for size in each)
    assert sizes.of(512, 512) > sizes.of(512, 8), "prompts whose logits are all wanted"
    alone = sizes.of(1, 1)
    estimate = alone - 17 * 1024
    sizes.note(1, 1, estimate + 1000)
    assert sizes.of(1, 1) == alone + 1000
    sizes.note(1, 1, 0)
    assert sizes.of(1, 1) == alone + 750
    sizes.fade(5.0)
    assert sizes.of(1, 1) == alone + 375
    for _ in range(60):
        sizes.note(1, 1, 0)
    assert sizes.of(1, 1) == alone


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("num_seqs", [1, 3, 64])
def test_the_largest_step_is_run_with_a_token_for_each(
    name: str, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, memory = emulated()
    meter, steps = Meter(), list[StepPlan]()
    run = ModelRunner.run

    def seen(self: ModelRunner, plan: StepPlan) -> torch.Tensor:
        assert meter.begun
        steps.append(plan)
        return run(self, plan)

    monkeypatch.setattr(ModelRunner, "run", seen)
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=100, max_model_len=256)
    loaded = adopt(tiny_model(name))
    assert measured_step_bytes(config, loaded, memory, meter) == 12_345
    (plan,) = steps
    assert (plan.num_tokens, len(plan.draws)) == (100, num_seqs)
    assert driver.physical_bytes == 0

    ledger = kv_ledger(config, loaded, memory.page_bytes, measured_bytes=12_345)
    (term,) = [term for term in ledger.terms if term.label == "activations"]
    assert (term.num_bytes, term.source.split(",")[0]) == (-12_345, "measured")


def test_what_a_backend_keeps_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its own memory when the model is tried out, before the step."""
    meter, tries = Meter(), list[bool]()
    try_out = ModelRunner.try_out

    def seen(self: ModelRunner, **options: Any) -> None:
        tries.append(meter.begun)
        try_out(self, **options)

    monkeypatch.setattr(ModelRunner, "try_out", seen)
    config = EngineConfig(max_num_batched_tokens=64, max_model_len=256)
    measured_step_bytes(config, adopt(tiny_model("qwen3")), emulated()[1], meter)
    assert tries == [True]


def test_too_little_memory_is_said_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, memory = emulated()

    def fails(self: ModelRunner, plan: StepPlan) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "run", fails)
    config = EngineConfig(max_num_batched_tokens=64, max_model_len=256)
    with pytest.raises(MemoryUnavailable, match="lower max_num_batched_tokens=64 or max_num_seqs"):
        measured_step_bytes(config, adopt(tiny_model("qwen3")), memory, Meter())
    assert driver.physical_bytes == 0


@pytest.mark.parametrize(
    ("num_seqs", "num_rows"), [(1, 5), (3, 15), (20, 100), (40, 100), (100, 100)]
)
def test_guesses_have_their_rows_of_logits(
    num_seqs: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four for each sequence, as far as a step's tokens go."""
    rows: list[torch.Size] = []
    run = ModelRunner.run

    def seen(self: ModelRunner, plan: StepPlan) -> torch.Tensor:
        assert plan.num_tokens == 100
        found = run(self, plan)
        rows.append(found.shape)
        return found

    monkeypatch.setattr(ModelRunner, "run", seen)
    speculative = {"method": "ngram", "num_speculative_tokens": 4}
    config = EngineConfig.from_options(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=100,
        max_model_len=256,
        speculative_config=speculative,
    )
    loaded = adopt(tiny_model("qwen3"))
    assert measured_step_bytes(config, loaded, emulated()[1], Meter()) == 12_345
    assert rows == [(num_rows, loaded.vocab_size)]
    own = footprint(loaded.model)
    ledger_needs = kv_needs(config, "qwen3", loaded.spec, own, 4096)
    assert ledger_needs.activation_bytes == own.activation_bytes(100, num_rows)


def test_no_step_is_longer_than_a_sequence_may_be() -> None:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=1000)
    plan = profile._largest_step(config, 128, 199)
    assert [chunk.stop for chunk in plan.chunks] == [127, 127]
