"""What every Accounting promises, over all strategies, their options and several models' memories.

Slots are replayed without tensors: see ``strategy_machine``. The page is tiny, so that a few tokens
fill several and, with small blocks, a page holds several blocks.
"""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from conformance import named
from conformance.covering import in_turn
from conformance.strategy_cases import OPTIONS, layers_of, model_spec
from conformance.strategy_machine import SlotStore, StrategyMachine
from quire.errors import ConfigError
from quire.kv import Accounting, CacheConfig, Extension, Fits, Never, NotNow, build_accounting

SETTINGS = settings(max_examples=5, stateful_step_count=30, deadline=None)
MORE = settings(SETTINGS, max_examples=18)


def store(accounting: Accounting, config: CacheConfig) -> SlotStore:
    return SlotStore(accounting, config.capacity_bytes)


# Of options that differ in where entries lie, and not in what fits, one.
_SAMPLED = named.sampled(
    "contiguous", "contiguous-request-defrag", "growing-uniform-kept", "growing-doubling-freed",
    "growing-staggered-kept", "paged-4", "paged-16", "virtual", "virtual-shared",
    "virtual-shared-stacks",
)  # fmt: skip


@pytest.mark.parametrize(("option", "page_bytes"), in_turn(OPTIONS, (128, 2048), kept=_SAMPLED))
def test_random_use(option: str, page_bytes: int) -> None:
    run_state_machine_as_test(
        lambda: StrategyMachine(option, store, page_bytes=page_bytes), settings=SETTINGS
    )


@pytest.mark.full
@pytest.mark.parametrize("page_bytes", [128, 2048])
@pytest.mark.parametrize("option", OPTIONS)
def test_more_random_use(option: str, page_bytes: int) -> None:
    run_state_machine_as_test(
        lambda: StrategyMachine(option, store, page_bytes=page_bytes), settings=MORE
    )


class Drawn:
    """What a machine draws, told in advance."""

    def __init__(self, *values: Any) -> None:
        self._values = list(values)

    def draw(self, _: object) -> Any:
        return self._values.pop(0)


@pytest.mark.parametrize("option", OPTIONS)
def test_what_came_under_a_larger_capacity_may_stay(option: str) -> None:
    """Behind its chunk a sequence holds less than the chunk took, and the capacity sinks to that.

    It cannot come there again, but goes on when the other ends: ``NotNow`` is right.
    """
    for num_tokens in (10, 14, 18):
        machine = StrategyMachine(option, store, page_bytes=128)
        machine.build(data=Drawn("chunked", "bfloat16", 50, num_tokens, 0, 6, 1))
        machine.admit(max_tokens=10, num_tokens=6)
        machine.decode(num_steps=3)
        machine.admit(max_tokens=10, num_tokens=1)
        machine.resize(share=6, for_now=False)
        machine.decode(num_steps=3)
        machine.teardown()


CONFIG = CacheConfig(max_model_len=64, max_num_seqs=4, capacity_bytes=2**20, page_bytes=128)
SPEC = model_spec(layers_of("full+sliding", "bfloat16", wide=False))


@pytest.fixture(params=OPTIONS)
def accounting(request: pytest.FixtureRequest) -> Accounting:
    strategy, changed = OPTIONS[request.param]
    return build_accounting(strategy, SPEC, replace(CONFIG, **changed))


def test_an_id_is_used_once(accounting: Accounting) -> None:
    accounting.add(7)
    accounting.add(8)
    with pytest.raises(KeyError):
        accounting.add(7)
    with pytest.raises(KeyError):
        accounting.fork(8, 7)
    assert accounting.usage().num_sequences == 2
    accounting.free(7)
    accounting.add(7)


def test_an_unknown_id_is_a_key_error(accounting: Accounting) -> None:
    for verb in (
        lambda: accounting.try_extend(1, 1),
        lambda: accounting.fork(1, 2),
        lambda: accounting.trim(1, 0),
        lambda: accounting.free(1),
        lambda: accounting.table(0, 1),
    ):
        with pytest.raises(KeyError):
            verb()
    assert accounting.usage().num_sequences == 0


def test_a_sequence_without_tokens_takes_nothing(accounting: Accounting) -> None:
    accounting.add(0)
    assert isinstance(accounting.try_extend(0, 0), Fits)
    assert isinstance(accounting.fork(0, 1), Fits)
    accounting.trim(0, 0)
    accounting.free(0)
    assert accounting.drain() == []
    assert accounting.usage().committed_bytes == 0


