"""Prefixes, forks, trims, pins and resizes over every mix of groups: see ``sharing_machine``.

A machine that never fails proves nothing, so it must find accounting that is broken on purpose.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from conformance.covering import only
from conformance.sharing_machine import SharingMachine
from conformance.sharing_model import SHARING_KINDS
from conformance.strategy_cases import KINDS
from quire.kv import BlockCoordinator, PrefixKeys, prefix_index
from quire.kv.block_pool import Pools
from quire.kv.block_tables import BlockTables
from quire.kv.eviction import Recency
from quire.kv.prefix_cache import PrefixCache
from quire.kv.virtual_shared import SharedVirtualAccounting
from quire.kv.windows import Windows

# make test-all goes through 50,000 steps and more of these machines, of those of test_accounting.py
# and of tests/kv; make fuzz goes through as many as there is time for.
SETTINGS = settings(max_examples=6, stateful_step_count=60, deadline=None)
MORE = settings(SETTINGS, max_examples=74)
FEWER = settings(SETTINGS, max_examples=5)


# The layers of the others are in these too.
@pytest.mark.parametrize("kind", only(SHARING_KINDS, "hybrid", "recurrent+2", "sliding-1"))
def test_random_sharing(kind: str) -> None:
    run_state_machine_as_test(lambda: SharingMachine(kind), settings=SETTINGS)


@pytest.mark.full
@pytest.mark.parametrize("kind", SHARING_KINDS)
def test_more_random_sharing(kind: str) -> None:
    run_state_machine_as_test(lambda: SharingMachine(kind), settings=MORE)


@pytest.mark.parametrize("kind", only([*KINDS, "hybrid"], "hybrid", "sliding-1"))
def test_random_sharing_through_windows(kind: str) -> None:
    run_state_machine_as_test(lambda: SharingMachine(kind, through_windows=True), settings=FEWER)


def _nothing(*_: Any) -> None:
    """What a broken verb does."""


def _no_extra(*_: Any) -> tuple[()]:
    return ()


def _one_token_more(one: bytes, other: bytes) -> int:
    common = _common_tokens(one, other)
    return min(common + 1, len(other) // prefix_index.TOKEN_BYTES)


def _late_by_a_token(self: PrefixCache, rows: Any, counts: Any, token_ids: Any) -> None:
    _mark_computed(self, rows, counts, np.roll(token_ids, 1))


def _all_alike(self: Recency, blocks: Any, now: int, _: Any) -> None:
    _use(self, blocks, now, 0)


def _without_kept_bytes(self: BlockCoordinator, *asked: int, kept_bytes: int, **more: Any) -> Any:
    return _allocate(self, *asked, **more)


def _no_changes(*_: Any) -> list[Any]:
    return []


def _only_what_is_longer(self: Windows, row: int, tables: Any) -> Any:
    """Only columns that showed nothing are compared."""
    merged = []
    for group, table in enumerate(tables):
        shown = self._columns(group, len(table))[row, : len(table)]
        merged.append(np.where((shown >= 0) & (table >= 0), shown, table))
    return _show(self, row, merged)


def _unnoted(self: PrefixCache, row: int, column: int, node: int) -> None:
    with _notes_nothing(self._tables):
        _share(self, row, column, node)


def _note_only_new(self: BlockCoordinator, rows: Any, steps: Any) -> None:
    copies = any(len(step.copied_blocks) for step in steps)
    with _notes_nothing(self.tables) if copies else nullcontext():
        _carry_out(self, rows, steps)


@contextmanager
def _notes_nothing(tables: BlockTables) -> Iterator[None]:
    changed, tables.changed = tables.changed, None
    yield
    tables.changed = changed


def _forget_row(self: Windows, row: int) -> None:
    del self._parked[row]
    self._free.append(row)


def _always(*_: Any) -> bool:
    return True


def _none(self: Windows, rows: Any) -> Any:
    return np.zeros(len(rows), np.int64)


_show, _share, _carry_out = Windows.show, PrefixCache._share, BlockCoordinator._carry_out
_common_tokens, _mark_computed = prefix_index._common_tokens, PrefixCache.mark_computed
_use, _allocate = Recency.use, BlockCoordinator.allocate

MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a shared block is written without its copy": (Pools, "copy", _nothing),
    "a block that is written again is still found": (Pools, "forget", _nothing),
    "what is found is not held": (Pools, "hold", _nothing),
    "tenants find each other's blocks": (PrefixKeys, "of_root", _no_extra),
    "an image is only its placeholders": (PrefixKeys, "of_blocks", _no_extra),
    "a hit is a token too long": (prefix_index, "_common_tokens", _one_token_more),
    "blocks are entered under other tokens": (PrefixCache, "mark_computed", _late_by_a_token),
    "all matter alike": (Recency, "use", _all_alike),
    "promises are forgotten": (BlockCoordinator, "allocate", _without_kept_bytes),
}


WINDOW_MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "windows still show what is released": (Windows, "release", _no_changes),
    "an adopted row is taken to show what it should": (Windows, "show", _only_what_is_longer),
    "a merged block is not noted": (PrefixCache, "_share", _unnoted),
    "a copy is not shown in the place of its original": (
        BlockCoordinator,
        "_carry_out",
        _note_only_new,
    ),
    "a row given up is shown again": (Windows, "_give_up", _forget_row),
    "all who ask have mappings enough": (Windows, "have_mappings", _always),
    "a merge takes no mappings": (SharedVirtualAccounting, "_may_swap", _always),
    "a window begins without what is beside it": (Windows, "num_blank", _none),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_broken_accounting_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = MUTATIONS[mutation]
    kind = "sliding" if owner is Recency else "full"  # a window leaves blocks to be evicted
    monkeypatch.setattr(owner, name, broken)
    assert_found(kind)


# Machines take long to find these.
_FOUND_LATE = (
    "an adopted row is taken to show what it should",
    "a copy is not shown in the place of its original",
    "a merge takes no mappings",
    "all who ask have mappings enough",
    "a merged block is not noted",
    "a row given up is shown again",
)


@pytest.mark.parametrize(
    "mutation",
    only(WINDOW_MUTATIONS, *(each for each in WINDOW_MUTATIONS if each not in _FOUND_LATE)),
)
def test_broken_windows_are_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = WINDOW_MUTATIONS[mutation]
    monkeypatch.setattr(owner, name, broken)
    if owner is not SharedVirtualAccounting:  # its own check would tell, and storage must too
        monkeypatch.setattr(Windows, "check", _nothing)
    assert_found("full", through_windows=True)


def assert_found(kind: str, *, through_windows: bool = False) -> None:
    one_failure = settings(
        max_examples=1000,  # the first failure ends it; what is tried depends on what is imported
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(
            lambda: SharingMachine(kind, through_windows=through_windows), settings=one_failure
        )
