"""Policies, which order sequences, and the scheduler's limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.engine.sequence import FinishReason, Request, Sequence
from quire.errors import RequestTooLong
from quire.kv import Accounting, Never
from quire.units import format_count

# -- policy ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Two keys of a sequence, which never change: queues are sorted by them.

    ``rank`` is the order, and no two sequences have the same. It begins with the ``grade``: a
    waiting sequence may displace a running one of greater grade, and waits for one of equal grade.
    """

    rank: Callable[[Sequence], tuple[int, ...]]
    grade: Callable[[Sequence], int]


def _arrival(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.seq_id,)


def _priority(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.priority, sequence.seq_id)


def _length(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.max_tokens, sequence.seq_id)


def _no_grade(sequence: Sequence) -> int:
    return 0


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        # First come, first served.
        "fcfs": Policy(rank=_arrival, grade=_no_grade),
        # Smaller priorities first, at the cost of greater ones; of equals the first to come.
        "priority": Policy(rank=_priority, grade=lambda sequence: sequence.request.priority),
        # What may become the shortest first: less waiting on average, more for the longest.
        "shortest": Policy(rank=_length, grade=_no_grade),
    }
)


# -- limits ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What fits into a step, how long sequences may become, and what ends them.

    The numbers are final here; ``quire.config`` has a user's defaults.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    policy: str = "fcfs"
    whole_images: bool = False  # no chunk ends in one
    watermark_bytes: int = 0  # what a newcomer leaves free while others run …
    # … and this part of the bytes that all are expected to need. None: all of them, or none where
    # admission is worth what is computed again later, by the measured costs.
    headroom: float | None = None
    shared_tokens: int = 16  # a newcomer waits for this many that the same step computes, or more

    def longest(self, request: Request) -> int:
        """Return the most tokens that a request's sequences can have."""
        return min(request.max_tokens, self.max_model_len)

    def check_request(self, request: Request, accounting: Accounting) -> None:
        """Check that a prompt leaves room for a token in max_model_len and fits an empty cache.

        Raises: RequestTooLong if it does not.
        """
        refuse_too_long(request, self.max_model_len)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        verdict = accounting.could_hold(num_tokens, max_tokens=self.longest(request))
        if isinstance(verdict, Never):
            raise RequestTooLong(
                f"the prompt of {format_count(num_tokens)} tokens can never run: {verdict}"
            )

    def finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Return why a sequence ends with its last token, or None."""
        request, num_tokens = sequence.request, len(sequence.token_ids)
        params, num_output = request.params, num_tokens - len(request.prompt_token_ids)
        if num_output > params.min_tokens:
            is_eos = token_id in self.eos_token_ids and not params.ignore_eos
            if is_eos or token_id in params.stop_token_ids:
                return "stop"
        if num_output >= params.max_tokens:
            return "length"
        return "length" if num_tokens >= self.max_model_len else None


def refuse_too_long(request: Request, max_model_len: int) -> None:
    """Refuse a prompt that leaves no room in the context. Raises: RequestTooLong."""
    num_prompt_tokens = len(request.prompt_token_ids)
    generates = request.pooling is None
    if num_prompt_tokens + generates > max_model_len:
        raise RequestTooLong(
            f"the prompt has {format_count(num_prompt_tokens)} tokens and the context ends at "
            f"{format_count(max_model_len)}{', with at least one to generate' * generates}"
            f": shorten the prompt or raise max_model_len"
        )
    num_tokens = num_prompt_tokens + len(request.output_token_ids)
    if num_tokens > max_model_len:
        raise RequestTooLong(
            f"the prompt and output_token_ids have {format_count(num_tokens)} tokens and the "
            f"context ends at {format_count(max_model_len)}"
        )
