"""The second kernel: the parts of a query's walk, joined.

    m = max m_i      l = Σ l_i · 2 ** (m_i - m)      O = Σ O_i · 2 ** (m_i - m) / l

The parts are joined in their order. A part that no program had to walk over is not read.
"""

import triton
import triton.language as tl

from quire.attention.triton.elements import rounded, wide
from quire.attention.triton.walk import queries_of, walk_of


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_tiles", "num_queries", "num_splits", "above", "upto", "reach",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "sinks"],
)  # fmt: skip
def join(  # noqa: PLR0913
    out, part_out, part_max, part_sum, sinks, query_starts, context_lens,
    out_token, out_head, num_seqs, num_tiles, num_queries, num_splits, above, upto, reach,
    NUM_HEADS: tl.constexpr, OUT: tl.constexpr, OUT_ROOM: tl.constexpr,
    READS: tl.constexpr, SINKS: tl.constexpr, SEVERAL: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, TOGETHER: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // num_queries
    head = tl.program_id(1)
    seq, begin, count, first = queries_of(tile, query_starts, num_seqs, QUERIES, SEVERAL)
    query = first + tl.program_id(0) % num_queries
    if (count <= above) | (count > upto) | (query >= count):
        return
    context = tl.load(context_lens + seq)
    start, stop, share = walk_of(
        context, count, first, reach, num_splits, READS, QUERIES, TOKENS, LEAST
    )
    # At least one, which of padding is zeros.
    used = tl.maximum(tl.cdiv(stop - start // TOKENS * TOKENS, share), 1)
    token = (begin + query).to(tl.int64)
    each = num_tiles.to(tl.int64) * num_queries * NUM_HEADS
    own = tl.program_id(0).to(tl.int64) * NUM_HEADS + head

    every = tl.arange(0, MOST)
    top = tl.max(tl.load(part_max + every * each + own, every < used, float("-inf")), 0)
    total = 0.0
    if SINKS:
        sink = wide(tl.load(sinks + head), EMULATED) * 1.4426950408889634
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    out_at = tl.arange(0, OUT_ROOM)
    result = tl.zeros([OUT_ROOM], tl.float32)
    for at in range(0, used, TOGETHER):
        split = at + tl.arange(0, TOGETHER)
        place = split * each + own
        by = tl.exp2(tl.load(part_max + place, split < used, float("-inf")) - top)
        total += tl.sum(by * tl.load(part_sum + place, split < used, 0.0), 0)
        mask = (split < used)[:, None] & (out_at < OUT)[None, :]
        parts = tl.load(part_out + place[:, None] * OUT + out_at[None, :], mask, 0.0)
        result += tl.sum(by[:, None] * parts, 0)
    result = rounded(result / total, out.dtype.element_ty, EMULATED)
    tl.store(out + token * out_token + head * out_head + out_at, result, out_at < OUT)
