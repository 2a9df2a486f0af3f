"""Heads on several devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.cli import main
from quire.errors import ConfigError
from quire.models.loader import read_config
from quire.models.rank_spec import part_of_type, part_spec, tensor_parallel_plan
from quire.planner.capacity import rank_footprint
from quire.planner.subject import find_subject
from quire.spec import ModelSpec, RecurrentState
from quire.spec.tensor_parallel import is_replicated, rank_spec
from zoo.sizes import tiny_config


@pytest.mark.parametrize(("num_ranks", "share"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (32, 8)])
def test_heads_are_divided_and_kept_twice_where_there_are_fewer(num_ranks: int, share: int) -> None:
    spec = find_subject("Llama-3.1-8B").spec
    on_rank = rank_spec(spec, num_ranks)
    assert on_rank.bytes_per_token * share == spec.bytes_per_token
    assert is_replicated(spec, on_rank, num_ranks) == (num_ranks > 8)


# One of each kind of plan and of layer; the others are `full`.
SAMPLED = (
    "llama", "olmo2", "phi3", "granitemoe", "gemma3_text", "mixtral", "deepseek_v3", "qwen3_next"
)  # fmt: skip


def has_plan(model_type: str) -> bool:
    with suppress(Exception):  # a class that cannot be built at this size
        return bool(tensor_parallel_plan(tiny_config(model_type)))
    return False


def divided(divide: Callable[..., ModelSpec], *arguments: object) -> ModelSpec | str:
    try:
        return divide(*arguments)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in SAMPLED else pytest.mark.full)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ],
)
def test_the_engines_way_is_the_same_for_the_planner(model_type: str, tmp_path: Path) -> None:
    """Of the classes that Transformers has a plan for: from a config.json as from a config."""
    if not has_plan(model_type):
        assert model_type not in SAMPLED
        pytest.skip("Transformers has no plan for it")
    tiny_config(model_type).save_pretrained(tmp_path)
    try:
        config, spec = read_config(str(tmp_path), tmp_path)
    except ConfigError as error:
        pytest.skip(f"it is refused by itself: {error}")
    subject = find_subject(str(tmp_path / "config.json"))
    for num_ranks in (1, 2, 4):
        engines = divided(part_spec, subject.name, config, spec, num_ranks)
        planners = divided(part_of_type, subject.name, subject.spec, num_ranks)
        if isinstance(engines, ModelSpec):
            assert isinstance(planners, ModelSpec)
            assert planners.groups == engines.groups
        else:
            assert planners == engines


@pytest.mark.full
def test_there_are_plans_of_every_kind() -> None:
    assert sum(has_plan(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) > 60


@pytest.mark.parametrize(("model_type", "is_divided"), [("llama", True), ("olmo2", False)])
def test_a_plan_by_the_engines_option_has_the_engines_bytes(
    model_type: str,
    is_divided: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    whole = find_subject(str(tmp_path / "config.json")).spec.bytes_per_token
    each: dict[str, int] = {}
    for option in ("--tp", "--tensor-parallel-size"):
        arguments = [str(tmp_path / "config.json"), "--device", "h100", option, "2", "--json"]
        monkeypatch.setattr(sys, "argv", ["quire", "plan", *arguments])
        with suppress(SystemExit):
            main()
        each[option] = json.loads(capsys.readouterr().out)["needs"]["bytes_per_token"]
    assert each == {"--tp": whole // 2, "--tensor-parallel-size": whole // (1 + is_divided)}


def test_a_latent_is_kept_whole_by_every_rank() -> None:
    spec = find_subject("DeepSeek-V3").spec
    assert rank_spec(spec, 8) == spec
    assert is_replicated(spec, spec, 8)


def test_states_are_divided_by_heads() -> None:
    spec = find_subject("Qwen3-Next-80B-A3B-Thinking").spec
    on_rank = rank_spec(spec, 2)
    assert on_rank.state_bytes * 2 == spec.state_bytes
    assert any(isinstance(group.spec, RecurrentState) for group in on_rank.groups)


def test_ranks_that_heads_do_not_go_into_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tp=3 is neither a divisor.*one of 1, 2, 4, 8",
    ):
        rank_spec(find_subject("Llama-3.1-8B").spec, 3)


def test_weights_are_divided_evenly() -> None:
    own = find_subject("Llama-3.3-70B-Instruct").own
    on_rank = rank_footprint(own, 4)
    assert 4 * on_rank.weights_bytes >= own.weights_bytes > 4 * (on_rank.weights_bytes - 1)
    assert on_rank.activation_bytes(512, 1) < own.activation_bytes(512, 1)
