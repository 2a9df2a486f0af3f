"""The kernel: a tile of queries, for the heads that share a key-value head, over a part of what
they read.

For each step of TOKENS tokens, with the online softmax in base 2:

    S = Q Kᵀ · factor       m' = max(m, max S)       P = 2 ** (S - m')
    l' = l · 2 ** (m - m') + Σ P                     O' = O · 2 ** (m - m') + P V

Rows of a tile are (query, head). Addresses are computed in 64 bits, from strides; what is not to be
read has none. What a call says is ``call``'s to know, and which tokens are walked over, ``walk``'s.
"""

import triton
import triton.language as tl

from quire.attention.triton.elements import factor, rounded, stored_factor, wide
from quire.attention.triton.walk import live_start, queries_of, walk_of


@triton.jit(  # what differs from step to step is never a reason to compile again
    do_not_specialize=[
        "table_seq", "num_seqs", "num_tiles", "num_queries", "num_splits", "above", "upto", "reach",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "tables", "sinks"],
)  # fmt: skip
def attend(  # noqa: C901, PLR0913, PLR0915
    out, part_out, part_max, part_sum, q, k, v, k_scale, v_scale, sinks,
    query_starts, context_lens, tables,
    out_token, out_head, q_token, q_head,
    k_row, k_head, k_token, k_dim, v_row, v_head, v_token, v_dim,
    scale_row, scale_head, scale_token,
    table_seq, num_seqs, num_tiles, num_queries, num_splits, above, upto, reach,
    scale, cap_in, cap_out,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, SHARING: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_ROOM: tl.constexpr, VALUE_ROOM: tl.constexpr,
    READS: tl.constexpr, LATENT: tl.constexpr, KEPT: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SEVERAL: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, LEAST: tl.constexpr,
    DTYPE: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (SHARING + ROWS - 1) // ROWS  # of the heads that share one
    HEADS: tl.constexpr = (SHARING + PARTS - 1) // PARTS  # in a tile
    QUERIES: tl.constexpr = ROWS // HEADS
    OUT: tl.constexpr = KEY if LATENT else VALUE
    OUT_ROOM: tl.constexpr = KEY_ROOM if LATENT else VALUE_ROOM

    program = tl.program_id(0)
    split = tl.program_id(1)
    kv_head = program % (KV_HEADS * PARTS) // PARTS
    part = program % PARTS
    tile = program // (KV_HEADS * PARTS)
    if SEVERAL:  # the last ones of a chunk read most, so they begin
        tile = tl.num_programs(0) // (KV_HEADS * PARTS) - 1 - tile
    seq, begin, count, first = queries_of(tile, query_starts, num_seqs, QUERIES, SEVERAL)
    if (count <= above) | (count > upto) | (first >= count):
        return
    context = tl.load(context_lens + seq)
    start, stop, share = walk_of(
        context, count, first, reach, num_splits, READS, QUERIES, TOKENS, LEAST
    )
    walk = start // TOKENS * TOKENS + split * share
    if (split > 0) & (walk >= stop):
        return
    end = tl.minimum(walk + share, stop)

    row = tl.arange(0, ROWS)
    query = first + row // HEADS
    shared = part * HEADS + row % HEADS
    exists = (row < QUERIES * HEADS) & (query < count) & (shared < SHARING)
    position = context - count + query
    low = live_start(position, reach, READS)
    token = (begin + query).to(tl.int64)
    head = kv_head * SHARING + shared
    key_at = tl.arange(0, KEY_ROOM)
    value_at = tl.arange(0, VALUE_ROOM)
    out_at = tl.arange(0, OUT_ROOM)

    from_q = q + (token * q_token + head * q_head)[:, None]
    mask = exists[:, None] & (key_at < KEY)[None, :]
    queries = wide(tl.load(from_q + key_at[None, :], mask, 0.0), EMULATED)
    queries = factor(queries, DTYPE, EMULATED)
    if LATENT:  # what meets the rotary key
        mask = exists[:, None] & (value_at < VALUE)[None, :]
        turned = wide(tl.load(from_q + KEY + value_at[None, :], mask, 0.0), EMULATED)
        turned = factor(turned, DTYPE, EMULATED)

    k += kv_head.to(tl.int64) * k_head
    v += kv_head.to(tl.int64) * v_head
    if KEPT == "int8":
        k_scale += kv_head.to(tl.int64) * scale_head
        v_scale += kv_head.to(tl.int64) * scale_head
    table = tables + seq.to(tl.int64) * table_seq
    if BLOCK == 0:  # a range: the table's one entry is where it begins
        range_start = tl.load(table).to(tl.int64)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, OUT_ROOM], tl.float32)
    for at in range(walk, end, TOKENS):
        t = at + tl.arange(0, TOKENS)
        live = (t >= start) & (t < end)
        if BLOCK == 0:
            place = range_start + t * 0
            inside = t.to(tl.int64)
        else:
            place = tl.load(table + t // BLOCK, live, 0).to(tl.int64)
            inside = (t % BLOCK).to(tl.int64)

        key_mask = live[:, None] & (key_at < KEY)[None, :]
        value_mask = live[:, None] & (value_at < VALUE)[None, :]
        from_k = k + (place * k_row + inside * k_token)[:, None] + key_at[None, :] * k_dim
        from_v = v + (place * v_row + inside * v_token)[:, None] + value_at[None, :] * v_dim
        keys = stored_factor(tl.load(from_k, key_mask, 0), KEPT, DTYPE, FP8_CONVERTS, EMULATED)
        values = stored_factor(tl.load(from_v, value_mask, 0), KEPT, DTYPE, FP8_CONVERTS, EMULATED)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if KEPT == "int8":
            of_scale = place * scale_row + inside * scale_token
            key_scale = tl.load(k_scale + of_scale, live, 0.0)
            value_scale = tl.load(v_scale + of_scale, live, 0.0)
            scores = scores * key_scale[None, :]
        if LATENT:
            rotary = tl.dot(turned, tl.trans(values), input_precision="ieee")
            if KEPT == "int8":
                rotary = rotary * value_scale[None, :]
                value_scale = key_scale
            scores = scores + rotary
            values = keys
        if CAPPED:  # tanh x = 1 - 2 / (e ** 2x + 1)
            scores = cap_out * (1.0 - 2.0 / (tl.exp2(scores * cap_in) + 1.0))
        else:
            scores = scores * scale
        reads = live[None, :] & (t[None, :] <= position[:, None]) & (t[None, :] >= low[:, None])
        scores = tl.where(reads, scores, float("-inf"))

        now = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # where nothing has been read yet
        weights = tl.exp2(scores - base[:, None])
        by = tl.exp2(best - base)
        total = total * by + tl.sum(weights, 1)
        best = now
        result = result * by[:, None]
        if KEPT == "int8" and tl.float16 == DTYPE:
            # Scales are small, and float16's range is short: relative to the step's largest.
            top = tl.max(value_scale, 0)
            top = tl.where(top > 0.0, top, 1.0)
            weights = tl.where(reads, weights * (value_scale / top)[None, :], 0.0)
            weights = factor(weights, DTYPE, EMULATED)
            result += tl.dot(weights, values, input_precision="ieee") * top
        else:
            if KEPT == "int8":
                weights = tl.where(reads, weights * value_scale[None, :], 0.0)
            weights = factor(weights, DTYPE, EMULATED)
            result = tl.dot(weights, values, result, input_precision="ieee")

    # A sequence of no tokens is padding, whose result is zeros.
    total = tl.where(context > 0, total, 1.0)
    mask = exists[:, None] & (out_at < OUT)[None, :]
    if SPLIT:
        best = tl.where(context > 0, best, 0.0)
        own = (split.to(tl.int64) * num_tiles + tile) * num_queries + row // HEADS
        at = own * (KV_HEADS * SHARING) + head
        tl.store(part_max + at, best, exists)
        tl.store(part_sum + at, total, exists)
        tl.store(part_out + at[:, None] * OUT + out_at[None, :], result, mask)
    else:
        if SINKS:
            sink = wide(tl.load(sinks + head, exists, 0.0), EMULATED) * 1.4426950408889634
            top = tl.maximum(best, sink)
            by = tl.exp2(best - top)
            total = total * by + tl.exp2(sink - top)
            result = result * by[:, None]
        total = tl.where(exists, total, 1.0)
        result = rounded(result / total[:, None], out.dtype.element_ty, EMULATED)
        to = out + (token * out_token + head * out_head)[:, None] + out_at[None, :]
        tl.store(to, result, mask)
