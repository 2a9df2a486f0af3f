"""Tensor parallelism: one model in several processes, the ranks, each with a part of every layer.

Rank 0 is the process that the user started. It has the scheduler, the accounting and the sampler,
as without tensor parallelism; the other ranks are its children. They hold a part of the weights and
of the KV memory, and carry out rank 0's calls (``Worker``): the same changes, the same step. They
decide nothing, so one accounting holds for all.

Transformers' own plan says how a model is cut. No other room uses ``torch.distributed``.
"""
