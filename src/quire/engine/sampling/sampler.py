"""The way from a step's logits to its tokens: edit, choose, and hold the drafts against it.

The sampler decides nothing about when a text ends, but for a grammar in which nothing can follow.
"""

from dataclasses import replace
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.plan import Draw, Sampled, StepPlan
from quire.engine.sampling.draws import (
    drawn,
    key_of_seed,
    key_of_sequence,
    keys_at,
    rows_at_once,
)
from quire.engine.sampling.edits import Edits
from quire.engine.sampling.filters import cut, weights_of
from quire.engine.sampling.logprobs import logprobs_of, prompt_logprobs_of
from quire.engine.sampling.rules import Rules
from quire.engine.sequence import Fault, Sequence

Floats = NDArray[np.float32]


class Sampler:
    """Chooses the tokens of every draw; remembers the rules of each sequence until it ends."""

    def __init__(self, seed: int = 0, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._seed, self._eos_token_ids = seed, eos_token_ids
        self._rules: dict[int, Rules] = {}

    def sample(self, logits: Tensor, plan: StepPlan) -> list[Sampled]:
        """What each of ``plan.draws`` gives, from its rows of ``logits`` ([rows, vocabulary]).

        Prompts that are to have log-probabilities get those of ``plan.prompt_rows``. Done twice,
        it gives the same.
        """
        for rows in plan.prompt_rows:
            rows.sequence.prompt_logprobs[rows.start :] = prompt_logprobs_of(logits, rows)
        if not plan.draws:
            return []
        raw = _rows_of(logits, plan.draws)
        rules = [self._rules_of(draw.sequence) for draw in plan.draws]
        firsts = list(accumulate((len(d.drafts) + 1 for d in plan.draws[:-1]), initial=0))
        tokens, sound = _choose(raw, plan.draws, rules, firsts)
        results = [
            _held(raw, first, draw, own, tokens, sound)
            for draw, own, first in zip(plan.draws, rules, firsts, strict=True)
        ]
        return _with_logprobs(raw, plan.draws, firsts, results)

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


def _rows_of(logits: Tensor, draws: tuple[Draw, ...]) -> Floats:
    """The rows of all draws one after the other; not to be written to."""
    rows = [row for draw in draws for row in range(draw.row, draw.row + len(draw.drafts) + 1)]
    if rows != list(range(len(logits))):
        logits = logits[rows]
    found: Floats = logits.float().numpy()
    return found


def _choose(
    raw: Floats, draws: tuple[Draw, ...], rules: list[Rules], firsts: list[int]
) -> tuple[list[int], list[bool]]:
    """A token for each row, as if the drafts before it hold; and whether there is one at all."""
    logits = raw
    tokens, peaks = _largest(raw)
    sound = np.isfinite(peaks)
    edits = Edits(raw.shape[-1])
    for draw, own, first in zip(draws, rules, firsts, strict=True):
        if own.edits_logits:
            own.write(edits, first, draw.drafts)
    if edits:
        logits = raw.copy()
        edits.make(logits)
        tokens, peaks = _largest(logits)
        sound &= peaks > -np.inf
    lots = [
        (first + place, draw.sequence.num_tokens + place, own)
        for draw, own, first in zip(draws, rules, firsts, strict=True)
        if not own.is_greedy
        for place in range(len(draw.drafts) + 1)
        if sound[first + place]
    ]
    at_once = rows_at_once(raw.shape[-1])
    for begin in range(0, len(lots), at_once):
        rows, places, each = zip(*lots[begin : begin + at_once], strict=True)
        own_rows = np.array(rows)
        tokens[own_rows] = _drawn(logits[own_rows], peaks[own_rows], np.array(places), each)
    return tokens.tolist(), sound.tolist()


def _drawn(
    logits: Floats, peaks: Floats, places: NDArray[np.int64], rules: tuple[Rules, ...]
) -> NDArray[np.int64]:
    """A random token for each row: the one at ``places[i]`` of the sequence with ``rules[i]``."""
    params = [own.params for own in rules]
    weights = weights_of(logits, peaks, np.array([p.temperature for p in params]))
    if any(own.is_filtered for own in rules):
        cut(
            weights,
            top_k=np.array([p.top_k for p in params]),
            top_p=np.array([p.top_p for p in params]),
            min_p=np.array([p.min_p for p in params]),
        )
    keys = np.array([own.key for own in rules], np.uint64)
    return drawn(weights, keys_at(keys, places))


def _largest(logits: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Of each row the token with the largest logit, the lowest of equals, and its logit.

    NaN counts as larger than anything.
    """
    tokens = logits.argmax(-1)
    return tokens, logits[np.arange(len(logits)), tokens]


def _held(
    raw: Floats, first: int, draw: Draw, rules: Rules, tokens: list[int], sound: list[bool]
) -> Sampled:
    """The drafts that hold and one token more, from what was chosen in its rows, from ``first``."""
    taken: list[int] = []
    for place in range(len(draw.drafts) + 1):
        if not sound[first + place]:
            break  # if any token came before it, the next step finds the same
        taken.append(tokens[first + place])
        if draw.drafts[place : place + 1] != (taken[-1],):
            break
    ends = False
    if rules.matcher is not None:
        num_taken, ends = rules.matcher.taken(taken)
        del taken[num_taken:]
    if taken:
        return Sampled(token_ids=tuple(taken), ends=ends)
    # NaN is larger than anything, and a row of nothing but -inf has no largest.
    fault: Fault = "request" if np.isfinite(raw[first].max()) else "model"
    return Sampled(token_ids=(), error=_cause(raw[first], rules), fault=fault)


def _cause(raw: Floats, rules: Rules) -> str:
    """Why there is no token in a row."""
    if np.isnan(raw).any():
        return "the model's logits are not all numbers (NaN)"
    if np.isposinf(raw).any():
        return "the model's logits are not all finite (+inf)"
    if np.isneginf(raw).all():
        return "the model allows no token: all its logits are -inf"
    if rules.matcher is not None and rules.matcher.error:
        return f"structured_outputs: {rules.matcher.error}"
    return (
        "no token is allowed here: structured_outputs, bad_words and min_tokens together "
        "exclude them all"
    )


def _with_logprobs(
    raw: Floats, draws: tuple[Draw, ...], firsts: list[int], results: list[Sampled]
) -> list[Sampled]:
    """The same, with the log-probabilities of those that asked for them."""
    asked = [draw.sequence.request.params.logprobs for draw in draws]
    wanted = [
        (first + place, token_id, num_top)
        for first, num_top, result in zip(firsts, asked, results, strict=True)
        if num_top is not None
        for place, token_id in enumerate(result.token_ids)
    ]
    if not wanted:
        return results
    rows, token_ids, num_tops = (list(column) for column in zip(*wanted, strict=True))
    found = iter(logprobs_of(raw, rows, token_ids, num_tops))
    return [
        result
        if num_top is None
        else replace(result, logprobs=tuple(islice(found, len(result.token_ids))))
        for num_top, result in zip(asked, results, strict=True)
    ]
