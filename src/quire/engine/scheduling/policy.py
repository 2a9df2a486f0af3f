"""Which goes first: an order of sequences, in which the last ones make room for the first ones."""

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
    """Two keys of a sequence. They never change while it lives: queues are kept in this order.

    ``rank`` is the order; no two sequences have the same. It begins with the ``grade``: a
    waiting sequence may take the room of a running one of greater grade. Equals wait for each
    other.
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

# What a scheduler may do in a step, how long sequences may become, and what ends them.


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The scheduler's numbers. They are final here; defaults for a user are in ``quire.config``."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    policy: str = "fcfs"
    watermark_bytes: int = 0  # what a newcomer leaves free while others run
    # … and so much of what all of them will still need, as far as can be told. None: all of it, or
    # nothing where more at once are worth what is computed again, by the measured costs.
    headroom: float | None = None
    shared_tokens: int = 16  # the fewest that a newcomer waits for, if others compute them now

    def longest(self, request: Request) -> int:
        """Tokens that a request's sequences can become at most."""
        return min(request.max_tokens, self.max_model_len)

    def check_request(self, request: Request, accounting: Accounting) -> None:
        """Raises: RequestTooLong for a prompt that can never run.

        It leaves no room for a token in max_model_len, if it is to have one, or an empty cache
        could not hold it.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        generates = request.pooling is None
        if num_prompt_tokens + generates > self.max_model_len:
            raise RequestTooLong(
                f"the prompt has {format_count(num_prompt_tokens)} tokens and the context ends at "
                f"{format_count(self.max_model_len)}{', with at least one to generate' * generates}"
                f": shorten the prompt or raise max_model_len"
            )
        verdict = accounting.could_hold(num_prompt_tokens, max_tokens=self.longest(request))
        if isinstance(verdict, Never):
            raise RequestTooLong(
                f"the prompt of {format_count(num_prompt_tokens)} tokens can never run: {verdict}"
            )

    def finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Why a sequence ends with this token, its last one, if it does."""
        params, num_output = sequence.request.params, sequence.num_output_tokens
        if num_output > params.min_tokens:
            is_eos = token_id in self.eos_token_ids and not params.ignore_eos
            if is_eos or token_id in params.stop_token_ids:
                return "stop"
        if num_output >= params.max_tokens:
            return "length"
        if sequence.num_tokens >= self.max_model_len:
            return "length"
        return None
