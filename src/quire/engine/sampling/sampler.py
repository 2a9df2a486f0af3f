"""The way from a step's logits to its tokens: edit, choose, and compare the drafts with the choice.

The rows are worked on where the logits lie. The sampler decides nothing about when a text ends, but
for a grammar in which nothing can follow.
"""

import logging
import math
from dataclasses import replace
from itertools import accumulate, islice

import torch
from torch import Tensor

from quire.devices import wait_for
from quire.engine.sampling.choices import Choices, SamplingBatch, Wanted
from quire.engine.sampling.draws import Lot
from quire.engine.sampling.logits_processors import Edits, Rules
from quire.engine.sampling.rng import key_of_seed, key_of_sequence
from quire.engine.sequence import Fault, Request, Sequence
from quire.engine.step_plan import Chunk, Draw, Sampled, StepPlan
from quire.errors import one_line
from quire.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class LogitsSampler:
    """Chooses the tokens of every draw; remembers the rules of each sequence until it ends."""

    def __init__(self, seed: int = 0, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._seed, self._eos_token_ids = seed, eos_token_ids
        self._on_host = False  # a device's logits are copied to the host
        self._rules: dict[int, Rules] = {}

    def sample(self, logits: Tensor, plan: StepPlan) -> list[Sampled]:
        """Choose the tokens of each of ``plan.draws``, from its rows of logits [R, vocabulary].

        Prompts that are to have log-probabilities get those of ``plan.prompt_rows``. Done twice,
        it gives the same. For logits on a device the host waits once, at the end: all that it
        does before overlaps with the step that computes them. It waits for a step without draws
        too, so that what goes wrong in a step is known in it, and its time is its own.
        """
        if not plan.draws and not plan.prompt_rows:
            wait_for(logits.device)
            return []
        rules = [self._rules_of(draw.sequence) for draw in plan.draws]
        firsts = list(accumulate((len(d.drafts) + 1 for d in plan.draws[:-1]), initial=0))
        work = _work(plan, rules, firsts, logits.shape[-1])
        choices = self._choices(logits, work)
        for rows, found in zip(plan.prompt_rows, choices.prompt_logprobs, strict=True):
            rows.sequence.prompt_logprobs[rows.start :] = found
        tokens, sound = choices.tokens, choices.sound
        results = [
            Sampled(token_ids=(tokens[first],))  # of most rows there is nothing more to say
            if not draw.drafts and own.matcher is None and sound[first]
            else _held(choices, first, draw, own)
            for draw, own, first in zip(plan.draws, rules, firsts, strict=False)
        ]
        return _with_logprobs(choices, plan.draws, firsts, results) if work.wanted else results

    def try_out(self, device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
        """Choose from some logits on a device, and on the host from then on if the choices differ.

        The log says so.
        """
        plan = _trial_plan(vocab_size)
        logits = torch.randn(
            len(plan.draws), vocab_size, generator=torch.Generator().manual_seed(0)
        ).to(dtype)
        logits[0, [-1, vocab_size // 2]] = logits.max() + 1  # the lower id counts
        want, got = LogitsSampler().sample(logits, plan), self.sample(logits.to(device), plan)
        if [each.token_ids for each in want] != [each.token_ids for each in got]:
            self._leave_to_host(f"{device} chooses others")
        for draw in plan.draws:
            self.forget(draw.sequence)

    def _choices(self, logits: Tensor, work: SamplingBatch) -> Choices:
        if logits.is_cpu or self._on_host:
            return Choices(logits.cpu(), work)
        try:
            return Choices(logits, work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation that it lacks, most of all
            choices = Choices(logits.cpu(), work)  # raises, if it was the step that failed
            self._leave_to_host(one_line(error))
            return choices

    def _leave_to_host(self, reason: str) -> None:
        log.warning("tokens are chosen by the host, which takes longer, since %s", reason)
        self._on_host = True

    def forget(self, sequence: Sequence) -> None:
        """Drop what is remembered of a sequence that has ended."""
        self._rules.pop(sequence.seq_id, None)

    def _rules_of(self, sequence: Sequence) -> Rules:
        rules = self._rules.get(sequence.seq_id)
        if rules is None or not rules.follows(sequence):
            seed = sequence.request.params.seed
            if seed is None:
                key = key_of_sequence(self._seed, sequence.seq_id)
            else:
                key = key_of_seed(seed + sequence.index)
            rules = self._rules[sequence.seq_id] = Rules(sequence, key, self._eos_token_ids)
        return rules


def _trial_plan(vocab_size: int) -> StepPlan:
    """A token for each way to choose one."""
    several = (
        SamplingParams(temperature=0),
        SamplingParams(seed=1, top_p=0.9, presence_penalty=0.5, logprobs=1),
        SamplingParams(seed=2, temperature=0.8, top_k=min(20, vocab_size)),
        SamplingParams(seed=3, temperature=1.5, min_p=0.05, repetition_penalty=1.2),
    )
    chunks = []
    for number, params in enumerate(several, start=1):
        request = Request(request_id=-number, prompt_token_ids=(0, vocab_size - 1), params=params)
        sequence = Sequence(request=request, seq_id=-number)
        chunks.append(Chunk(sequence=sequence, start=0, stop=2, drafts=(), samples=True))
    return StepPlan.of(chunks)


def _work(plan: StepPlan, rules: list[Rules], firsts: list[int], vocab_size: int) -> SamplingBatch:
    """What is to be done with the rows of all draws, one draw after the other."""
    rows: list[int] = []
    edits = Edits(vocab_size)
    lots: list[Lot] = []
    wanted: list[Wanted] = []
    for draw, own, first in zip(plan.draws, rules, firsts, strict=False):
        drafts, place = draw.drafts, len(draw.sequence.token_ids)
        rows.append(draw.row)
        if not own.is_greedy:
            lots.append((first, place, own))
        if drafts:
            rows += range(draw.row + 1, draw.row + 1 + len(drafts))
            if not own.is_greedy:
                lots += [(first + i, place + i, own) for i in range(1, len(drafts) + 1)]
        if own.edits_logits:
            own.write(edits, first, drafts)
        if own.params.logprobs is not None:
            wanted += [Wanted(first + i, own.params.logprobs) for i in range(len(drafts) + 1)]
    return SamplingBatch(
        rows=rows, edits=edits, lots=lots, wanted=wanted, prompt_rows=plan.prompt_rows
    )


def _held(choices: Choices, first: int, draw: Draw, rules: Rules) -> Sampled:
    """The drafts that hold and one token more, from what was chosen in its rows, from ``first``."""
    taken: list[int] = []
    for place in range(len(draw.drafts) + 1):
        if not choices.sound[first + place]:
            break  # if any token came before it, the next step finds the same
        taken.append(choices.tokens[first + place])
        if draw.drafts[place : place + 1] != (taken[-1],):
            break
    ends = False
    if rules.matcher is not None:
        num_taken, ends = rules.matcher.taken(taken)
        del taken[num_taken:]
    if taken:
        return Sampled(token_ids=tuple(taken), ends=ends)
    # NaN is larger than anything, and a row of nothing but -inf has no largest.
    peak = choices.peak(first)
    fault: Fault = "request" if math.isfinite(peak) else "model"
    return Sampled(token_ids=(), error=_cause(peak, rules), fault=fault)


def _cause(peak: float, rules: Rules) -> str:
    """Why there is no token in a row with this largest logit."""
    if math.isnan(peak):
        return "the model's logits are not all numbers (NaN)"
    if peak == math.inf:
        return "the model's logits are not all finite (+inf)"
    if peak == -math.inf:
        return "the model allows no token: all its logits are -inf"
    if rules.matcher is not None and rules.matcher.error:
        return f"structured_outputs: {rules.matcher.error}"
    return (
        "no token is allowed here: structured_outputs, allowed_token_ids, bad_words and min_tokens "
        "together exclude them all"
    )


def _with_logprobs(
    choices: Choices, draws: tuple[Draw, ...], firsts: list[int], results: list[Sampled]
) -> list[Sampled]:
    """The same, with the log-probabilities of those that asked for them."""
    asked = [draw.sequence.request.params.logprobs for draw in draws]
    wanted = [
        Wanted(first + place, num_top)
        for first, num_top, result in zip(firsts, asked, results, strict=True)
        if num_top is not None
        for place in range(len(result.token_ids))
    ]
    found = iter(choices.logprobs(wanted) if wanted else ())
    return [
        result
        if num_top is None
        else replace(result, logprobs=tuple(islice(found, len(result.token_ids))))
        for num_top, result in zip(asked, results, strict=True)
    ]
