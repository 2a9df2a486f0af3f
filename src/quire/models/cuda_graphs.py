"""Decode steps as CUDA graphs: one launch in place of thousands.

A step of decoding, one token a sequence, does the same each time, on other numbers. So it is
captured once for each of a few sizes, over memory that stays, and replayed: the step's numbers are
copied there and rows without a sequence are padding, which keeps and reads nothing. What comes
out lies in one place for all sizes, until the next replay.

A graph knows addresses. It goes when the model has changed or the cache was begun anew, and is
captured again when it is asked for. How a pass is run is not known here, nor what it reads.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor

from quire.attention import AttentionBatch, Replays
from quire.devices import staged_bytes, to_device
from quire.errors import one_line
from quire.models.model_watch import ModelWatch
from quire.models.states.state_batch import StateBatch
from quire.models.step_inputs import HostInputs, Inputs, batch_arrays, place_batches
from quire.units import ceil_div, format_bytes, format_count

# -- failed capture --------------------------------------------------------------------------------

# What a capture that failed leaves behind in torch, put in order, and whether it may do later.
#
# A capture that cannot be ended (a copy to the host in the middle of it is enough) stays on
# torch's books, until torch 2.13 at least:
#
# * on the allocator's, which then gives no memory back to the device, and raises where it is asked;
# * on its pool's, which counts it among its graphs for ever, so that its memory never goes back;
# * before torch 2.13 on those of the generator of random numbers, of the whole process. It then
#   draws no number any more, and lets no graph of the process be replayed.
#
# Source: pytorch pull requests 180395 and 190348; ``CUDAGeneratorState::increase`` of torch 2.12


def is_shortage(error: BaseException) -> bool:
    """Tell whether memory was short at that moment: the error itself, or what it came from."""
    return any(
        isinstance(each, torch.OutOfMemoryError) or "out of memory" in str(each).lower()
        for each in _origins(error)
    )


def put_in_order(device: torch.device, stream: Any, pool: Any) -> None:
    """Restore torch after a capture on ``stream`` into ``pool`` that failed; its graph is gone."""
    with suppress(RuntimeError):  # what the pass launched there may use what others get next
        torch.cuda.current_stream(device).wait_stream(stream)
    if pool is not None and not _gives_back():
        with suppress(RuntimeError):  # it is another one that is under way, of another engine
            _end_allocating()(device.index or 0, pool)
    with suppress(RuntimeError):
        _capture_one_number(device, stream)
    _gives_back()


def give_back_pool(device: torch.device, pool: Any, num_failed: int) -> None:
    """Give back a pool whose graphs are gone, and for which ``num_failed`` captures still count.

    A torch that does not count them has given the memory back. To count less than none would
    spoil its allocator for good, so it is done only where unused memory stays taken.
    """
    with suppress(RuntimeError):  # an allocator without pools
        for _ in range(num_failed):
            if not _gives_back() or not _keeps_unused(pool):
                return
            torch._C._cuda_releasePool(device.index or 0, pool)
        _gives_back()


def _capture_one_number(device: torch.device, stream: Any) -> None:
    """A capture that does end, after which the generator counts none as under way."""
    number, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    # Outside of the capture too: one that fails leaves its stream as the current one.
    with (
        torch.cuda.stream(stream),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        number.zero_()


def _keeps_unused(pool: Any) -> bool:
    """Whether a pool has memory of the device that is no tensor's."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    own = [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool)]
    return any(not segment["active_size"] for segment in own)


def _gives_back() -> bool:
    """Have torch give back what it keeps; False where it counts a capture as under way."""
    try:
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _end_allocating() -> Any:
    """By the name that this torch has for it."""
    older = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    return older or torch._C._cuda_endAllocateToPool


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# -- captured --------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class GraphCache(Protocol):
    """What the graphs read and write."""

    def settle(self) -> None:
        """Have what is launched later find every copy in it done."""
        ...


# A pass over some batches.
Run = Callable[[Sequence[AttentionBatch], Inputs], Tensor]
_NUM_ALIKE = 1e-2  # of the largest logit: other kernels may have been chosen
_PATIENCE = 1000  # steps until one that memory was short for is tried again; then twice as many


def graph_sizes(most: int) -> list[int]:
    """List numbers of sequences, as vLLM has them: a step takes the next larger one."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)]
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One graph, and what it writes."""

    graph: Any  # torch.cuda.CUDAGraph
    logits: Tensor  # [size, vocabulary]


