"""What is measured: groups of candidates that do the same work and take turns.

Every group of memory-bound candidates has STREAM among them, every group of compute-bound ones
``torch.matmul``, and each has our backend twice: the second time for the noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from benchmarks.attention import cases
from benchmarks.attention.cases import HEAD_DIM, KV_HEADS, Pool
from benchmarks.attention.vllm_kernels import Kernel, VllmPool
from benchmarks.harness.attending import max_error, threads
from benchmarks.harness.quiet import Call, Ratio, Timing, in_turn, take_turns, times_as_fast
from benchmarks.harness.roofline import STREAMS, Stream
from quire.attention import AttentionBackend, AttentionBatch
from quire.spec import AttentionSpec, SlidingWindow

Unit: TypeAlias = Literal["GB/s", "GFLOP/s", "µs", "s"]
_SECONDS: Mapping[str, float] = {"µs": 1e-6, "s": 1.0}
OURS, AGAIN = "ours", "ours again"
MATMUL = "torch.matmul 2048³"
SHORT: Mapping[str, str] = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "int8": "int8", "float8_e4m3fn": "fp8",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Candidate:
    call: Call
    work: float  # bytes or operations of a call; where time is the figure, what it is divided by
    error: float | None = None  # max |Δ| from the reference


@dataclass(slots=True, kw_only=True)
class Group:
    """Candidates that took turns, and what came of it."""

    letter: str
    name: str
    unit: Unit
    num_threads: int
    work: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float | None] = field(default_factory=dict)
    timings: dict[str, Timing] = field(default_factory=dict)

    def rate(self, name: str, *, best: bool = True) -> float:
        """In the group's unit."""
        timing = self.timings[name]
        seconds = timing.best_s if best else timing.median_s
        if self.unit in _SECONDS:
            return seconds / _SECONDS[self.unit] / self.work[name]
        return self.work[name] / seconds / 1e9

    @property
    def yardsticks(self) -> list[str]:
        return [name for name in (*STREAMS, MATMUL) if name in self.timings]

    def of_yardstick(self, name: str, *, best: bool = True) -> float | None:
        """A candidate's share of the best yardstick in the group."""
        if not self.yardsticks:
            return None
        return self.rate(name, best=best) / max(self.rate(y, best=best) for y in self.yardsticks)

    def ratio(self, name: str, other: str) -> Ratio | None:
        """How many times the speed of ``other``, per unit of work."""
        if not {name, other} <= self.timings.keys():
            return None
        found = times_as_fast(self.timings[name], self.timings[other])
        scale = self.work[name] / self.work[other]  # of different work, by how much more is done
        return replace(
            found,
            median=found.median * scale,
            least=found.least * scale,
            greatest=found.greatest * scale,
        )

    def best_peer(self, prefix: str = "vllm") -> str | None:
        """The fastest of those whose names begin so, by their medians."""
        peers = [name for name in self.timings if name.startswith(prefix)]
        return min(peers, key=lambda name: self.timings[name].median_s, default=None)

    @property
    def noise(self) -> Ratio | None:
        return self.ratio(AGAIN, OURS)


@dataclass(slots=True, kw_only=True)
class Bench:
    """What all measurements need, and what they have found so far."""

    backend: AttentionBackend
    kernels: list[Kernel]  # of the peer
    num_rounds: int
    quick: bool
    seed: int
    num_threads: int
    least_bytes: int  # of what a candidate goes through before it reads the same again
    say: Callable[[str], None]
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pool_bytes: list[int] = field(default_factory=list)
    _stream: Stream | None = None

    def run(
        self,
        letter: str,
        name: str,
        unit: Unit,
        candidates: Mapping[str, Callable[[], Candidate]],
        *,
        num_threads: int | None = None,
    ) -> Group:
        """Make each candidate, leave out aloud those that cannot run, and let the rest take turns.

        A name gets the candidate that is made for it; making it may fail as calling it may.
        """
        group = Group(
            letter=letter, name=name, unit=unit, num_threads=num_threads or self.num_threads
        )
        self.say(f"{letter}. {name}, {group.num_threads} thread{'s' * (group.num_threads > 1)}")
        calls: dict[str, Call] = {}
        with threads(group.num_threads):
            for key, make in candidates.items():
                try:
                    made = make()
                    made.call()
                except Exception as error:
                    reason = " ".join(str(error).split())[:160]
                    self.notes.append(
                        f"{letter}. {name}: {key} cannot run: {type(error).__name__}: {reason}"
                    )
                    continue
                calls[key], group.work[key], group.errors[key] = made.call, made.work, made.error
            group.timings = take_turns(calls, num_rounds=self.num_rounds)
        self.groups.append(group)
        return group

    def streams(self) -> dict[str, Callable[[], Candidate]]:
        if self._stream is None:
            self._stream = Stream(max(512 * 2**20, self.least_bytes))
        stream = self._stream
        return {
            name: partial(Candidate, call=call, work=stream.nbytes)
            for name, call in stream.calls().items()
        }

    def pool(self, spec: AttentionSpec, **options: Any) -> Pool:
        """A pool, paged and large unless told otherwise, that is written as the product does."""
        given: dict[str, Any] = {"strategy": "paged", "least_bytes": self.least_bytes} | options
        pool = cases.make_pool(spec=spec, make_writer=self.backend.make_writer, **given)
        if given["least_bytes"] == self.least_bytes:
            self.pool_bytes.append(pool.total_bytes)
        return pool


