"""What a step computes and moves, in counts: the question that a cost model answers in seconds."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from quire.engine.plan import Chunk, StepPlan
from quire.spec import ChunkedAttention, Group, KeptWhole, SlidingWindow


@dataclass(frozen=True, slots=True)
class Work:
    """Of one forward pass. All are counts; what is read and attended is a mean over the layers."""

    num_tokens: int
    num_sequences: int
    num_sampled: int  # sequences whose next token is drawn
    num_read: float  # entries of keys and values that attention reads
    num_attended: float  # pairs of a token and an entry that it reads
    num_prompts: int = 0  # chunks of several tokens


@final
class Reach:
    """How many entries attention reads, in the mean over a model's layers by their bytes."""

    def __init__(self, groups: Iterable[Group]) -> None:
        sizes: dict[int | None, int] = {}
        for group in groups:
            if isinstance(group.spec, KeptWhole):
                continue
            window = None
            if isinstance(group.spec, SlidingWindow):
                window = group.spec.window
            elif isinstance(group.spec, ChunkedAttention):
                window = group.spec.chunk
            sizes[window] = sizes.get(window, 0) + group.bytes_per_token
        total = sum(sizes.values()) or 1
        self._windows = [
            (window, size / total) for window, size in sizes.items() if window is not None
        ]
        self._full_share = sizes.get(None, 0) / total
        self.is_full = not self._windows

    def of(self, plan: StepPlan) -> Work:
        read = attended = 0.0
        num_tokens = num_prompts = 0
        for chunk in plan.chunks:
            num_tokens += chunk.stop - chunk.start
            num_prompts += chunk.stop - chunk.start > 1
            more_read, more_attended = self._of_chunk(chunk)
            read, attended = read + more_read, attended + more_attended
        sampled = {draw.sequence.seq_id for draw in plan.draws}
        return Work(num_tokens, len(plan.chunks), len(sampled), read, attended, num_prompts)

    def _of_chunk(self, chunk: Chunk) -> tuple[float, float]:
        start, stop = chunk.start, chunk.stop
        count = stop - start
        pairs = count * (start + stop + 1) / 2
        read, attended = self._full_share * stop, self._full_share * pairs
        for window, share in self._windows:
            read += share * min(stop, window + count - 1)
            attended += share * min(pairs, float(count * window))
        return read, attended
