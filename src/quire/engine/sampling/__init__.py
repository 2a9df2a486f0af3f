"""From logits to tokens: what a sequence's parameters make of the model's word.

``sampler`` is the way through; each other module is one step of it. Everything works on all rows at
once, in numpy: it reads a vocabulary several times faster than torch does on a CPU.
"""

from quire.engine.sampling.sampler import Sampler

__all__ = ["Sampler"]
