"""From logits to tokens: greedy, temperature, top-k, top-p, min-p, each row by its own parameters.

Each sequence draws from a generator of its own, so its text does not depend on its neighbours.
"""

import torch
from torch import Tensor

from quire.engine.sequence import SamplingParams, Sequence


class Sampler:
    """Chooses a token for each row; remembers a random state for each sequence that needs one."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._generators: dict[int, torch.Generator] = {}

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """One token id for each row of ``logits`` ([S, vocabulary])."""
        if not sequences:
            return []
        tokens = logits.argmax(-1)
        drawn = [i for i, seq in enumerate(sequences) if seq.request.params.temperature > 0]
        if drawn:
            params = [sequences[i].request.params for i in drawn]
            weights = filtered(logits[drawn].float(), params).softmax(-1)
            noise = torch.stack([self._noise(sequences[i], logits.shape[-1]) for i in drawn])
            # The largest weight / Exp(1) is a draw from the weights, all rows at once.
            tokens[drawn] = (weights / noise).argmax(-1)
        result: list[int] = tokens.tolist()
        return result

    def forget(self, sequence: Sequence) -> None:
        """Drop a finished sequence's random state."""
        self._generators.pop(sequence.seq_id, None)

    def _noise(self, sequence: Sequence, size: int) -> Tensor:
        if sequence.seq_id not in self._generators:
            seed = sequence.request.params.seed
            generator = torch.Generator()
            generator.manual_seed((self._seed + sequence.seq_id if seed is None else seed) % 2**64)
            self._generators[sequence.seq_id] = generator
        return torch.empty(size).exponential_(generator=self._generators[sequence.seq_id])


def filtered(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits ([S, vocabulary]) with temperature applied and what the filters exclude at -inf."""
    column = logits.new_tensor
    # From the largest logit down, so that a temperature close to 0 cannot divide it to infinity.
    temperature = column([p.temperature for p in params]).clamp(min=torch.finfo(logits.dtype).tiny)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    if not any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        return logits
    size = logits.shape[-1]
    ordered, order = logits.sort(
        dim=-1, descending=True, stable=True
    )  # of equals, the lower id first
    ranks = torch.arange(size)
    top_k = torch.tensor([min(p.top_k, size) or size for p in params])[:, None]
    ordered = ordered.masked_fill(ranks >= top_k, -torch.inf)
    weights = ordered.softmax(-1)
    # A token stays while the weight before it has not yet reached top_p: the first always does.
    before = weights.cumsum(-1) - weights
    # Infinity where top_p is off: in float32 the sum may reach 1 before the last token.
    drop = before >= column([p.top_p if p.top_p < 1 else torch.inf for p in params])[:, None]
    drop |= weights < weights[:, :1] * column([p.min_p for p in params])[:, None]
    drop[:, 0] = False
    return torch.full_like(logits, -torch.inf).scatter(
        -1, order, ordered.masked_fill(drop, -torch.inf)
    )
