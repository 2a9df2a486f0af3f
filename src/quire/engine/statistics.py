"""Counts of an engine since it was made: tokens, requests, reasons and times.

The thread that steps writes them. Any thread may read them at any moment, without a lock: each
figure is one number, or a list of fixed length. Two figures read together may be a token apart.

A *request* is one continuation here, as in vLLM, where each of ``n`` is a request of its own. But a
prompt that several share counts once, when it is computed. Times are of the engine's clock.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import get_args

from quire.engine.sequence import FinishReason, Request, Sequence
from quire.engine.step_plan import StepPlan, TokenOutput
from quire.kv import PrefixHit, Shortfall

# Upper bounds of the histograms. Source: vLLM 0.33, v1/metrics/buckets.py.
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
PROMOTION_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

# Why a prompt's tokens are computed: ``PrefixHit.shortfall``, or "room": they were found, and take
# less room when they are computed again.
MISS_REASONS: tuple[str, ...] = (*filter(None, get_args(Shortfall)), "room")
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


def token_bounds(max_tokens: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to ``max_tokens``."""
    bounds: list[int] = []
    power = 1
    while power <= max_tokens:
        bounds += [m * power for m in (1, 2, 5) if m * power <= max_tokens]
        power *= 10
    return tuple(bounds)


class Histogram:
    """How many values lie in each bucket; ``bounds`` are the upper bounds.

    ``counts`` has one entry more, for values above all bounds.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Several[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, ``times`` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds that the parts of a request took; None for a part that it never began.

    The time of a preemption belongs to the part in which it happened.
    """

    e2e_s: float  # from arrival to the end
    queue_s: float  # from arrival to admission, or to the end of one that never was admitted
    first_token_s: float | None  # from arrival
    prefill_s: float | None  # from its first step to its first token
    decode_s: float | None  # from its first token to its last
    inference_s: float | None  # both

    @classmethod
    def of(cls, sequence: Sequence) -> "Latencies":
        """Return those of a sequence that has ended, or ends with its last token."""
        arrived, came = sequence.arrived_s, sequence.came_s
        first, last = sequence.first_token_s, sequence.last_token_s
        ended = next(s for s in (sequence.ended_s, last, came, arrived) if s is not None)
        return cls(
            e2e_s=ended - arrived,
            queue_s=(ended if came is None else came) - arrived,
            first_token_s=_between(arrived, first),
            prefill_s=_between(came, first),
            decode_s=_between(first, last),
            inference_s=_between(came, last),
        )


