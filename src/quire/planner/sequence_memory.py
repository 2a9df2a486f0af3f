"""Follow one sequence through a strategy's accounting, and note the bytes that it holds.

The accounting is the engine's own. The sequence grows as a scheduler lets it: by chunks of the
prompt, then by one token per step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.kv import Accounting, CacheConfig, Commit, Fits, Release, StorageOp, build_accounting
from quire.kv.page_tables import page_table_bytes
from quire.spec import ModelSpec
from quire.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLengths:
    """A typical request, in tokens."""

    input_tokens: int
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens that are computed: all but the last generated one."""
        return self.input_tokens + self.output_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a sequence holds after one step."""

    num_tokens: int
    committed_bytes: int
    used_bytes: int
    peak_bytes: int  # most bytes committed while the step's changes were carried out


def lengths(request: PlannedLengths, max_num_batched_tokens: int) -> Iterator[int]:
    """Yield the tokens that a sequence has after each step, if it runs alone."""
    yield from range(max_num_batched_tokens, request.input_tokens, max_num_batched_tokens)
    yield from range(request.input_tokens, request.num_tokens + 1)


def moments(
    strategy: str, spec: ModelSpec, sizes: CacheConfig, each: Iterable[int], max_tokens: int
) -> Iterator[Moment]:
    """Yield what one sequence holds after each step. Raises: ConfigError if it does not fit."""
    accounting = build_accounting(strategy, spec, sizes)
    accounting.add(0, max_tokens=max_tokens)
    committed = 0
    for num_tokens in each:
        verdict = accounting.try_extend(0, num_tokens)
        if not isinstance(verdict, Fits):
            raise ConfigError(
                f"{strategy} has no room for {format_count(num_tokens)} tokens of one sequence in "
                f"{format_bytes(sizes.capacity_bytes)}"
            )
        peak = _highest(accounting, accounting.drain(), committed)
        usage = accounting.usage()
        committed = usage.committed_bytes
        yield Moment(
            num_tokens=num_tokens,
            committed_bytes=committed,
            used_bytes=usage.used_bytes,
            peak_bytes=max(peak, committed),
        )


def tables_after(
    strategy: str, spec: ModelSpec, sizes: CacheConfig, each: Iterable[int], max_tokens: int
) -> int | None:
    """Return the bytes of the kernel's page tables after the last of those steps."""
    accounting = build_accounting(strategy, spec, sizes)
    accounting.add(0, max_tokens=max_tokens)
    for num_tokens in each:
        accounting.try_extend(0, num_tokens)
        accounting.drain()
    return page_table_bytes(accounting, sizes.page_bytes)


def _highest(accounting: Accounting, changes: Iterable[StorageOp], committed: int) -> int:
    """Return the most bytes committed while changes are carried out one by one."""
    highest = committed
    for change in changes:
        if isinstance(change, Commit | Release):
            size = accounting.slot_bytes(change.group) * (change.stop - change.start)
            committed += size if isinstance(change, Commit) else -size
            highest = max(highest, committed)
    return highest
