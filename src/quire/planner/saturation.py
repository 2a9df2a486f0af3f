"""Estimate what a server computes that is never short of requests, from a plan and a cost model.

It is the mean step of a steady state, in which as many sequences run as the plan has, each at
another place of its answer, and prompts come in as answers end, in some steps or in all. The
simulator has the beginning and the end of such a run, the chunks and the waiting besides.
"""

from dataclasses import dataclass
from math import ceil

from quire.planner.capacity import CapacityPlan
from quire.planner.simulation.cost_model import Reach, StepCosts, StepWork

_LOOKS = 64  # at the lengths that a sequence has on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """The steady state of a server with a full queue."""

    num_sequences: int  # that get a token in a step
    step_s: float
    output_tokens_per_s: float  # of all devices of the replica together


def saturated(
    found: CapacityPlan, costs: StepCosts, *, num_requests: int | None = None
) -> Saturation | None:
    """Return the steady state of a plan's typical requests; None if not one sequence fits.

    ``num_requests``: at most so many at once, where that is fewer than fit.
    """
    asked, answered = found.request.input_tokens, found.request.output_tokens
    running = float(min(found.cell.num_sequences, num_requests or found.cell.num_sequences))
    if not running:
        return None
    # Each answer that ends makes room for a prompt. A step has no more tokens than its limit, and
    # where prompts need more, answers wait for them.
    per_answer = asked / answered
    running = min(running, found.config.max_num_batched_tokens / (1 + per_answer))
    reach = Reach(found.spec.groups)
    stride = max(1, answered // _LOOKS)
    lengths = range(asked, asked + answered, stride)
    read = sum(reach.of_range(length, length + 1)[0] for length in lengths) / len(lengths)
    prompts = running / answered  # that begin in a step, in the mean
    chunk = max(1.0, found.config.max_num_batched_tokens - running)
    # The share of the steps that compute prompts, and what each of these has of them.
    with_prompts = min(1.0, prompts * ceil(asked / chunk))
    tokens, begun = running * per_answer / with_prompts, prompts / with_prompts
    prompt_read, prompt_attended = reach.of_range(0, asked)
    plain_s = _seconds(costs, running, running, running * read, running * read)
    full_s = _seconds(
        costs,
        running + tokens,
        running + begun,
        running * read + begun * prompt_read,
        running * read + begun * prompt_attended,
    )
    step_s = with_prompts * full_s + (1 - with_prompts) * plain_s
    return Saturation(
        num_sequences=max(1, round(running)),
        step_s=step_s,
        output_tokens_per_s=running / step_s,
    )


def _seconds(
    costs: StepCosts, tokens: float, sequences: float, read: float, attended: float
) -> float:
    count = max(1, round(sequences))
    return costs.seconds(StepWork(max(1, round(tokens)), count, count, read, attended))
