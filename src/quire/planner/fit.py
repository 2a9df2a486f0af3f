"""Find what makes a plan fit: the longest context, the most sequences, the least memory.

Each search bisects one option, with a plan for each value that it tries. Bisection is right because
more memory, shorter sequences and fewer sequences never make a plan fit less.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.memory.machine import Machine, MemoryBound
from quire.planner.capacity import CapacityPlan, Course, PlanTarget, plan
from quire.planner.sequence_memory import PlannedLengths
from quire.spec.tensor_parallel import rank_spec
from quire.units import align_up, format_bytes, format_count

_GIB = 1 << 30
_MOST_SEQUENCES = 1 << 20
_MOST_MEMORY_BYTES = 1 << 50
_STRIDE = 4096  # tokens
_SHORTER = (2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2)
_RANKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """A change of one option that makes a plan fit, and what it gives."""

    flag: str
    outcome: str


def longest(found: CapacityPlan, num_at_once: int = 1) -> int:
    """Return the longest context in tokens that ``num_at_once`` sequences can have; 0 for none."""
    most = found.subject.spec.max_model_len

    def fits(max_model_len: int) -> bool:
        config = replace(found.config, max_model_len=max_model_len)
        again = _again(found, config=config, request=_shorter(found.request, max_model_len))
        return again.fits and again.cell.num_longest >= num_at_once

    # In whole strides first: a rule that gives a context exactly its bytes fits at ends of blocks.
    strides = _most(lambda count: fits(count * _STRIDE), 1, most // _STRIDE)
    low = strides * _STRIDE or next((n for n in _SHORTER if n <= most and fits(n)), 0)
    return low and _most(fits, low, min(most, low + _STRIDE))


def most_sequences(found: CapacityPlan) -> int:
    """Return how many typical sequences could run at once with any ``max_num_seqs``; 0 for none."""

    def fits(max_num_seqs: int) -> bool:
        config = replace(found.config, max_num_seqs=max_num_seqs)
        again = _again(found, config=config, course=found.cell.course)
        return again.ledger.refusal is None and again.cell.num_fitting >= max_num_seqs

    return _most(fits, 1, _MOST_SEQUENCES)


def changes(found: CapacityPlan) -> Iterator[OptionChange]:
    """Yield changes of one option, each of which alone makes the plan fit."""
    yield from _more_memory(found)
    yield from _shorter_context(found)
    yield from _smaller_entries(found)
    yield from _more_ranks(found)


def _more_memory(found: CapacityPlan) -> Iterator[OptionChange]:
    def fits(extra_gib: int) -> bool:
        place = replace(found.place, machine=_with_more(found.place.machine, extra_gib * _GIB))
        again = _again(found, place=place, course=found.cell.course)
        return again.fits

    total, _ = found.place.machine.hint
    most = _MOST_MEMORY_BYTES // _GIB
    extra = 1 + bisect_left(range(1, most + 1), True, key=fits)
    if extra <= most:
        wanted = align_up(total + extra * _GIB, _GIB)
        yield OptionChange(
            flag=f"--memory {wanted // _GIB}GiB",
            outcome=f"{format_bytes(wanted - total)} more than the {format_bytes(total)} there are",
        )


def _shorter_context(found: CapacityPlan) -> Iterator[OptionChange]:
    asked, fitting = found.needs.context_tokens, longest(found)
    if 0 < fitting < asked:
        outcome = f"instead of {format_count(asked)}"
        yield OptionChange(flag=f"--max-model-len {fitting}", outcome=outcome)


def _smaller_entries(found: CapacityPlan) -> Iterator[OptionChange]:
    if found.config.kv_cache_dtype != "auto":
        return
    for dtype in ("int8_per_token_head", "fp8"):
        try:
            again = _again(found, config=replace(found.config, kv_cache_dtype=dtype))
        except ConfigError:  # the entries have no room for scales
            continue
        if again.fits:
            size = format_bytes(again.needs.bytes_per_token)
            yield OptionChange(flag=f"--kv-cache-dtype {dtype}", outcome=f"{size} a token")


def _more_ranks(found: CapacityPlan) -> Iterator[OptionChange]:
    for num_ranks in _RANKS:
        if num_ranks <= found.num_ranks:
            continue
        try:
            again = _again(found, num_ranks=num_ranks)
        except ConfigError:  # so many ranks cannot divide the heads
            continue
        if again.fits:
            each = format_bytes(again.needs.weights_bytes)
            option = "--tp" if found.divide is rank_spec else "--tensor-parallel-size"
            yield OptionChange(
                flag=f"{option} {num_ranks}", outcome=f"{each} of weights on each device"
            )
            return


def _again(
    found: CapacityPlan,
    *,
    config: EngineConfig | None = None,
    place: PlanTarget | None = None,
    num_ranks: int | None = None,
    request: PlannedLengths | None = None,
    course: Course | None = None,
) -> CapacityPlan:
    """Plan again with some inputs replaced."""
    return plan(
        found.subject,
        config or found.config,
        place or found.place,
        num_ranks=num_ranks or found.num_ranks,
        divide=found.divide,
        request=request or found.request,
        compare=False,
        course=course,
    )


def _with_more(machine: Machine, extra_bytes: int) -> Machine:
    """Return the machine with more free memory."""

    def more(bound: MemoryBound) -> MemoryBound:
        if bound.counts_addresses:
            return bound
        return replace(bound, limit_bytes=bound.limit_bytes + extra_bytes)

    device, working_set = machine.device, machine.working_set_bytes
    return replace(
        machine,
        bounds=tuple(more(bound) for bound in machine.bounds),
        ram_bytes=machine.ram_bytes + extra_bytes,
        working_set_bytes=None if working_set is None else working_set + extra_bytes * 3 // 4,
        device=device
        and replace(
            device,
            total_bytes=device.total_bytes + extra_bytes,
            free_bytes=device.free_bytes + extra_bytes,
        ),
    )


def _shorter(request: PlannedLengths, max_model_len: int) -> PlannedLengths:
    """Return the request, cut to the context."""
    if request.input_tokens + request.output_tokens <= max_model_len:
        return request
    output_tokens = max(1, min(request.output_tokens, max_model_len // 2))
    return PlannedLengths(input_tokens=max_model_len - output_tokens, output_tokens=output_tokens)


def _most(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the greatest value of [low, high] that fits, or 0; all values below it fit."""
    count = bisect_left(range(low, high + 1), True, key=lambda value: not fits(value))
    return low + count - 1 if count else 0
