"""A rank's part of a model besides its cache, of several that share it (tensor parallelism).

Weights are divided evenly: an estimate, since norms are kept by all. What each remembers is
``spec.ranks``' matter.
"""

from dataclasses import replace

from quire.memory.budget import Footprint
from quire.units import ceil_div


def rank_footprint(own: Footprint, num_ranks: int) -> Footprint:
    """A rank's part of the weights, and of what a step computes in between."""
    if num_ranks == 1:
        return own
    return replace(
        own,
        weights_bytes=ceil_div(own.weights_bytes, num_ranks),
        widest_rows=max(own.hidden_size, ceil_div(own.widest_rows, num_ranks)),
    )
