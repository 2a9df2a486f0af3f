"""Estimate what a server computes in a steady state, from a plan and a cost model.

It is the mean step of a server in which so many sequences run, each at another place of its answer,
and prompts come in as answers end, in some steps or in all. The simulator has the beginning and the
end of such a run, the chunks and the waiting besides.
"""

from dataclasses import dataclass
from math import ceil

from quire.planner.capacity import CapacityPlan
from quire.planner.simulation.cost_model import Reach, StepCosts, StepWork

_LOOKS = 64  # at the lengths that a sequence has on its way
_HALVINGS = 40  # of the number of sequences, to find a rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """The steady state of a server: with a full queue, or at a rate."""

    num_sequences: int  # that get a token in a step
    step_s: float  # in the mean
    output_tokens_per_s: float  # of all devices of the replica together
    plain_step_s: float  # of a step without prompts
    prompt_step_s: float  # of a step with prompts
    prompt_steps: float  # the share of the steps that compute prompts


def saturated(
    found: CapacityPlan,
    costs: StepCosts,
    *,
    num_requests: int | None = None,
    found_tokens: int = 0,
    besides_s: float = 0.0,
) -> Saturation | None:
    """Return the steady state of a plan's typical requests; None if not one sequence fits.

    ``num_requests``: at most so many at once, where that is fewer than fit. ``found_tokens``: of
    each prompt, that are not computed here; ``besides_s``: seconds for each request besides steps.
    """
    running = _most_running(found, num_requests, found_tokens)
    if not running:
        return None
    return _steady(found, costs, running, found_tokens, besides_s)


def at_rate(
    found: CapacityPlan,
    costs: StepCosts,
    requests_per_s: float,
    *,
    found_tokens: int = 0,
    besides_s: float = 0.0,
) -> Saturation | None:
    """Return the steady state at a rate of typical requests; None if they are more than it does.

    Arguments: as for ``saturated``.
    """
    answered = found.request.output_tokens
    high = _most_running(found, None, found_tokens)
    if not high:
        return None
    low = min(1.0, high)
    state = _steady(found, costs, high, found_tokens, besides_s)
    if state.output_tokens_per_s < requests_per_s * answered:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        state = _steady(found, costs, middle, found_tokens, besides_s)
        if state.output_tokens_per_s < requests_per_s * answered:
            low = middle
        else:
            high = middle
    return _steady(found, costs, high, found_tokens, besides_s)


def _most_running(found: CapacityPlan, num_requests: int | None, found_tokens: int) -> float:
    """Return how many sequences get a token in a step, at most.

    Each answer that ends makes room for a prompt. A step has no more tokens than its limit, and
    where prompts need more, answers wait for them.
    """
    per_answer = (found.request.input_tokens - found_tokens) / found.request.output_tokens
    running = float(min(found.cell.num_sequences, num_requests or found.cell.num_sequences))
    return min(running, found.config.max_num_batched_tokens / (1 + per_answer))


def _steady(
    found: CapacityPlan, costs: StepCosts, running: float, found_tokens: int, besides_s: float
) -> Saturation:
    asked, answered = found.request.input_tokens, found.request.output_tokens
    reach = Reach(found.spec.groups)
    stride = max(1, answered // _LOOKS)
    lengths = range(asked, asked + answered, stride)
    read = sum(reach.of_range(length, length + 1)[0] for length in lengths) / len(lengths)
    prompts = running / answered  # that begin in a step, in the mean
    chunk = max(1.0, found.config.max_num_batched_tokens - running)
    # The share of the steps that compute prompts, and what each of these has of them.
    with_prompts = min(1.0, prompts * ceil((asked - found_tokens) / chunk))
    tokens = prompts * (asked - found_tokens) / with_prompts
    begun = prompts / with_prompts
    prompt_read, prompt_attended = reach.of_range(found_tokens, asked)
    plain_s = _seconds(costs, running, running, running * read, running * read)
    full_s = _seconds(
        costs,
        running + tokens,
        running + begun,
        running * read + begun * prompt_read,
        running * read + begun * prompt_attended,
    )
    step_s = with_prompts * full_s + (1 - with_prompts) * plain_s + prompts * besides_s
    return Saturation(
        num_sequences=max(1, round(running)),
        step_s=step_s,
        output_tokens_per_s=running / step_s,
        plain_step_s=plain_s,
        prompt_step_s=full_s,
        prompt_steps=with_prompts,
    )


def _seconds(
    costs: StepCosts, tokens: float, sequences: float, read: float, attended: float
) -> float:
    count = max(1, round(sequences))
    return costs.seconds(StepWork(max(1, round(tokens)), count, count, read, attended))
