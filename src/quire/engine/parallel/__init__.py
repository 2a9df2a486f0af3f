"""Tensor parallelism: one model in several processes, the ranks, each with a part of every layer.

Rank 0 is the process that the user started. It has the scheduler, the accounting and the sampler,
as without tensor parallelism; the others are its children. They hold a part of the weights and of
the KV memory, and do what they are told (``messages``): carry out the same changes, compute the
same step. Nothing is decided there, so one accounting holds for all.

How a model is cut, Transformers' own plan says. ``torch.distributed`` is spoken with here alone.
"""
