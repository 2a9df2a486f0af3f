"""What published models take of pages, group by group, against the closed form of their specs.

At 100, 5,000 and a million tokens, without a tensor: the bytes of the whole blocks that
a group's spec says are still read, and no more than a tenth above.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from conformance.covering import only
from quire.kv import Accounting, CacheConfig, Commit, Fits, Release, StorageOp, build_accounting
from quire.spec import Group, ModelSpec, RecurrentState
from quire.units import align_down, align_up
from spec.published import FULL, LATENT, Published
from spec.published_recurrent import RECURRENT
from spec.published_windowed import WINDOWED

LENGTHS = (100, 5_000, 1_000_000)
BLOCK = 16
PAGE = 4096
SHAPED = ("Qwen/Qwen3-Next-80B-A3B-Instruct", "ai21labs/Jamba-v0.1")
MODELS = {
    model.name: model
    for model in (
        *(FULL[0], *LATENT[:2], *WINDOWED[::2], *RECURRENT[1::3]),
        *(model for model in RECURRENT if model.name in SHAPED),
    )
}


class Pages:
    """What the changes leave committed, by group."""

    def __init__(self, accounting: Accounting) -> None:
        groups = range(len(accounting.groups))
        self._slot_bytes = [accounting.slot_bytes(group) for group in groups]
        self.num_bytes = np.zeros(len(groups), np.int64)

    def apply(self, changes: list[StorageOp]) -> None:
        for change in changes:
            if isinstance(change, Commit | Release):
                size = (change.stop - change.start) * self._slot_bytes[change.group]
                self.num_bytes[change.group] += size if isinstance(change, Commit) else -size


def closed_form(group: Group, begin: int, num_tokens: int) -> int:
    """Whole blocks of what is read from token ``begin`` on, up to ``num_tokens``; or the states."""
    if isinstance(group.spec, RecurrentState):
        return group.bytes_for(num_tokens)
    first = align_down(group.live_start(begin), BLOCK)
    return (align_up(num_tokens, BLOCK) - first) * group.bytes_per_token


def config_for(spec: ModelSpec, **options: Any) -> CacheConfig:
    return CacheConfig(
        max_model_len=LENGTHS[-1],
        max_num_seqs=1,
        capacity_bytes=2**42,
        block_size=BLOCK,
        page_bytes=PAGE,
        enable_prefix_caching=False,
        **options,
    )


# Half of all seconds, and its layers are those of other models.
_LONG = "google/gemma-3n-E2B-it"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", only(MODELS, *(name for name in MODELS if name != _LONG)))
def test_groups_take_what_their_specs_say(name: str) -> None:
    """``paged``, in long steps and then by one token."""
    model: Published = MODELS[name]
    config: Mapping[str, Any] = model.config
    spec = ModelSpec.from_config(config)
    accounting = build_accounting("paged", spec, config_for(spec))
    pages = Pages(accounting)
    accounting.add(0)
    held = 0
    for length in LENGTHS:
        steps = [*range(held + 2_000, length - 1, max(2_000, length // 20)), length - 1, length]
        for num_tokens in steps:
            assert isinstance(accounting.try_extend(0, num_tokens), Fits)
            pages.apply(accounting.drain())
        held = length
        for number, group in enumerate(accounting.groups):
            expected = closed_form(group, length - 1, length)
            taken = int(pages.num_bytes[number])
            assert expected <= taken <= 1.1 * expected, f"{group.spec} at {length}"
        assert accounting.usage().committed_bytes == pages.num_bytes.sum()
    accounting.free(0)
    pages.apply(accounting.drain())
    assert pages.num_bytes.sum() == 0


def test_a_short_prompt_of_a_hybrid_takes_its_states_and_a_block() -> None:
    """12 tokens, of a pool for 100,000: no block of one group is padded to another's."""
    for name in SHAPED:
        spec = ModelSpec.from_config(MODELS[name].config)
        pool = 100_000 * spec.bytes_per_token + spec.state_bytes
        for strategy in ("paged", "virtual", "growing"):
            config = config_for(spec, growth_tokens=BLOCK)
            accounting = build_accounting(strategy, spec, config)
            accounting.add(0)
            assert isinstance(accounting.try_extend(0, 12), Fits)
            above = accounting.usage().committed_bytes - spec.state_bytes
            assert 0 < above <= 0.01 * pool, (name, strategy)
