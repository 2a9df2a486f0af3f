"""Byte for byte: the plan from a folder's files, and the engine that loads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.covering import in_turn, only
from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from quire.cli.plan_validation import Check, validate
from quire.config import EngineConfig
from quire.kv import STRATEGIES
from quire.memory import HostMemory
from quire.memory.cuda import CudaMemory
from quire.memory.machine import read_machine
from quire.memory.machine.probe import spare_mappings
from quire.models.loader import adopt
from quire.planner.capacity import PlanTarget
from quire.planner.sequence_memory import PlannedLengths
from quire.planner.subject import find_subject
from readers import tiny_reader
from tiny import tiny_model as tiny
from zoo.build import tiny_model

# Every kind of layer: full, sliding, shared, latent, chunked, and recurrent of several kinds.
KINDS = (
    *("qwen3_moe", "gemma3_text", "gemma3n_text", "mixtral", "gpt_oss", "deepseek_v3"),
    *("llama4_text", "mamba2", "qwen3_next", "falcon_h1", "lfm2", "gpt2"),
)
OPTIONS: dict[str, Any] = dict(
    kv_cache_memory_bytes="8MB",
    max_model_len=64,
    block_size=4,
    max_num_batched_tokens=13,
    attention_backend="reference",
)
ASKED = PlannedLengths(input_tokens=26, output_tokens=14)


def here() -> PlanTarget:
    memory = HostMemory()
    return PlanTarget(
        machine=read_machine(),
        page_bytes=memory.page_bytes,
        can_share=memory.cannot_share is None,
        max_mappings=spare_mappings(),
    )


def checked(model: Any, folder: Path, strategy: str = "paged") -> list[Check]:
    model.save_pretrained(folder)
    config = EngineConfig.from_options(**OPTIONS, growth_tokens=8)
    subject = find_subject(str(folder))
    return validate(adopt(model), subject, config, here(), ASKED, strategies=[strategy])


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
# A kind of memory each; deepseek_v3 and qwen3_next are below.
@pytest.mark.parametrize(
    "name", only(KINDS, "gemma3n_text", "gpt_oss", "llama4_text", "falcon_h1", "gpt2")
)
def test_the_plan_of_its_files_is_what_the_engine_takes(name: str, tmp_path: Path) -> None:
    checks = checked(tiny_model(name), tmp_path)
    assert [check for check in checks if not check.holds] == []
    assert {check.what for check in checks} >= {"weights", "paged: KV memory"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_in_every_strategy_after_every_step(strategy: str, tmp_path: Path) -> None:
    checks = checked(tiny("gemma3"), tmp_path, strategy)
    assert [check for check in checks if not check.holds] == []
    exact = [check for check in checks if check.planned == check.actual > 0]
    assert len(exact) >= len(checks) - 1  # of the weights, tables that no file holds


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "name"), in_turn(sorted(STRATEGIES), ["gemma3", "deepseek_v3"])
)
def test_on_the_large_pages_of_a_gpu(strategy: str, name: str, tmp_path: Path) -> None:
    """What ``quire plan --device`` says, against an engine on an emulated driver."""
    driver = EmulatedDriver(granularity=2**21)
    memory = CudaMemory(driver=driver, tensor_device=TENSOR_DEVICE, keep_bytes=0)
    model = tiny(name)
    model.save_pretrained(tmp_path)
    options = {**OPTIONS, "kv_cache_memory_bytes": "64MiB"}
    config = EngineConfig.from_options(**options, growth_tokens=8, reserve="request")
    place = replace(here(), page_bytes=memory.page_bytes, can_share=True, max_mappings=None)
    subject = find_subject(str(tmp_path))
    checks = validate(
        adopt(model), subject, config, place, ASKED, strategies=[strategy], provider=memory
    )
    assert [check for check in checks if not check.holds] == []
    assert driver.physical_bytes == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "name"),
    in_turn(sorted(set(STRATEGIES) - {"paged"}), ["deepseek_v3", "llama4_text", "qwen3_next"]),
)
def test_latents_chunks_and_states_in_the_other_strategies(
    strategy: str, name: str, tmp_path: Path
) -> None:
    checks = checked(tiny_model(name), tmp_path, strategy)
    assert [check for check in checks if not check.holds] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_reader_of_sources_has_them_planned(name: str, tmp_path: Path) -> None:
    checks = checked(tiny_reader(name), tmp_path)
    assert [check for check in checks if not check.holds] == []
    assert any("group 1" in check.what for check in checks)  # the source beside the text


def test_a_difference_without_a_reason_does_not_hold() -> None:
    assert not Check(what="a", planned=1, actual=2).holds
    assert Check(what="a", planned=1, actual=2, explained=1, why="because").holds
