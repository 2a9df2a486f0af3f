"""Log-probabilities as the model has them: before penalties, masks, temperature and filters.

Logits come to the host as they are and the norm of their row beside them, so that ids, ranks and
order are the same to the bit on every device, and only the norm may be rounded otherwise.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.devices import Results
from quire.engine.sequence import TokenLogprobs

_LOW_BITS = 2**32 - 1


class Described(NamedTuple):
    """The numbers, among results, of rows that are told beside equally many likeliest tokens."""

    token_ids: int
    chosen: int
    ranks: int
    norms: int
    top_ids: int
    top: int

    def records(self, arrived: list[NDArray[Any]]) -> list[TokenLogprobs]:
        """Return what is said of each row, from the results that have arrived, each [R, …]."""
        norms = arrived[self.norms]
        return [
            TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
            for token_id, logprob, rank, top in zip(
                arrived[self.token_ids].tolist(),
                (arrived[self.chosen].astype(np.float64) - norms).tolist(),
                arrived[self.ranks].tolist(),
                map(
                    zip,
                    arrived[self.top_ids].tolist(),
                    (arrived[self.top].astype(np.float64) - norms[:, None]).tolist(),
                ),
                strict=True,
            )
        ]


def describe(logits: Tensor, token_ids: Tensor, num_top: int, results: Results) -> Described:
    """Send to the host one token of each row, beside the row's ``num_top`` likeliest.

    Shapes: logits [R, vocabulary], token_ids i64[R]. Equal tokens have the same rank, and the lower
    id comes first.
    """
    logits = (logits + 0.0).float()  # which makes -0 and 0 the same bits
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    peaks = logits.amax(-1)
    sums = (logits - peaks[:, None]).exp_().sum(-1, dtype=torch.float64)
    likeliest = _likeliest(logits, num_top)
    return Described(
        token_ids=results.add(token_ids),
        chosen=results.add(chosen),
        ranks=results.add((logits > chosen[:, None]).sum(-1, dtype=torch.int32) + 1),
        norms=results.add(peaks.double() + sums.log()),
        top_ids=results.add(likeliest.int()),
        top=results.add(logits.gather(1, likeliest)),
    )


def _likeliest(logits: Tensor, num_top: int) -> Tensor:
    """Find so many ids of each row, the likeliest first: f32[R, vocabulary] → i64[R, num_top].

    A logit and its id make one number, no two of which are equal: so the order among equals does
    not depend on how a device selects.
    """
    size = logits.shape[-1]
    bits = logits.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # whole numbers in the order of floats
    ordered <<= 32
    ordered |= _LOW_BITS - torch.arange(size, device=logits.device)
    largest = ordered.topk(num_top, -1).values
    return _LOW_BITS - (largest & _LOW_BITS)