# -- candidates ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Queries over batches of a pool: what candidates of one work have in common."""

    pool: Pool
    batches: Sequence[AttentionBatch]
    q: Tensor
    heads: int
    window: int | None = None
    flops: bool = False  # the work is operations, not bytes

    @property
    def spec(self) -> AttentionSpec:
        spec = self.pool.spec
        if self.window is None:
            return spec
        return SlidingWindow(
            num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=spec.dtype, window=self.window
        )

    @property
    def work(self) -> float:
        if self.flops:
            return 4.0 * HEAD_DIM * self.heads * cases.readable_tokens(self.batches[0])
        last = self.batches[0].context_lens
        tokens = sum(min(int(n), self.window or int(n)) for n in last)
        return float(tokens * self.pool.spec.bytes_per_token)

    def by(self, backend: AttentionBackend, *, check: bool = True) -> Candidate:
        call = cases.attending(backend, self.pool, self.batches, self.q, self.spec)
        view, error = self.pool.storage.view(0), None
        if check:
            small, q, expected = self.checked()
            scale = cases.scale_of(self.spec)
            found = backend.attend(q, view, small, spec=self.spec, scale=scale)
            error = max_error(found, expected)
        return Candidate(call=call, work=self.work, error=error)

    def by_vllm(self, theirs: VllmPool) -> Candidate:
        window = -1 if self.window is None else self.window
        scale = cases.scale_of(self.spec)
        attending = partial(theirs.attending, scale=scale, window=window)
        call = in_turn(
            [
                attending(self.q, batch, layer)
                for layer in range(self.pool.num_layers)
                for batch in self.batches
            ]
        )
        small, q, expected = self.checked()
        error = max_error(attending(q, small, 0)(), expected)
        return Candidate(call=call, work=self.work, error=error)

    def checked(self) -> tuple[AttentionBatch, Tensor, Tensor]:
        """A part small enough for the reference, its queries, and what they should give."""
        chunk = int(self.batches[0].query_starts[1])
        num_queries, most = (1, 2048) if chunk == 1 else (8, 320)
        length = min(int(self.batches[0].context_lens[0]), most)
        small = cases.part_of(self.batches[0], num_queries, length)
        q = self.q[:num_queries]
        expected = cases.reference(self.pool, small, q, self.spec)
        return small, q, expected


def reading(
    pool: Pool,
    lengths: Sequence[int],
    heads: int,
    seed: int,
    *,
    order: cases.Order = "random",
    num_queries: int = 1,
    window: int | None = None,
) -> Reading:
    """Over batches of a paged pool."""
    batches = cases.paged_batches(pool, lengths, order=order, num_queries=num_queries, seed=seed)
    q = cases.queries(batches[0], heads, pool.spec, seed)
    return Reading(
        pool=pool, batches=batches, q=q, heads=heads, window=window, flops=num_queries > 1
    )


def vllm_pool(kernel: Kernel, like: Pool) -> VllmPool:
    """The peer's memory with the entries of one of our pools, in every layer."""
    dtype = getattr(torch, like.spec.dtype)
    pool = VllmPool(kernel, dtype, len(like.slots), KV_HEADS, like.num_layers)
    cases.fill(like, pool.write)
    return pool