@final
class CapturedDecodes:
    """The graphs of one model over one cache.

    ``block_sizes``: of each group's tables, none of which is wider than ``max_model_len`` asks for.
    ``state_groups``: how many groups of layers keep recurrent states.
    """

    def __init__(
        self,
        watch: ModelWatch,  # which looks at the model before each step
        run: Run,
        replays: Replays,
        device: torch.device,
        *,
        block_sizes: Sequence[int],
        state_groups: int,
        max_model_len: int,
        max_num_seqs: int,
    ) -> None:
        self._model, self._run, self._replays, self._device = watch.model, run, replays, device
        self._watch, self._version = watch, -1
        self._block_sizes, self._state_groups = block_sizes, state_groups
        self._max_model_len = max_model_len
        self._sizes = graph_sizes(max_num_seqs)
        widths = [ceil_div(max_model_len, size) for size in block_sizes]
        self._tables = [
            torch.zeros(max_num_seqs, width, dtype=torch.int32, device=device) for width in widths
        ]
        batches, inputs = self._padding(max_num_seqs)
        room = staged_bytes([*inputs.arrays, *batch_arrays(batches)])
        room += sum(tables.nbytes + 16 for tables in self._tables)
        self._room = torch.zeros(room, dtype=torch.uint8, device=device)
        # One for all sizes: libraries keep memory for each stream that they have ever seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._num_failed = 0  # captures into it
        self._graphs: dict[int, Captured] = {}
        self._logits: Tensor | None = None  # [max_num_seqs, vocabulary]
        self._cache: GraphCache | None = None  # of which the graphs know the addresses
        self._works = True
        self._patience, self._num_to_pass = _PATIENCE, 0  # steps, before the next capture

    def capture(self, cache: GraphCache) -> None:
        """Capture all sizes, the largest first: the others fit into the memory that it took."""
        before = torch.cuda.memory_reserved(self._device)
        cache.settle()
        self._begin(cache)
        for size in reversed(self._sizes):
            if self._captured(size) is None:
                return
        log.info(
            "%d CUDA graphs of decode steps, up to %d sequences, in %s",
            len(self._graphs),
            self._sizes[-1],
            format_bytes(max(0, torch.cuda.memory_reserved(self._device) - before)),
        )

    def replay(
        self, cache: GraphCache, batches: Sequence[AttentionBatch], given: HostInputs
    ) -> Tensor | None:
        """Replay a step with one token a sequence: logits [S, vocabulary]; None: it must be run.

        They are overwritten by the next one. ``cache``: what the graph reads and writes, which is
        another one when the engine has begun anew.
        """
        num_seqs = len(given.token_ids)
        if not self._works or num_seqs > self._sizes[-1]:
            return None
        if given.states is not None and not given.states.only_goes_on:  # a text's first token
            return None
        if any(b.tables.shape[1] > t.shape[1] for b, t in zip(batches, self._tables, strict=True)):
            return None
        cache.settle()
        if cache is not self._cache or self._version != self._watch.version:
            self._begin(cache)
        captured = self._captured(next(size for size in self._sizes if size >= num_seqs))
        if captured is None:
            return None
        padded = [_padded(batch, len(captured.logits)) for batch in batches]
        self._place(padded, _padded_inputs(given, len(captured.logits)))
        try:
            for batch in padded:
                self._replays.prepare(batch)
            captured.graph.replay()
        except RuntimeError as error:
            self._give_up(f"a replay was refused ({one_line(error)})")
            return None
        return captured.logits[:num_seqs]

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    def close(self) -> None:
        """Drop the graphs, and what they alone had. Nothing is replayed then."""
        self._works, self._cache = False, None
        self._forget()
        self._tables, self._room = [], self._room[:0].clone()

    def _forget(self) -> None:
        """A pool of which no graph is left cannot be captured into any more."""
        pool, num_failed = self._pool, self._num_failed
        self._graphs, self._pool, self._logits, self._num_failed = {}, None, None, 0
        if num_failed:
            give_back_pool(self._device, pool, num_failed)

    def _begin(self, cache: GraphCache) -> None:
        """Forget the graphs, which are of another model or cache."""
        self._forget()
        self._patience, self._num_to_pass = _PATIENCE, 0
        self._cache = cache
        if reason := self._watch.why_not_recorded():
            self._give_up(reason)
        self._version = self._watch.version

    def _give_up(self, reason: str) -> None:
        log.warning("%s runs without CUDA graphs: %s", type(self._model).__name__, reason)
        self._works = False
        self._forget()

    def _captured(self, size: int) -> Captured | None:
        """The graph of a size, captured if it is not there."""
        found = self._graphs.get(size)
        if found is not None or not self._works:
            return found
        if self._num_to_pass:
            self._num_to_pass -= 1
            return None
        is_first = not self._graphs
        try:
            found = self._graphs[size] = self._capture(size)
            if is_first:
                self._require_alike(found)
        except Exception as error:  # the model is code that we know nothing of
            self._graphs.pop(size, None)
            reason, is_short = one_line(error), is_shortage(error)
        else:
            return found
        del found  # as the error is gone, which held it too: a graph that failed holds its pool
        self._num_failed += self._pool is not None
        put_in_order(self._device, self._stream, self._pool)
        if is_short:
            self._try_later(size, reason)
        else:
            self._give_up(reason)
        return None

    def _try_later(self, size: int, reason: str) -> None:
        """Those that are captured go on being replayed."""
        log.warning(
            "steps of %s sequences run without a CUDA graph, for which there was no memory, and it "
            "is tried again in %s steps: %s",
            format_count(size),
            format_count(self._patience),
            reason,
        )
        self._num_to_pass, self._patience = self._patience, 2 * self._patience
        if not self._graphs:
            self._forget()

    def _capture(self, size: int) -> Captured:
        batches, nothing = self._padding(size)
        inputs = self._place(batches, nothing)
        # First without a graph, for what is done only the first time: kernels are compiled.
        ours = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(ours)
        # Outside of the capture too: one that fails leaves its stream as the current one.
        with torch.cuda.stream(self._stream):
            found = self._run(batches, inputs)
            if self._logits is None:
                self._logits = found.new_empty(self._sizes[-1], found.shape[-1])
            logits = self._logits[:size]
            logits.copy_(found)
            del found
            ours.wait_stream(self._stream)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                logits.copy_(self._run(batches, inputs))
        return Captured(graph=graph, logits=logits)

    def _require_alike(self, captured: Captured) -> None:
        """Raises: RuntimeError for a graph into which this step's numbers do not come.

        They are of no sequence: no page need be committed. Rows that read some are replayed by the
        trial of the model (``ModelRunner.capture``).
        """
        size = len(captured.logits)
        batches, nothing = self._padding(size)
        numbers = np.arange(size)
        others = replace(
            nothing, token_ids=(5 + 11 * numbers) % self._vocab_size, positions=3 + numbers
        )
        want = self._run(batches, self._place(batches, others))
        captured.graph.replay()
        most = want.abs().max()
        if not bool((captured.logits - want).abs().max() <= _NUM_ALIKE * most):
            raise RuntimeError("replayed it gives something else than the model")

    @property
    def _vocab_size(self) -> int:
        size: int = self._model.get_input_embeddings().weight.shape[0]
        return size

    def _padding(self, size: int) -> tuple[list[AttentionBatch], HostInputs]:
        """A step of padding."""
        batches = [
            AttentionBatch(
                query_starts=np.arange(size + 1),
                context_lens=np.zeros(size, np.int64),
                tables=torch.zeros(size, 0, dtype=torch.long),
                slots=torch.full((size,), -1),
                block_size=block_size,
            )
            for block_size in self._block_sizes
        ]
        zeros, states = np.zeros(size, np.int64), None
        if self._state_groups:
            states = StateBatch.padding(size, self._state_groups)
        inputs = HostInputs(
            token_ids=zeros, positions=zeros, logits_at=np.arange(size), states=states
        )
        return batches, inputs

    def _place(self, batches: Sequence[AttentionBatch], given: HostInputs) -> Inputs:
        """Where all graphs of this size look for them."""
        arrays = [*given.arrays, *batch_arrays(batches)]
        found = to_device(arrays, self._device, into=self._room)
        fixed = len(arrays) - len(batches)
        size = len(given.token_ids)
        tables: list[Tensor] = []
        for own, new in zip(self._tables, found[fixed:], strict=True):
            if new.shape[1]:  # what lies behind is of longer sequences, and is not read
                own[:size, : new.shape[1]].copy_(new)
            tables.append(own[:size])
        place_batches(
            self._device,
            batches,
            [*found[len(given.arrays) : fixed], *tables],
            max_context_len=self._max_model_len,
        )
        return given.placed(found)


def _padded_inputs(given: HostInputs, size: int) -> HostInputs:
    room = (0, size - len(given.token_ids))
    return HostInputs(
        token_ids=np.pad(given.token_ids, room),
        positions=np.pad(given.positions, room),
        logits_at=np.arange(size),
        states=None if given.states is None else given.states.padded(size),
    )


def _padded(batch: AttentionBatch, size: int) -> AttentionBatch:
    """With empty sequences, each of which has one query."""
    num_seqs = batch.num_seqs
    if num_seqs == size:
        return batch
    tables = torch.full((size, batch.tables.shape[1]), -1)
    tables[:num_seqs] = batch.tables
    slots = torch.full((size,), -1)
    slots[:num_seqs] = batch.slots
    return replace(
        batch,
        query_starts=np.arange(size + 1),
        context_lens=np.pad(batch.context_lens, (0, size - num_seqs)),
        tables=tables,
        slots=slots,
        memo={},
    )
