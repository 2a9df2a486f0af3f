"""Which queries a program has, and which tokens it walks over.

A *tile* is some neighbouring queries of one sequence. Sequences with at most a tile of queries have
one each; longer chunks have several, and their number depends on what only the device knows. So
there are as many programs as there can be tiles, and each finds its own or ends.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_of(tile, query_starts, num_seqs, QUERIES: tl.constexpr):
    """The sequence that has a tile, where sequence i has begun query_starts[i] // QUERIES + i."""
    low = tile * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_starts + middle) // QUERIES + middle
        if before <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def queries_of(tile, query_starts, num_seqs, QUERIES: tl.constexpr, SEVERAL: tl.constexpr):
    """(sequence, its first query, how many it has, the tile's first among them)."""
    if SEVERAL:
        seq = sequence_of(tile, query_starts, num_seqs, QUERIES)
        begin = tl.load(query_starts + seq)
        first = (tile - begin // QUERIES - seq) * QUERIES
    else:
        seq = tile
        begin = tl.load(query_starts + seq)
        first = tile * 0
    return seq, begin, tl.load(query_starts + seq + 1) - begin, first


@triton.jit
def live_start(position, reach, KIND: tl.constexpr):
    """The first token that a query reads: ``live_range`` of the layer's spec."""
    if KIND == "sliding":
        start = tl.maximum(position - reach + 1, 0)
    elif KIND == "chunked":
        start = position - position % reach
    else:
        start = position * 0
    return start


@triton.jit
def walk_of(  # noqa: PLR0913
    context, count, first, reach, num_splits,
    KIND: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """(the first token that a tile reads, one past the last, tokens of each split).

    The walk begins at a multiple of TOKENS, which may be before the first. No split has fewer than
    LEAST steps, unless the walk has.
    """
    position = context - count + first
    start = live_start(position, reach, KIND)
    stop = tl.minimum(position + QUERIES, context)
    steps = tl.cdiv(stop - start // TOKENS * TOKENS, TOKENS)
    return start, stop, tl.maximum(tl.cdiv(steps, num_splits), LEAST) * TOKENS