def _between(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else stop - start


class Statistics:
    """Statistics of one engine. ``now_s`` is the moment at which an event is noted.

    A request's prefix counts once, at its first admission: of the tokens that it could find (all
    but the last), each is a hit or is missed for a reason.
    """

    def __init__(self, max_model_len: int) -> None:
        self.now_s = 0.0
        self.num_prompt_tokens = 0  # of prompts whose first token, or embedding, has come
        self.num_cached_prompt_tokens = 0  # … of them found computed
        self.num_generation_tokens = 0
        self.prefix_query_tokens = 0  # of prompts that were looked up
        self.prefix_hit_tokens = 0
        self.prefix_missed_tokens = dict.fromkeys(MISS_REASONS, 0)
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.num_corrupted = 0  # requests that ended because the model gave no numbers
        self.num_drafts = 0  # drafts of one token or more
        self.num_draft_tokens = 0  # drafted tokens that were computed …
        self.num_accepted_tokens = 0  # … and accepted
        self.num_preemptions = 0
        self.num_swaps = 0  # of them by saving the entries
        self.num_recomputed_tokens = 0  # computed before, lost, and computed again
        self.saved_bytes = 0  # swapped out …
        self.loaded_bytes = 0  # … and in

        tokens = token_bounds(max_model_len)
        self.step_tokens = Histogram(STEP_TOKENS)  # computed in a step
        self.first_token_s = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_s = Histogram(TOKEN_SECONDS)  # from one step with tokens to the next
        self.token_s = Histogram(TOKEN_SECONDS)  # of a request that has ended: the mean
        self.e2e_s = Histogram(REQUEST_SECONDS)
        self.queue_s = Histogram(REQUEST_SECONDS)
        self.inference_s = Histogram(REQUEST_SECONDS)
        self.prefill_s = Histogram(REQUEST_SECONDS)
        self.decode_s = Histogram(REQUEST_SECONDS)
        self.prompt_tokens = Histogram(tokens)  # of requests that have ended, as all that follow
        self.prefill_tokens = Histogram(tokens)  # of the prompt, but for what was found computed
        self.generation_tokens = Histogram(tokens)
        self.longest_generation_tokens = Histogram(tokens)  # of the n continuations of a prompt
        self.max_tokens = Histogram(tokens)  # as asked for
        self.num_choices = Histogram(CHOICES)  # n
        self.request_preemptions = Histogram(PREEMPTIONS)
        self._open: dict[int, list[int]] = {}  # of n > 1: how many go on, the longest that ended

    # -- a plan ----------------------------------------------------------------------------------

    def note_came(self, sequence: Sequence, found: PrefixHit | None, num_hit_tokens: int) -> None:
        """Note a sequence's admission; only the first counts. It uses ``num_hit_tokens``.

        ``found`` is None where no prefix was looked up.
        """
        if sequence.came_s is not None:
            return
        sequence.came_s = self.now_s
        if found is None:
            return
        self.prefix_query_tokens += sequence.num_tokens
        self.prefix_hit_tokens += num_hit_tokens
        if found.shortfall:
            self.prefix_missed_tokens[found.shortfall] += found.limit - found.num_tokens
        self.prefix_missed_tokens["room"] += found.num_tokens - num_hit_tokens

    def note_shared(self, leader: Sequence, sibling: Sequence) -> None:
        """Note a sibling that goes on from the prompt that its leader has computed."""
        sibling.came_s, sibling.shares_prompt = leader.came_s, True

    # -- an update -------------------------------------------------------------------------------

    def note_step(self, plan: StepPlan, num_kept: Mapping[int, int]) -> None:
        """Note a step. ``num_kept``: accepted drafts of each sequence that goes on, by id."""
        if plan.chunks:
            self.step_tokens.observe(plan.num_tokens)
        if drafts := [len(draw.drafts) for draw in plan.draws if draw.drafts]:
            self.num_drafts += len(drafts)
            self.num_draft_tokens += sum(drafts)
            self.num_accepted_tokens += sum(num_kept.values())

    def note_tokens(self, outputs: Iterable[TokenOutput]) -> None:
        """Note the tokens of a step. Those of one sequence follow one another, and are one gap.

        Most sequences had their last token in the same step: their gaps are observed together.
        """
        now_s, count = self.now_s, 0
        gaps: dict[float, int] = {}
        previous: Sequence | None = None
        for output in outputs:
            sequence = output.sequence
            if output.token_id is None and output.finish_reason is not None:
                if sequence.embedding is not None:
                    self._note_prompt(sequence)
                continue  # an end without a token
            count += 1
            if sequence is previous:
                continue
            previous, last_s = sequence, sequence.last_token_s
            sequence.last_token_s = now_s
            if last_s is None:
                self._note_first(sequence)
            else:
                gaps[last_s] = gaps.get(last_s, 0) + 1
        self.num_generation_tokens += count
        for last_s, times in gaps.items():
            self.inter_token_s.observe(now_s - last_s, times)

    def _note_first(self, sequence: Sequence) -> None:
        sequence.first_token_s = self.now_s
        self.first_token_s.observe(self.now_s - sequence.arrived_s)
        if not sequence.shares_prompt:
            self._note_prompt(sequence)

    def _note_prompt(self, sequence: Sequence) -> None:
        self.num_prompt_tokens += sequence.num_prompt_tokens
        self.num_cached_prompt_tokens += sequence.num_cached_tokens

    # -- an end ----------------------------------------------------------------------------------

    def note_end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Note a sequence's end, once."""
        sequence.ended_s = self.now_s
        self.num_finished[reason] += 1
        self.num_corrupted += sequence.fault == "model"
        took, num_output = Latencies.of(sequence), sequence.num_own_tokens
        self.e2e_s.observe(took.e2e_s)
        self.queue_s.observe(took.queue_s)
        for histogram, seconds in (
            (self.prefill_s, took.prefill_s),
            (self.decode_s, took.decode_s),
            (self.inference_s, took.inference_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if took.decode_s is not None and num_output > 1:
            self.token_s.observe(took.decode_s / (num_output - 1))
        self.prompt_tokens.observe(sequence.num_prompt_tokens)
        self.prefill_tokens.observe(sequence.num_prompt_tokens - sequence.num_cached_tokens)
        self.generation_tokens.observe(num_output)
        self.max_tokens.observe(sequence.request.params.max_tokens)
        self.request_preemptions.observe(sequence.num_preemptions)
        self._note_choice(sequence.request, num_output)

    def _note_choice(self, request: Request, num_output: int) -> None:
        """Note the longest of a prompt's continuations when the last of them ends."""
        longest = num_output
        if request.params.n > 1:
            state = self._open.setdefault(request.request_id, [request.params.n, 0])
            state[0] -= 1
            longest = state[1] = max(state[1], num_output)
            if state[0]:
                return
            del self._open[request.request_id]
        self.longest_generation_tokens.observe(longest)
        self.num_choices.observe(request.params.n)
