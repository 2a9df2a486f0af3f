"""Token ids for a trace that has only lengths and hash ids: two prompts share what their ids share.

A prefix is told by where it begins to differ, so a few telling ids are enough: a stretch of tokens
that stands for one hash id begins with that id, a prompt without any with a number of its own, and
all other tokens are alike. Nothing is remembered from prompt to prompt.

What is generated is told by its sequence, and is like nothing else: a trace does not say what its
outputs were, so none is found again.
"""

from quire.engine.sequence import Sequence
from quire.traces import TraceRequest

_FILLER = 0
_NUM_IDS = 2**31  # that an int32 holds, from 0 on: a trace's
_NUM_OWN = 2**30  # below 0: odd ones are for one prompt's own tokens, even ones for outputs


def prompt_of(request: TraceRequest, number: int, *, longest: int | None = None) -> tuple[int, ...]:
    """The prompt of the ``number``-th request, up to ``longest`` tokens; at least one."""
    num_tokens = max(1, request.input_tokens)
    if longest is not None:
        num_tokens = min(num_tokens, longest)
    each = max(1, request.id_tokens)
    ids = request.hash_ids[: -(-num_tokens // each)]
    token_ids: list[int] = []
    for hash_id in ids:
        token_ids += _stretch(hash_id, each)
    if len(token_ids) < num_tokens:  # tokens beyond its hash ids are its own
        rest = num_tokens - len(token_ids)
        token_ids.append(-1 - 2 * (number % _NUM_OWN))
        token_ids += [_FILLER] * (rest - 1)
    del token_ids[num_tokens:]
    return tuple(token_ids)


def _stretch(hash_id: int, num_tokens: int) -> list[int]:
    """An id of up to 63 bits in two tokens, as int32 holds them."""
    low, high = hash_id % _NUM_IDS, hash_id // _NUM_IDS
    if num_tokens == 1:
        return [low]
    return [low, high if high < _NUM_IDS else high - 2 * _NUM_IDS, *[_FILLER] * (num_tokens - 2)]


def output_id(sequence: Sequence) -> int:
    """What every token is that this sequence generates."""
    return -2 - 2 * (sequence.seq_id % _NUM_OWN)
