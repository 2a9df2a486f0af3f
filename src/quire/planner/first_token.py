"""Estimate how long a plan's typical prompt takes to its first token, by sizes of chunks."""

from dataclasses import dataclass

from quire.planner.capacity import CapacityPlan
from quire.planner.simulation.cost_model import Reach, StepCosts, first_token_s

_WORTH = 0.9  # a larger chunk is worth a word if it takes less than this share
_MOST_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The seconds to the first token of a prompt that is alone, and with larger chunks."""

    chunk_tokens: int  # --max-num-batched-tokens
    seconds: float
    better_chunk_tokens: int | None  # None: no larger chunk is worth it
    better_seconds: float

    @property
    def saves(self) -> bool:
        """Return whether larger chunks are worth a word."""
        return self.better_chunk_tokens is not None


def first_token(found: CapacityPlan, costs: StepCosts) -> FirstToken:
    """Time a plan's typical prompt in its chunks, and in ones of two, four, … times the tokens.

    Of the larger ones the smallest is taken that is nearly as quick as the whole prompt at once.
    """
    reach = Reach(found.spec.groups)
    tokens, chunk = found.request.input_tokens, found.config.max_num_batched_tokens
    seconds = first_token_s(costs, reach, tokens, chunk)
    larger = []
    while chunk < min(tokens, _MOST_TOKENS):
        chunk *= 2
        larger.append((chunk, first_token_s(costs, reach, tokens, chunk)))
    best = min((each for _, each in larger), default=seconds)
    near = next(((size, each) for size, each in larger if _WORTH * each <= best), (0, seconds))
    is_worth = near[1] < _WORTH * seconds
    return FirstToken(
        chunk_tokens=found.config.max_num_batched_tokens,
        seconds=seconds,
        better_chunk_tokens=near[0] if is_worth else None,
        better_seconds=near[1],
    )
