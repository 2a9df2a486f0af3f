"""The sampler's twin: one row at a time, in Python's own numbers, as the definitions are written.

``certain`` tells whether every comparison that decided something was clear of rounding.
"""

import math
from collections import Counter
from dataclasses import dataclass

from quire.engine.sequence import TokenLogprobs
from quire.sampling_params import SamplingParams

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 128  # tokens that race together, after their block has won
CLEAR = 1e-5  # relative; the sampler works in float32


def mixed(number: int) -> int:
    """splitmix64's last step."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % WORD
    return number ^ (number >> 31)


def number_of(seed: int, place: int, which: int) -> float:
    """Number ``which`` of a seeded sequence's token ``place``."""
    key = mixed((mixed(seed % WORD) + (place + 1) * GOLDEN) % WORD)
    return ((mixed((key + (which + 1) * GOLDEN) % WORD) >> 11) + 0.5) / 2**53


@dataclass
class Row:
    """What a token is chosen from: logits, and what came before."""

    logits: list[float]
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    bad_words: tuple[tuple[int, ...], ...] = ()
    eos: frozenset[int] = frozenset()
    index: int = 0
    certain: bool = True

    def edited(self) -> list[float]:
        """After what is barred, biases and penalties."""
        params, logits = self.params, list(self.logits)
        if params.allowed_token_ids is not None:
            for token in set(range(len(logits))) - set(params.allowed_token_ids):
                logits[token] = -math.inf
        for word in self.bad_words:
            *before, last = word
            first = len(self.output) - len(before)
            if first >= 0 and self.output[first:] == before:
                logits[last] = -math.inf
        if len(self.output) < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos)}
            for token in ends:
                if token < len(logits):
                    logits[token] = -math.inf
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        came = Counter(self.output)
        for token in {*self.prompt, *self.output}:
            if logits[token] > 0:
                logits[token] /= params.repetition_penalty
            else:
                logits[token] *= params.repetition_penalty
        for token, count in came.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        return logits

    def kept(self) -> dict[int, float]:
        """The tokens that the filters leave, by id, with their weights."""
        params, logits = self.params, self.edited()
        top = max(logits)
        weights = [math.exp((logit - top) / params.temperature) for logit in logits]
        floor = params.min_p
        self.decide(weights, floor)
        if params.top_k > 0:
            floor = max(floor, sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1])
        left = sorted((weight for weight in weights if weight >= floor * (1 - 1e-12)), reverse=True)
        total, before = math.fsum(left), 0.0
        for weight in left:
            self.certain &= params.top_p == 1 or abs(before / total - params.top_p) > CLEAR
            if params.top_p == 1 or before < params.top_p * total:
                last = weight
            before += weight
        floor = max(floor, last)
        return {t: weight for t, weight in enumerate(weights) if weight >= floor * (1 - 1e-9)}

    def decide(self, weights: list[float], floor: float) -> None:
        self.certain &= all(abs(weight - floor) > CLEAR * floor for weight in weights if floor)

    def token(self) -> int:
        params, logits = self.params, self.edited()
        if params.temperature == 0 or params.top_k == 1:
            best = sorted(logits, reverse=True)
            self.certain &= len(best) < 2 or best[0] == best[1] or best[0] - best[1] > CLEAR
            return logits.index(max(logits))
        kept = self.kept()
        place = len(self.prompt) + len(self.output)
        blocks: dict[int, float] = {}
        for token, weight in kept.items():
            blocks[token // BLOCK] = blocks.get(token // BLOCK, 0.0) + weight
        block = self.winner({BLOCK + own: weight for own, weight in blocks.items()}, place) - BLOCK
        inside = {t % BLOCK: weight for t, weight in kept.items() if t // BLOCK == block}
        return block * BLOCK + self.winner(inside, place)

    def winner(self, weights: dict[int, float], place: int) -> int:
        """The key whose weight, divided by its number from the exponential distribution, leads."""
        seed = (self.params.seed or 0) + self.index
        times = {k: -weight / math.log(number_of(seed, place, k)) for k, weight in weights.items()}
        best, *others = sorted(times.values(), reverse=True)
        self.certain &= not others or best - others[0] > CLEAR * best
        return max(times, key=lambda k: times[k])

    def logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        """Of the logits as they came."""
        norm = math.log(math.fsum(math.exp(logit) for logit in self.logits))
        order = sorted(range(len(self.logits)), key=lambda t: (-self.logits[t], t))
        likeliest = order if num_top < 0 else order[:num_top]
        return TokenLogprobs(
            token_id=token,
            logprob=self.logits[token] - norm,
            rank=1 + sum(logit > self.logits[token] for logit in self.logits),
            top=tuple((t, self.logits[t] - norm) for t in likeliest),
        )
