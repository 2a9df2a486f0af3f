"""The kernel: a tile of queries, for the heads that share a key-value head, over a part of what
they read.

For each step of TOKENS tokens, with the online softmax in base 2:

    S = Q Kᵀ · factor       m' = max(m, max S)       P = 2 ** (S - m')
    l' = l · 2 ** (m - m') + Σ P                     O' = O · 2 ** (m - m') + P V

Rows of a tile are (query, head). Addresses are computed in 64 bits, from strides; a token that is
not to be read has none. ``backend`` says what a call's parameters are.
"""

import triton
import triton.language as tl

# -- walk ------------------------------------------------------------------------------------------

# Which queries a program has, and which tokens it walks over.
#
# A *tile* is some neighbouring queries of one sequence. Sequences with at most a tile of queries
# have one each; longer chunks have several, and their number depends on what only the device
# knows. So there are as many programs as there can be tiles, and each finds its own or ends.


@triton.jit
def sequence_of(tile, query_starts, num_seqs, QUERIES: tl.constexpr):
    """Find the sequence that has a tile; sequence i has begun query_starts[i] // QUERIES + i."""
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
    """Find (sequence, its first query, how many it has, the tile's first among them)."""
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
    """Find the first token that a query reads: ``live_range`` of the layer's spec."""
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
    """Find (a tile's first token, one past its last, tokens of each split).

    The walk begins at a multiple of TOKENS, which may be before the first. No split has fewer than
    LEAST steps, unless the walk has.
    """
    position = context - count + first
    start = live_start(position, reach, KIND)
    stop = tl.minimum(position + QUERIES, context)
    steps = tl.cdiv(stop - start // TOKENS * TOKENS, TOKENS)
    return start, stop, tl.maximum(tl.cdiv(steps, num_splits), LEAST) * TOKENS


# -- addresses -------------------------------------------------------------------------------------

# A cache's memory is given as an address and not as a tensor. Triton asks the driver about each
# tensor's first byte, and is refused where nothing is mapped there yet.


@triton.jit
def elements_at(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Make a pointer to elements of an address, a multiple of ALIGNED bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNED)


# -- elements --------------------------------------------------------------------------------------

# What the kernels multiply: elements as they are kept, made factors of a product, and rounded.
#
# Triton's interpreter has no products of bfloat16, cuts its bits off where a GPU rounds, and
# mistakes its smallest numbers. With ``EMULATED`` the bits are moved by hand, and the same factors
# travel in float32. float8 is converted by the GPU where it can (``FP8_CONVERTS``), else bit by
# bit.


@triton.jit
def rounded(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """Round float32 to another dtype: to nearest, ties to even."""
    if EMULATED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        y = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def wide(x, EMULATED: tl.constexpr):
    """Make float32 of any float."""
    if EMULATED and x.dtype == tl.bfloat16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def factor(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """Make float32 one side of a product in a dtype."""
    y = rounded(x, DTYPE, EMULATED)
    if EMULATED:
        y = wide(y, EMULATED)
    return y


@triton.jit
def stored_factor(
    x, KIND: tl.constexpr, DTYPE: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr
):
    """Make what is kept one side of a product. All codes are exact in all dtypes."""
    if KIND == "fp8":
        x = x.to(tl.float8e4nv, bitcast=True) if FP8_CONVERTS else from_fp8(x)
    return wide(x, EMULATED) if EMULATED else x.to(DTYPE)


@triton.jit
def from_fp8(codes):
    """Convert u8 to float32: the same exponent and mantissa, with another bias, 127 against 7."""
    codes = codes.to(tl.uint32)
    magnitude = codes & 0x7F
    bits = ((codes & 0x80) << 24) | (magnitude << 20)
    # A code's smallest numbers are float32's smallest here, which a GPU multiplies exactly.
    x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where(magnitude == 0x7F, float("nan"), x)


@triton.jit
def to_fp8(x):
    """Convert float32 within ±448, or NaN, to u8: to nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Below the smallest normal, 2 ** -6, codes are multiples of 2 ** -9: the last bit of 2 ** 14.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    # Else 20 of 23 bits of the mantissa go, and the bias is 7 and not 127.
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120 << 23)) >> 20
    code = tl.where(bits < (121 << 23), small, normal)
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


# -- attend ----------------------------------------------------------------------------------------


@triton.jit
def step(  # noqa: C901, PLR0913, PLR0915
    at, best, total, result, queries, turned, keys_at, values_at, key_scales_at, value_scales_at,
    table, range_start, start, end, position, low,
    k_row, k_token, k_dim, v_row, v_token, v_dim, scale_row, scale_token, scale, cap_in, cap_out,
    BLOCK: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_ROOM: tl.constexpr, VALUE_ROOM: tl.constexpr, LATENT: tl.constexpr, KEPT: tl.constexpr,
    CAPPED: tl.constexpr, SHORT_RANGE: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr,
    DTYPE: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Read the tokens from ``at`` on; not MASKED: every query reads every one of them.

    Return (the maximum, the sum of weights, the result) with them.
    """
    t = at + tl.arange(0, TOKENS)
    live = (t >= start) & (t < end)
    if BLOCK == 0:
        place = range_start + t * 0
        inside = t.to(tl.int64)
    else:
        if MASKED:
            place = tl.load(table + t // BLOCK, live, 0).to(tl.int64)
        else:
            place = tl.load(table + t // BLOCK).to(tl.int64)
        inside = (t % BLOCK).to(tl.int64)

    key_at = tl.arange(0, KEY_ROOM)
    value_at = tl.arange(0, VALUE_ROOM)
    from_k = keys_at + (place * k_row + inside * k_token)[:, None] + key_at[None, :] * k_dim
    from_v = values_at + (place * v_row + inside * v_token)[:, None] + value_at[None, :] * v_dim
    if MASKED:
        keys = tl.load(from_k, live[:, None] & (key_at < KEY)[None, :], 0)
        values = tl.load(from_v, live[:, None] & (value_at < VALUE)[None, :], 0)
    else:
        keys = load_wide(from_k, key_at, KEY, KEY_ROOM)
        values = load_wide(from_v, value_at, VALUE, VALUE_ROOM)
    keys = stored_factor(keys, KEPT, DTYPE, FP8_CONVERTS, EMULATED)
    values = stored_factor(values, KEPT, DTYPE, FP8_CONVERTS, EMULATED)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    value_scale = best  # where there is none, it is not used
    if KEPT == "int8":
        of_scale = place * scale_row + inside * scale_token
        key_scale = tl.load(key_scales_at + of_scale, live, 0.0)
        value_scale = tl.load(value_scales_at + of_scale, live, 0.0)
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
    if MASKED:
        if not CAPPED:
            scores = scores * scale
        reads = live[None, :] & (t[None, :] <= position[:, None]) & (t[None, :] >= low[:, None])
        scores = tl.where(reads, scores, float("-inf"))
        now = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # where nothing has been read yet
        weights = tl.exp2(scores - base[:, None])
    else:
        if CAPPED:
            now = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - now[:, None])
        else:  # scaled and shifted by one instruction
            now = tl.maximum(best, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - now[:, None])
        base = now
    by = tl.exp2(best - base)
    total = total * by + tl.sum(weights, 1)
    result = result * by[:, None]
    if SHORT_RANGE:
        # Scales are small, and float16's range is short: relative to the step's largest.
        top = tl.max(value_scale, 0)
        top = tl.where(top > 0.0, top, 1.0)
        weights = weights * (value_scale / top)[None, :]
        if MASKED:
            weights = tl.where(reads, weights, 0.0)
        weights = factor(weights, DTYPE, EMULATED)
        result += tl.dot(weights, values, input_precision="ieee") * top
    else:
        if KEPT == "int8":
            weights = weights * value_scale[None, :]
            if MASKED:
                weights = tl.where(reads, weights, 0.0)
        weights = factor(weights, DTYPE, EMULATED)
        result = tl.dot(weights, values, result, input_precision="ieee")
    return now, total, result


@triton.jit
def load_wide(place, at, WIDTH: tl.constexpr, ROOM: tl.constexpr):
    """Load entries of a width that need not fill its room."""
    return tl.load(place) if WIDTH == ROOM else tl.load(place, (at < WIDTH)[None, :], 0)


@triton.jit(  # what differs from step to step is never a reason to compile again
    do_not_specialize=[
        "k", "v", "k_scale", "v_scale",
        "table_seq", "num_seqs", "num_tiles", "num_queries", "num_splits", "above", "upto", "reach",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "tables", "sinks"],
)  # fmt: skip
def attend(  # noqa: C901, PLR0913, PLR0915
    out, part_out, part_max, part_sum, q,
    k: tl.int64, v: tl.int64, k_scale: tl.int64, v_scale: tl.int64, sinks,
    query_starts, context_lens, tables,
    out_token, out_head, q_token, q_head,
    k_row, k_head, k_token, k_dim, v_row, v_head, v_token, v_dim,
    scale_row, scale_head, scale_token,
    table_seq, num_seqs, num_tiles, num_queries, num_splits, above, upto, reach,
    scale, cap_in, cap_out,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, SHARING: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_ROOM: tl.constexpr, VALUE_ROOM: tl.constexpr,
    STORED: tl.constexpr, ALIGNED: tl.constexpr,
    READS: tl.constexpr, LATENT: tl.constexpr, KEPT: tl.constexpr, CAPPED: tl.constexpr,
    SHORT_RANGE: tl.constexpr, SINKS: tl.constexpr, SEVERAL: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, LEAST: tl.constexpr,
    DTYPE: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Attend: a tile of queries over one split of what it reads, as above."""
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
    turned = queries  # what meets the rotary key, where there is one
    if LATENT:
        mask = exists[:, None] & (value_at < VALUE)[None, :]
        turned = wide(tl.load(from_q + KEY + value_at[None, :], mask, 0.0), EMULATED)
        turned = factor(turned, DTYPE, EMULATED)

    keys_at = elements_at(k, STORED, ALIGNED) + kv_head.to(tl.int64) * k_head
    values_at = elements_at(v, STORED, ALIGNED) + kv_head.to(tl.int64) * v_head
    key_scales_at = keys_at  # where there are some
    value_scales_at = values_at
    if KEPT == "int8":
        key_scales_at = elements_at(k_scale, tl.float32, 4) + kv_head.to(tl.int64) * scale_head
        value_scales_at = elements_at(v_scale, tl.float32, 4) + kv_head.to(tl.int64) * scale_head
    table = tables + seq.to(tl.int64) * table_seq
    range_start = seq.to(tl.int64)
    if BLOCK == 0:  # a range: the table's one entry is where it begins
        range_start = tl.load(table).to(tl.int64)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, OUT_ROOM], tl.float32)
    stop_masked = end
    if SEVERAL:
        # Steps of which every query reads every token need no mask. They are most of a long
        # chunk's; the steps at the walk's ends come first, in a row.
        last = tl.minimum(context - count + first + QUERIES, context) - 1
        lowest = tl.maximum(start, live_start(last, reach, READS))
        whole_from = tl.minimum(tl.maximum(tl.cdiv(lowest, TOKENS) * TOKENS, walk), end)
        whole_to = tl.minimum(end, context - count + first + 1) // TOKENS * TOKENS
        whole_to = tl.maximum(whole_to, whole_from)
        stop_masked = whole_from + (end - whole_to)
    for masked in range(walk, stop_masked, TOKENS):
        at = masked
        if SEVERAL:
            at = tl.where(masked < whole_from, masked, masked - whole_from + whole_to)
        best, total, result = step(
            at, best, total, result, queries, turned, keys_at, values_at, key_scales_at,
            value_scales_at, table, range_start, start, end, position, low,
            k_row, k_token, k_dim, v_row, v_token, v_dim, scale_row, scale_token,
            scale, cap_in, cap_out,
            BLOCK, KEY, VALUE, KEY_ROOM, VALUE_ROOM, LATENT, KEPT, CAPPED, SHORT_RANGE, True,
            TOKENS, DTYPE, FP8_CONVERTS, EMULATED,
        )  # fmt: skip
    if SEVERAL:
        for at in range(whole_from, whole_to, TOKENS):
            best, total, result = step(
                at, best, total, result, queries, turned, keys_at, values_at, key_scales_at,
                value_scales_at, table, range_start, start, end, position, low,
                k_row, k_token, k_dim, v_row, v_token, v_dim, scale_row, scale_token,
                scale, cap_in, cap_out,
                BLOCK, KEY, VALUE, KEY_ROOM, VALUE_ROOM, LATENT, KEPT, CAPPED, SHORT_RANGE, False,
                TOKENS, DTYPE, FP8_CONVERTS, EMULATED,
            )  # fmt: skip

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


# -- join ------------------------------------------------------------------------------------------

# The second kernel: the parts of a query's walk, joined.
#
#     m = max m_i      l = Σ l_i · 2 ** (m_i - m)      O = Σ O_i · 2 ** (m_i - m) / l
#
# The parts are joined in their order. A part that no program had to walk over is not read.


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
    """Join the splits of a query and a head."""
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


# -- write -----------------------------------------------------------------------------------------

# The write side's kernel: each token's key and value into its slot, quantized on the way.
#
# Source of the formats: ``quire.kv.storage.entries``, whose bits it reproduces (products and sums
# must not be fused for that). A token with the slot -1 is kept nowhere.


@triton.jit(
    do_not_specialize=["k", "v", "k_scale", "v_scale"], do_not_specialize_on_alignment=["slots"]
)
def write(  # noqa: PLR0913
    slots, from_k, from_v, k: tl.int64, v: tl.int64, k_scale: tl.int64, v_scale: tl.int64,
    from_k_token, from_k_head, from_v_token, from_v_head,
    k_row, k_head, k_token, k_dim, v_row, v_head, v_token, v_dim,
    scale_row, scale_head, scale_token,
    PER_ROW: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_ROOM: tl.constexpr, VALUE_ROOM: tl.constexpr,
    STORED: tl.constexpr, ALIGNED: tl.constexpr,
    KEPT: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Write the key and the value of a token, for some heads, into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    row, inside = slot // PER_ROW, slot % PER_ROW
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    own = head < KV_HEADS
    scale_at = row * scale_row + inside * scale_token + head * scale_head

    at = tl.arange(0, KEY_ROOM)[None, :]
    mask = own[:, None] & (at < KEY)
    x = tl.load(from_k + token * from_k_token + head[:, None] * from_k_head + at, mask, 0.0)
    to = elements_at(k, STORED, ALIGNED)
    to += row * k_row + inside * k_token + head[:, None] * k_head + at * k_dim
    _store(to, k_scale, scale_at, x, own, mask, KEPT, FP8_CONVERTS, EMULATED)

    at = tl.arange(0, VALUE_ROOM)[None, :]
    mask = own[:, None] & (at < VALUE)
    x = tl.load(from_v + token * from_v_token + head[:, None] * from_v_head + at, mask, 0.0)
    to = elements_at(v, STORED, ALIGNED)
    to += row * v_row + inside * v_token + head[:, None] * v_head + at * v_dim
    _store(to, v_scale, scale_at, x, own, mask, KEPT, FP8_CONVERTS, EMULATED)


@triton.jit
def _store(  # noqa: PLR0913
    to, scales, scale_at, x, own, mask,
    KEPT: tl.constexpr, FP8_CONVERTS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Store x [heads, width] as it is kept."""
    if KEPT == "int8":
        x = wide(x, EMULATED)
        # As integers, floats without a sign are in the same order, and NaN comes last.
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
        most = tl.full(largest.shape, 127.0, tl.float32)
        to_scales = elements_at(scales, tl.float32, 4) + scale_at
        tl.store(to_scales, tl.div_rn(largest, most), own)
        y = x * tl.div_rn(most, largest)[:, None]
        y = tl.where(y == y, y, 0.0)
        y = tl.minimum(tl.maximum(y, -127.0), 127.0)
        y = (y + 12582912.0) - 12582912.0  # 1.5 · 2 ** 23: nothing is left behind the point
        tl.store(to, y.to(tl.int8), mask)
    elif KEPT == "fp8":
        x = wide(x, EMULATED)
        y = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
        code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if FP8_CONVERTS else to_fp8(y)
        tl.store(to, code, mask)
    else:
        tl.store(to, rounded(wide(x, EMULATED), to.dtype.element_ty, EMULATED), mask)


# -- move ------------------------------------------------------------------------------------------

# The kernels that bring rows into one batch and back: a program for a part of each row.
#
# Bits are copied, whatever they stand for. A row with the slot -1 is read as zeros and written
# nowhere, so that nothing has to lie behind it.


@triton.jit(do_not_specialize=["held"], do_not_specialize_on_alignment=["slots"])
def take(
    out, held: tl.int64, slots, held_row, length, ELEMENTS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Copy a part of the row of a slot out."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    at = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = tl.where(slot < 0, 0, length)
    from_row = elements_at(held, out.dtype.element_ty, ALIGNED) + slot * held_row
    x = tl.load(from_row + at, at < there, 0)
    tl.store(out + row * length + at, x, at < length)


@triton.jit(do_not_specialize=["held"], do_not_specialize_on_alignment=["slots"])
def put(
    held: tl.int64, new, slots, held_row, length, ELEMENTS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Copy a part of a row into its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    at = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    own = at < length
    x = tl.load(new + row * length + at, own)
    to_row = elements_at(held, new.dtype.element_ty, ALIGNED) + slot * held_row
    tl.store(to_row + at, x, own)
