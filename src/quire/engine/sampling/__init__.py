"""From logits to tokens: what a sequence's parameters make of the model's word.

``sampler`` is the way through; each other module is one step of it. All rows are worked on at once,
by torch, where the logits lie. On a processor numpy does what it does several times faster than
torch, over the same memory: the largest, exp and sorting.
"""

from quire.engine.sampling.sampler import LogitsSampler
from quire.sampling_params import SamplingParams

# Of all kinds of rows these take the most memory on a device: edited, sorted, and told of. Only
# the log-probabilities of a whole vocabulary take more, for what is to come back.
DEAREST = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5, logprobs=1)

__all__ = ["DEAREST", "LogitsSampler"]