def test_longer_than_the_longest_can_never_be(accounting: Accounting) -> None:
    accounting.add(0)
    verdict = accounting.try_extend(0, CONFIG.max_model_len + 1)
    assert isinstance(verdict, Never)
    assert verdict.option == "max_model_len"
    assert verdict.fitting_tokens == CONFIG.max_model_len
    assert verdict.need_bytes > CONFIG.max_model_len * SPEC.bytes_per_token
    assert accounting.try_extend_each([0], [CONFIG.max_model_len + 1]) == 0
    assert isinstance(accounting.try_extend(0, CONFIG.max_model_len), Fits)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_cache_too_small_for_anything_says_so(option: str) -> None:
    strategy, changed = OPTIONS[option]
    cache = build_accounting(strategy, SPEC, replace(CONFIG, capacity_bytes=100, **changed))
    cache.add(0)
    verdict = cache.try_extend(0, 1)
    assert isinstance(verdict, Never)
    assert verdict.capacity_bytes == 100 < verdict.need_bytes
    assert verdict.fitting_tokens == 0
    assert "kv_cache_memory_bytes" in verdict.option


@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_promised_or_kept_is_left_free(option: str) -> None:
    """In a cache that is just large enough for one sequence at its longest."""
    strategy, changed = OPTIONS[option]
    longest = np.array([CONFIG.max_model_len])
    roomy = build_accounting(strategy, SPEC, replace(CONFIG, **changed))
    (capacity_bytes,) = roomy.bytes_alone(longest, longest).tolist()
    config = replace(CONFIG, capacity_bytes=capacity_bytes, **changed)
    cache = build_accounting(strategy, SPEC, config)
    cache.add(0)
    cache.add(1)
    assert isinstance(cache.try_extend(0, 4), Fits)
    promised = CONFIG.max_model_len
    assert isinstance(cache.try_extend(1, 4, Extension(promised_tokens=promised)), NotNow)
    cache.free(0)
    assert isinstance(cache.try_extend(1, 4, Extension(kept_bytes=capacity_bytes)), NotNow)
    assert isinstance(cache.try_extend(1, 4, Extension(promised_tokens=promised)), Fits)
    cache.check()


def test_who_leaves_makes_room_for_as_many_again(accounting: Accounting) -> None:
    for _ in range(3):
        for seq_id in range(CONFIG.max_num_seqs):
            accounting.add(seq_id)
            assert isinstance(accounting.try_extend(seq_id, 20), Fits)
        accounting.drain()
        for seq_id in range(CONFIG.max_num_seqs):
            accounting.free(seq_id)
        accounting.drain()
        accounting.check()
    assert accounting.usage().committed_bytes == accounting.held_bytes == 0


def test_a_ceiling_that_is_low_for_now_is_no_never(accounting: Accounting) -> None:
    assert accounting.resize(0, for_now=True) == 0
    accounting.add(0)
    assert isinstance(accounting.try_extend(0, 4), NotNow)
    assert accounting.resize(2 * CONFIG.capacity_bytes, for_now=True) == CONFIG.capacity_bytes
    assert isinstance(accounting.try_extend(0, 4), Fits)


def test_every_layer_is_in_one_group(accounting: Accounting) -> None:
    layers = [layer for group in accounting.groups for layer in group.layers]
    assert sorted(layers) == list(range(SPEC.num_layers))


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="'pagde' is no cache strategy; known: contiguous, growing, paged"
    ):
        build_accounting("pagde", SPEC, CONFIG)


def test_accounting_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from quire.spec import FullAttention, Layer, ModelSpec\n"
        "from quire.kv import STRATEGIES, CacheConfig, build_accounting\n"
        "full = FullAttention(num_kv_heads=1, head_dim=64, dtype='float32')\n"
        "spec = ModelSpec(model_type='', layers=(Layer(specs=(full,)),), max_model_len=9,\n"
        "                 dtype='float32')\n"
        "config = CacheConfig(max_model_len=9, max_num_seqs=1, capacity_bytes=2**20)\n"
        "for name in STRATEGIES:\n"
        "    cache = build_accounting(name, spec, config)\n"
        "    cache.add(0)\n"
        "    assert cache.try_extend(0, 9).__class__.__name__ == 'Fits'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
