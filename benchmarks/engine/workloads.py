"""What every engine is asked to do, the same tokens for all. Needs only the standard library.

Prompts are random token ids, so no two share a beginning. No request ends before its last token.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

VOCAB_SIZE = 8192
NUM_ORDINARY = VOCAB_SIZE - 3  # ids below this are no special tokens
TOKEN_BYTES = 2 * 28 * 8 * 128 * 2  # of keys and values, over all layers
SEED = 1234
WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    prompt: list[int]
    num_tokens: int  # to be given, neither more nor less


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    num_sequences: int
    prompt_tokens: int = 0  # of each; 0: mixed lengths

    @property
    def is_mixed(self) -> bool:
        return not self.prompt_tokens

    def requests(self, seed: int = SEED) -> list[Asked]:
        if self.is_mixed:
            return _mixed(self.num_sequences, seed)
        num_tokens = 48 if self.prompt_tokens <= 2048 else 24
        return [Asked(prompt=_ids(self.prompt_tokens, 7), num_tokens=num_tokens)]


def _mixed(num_requests: int, seed: int) -> list[Asked]:
    """Prompts of 32 to 1,024 tokens, log-uniform; outputs of 16 to 256, uniform."""
    dice = random.Random(seed)
    lengths = [
        (round(math.exp(dice.uniform(math.log(32), math.log(1024)))), dice.randint(16, 256))
        for _ in range(num_requests)
    ]
    return [
        Asked(prompt=_ids(prompt, 10_000 + i), num_tokens=output)
        for i, (prompt, output) in enumerate(lengths)
    ]


def _ids(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(NUM_ORDINARY) for _ in range(count)]


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(name="mixed-16", num_sequences=16),
        Workload(name="mixed-32", num_sequences=32),
        Workload(name="single-128", num_sequences=1, prompt_tokens=128),
        Workload(name="single-2048", num_sequences=1, prompt_tokens=2048),
        Workload(name="single-8192", num_sequences=1, prompt_tokens=8192),
    )
}
MOST_TOKENS = 8192 + 24  # of a sequence, prompt and output
