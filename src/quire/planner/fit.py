"""What would have to change: the longest context, the most sequences, the least memory.

Each answer is a plan that was made with it: nothing is inverted, everything is searched. A search
halves its way along one option, since more memory, shorter sequences and fewer of them never make
a plan fit less.
"""

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
    """One option, and what comes of it."""

    flag: str
    outcome: str


def longest(found: CapacityPlan, num_at_once: int = 1) -> int:
    """The most tokens that so many sequences can have at once; 0 where not even few fit."""
    most = found.subject.spec.max_model_len

    def fits(max_model_len: int) -> bool:
        config = replace(found.config, max_model_len=max_model_len)
        again = _again(found, config=config, request=_shorter(found.request, max_model_len))
        return again.fits and again.cell.num_longest >= num_at_once

    # In strides first: a rule that gives a context exactly its bytes fits where blocks end.
    strides = _most(lambda count: fits(count * _STRIDE), 1, most // _STRIDE)
    low = strides * _STRIDE or next((n for n in _SHORTER if n <= most and fits(n)), 0)
    return low and _most(fits, low, min(most, low + _STRIDE))


def most_sequences(found: CapacityPlan) -> int:
    """How many typical sequences can run at once, were as many allowed; 0 for none."""

    def fits(max_num_seqs: int) -> bool:
        config = replace(found.config, max_num_seqs=max_num_seqs)
        again = _again(found, config=config, course=found.cell.course)
        return again.ledger.refusal is None and again.cell.num_fitting >= max_num_seqs

    return _most(fits, 1, _MOST_SEQUENCES)


def changes(found: CapacityPlan) -> Iterator[OptionChange]:
    """What, each by itself, would make a plan fit that does not."""
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
    extra = _least(fits, 1, _MOST_MEMORY_BYTES // _GIB)
    if extra is not None:
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
        except ConfigError:  # scales that do not fit behind the entries
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
        except ConfigError:  # heads that so many ranks do not divide
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
    """The same plan with something else."""
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
    """The same machine with more memory, none of which is used."""

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
    """The request, cut to what a sequence can have."""
    if request.input_tokens + request.output_tokens <= max_model_len:
        return request
    output_tokens = max(1, min(request.output_tokens, max_model_len // 2))
    return PlannedLengths(input_tokens=max_model_len - output_tokens, output_tokens=output_tokens)


def _most(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The greatest in [low, high] that fits, 0 for none; all below it do."""
    if low > high or not fits(low):
        return 0
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _least(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least in [low, high] that fits, None for none; all above it do."""
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
