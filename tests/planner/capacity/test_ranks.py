"""Heads on several devices."""

from __future__ import annotations

import pytest

from quire.errors import ConfigError
from quire.planner.capacity.ranks import rank_footprint
from quire.planner.subjects.subject import find_subject
from quire.spec import RecurrentState
from quire.spec.ranks import is_replicated, rank_spec


@pytest.mark.parametrize(("num_ranks", "share"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (32, 8)])
def test_heads_are_divided_and_kept_twice_where_there_are_fewer(num_ranks: int, share: int) -> None:
    spec = find_subject("Llama-3.1-8B").spec
    on_rank = rank_spec(spec, num_ranks)
    assert on_rank.bytes_per_token * share == spec.bytes_per_token
    assert is_replicated(spec, num_ranks) == (num_ranks > 8)


def test_a_latent_is_kept_whole_by_every_rank() -> None:
    spec = find_subject("DeepSeek-V3").spec
    assert rank_spec(spec, 8) == spec
    assert is_replicated(spec, 8)


def test_states_are_divided_by_heads() -> None:
    spec = find_subject("Qwen3-Next-80B-A3B-Thinking").spec
    on_rank = rank_spec(spec, 2)
    assert on_rank.state_bytes * 2 == spec.state_bytes
    assert any(isinstance(group.spec, RecurrentState) for group in on_rank.groups)


def test_ranks_that_heads_do_not_go_into_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp=3 does not divide 8 heads.*one of 1, 2, 4, 8"):
        rank_spec(find_subject("Llama-3.1-8B").spec, 3)


def test_weights_are_divided_evenly() -> None:
    own = find_subject("Llama-3.3-70B-Instruct").own
    on_rank = rank_footprint(own, 4)
    assert 4 * on_rank.weights_bytes >= own.weights_bytes > 4 * (on_rank.weights_bytes - 1)
    assert on_rank.activation_bytes(512, 1) < own.activation_bytes(512, 1)
